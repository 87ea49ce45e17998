"""The noise of versions and of their slices in the fold: the allowance that it adds to budgets, and when it is too high."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

import msgspec
import numpy as np

from quantdrift.core.config.schema import Budget
from quantdrift.core.records import Metric, Side
from quantdrift.core.signals import WATCHED, budget_of, cap_of, is_judged
from quantdrift.core.slices import ALL
from quantdrift.core.tasks import Task
from quantdrift.drift.evidence.group import group_value
from quantdrift.drift.noise import (
    DELTA,
    MOST_SLICES,
    SLICE_DELTA,
    SLICE_LOW_DELTA,
    Level,
    Noise,
    NoiseSums,
    bounds_of,
    is_due,
    of_slice,
    updated,
    window_of,
)
from quantdrift.facts.events import NoiseEvent
from quantdrift.facts.words.noise import advice
from quantdrift.facts.words.verdict import too_noisy
from quantdrift.monitor.fold.alert_event import measure_of, unit_of
from quantdrift.monitor.fold.groups import clipped
from quantdrift.storage.fold_rows import FloorRow, NoiseChangeRow, NoiseRow, VersionRow

_MOST_TESTED = 0.9  # of the gap between budget and 1: the mean that a detector tests against stays below 1
_VERSION: Final = 0
"""The `slice_id` of the noise of all of a version's traffic."""
_Key = tuple[int, int, Side, str]  # version, slice
_SIDES: Final = tuple(Side)


class NoiseSubject(msgspec.Struct, frozen=True, kw_only=True):
    """The version whose noise is measured, with its model's task and budget, and what is known of its slices.

    Parameters
    ----------
    everything
        The slice of all of its traffic.
    name_of
        Returns the name of a slice of this version that is compared; None: it is not compared, and gets no figure of its own.
    smallest
        Returns the smallest inclusion probability of a slice under a policy.
    """

    version: VersionRow
    task: Task
    budget: Budget
    everything: int
    name_of: Callable[[int], str | None]
    smallest: Callable[[int, int], float]


NOISE_BOUND: Final = 0.5
"""Share of a budget above which noise is too high: with more, most of what is measured may be noise."""


