"""Readiness and liveness of the sidecar, from the shared counters: for the supervisor's probes and for the admin port."""

from typing import Final

from quantdrift.core.process.heartbeat import HangWatch, Watched
from quantdrift.sidecar.state.counters import Counters, Gauge, Slot

N_OTHER_SLOTS: Final = 3
"""Slots behind those of the relay workers: the intake's, the admin process's and the capture process's."""
LATE_S: Final = 5.0
"""After so long without a heartbeat a child does not count as serving: /readyz and /livez turn red if no other does."""
WORKER_HUNG_S: Final = 10.0
"""After so long without a heartbeat a relay worker or the intake is replaced."""
CAPTURE_HUNG_S: Final = 30.0
"""The same for the capture process: it delays no request, but loses what it has queued when it is killed."""


class ChildWatch:
    """The supervisor's view of one child process: whether it hangs, and in its counters whether it is late.

    Parameters
    ----------
    child
        The process.
    slot
        Its counters.
    hung_s
        After so long without a heartbeat it hangs.
    """

    def __init__(self, child: Watched, slot: Slot, hung_s: float) -> None:
        self._hang_watch = HangWatch(child, lambda: slot.gauge(Gauge.BEATS))
        self._slot = slot
        self._hung_s = hung_s

    def look(self, elapsed_s: float) -> str:
        """Return why the child hangs; empty if it does not.

        Parameters
        ----------
        elapsed_s
            Time since the last call.
        """
        why = self._hang_watch.look(elapsed_s, self._hung_s)
        self._slot.set(Gauge.LATE, int(self._hang_watch.silent_s >= LATE_S))
        return why


class Readiness:
    """Whether the sidecar serves.

    Parameters
    ----------
    counters
        Of all processes; the supervisor notes there which children are late, and whether it ends.
    """

    def __init__(self, counters: Counters) -> None:
        n_relays = counters.n_slots - N_OTHER_SLOTS
        self._serving = [counters.slot(index) for index in range(n_relays)] or [counters.slot(n_relays)]
        self._supervisor = supervisor_slot(counters)

    def ready(self) -> bool:
        """Return whether a relay worker, or without a relay the intake, is serving.

        Backend, stream and capture process do not matter.
        """
        return not self._supervisor.gauge(Gauge.STOPPING) and any(
            slot.gauge(Gauge.SERVING) and not slot.gauge(Gauge.LATE) for slot in self._serving
        )

    def live(self) -> bool:
        """Return the same as `ready`, but true while the sidecar drains: it ends by itself."""
        return bool(self._supervisor.gauge(Gauge.STOPPING)) or self.ready()


def supervisor_slot(counters: Counters) -> Slot:
    """Return the slot in which the supervisor notes what concerns no single child: the admin process's."""
    return counters.slot(counters.n_slots - 2)
