"""One slice under watch: its signals' evidence is summed, and they alarm, reset and resolve together.

Watching -> warning when the ticket copies' summed evidence passes its threshold, -> firing when the page copies' does;
back to watching when every live signal has shown to be inside its budget again. After an alarm the copy that alarmed
is paused until then, so one breach is one alarm.
"""

import itertools
import math
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple, Self

import msgspec
import numpy as np

from quantdrift.drift.detectors.protocol import DETECTORS
from quantdrift.drift.evidence import header as signal
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
        The evidence must also be this many times the mass given since the reset. Without it one normal observation
        could page after months of silence, because the mass alone would exceed 1 / q.
    """

    page: float
    ticket: float
    mass_ratio: float = 1000.0


class SignalKey(msgspec.Struct, frozen=True, order=True, cache_hash=True):
    """The key of a signal: a metric of a slice, and the kind of detector that follows it."""

    metric: str
    kind: str


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
    series
        Values by signal; a signal without an entry has no values.
    """

    order: FloatArray
    mass: FloatArray
    at_us: FloatArray
    series: dict[SignalKey, Series]

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
            series={key: series.at(rows) for key, series in self.series.items()},
        )


class Survey(msgspec.Struct, frozen=True, gc=False):
    """Figures computed from the states of a watch. `advance` computes them for many watches at a time.

    Parameters
    ----------
    evidence
        Page evidence of each signal, in the order of the keys.
    total
        The sum of the evidence.
    page_mass
        Sum of the calendar mass given to the page copies since their reset.
    n_groups
        Largest number of groups that any signal has had.
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
    policy_id: int
    missing: int
    due_us: float


@lru_cache(maxsize=1024)
def _in_order(keys: tuple[SignalKey, ...]) -> list[SignalKey]:
    return sorted(keys)


class SliceWatch:
    """A slice's phase and the states of its signals. `advance` changes it in place.

    Code that changes a state in another way calls `touched`.

    Parameters
    ----------
    phase
        The current phase.
    states
        One row per signal.
    """

    def __init__(
        self, phase: Phase = Phase.WATCHING, states: dict[SignalKey, FloatArray] | None = None
    ) -> None:
        self.phase = phase
        self.states = states if states is not None else {}
        self._survey: Survey | None = None

    def ordered(self) -> list[tuple[SignalKey, FloatArray]]:
        """Return the signals with their states, in the order of their keys."""
        return [(key, self.states[key]) for key in _in_order(tuple(self.states))]

    def survey(self) -> Survey:
        """Return the figures of the states."""
        if self._survey is None:
            keys = sorted(self.states)
            evidence = tuple(DETECTORS[key.kind].evidence(self.states[key]) for key in keys)
            self._survey = Survey(
                evidence=evidence,
                total=sum(evidence),
                page_mass=sum(DETECTORS[key.kind].page_mass(self.states[key]) for key in keys),
                n_groups=max((int(self.states[key][signal.N_TOTAL]) for key in keys), default=0),
                policy_id=max((int(self.states[key][signal.POLICY]) for key in keys), default=0),
                missing=max((DETECTORS[key.kind].missing(self.states[key]) for key in keys), default=0),
                due_us=-math.inf,
            )
        return self._survey

    def touched(self, survey: Survey | None = None) -> None:
        """Record that a state has changed; `survey` has the new figures if they are known."""
        self._survey = survey

    def add(self, key: SignalKey, state: FloatArray) -> None:
        """Add a signal. During an alert the new signal must recover too before the alert ends."""
        self.states[key] = state
        self.touched()
        if self.phase is not Phase.WATCHING:
            DETECTORS[key.kind].alarmed(state, page=self.phase is Phase.FIRING)

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
        return max(thresholds.page, thresholds.mass_ratio * self.survey().page_mass)


class Change(msgspec.Struct, frozen=True, kw_only=True):
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


def advance(watches: Sequence[SliceWatch], groups: Sequence[Groups], thresholds: Thresholds) -> list[Change]:
    """Give each watch its groups and return the changes of phase, ordered by group and watch.

    The same watches with the same groups give the same bits, whatever other watches are advanced with them.
    """
    return advance_joined(watches, *_joined(groups), thresholds)


def advance_joined(
    watches: Sequence[SliceWatch], groups: Groups, ends: IntArray, thresholds: Thresholds
) -> list[Change]:
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
    changes: list[Change] = []
    scratch: dict[str, FloatArray] = {}
    stops = ends.tolist()
    pending = [
        _Part(index, start, stop)
        for index, (start, stop) in enumerate(zip((0, *stops), stops, strict=False))
        if start < stop
    ]
    while pending:
        parts_by_keys: dict[tuple[SignalKey, ...], list[_Part]] = {}
        for part in pending:
            parts_by_keys.setdefault(tuple(watches[part.watch].states), []).append(part)
        pending = []
        for keys, parts in parts_by_keys.items():
            for first in range(0, len(parts), SIDE_BY_SIDE):
                run = _Run(watches, groups, parts[first : first + SIDE_BY_SIDE], _in_order(keys), scratch)
                pending += run.finish(thresholds, changes)
    changes.sort(key=lambda change: (change.order, change.watch))
    return changes


def _joined(groups: Sequence[Groups]) -> tuple[Groups, IntArray]:
    """Return the groups of several watches as one series, and where the groups of each watch end."""
    n = [len(batch.order) for batch in groups]
    widths = {key: series.x.shape[1] for batch in groups for key, series in batch.series.items()}
    empty_array = np.zeros(0)
    joined = Groups(
        order=np.concatenate([empty_array, *(batch.order for batch in groups)]),
        mass=np.concatenate([empty_array, *(batch.mass for batch in groups)]),
        at_us=np.concatenate([empty_array, *(batch.at_us for batch in groups)]),
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


class _Kind(NamedTuple):
    """The signals of one kind in a run: their keys, and the result of their run, for each key watch after watch."""

    keys: list[SignalKey]
    flow: SequenceRun

    @property
    def course(self) -> FloatArray:
        """The course of the flow, (5, keys, groups)."""
        return self.flow.course.reshape(len(self.flow.course), len(self.keys), -1)


class _Run:
    """The processing of some groups of several watches with the same signals, side by side."""

    def __init__(
        self,
        watches: Sequence[SliceWatch],
        groups: Groups,
        parts: list[_Part],
        keys: list[SignalKey],
        scratch: dict[str, FloatArray],
    ) -> None:
        self._watches, self._groups, self._scratch = watches, groups, scratch
        self._parts, self._keys = parts, keys
        self._states = [watches[part.watch].states for part in parts]
        self._lengths = [part.stop - part.start for part in parts]
        self._ends: IntArray = np.cumsum(self._lengths, dtype=np.intp)
        self._given = groups.of(parts)
        self._kinds: list[_Kind] = []
        for kind in DETECTORS:
            if keys_of_kind := [key for key in keys if key.kind == kind]:
                self._kinds.append(_Kind(keys_of_kind, self._follow(kind, keys_of_kind)))
        # The sum over all signals, (5, groups); the sum of recovery is never used.
        self._course: FloatArray = sum(
            (kind.course.sum(axis=1) for kind in self._kinds),
            start=np.zeros((N_ROWS, len(self._given.mass))),
        )

    def _follow(self, kind: str, keys: list[SignalKey]) -> SequenceRun:
        """Run the detector of one kind over the groups of its signals."""
        detector, n, batch = DETECTORS[kind], len(keys), self._given
        steps = len(batch.mass)
        # States are copied to a buffer that all runs share, so that it stays in the processor's cache, and back afterwards.
        rows = [states[key] for key in keys for states in self._states]
        buffer = self._scratch.get(kind)
        if buffer is None or len(buffer) < len(rows) * detector.size:
            buffer = self._scratch[kind] = np.empty(len(rows) * detector.size)
        states = np.concatenate(rows, out=buffer[: len(rows) * detector.size])
        series = [batch.series.get(key) or _nothing(steps, detector.width) for key in keys]
        if n == 1:
            sequence = GroupSequence(
                ends=self._ends,
                x=series[0].x,
                seen=_seen(series),
                mass=batch.mass,
                at_us=batch.at_us,
            )
        else:
            sequence = GroupSequence(
                ends=np.concatenate([self._ends + turn * steps for turn in range(n)]),
                x=np.concatenate([values.x for values in series]),
                seen=_seen(series),
                mass=np.concatenate((batch.mass,) * n),
                at_us=np.concatenate((batch.at_us,) * n),
            )
        return detector.follow(states.reshape(-1, detector.size), sequence)

    def finish(self, thresholds: Thresholds, changes: list[Change]) -> list[_Part]:
        """Advance each watch to the end of the run, unless its phase changes before; return the parts that remain.

        A watch whose phase changes before the end is run again, up to that group.
        """
        stops = self._stops(thresholds)
        early = {part_index for part_index, stop in stops.items() if stop < self._parts[part_index].stop}
        for keys, flow in self._kinds:
            for key, rows in zip(keys, flow.states.reshape(len(keys), len(self._parts), -1), strict=True):
                for part_index, (states, row) in enumerate(zip(self._states, rows, strict=True)):
                    if part_index not in early:
                        states[key][:] = row
        for part, survey in zip(self._parts, self._surveys(), strict=True):
            self._watches[part.watch].touched(survey)
        remaining = []
        for part_index, stop in stops.items():
            if part_index in early:
                part = self._parts[part_index]
                self._watches[part.watch].touched()
                run = _Run(self._watches, self._groups, [part._replace(stop=stop)], self._keys, self._scratch)
                remaining += [*run.finish(thresholds, changes), part._replace(start=stop)]
            else:
                changes.append(self._change(part_index, thresholds))
        return remaining

    def _surveys(self) -> list[Survey]:
        """Return the figures of the states of each part, after the run."""
        n = len(self._parts)
        if not self._keys:
            return [SliceWatch().survey()] * n
        evidence: dict[SignalKey, list[float]] = {}
        mass: dict[SignalKey, list[float]] = {}
        header, missing = np.zeros((2, n)), np.zeros(n, dtype=np.intp)
        due_us = np.full(n, np.inf)
        for keys, flow in self._kinds:
            detector, states = DETECTORS[keys[0].kind], flow.states
            shape = (len(keys), n)
            evidence |= zip(keys, detector.evidences(states).reshape(shape).tolist(), strict=True)
            mass |= zip(keys, states[:, signal.PAGE_MASS].reshape(shape).tolist(), strict=True)
            columns = states[:, [signal.N_TOTAL, signal.POLICY]].reshape(*shape, 2)
            np.maximum(header, columns.max(axis=0).T, out=header)
            np.minimum(due_us, detector.due_us(states).reshape(shape).min(axis=0), out=due_us)
            np.maximum(missing, detector.missings(states).reshape(shape).max(axis=0), out=missing)
        return [
            Survey(of, sum(of), sum(masses), int(n_groups), int(policy_id), n_missing, due)
            for of, masses, n_groups, policy_id, n_missing, due in zip(
                zip(*(evidence[key] for key in self._keys), strict=True),
                zip(*(mass[key] for key in self._keys), strict=True),
                *header.tolist(),
                missing.tolist(),
                due_us.tolist(),
                strict=True,
            )
        ]

    def _stops(self, thresholds: Thresholds) -> dict[int, int]:
        """Return, for each part in which the phase changes, the index of the first group after the change, as in `_Part`."""
        stops: dict[int, int] = {}
        for hit in np.flatnonzero(self._hits(thresholds)).tolist():
            part_index = int(np.searchsorted(self._ends, hit, side="right"))
            stops.setdefault(part_index, self._parts[part_index].stop - int(self._ends[part_index]) + hit + 1)
        return stops

    def _hits(self, thresholds: Thresholds) -> BoolArray:
        """Return after which groups a phase changes, (groups,)."""
        page_mass, ticket_mass = thresholds.mass_ratio * self._course[[PAGE_MASS, TICKET_MASS]]
        page: BoolArray = (self._course[PAGE] >= thresholds.page) & (self._course[PAGE] >= page_mass)
        ticket: BoolArray = (self._course[TICKET] >= thresholds.ticket) & (
            self._course[TICKET] >= ticket_mass
        )
        phases = [self._watches[part.watch].phase for part in self._parts]
        if all(phase is Phase.WATCHING for phase in phases):
            return page | ticket
        watching, firing = (
            np.repeat([phase is watched for phase in phases], self._lengths)
            for watched in (Phase.WATCHING, Phase.FIRING)
        )
        least = [kind.course[RECOVERY].min(axis=0) for kind in self._kinds]
        over = np.min(least, axis=0) >= RESOLVED
        return np.where(watching, page | ticket, over | (page & ~firing))

    def _change(self, part_index: int, thresholds: Thresholds) -> Change:
        part, last = self._parts[part_index], int(self._ends[part_index]) - 1
        watch, batch = self._watches[part.watch], self._given
        page = self._course[PAGE, last] >= max(
            thresholds.page, thresholds.mass_ratio * self._course[PAGE_MASS, last]
        )
        if watch.phase is not Phase.FIRING and page:
            after = Phase.FIRING
        else:
            after = Phase.WARNING if watch.phase is Phase.WATCHING else Phase.WATCHING
        evidence: dict[SignalKey, float] = {}
        for kind in self._kinds:
            source = {Phase.WATCHING: RECOVERY, Phase.WARNING: TICKET, Phase.FIRING: PAGE}[after]
            evidence |= zip(kind.keys, kind.course[source, :, last].tolist(), strict=True)
        threshold = {
            Phase.WATCHING: RESOLVED,
            Phase.WARNING: max(thresholds.ticket, thresholds.mass_ratio * self._course[TICKET_MASS, last]),
            Phase.FIRING: max(thresholds.page, thresholds.mass_ratio * self._course[PAGE_MASS, last]),
        }[after]
        change = Change(
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
            watch.phase = after
            for key, state in watch.states.items():
                DETECTORS[key.kind].alarmed(state, page=after is Phase.FIRING)
            watch.touched()
        return change


def _nothing(steps: int, width: int) -> Series:
    """Return a signal's part in groups in which it was not observed."""
    return Series(x=np.zeros((steps, width)), seen=np.zeros(steps, dtype=np.bool_))


def _seen(series: Sequence[Series]) -> BoolArray:
    """Return which groups have an observation, series after series."""
    if all(values.seen is None for values in series):
        return np.ones(sum(len(values.x) for values in series), dtype=np.bool_)
    return np.concatenate(
        [np.ones(len(values.x), dtype=np.bool_) if values.seen is None else values.seen for values in series]
    )
