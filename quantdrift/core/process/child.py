"""Child processes: a command that ends when its parent ends, and a child that is restarted whenever it ends."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from quantdrift.core import passed_secrets
from quantdrift.core.process.backoff import Backoff
from quantdrift.core.process.run import Stop

_LOG = logging.getLogger(__name__)

INSTANCE: Final = "QUANTDRIFT_INSTANCE"
"""Environment variable whose value /readyz returns, so that a parent can identify its own child process."""
INSTANCE_HEADER: Final = "Quantdrift-Instance"

_FIRST_PAUSE_S = 0.1
_LAST_PAUSE_S = 10.0
_STEADY_S = 30.0
_LONGEST_LINE = 65_536
_LAST_OUTPUT_S = 1.0  # wait for the rest of its output after a child ended

# Runs in the child before the program, because no Python code may run between fork and exec of a threaded parent.
# argv: pid of the parent, signal, program, its arguments. The pid shows whether the parent died in the meantime.
_WRAPPER = """\
import ctypes, os, sys
prctl = getattr(ctypes.CDLL(None), "prctl", None)
if prctl is not None:
    prctl(1, int(sys.argv[2]), 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[3], sys.argv[3:])
"""


def ending_with_parent(command: Sequence[str], number: signal.Signals = signal.SIGTERM) -> list[str]:
    """Return the command that runs `command` with the same process id, and gets a signal when its parent ends.

    It uses PR_SET_PDEATHSIG of Linux; on other systems no signal is sent. The kernel sends it when the *thread* that
    started the child ends: start children from the main thread.

    Parameters
    ----------
    command
        Absolute path of the program, then its arguments.
    """
    return [sys.executable, "-I", "-S", "-c", _WRAPPER, str(os.getpid()), str(int(number)), *command]


def exit_text(code: int) -> str:
    """Return in words how a process with this exit code ended."""
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def exit_label(code: int) -> str:
    """Return how a process ended as a label of a metric: `exit_1`, or the name of a signal such as `SIGKILL`."""
    if code >= 0:
        return f"exit_{code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal_{-code}"


class Child:
    """One child process, which is restarted whenever it ends.

    It runs in its own session, so that Ctrl-C reaches only the parent, which stops its children in order.

    Parameters
    ----------
    name
        Name in logs and metrics.
    module
        Module that `python -m` runs.
    environment
        The complete environment. The child gets what may be a secret by a file descriptor, also when it is restarted:
        it reads `quantdrift.core.passed_secrets.variables`.
    fds
        File descriptors that it inherits.
    orphan
        Signal that it gets when the parent dies.
    on_death
        Called when it ended without being asked to, with the reason as a label of a metric: see `label`.
    on_start
        Called with its process id at each start; what it returns is ignored.
    final
        Exit code after which it is not restarted, because a person must act first. None: always restart.
    longest_pause_s
        Limit of the pauses before restarts.
    on_restart
        Called between the end and the next start that `restart` asked for; that end is no death.
    on_end
        Called after each end with how it ended ("ended with exit code 1"), its exit code (None if it could not be
        started), and the pause before the restart. None: log these.
    on_output
        Called with each line of output, by file descriptor (1: stdout, 2: stderr). The child inherits the others from
        the parent; a child that must never wait for its parent inherits both.

    Attributes
    ----------
    final : int | None
        As above; it may be changed while the child runs.
    environment : dict[str, str]
        As above; a change takes effect at the next start.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        fds: Sequence[int] = (),
        orphan: signal.Signals = signal.SIGTERM,
        on_death: Callable[[str], None] = lambda _: None,
        on_start: Callable[[int], object] = lambda _: None,
        on_restart: Callable[[], object] = lambda: None,
        final: int | None = None,
        longest_pause_s: float = _LAST_PAUSE_S,
        on_end: Callable[[str, int | None, float], None] | None = None,
        on_output: Mapping[int, Callable[[bytes], None]] | None = None,
    ) -> None:
        self.name = name
        self.final = final
        self._command = ending_with_parent([sys.executable, "-P", "-m", module, *arguments], orphan)
        self._fds = tuple(fds)
        self.environment = dict(environment)
        self._on_death = on_death
        self._on_start = on_start
        self._on_restart = on_restart
        self._backoff = Backoff(_FIRST_PAUSE_S, longest_pause_s)
        self._on_end = on_end or self._log
        self._on_output = dict(on_output or {})
        self._process: asyncio.subprocess.Process | None = None
        self._ending = Stop()
        self._why_replaced = ""
        self._is_restarted = False

    @property
    def pid(self) -> int | None:
        """Process id; None while it does not run."""
        return None if self._process is None else self._process.pid

    def label(self, code: int) -> str:
        """Return why it ended, as a label of a metric: `hung` if `replace` killed it, else as `exit_label`."""
        return "hung" if self._why_replaced else exit_label(code)

    async def run(self) -> int:
        """Start it, and restart it after a growing pause whenever it ends.

        Returns
        -------
        int
            The last exit code, once it ended on request or with the exit code `final`.
        """
        loop = asyncio.get_running_loop()
        while True:
            started_s = loop.time()
            try:
                code = await self._run_once()
            except OSError as error:  # out of memory, processes or files: a retry may succeed
                pause_s = self._backoff.next_s()
                self._on_end(f"cannot be started ({error})", None, pause_s)
            else:
                if self._ending.is_set():
                    return code
                if self._is_restarted:
                    self._is_restarted = False
                    self._backoff.reset()
                    self._on_restart()
                    continue
                if code == self.final:
                    return code
                self._on_death(self.label(code))
                if loop.time() - started_s >= _STEADY_S:
                    self._backoff.reset()
                pause_s = self._backoff.next_s()
                self._on_end(self._why_replaced or exit_text(code), code, pause_s)
                self._why_replaced = ""
            if await self._ending.wait(pause_s):
                return 0

    async def _run_once(self) -> int:
        self._process = process = await self._started()
        self._on_start(process.pid)
        if self._ending.is_set():
            process.terminate()  # asked to end while it was starting
        readers = [
            asyncio.create_task(_pass_lines(stream, self._on_output[file]))
            for file, stream in ((1, process.stdout), (2, process.stderr))
            if stream is not None
        ]
        code = await process.wait()
        self._process = None
        if readers:
            # Its own children may still run and keep the file open.
            _, late = await asyncio.wait(readers, timeout=_LAST_OUTPUT_S)
            for task in late:
                task.cancel()
        return code

    async def _started(self) -> asyncio.subprocess.Process:
        environment, fds = passed_secrets.without_secrets(self.environment), self._fds
        environment.pop(passed_secrets.VARIABLE, None)
        secret_fd = None
        if passed := passed_secrets.secrets_of(self.environment):
            secret_fd = passed_secrets.written(passed)
            environment[passed_secrets.VARIABLE], fds = str(secret_fd), (*fds, secret_fd)
        try:
            return await asyncio.create_subprocess_exec(
                *self._command,
                env=environment,
                pass_fds=fds,
                start_new_session=True,
                stdout=PIPE if 1 in self._on_output else None,
                stderr=PIPE if 2 in self._on_output else None,
            )
        finally:
            if secret_fd is not None:
                os.close(secret_fd)

    def _log(self, how: str, _code: int | None, pause_s: float) -> None:
        _LOG.error("%s %s; restarting in %.1f s", self.name, how, pause_s)

    def terminate(self) -> None:
        """Ask it to end."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it."""
        self._end(signal.SIGKILL)

    def replace(self, why: str) -> None:
        """Kill it, so that it is started again.

        Parameters
        ----------
        why
            What `on_end` gets in place of how it ended: "was stopped for 10 s, and was killed".
        """
        if self._process is not None:
            self._why_replaced = why
            self._send(signal.SIGKILL)

    def restart(self, number: signal.Signals = signal.SIGTERM, *, within_s: float) -> None:
        """End it with a signal, and start it again at once; kill it after `within_s`. One that does not run is left to its pause."""
        process = self._process
        if process is None or self._is_restarted:
            return
        self._is_restarted = True
        self._send(number)

        def kill() -> None:
            if self._process is process:
                _LOG.error("%s did not end within %g s and is killed", self.name, within_s)
                self._send(signal.SIGKILL)

        asyncio.get_running_loop().call_later(within_s, kill)

    def _end(self, number: signal.Signals) -> None:
        self._ending.set()
        self._send(number)

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, but was not waited for yet
                self._process.send_signal(number)


async def _pass_lines(stream: asyncio.StreamReader, on_line: Callable[[bytes], None]) -> None:
    """Pass on the output line by line; a line above 64 KiB is passed on in parts."""
    rest = b""
    while part := await stream.read(_LONGEST_LINE):
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        for line in lines:
            on_line(line)
    if rest:
        on_line(rest)
