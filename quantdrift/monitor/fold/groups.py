"""From the rows of a batch to the groups that each slice is given.

An observation is an exchange, or a session that has closed. Its items in one slice are a group. A batch becomes arrays
once: per item, and per group in the order of version, slice and observation.

Which signals a slice has, and what one group shows of each.
"""

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import numpy as np

from quantdrift.core.config.schema import Budget
from quantdrift.core.records import Metric
from quantdrift.core.sampling.inclusion import second_rate
from quantdrift.core.signals import DetectorKind, cap_of, signal_of
from quantdrift.drift.detectors.growth import EDGES as TIME_EDGES
from quantdrift.drift.detectors.protocol import BUDGET, CHANGE, DETECTORS, GROWTH, TAIL
from quantdrift.drift.detectors.tail.quantile import EDGES as TAIL_EDGES
from quantdrift.drift.evidence.group import (
    Items,
    Members,
    group_means,
    group_shares,
    group_times,
    group_value,
    session_value,
)
from quantdrift.drift.evidence.margin import EDGES as MARGIN_EDGES
from quantdrift.drift.evidence.observations import BoolArray, FloatArray, IntArray
from quantdrift.drift.watch import Groups, Series, SignalKey
from quantdrift.monitor.fold.inclusion import SliceRates
from quantdrift.monitor.fold.sessions import Part
from quantdrift.storage.fold_rows import ComparisonRow

# Made once: they know their hashes, and every group of every slice is kept under them.
_FLIP, _DIVERGENCE, LATENCY = (
    SignalKey(metric.value, BUDGET.kind) for metric in (Metric.FLIP, Metric.DIVERGENCE, Metric.LATENCY)
)
_CHANGE = SignalKey(Metric.FLIP.value, CHANGE.kind)
_TAIL = SignalKey(Metric.DIVERGENCE.value, TAIL.kind)
LATENCY_GROWTH = SignalKey(Metric.LATENCY.value, GROWTH.kind)
_LOG = logging.getLogger(__name__)


def scale_of(signal: SignalKey, budget: Budget) -> float:
    """Return what one unit of what a detector observes is in the metric's own unit: tails are not clipped."""
    return 1.0 if signal.kind in {TAIL.kind, GROWTH.kind} else cap_of(signal.metric, budget)


def clipped(metric: Metric, item: object, cap: float) -> float | None:
    """Return a metric of an item, at most `cap`; None where it is undefined."""
    value: float | None = getattr(item, signal_of(metric).column)
    return None if value is None or math.isnan(value) else min(max(value, 0.0), cap)


