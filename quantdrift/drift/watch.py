"""One slice under watch: its signals' evidence is summed, and they alarm, reset and resolve together.

Watching -> warning when the ticket copies' summed evidence passes its threshold, -> firing when the page copies' does;
back to watching when every live signal has shown to be inside its budget again. After an alarm the copy that alarmed
is paused until then, so one breach is one alarm.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from quantdrift.drift.block import BoolArray, FloatArray, Steps, Trail
from quantdrift.drift.detector import DETECTORS
from quantdrift.drift.path import SIDE_BY_SIDE, Flow
from quantdrift.drift.resolve import RESOLVED

_MOST_STEPS = 64  # in one run: bounds its memory, and what an alarm in its midst does in vain

_Values = TypeVar("_Values", bound=np.generic)


class Phase(StrEnum):
    """What the evidence says of a slice."""

    WATCHING = "watching"
    WARNING = "warning"
    FIRING = "firing"


class Thresholds(msgspec.Struct, frozen=True, kw_only=True):
    """When summed evidence is an alarm.

    Parameters
    ----------
    page, ticket
        1 / q, q the expected false alarms per 30 days of the whole fleet.
    mass_ratio
        Evidence must also be so many times the mass given since the reset: after months of silence the mass alone
        could pass 1 / q, and one clean observation would page.
    """

    page: float
    ticket: float
    mass_ratio: float = 1000.0


class SignalKey(msgspec.Struct, frozen=True, order=True):
    """A signal of a slice: a metric seen by a kind of detector."""

    metric: str
    kind: str


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One signal's part in a series of groups.

    Parameters
    ----------
    x
        (steps, width) its values.
    seen
        (steps,) where there is one.
    """

    x: FloatArray
    seen: BoolArray


class Groups(msgspec.Struct, frozen=True, kw_only=True):
    """The groups that a slice was given, in the order of the fold.

    Parameters
    ----------
    order
        (steps,) place of each group in its batch.
    mass
        (steps,) calendar mass when it came.
    at_us
        (steps,) event time, microseconds.
    series
        Per signal; one without an entry was not observed.
    """

    order: FloatArray
    mass: FloatArray
    at_us: FloatArray
    series: dict[SignalKey, Series]


