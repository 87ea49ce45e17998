"""Cuts an observer off that does not come to an end: the loop that everybody's bytes pass through waits for it.

What is followed is bounded in length and read in one pass, so none should ever be. If one is all the same, this
interrupts it where it stands, and the relay goes on as if it had raised. A call that never comes back to the
interpreter cannot be cut: observers make none.
"""

import asyncio
import logging
import signal
from collections.abc import Callable
from types import FrameType

from quantdrift.core.errors import QuantdriftError

_LOG = logging.getLogger(__name__)

STUCK_CPU_S = 2.0
_MOST_CUTS = 3


class StuckError(QuantdriftError):
    """An observer was at work for too long."""


class Watchdog:
    """Raises `StuckError` in an observer that is still at work after having been seen at the same work before.

    It is the processor's time that counts: a machine that has none to give makes no observer slow. One per process, on
    its main thread.

    Parameters
    ----------
    observing
        Returns, of the frame that the interpreter is in, the one that has called an observer and catches whatever it
        raises; None where none has.
    on_despair
        Called when that has happened too often: it is a fault that many connections meet.
    loop
        The loop that must turn.
    cpu_s
        How often it looks, on the processor, while the loop does not turn.
    """

    def __init__(
        self,
        observing: Callable[[FrameType | None], FrameType | None],
        on_despair: Callable[[], object],
        loop: asyncio.AbstractEventLoop,
        cpu_s: float = STUCK_CPU_S,
    ) -> None:
        self._observing = observing
        self._seen: FrameType | None = None
        self._on_despair = on_despair
        self._loop = loop
        self._fed: asyncio.TimerHandle | None = None
        self._cpu_s = cpu_s
        self._n_cuts = 0

    def start(self) -> None:
        """Watch from now on."""
        signal.signal(signal.SIGVTALRM, self._look)
        self._feed()

    def stop(self) -> None:
        """Watch no more."""
        if self._fed is not None:
            self._fed.cancel()
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, signal.SIG_IGN)

    def _feed(self) -> None:
        self._seen = None
        signal.setitimer(signal.ITIMER_VIRTUAL, self._cpu_s, self._cpu_s)
        self._fed = self._loop.call_later(self._cpu_s / 4, self._feed)

    def _look(self, _: int, frame: FrameType | None) -> None:
        caller = self._observing(frame)
        if caller is None or caller is not self._seen:
            self._seen = caller
            return
        self._seen = None
        self._n_cuts += 1
        if self._n_cuts == _MOST_CUTS:
            _LOG.error("observers got stuck %d times: connections are no longer observed", _MOST_CUTS)
            self._on_despair()
        raise StuckError(f"an observer was at work for more than {self._cpu_s:g} s of the processor's time")
