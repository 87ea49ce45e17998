"""One slice under watch: its signals' evidence is summed, and they alarm, reset and resolve together.

Watching -> warning when the ticket copies' summed evidence passes its threshold, -> firing when the page copies' does;
the latency of the candidate is in the sum for tickets alone: a slow candidate must not hide or delay the page for wrong
answers, and while a page lasts no other one opens;
back to watching when every live signal has shown to be inside its budget again. After an alarm the copy that alarmed
is paused until then, so one breach is one alarm.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from enum import StrEnum
from typing import NamedTuple, Self

import msgspec
import numpy as np

from quantdrift.core.records import Metric
from quantdrift.core.signals import signal_of
from quantdrift.drift.detectors.protocol import BUDGET, CHANGE, DETECTORS
from quantdrift.drift.evidence import header as signal
from quantdrift.drift.evidence.clock import DAY_MASS
from quantdrift.drift.evidence.observations import BoolArray, FloatArray, GroupSequence, IntArray
from quantdrift.drift.evidence.recovery import RESOLVED
from quantdrift.drift.evidence.run import (
    N_ROWS,
    PAGE,
    PAGE_MASS,
    RECOVERY,
    SIDE_BY_SIDE,
    TICKET,
    TICKET_MASS,
    SequenceRun,
)


class Phase(StrEnum):
    """The phase of a watched slice: no alarm, a ticket, or a page."""

    WATCHING = "watching"
    WARNING = "warning"
    FIRING = "firing"


class Thresholds(msgspec.Struct, frozen=True, kw_only=True):
    """The thresholds that the summed evidence must reach for an alarm.

    Parameters
    ----------
    page, ticket
        1 / q, q the expected false alarms per 30 days of the whole fleet.
    mass_ratio
        The evidence must also be this many times the mass given since the reset, or, where that is less, this many times
        the mass that the whole fleet gets in a day. Without it one observation could page after a day of silence, when
        the mass alone comes near 1 / q. No group gets more than a day's mass, so the threshold need not grow with age.
    """

    page: float
    ticket: float
    mass_ratio: float = 1000.0

    def least(self, mass: FloatArray | float) -> FloatArray:
        """Return the second threshold, beside 1 / q, from the mass given since the reset."""
        return np.asarray(self.mass_ratio * np.minimum(mass, DAY_MASS))


class SignalKey(msgspec.Struct, frozen=True, order=True, cache_hash=True):
    """The key of a signal: a metric of a slice, and the kind of detector that follows it."""

    metric: str
    kind: str


def pages(key: SignalKey) -> bool:
    """Return whether evidence of a signal counts for pages, and not for tickets alone."""
    return signal_of(key.metric).pages


def is_limited(key: SignalKey) -> bool:
    """Return whether noise of the reference alone can raise a signal's mean: its evidence counts up to `SliceArrays.limits`."""
    return key.metric in LIMITED and key.kind in _MEANS


_MEANS = (BUDGET.kind, CHANGE.kind)
LIMITED = (Metric.FLIP.value, Metric.DIVERGENCE.value)
"""The metrics of limited signals: those that a second replay measures."""


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """The values of one signal in a series of groups.

    Parameters
    ----------
    x
        (steps, width) the values of each group.
    seen
        (steps,) whether the group has a value; None if all have one.
    """

    x: FloatArray
    seen: BoolArray | None = None

    def at(self, rows: slice | IntArray) -> Self:
        """Return the part with the groups at `rows`."""
        seen = None if self.seen is None else self.seen[rows]
        return msgspec.structs.replace(self, x=self.x[rows], seen=seen)