class NoiseFloors:
    """The noise of reference and candidate, by version, slice and metric, and the allowances and limits that follow from it.

    A slice whose own noise is not known well enough has the allowance and the limit of its version.

    Parameters
    ----------
    rows
        The stored floors.

    Attributes
    ----------
    generation
        Grows with every change of the allowance of a version.
    """

    def __init__(self, rows: Iterable[FloorRow]) -> None:
        self._rows: dict[_Key, FloorRow] = {_key(row): row for row in rows}
        self._slices: dict[int, set[int]] = {}  # those with a figure of their own, by version
        for version_id, slice_id, *_ in self._rows:
            if slice_id != _VERSION:
                self._slices.setdefault(version_id, set()).add(slice_id)
        self._dirty: set[_Key] = set()
        self._changes: list[NoiseChangeRow] = []
        self._forgotten: set[tuple[int, int]] = set()
        self._reasons: dict[int, tuple[str, dict[int, str]]] = {}
        self.generation = 0

    def see(self, subject: NoiseSubject, rows: Sequence[NoiseRow], *, at_us: int, fold_seq: int) -> list[int]:
        """Add the items of one version that were computed twice; return the slices whose own allowance has changed.

        Parameters
        ----------
        rows
            The version's items, those of one exchange and side next to each other.
        at_us, fold_seq
            Time and number of the fold.
        """
        touched: dict[_Key, Noise] = {}
        version_id = subject.version.id
        for (_, side), group in groupby(rows, key=lambda row: (row.exchange_id, row.side)):
            items = list(group)
            for metric in WATCHED:
                if not is_judged(metric, subject.budget):
                    self._drop(version_id, metric)
                    continue
                cap, window = cap_of(metric, subject.budget), window_of(budget_of(metric, subject.budget))
                seen = [(row, x / cap) for row in items if (x := clipped(metric, row, cap)) is not None]
                for slice_id, group_items in _by_slice(seen, subject).items():
                    if not self._has_room(version_id, slice_id):
                        continue
                    try:
                        value = group_value(
                            [x for _, x in group_items],
                            [row.pi for row, _ in group_items],
                            subject.smallest(slice_id or subject.everything, items[0].policy_id),
                            len(group_items),
                        )
                    except ValueError:
                        continue  # its comparison was not an observation either, and the log says why
                    if slice_id != _VERSION:
                        self._slices.setdefault(version_id, set()).add(slice_id)
                    key = (version_id, slice_id, side, metric.value)
                    before = touched.get(key) or _noise(self._rows.get(key), cap)
                    touched[key] = before.seen(min(value.vx, value.v), value.v, window)
        return self._update(subject, touched, at_us=at_us, fold_seq=fold_seq)

    def go_on(self, version_id: int, before: int) -> None:
        """Let a new version begin with the noise of the reference that another version with the same reference has measured.

        The reference's noise is its difference from itself, whatever the candidate. Windows go on, and with them their bounds.
        """
        for key in sorted(key for key in self._rows if key[0] == before and key[2] is Side.REFERENCE):
            row = msgspec.structs.replace(self._rows[key], model_version_id=version_id)
            self._rows[_key(row)] = row
            self._dirty.add(_key(row))
            if row.slice_id != _VERSION:
                self._slices.setdefault(version_id, set()).add(row.slice_id)
        self._reasons.pop(version_id, None)
        self.generation += 1

    def added(
        self, key: tuple[int, int], metric: str, budget: float, sides: Sequence[Side] = _SIDES
    ) -> float:
        """Return the allowance for a budget of a slice, over the cap; budget plus allowance stay below 1.

        Parameters
        ----------
        key
            Version and slice.
        sides
            Those whose noise is allowed for.
        """
        total = sum(row.added for side in sides if (row := self._in_use(key, side, metric)) is not None)
        return min(total, _MOST_TESTED * (1.0 - budget))

    def highest(self, key: tuple[int, int], metric: str, scale: float) -> float:
        """Return the upper bound of the noise of a slice's own reference, over the cap `scale`; 1 where it is not known.

        Parameters
        ----------
        key
            Version and slice; slice 0 is all traffic.
        """
        row = self._rows.get((*key, Side.REFERENCE, metric))
        return 1.0 if row is None or row.scale != scale else row.high

    def too_much(self, key: tuple[int, int]) -> str:
        """Return why the noise of a slice is too high for verdicts, as text; empty where it is not."""
        of_version, of_slices = self.too_noisy(key[0])
        return of_slices.get(key[1], of_version)

    def too_noisy(self, version_id: int) -> tuple[str, dict[int, str]]:
        """Return why the noise of a version is too high for verdicts, and the same of each slice of which that differs."""
        why = self._reasons.get(version_id)
        if why is None:
            of_version = self._reason((version_id, _VERSION))
            slices = sorted(self._slices.get(version_id, ()))
            reasons = {slice_id: self._reason((version_id, slice_id)) for slice_id in slices}
            why = self._reasons[version_id] = (
                of_version,
                {slice_id: reason for slice_id, reason in reasons.items() if reason != of_version},
            )
        return why

    def forget(self, key: tuple[int, int]) -> None:
        """Forget the noise of a slice that is no longer compared."""
        of_version = self._slices.get(key[0], set())
        if key[1] not in of_version:
            return
        of_version.remove(key[1])
        for row_key in ((*key, side, metric.value) for side in _SIDES for metric in WATCHED):
            self._rows.pop(row_key, None)
            self._dirty.discard(row_key)
        self._forgotten.add(key)
        self._reasons.pop(key[0], None)

    def _drop(self, version_id: int, metric: Metric) -> None:
        """Forget the noise of a metric that is not judged any more: it must withhold no verdict."""
        for key in [key for key in self._rows if key[0] == version_id and key[3] == metric.value]:
            del self._rows[key]
            self._dirty.discard(key)
            self._reasons.pop(version_id, None)

    def rows(self) -> list[FloorRow]:
        """Return the floors of versions, in the order of their keys."""
        return [self._rows[key] for key in sorted(self._rows) if key[1] == _VERSION]

    @property
    def has_changed(self) -> bool:
        """Whether `take` would return a change that is sent."""
        return bool(self._changes)

    def take(self) -> tuple[tuple[FloorRow, ...], tuple[NoiseChangeRow, ...], tuple[tuple[int, int], ...]]:
        """Return the floors and changes to write, and the slices to delete, since the last call."""
        rows = tuple(self._rows[key] for key in sorted(self._dirty))
        changes, forgotten = tuple(self._changes), tuple(sorted(self._forgotten))
        self._dirty, self._changes, self._forgotten = set(), [], set()
        return rows, changes, forgotten

    def _has_room(self, version_id: int, slice_id: int) -> bool:
        """Return whether a slice has a figure of its own or may get one: the level of their bounds depends on how many have one."""
        of_version = self._slices.get(version_id, set())
        return slice_id == _VERSION or slice_id in of_version or len(of_version) < MOST_SLICES

    def _in_use(self, key: tuple[int, int], side: Side, metric: str) -> FloorRow | None:
        """Return the row that applies to a slice: its own, or that of its version."""
        own = self._rows.get((*key, side, metric))
        return own if own is not None and own.own else self._rows.get((key[0], _VERSION, side, metric))

    def _reason(self, key: tuple[int, int]) -> str:
        for side in _SIDES:
            for metric in WATCHED:
                row = self._in_use(key, side, metric.value)
                if row is not None and row.exceeds:
                    of_version = row.slice_id == _VERSION
                    return too_noisy(
                        side.value,
                        metric.value,
                        proved=of_version or row.low > NOISE_BOUND * row.budget,
                        where="" if of_version else " in this slice",
                    )
        return ""

    def _update(
        self, subject: NoiseSubject, touched: Mapping[_Key, Noise], *, at_us: int, fold_seq: int
    ) -> list[int]:
        """Replace the rows of what was seen: first those of the version, which the slices are compared with."""
        keys = sorted(key for key in touched if self._is_due(key, touched[key], subject))
        for key in touched.keys() - keys:
            self._rows[key] = msgspec.structs.replace(
                self._rows[key], **_sums(touched[key]), updated_us=at_us, fold_seq=fold_seq
            )
            self._dirty.add(key)
        of_slice = np.array([key[1] != _VERSION for key in keys], dtype=np.bool_)
        bounds = bounds_of(
            [touched[key] for key in keys],
            np.where(of_slice, SLICE_LOW_DELTA, DELTA),
            np.where(of_slice, SLICE_DELTA, DELTA),
        )
        changed: list[int] = []
        for key, bound in zip(keys, bounds, strict=True):  # versions come first
            row = self._row(key, touched[key], bound, subject, at_us=at_us, fold_seq=fold_seq)
            changed += self._replace(key, row, touched[key], subject)
        if keys:
            self._reasons.pop(subject.version.id, None)
        return changed

    def _is_due(self, key: _Key, noise: Noise, subject: NoiseSubject) -> bool:
        """Return whether bounds are computed again: those of a version with each of its items."""
        row, metric = self._rows.get(key), Metric(key[3])
        return (
            key[1] == _VERSION
            or row is None
            or row.budget != budget_of(metric, subject.budget)
            or row.scale != cap_of(metric, subject.budget)
            or is_due(row.older_n, noise.older.n)
        )

    def _row(
        self,
        key: _Key,
        noise: Noise,
        bounds: tuple[float, float],
        subject: NoiseSubject,
        *,
        at_us: int,
        fold_seq: int,
    ) -> FloorRow:
        before, metric = self._rows.get(key), Metric(key[3])
        accepted, cap = budget_of(metric, subject.budget), cap_of(metric, subject.budget)
        same = before is not None and before.scale == cap
        limit = NOISE_BOUND * accepted
        level: Level | None
        if key[1] == _VERSION:
            level_before = Level(
                added=before.added if before and same else 0.0,
                exceeds=before is not None and before.exceeds,
            )
            level = updated(level_before, *bounds, accepted, limit)
        else:
            version = self._rows.get((key[0], _VERSION, *key[2:]))
            own = before if before and same and before.own else None
            level = of_slice(
                None if own is None else Level(added=own.added, exceeds=own.exceeds),
                Level() if version is None else Level(added=version.added, exceeds=version.exceeds),
                bounds,
                accepted,
                limit,
            )
        return FloorRow(
            model_version_id=key[0],
            slice_id=key[1],
            side=key[2],
            metric=key[3],
            scale=cap,
            **_sums(noise),
            low=bounds[0],
            high=bounds[1],
            added=0.0 if level is None else level.added,
            exceeds=level is not None and level.exceeds,
            own=level is not None,
            announced=before is not None and before.announced,
            budget=accepted,
            updated_us=at_us,
            fold_seq=fold_seq,
        )

    def _replace(self, key: _Key, row: FloorRow, noise: Noise, subject: NoiseSubject) -> list[int]:
        """Put a row in the place of the one before, and note what it changes; return its slice if its allowance changed."""
        slice_key = key[:2]
        used = self._in_use(slice_key, key[2], key[3])
        added, exceeded = (0.0, False) if used is None else (used.added, used.exceeds)
        of_version = self._rows.get((key[0], _VERSION, *key[2:]))
        self._rows[key] = row
        self._dirty.add(key)
        now = self._in_use(slice_key, key[2], key[3])
        assert now is not None or not row.own
        after, exceeds_now = (0.0, False) if now is None else (now.added, now.exceeds)
        if key[1] == _VERSION:
            self.generation += used is None or after != added
            tells = exceeds_now is not exceeded
        else:
            # Where the version differs from itself too much, its own event says so for all of its slices.
            silent = of_version is not None and of_version.exceeds
            begins = exceeds_now and not exceeded and not silent
            tells = begins or (row.announced and not exceeds_now)
            self._rows[key] = msgspec.structs.replace(
                row, announced=begins or (row.announced and exceeds_now)
            )
        if tells:
            self._changes.append(
                NoiseChangeRow(
                    model_version_id=key[0],
                    slice_id=key[1],
                    side=key[2],
                    metric=key[3],
                    exceeds=exceeds_now,
                    at_us=row.updated_us,
                    fold_seq=row.fold_seq,
                    event=_event(row, subject, noise, NOISE_BOUND),
                )
            )
        return [key[1]] if key[1] != _VERSION and after != added else []


