"""Exact counters in shared memory, which survive the death of a process. Each process writes its own slot.

The memory is a file that the supervisor creates and every child inherits (`counts_file`). Counters are aligned
64-bit integers with one writer each; a reader may see a value one behind, never a torn one.
"""

import mmap
import os
import tempfile
from collections.abc import Iterable, Sequence
from enum import IntEnum, StrEnum
from typing import NamedTuple, Self

from quantdrift.core.records import Loss, ModelCount, StratumCount
from quantdrift.core.sampling.policy_message import PolicyRefusal


class Gauge(IntEnum):
    """Counters of a whole slot, which precede its rows. Append members, never reorder them."""

    CONNECTIONS = 0  # accepted so far
    OPEN = 1  # open now
    BLIND = 2  # connections no longer observed because framing was lost
    IGNORED = 3  # requests that are not inference
    BACKEND_FAILED = 4  # connections for which the backend could not be reached
    OBSERVER_ERRORS = 5  # times an observer raised
    HELD_BYTES = 6  # buffered now for unfinished exchanges
    QUEUE_BYTES = 7  # queued now for the hand-off (relay) or for the stream (capture)
    FORWARDED_BYTES = 8  # both directions
    SEQUENCE = 9  # capture: number of the last tally
    SERVING = 10  # relay: 1 while it accepts connections
    # capture: issue time of the monitor's policy in effect, seconds since 1970; 0: there is none
    POLICY_ISSUED_S = 11
    POLICY_CHANGES = 12  # capture: changes of the policy in effect
    POLICY_UNREADABLE = 13  # capture: refused policies of the monitor, by reason
    POLICY_STALE = 14
    POLICY_EARLY = 15
    POLICY_STRATA = 16
    POLICY_RATES = 17
    EARLY = 18  # intake: calls of taps before they had any rates
    UNOBSERVED = 19  # connections beyond sidecar.max_connections
    ACCEPT_PAUSES = 20  # times that accepting was paused for lack of file descriptors
    SLOW = 21  # peers that do not read at present
    REFUSING_UNTIL_NS = 22  # capture: end of validity of the next two, monotonic clock; 0: not valid
    # capture: share of the drawn requests that relay and intake must refuse, in billionths
    REFUSED_BY_RATE = 23  # because of sampling.max_exchanges_per_s
    REFUSED_BY_BYTES = 24  # because of sampling.max_bytes_per_s
    BACKEND_REACHED = 25  # connections for which the backend was reached
    BACKEND_ERROR = 26  # error of the last connection that failed: see `traffic_warnings.connect_errno`
    UNKNOWN_POSTS = 27  # POST requests that are not inference
    NO_TOKEN = 28  # intake: refused calls, by reason
    WRONG_TOKEN = 29
    WAY_OFF = 30  # no longer used
    ENDS = 31  # capture: 1 once the supervisor has ended the relay workers and the intake; the supervisor writes it
    QUEUED_SINCE_S = (
        32  # capture: when the oldest exchange that waits was queued, seconds since 1970; 0: none waits
    )
    BEATS = 33  # turns of the event loop since the start of the process, counted every half second
    UNSTORED_S = (
        34  # capture: seconds for which NATS, though connected, stored no exchange; 0: it stored the last one
    )
    RECHECKS = 35  # capture: sampled requests of quantdrift's own, which are not traffic
    FORGED_MARKS = 36  # capture: sampled requests with a mark that is not valid; they are captured
    MODEL_DENIED = 37  # intake, capture: exchanges of a model that the caller may not report on
    WRONG_CERTIFICATE = 39  # intake: refused calls with a certificate that is not of a caller
    UNSEEN_REQUESTS = 40  # relay: requests on connections that are not observed
    # The supervisor writes the next ones: in the slot of the child concerned, or in that of the admin process.
    LATE = 41  # 1 while the child gives no heartbeat
    STOPPING = 42  # admin: 1 once the sidecar ends
    RELOADS = 43  # admin: changed configurations that were taken over
    RELOADS_REFUSED = 44  # admin: changed configurations that were refused
    RELAY_CPU_US = (
        45  # relay: processor time of the slot's workers since they serve, counted about once a second
    )
    CONFIG_REFUSED = 46  # admin: 1 while the files have a configuration that was refused
    TAP_CONNECTIONS = 47  # intake: connections of taps accepted so far


