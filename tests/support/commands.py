"""The command line, as a person types it: in this process, or in one of its own where the process is the point."""

import contextlib
import os
import pty
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from click.testing import CliRunner

from quantdrift.cli.main import main

_LIMIT_S = 120


def invoked(*arguments: str, directory: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `quantdrift ARGUMENTS` in this process, outside of any event loop, and return what became of it.

    A process of its own would take a second or more for its imports.

    Parameters
    ----------
    arguments
        As they are typed.
    directory
        Where they are typed.
    variables
        Of the environment, beside those of this process.
    """
    with contextlib.chdir(directory):
        done = CliRunner(env=variables).invoke(main, arguments, prog_name="quantdrift")
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


def started(*arguments: str, directory: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `quantdrift ARGUMENTS` in a process of its own to its end; else as `invoked`."""
    return subprocess.run(
        [sys.executable, "-m", "quantdrift", *arguments],
        cwd=directory,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )


def typed(
    arguments: Sequence[str], answers: Sequence[tuple[str, str]], *, directory: Path
) -> tuple[int, str]:
    """Run `quantdrift ARGUMENTS` in a terminal of its own, answer its questions, and return the exit code and what it showed.

    Parameters
    ----------
    arguments
        As they are typed.
    answers
        Each question as it is shown, and what is typed then, before Enter.
    directory
        Where they are typed.
    """
    pid, terminal = pty.fork()
    if not pid:  # the child: nothing of pytest may run in it
        try:
            os.chdir(directory)
            os.execve(
                sys.executable,
                [sys.executable, "-m", "quantdrift", *arguments],
                {**os.environ, "TERM": "dumb"},
            )
        finally:
            os._exit(127)
    shown = ""
    read_until = 0
    try:
        for question, answer in answers:
            while question not in shown[read_until:]:
                shown += _read(terminal, shown)
            read_until = shown.index(question, read_until) + len(question)
            os.write(terminal, f"{answer}\n".encode())
        while part := _rest(terminal):
            shown += part
    finally:
        os.close(terminal)
        _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), shown


def _read(terminal: int, shown: str) -> str:
    """Return what comes next in a terminal."""
    ready, _, _ = select.select([terminal], [], [], _LIMIT_S)
    part = _rest(terminal) if ready else ""
    assert part, f"the command ended, or asked nothing more:\n{shown}"
    return part


def _rest(terminal: int) -> str:
    try:
        return os.read(terminal, 65_536).decode(errors="replace")
    except OSError:  # the end, as Linux tells it of a terminal
        return ""
