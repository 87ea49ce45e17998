"""What the capture process refuses of the drawn requests beforehand: most would be held for nothing above its caps."""

import random

from quantdrift.core.clock import Clock
from quantdrift.core.records import Loss
from quantdrift.sidecar.state.counters import Gauge, Slot

_BILLION = 1e9


class LoadShedding:
    """Refuses the share of requests that the capture process tells, each by chance, whatever it holds.

    Parameters
    ----------
    slot
        Counts of the capture process.
    clock
        Tells until when the share holds: who told it may have died.
    """

    __slots__ = ("_clock", "_slot")

    def __init__(self, slot: Slot, clock: Clock) -> None:
        self._slot = slot
        self._clock = clock

    def refusal(self) -> Loss | None:
        """Return why a request that was drawn is not taken in, or None."""
        slot = self._slot
        until_ns = slot.gauge(Gauge.REFUSING_UNTIL_NS)
        if not until_ns or self._clock.monotonic_s() * _BILLION >= until_ns:
            return None
        chance = random.random() * _BILLION  # noqa: S311 - no secret
        if chance < slot.gauge(Gauge.REFUSED_BY_RATE):
            return Loss.RATE_CAP
        return Loss.BYTE_CAP if chance < slot.gauge(Gauge.REFUSED_BY_BYTES) else None
