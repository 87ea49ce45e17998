"""From the rows of a batch to the groups that each slice is given.

An observation is an exchange, or a session that has closed. Its items in one slice are a group. A batch becomes arrays
once: per item, and per group in the order of version, slice and observation.

Which signals a slice has, and what one group shows of each.
"""

import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

import msgspec
import numpy as np

from quantdrift.core.config.schema import Budget
from quantdrift.core.records import Metric
from quantdrift.drift.detectors.protocol import BUDGET, CHANGE, TAIL
from quantdrift.drift.detectors.tail.quantile import EDGES as TAIL_EDGES
from quantdrift.drift.detectors.tail.quantile import bin_of
from quantdrift.drift.evidence.group import (
    Items,
    Members,
    group_means,
    group_shares,
    group_value,
    session_value,
)
from quantdrift.drift.evidence.margin import EDGES as MARGIN_EDGES
from quantdrift.drift.evidence.margin import N_BINS, margin_bin
from quantdrift.drift.evidence.observations import BoolArray, FloatArray, IntArray
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
# In the order of `quantdrift.drift.group.Shown.seen`.
SIGNALS = (_BUDGETS[Metric.FLIP], _BUDGETS[Metric.DIVERGENCE], _CHANGE, _TAIL)
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
    part = [item for item in items if rates.has(item)] if session else items
    found: dict[SignalKey, FloatArray] = {}
    for metric in WATCHED:
        cap = cap_of(metric, budget)
        seen = [(item, x / cap) for item in part if (x := clipped(metric, item, cap)) is not None]
        if not seen:
            continue
        value = _weighted(slice_id, seen, rates, session=session)
        if value is not None:
            found[_BUDGETS[metric]] = value
    found |= _learned(items, rates, session=session)
    return found


def _learned(
    items: Sequence[ComparisonRow], rates: SliceRates, *, session: bool
) -> dict[SignalKey, FloatArray]:
    """Return what the detectors without weights see: items thinned to a constant probability."""
    kept = [item for item in items if (rates.keeps_part(item) if session else rates.keeps(item))]
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
    slice_id: int, seen: Sequence[tuple[ComparisonRow, float]], rates: SliceRates, *, session: bool
) -> FloatArray | None:
    x, c = [value for _, value in seen], rates.session if session else rates.smallest
    try:
        if session:
            value = session_value(x, [item.pi1 for item, _ in seen], rates.sure, c)
        else:
            value = group_value(x, [item.pi for item, _ in seen], c, len(seen))
    except ValueError as error:
        # What its sidecar said of its sampling does not fit together: no observation, whatever it shows.
        _LOG.warning("exchange %s says nothing of slice %d: %s", seen[0][0].exchange_id, slice_id, error)
        return None
    return np.array([value.vx, value.v, c])


_COLUMNS = ("pi1", "pi2", "u1", "u2", "candidate_margin", "flip", "topk", "js", "divergence", "margin", "tie")
_ROW = attrgetter(*_COLUMNS)
_EXCHANGE = attrgetter("exchange_id")
_MARGINS = np.array(MARGIN_EDGES)
_VERSION_BITS = 32
# By the sum of 2 ** place.
_SOME = [
    tuple(signal for place, signal in enumerate(SIGNALS) if code >> place & 1)
    for code in range(2 ** len(SIGNALS))
]


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
    for order, (_, found) in enumerate(itertools.groupby(rows, key=_EXCHANGE)):
        yield ExchangeRows(order=order, rows=tuple(found))


def slices_of(items: Sequence[ComparisonRow]) -> dict[int, tuple[ComparisonRow, ...]]:
    """Return per slice, ascending, the items that lie in it."""
    ids = sorted({slice_id for row in items for slice_id in row.slice_ids})
    return {slice_id: tuple(row for row in items if slice_id in row.slice_ids) for slice_id in ids}


class Observation(NamedTuple):
    """Items that count once.

    Parameters
    ----------
    order
        Place in its batch.
    rows
        Its items, in order; the first says version, policy and session.
    now_us
        The fold's time when it came.
    closed
        Whether it is a session that has closed; its exchanges were observations before, which nothing but the
        roll-ups counts.
    """

    order: int
    rows: Sequence[ComparisonRow]
    now_us: int
    closed: bool

    @property
    def counts(self) -> bool:
        """Whether the detectors are given it: an exchange of a session is not, the session is."""
        return self.closed or not self.rows[0].group_key