class Groups(msgspec.Struct, frozen=True, kw_only=True):
    """The new groups of a slice, in the order of the fold.

    Parameters
    ----------
    order
        (steps,) index of each group in its batch.
    mass
        (steps,) calendar mass at the group's time.
    at_us
        (steps,) event time, microseconds.
    captured_us
        (steps,) when they were captured: before `at_us` where newer ones came first. None: none did.
    series
        Values by signal; a signal without an entry has no values.
    """

    order: FloatArray
    mass: FloatArray
    at_us: FloatArray
    series: dict[SignalKey, Series]
    captured_us: FloatArray | None = None

    @property
    def dates_us(self) -> FloatArray:
        """When they were captured."""
        return self.at_us if self.captured_us is None else self.captured_us

    def of(self, parts: Sequence["_Part"]) -> Self:
        """Return those of the parts, one after another."""
        first, last = parts[0].start, parts[-1].stop
        if all(before.stop == after.start for before, after in itertools.pairwise(parts)):
            rows: slice | IntArray = slice(first, last)
            if (first, last) == (0, len(self.order)):
                return self
        else:
            rows = np.concatenate([np.arange(part.start, part.stop) for part in parts])
        return msgspec.structs.replace(
            self,
            order=self.order[rows],
            mass=self.mass[rows],
            at_us=self.at_us[rows],
            captured_us=self.dates_us[rows],
            series={key: series.at(rows) for key, series in self.series.items()},
        )


class Survey(msgspec.Struct, frozen=True, gc=False):
    """What the states of a slice say together.

    Parameters
    ----------
    evidence
        Page evidence of each signal, in the order of the keys.
    total
        The sum of the evidence for a page.
    page_mass
        Sum of the calendar mass given to the page copies since their reset.
    n_groups
        Largest number of groups that any signal has had.
    n_armed
        The same since the last reset, of the signals that count for pages.
    policy_id
        Policy of the last group; 0 before the first.
    missing
        Largest number of groups that any baseline still needs.
    due_us
        Event time from which on `Detector.tend` has something to do.
    """

    evidence: tuple[float, ...]
    total: float
    page_mass: float
    n_groups: int
    n_armed: int
    policy_id: int
    missing: int
    due_us: float


