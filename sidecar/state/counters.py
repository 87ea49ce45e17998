"""Exact counts in shared memory: each process writes its own slot, a death loses none.

The memory is an anonymous file that the supervisor creates and every child inherits. Counts are 64-bit integers,
aligned, with one writer each; a reader may see a count one behind, never a torn one.
"""

import mmap
import os
import tempfile
from collections.abc import Sequence
from enum import IntEnum, StrEnum
from typing import NamedTuple, Self

from quantdrift.core.records import Loss, ModelCount, StratumCount
from quantdrift.core.sampling.policy_message import Refusal


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
    UNOBSERVED = 19  # connections beyond sidecar.max_connections
    ACCEPT_PAUSES = 20  # times that clients had to wait because no file was left
    SLOW = 21  # peers that do not read now
    REFUSING_UNTIL_NS = 22  # capture: until when the next two hold, by the monotonic clock; 0: they do not
    REFUSED_BY_RATE = (
        23  # capture: share of what is drawn that is not to be held, in billionths: exchanges cap
    )
    REFUSED_BY_BYTES = 24  # the same, for the bytes cap
    BACKEND_REACHED = 25  # connections for which the backend was reached
    BACKEND_ERROR = 26  # why the last one was not that could not be: see `sidecar.symptoms.cause`
    UNKNOWN_POSTS = 27  # requests by POST that are no inference and not quantdrift's own
    NO_TOKEN = 28  # intake: calls that were turned away, by reason
    WRONG_TOKEN = 29
    WAY_OFF = 30


class Denial(StrEnum):
    """Why the intake turned a caller away."""

    NO_TOKEN = "no_token"  # noqa: S105 - a reason
    WRONG_TOKEN = "wrong_token"  # noqa: S105 - a reason
    OFF = "off"  # the caller has the token, and the configuration does not have this way in


class Row(NamedTuple):
    """What one row of the table counts: requests of a header stratum for a model.

    Without a model: requests that have not told which one. Whoever learns it moves the count.
    """

    stratum: str
    model: str = ""


class Count(IntEnum):
    """Counts per row; after them one per `Loss`, in its order."""

    OFFERED = 0
    TAKEN = 1
    THINNED = 2
    PUBLISHED = 3
    HANDED = 4  # relay: given to the capture process whole; capture: received
    NUMBERED = 5  # capture: sent under a number, whatever became of it


_LOSSES = list(Loss)
_LOSS_INDEX = {loss: len(Count) + i for i, loss in enumerate(_LOSSES)}
_PER_STRATUM = len(Count) + len(_LOSSES)
_N_GAUGES = 48  # room to grow
MOST_ROWS = (
    4096  # of strata and models that a sidecar may have had in its life; what is not used takes no memory
)

REFUSED = {
    Refusal.UNREADABLE: Gauge.POLICY_UNREADABLE,
    Refusal.STALE: Gauge.POLICY_STALE,
    Refusal.EARLY: Gauge.POLICY_EARLY,
    Refusal.STRATA: Gauge.POLICY_STRATA,
    Refusal.RATES: Gauge.POLICY_RATES,
}

DENIED = {
    Denial.NO_TOKEN: Gauge.NO_TOKEN,
    Denial.WRONG_TOKEN: Gauge.WRONG_TOKEN,
    Denial.OFF: Gauge.WAY_OFF,
}


