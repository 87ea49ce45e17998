"""The watchdog of a relay worker.

It interrupts an observer that does not return, because that blocks the event loop.

Observers read bounded input in one pass, so none should ever get stuck. If one does, the watchdog raises an
error in it, and the relay goes on as if the observer had raised. A call that never returns to the interpreter
cannot be interrupted; observers make no such call.

It knows what is at fault, so it acts first, and no connection breaks. The supervisor (`core.process.heartbeat`) replaces a
worker that hangs anywhere else, or is stopped.
"""

import asyncio
import logging
import signal
from collections.abc import Callable
from types import FrameType

from quantdrift.core.errors import QuantdriftError

_LOG = logging.getLogger(__name__)

STUCK_CPU_S = 2.0
_MAX_INTERRUPTS = 3


class StuckError(QuantdriftError):
    """An observer ran for too long."""


class Watchdog:
    """Raises `StuckError` in an observer that is found in the same call twice in a row.

    It measures CPU time, so an observer is not slow because the machine is busy. One per process, on the main
    thread.

    Parameters
    ----------
    find_observer_call
        Returns the stack frame, at or above the given one, that has called an observer and catches whatever
        it raises; None if there is none.
    on_repeated
        Called when observers got stuck too often: the cause is a fault that many connections meet.
    loop
        The event loop to watch.
    cpu_s
        CPU time between two checks while the loop is blocked.
    """

    def __init__(
        self,
        find_observer_call: Callable[[FrameType | None], FrameType | None],
        on_repeated: Callable[[], object],
        loop: asyncio.AbstractEventLoop,
        cpu_s: float = STUCK_CPU_S,
    ) -> None:
        self._find_observer_call = find_observer_call
        self._seen: FrameType | None = None
        self._on_repeated = on_repeated
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._cpu_s = cpu_s
        self._n_interrupts = 0

    def start(self) -> None:
        """Start watching."""
        signal.signal(signal.SIGVTALRM, self._check)
        self._restart()

    def stop(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, signal.SIG_IGN)

    def _restart(self) -> None:
        self._seen = None
        signal.setitimer(signal.ITIMER_VIRTUAL, self._cpu_s, self._cpu_s)
        self._timer = self._loop.call_later(self._cpu_s / 4, self._restart)

    def _check(self, _: int, frame: FrameType | None) -> None:
        caller = self._find_observer_call(frame)
        if caller is None or caller is not self._seen:
            self._seen = caller
            return
        self._seen = None
        self._n_interrupts += 1
        if self._n_interrupts == _MAX_INTERRUPTS:
            _LOG.error(
                "observers got stuck %d times: this relay worker no longer observes connections, until it restarts",
                _MAX_INTERRUPTS,
            )
            self._on_repeated()
        raise StuckError(f"an observer ran for more than {self._cpu_s:g} s of CPU time")