class SliceArrays:
    """The states of many slices: one array for each signal, in which each slice has a row, and columns of what they say.

    A row keeps its number until it is freed. Arrays grow by doubling: a view of a row must not be kept while a row may
    be added.

    Attributes
    ----------
    states
        Per signal (rows, size); the row of a slice without the signal says nothing.
    has
        Per signal (rows,) which slices have it.
    n_signals
        (rows,) how many signals each has.
    phase
        (rows,) place of the phase in `PHASES`.
    may_page
        (rows,) whether evidence can end in a page, and not only in a ticket.
    surveyed
        (rows,) whether the columns below are those of the states: whoever changes a state sets it to False.
    evidence
        Per signal (rows,) as in `Survey`.
    total, page_mass, n_groups, n_armed, policy_id, missing, due_us
        (rows,) as in `Survey`.
    unlimited
        (rows,) the sum of the evidence for a page without `limits`.
    limits
        Per metric (rows,) the most evidence for a page that each of its limited signals counts for; infinite where nothing limits
        it. Less evidence than there is keeps the bound on false pages.
    """

    def __init__(self) -> None:
        self.n_rows = 0
        self._free: list[int] = []
        self.keys: list[SignalKey] = []
        self.states: dict[SignalKey, FloatArray] = {}
        self.has: dict[SignalKey, BoolArray] = {}
        self.evidence: dict[SignalKey, FloatArray] = {}
        self.n_signals: IntArray = np.zeros(1, dtype=np.intp)
        self.phase: IntArray = np.zeros(1, dtype=np.intp)
        self.may_page: BoolArray = np.zeros(1, dtype=np.bool_)
        self.surveyed: BoolArray = np.zeros(1, dtype=np.bool_)
        self.total: FloatArray = np.zeros(1)
        self.page_mass: FloatArray = np.zeros(1)
        self.n_groups: IntArray = np.zeros(1, dtype=np.intp)
        self.n_armed: IntArray = np.zeros(1, dtype=np.intp)
        self.policy_id: IntArray = np.zeros(1, dtype=np.intp)
        self.missing: IntArray = np.zeros(1, dtype=np.intp)
        self.due_us: FloatArray = np.zeros(1)
        self.unlimited: FloatArray = np.zeros(1)
        self.limits: dict[str, FloatArray] = {metric: np.full(1, np.inf) for metric in LIMITED}

    def add_row(self) -> int:
        """Return the number of a row without signals."""
        if self._free:
            row = self._free.pop()
        else:
            if self.n_rows == len(self.total):
                self._double()
            self.n_rows += 1
            row = self.n_rows - 1
        for limit in self.limits.values():
            limit[row] = np.inf
        return row

    def limit(self, row: int, metric: str, most: float) -> None:
        """Let each limited signal of a metric count for a page with at most this evidence."""
        self.limits[metric][row] = most
        self.surveyed[row] = False

    def free_row(self, row: int) -> None:
        """Let a row be used for another slice."""
        for key in self.keys:
            self.remove(row, key)
        self._free.append(row)

    def put(self, row: int, key: SignalKey, state: FloatArray) -> None:
        """Write the state of a signal, (size,), which the row may not have yet."""
        if key not in self.states:
            n = len(self.total)
            self.states[key], self.has[key] = np.zeros((n, len(state))), np.zeros(n, dtype=np.bool_)
            self.evidence[key] = np.zeros(n)
            self.keys = sorted(self.states)
        self.states[key][row] = state
        self.n_signals[row] += not self.has[key][row]
        self.has[key][row] = True
        self.surveyed[row] = False

    def remove(self, row: int, key: SignalKey) -> None:
        """Remove a signal of a row, if it has it."""
        self.n_signals[row] -= bool(self.has[key][row])
        self.has[key][row] = False
        self.surveyed[row] = False

    def signals(self, row: int) -> list[SignalKey]:
        """Return the signals of a row, in their order."""
        return [key for key in self.keys if self.has[key][row]]

    def survey(self, row: int) -> Survey:
        """Return what the states of a row say together."""
        keys = self.signals(row)
        if not self.surveyed[row]:
            self._survey(row, keys)
        return Survey(
            evidence=tuple(self.evidence[key].item(row) for key in keys),
            total=self.total.item(row),
            page_mass=self.page_mass.item(row),
            n_groups=self.n_groups.item(row),
            n_armed=self.n_armed.item(row),
            policy_id=self.policy_id.item(row),
            missing=self.missing.item(row),
            due_us=self.due_us.item(row),
        )

    def survey_all(self, rows: IntArray) -> None:
        """Make sure that the columns of some rows are those of their states."""
        for row in rows[~self.surveyed[rows]].tolist():
            self._survey(row, self.signals(row))

    def page_thresholds(self, rows: IntArray, thresholds: Thresholds) -> FloatArray:
        """Return what the summed evidence of rows that are surveyed must reach to page now."""
        needed: FloatArray = np.maximum(thresholds.page, thresholds.least(self.page_mass[rows]))
        return needed

    def doubts(
        self, rows: IntArray, thresholds: Thresholds, evidence: FloatArray | None = None
    ) -> FloatArray:
        """Return `SliceWatch.doubt` of rows that are surveyed, or the same of other `evidence` of all rows."""
        most = np.maximum(thresholds.page, thresholds.mass_ratio * self.page_mass[rows])
        return np.asarray((self.total if evidence is None else evidence)[rows] / most)

    def _survey(self, row: int, keys: Sequence[SignalKey]) -> None:
        total = unlimited = page_mass = 0.0
        n_groups = n_armed = policy_id = missing = 0
        for key in keys:
            detector, state = DETECTORS[key.kind], self.states[key][row]
            evidence = self.evidence[key][row] = detector.evidence(state)
            if pages(key):
                unlimited += evidence
                total += min(evidence, self.limits[key.metric].item(row)) if is_limited(key) else evidence
                page_mass += detector.page_mass(state)
                n_armed = max(n_armed, int(state[signal.N]))
            n_groups = max(n_groups, int(state[signal.N_TOTAL]))
            policy_id = max(policy_id, int(state[signal.POLICY]))
            missing = max(missing, detector.missing(state))
        self.total[row], self.unlimited[row], self.page_mass[row] = total, unlimited, page_mass
        self.n_groups[row], self.policy_id[row], self.missing[row] = n_groups, policy_id, missing
        self.n_armed[row] = n_armed
        self.due_us[row] = -math.inf
        self.surveyed[row] = True

    def survey_from(self, rows: IntArray, states: Mapping[SignalKey, FloatArray]) -> None:
        """Set the columns of rows that all have the same signals, from these states, (rows, size) each."""
        n = len(rows)
        total, unlimited, page_mass = np.zeros((3, n))
        header, missing = np.zeros((n, 2)), np.zeros(n, dtype=np.intp)
        n_armed = np.zeros(n)
        due_us = np.full(n, np.inf)
        for key in sorted(states):
            detector, of = DETECTORS[key.kind], states[key]
            evidence = detector.evidences(of)
            self.evidence[key][rows] = evidence
            if pages(key):
                unlimited += evidence
                total += np.minimum(evidence, self.limits[key.metric][rows]) if is_limited(key) else evidence
                page_mass += of[:, signal.PAGE_MASS]
                np.maximum(n_armed, of[:, signal.N], out=n_armed)
            np.maximum(header, of[:, _COUNTED], out=header)
            np.minimum(due_us, detector.due_us(of), out=due_us)
            np.maximum(missing, detector.missings(of), out=missing)
        self.total[rows], self.page_mass[rows], self.missing[rows] = total, page_mass, missing
        self.unlimited[rows] = unlimited
        self.n_groups[rows], self.policy_id[rows] = header[:, 0], header[:, 1]
        self.n_armed[rows] = n_armed
        self.due_us[rows] = due_us
        self.surveyed[rows] = True

    def _double(self) -> None:
        """Give every array twice as many rows."""
        for of_signals in (self.states, self.has, self.evidence):
            for key, column in of_signals.items():
                of_signals[key] = doubled(column)
        self.limits = {metric: doubled(column) for metric, column in self.limits.items()}
        for name, column in vars(self).items():
            if isinstance(column, np.ndarray):
                setattr(self, name, doubled(column))


