"""One slice under watch: its signals' evidence is summed, and they alarm, reset and resolve together.

Watching -> warning when the ticket copies' summed evidence passes its threshold, -> firing when the page copies' does;
back to watching when every live signal has shown to be inside its budget again. After an alarm the copy that alarmed
is paused until then, so one breach is one alarm.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, Self

import msgspec
import numpy as np

from quantdrift.drift.detectors.protocol import DETECTORS
from quantdrift.drift.evidence.observations import BoolArray, FloatArray, GroupSequence
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


class SignalKey(msgspec.Struct, frozen=True, order=True, cache_hash=True):
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
        (steps,) where there is one; None where there always is.
    """

    x: FloatArray
    seen: BoolArray | None = None

    def between(self, start: int, stop: int) -> Self:
        """Return the part from group `start` on, before `stop`."""
        seen = None if self.seen is None else self.seen[start:stop]
        return msgspec.structs.replace(self, x=self.x[start:stop], seen=seen)


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

    def between(self, start: int, stop: int) -> Self:
        """Return those from `start` on, before `stop`."""
        if (start, stop) == (0, len(self.order)):
            return self
        span = slice(start, stop)
        return msgspec.structs.replace(
            self,
            order=self.order[span],
            mass=self.mass[span],
            at_us=self.at_us[span],
            series={key: one.between(start, stop) for key, one in self.series.items()},
        )


class SliceWatch:
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


def advance(watches: Sequence[SliceWatch], groups: Sequence[Groups], thresholds: Thresholds) -> list[Change]:
    """Give each watch its groups and return the changes of phase, ordered by group and watch.

    The same watches with the same groups give the same bits, in whatever company they are advanced.
    """
    changes: list[Change] = []
    pending = [_Part(index, 0, len(given.order)) for index, given in enumerate(groups) if len(given.order)]
    while pending:
        alike: dict[tuple[SignalKey, ...], list[_Part]] = {}
        for part in pending:
            alike.setdefault(tuple(watches[part.watch].states), []).append(part)
        pending = []
        for keys, parts in alike.items():
            for first in range(0, len(parts), SIDE_BY_SIDE):
                run = _Run(watches, groups, parts[first : first + SIDE_BY_SIDE], sorted(keys))
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


class _Kind(NamedTuple):
    """The signals of one kind in a run: their keys, and what they go through, watch after watch of each key."""

    keys: list[SignalKey]
    flow: SequenceRun

    @property
    def course(self) -> FloatArray:
        """The course of the flow, (5, keys, groups)."""
        return self.flow.course.reshape(len(self.flow.course), len(self.keys), -1)


