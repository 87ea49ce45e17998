"""Exact counts in shared memory: each process writes its own slot, a death loses none.

The memory is an anonymous file that the supervisor creates and every child inherits. Counts are 64-bit integers,
aligned, with one writer each; a reader may see a count one behind, never a torn one.
"""

import mmap
import os
import tempfile
from enum import IntEnum
from typing import Self

from quantdrift.core.directive import Refusal
from quantdrift.core.records import Loss, StratumCount


class Gauge(IntEnum):
    """Counts of a whole slot, first in its layout. Append, never reorder."""

    CONNECTIONS = 0  # accepted so far
    OPEN = 1  # open now
    BLIND = 2  # framing lost: connection no longer observed
    IGNORED = 3  # requests that are no inference
    BACKEND_FAILED = 4  # connections for which the backend could not be reached
    OBSERVER_ERRORS = 5  # times an observer raised
    HELD_BYTES = 6  # held now for unfinished exchanges
    QUEUE_BYTES = 7  # waiting now for hand-off (relay) or for the stream (capture)
    FORWARDED_BYTES = 8  # passed through, both directions
    SEQUENCE = 9  # capture: number of the last tally
    SERVING = 10  # relay: 1 while it accepts connections
    POLICY_ISSUED_S = 11  # capture: when the directive in force was issued, seconds since 1970; 0: none is
    POLICY_CHANGES = 12  # capture: times that another policy came into force
    POLICY_UNREADABLE = 13  # capture: directives that were refused, by reason
    POLICY_STALE = 14
    POLICY_EARLY = 15
    POLICY_STRATA = 16
    POLICY_RATES = 17
    EARLY = 18  # intake: calls of taps before they knew any rates


class Count(IntEnum):
    """Counts per header stratum; after them one per `Loss`, in its order."""

    OFFERED = 0
    TAKEN = 1
    THINNED = 2
    PUBLISHED = 3
    HANDED = 4  # relay: given to the capture process whole; capture: received


_LOSSES = list(Loss)
_LOSS_INDEX = {loss: len(Count) + i for i, loss in enumerate(_LOSSES)}
_PER_STRATUM = len(Count) + len(_LOSSES)
_N_GAUGES = 32  # room to grow
MOST_ROWS = 128  # header strata that a sidecar may have had in its life

REFUSED = {
    Refusal.UNREADABLE: Gauge.POLICY_UNREADABLE,
    Refusal.STALE: Gauge.POLICY_STALE,
    Refusal.EARLY: Gauge.POLICY_EARLY,
    Refusal.STRATA: Gauge.POLICY_STRATA,
    Refusal.RATES: Gauge.POLICY_RATES,
}


class Counters:
    """The whole table, mapped.

    Parameters
    ----------
    fd
        File of the table; stays open for children to inherit.
    n_slots
        Relay workers plus one for the capture process, which is the last.
    n_strata
        Header strata.
    """

    def __init__(self, fd: int, n_slots: int, n_strata: int) -> None:
        self.fd = fd
        self.n_slots = n_slots
        self.n_strata = n_strata
        self._stride = _N_GAUGES + n_strata * _PER_STRATUM
        self._map = mmap.mmap(fd, n_slots * self._stride * 8)
        self._cells = memoryview(self._map).cast("q")

    @classmethod
    def create(cls, n_slots: int, n_strata: int) -> Self:
        """Make a table of zeros in memory."""
        size = n_slots * (_N_GAUGES + n_strata * _PER_STRATUM) * 8
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("quantdrift-counters")
        else:  # pragma: no cover - not Linux
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, size)
        return cls(fd, n_slots, n_strata)

    def slot(self, index: int) -> "Slot":
        """Return the view of one writer."""
        start = index * self._stride
        return Slot(self._cells[start : start + self._stride])

    def gauge(self, gauge: Gauge) -> int:
        """Return the sum of `gauge` over all slots."""
        return sum(self.slot(index).gauge(gauge) for index in range(self.n_slots))

    def strata(self, names: list[str]) -> tuple[StratumCount, ...]:
        """Return the sums over all slots, one entry per stratum, named in order."""
        slots = [self.slot(index) for index in range(self.n_slots)]
        return tuple(
            StratumCount(
                stratum=name,
                offered=sum(slot.count(i, Count.OFFERED) for slot in slots),
                taken=sum(slot.count(i, Count.TAKEN) for slot in slots),
                thinned=sum(slot.count(i, Count.THINNED) for slot in slots),
                published=sum(slot.count(i, Count.PUBLISHED) for slot in slots),
                lost={loss: n for loss in _LOSSES if (n := sum(slot.lost_count(i, loss) for slot in slots))},
            )
            for i, name in enumerate(names)
        )


class Slot:
    """One writer's counts. Not safe for two writers.

    Parameters
    ----------
    cells
        Its part of the table.
    """

    __slots__ = ("_cells",)

    def __init__(self, cells: memoryview) -> None:
        self._cells = cells

    def add(self, stratum: int, count: Count, n: int = 1) -> None:
        """Add `n` to a count of a stratum."""
        self._cells[_N_GAUGES + stratum * _PER_STRATUM + count] += n

    def lose(self, stratum: int, loss: Loss, n: int = 1) -> None:
        """Count `n` lost exchanges."""
        self._cells[_N_GAUGES + stratum * _PER_STRATUM + _LOSS_INDEX[loss]] += n

    def note(self, gauge: Gauge, n: int = 1) -> None:
        """Add `n`, which may be negative, to a gauge of the slot."""
        self._cells[gauge] += n

    def set(self, gauge: Gauge, value: int) -> None:
        """Set a gauge of the slot."""
        self._cells[gauge] = value

    def gauge(self, gauge: Gauge) -> int:
        """Return a gauge of the slot."""
        return int(self._cells[gauge])

    def settle(self, n_strata: int, received: Count, *, ended: tuple[Count, ...], loss: Loss) -> None:
        """Count under `loss` what a predecessor in this slot had in hand when it died.

        Parameters
        ----------
        n_strata
            Header strata.
        received, ended
            What it took over, and what it let go beside what it lost.
        loss
            The reason.
        """
        for stratum in range(n_strata):
            gone = sum(self.count(stratum, count) for count in ended)
            gone += sum(self.lost_count(stratum, each) for each in _LOSSES)
            self.lose(stratum, loss, max(0, self.count(stratum, received) - gone))

    def count(self, stratum: int, count: Count) -> int:
        """Return a count of a stratum."""
        return int(self._cells[_N_GAUGES + stratum * _PER_STRATUM + count])

    def lost_count(self, stratum: int, loss: Loss) -> int:
        """Return how many exchanges of a stratum were lost for this reason."""
        return int(self._cells[_N_GAUGES + stratum * _PER_STRATUM + _LOSS_INDEX[loss]])