_COUNTED = [signal.N_TOTAL, signal.POLICY]


def doubled(column: np.ndarray) -> np.ndarray:
    """Return a column with as many rows more, of zeros."""
    return np.concatenate([column, np.zeros_like(column)])


class SliceStates(MutableMapping[SignalKey, FloatArray]):
    """The states of one slice by signal. One that is read is a view of its row, to be changed in place."""

    __slots__ = ("_row", "_table")

    def __init__(self, table: SliceArrays, row: int) -> None:
        self._table, self._row = table, row

    def __getitem__(self, key: SignalKey) -> FloatArray:
        """Return the state of a signal."""
        if key not in self:
            raise KeyError(key)
        state: FloatArray = self._table.states[key][self._row]
        return state

    def __setitem__(self, key: SignalKey, state: FloatArray) -> None:
        """Write a copy of the state of a signal, new or not."""
        self._table.put(self._row, key, state)

    def __delitem__(self, key: SignalKey) -> None:
        """Remove a signal."""
        self._table.remove(self._row, key)

    def __contains__(self, key: object) -> bool:
        """Return whether the slice has a signal."""
        return key in self._table.has and bool(self._table.has[key][self._row])

    def __iter__(self) -> Iterator[SignalKey]:
        """Yield the signals in their order."""
        return iter(self._table.signals(self._row))

    def __len__(self) -> int:
        """Return how many signals there are."""
        return self._table.n_signals.item(self._row)