class Denial(StrEnum):
    """Why the intake refused a call."""

    NO_TOKEN = "no_token"  # noqa: S105 - a reason, not a secret
    WRONG_TOKEN = "wrong_token"  # noqa: S105 - a reason
    WRONG_CERTIFICATE = "wrong_certificate"
    MODEL = "model"  # the token is right, and is not for the model of this exchange


class Row(NamedTuple):
    """The meaning of one row of the table: requests of a header stratum for a model.

    Without a model: requests whose model is not known yet. The process that reads it moves the count.
    """

    stratum: str
    model: str = ""


class Count(IntEnum):
    """Counters of a row; after them there is one for each `Loss`, in its order."""

    OFFERED = 0
    TAKEN = 1
    THINNED = 2
    PUBLISHED = 3
    HANDED = 4  # relay, intake: sent to the capture process whole; capture: received
    NUMBERED = 5  # capture: sent under a number, acknowledged or not
    # relay, intake: of the handed, those that the capture process has received; the capture process writes it
    ARRIVED = 6


_LOSSES = list(Loss)
_LOSS_INDEX = {loss: len(Count) + i for i, loss in enumerate(_LOSSES)}
COLUMNS = (*(count.name for count in Count), *(loss.value for loss in _LOSSES))
"""Names of the counters of a row, in their order."""
_PER_STRATUM = len(COLUMNS)
N_GAUGES = 48  # spare ones for later versions
# Strata times models that a sidecar may have in its life. Unused rows take no memory.
MAX_ROWS = 4096

POLICY_REFUSALS = {
    PolicyRefusal.UNREADABLE: Gauge.POLICY_UNREADABLE,
    PolicyRefusal.STALE: Gauge.POLICY_STALE,
    PolicyRefusal.EARLY: Gauge.POLICY_EARLY,
    PolicyRefusal.STRATA: Gauge.POLICY_STRATA,
    PolicyRefusal.RATES: Gauge.POLICY_RATES,
}

INTAKE_DENIALS = {
    Denial.NO_TOKEN: Gauge.NO_TOKEN,
    Denial.WRONG_TOKEN: Gauge.WRONG_TOKEN,
    Denial.WRONG_CERTIFICATE: Gauge.WRONG_CERTIFICATE,
    Denial.MODEL: Gauge.MODEL_DENIED,
}


