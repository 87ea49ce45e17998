"""The shipped fold along a shift: what it says of which slice, when, and which detector saw it."""

import asyncio
import copy
from collections.abc import Sequence

import msgspec

from benchmarks.shifts import (
    BEGIN_US,
    PER_BATCH,
    RATE_PER_S,
    SECOND_US,
    SOURCE,
    Batch,
    Case,
    Items,
    World,
    batches,
)
from quantdrift.core.records import Verdict
from quantdrift.monitor.explain.before_window import find_before_window
from quantdrift.monitor.explain.sample import WindowSample, damage_between, measure_of, mix_between
from quantdrift.monitor.fold.fold import Fold
from quantdrift.storage.alerts.evidence import MOST_ROWS, MOST_SCANNED, EvidenceItem
from quantdrift.storage.fold_rows import ComparisonRow, Episode, Position, Snapshot, TransitionRow

_AFTERWARDS = 4_000  # exchanges that are still watched once every shifted slice has paged: others may follow
_SHOWN_EVERY = 4  # batches between two points of a timeline
EVERYTHING = 1  # number of the slice `all`


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """A slice that began to alert, or got worse.

    Parameters
    ----------
    slice
        Its name.
    verdict
        `warning` or `firing`.
    after_s
        Event time since the onset.
    after_groups
        Exchanges of the slice since the onset, that which decided included.
    seen_by
        Metric and kind of the detector with the most evidence.
    onset_error_s
        Estimated minus true onset.
    onset_error_groups
        The same in exchanges of the slice.
    aggregate
        The verdict on `all` at that time.
    cause
        What the explanation makes of the slice's own move: `damage` at equal margins, `input_shift`, or neither.
    moved
        What it makes of the move of all traffic: `within` its slices, by their `mix`, or neither.
    held_against
        Which window is the before of both.
    """

    slice: str
    verdict: str
    after_s: float
    after_groups: int
    seen_by: str
    onset_error_s: float
    onset_error_groups: float
    aggregate: str
    cause: str
    moved: str
    held_against: str


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """The state of every slice at some time after the onset (before it: negative).

    Parameters
    ----------
    at_s
        Event time since the onset.
    evidence
        Slice to its evidence over what pages.
    verdicts
        Slice to its verdict.
    divergence
        Slice to its mean capped divergence over the time since the point before, nats.
    """

    at_s: float
    evidence: dict[str, float]
    verdicts: dict[str, str]
    divergence: dict[str, float]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One case with one seed.

    Parameters
    ----------
    seed
        Of the draws.
    onset_us
        When the shift was injected.
    early
        Alarms before it: false ones.
    alarms
        Alarms from it on.
    points
        The timeline.
    n_groups
        Exchanges watched since the onset.
    live
        Slice to the learned signals that took part at the onset.
    """

    seed: int
    onset_us: int
    early: tuple[Alarm, ...]
    alarms: tuple[Alarm, ...]
    points: tuple[Point, ...]
    n_groups: int
    live: dict[str, tuple[str, ...]]


class _Watcher:
    """Folds batches and notes what happens."""

    def __init__(self, world: World, seed: int, onset_us: int) -> None:
        self._world = world
        self._names = {number: name for name, number in world.slices().items()}
        self._budget = world.config.models[0].budget
        self._seed, self._onset_us = seed, onset_us
        self._fold = Fold(world.config, Snapshot(position=Position()))
        self._fold.learn(world.catalog())
        self._items: list[tuple[int, EvidenceItem]] = []
        self._first_us: dict[int, int] = {}  # version to its first item
        self._sums: dict[str, list[float]] = {}
        self.alarms: list[Alarm] = []
        self.points: list[Point] = []
        self.live: dict[str, set[str]] = {}

    def fork(self) -> "_Watcher":
        """Return another one that goes on from here by itself."""
        other = _Watcher(self._world, self._seed, self._onset_us)
        other._fold = copy.deepcopy(self._fold)
        other._items = self._items[-MOST_SCANNED:]
        other._first_us = dict(self._first_us)
        other.alarms, other.points = list(self.alarms), list(self.points)
        other.live = {name: set(found) for name, found in self.live.items()}
        return other

    def take(self, batch: Batch, items: Items) -> None:
        """Fold one batch, drawn from `items`."""
        for row in batch.rows.comparisons:
            self._first_us.setdefault(row.model_version_id, row.captured_us)
            self._items.append((row.model_version_id, _evidence(row, batch.margins[row.exchange_id])))
            for slice_id in row.slice_ids:
                sums = self._sums.setdefault(self._names[slice_id], [0.0, 0.0])
                sums[0] += min(row.divergence or 0.0, self._budget.cap)
                sums[1] += 1.0
        self._fold.batch(batch.rows)
        outcome = self._fold.take()
        for transition in outcome.transitions:
            if transition.episode in {Episode.OPEN, Episode.ESCALATE}:
                self.alarms.append(self._alarm(transition, items))
        for learned in outcome.learned:
            name = self._names[learned.slice_id]
            self.live.setdefault(name, set()).add(f"{learned.metric} {learned.kind}")
        if batch.rows.fold_seq % _SHOWN_EVERY == 0:
            self._point()

    def paged(self, names: tuple[str, ...]) -> bool:
        """Return whether all of these slices have paged since the onset."""
        return {
            alarm.slice
            for alarm in self.alarms
            if alarm.verdict == Verdict.FIRING.value and alarm.after_s >= 0
        } >= set(names)

    def _alarm(self, row: TransitionRow, items: Items) -> Alarm:
        error_s = (row.onset_us - self._onset_us) / SECOND_US
        since = self._window(row.model_version_id, row.slice_id, self._onset_us, row.at_us + 1)
        measure = measure_of(row.alert.evidence, self._budget.cap)
        versions = {
            number: msgspec.structs.replace(version, first_seen_us=self._first_us[number])
            for number, version in self._world.catalog().versions.items()
            if number in self._first_us
        }
        before = asyncio.run(find_before_window(self, row, versions))
        span = (before.begin_us, before.end_us)
        now = (row.onset_us, row.at_us + 1)
        own = damage_between(
            WindowSample(before.items), self._scene(row.model_version_id, row.slice_id, *now), measure
        )
        whole = mix_between(
            self._scene(before.version, EVERYTHING, *span),
            self._scene(row.model_version_id, EVERYTHING, *now),
            measure,
        )
        return Alarm(
            slice=self._names[row.slice_id],
            verdict=row.to_verdict.value,
            after_s=(row.at_us - self._onset_us) / SECOND_US,
            after_groups=len(since),
            seen_by=f"{row.metric} {row.alert.evidence.detector}",
            onset_error_s=error_s,
            onset_error_groups=error_s * RATE_PER_S * items.share(row.slice_id),
            aggregate=row.alert.aggregate.verdict.value,
            cause=own.cause.value if own else "",
            moved=whole.cause.value if whole else "",
            held_against=before.words,
        )

    async def items(
        self, *, version: int, slice_id: int, begin_us: int, end_us: int, fold_seq: int
    ) -> list[EvidenceItem]:
        """Answer as the record does; everything that is known was folded up to `fold_seq`."""
        del fold_seq
        return self._window(version, slice_id, begin_us, end_us)[-MOST_ROWS:][::-1]

    async def last_compared(
        self, *, versions: Sequence[int], slice_id: int, begin_us: int, end_us: int, fold_seq: int
    ) -> int | None:
        """Answer as the record does."""
        del fold_seq
        return next(
            (
                of
                for of, item in reversed(self._items)
                if of in versions and begin_us <= item.captured_us < end_us and slice_id in item.slice_ids
            ),
            None,
        )

    def _scene(self, version: int, slice_id: int, begin_us: int, end_us: int) -> WindowSample:
        return WindowSample(self._window(version, slice_id, begin_us, end_us)[-MOST_ROWS:][::-1])

    def _window(self, version: int, slice_id: int, begin_us: int, end_us: int) -> list[EvidenceItem]:
        return [
            item
            for of, item in self._items
            if of == version and begin_us <= item.captured_us < end_us and slice_id in item.slice_ids
        ]

    def _point(self) -> None:
        at_us = self._fold.position.event_us or BEGIN_US
        rows = self._fold.current()
        self.points.append(
            Point(
                at_s=(at_us - self._onset_us) / SECOND_US,
                evidence={self._names[row.slice_id]: row.evidence / row.threshold for row in rows},
                verdicts={self._names[row.slice_id]: row.verdict.value for row in rows},
                divergence={name: total / n for name, (total, n) in self._sums.items()},
            )
        )
        self._sums = {}


def _evidence(row: ComparisonRow, margin: float) -> EvidenceItem:
    return EvidenceItem(
        captured_us=row.captured_us,
        exchange=row.exchange_id,
        group=row.exchange_id,
        slice_ids=row.slice_ids,
        pi=row.pi,
        flip=row.flip,
        divergence=row.divergence,
        margin=margin,
        source=SOURCE,
        batch_id=0,
    )


def follow(world: World, *, seed: int, n_history: int, n_most: int, cases: tuple[Case, ...]) -> list[Run]:
    """Fold one history and from its end on each case by itself; return a run per case.

    Parameters
    ----------
    world
        The model and its traffic.
    seed
        Of history and cases.
    n_history
        Exchanges before the onset.
    n_most
        Exchanges after it, at most: it ends earlier once every shifted slice has paged.
    cases
        Which of the world's.
    """
    n_batches = -(-n_history // PER_BATCH)
    onset_us = BEGIN_US + round(n_batches * PER_BATCH / RATE_PER_S * SECOND_US)
    history = _Watcher(world, seed, onset_us)
    before = Items(world, world.before)
    for batch in batches(before, n=n_history, begin_us=BEGIN_US, first_seq=1, seed=seed):
        history.take(batch, before)
    runs = []
    for place, case in enumerate(cases, start=1):
        watcher, items = history.fork(), Items(world, case.after)
        n, afterwards = 0, 0
        for batch in batches(
            items, n=n_most, begin_us=onset_us, first_seq=n_batches + 1, seed=1000 * seed + place
        ):
            watcher.take(batch, items)
            n += PER_BATCH
            afterwards += PER_BATCH if case.shifted and watcher.paged(case.shifted) else 0
            if afterwards >= _AFTERWARDS:
                break
        runs.append(
            Run(
                seed=seed,
                onset_us=onset_us,
                early=tuple(history.alarms),
                alarms=tuple(watcher.alarms[len(history.alarms) :]),
                points=tuple(watcher.points),
                n_groups=n,
                live={name: tuple(sorted(found)) for name, found in history.live.items()},
            )
        )
    return runs
