"""One slice under watch: its signals' evidence is summed, and they alarm, reset and resolve together.

Watching -> warning when the ticket copies' summed evidence passes its threshold, -> firing when the page copies' does;
back to watching when every live signal has shown to be inside its budget again. After an alarm the copy that alarmed
is paused until then, so one breach is one alarm.
"""

from collections.abc import Sequence
from enum import StrEnum

import msgspec
import numpy as np

from quantdrift.drift.block import STEPS, Block, BoolArray, FloatArray
from quantdrift.drift.detector import DETECTORS
from quantdrift.drift.resolve import RESOLVED

_MOST_WATCHES = 256  # side by side: bounds the memory of one run


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
    pending = [(index, 0) for index in range(len(watches)) if len(groups[index].order)]
    while pending:
        widths: dict[int, list[tuple[int, int]]] = {}
        for index, start in pending:
            length = min(len(groups[index].order) - start, STEPS)
            widths.setdefault(1 << (length - 1).bit_length(), []).append((index, start))
        pending = []
        for width, members in widths.items():
            for first in range(0, len(members), _MOST_WATCHES):
                run = _Run(watches, groups, members[first : first + _MOST_WATCHES], width)
                pending += run.finish(thresholds, changes)
    changes.sort(key=lambda change: (change.order, change.watch))
    return changes


class _Run:
    """Up to `width` steps of some watches, side by side."""

    def __init__(
        self,
        watches: Sequence[Watch],
        groups: Sequence[Groups],
        members: list[tuple[int, int]],
        width: int,
    ) -> None:
        self._watches = watches
        self._groups = groups
        self._members = members
        self._lengths = np.array([min(len(groups[i].order) - start, width) for i, start in members])
        shape = (width, len(members))
        self._page, self._page_mass = np.zeros(shape), np.zeros(shape)
        self._ticket, self._ticket_mass = np.zeros(shape), np.zeros(shape)
        self._recovery = np.full(shape, np.inf)
        self._paths = []
        for kind, detector in DETECTORS.items():
            rows = [
                (place, key)
                for place, (index, _) in enumerate(members)
                for key in sorted(watches[index].states)
                if key.kind == kind
            ]
            if not rows:
                continue
            states = np.stack([watches[members[place][0]].states[key] for place, key in rows])
            path = detector.run(states, self._block(rows, width, detector.width))
            owner = np.array([place for place, _ in rows])
            begins = np.flatnonzero(np.diff(owner, prepend=-1))
            owners = owner[begins]
            self._page[:, owners] += np.add.reduceat(path.page, begins, axis=1)
            self._page_mass[:, owners] += np.add.reduceat(path.page_mass, begins, axis=1)
            self._ticket[:, owners] += np.add.reduceat(path.ticket, begins, axis=1)
            self._ticket_mass[:, owners] += np.add.reduceat(path.ticket_mass, begins, axis=1)
            least = np.minimum.reduceat(path.recovery, begins, axis=1)
            self._recovery[:, owners] = np.minimum(self._recovery[:, owners], least)
            self._paths.append((path, rows, owner))

    def _block(self, rows: list[tuple[int, SignalKey]], steps: int, width: int) -> Block:
        shape = (steps, len(rows))
        block = Block(
            x=np.zeros((*shape, width)),
            seen=np.zeros(shape, dtype=bool),
            mass=np.zeros(shape),
            at_us=np.zeros(shape),
        )
        for column, (place, key) in enumerate(rows):
            index, start = self._members[place]
            given = self._groups[index]
            series = given.series.get(key)
            if series is None:
                continue
            length = self._lengths[place]
            part = slice(start, start + length)
            block.x[:length, column] = series.x[part]
            block.seen[:length, column] = series.seen[part]
            block.mass[:length, column] = given.mass[part]
            block.at_us[:length, column] = given.at_us[part]
        return block

    def finish(self, thresholds: Thresholds, changes: list[Change]) -> list[tuple[int, int]]:
        """Move each watch to its first change or to the end of the run; return what is left to do."""
        pages = (self._page >= thresholds.page) & (self._page >= thresholds.mass_ratio * self._page_mass)
        tickets = (self._ticket >= thresholds.ticket) & (
            self._ticket >= thresholds.mass_ratio * self._ticket_mass
        )
        over = self._recovery >= RESOLVED
        stops = self._lengths - 1
        found: dict[int, Phase] = {}
        for place, (index, _) in enumerate(self._members):
            phase = self._watches[index].phase
            length = self._lengths[place]
            page, ticket, done = pages[:length, place], tickets[:length, place], over[:length, place]
            if phase is Phase.WATCHING:
                hit = page | ticket
            elif phase is Phase.WARNING:
                hit = page | done
            else:
                hit = done
            if hit.any():
                step = int(hit.argmax())
                stops[place] = step
                page_now = phase is not Phase.FIRING and page[step]
                alarm = Phase.FIRING if page_now else Phase.WARNING
                found[place] = alarm if page_now or phase is Phase.WATCHING else Phase.WATCHING
        for path, rows, owner in self._paths:
            for (place, key), state in zip(rows, path.stopped(stops[owner]), strict=True):
                self._watches[self._members[place][0]].states[key] = state
        left = []
        for place, (index, start) in enumerate(self._members):
            if place in found:
                changes.append(self._change(place, found[place], int(stops[place]), thresholds))
            after = start + int(stops[place]) + 1
            if after < len(self._groups[index].order):
                left.append((index, after))
        return left

    def _change(self, place: int, after: Phase, step: int, thresholds: Thresholds) -> Change:
        index, start = self._members[place]
        watch, given = self._watches[index], self._groups[index]
        evidence = {}
        for path, rows, _ in self._paths:
            for column, (owner, key) in enumerate(rows):
                if owner == place:
                    source = {
                        Phase.WATCHING: path.recovery,
                        Phase.WARNING: path.ticket,
                        Phase.FIRING: path.page,
                    }[after]
                    evidence[key] = float(source[step, column])
        threshold = {
            Phase.WATCHING: RESOLVED,
            Phase.WARNING: max(thresholds.ticket, thresholds.mass_ratio * self._ticket_mass[step, place]),
            Phase.FIRING: max(thresholds.page, thresholds.mass_ratio * self._page_mass[step, place]),
        }[after]
        change = Change(
            watch=index,
            before=watch.phase,
            after=after,
            order=int(given.order[start + step]),
            at_us=int(given.at_us[start + step]),
            evidence=evidence,
            threshold=float(threshold),
            states={key: state.copy() for key, state in watch.states.items()},
        )
        if after is Phase.WATCHING:
            watch.stand_down(mass=float(given.mass[start + step]), at_us=change.at_us)
        else:
            watch.phase = after
            for key, state in watch.states.items():
                DETECTORS[key.kind].alarmed(state, page=after is Phase.FIRING)
        return change