class Columns:
    """The items of some observations by columns, and in which slices they lie.

    Parameters
    ----------
    observations
        At least one.

    Attributes
    ----------
    rows
        The items, observation after observation.
    values
        (items, 11) as in `comparison`; NaN where there is none.
    of
        (items,) observation.
    item
        Members of the groups, group after group: the place of the item.
    ends
        (groups,) where the members of each group end.
    version, slice_id, observation
        (groups,) whose group it is.
    """

    def __init__(self, observations: Sequence[Observation]) -> None:
        self.rows = [row for one in observations for row in one.rows]
        self.values = np.array([_ROW(row) for row in self.rows], dtype=np.float64)
        self.captured_us = np.array([row.captured_us for row in self.rows], dtype=np.int64)
        self.of = np.repeat(np.arange(len(observations)), [len(one.rows) for one in observations])
        slice_ids = [row.slice_ids for row in self.rows]
        n = np.array([len(ids) for ids in slice_ids], dtype=np.intp)
        slices = np.fromiter(itertools.chain.from_iterable(slice_ids), np.int64, count=int(n.sum()))
        versions = np.array([one.rows[0].model_version_id for one in observations], dtype=np.int64)
        item = np.repeat(np.arange(len(self.rows)), n)
        key = (versions[self.of[item]] << _VERSION_BITS) | slices
        place = np.argsort(key, kind="stable")
        key, item = key[place], item[place]
        again = np.zeros(len(key), dtype=np.bool_)
        again[1:] = (key[1:] == key[:-1]) & (item[1:] == item[:-1])
        if again.any():  # a slice that was named twice
            key, item = key[~again], item[~again]
        self.item: IntArray = item
        observation = self.of[item]
        starts = changes(key, observation)
        self.ends: IntArray = np.append(starts[1:], len(key)) if len(key) else starts
        self.version, self.slice_id = key[starts] >> _VERSION_BITS, key[starts] & (2**_VERSION_BITS - 1)
        self.observation = observation[starts]

    def column(self, name: str) -> FloatArray:
        """Return a column of `values`."""
        found: FloatArray = self.values[:, _COLUMNS.index(name)]
        return found

    def present(self, names: Sequence[str]) -> BoolArray:
        """Return where items have a value, be it no number, (items, names)."""
        found: BoolArray = ~np.isnan(self.values[:, [_COLUMNS.index(name) for name in names]])
        for place, column in np.argwhere(~found).tolist():
            found[place, column] = getattr(self.rows[place], names[column]) is not None
        return found

    def items(self, cap: FloatArray) -> Items:
        """Return what the detectors are made of; `cap` is (items,)."""
        divergence = np.maximum(self.column("divergence"), 0.0)
        return Items(
            flip=np.minimum(np.maximum(self.column("flip"), 0.0), 1.0),
            divergence=np.minimum(divergence, cap) / cap,
            pi=self.column("pi1") * self.column("pi2"),
            pi1=np.ascontiguousarray(self.column("pi1")),
            u1=np.ascontiguousarray(self.column("u1")),
            u2=np.ascontiguousarray(self.column("u2")),
            margin_bin=np.searchsorted(_MARGINS, self.column("candidate_margin"), side="right"),
            tail_bin=np.searchsorted(TAIL_EDGES, divergence, side="right"),
        )

    def groups(self, which: BoolArray) -> tuple[IntArray, IntArray]:
        """Return members and ends of some groups, (groups,)."""
        if which.all():
            return self.item, self.ends
        n = np.diff(self.ends, prepend=0)
        return self.item[np.repeat(which, n)], np.cumsum(n[which])