class Watch:
    """A slice's phase and the states of its signals. `advance` changes it in place.

    Parameters
    ----------
    phase
        Where it stands.
    states
        One row per signal.
    """

    def __init__(
        self, phase: Phase = Phase.WATCHING, states: dict[SignalKey, FloatArray] | None = None
    ) -> None:
        self.phase = phase
        self.states = states if states is not None else {}

    def add(self, key: SignalKey, state: FloatArray) -> None:
        """Watch one more signal; where an alarm lasts it too must recover before it resolves."""
        self.states[key] = state
        if self.phase is not Phase.WATCHING:
            DETECTORS[key.kind].alarmed(state, page=self.phase is Phase.FIRING)

    def stand_down(self, *, mass: float, at_us: int) -> None:
        """End an alert that nothing more can be said about: watch again, from nothing."""
        self.phase = Phase.WATCHING
        for key, state in self.states.items():
            DETECTORS[key.kind].arm(state, mass=mass, at_us=at_us)

    def evidence(self) -> float:
        """Return the summed evidence for paging."""
        return sum(DETECTORS[key.kind].evidence(self.states[key]) for key in sorted(self.states))

    def page_threshold(self, thresholds: Thresholds) -> float:
        """Return what the summed evidence must reach to page now."""
        mass = sum(DETECTORS[key.kind].page_mass(self.states[key]) for key in sorted(self.states))
        return max(thresholds.page, thresholds.mass_ratio * mass)


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A change of phase.

    Parameters
    ----------
    watch
        Index of the watch among those that were advanced.
    before, after
        The phases.
    order
        Place of the deciding group in the batch.
    at_us
        Its event time.
    evidence
        Per signal, the evidence that decided: for an alarm, or, where the alarm ended, for recovery.
    threshold
        What the sum of it, or for recovery the least of it, had to reach.
    states
        Per signal, the state that decided, before the reset.
    """

    watch: int
    before: Phase
    after: Phase
    order: int
    at_us: int
    evidence: dict[SignalKey, float]
    threshold: float
    states: dict[SignalKey, FloatArray]


def advance(watches: Sequence[Watch], groups: Sequence[Groups], thresholds: Thresholds) -> list[Change]:
    """Give each watch its groups and return the changes of phase, ordered by group and watch.

    The same watches with the same groups give the same bits, in whatever company they are advanced.
    """
    changes: list[Change] = []
    pending = [_Part(index, 0, len(given.order)) for index, given in enumerate(groups) if len(given.order)]
    while pending:
        alike: dict[tuple[SignalKey, ...], list[_Part]] = {}
        for part in pending:
            alike.setdefault(tuple(sorted(watches[part.watch].states)), []).append(part)
        pending = []
        for keys, parts in alike.items():
            parts.sort(key=lambda part: -part.n)
            for first in range(0, len(parts), SIDE_BY_SIDE):
                run = _Run(watches, groups, parts[first : first + SIDE_BY_SIDE], keys)
                pending += run.finish(thresholds, changes)
    changes.sort(key=lambda change: (change.order, change.watch))
    return changes


class _Part(NamedTuple):
    """Some of a watch's groups that are still to be given.

    Parameters
    ----------
    watch
        Index of the watch.
    start, stop
        Its groups from `start` on, before `stop`.
    """

    watch: int
    start: int
    stop: int

    @property
    def n(self) -> int:
        """How many of them one run takes."""
        return min(self.stop - self.start, _MOST_STEPS)


class _Kind(NamedTuple):
    """The signals of one kind in a run: their places among the keys, and what they go through."""

    places: list[int]
    flow: Flow


class _Run:
    """Some groups of watches with the same signals, side by side; those with the most groups come first."""

    def __init__(
        self,
        watches: Sequence[Watch],
        groups: Sequence[Groups],
        parts: list[_Part],
        keys: tuple[SignalKey, ...],
    ) -> None:
        self._watches, self._groups = watches, groups
        self._parts, self._keys = parts, keys
        self._lengths = np.array([part.n for part in parts])
        self._steps = steps = Steps(self._lengths)
        given = [groups[part.watch] for part in parts]
        ends = np.cumsum([len(one.order) for one in given])
        begins = ends - [len(one.order) - part.start for one, part in zip(given, parts, strict=True)]
        self._source = begins[steps.row] + steps.step
        self._mass = np.concatenate([one.mass for one in given])[self._source]
        self._at_us = np.concatenate([one.at_us for one in given])[self._source]
        self._kinds: list[_Kind] = []
        for kind in DETECTORS:
            places = [place for place, key in enumerate(keys) if key.kind == kind]
            if places:
                self._kinds.append(self._follow(kind, places))
        flows = [kind.flow for kind in self._kinds]
        n = len(self._source)
        self._page = _sum([flow.page.reshape(n, -1) for flow in flows])
        self._page_mass = _sum([flow.page_mass.reshape(n, -1) for flow in flows])
        self._ticket = _sum([flow.ticket.reshape(n, -1) for flow in flows])
        self._ticket_mass = _sum([flow.ticket_mass.reshape(n, -1) for flow in flows])

    def _follow(self, kind: str, places: list[int]) -> _Kind:
        """Let the signals of one kind follow their groups."""
        detector, n = DETECTORS[kind], len(places)
        keys = [self._keys[place] for place in places]
        states = np.concatenate(
            [self._watches[part.watch].states[key] for part in self._parts for key in keys]
        )
        series = [
            [self._groups[part.watch].series.get(key) or self._nothing(part, detector.width) for key in keys]
            for part in self._parts
        ]
        columns = list(zip(*series, strict=True))
        x, seen = (
            _side_by_side([np.concatenate(one)[self._source] for one in parts])
            for parts in (
                [[one.x for one in column] for column in columns],
                [[one.seen for one in column] for column in columns],
            )
        )
        trail = Trail(
            steps=self._steps.times(n),
            x=x.reshape(-1, detector.width),
            seen=seen.reshape(-1),
            mass=np.repeat(self._mass, n),
            at_us=np.repeat(self._at_us, n),
        )
        # Past an alarm that it has yet to find, evidence may leave the range of numbers; what is there is not kept.
        with np.errstate(over="ignore", invalid="ignore"):
            return _Kind(places, detector.follow(states.reshape(-1, detector.size), trail))

    def _nothing(self, part: _Part, width: int) -> Series:
        n = len(self._groups[part.watch].order)
        return Series(x=np.zeros((n, width)), seen=np.zeros(n, dtype=np.bool_))

    def finish(self, thresholds: Thresholds, changes: list[Change]) -> list[_Part]:
        """Move each watch to the end of the run, unless it changes before; return what is left to do.

        A watch that changes before goes the same way again, up to there.
        """
        left = []
        hits = self._hits(thresholds)
        stops = self._lengths - 1
        if hits.any():
            at = np.flatnonzero(hits)[::-1]
            stops[self._steps.row[at]] = self._steps.step[at]
        ended = hits[self._steps.last]
        whole = stops == self._lengths - 1
        for place, part in enumerate(self._parts):
            if not whole[place]:
                before, after = part.start + int(stops[place]) + 1, part.stop
                run = _Run(self._watches, self._groups, [part._replace(stop=before)], self._keys)
                left += run.finish(thresholds, changes)
                left.append(part._replace(start=before, stop=after))
                continue
            states = self._watches[part.watch].states
            for kind in self._kinds:
                n = len(kind.places)
                for column, at_ in enumerate(kind.places):
                    states[self._keys[at_]] = kind.flow.states[place * n + column]
            if ended[place]:
                changes.append(self._change(place, thresholds))
            if part.start + part.n < part.stop:
                left.append(part._replace(start=part.start + part.n))
        return left

    def _hits(self, thresholds: Thresholds) -> BoolArray:
        """Return where a phase changes, (groups,)."""
        phases = [self._watches[part.watch].phase for part in self._parts]
        page = (self._page >= thresholds.page) & (self._page >= thresholds.mass_ratio * self._page_mass)
        ticket = (self._ticket >= thresholds.ticket) & (
            self._ticket >= thresholds.mass_ratio * self._ticket_mass
        )
        if all(phase is Phase.WATCHING for phase in phases):
            return np.asarray(page | ticket)
        row = self._steps.row
        watching, firing = (
            np.array([phase is one for phase in phases])[row] for one in (Phase.WATCHING, Phase.FIRING)
        )
        over = self._recovery() >= RESOLVED
        return np.where(watching, page | ticket, over | (page & ~firing))

    def _recovery(self) -> FloatArray:
        n = len(self._source)
        least = [kind.flow.recovery.reshape(n, -1).min(axis=1) for kind in self._kinds]
        return np.asarray(np.min(least, axis=0), dtype=np.float64)

    def _change(self, place: int, thresholds: Thresholds) -> Change:
        part, last = self._parts[place], int(self._steps.last[place])
        watch, given = self._watches[part.watch], self._groups[part.watch]
        page = self._page[last] >= max(thresholds.page, thresholds.mass_ratio * self._page_mass[last])
        if watch.phase is not Phase.FIRING and page:
            after = Phase.FIRING
        else:
            after = Phase.WARNING if watch.phase is Phase.WATCHING else Phase.WATCHING
        evidence = {}
        for kind in self._kinds:
            n = len(kind.places)
            source = {
                Phase.WATCHING: kind.flow.recovery,
                Phase.WARNING: kind.flow.ticket,
                Phase.FIRING: kind.flow.page,
            }[after]
            for column, at in enumerate(kind.places):
                evidence[self._keys[at]] = float(source[last * n + column])
        threshold = {
            Phase.WATCHING: RESOLVED,
            Phase.WARNING: max(thresholds.ticket, thresholds.mass_ratio * self._ticket_mass[last]),
            Phase.FIRING: max(thresholds.page, thresholds.mass_ratio * self._page_mass[last]),
        }[after]
        group = part.start + part.n - 1
        change = Change(
            watch=part.watch,
            before=watch.phase,
            after=after,
            order=int(given.order[group]),
            at_us=int(given.at_us[group]),
            evidence=evidence,
            threshold=float(threshold),
            states={key: state.copy() for key, state in watch.states.items()},
        )
        if after is Phase.WATCHING:
            watch.stand_down(mass=float(given.mass[group]), at_us=change.at_us)
        else:
            watch.phase = after
            for key, state in watch.states.items():
                DETECTORS[key.kind].alarmed(state, page=after is Phase.FIRING)
        return change


def _side_by_side(columns: list[NDArray[_Values]]) -> NDArray[_Values]:
    """Return (groups, signals, ...) from one array, (groups, ...), of each signal."""
    return columns[0] if len(columns) == 1 else np.stack(columns, axis=1)


def _sum(parts: list[FloatArray]) -> FloatArray:
    """Return the sum over the signals, (groups,), of (groups, signals) per kind."""
    total = parts[0].sum(axis=1)
    for part in parts[1:]:
        total += part.sum(axis=1)
    return np.asarray(total)