def _event(row: FloorRow, subject: NoiseSubject, noise: Noise, bound: float) -> NoiseEvent:
    version, task = subject.version, subject.task
    metric, scale = Metric(row.metric), row.scale
    return NoiseEvent(
        model=version.model,
        version=version.candidate_version,
        reference=version.reference_digest,
        slice=ALL if row.slice_id == _VERSION else subject.name_of(row.slice_id) or "",
        side=row.side,
        metric=metric,
        measure=measure_of(metric, task),
        unit=unit_of(metric, task),
        exceeds=row.exceeds,
        mean=(noise.mean or 0.0) * scale,
        low=row.low * scale,
        high=row.high * scale,
        n_recent=row.older_n,
        budget=row.budget * scale,
        limit=bound * row.budget * scale,
        added=row.added * scale,
        advice=advice(row.side, exceeds=row.exceeds, of_slice=row.slice_id != _VERSION),
    )


def _key(row: FloorRow) -> _Key:
    return row.model_version_id, row.slice_id, row.side, row.metric


def _noise(row: FloorRow | None, cap: float) -> Noise:
    """Return the sums of a row; empty sums where there is no row, or where its cap differs."""
    if row is None or row.scale != cap:
        return Noise()
    return Noise(
        older=NoiseSums(row.older_n, row.older_weight, row.older_total),
        newer=NoiseSums(row.newer_n, row.newer_weight, row.newer_total),
    )