_COLUMNS = (
    *("pi1", "pi2", "u1", "u2", "candidate_margin", "flip", "topk", "js", "divergence", "margin", "tie"),
    "latency_s",
)
_ROW = attrgetter(*_COLUMNS)
_EXCHANGE = attrgetter("exchange_id")
_RATES = attrgetter("smallest", "sure", "session", "weighted", "session_weighted")
_MARGINS = np.array(MARGIN_EDGES)
_VERSION_BITS = 32


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
    """Yield the exchanges of a batch in which the items of each are next to each other, in order."""
    for order, (_, items) in enumerate(itertools.groupby(rows, key=_EXCHANGE)):
        yield ExchangeRows(order=order, rows=tuple(items))


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
        Whether it is a session that has closed, or the begin of one that is open; its exchanges were observations before, which nothing but the
        roll-ups counts.
    part
        Of a session, what it is of it.
    """

    order: int
    rows: Sequence[ComparisonRow]
    now_us: int
    closed: bool
    part: Part = Part.WHOLE


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
        (items, 12) as in `comparison`; NaN where there is none.
    captured_us, policy_id
        (items,) as in `comparison`.
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
        self.rows = [row for entry in observations for row in entry.rows]
        self.values = np.array([_ROW(row) for row in self.rows], dtype=np.float64)
        self.captured_us = np.array([row.captured_us for row in self.rows], dtype=np.int64)
        self.policy_id = np.array([row.policy_id for row in self.rows], dtype=np.int64)
        self.of = np.repeat(np.arange(len(observations)), [len(entry.rows) for entry in observations])
        slice_ids = [row.slice_ids for row in self.rows]
        n = np.array([len(ids) for ids in slice_ids], dtype=np.intp)
        slices = np.fromiter(itertools.chain.from_iterable(slice_ids), np.int64, count=int(n.sum()))
        versions = np.array([entry.rows[0].model_version_id for entry in observations], dtype=np.int64)
        item = np.repeat(np.arange(len(self.rows)), n)
        key = (versions[self.of[item]] << _VERSION_BITS) | slices
        order = np.argsort(key, kind="stable")
        key, item = key[order], item[order]
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
        column: FloatArray = self.values[:, _COLUMNS.index(name)]
        return column

    def columns(self, names: Sequence[str]) -> FloatArray:
        """Return a copy of columns of `values`, (items, names)."""
        return np.ascontiguousarray(self.values[:, [_COLUMNS.index(name) for name in names]])

    def present(self, names: Sequence[str]) -> BoolArray:
        """Return where items have a value, (items, names); NaN is no value, and neither is null."""
        present: BoolArray = ~np.isnan(self.columns(names))
        return present

    def items(self, cap: FloatArray, judged: Mapping[Metric, BoolArray] = MappingProxyType({})) -> Items:
        """Return what the detectors are made of; `cap` is (items,). `judged` says of which items a metric is judged: else it has no value."""
        flip, divergence = (
            np.where(judged.get(metric, True), self.column(metric.value), np.nan)
            for metric in (Metric.FLIP, Metric.DIVERGENCE)
        )
        divergence = np.maximum(divergence, 0.0)
        return Items(
            flip=np.minimum(np.maximum(flip, 0.0), 1.0),
            divergence=np.minimum(divergence, cap) / cap,
            pi=self.column("pi1") * self.column("pi2"),
            pi1=np.ascontiguousarray(self.column("pi1")),
            u1=np.ascontiguousarray(self.column("u1")),
            u2=np.ascontiguousarray(self.column("u2")),
            margin_bin=np.searchsorted(_MARGINS, self.column("candidate_margin"), side="right"),
            tail_bin=np.searchsorted(TAIL_EDGES, divergence, side="right"),
        )

    def named(self, metric: Metric, asked: BoolArray) -> FloatArray:
        """Return the value of a plug-in's signal of each item whose model asks for it, (items,) in [0, 1]; NaN without one."""
        name = metric.value
        values = np.array(
            [np.nan if (value := row.signals.get(name)) is None else value for row in self.rows]
        )
        named: FloatArray = np.where(asked, np.clip(values, 0.0, 1.0), np.nan)
        return named

    def slow(self, limit_s: FloatArray) -> FloatArray:
        """Return which items took longer than their latency budget, (items,): 1, 0, or NaN without a time or a budget."""
        latency_s = self.column("latency_s")
        slow: FloatArray = np.where(np.isnan(latency_s) | ~(limit_s > 0), np.nan, latency_s > limit_s)
        return slow

    def time_bins(self, asked: BoolArray) -> IntArray:
        """Return the bin of the latency of each item whose model asks for a baseline of it, (items,); -1 without one."""
        latency_s = self.column("latency_s")
        bins: IntArray = np.searchsorted(TIME_EDGES, latency_s, side="right").astype(np.intp)
        return np.where(asked & ~np.isnan(latency_s), bins, -1)

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
    slow, time_bins
        (items,) as `Columns.slow` and `Columns.time_bins` return them; None: no model asks for them.
    named
        (items,) per plug-in's signal, as `Columns.named` returns it.
    policy_id, weighted
        Under which policy the groups were sampled, and whether with rates that differ within their slice.
    begun
        (groups given,) which are the begin of a session: only budgets are shown them.

    Attributes
    ----------
    signals
        Those that groups can show.
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
        slow: FloatArray | None,
        time_bins: IntArray | None,
        named: Mapping[Metric, FloatArray],
        policy_id: IntArray,
        weighted: BoolArray,
        begun: BoolArray,
    ) -> None:
        self._columns = columns
        flips, divergences = (
            group_means(values, items, members) for values in (items.flip, items.divergence)
        )
        shares = group_shares(items, members)
        shown: list[tuple[SignalKey, FloatArray, BoolArray]] = [
            (_FLIP, flips.x, flips.seen),
            (_DIVERGENCE, divergences.x, divergences.seen),
            (_CHANGE, shares.change, shares.seen_change),
            (_TAIL, shares.tail, shares.seen_tail),
        ]
        if slow is not None:
            latencies = group_means(slow, items, members)
            shown.append((LATENCY, latencies.x, latencies.seen))
        if time_bins is not None:
            times = group_times(time_bins, items, members)
            shown.append((LATENCY_GROWTH, times.x, times.seen))
        for metric, values in named.items():
            means = group_means(values, items, members)
            shown.append((SignalKey(metric.value, BUDGET.kind), means.x, means.seen))
            shown += _learned(metric, values, items, members)
        self.signals = tuple(signal for signal, _, _ in shown)
        self._x = [x for _, x, _ in shown]
        self._seen: BoolArray = np.array(
            [seen if signal.kind == BUDGET.kind else seen & ~begun for signal, _, seen in shown]
        )
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

    def codes(self) -> IntArray:
        """Return for each key the sum of 2 ** place of the signals that it shows at all, in the order of `signals`."""
        if not self.keys or self._seen.all():
            return np.full(len(self.keys), 2 ** len(self.signals) - 1)
        some = np.logical_or.reduceat(self._seen, self.starts, axis=1)
        return np.asarray((1 << np.arange(len(self.signals))) @ some)

    def shown(self, number: int) -> list[SignalKey]:
        """Return the signals that the key with this number shows at all."""
        some = np.any(self._seen[:, self.starts[number] : self.ends[number]], axis=1)
        return [signal for signal, is_shown in zip(self.signals, some.tolist(), strict=True) if is_shown]

    def first(self, number: int, signal: SignalKey) -> int:
        """Return the place of the first group of a key that shows a signal."""
        start, end = int(self.starts[number]), int(self.ends[number])
        return start + int(self._seen[self.signals.index(signal), start:end].argmax())

    def last(self, number: int) -> list[tuple[SignalKey, int]]:
        """Return of the key with this number each signal that is shown, and the place of the last group that does."""
        start, end = int(self.starts[number]), int(self.ends[number])
        last = []
        for signal, seen in zip(self.signals, self._seen[:, start:end], strict=True):
            shown = np.flatnonzero(seen)
            if len(shown):
                last.append((signal, start + int(shown[-1])))
        return last

    def key_of(self, place: int) -> tuple[int, int]:
        """Return whose the group at `place` is."""
        return self.keys[int(np.searchsorted(self.starts, place, side="right")) - 1]

    def captured_us(self, observed: Sequence[Observation]) -> IntArray:
        """Return when each group was captured, at its last item; not later than the fold's time then."""
        begin = np.flatnonzero(np.diff(self._columns.of, prepend=-1))
        latest = np.maximum.reduceat(self._columns.captured_us, begin)
        now_us = np.array([observation.now_us for observation in observed], dtype=np.int64)
        return np.minimum(latest, now_us)[self.observation]

    def joined(self, observed: Sequence[Observation], mass: FloatArray) -> Groups:
        """Return the groups as the detectors are given them; `mass` is (observations,)."""
        of = self.observation
        series = {
            signal: Series(x=x, seen=None if seen.all() else seen)
            for signal, x, seen in zip(self.signals, self._x, self._seen, strict=True)
            if seen.any()
        }
        return Groups(
            order=np.array([observation.order for observation in observed], dtype=np.float64)[of],
            mass=mass[of],
            at_us=np.array([observation.now_us for observation in observed], dtype=np.float64)[of],
            captured_us=self.captured_us(observed).astype(np.float64),
            series=series,
        )

    def values(self, number: int, signal: SignalKey) -> tuple[FloatArray, IntArray]:
        """Return what the key with this number shows of a signal, (groups, width), and the observation of each."""
        span = slice(int(self.starts[number]), int(self.ends[number]))
        if signal not in self.signals:
            return np.zeros((0, DETECTORS[signal.kind].width)), self.observation[:0]
        row = self.signals.index(signal)
        seen = self._seen[row, span]
        return self._x[row][span][seen], self.observation[span][seen]


