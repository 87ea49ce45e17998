"""A child process that is kept running: started again whenever it dies, and never left behind.

Child processes that die with their owner, however it died.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable, Mapping, Sequence

from quantdrift.core.process.run import Stop

# Runs before the program in the child's place: no Python code may run between fork and exec of a threaded parent.
# argv: parent's pid, signal, program, its arguments. A parent that died meanwhile is noticed by its pid.
_LEASH = """\
import ctypes, os, sys
prctl = getattr(ctypes.CDLL(None), "prctl", None)
if prctl is not None:
    prctl(1, int(sys.argv[2]), 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[3], sys.argv[3:])
"""


def leashed(command: Sequence[str], number: signal.Signals = signal.SIGTERM) -> list[str]:
    """Return the command that runs `command`, under the same process id, and is sent a signal when its owner ends.

    The kernel (Linux: PR_SET_PDEATHSIG; elsewhere there is no leash) means the owner's thread: start children from
    a thread that lives as long as the process, which is the main thread.

    Parameters
    ----------
    command
        Absolute path of the program, then its arguments.
    number
        The signal.
    """
    return [sys.executable, "-I", "-S", "-c", _LEASH, str(os.getpid()), str(int(number)), *command]


_LOG = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.1
_LAST_PAUSE_S = 10.0
_STEADY_S = 30.0
_LONGEST_LINE = 65_536
_LAST_WORDS_S = 1.0  # how long what a child has written is waited for once it has ended


def ending(code: int) -> str:
    """Return in words how a process ended that left this exit code."""
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


class Child:
    """Keeps one process running.

    It has a session of its own, so that Ctrl-C reaches the owner alone, which ends its children in their order.

    Parameters
    ----------
    name
        Shown in logs and metrics.
    module
        What `python -m` runs.
    arguments
        Its arguments.
    environment
        The whole of its environment.
    fds
        Files that it inherits.
    orphan
        Signal that it is sent when the owner dies, however that died.
    on_death
        Called when it has ended unasked.
    final
        Exit code after which it is not started again: a person must act first. None: always again.
    longest_pause_s
        Bounds the growing pause before it is started again.
    told
        Called with how it ended ("ended with exit code 1"), its exit code, or None where it could not be started, and
        after which pause it is started again. None: that is a line in the log.
    heard
        Called with each line that it writes, by file (1: stdout, 2: stderr). Files that are not there are those of
        the owner: a child that must not wait for its owner has them all from there.

    Attributes
    ----------
    final : int | None
        As above; it may be changed while the child runs.
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
        on_death: Callable[[], None] = lambda: None,
        final: int | None = None,
        longest_pause_s: float = _LAST_PAUSE_S,
        told: Callable[[str, int | None, float], None] | None = None,
        heard: Mapping[int, Callable[[bytes], None]] | None = None,
    ) -> None:
        self.name = name
        self.final = final
        self._command = leashed([sys.executable, "-P", "-m", module, *arguments], orphan)
        self._fds = tuple(fds)
        self._environment = dict(environment)
        self._on_death = on_death
        self._longest_pause_s = longest_pause_s
        self._told = told or self._log
        self._heard = dict(heard or {})
        self._process: asyncio.subprocess.Process | None = None
        self._ending = Stop()

    async def run(self) -> int:
        """Start it, again whenever it dies, after a growing pause.

        Returns
        -------
        int
            Its last exit code: once it was told to end and has ended, or when that is the final one.
        """
        loop = asyncio.get_running_loop()
        pause_s = _FIRST_PAUSE_S
        while True:
            started_s = loop.time()
            try:
                code = await self._run_once()
            except OSError as error:  # no memory, no process or no file left: that passes
                self._told(f"cannot be started ({error})", None, pause_s)
            else:
                if self._ending.is_set() or code == self.final:
                    return code
                self._on_death()
                if loop.time() - started_s >= _STEADY_S:
                    pause_s = _FIRST_PAUSE_S
                self._told(ending(code), code, pause_s)
            if await self._ending.wait(pause_s):
                return 0
            pause_s = min(pause_s * 2, self._longest_pause_s)

    async def _run_once(self) -> int:
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command,
            env=self._environment,
            pass_fds=self._fds,
            start_new_session=True,
            stdout=PIPE if 1 in self._heard else None,
            stderr=PIPE if 2 in self._heard else None,
        )
        if self._ending.is_set():
            process.terminate()  # told to end while it was being started
        listening = [
            asyncio.create_task(_listen(stream, self._heard[file]))
            for file, stream in ((1, process.stdout), (2, process.stderr))
            if stream is not None
        ]
        code = await process.wait()
        self._process = None
        if listening:
            # What it started may live on, and keep the file open.
            _, late = await asyncio.wait(listening, timeout=_LAST_WORDS_S)
            for task in late:
                task.cancel()
        return code

    def _log(self, how: str, _code: int | None, pause_s: float) -> None:
        _LOG.error("%s %s: again in %g s", self.name, how, pause_s)

    def terminate(self) -> None:
        """Ask it to end."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        self._ending.set()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and is not waited for yet
                self._process.send_signal(number)


async def _listen(stream: asyncio.StreamReader, heard: Callable[[bytes], None]) -> None:
    """Hand on line by line what comes; one that is too long comes in parts."""
    rest = b""
    while part := await stream.read(_LONGEST_LINE):
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        for line in lines:
            heard(line)
    if rest:
        heard(rest)