class Counters:
    """The table of counters, mapped into memory.

    Parameters
    ----------
    fd
        File of the table; it stays open for children to inherit.
    n_slots
        One for each relay worker, one for the intake process, one for the admin process, and the last one for the
        capture process.
    n_rows
        Rows of each slot.
    """

    def __init__(self, fd: int, n_slots: int, n_rows: int) -> None:
        self.fd = fd
        self.n_slots = n_slots
        self.n_rows = n_rows
        self._stride = N_GAUGES + n_rows * _PER_STRATUM
        self._map = mmap.mmap(fd, n_slots * self._stride * 8)
        self._cells = memoryview(self._map).cast("q")

    @classmethod
    def create(cls, n_slots: int, n_rows: int, fd: int | None = None) -> Self:
        """Create a table of zeros in an empty file; without one, in anonymous memory."""
        size = n_slots * (N_GAUGES + n_rows * _PER_STRATUM) * 8
        if fd is not None:
            pass
        elif hasattr(os, "memfd_create"):
            fd = os.memfd_create("quantdrift-counters")
        else:  # pragma: no cover - not Linux
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, size)
        return cls(fd, n_slots, n_rows)

    def reserve(self, n_rows: int) -> None:
        """Have the system set memory aside for the first `n_rows` rows of each slot.

        Raises
        ------
        OSError
            There is not enough.
        """
        for slot in range(self.n_slots):
            n_bytes = (N_GAUGES + n_rows * _PER_STRATUM) * 8
            os.posix_fallocate(self.fd, slot * self._stride * 8, n_bytes)

    def slot(self, index: int) -> "Slot":
        """Return the slot of one writer."""
        start = index * self._stride
        return Slot(self._cells[start : start + self._stride])

    def gauge(self, gauge: Gauge) -> int:
        """Return the sum of `gauge` over all slots."""
        return sum(self.slot(index).gauge(gauge) for index in range(self.n_slots))

    def total(self, count: Count, n_rows: int) -> int:
        """Return the sum of a counter over all slots and the first `n_rows` rows."""
        return sum(self._column(slot, count, n_rows) for slot in range(self.n_slots))

    def drawn(self, n_rows: int) -> tuple[int, int]:
        """Return how many requests were ever taken, and how many of them were refused in advance.

        Parameters
        ----------
        n_rows
            Rows in use.
        """
        own = self.n_slots - 1
        taken = self.total(Count.TAKEN, n_rows)
        unseen = _LOSS_INDEX[Loss.UNOBSERVED]  # there was nothing that a limit could refuse
        taken -= sum(self._column(slot, unseen, n_rows) for slot in range(self.n_slots))
        caps = _LOSS_INDEX[Loss.RATE_CAP], _LOSS_INDEX[Loss.BYTE_CAP]
        refused = sum(self._column(slot, cap, n_rows) for slot in range(own) for cap in caps)
        return taken, refused

    def strata(self, rows: Sequence[Row], *, ended: bool = False) -> tuple[StratumCount, ...]:
        """Return the sums over all slots, one entry for each stratum, in the order of their first rows.

        Parameters
        ----------
        rows
            The meaning of each row.
        ended
            Whether every process has ended: what was taken and has no other count is lost with them.
        """
        return sum_strata(rows, map(self._total, range(len(rows))), ended=ended)

    def _column(self, slot: int, count: int, n_rows: int) -> int:
        """Return the sum of a counter over the first rows of a slot."""
        begin = slot * self._stride + N_GAUGES
        return sum(self._cells[begin + count : begin + n_rows * _PER_STRATUM : _PER_STRATUM])

    def _total(self, row: int) -> list[int]:
        begin = N_GAUGES + row * _PER_STRATUM
        starts = range(begin, self.n_slots * self._stride, self._stride)
        return [sum(self._cells[start + i] for start in starts) for i in range(_PER_STRATUM)]


def sum_strata(
    rows: Sequence[Row], counts: Iterable[list[int]], *, ended: bool = False
) -> tuple[StratumCount, ...]:
    """Return the sums of rows by stratum, in the order of their first rows; see `Counters.strata`.

    Parameters
    ----------
    counts
        Of each row, in the order of `COLUMNS`.
    """
    totals: dict[str, _Total] = {}
    for index, (row, of_row) in enumerate(zip(rows, counts, strict=True)):
        if ended:
            _lose_rest(of_row)
        totals.setdefault(row.stratum, _Total()).add(row.model, index, of_row)
    return tuple(total.count(stratum) for stratum, total in totals.items())


class _Total:
    """The counts of one stratum: over all its models, and for each model."""

    def __init__(self) -> None:
        self._sums = [0] * _PER_STRATUM
        self._models: dict[str, ModelCount] = {}

    def add(self, model: str, row: int, counts: list[int]) -> None:
        self._sums = [total + count for total, count in zip(self._sums, counts, strict=True)]
        if model:
            lost = _lost(counts)
            self._models[model] = ModelCount(
                taken=counts[Count.TAKEN],
                lost=lost,
                published=counts[Count.PUBLISHED],
                row=row if counts[Count.NUMBERED] else -1,
                numbered=counts[Count.NUMBERED],
                thinned=counts[Count.THINNED],
                configured=True,
            )

    def count(self, stratum: str) -> StratumCount:
        # The others have not lost anything, unless it is among what was taken without a model.
        all_named = self._sums[Count.TAKEN] == sum(counts.taken for counts in self._models.values())
        return StratumCount(
            stratum=stratum,
            offered=self._sums[Count.OFFERED],
            taken=self._sums[Count.TAKEN],
            thinned=self._sums[Count.THINNED],
            published=self._sums[Count.PUBLISHED],
            lost=_lost(self._sums),
            models={
                model: counts
                for model, counts in self._models.items()
                if counts.taken or counts.lost or not all_named
            },
        )