class Counters:
    """The whole table, mapped.

    Parameters
    ----------
    fd
        File of the table; stays open for children to inherit.
    n_slots
        Relay workers plus one for the capture process, which is the last.
    n_rows
        Rows of each slot.
    """

    def __init__(self, fd: int, n_slots: int, n_rows: int) -> None:
        self.fd = fd
        self.n_slots = n_slots
        self.n_rows = n_rows
        self._stride = _N_GAUGES + n_rows * _PER_STRATUM
        self._map = mmap.mmap(fd, n_slots * self._stride * 8)
        self._cells = memoryview(self._map).cast("q")

    @classmethod
    def create(cls, n_slots: int, n_rows: int) -> Self:
        """Make a table of zeros in memory."""
        size = n_slots * (_N_GAUGES + n_rows * _PER_STRATUM) * 8
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("quantdrift-counters")
        else:  # pragma: no cover - not Linux
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, size)
        return cls(fd, n_slots, n_rows)

    def slot(self, index: int) -> "Slot":
        """Return the view of one writer."""
        start = index * self._stride
        return Slot(self._cells[start : start + self._stride])

    def gauge(self, gauge: Gauge) -> int:
        """Return the sum of `gauge` over all slots."""
        return sum(self.slot(index).gauge(gauge) for index in range(self.n_slots))

    def total(self, count: Count, n_rows: int) -> int:
        """Return the sum of a count over all slots and the first rows."""
        return sum(self._column(slot, count, n_rows) for slot in range(self.n_slots))

    def drawn(self, n_rows: int) -> tuple[int, int]:
        """Return how many requests were ever taken, and how many of them the relay and intake processes refused by a cap.

        Parameters
        ----------
        n_rows
            Of the table that are in use.
        """
        own = self.n_slots - 1
        taken = self.total(Count.TAKEN, n_rows)
        caps = _LOSS_INDEX[Loss.RATE_CAP], _LOSS_INDEX[Loss.BYTE_CAP]
        refused = sum(self._column(slot, cap, n_rows) for slot in range(own) for cap in caps)
        return taken, refused

    def strata(self, rows: Sequence[Row]) -> tuple[StratumCount, ...]:
        """Return the sums over all slots, one entry per stratum, in the order in which they come first.

        Parameters
        ----------
        rows
            What each row of the table counts.
        """
        totals: dict[str, _Total] = {}
        for index, row in enumerate(rows):
            totals.setdefault(row.stratum, _Total()).add(row.model, index, self._total(index))
        return tuple(total.count(stratum) for stratum, total in totals.items())

    def _column(self, slot: int, count: int, n_rows: int) -> int:
        """Return a slot's sum of a count over the first rows."""
        begin = slot * self._stride + _N_GAUGES
        return sum(self._cells[begin + count : begin + n_rows * _PER_STRATUM : _PER_STRATUM])

    def _total(self, row: int) -> list[int]:
        begin = _N_GAUGES + row * _PER_STRATUM
        starts = range(begin, self.n_slots * self._stride, self._stride)
        return [sum(self._cells[start + i] for start in starts) for i in range(_PER_STRATUM)]


class _Total:
    """The counts of one stratum: of all its models, and of each."""

    def __init__(self) -> None:
        self._sums = [0] * _PER_STRATUM
        self._models: dict[str, ModelCount] = {}

    def add(self, model: str, row: int, counts: list[int]) -> None:
        self._sums = [held + more for held, more in zip(self._sums, counts, strict=True)]
        lost = _lost(counts)
        if model and (counts[Count.TAKEN] or lost):
            self._models[model] = ModelCount(
                taken=counts[Count.TAKEN],
                lost=lost,
                published=counts[Count.PUBLISHED],
                row=row if counts[Count.NUMBERED] else -1,
                numbered=counts[Count.NUMBERED],
            )

    def count(self, stratum: str) -> StratumCount:
        return StratumCount(
            stratum=stratum,
            offered=self._sums[Count.OFFERED],
            taken=self._sums[Count.TAKEN],
            thinned=self._sums[Count.THINNED],
            published=self._sums[Count.PUBLISHED],
            lost=_lost(self._sums),
            models=self._models,
        )


def _lost(counts: list[int]) -> dict[Loss, int]:
    return {loss: counts[index] for loss, index in _LOSS_INDEX.items() if counts[index]}


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

    def move(self, old: int, new: int, *counts: Count) -> None:
        """Take one request from the counts of a row to those of another: its model is known now."""
        for count in counts:
            self.add(old, count, -1)
            self.add(new, count)

    def settle(self, n_rows: int, received: Count, *, ended: tuple[Count, ...], loss: Loss) -> None:
        """Count under `loss` what a predecessor in this slot had in hand when it died.

        Parameters
        ----------
        n_rows
            Header strata.
        received, ended
            What it took over, and what it let go beside what it lost.
        loss
            The reason.
        """
        for stratum in range(n_rows):
            gone = sum(self.count(stratum, count) for count in ended)
            gone += sum(self.lost_count(stratum, each) for each in _LOSSES)
            self.lose(stratum, loss, max(0, self.count(stratum, received) - gone))

    def count(self, stratum: int, count: Count) -> int:
        """Return a count of a stratum."""
        return int(self._cells[_N_GAUGES + stratum * _PER_STRATUM + count])

    def lost_count(self, stratum: int, loss: Loss) -> int:
        """Return how many exchanges of a stratum were lost for this reason."""
        return int(self._cells[_N_GAUGES + stratum * _PER_STRATUM + _LOSS_INDEX[loss]])
