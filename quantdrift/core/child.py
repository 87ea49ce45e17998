"""A child process that is kept running: started anew whenever it dies, and never left behind."""

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from quantdrift.core.leash import leashed
from quantdrift.core.process import Stop

_LOG = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.1
_LAST_PAUSE_S = 10.0
_STEADY_S = 30.0


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
    ) -> None:
        self.name = name
        self._command = leashed([sys.executable, "-m", module, *arguments], orphan)
        self._fds = tuple(fds)
        self._environment = dict(environment)
        self._on_death = on_death
        self._final = final
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
                _LOG.error("%s cannot be started (%s): again in %g s", self.name, error, pause_s)
            else:
                if self._ending.is_set() or code == self._final:
                    return code
                self._on_death()
                if loop.time() - started_s >= _STEADY_S:
                    pause_s = _FIRST_PAUSE_S
                _LOG.error("%s ended with %d: again in %g s", self.name, code, pause_s)
            if await self._ending.wait(pause_s):
                return 0
            pause_s = min(pause_s * 2, _LAST_PAUSE_S)

    async def _run_once(self) -> int:
        self._process = await asyncio.create_subprocess_exec(
            *self._command, env=self._environment, pass_fds=self._fds, start_new_session=True
        )
        if self._ending.is_set():
            self._process.terminate()  # told to end while it was being started
        code = await self._process.wait()
        self._process = None
        return code

    def terminate(self) -> None:
        """Ask it to end."""
        self._ending.set()
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """End it."""
        self._ending.set()
        if self._process is not None:
            self._process.kill()