def _sums(noise: Noise) -> dict[str, Any]:
    """Return the columns of the sums."""
    older, newer = noise.older, noise.newer
    return {
        "older_n": older.n,
        "older_weight": older.weight,
        "older_total": older.total,
        "newer_n": newer.n,
        "newer_weight": newer.weight,
        "newer_total": newer.total,
    }


def _by_slice(
    seen: Sequence[tuple[NoiseRow, float]], subject: NoiseSubject
) -> dict[int, list[tuple[NoiseRow, float]]]:
    """Return the items of one exchange by the slices that they count for; those of the version under `_VERSION`."""
    items_by_slice: dict[int, list[tuple[NoiseRow, float]]] = {}
    for row, x in seen:
        for slice_id in (subject.everything,) if row.slice_ids is None else row.slice_ids:
            if slice_id == subject.everything:
                items_by_slice.setdefault(_VERSION, []).append((row, x))
            elif subject.name_of(slice_id) is not None:
                items_by_slice.setdefault(slice_id, []).append((row, x))
    return items_by_slice


def by_version(rows: Iterable[NoiseRow]) -> Iterator[tuple[int, list[NoiseRow]]]:
    """Yield each version with its items, by version id."""
    items_by_version: dict[int, list[NoiseRow]] = {}
    for row in rows:
        items_by_version.setdefault(row.model_version_id, []).append(row)
    yield from sorted(items_by_version.items())
