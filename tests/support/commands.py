"""The command line, as a person types it: in this process, or in one of its own where the process is the point."""

import contextlib
import os
import subprocess
import sys
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