class SliceWatch:
    """A slice's phase and the states of its signals: a row of a table. `advance` changes it in place.

    Code that changes a state in another way calls `touched`.

    Parameters
    ----------
    phase
        The current phase.
    states
        One per signal, copied into the table.
    table
        Where they are; None: a table of its own, until it is advanced with others.
    """

    def __init__(
        self,
        phase: Phase = Phase.WATCHING,
        states: Mapping[SignalKey, FloatArray] | None = None,
        table: SliceArrays | None = None,
        *,
        may_page: bool = True,
    ) -> None:
        self._place(table or SliceArrays(), phase, states or {}, may_page=may_page)

    def _place(
        self, table: SliceArrays, phase: Phase, states: Mapping[SignalKey, FloatArray], *, may_page: bool
    ) -> None:
        self.table, self.row = table, table.add_row()
        table.may_page[self.row] = may_page
        self.states = SliceStates(table, self.row)
        self.states.update(states)
        self.phase = phase
        self.touched()

    def move(self, table: SliceArrays) -> None:
        """Move to another table."""
        limits = {metric: column.item(self.row) for metric, column in self.table.limits.items()}
        self._place(table, self.phase, self.states, may_page=bool(self.table.may_page[self.row]))
        for metric, most in limits.items():
            table.limit(self.row, metric, most)

    @property
    def phase(self) -> Phase:
        """Where the slice stands."""
        return PHASES[self.table.phase.item(self.row)]

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self.table.phase[self.row] = PHASES.index(phase)

    def survey(self) -> Survey:
        """Return what the states say together."""
        return self.table.survey(self.row)

    def touched(self) -> None:
        """Note that a state has changed."""
        self.table.surveyed[self.row] = False

    def add(self, key: SignalKey, state: FloatArray) -> None:
        """Add a signal. During an alert the new signal must recover too before the alert ends."""
        self.states[key] = state
        if self.phase is not Phase.WATCHING:
            DETECTORS[key.kind].alarmed(self.states[key], page=self.phase is Phase.FIRING)

    def alarm(self, phase: Phase) -> None:
        """Begin an alert, or turn a ticket into a page: the evidence for it begins again."""
        self.phase = phase
        for key, state in self.states.items():
            DETECTORS[key.kind].alarmed(state, page=phase is Phase.FIRING)
        self.touched()

    def stand_down(self, *, mass: float, at_us: int) -> None:
        """End an alert whose slice or version is no longer observed, and start again with empty evidence."""
        self.phase = Phase.WATCHING
        for key, state in self.states.items():
            DETECTORS[key.kind].arm(state, mass=mass, at_us=at_us)
        self.touched()

    def evidence(self) -> float:
        """Return the summed evidence for paging."""
        return self.survey().total

    def page_threshold(self, thresholds: Thresholds) -> float:
        """Return the threshold that the summed evidence must reach now for a page."""
        return max(thresholds.page, float(thresholds.least(self.survey().page_mass)))

    def doubt(self, thresholds: Thresholds) -> float:
        """Return the evidence over the threshold that would hold if `mass_ratio` applied to all of the mass.

        The evidence of a healthy slice grows with its mass. In a small fleet a thousandth of the threshold would be
        normal for an old slice.
        """
        survey = self.survey()
        return survey.total / max(thresholds.page, thresholds.mass_ratio * survey.page_mass)


PHASES = tuple(Phase)


class PhaseChange(msgspec.Struct, frozen=True, kw_only=True):
    """A change of phase.

    Parameters
    ----------
    watch
        Index of the watch among those that were advanced.
    before, after
        The phases.
    order
        Index of the deciding group in its batch.
    at_us
        Event time of that group.
    evidence
        The evidence that decided, by signal: for an alarm, or for recovery if the alert ended.
    threshold
        The threshold for the sum of the evidence; for recovery, for the smallest of it.
    states
        The state that decided, by signal, before the reset.
    """

    watch: int
    before: Phase
    after: Phase
    order: int
    at_us: int
    evidence: dict[SignalKey, float]
    threshold: float
    states: dict[SignalKey, FloatArray]


