"""Readiness and liveness of the sidecar, from the shared counters: for the supervisor's probes and for the admin port."""

from typing import Final

from quantdrift.sidecar.state.counters import Counters, Gauge, Slot

N_OTHER_SLOTS: Final = 3
"""Slots behind those of the relay workers: the intake's, the admin process's and the capture process's."""


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
