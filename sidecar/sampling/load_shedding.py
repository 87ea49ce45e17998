"""Load shedding: above the rate limits a share of the drawn requests is refused before it is buffered."""

import random

from quantdrift.core.clock import Clock
from quantdrift.core.records import Loss
from quantdrift.sidecar.state.counters import Gauge, Slot

_BILLION = 1e9


class LoadShedding:
    """Refuses at random the share of drawn requests that the capture process has published.

    Parameters
    ----------
    slot
        Counters of the capture process.
    clock
        Tells whether the share is still valid, since the capture process may have died.
    """

    __slots__ = ("_clock", "_slot")

    def __init__(self, slot: Slot, clock: Clock) -> None:
        self._slot = slot
        self._clock = clock

    def refusal(self) -> Loss | None:
        """Return why a drawn request is refused, or None."""
        slot = self._slot
        until_ns = slot.gauge(Gauge.REFUSING_UNTIL_NS)
        if not until_ns or self._clock.monotonic_s() * _BILLION >= until_ns:
            return None
        chance = random.random() * _BILLION  # noqa: S311 - no secret
        if chance < slot.gauge(Gauge.REFUSED_BY_RATE):
            return Loss.RATE_CAP
        return Loss.BYTE_CAP if chance < slot.gauge(Gauge.REFUSED_BY_BYTES) else None
