"""Which signals a slice has, and what one group shows of each.

From the rows of a batch to the groups that each slice is given.
"""

import itertools
import logging
import math
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from quantdrift.core.config.schema import Budget
from quantdrift.core.records import Metric
from quantdrift.drift.detectors.protocol import BUDGET, CHANGE, TAIL
from quantdrift.drift.detectors.tail.quantile import bin_of
from quantdrift.drift.evidence.group import group_value
from quantdrift.drift.evidence.margin import N_BINS, margin_bin
from quantdrift.drift.evidence.observations import FloatArray
from quantdrift.drift.watch import Groups, Series, SignalKey
from quantdrift.monitor.fold.inclusion import SliceRates
from quantdrift.storage.monitor.rows import ComparisonRow, NoiseRow

WATCHED = (Metric.FLIP, Metric.DIVERGENCE)
LEARNED = (
    (Metric.FLIP, CHANGE.kind),
    (Metric.DIVERGENCE, TAIL.kind),
)  # flips by margin, the divergence by its tail and its body
# Made once: they know their hashes, and every group of every slice is kept under them.
_BUDGETS = {metric: SignalKey(metric.value, BUDGET.kind) for metric in WATCHED}
_CHANGE, _TAIL = (SignalKey(metric.value, kind) for metric, kind in LEARNED)
_LOG = logging.getLogger(__name__)


def cap_of(metric: Metric, budget: Budget) -> float:
    """Return what one unit of the clipped signal is in the metric's own unit."""
    return budget.cap if metric is Metric.DIVERGENCE else 1.0


def budget_of(metric: Metric, budget: Budget) -> float:
    """Return the accepted mean of the clipped signal, over its cap."""
    return budget.divergence / budget.cap if metric is Metric.DIVERGENCE else budget.flip


def scale_of(signal: SignalKey, budget: Budget) -> float:
    """Return what one unit of what a detector observes is in the metric's own unit: tails are not clipped."""
    return 1.0 if signal.kind == TAIL.kind else cap_of(Metric(signal.metric), budget)


def shown(
    slice_id: int, items: Sequence[ComparisonRow], rates: SliceRates, budget: Budget
) -> dict[SignalKey, FloatArray]:
    """Return what one group shows in a slice: per signal its values, (width,). What shows nothing is left out.

    Parameters
    ----------
    slice_id
        The slice, for the log.
    items
        The items of an exchange or of a closed session that lie in it.
    rates
        How the slice is sampled under their policy.
    budget
        With the caps.
    """
    session = bool(items[0].group_key)
    if session:
        items = [item for item in items if rates.keeps_session(item)]
    found: dict[SignalKey, FloatArray] = {}
    for metric in WATCHED:
        cap = cap_of(metric, budget)
        seen = [(item, x / cap) for item in items if (x := clipped(metric, item, cap)) is not None]
        if not seen:
            continue
        value = _weighted(slice_id, seen, 1.0 if session else rates.smallest, session=session)
        if value is not None:
            found[_BUDGETS[metric]] = value
    found |= _learned(items, rates, session=session)
    return found


def _learned(
    items: Sequence[ComparisonRow], rates: SliceRates, *, session: bool
) -> dict[SignalKey, FloatArray]:
    """Return what the detectors without weights see: items thinned to a constant probability."""
    kept = items if session else [item for item in items if rates.keeps(item)]
    found = {}
    flips = [(item, x) for item in kept if (x := clipped(Metric.FLIP, item, 1.0)) is not None]
    if flips:
        value = np.zeros(CHANGE.width)
        for item, x in flips:
            place = margin_bin(item.candidate_margin)
            value[place] += 1.0 / len(flips)
            value[N_BINS + place] += x / len(flips)
        found[_CHANGE] = value
    tail = [x for item in kept if (x := clipped(Metric.DIVERGENCE, item, math.inf)) is not None]
    if tail:
        value = np.zeros(TAIL.width)
        for x in tail:
            value[bin_of(x)] += 1.0
        found[_TAIL] = value / len(tail)
    return found


def clipped(metric: Metric, item: ComparisonRow | NoiseRow, cap: float) -> float | None:
    """Return a metric of an item, at most `cap`; None where it is undefined."""
    value = item.divergence if metric is Metric.DIVERGENCE else item.flip
    return None if value is None or math.isnan(value) else min(max(value, 0.0), cap)


def _weighted(
    slice_id: int, seen: Sequence[tuple[ComparisonRow, float]], smallest: float, *, session: bool
) -> FloatArray | None:
    pi = [1.0 if session else item.pi for item, _ in seen]
    try:
        value = group_value([x for _, x in seen], pi, smallest, len(seen))
    except ValueError as error:
        # What its sidecar said of its sampling does not fit together: no observation, whatever it shows.
        _LOG.warning("exchange %s says nothing of slice %d: %s", seen[0][0].exchange_id, slice_id, error)
        return None
    return np.array([value.vx, value.v])


class ExchangeRows(msgspec.Struct, frozen=True, kw_only=True):
    """The items of one exchange.

    Parameters
    ----------
    order
        Place of the exchange in its batch.
    rows
        Its items, in order.
    """

    order: int
    rows: tuple[ComparisonRow, ...]


def exchanges(rows: Sequence[ComparisonRow]) -> Iterator[ExchangeRows]:
    """Yield the exchanges of a batch whose rows are ordered by (exchange_id, item)."""
    grouped = itertools.groupby(rows, key=lambda row: row.exchange_id)
    for order, (_, found) in enumerate(grouped):
        yield ExchangeRows(order=order, rows=tuple(found))


def slices_of(items: Sequence[ComparisonRow]) -> dict[int, tuple[ComparisonRow, ...]]:
    """Return per slice, ascending, the items that lie in it."""
    ids = sorted({slice_id for row in items for slice_id in row.slice_ids})
    return {slice_id: tuple(row for row in items if slice_id in row.slice_ids) for slice_id in ids}


class SliceGroups:
    """Collects the groups of one slice along a batch."""

    def __init__(self) -> None:
        self._order: list[int] = []
        self._mass: list[float] = []
        self._at_us: list[int] = []
        self._values: dict[SignalKey, list[FloatArray | None]] = {}

    def add(self, order: int, mass: float, at_us: int, values: dict[SignalKey, FloatArray]) -> None:
        """Add one group with its values per signal; a signal without any was not observed."""
        for key in values:
            self._values.setdefault(key, [None] * len(self._order))
        self._order.append(order)
        self._mass.append(mass)
        self._at_us.append(at_us)
        for key, series in self._values.items():
            series.append(values.get(key))

    def groups(self) -> Groups:
        """Return them as arrays."""
        return Groups(
            order=_floats(self._order),
            mass=_floats(self._mass),
            at_us=_floats(self._at_us),
            series={key: _series(values) for key, values in self._values.items()},
        )


def _series(values: Sequence[FloatArray | None]) -> Series:
    observed = [value for value in values if value is not None]
    if len(observed) == len(values):
        return Series(x=np.concatenate(observed).reshape(len(values), -1))
    x = np.zeros((len(values), len(observed[0])))
    seen = np.array([value is not None for value in values])
    x[seen] = observed
    return Series(x=x, seen=seen)


def _floats(values: Sequence[float]) -> FloatArray:
    return np.array(values, dtype=np.float64)