def _lose_rest(counts: list[int]) -> None:
    """Count what a row has taken, and neither published, thinned nor lost, as lost."""
    n_ended = counts[Count.PUBLISHED] + counts[Count.THINNED] + sum(counts[len(Count) :])
    counts[_LOSS_INDEX[Loss.PROCESS_ENDED]] += max(0, counts[Count.TAKEN] - n_ended)


def _lost(counts: list[int]) -> dict[Loss, int]:
    return {loss: counts[index] for loss, index in _LOSS_INDEX.items() if counts[index]}


class Slot:
    """The counters of one process. Not safe for two writers.

    Parameters
    ----------
    cells
        The slot's part of the table.
    """

    __slots__ = ("_cells",)

    def __init__(self, cells: memoryview) -> None:
        self._cells = cells

    def add(self, stratum: int, count: Count, n: int = 1) -> None:
        """Add `n` to a counter of a row."""
        self._cells[N_GAUGES + stratum * _PER_STRATUM + count] += n

    def lose(self, stratum: int, loss: Loss, n: int = 1) -> None:
        """Count `n` lost exchanges."""
        self._cells[N_GAUGES + stratum * _PER_STRATUM + _LOSS_INDEX[loss]] += n

    def adjust(self, gauge: Gauge, n: int = 1) -> None:
        """Add `n`, which may be negative, to a gauge of the slot."""
        self._cells[gauge] += n

    def set(self, gauge: Gauge, value: int) -> None:
        """Set a gauge of the slot."""
        self._cells[gauge] = value

    def gauge(self, gauge: Gauge) -> int:
        """Return a gauge of the slot."""
        return int(self._cells[gauge])

    def move(self, old: int, new: int, *counts: Count) -> None:
        """Move one request from the counters of a row to those of another, whose model is known now."""
        for count in counts:
            self.add(old, count, -1)
            self.add(new, count)

    def lose_unfinished(self, n_rows: int, received: Count, *, ended: tuple[Count, ...], loss: Loss) -> None:
        """Count under `loss` the exchanges that a predecessor in this slot had not finished when it died.

        Parameters
        ----------
        n_rows
            Rows in use.
        received
            The counter of exchanges that it received.
        ended
            The counters of exchanges that it finished in another way than by a loss.
        loss
            The reason.
        """
        for stratum in range(n_rows):
            n_ended = sum(self.count(stratum, count) for count in ended)
            n_ended += sum(self.lost_count(stratum, each) for each in _LOSSES)
            self.lose(stratum, loss, max(0, self.count(stratum, received) - n_ended))

    def lose_unreceived(self, n_rows: int) -> None:
        """Count what this process has handed over and the capture process has not received as lost.

        Call it while no connection to the capture process is open.

        Parameters
        ----------
        n_rows
            Rows in use.
        """
        for stratum in range(n_rows):
            n = self.count(stratum, Count.HANDED) - self.count(stratum, Count.ARRIVED)
            if n > 0:
                self.add(stratum, Count.HANDED, -n)
                self.lose(stratum, Loss.PROCESS_ENDED, n)

    def count(self, stratum: int, count: Count) -> int:
        """Return a counter of a row."""
        return int(self._cells[N_GAUGES + stratum * _PER_STRATUM + count])

    def lost_count(self, stratum: int, loss: Loss) -> int:
        """Return how many exchanges of a row were lost for this reason."""
        return int(self._cells[N_GAUGES + stratum * _PER_STRATUM + _LOSS_INDEX[loss]])