def changes(*columns: IntArray) -> IntArray:
    """Return where a stretch begins in which no column changes."""
    new = np.zeros(len(columns[0]), dtype=np.bool_)
    new[:1] = True
    for column in columns:
        new[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(new)


class SliceGroups:
    """What the groups of a batch show, slice after slice; a group that shows nothing is left out.

    Parameters
    ----------
    columns
        The items.
    which
        (groups of `columns`,) those that the detectors are given.
    members
        Their items.
    items
        What these show.
    policy_id, weighted
        Under which policy the groups were sampled, and whether with rates that differ within their slice.

    Attributes
    ----------
    keys
        Candidate version and slice of each run of groups.
    starts, ends
        (keys,) where these begin and end.
    observation, policy_id, weighted
        (groups,) of what each is a part, and how it was sampled.
    refused
        (groups given,) which show a metric less, since a weight is above 1.
    """

    def __init__(
        self,
        columns: Columns,
        *,
        which: BoolArray,
        members: Members,
        items: Items,
        policy_id: IntArray,
        weighted: BoolArray,
    ) -> None:
        self._columns = columns
        flips, divergences = (group_means(one, items, members) for one in (items.flip, items.divergence))
        shares = group_shares(items, members)
        self._x = [flips.x, divergences.x, shares.change, shares.tail]
        self._seen: BoolArray = np.array([flips.seen, divergences.seen, shares.seen_change, shares.seen_tail])
        self.refused: BoolArray = flips.refused | divergences.refused
        self.policy_id, self.weighted = policy_id, weighted
        some: BoolArray = np.asarray(self._seen.any(axis=0))
        version, slice_id = columns.version[which], columns.slice_id[which]
        self.observation: IntArray = columns.observation[which]
        if not some.all():
            version, slice_id, self.observation = version[some], slice_id[some], self.observation[some]
            self.policy_id, self.weighted = policy_id[some], weighted[some]
            self._x, self._seen = [x[some] for x in self._x], self._seen[:, some]
        self.starts = changes(version, slice_id)
        self.ends: IntArray = np.append(self.starts[1:], len(version)) if len(version) else self.starts
        self.keys: list[tuple[int, int]] = list(
            zip(version[self.starts].tolist(), slice_id[self.starts].tolist(), strict=True)
        )

    def shown(self) -> list[tuple[SignalKey, ...]]:
        """Return per key the signals that it shows at all."""
        seen = self._seen
        if not self.keys or seen.all():
            return [SIGNALS] * len(self.keys)
        code = 1 << np.arange(len(SIGNALS))
        return [_SOME[one] for one in (code @ np.logical_or.reduceat(seen, self.starts, axis=1)).tolist()]

    def first(self, number: int, signal: SignalKey) -> int:
        """Return the place of the first group of a key that shows a signal."""
        start, end = int(self.starts[number]), int(self.ends[number])
        return start + int(self._seen[SIGNALS.index(signal), start:end].argmax())

    def last(self, number: int) -> list[tuple[SignalKey, int]]:
        """Return of the key with this number each signal that is shown, and the place of the last group that does."""
        start, end = int(self.starts[number]), int(self.ends[number])
        found = []
        for signal, seen in zip(SIGNALS, self._seen[:, start:end], strict=True):
            shown = np.flatnonzero(seen)
            if len(shown):
                found.append((signal, start + int(shown[-1])))
        return found

    def key_of(self, place: int) -> tuple[int, int]:
        """Return whose the group at `place` is."""
        return self.keys[int(np.searchsorted(self.starts, place, side="right")) - 1]

    def captured_us(self, observed: Sequence[Observation]) -> IntArray:
        """Return when each group was captured, at its last item; not later than the fold's time then."""
        begin = np.flatnonzero(np.diff(self._columns.of, prepend=-1))
        latest = np.maximum.reduceat(self._columns.captured_us, begin)
        now_us = np.array([one.now_us for one in observed], dtype=np.int64)
        return np.minimum(latest, now_us)[self.observation]

    def joined(self, observed: Sequence[Observation], mass: FloatArray) -> Groups:
        """Return the groups as the detectors are given them; `mass` is (observations,)."""
        of = self.observation
        series = {
            signal: Series(x=x, seen=None if seen.all() else seen)
            for signal, x, seen in zip(SIGNALS, self._x, self._seen, strict=True)
            if seen.any()
        }
        return Groups(
            order=np.array([one.order for one in observed], dtype=np.float64)[of],
            mass=mass[of],
            at_us=np.array([one.now_us for one in observed], dtype=np.float64)[of],
            series=series,
        )