def _learned(
    metric: Metric, values: FloatArray, items: Items, members: Members
) -> list[tuple[SignalKey, FloatArray, BoolArray]]:
    """Return what groups show to the detectors that compare a named signal with what they learned of it."""
    kinds = signal_of(metric).kinds
    if not {DetectorKind.CHANGE, DetectorKind.TAIL} & set(kinds):
        return []
    tail_bin = np.searchsorted(TAIL_EDGES, values, side="right")
    shares = group_shares(items._replace(flip=values, divergence=values, tail_bin=tail_bin), members)
    shown = (
        (DetectorKind.CHANGE, shares.change, shares.seen_change),
        (DetectorKind.TAIL, shares.tail, shares.seen_tail),
    )
    return [(SignalKey(metric.value, kind.value), x, seen) for kind, x, seen in shown if kind in kinds]


def slice_groups(
    observed: Sequence[Observation],
    columns: Columns,
    which: BoolArray,
    cap: FloatArray,
    rates: Callable[[int, int], SliceRates],
    *,
    limit_s: FloatArray | None = None,
    grows: BoolArray | None = None,
    named: Mapping[Metric, FloatArray] = MappingProxyType({}),
    judged: Mapping[Metric, BoolArray] = MappingProxyType({}),
) -> SliceGroups:
    """Return what groups of a batch show; what does not fit to its sampling is left out, and logged.

    Parameters
    ----------
    observed, columns
        The observations, and their items.
    which
        (groups of `columns`,) those that are asked for.
    cap
        (items,) of the divergence.
    rates
        Returns how a slice is sampled under a policy.
    limit_s
        (items,) the latency budget, 0 where there is none; None: no model has one.
    grows
        (items,) whether a baseline of the latency is asked for; None: nowhere.
    named
        (items,) per plug-in's signal that a model asks for, as `Columns.named` returns it.
    judged
        (items,) per metric: whether it is judged; a metric that is not in it is judged of all.
    """
    item, ends = columns.groups(which)
    slice_id, observation = columns.slice_id[which], columns.observation[which]
    closed = np.array([entry.closed for entry in observed])[observation]
    # Of a session, the policy of its first item in the slice.
    policy_id = columns.policy_id[item[ends - np.diff(ends, prepend=0)]]
    later = columns.policy_id[item] != np.repeat(policy_id, np.diff(ends, prepend=0))
    if later.any():
        unbiased = ~later | _is_unbiased(columns, item, np.repeat(slice_id, np.diff(ends, prepend=0)), rates)
        of = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
        ends = np.cumsum(np.bincount(of[unbiased], minlength=len(ends)))
        item, later = item[unbiased], later[unbiased]
    starts = changes(slice_id, policy_id)
    slice_rates = [
        rates(*key) for key in zip(slice_id[starts].tolist(), policy_id[starts].tolist(), strict=True)
    ]
    of = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(slice_id)))
    rows = np.array([_RATES(entry) for entry in slice_rates], dtype=np.float64).reshape(-1, 5)[of]
    smallest, sure, least = (np.ascontiguousarray(rows[:, column]) for column in range(3))
    weighted, of_sessions = rows[:, 3] != 0.0, rows[:, 4] != 0.0
    members = Members(item, ends, smallest, closed, sure, least, later)
    groups = SliceGroups(
        columns,
        which=which,
        members=members,
        items=columns.items(cap, judged),
        slow=None if limit_s is None else columns.slow(limit_s),
        time_bins=None if grows is None else columns.time_bins(grows),
        named=named,
        policy_id=policy_id,
        weighted=np.where(closed, of_sessions, weighted),
        begun=np.array([entry.part is Part.BEGIN for entry in observed])[observation],
    )
    _log_refused(columns, members, slice_id, groups.refused)
    return groups