class _Run:
    """Some groups of watches with the same signals, side by side."""

    def __init__(
        self,
        watches: Sequence[SliceWatch],
        groups: Sequence[Groups],
        parts: list[_Part],
        keys: list[SignalKey],
    ) -> None:
        self._watches, self._groups = watches, groups
        self._parts, self._keys = parts, keys
        self._states = [watches[part.watch].states for part in parts]
        self._given = [groups[part.watch].between(part.start, part.stop) for part in parts]
        self._ends = np.cumsum([len(given.order) for given in self._given])
        mass = np.concatenate([given.mass for given in self._given])
        at_us = np.concatenate([given.at_us for given in self._given])
        self._kinds: list[_Kind] = []
        for kind in DETECTORS:
            if of := [key for key in keys if key.kind == kind]:
                self._kinds.append(_Kind(of, self._follow(kind, of, mass, at_us)))
        # Of all signals together, (5, groups); what recovery sums to is never asked for.
        self._course: FloatArray = sum(
            (kind.course.sum(axis=1) for kind in self._kinds), start=np.zeros((N_ROWS, len(mass)))
        )

    def _follow(self, kind: str, keys: list[SignalKey], mass: FloatArray, at_us: FloatArray) -> SequenceRun:
        """Let the signals of one kind follow their groups."""
        detector, n = DETECTORS[kind], len(keys)
        states = np.concatenate([states[key] for key in keys for states in self._states])
        shown = [given.series for given in self._given]
        series = [
            all_.get(key) or _nothing(given, detector.width)
            for key in keys
            for all_, given in zip(shown, self._given, strict=True)
        ]
        trail = GroupSequence(
            ends=np.concatenate([self._ends + turn * len(mass) for turn in range(n)]),
            x=np.concatenate([one.x for one in series]),
            seen=_seen(series),
            mass=np.concatenate((mass,) * n),
            at_us=np.concatenate((at_us,) * n),
        )
        return detector.follow(states.reshape(-1, detector.size), trail)

    def finish(self, thresholds: Thresholds, changes: list[Change]) -> list[_Part]:
        """Move each watch to the end of the run, unless it changes before; return what is left to do.

        A watch that changes before goes the same way again, up to there.
        """
        stops = self._stops(thresholds)
        early = {place for place, stop in stops.items() if stop < self._parts[place].stop}
        for keys, flow in self._kinds:
            for key, rows in zip(keys, flow.states.reshape(len(keys), len(self._parts), -1), strict=True):
                for place, (states, row) in enumerate(zip(self._states, rows, strict=True)):
                    if place not in early:
                        states[key] = row
        left = []
        for place, stop in stops.items():
            if place in early:
                part = self._parts[place]
                run = _Run(self._watches, self._groups, [part._replace(stop=stop)], self._keys)
                left += [*run.finish(thresholds, changes), part._replace(start=stop)]
            else:
                changes.append(self._change(place, thresholds))
        return left

    def _stops(self, thresholds: Thresholds) -> dict[int, int]:
        """Return per part in which the phase changes the group that is the first after that, as `_Part` counts."""
        found: dict[int, int] = {}
        for hit in np.flatnonzero(self._hits(thresholds)).tolist():
            place = int(np.searchsorted(self._ends, hit, side="right"))
            found.setdefault(place, self._parts[place].stop - int(self._ends[place]) + hit + 1)
        return found

    def _hits(self, thresholds: Thresholds) -> BoolArray:
        """Return where a phase changes, (groups,)."""
        page_mass, ticket_mass = thresholds.mass_ratio * self._course[[PAGE_MASS, TICKET_MASS]]
        page: BoolArray = (self._course[PAGE] >= thresholds.page) & (self._course[PAGE] >= page_mass)
        ticket: BoolArray = (self._course[TICKET] >= thresholds.ticket) & (
            self._course[TICKET] >= ticket_mass
        )
        phases = [self._watches[part.watch].phase for part in self._parts]
        if all(phase is Phase.WATCHING for phase in phases):
            return page | ticket
        lengths = [part.stop - part.start for part in self._parts]
        watching, firing = (
            np.repeat([phase is one for phase in phases], lengths) for one in (Phase.WATCHING, Phase.FIRING)
        )
        least = [kind.course[RECOVERY].min(axis=0) for kind in self._kinds]
        over = np.min(least, axis=0) >= RESOLVED
        return np.where(watching, page | ticket, over | (page & ~firing))

    def _change(self, place: int, thresholds: Thresholds) -> Change:
        part, last = self._parts[place], int(self._ends[place]) - 1
        watch, given = self._watches[part.watch], self._given[place]
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
            order=int(given.order[-1]),
            at_us=int(given.at_us[-1]),
            evidence=evidence,
            threshold=float(threshold),
            states={key: state.copy() for key, state in watch.states.items()},
        )
        if after is Phase.WATCHING:
            watch.stand_down(mass=float(given.mass[-1]), at_us=change.at_us)
        else:
            watch.phase = after
            for key, state in watch.states.items():
                DETECTORS[key.kind].alarmed(state, page=after is Phase.FIRING)
        return change


def _nothing(given: Groups, width: int) -> Series:
    """Return a signal's part in groups in which it was not observed."""
    n = len(given.order)
    return Series(x=np.zeros((n, width)), seen=np.zeros(n, dtype=np.bool_))


def _seen(series: Sequence[Series]) -> BoolArray:
    """Return where there is an observation, series after series."""
    if all(one.seen is None for one in series):
        return np.ones(sum(len(one.x) for one in series), dtype=np.bool_)
    return np.concatenate(
        [np.ones(len(one.x), dtype=np.bool_) if one.seen is None else one.seen for one in series]
    )