def advance(
    watches: Sequence[SliceWatch], groups: Sequence[Groups], thresholds: Thresholds
) -> list[PhaseChange]:
    """Give each watch its groups and return the changes of phase, ordered by group and watch.

    The same watches with the same groups give the same bits, whatever other watches are advanced with them.
    """
    return advance_joined(watches, *_joined(groups), thresholds)


def advance_joined(
    watches: Sequence[SliceWatch], groups: Groups, ends: IntArray, thresholds: Thresholds
) -> list[PhaseChange]:
    """Do the same as `advance`, with the groups of all watches in one series.

    Parameters
    ----------
    watches
        The watches to advance.
    groups
        The groups of the first watch, then those of the second, and so on.
    ends
        (watches,) where the groups of each watch end.
    thresholds
        The thresholds of an alarm.
    """
    changes: list[PhaseChange] = []
    scratch: dict[SignalKey, FloatArray] = {}
    if any(watch.table is not watches[0].table for watch in watches):
        table = SliceArrays()
        for watch in watches:
            watch.move(table)
    stops = ends.tolist()
    pending = [
        _Part(index, start, stop)
        for index, (start, stop) in enumerate(zip((0, *stops), stops, strict=False))
        if start < stop
    ]
    while pending:
        parts_by_keys = _by_signals(watches, pending)
        pending = []
        for keys, parts in parts_by_keys.items():
            for first in range(0, len(parts), SIDE_BY_SIDE):
                run = _Run(watches, groups, parts[first : first + SIDE_BY_SIDE], keys, scratch)
                pending += run.finish(thresholds, changes)
    changes.sort(key=lambda change: (change.order, change.watch))
    return changes


def page_now(watch: SliceWatch, thresholds: Thresholds, *, at_us: int) -> PhaseChange | None:
    """Turn a watch to `firing` without another group, if its evidence is enough for a page since its limits were lifted.

    Parameters
    ----------
    at_us
        Event time of the page.
    """
    table, row, threshold = watch.table, watch.row, watch.page_threshold(thresholds)
    if watch.phase is Phase.FIRING or not table.may_page[row] or watch.evidence() < threshold:
        return None
    change = PhaseChange(
        watch=0,
        before=watch.phase,
        after=Phase.FIRING,
        order=0,
        at_us=at_us,
        evidence={key: table.evidence[key].item(row) if pages(key) else 0.0 for key in watch.states},
        threshold=threshold,
        states={key: state.copy() for key, state in watch.states.items()},
    )
    watch.alarm(Phase.FIRING)
    return change


def _by_signals(
    watches: Sequence[SliceWatch], parts: Sequence["_Part"]
) -> dict[tuple[SignalKey, ...], list["_Part"]]:
    """Return the parts by the signals of their watches."""
    table = watches[0].table
    rows = np.array([watches[part.watch].row for part in parts], dtype=np.intp)
    if (table.n_signals[rows] == len(table.keys)).all():
        return {tuple(table.keys): list(parts)}
    by_signals: dict[tuple[SignalKey, ...], list[_Part]] = {}
    for part, row in zip(parts, rows.tolist(), strict=True):
        by_signals.setdefault(tuple(table.signals(row)), []).append(part)
    return by_signals


def _joined(groups: Sequence[Groups]) -> tuple[Groups, IntArray]:
    """Return the groups of several watches as one series, and where the groups of each watch end."""
    n = [len(batch.order) for batch in groups]
    widths = {key: series.x.shape[1] for batch in groups for key, series in batch.series.items()}
    empty_array = np.zeros(0)
    joined = Groups(
        order=np.concatenate([empty_array, *(batch.order for batch in groups)]),
        mass=np.concatenate([empty_array, *(batch.mass for batch in groups)]),
        at_us=np.concatenate([empty_array, *(batch.at_us for batch in groups)]),
        captured_us=np.concatenate([empty_array, *(batch.dates_us for batch in groups)]),
        series={
            key: _one_after_another([batch.series.get(key) for batch in groups], n, width)
            for key, width in widths.items()
        },
    )
    return joined, np.cumsum(n, dtype=np.intp)