def _is_unbiased(
    columns: Columns, item: IntArray, slice_id: IntArray, rates: Callable[[int, int], SliceRates]
) -> BoolArray:
    """Return which members of slices, (members,), would have been sampled under their policy whatever they are."""
    pairs = zip(slice_id.tolist(), columns.policy_id[item].tolist(), strict=True)
    sure = np.array([rates(*pair).sure for pair in pairs])
    pi1 = columns.column("pi1")[item]
    second = np.minimum(1.0, np.divide(sure, pi1, out=np.zeros(len(item)), where=pi1 > 0.0))
    unbiased: BoolArray = columns.column("u2")[item] < second
    return unbiased


def _log_refused(columns: Columns, members: Members, slice_id: IntArray, refused: BoolArray) -> None:
    """Log which groups are no observations: their sampling probabilities contradict their policy."""
    for group in np.flatnonzero(refused).tolist():
        places = members.item[members.ends[group - 1] if group else 0 : members.ends[group]].tolist()
        rows = [columns.rows[item] for item in places]
        try:
            if members.session[group]:
                rows = [row for row in rows if row.policy_id == rows[0].policy_id]
                sure = members.sure[group]
                rows = [row for row in rows if row.u2 < second_rate(sure, row.pi1)]
                session_value([0.0] * len(rows), [row.pi1 for row in rows], sure, members.least[group])
            else:
                group_value([0.0] * len(rows), [row.pi for row in rows], members.smallest[group], len(rows))
        except ValueError as error:
            _LOG.warning(
                "exchange %s is left out of slice %d: %s", rows[0].exchange_id, slice_id[group], error
            )