def _one_after_another(series: Sequence[Series | None], n: Sequence[int], width: int) -> Series:
    """Return one signal's parts in several series of `n` groups; None: not observed."""
    x = np.concatenate(
        [
            np.zeros((steps, width)) if values is None else values.x
            for values, steps in zip(series, n, strict=True)
        ]
    )
    if all(values is not None and values.seen is None for values in series):
        return Series(x=x)
    seen = [
        np.zeros(steps, dtype=np.bool_)
        if values is None
        else np.ones(steps, dtype=np.bool_)
        if values.seen is None
        else values.seen
        for values, steps in zip(series, n, strict=True)
    ]
    return Series(x=x, seen=np.concatenate(seen))


class _Part(NamedTuple):
    """A part of a watch's groups that its signals have not processed yet.

    Parameters
    ----------
    watch
        Index of the watch.
    start, stop
        Indices in the joined groups: from `start`, before `stop`.
    """

    watch: int
    start: int
    stop: int


class _Run:
    """The processing of some groups of several watches with the same signals, side by side."""

    def __init__(
        self,
        watches: Sequence[SliceWatch],
        groups: Groups,
        parts: list[_Part],
        keys: Sequence[SignalKey],
        scratch: dict[SignalKey, FloatArray],
    ) -> None:
        self._watches, self._groups, self._scratch = watches, groups, scratch
        self._parts, self._keys = parts, keys
        self._table = watches[0].table
        self._rows: IntArray = np.array([watches[part.watch].row for part in parts], dtype=np.intp)
        self._lengths = [part.stop - part.start for part in parts]
        self._ends: IntArray = np.cumsum(self._lengths, dtype=np.intp)
        self._given = groups.of(parts)
        self._runs = {key: self._follow(key) for key in keys}
        # Of all signals together, (5, groups), kind after kind; what recovery sums to is never asked for.
        self._course: FloatArray = np.zeros((N_ROWS, len(self._given.mass)))
        for kind in DETECTORS:
            if of := [self._runs[key].course for key in keys if key.kind == kind]:
                self._course += sum(of[1:], start=of[0])

    def _follow(self, key: SignalKey) -> SequenceRun:
        """Let one signal of each watch follow its groups, in a copy of the states, which the processor's cache knows."""
        detector, groups, rows = DETECTORS[key.kind], self._given, self._rows
        room = self._scratch.get(key)
        if room is None or len(room) < len(rows):
            room = self._scratch[key] = np.empty((max(len(rows), SIDE_BY_SIDE), detector.size))
        states = np.take(self._table.states[key], rows, axis=0, out=room[: len(rows)], mode="clip")
        series = groups.series.get(key) or _nothing(len(groups.mass), detector.width)
        seen = np.ones(len(series.x), dtype=np.bool_) if series.seen is None else series.seen
        run = detector.follow(
            states,
            GroupSequence(
                ends=self._ends,
                x=series.x,
                seen=seen,
                mass=groups.mass,
                at_us=groups.at_us,
                captured_us=groups.dates_us,
            ),
        )
        if not pages(key):
            run.course[[PAGE, PAGE_MASS]] = 0.0
        elif is_limited(key) and (most := self._table.limits[key.metric][rows]).min(initial=np.inf) < np.inf:
            np.minimum(run.course[PAGE], np.repeat(most, self._lengths), out=run.course[PAGE])
        return run

    def finish(self, thresholds: Thresholds, changes: list[PhaseChange]) -> list[_Part]:
        """Advance each watch to the end of the run, unless its phase changes before; return the parts that remain.

        A watch whose phase changes before the end is run again, up to that group.
        """
        stops = self._stops(thresholds)
        early = [index for index, stop in stops.items() if stop < self._parts[index].stop]
        rows, states = self._rows, {key: run.states for key, run in self._runs.items()}
        if early:
            whole = np.ones(len(rows), dtype=np.bool_)
            whole[early] = False
            rows, states = rows[whole], {key: of[whole] for key, of in states.items()}
        for key, of in states.items():
            self._table.states[key][rows] = of
        self._table.survey_from(rows, states)
        remaining: list[_Part] = []
        for part_index, stop in stops.items():
            if part_index in early:
                part = self._parts[part_index]
                run = _Run(self._watches, self._groups, [part._replace(stop=stop)], self._keys, self._scratch)
                remaining += [*run.finish(thresholds, changes), part._replace(start=stop)]
            else:
                changes.append(self._change(part_index, thresholds))
        return remaining

    def _stops(self, thresholds: Thresholds) -> dict[int, int]:
        """Return, for each part in which the phase changes, the index of the first group after the change, as in `_Part`."""
        stops: dict[int, int] = {}
        for hit in np.flatnonzero(self._hits(thresholds)).tolist():
            part_index = int(np.searchsorted(self._ends, hit, side="right"))
            stops.setdefault(part_index, self._parts[part_index].stop - int(self._ends[part_index]) + hit + 1)
        return stops

    def _hits(self, thresholds: Thresholds) -> BoolArray:
        """Return after which groups a phase changes, (groups,)."""
        page_mass, ticket_mass = thresholds.least(self._course[[PAGE_MASS, TICKET_MASS]])
        page: BoolArray = (self._course[PAGE] >= thresholds.page) & (self._course[PAGE] >= page_mass)
        ticket: BoolArray = (self._course[TICKET] >= thresholds.ticket) & (
            self._course[TICKET] >= ticket_mass
        )
        page &= np.repeat(self._table.may_page[self._rows], self._lengths)
        phase = self._table.phase[self._rows]
        if not phase.any():
            return page | ticket
        watching, firing = (
            np.repeat(phase == PHASES.index(phase_), self._lengths)
            for phase_ in (Phase.WATCHING, Phase.FIRING)
        )
        over = np.min([run.course[RECOVERY] for run in self._runs.values()], axis=0) >= RESOLVED
        return np.where(watching, page | ticket, over | (page & ~firing))

    def _change(self, part_index: int, thresholds: Thresholds) -> PhaseChange:
        part, last = self._parts[part_index], int(self._ends[part_index]) - 1
        watch, batch = self._watches[part.watch], self._given
        page = self._table.may_page[watch.row] and self._course[PAGE, last] >= max(
            thresholds.page, float(thresholds.least(self._course[PAGE_MASS, last]))
        )
        if watch.phase is not Phase.FIRING and page:
            after = Phase.FIRING
        else:
            after = Phase.WARNING if watch.phase is Phase.WATCHING else Phase.WATCHING
        source = {Phase.WATCHING: RECOVERY, Phase.WARNING: TICKET, Phase.FIRING: PAGE}[after]
        evidence = {key: run.course.item(source, last) for key, run in self._runs.items()}
        threshold = {
            Phase.WATCHING: RESOLVED,
            Phase.WARNING: max(thresholds.ticket, float(thresholds.least(self._course[TICKET_MASS, last]))),
            Phase.FIRING: max(thresholds.page, float(thresholds.least(self._course[PAGE_MASS, last]))),
        }[after]
        change = PhaseChange(
            watch=part.watch,
            before=watch.phase,
            after=after,
            order=int(batch.order[last]),
            at_us=int(batch.at_us[last]),
            evidence=evidence,
            threshold=float(threshold),
            states={key: state.copy() for key, state in watch.states.items()},
        )
        if after is Phase.WATCHING:
            watch.stand_down(mass=float(batch.mass[last]), at_us=change.at_us)
        else:
            watch.alarm(after)
        return change


def _nothing(steps: int, width: int) -> Series:
    """Return a signal's part in groups in which it was not observed."""
    return Series(x=np.zeros((steps, width)), seen=np.zeros(steps, dtype=np.bool_))
