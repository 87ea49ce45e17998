"""The noise floors of every version in the fold: the allowance that they add to budgets, and when noise is too high."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

import msgspec

from quantdrift.core.config.schema import Budget
from quantdrift.core.notation import number
from quantdrift.core.records import Metric, Side
from quantdrift.core.tasks import Task
from quantdrift.drift.evidence.group import group_value
from quantdrift.drift.noise import Noise, Sums, added, exceeds, window_of
from quantdrift.monitor.fold.alert_event import measure_of, unit_of
from quantdrift.monitor.fold.groups import WATCHED, budget_of, cap_of, clipped
from quantdrift.storage.monitor.events import NoiseEvent
from quantdrift.storage.monitor.rows import FloorRow, NoiseChangeRow, NoiseRow, VersionRow

_MOST_TESTED = 0.9  # of the gap between budget and 1: the mean that a detector tests against stays below 1
_Key = tuple[int, Side, str]


class NoiseSubject(msgspec.Struct, frozen=True, kw_only=True):
    """The version that a noise floor belongs to, with its model's task and budget."""

    version: VersionRow
    task: Task
    budget: Budget


class NoiseFloors:
    """The noise of reference and candidate, by version and metric, and the allowances and limits that follow from it.

    Parameters
    ----------
    bound
        `monitor.noise_bound`: the share of the budget above which noise is too high.
    rows
        The stored floors.

    Attributes
    ----------
    generation
        Grows with every change of what `added` returns.
    """

    def __init__(self, bound: float, rows: Iterable[FloorRow]) -> None:
        self._bound = bound
        self._rows: dict[_Key, FloorRow] = {_key(row): row for row in rows}
        self._dirty: set[_Key] = set()
        self._changes: list[NoiseChangeRow] = []
        self.generation = 0

    def see(
        self,
        subject: NoiseSubject,
        rows: Sequence[NoiseRow],
        smallest: Mapping[int, float],
        *,
        at_us: int,
        fold_seq: int,
    ) -> None:
        """Add the items of one version that were computed twice.

        Parameters
        ----------
        rows
            The version's items, those of one exchange and side next to each other.
        smallest
            Per policy its smallest inclusion probability for any of the model's traffic.
        at_us, fold_seq
            Time and number of the fold.
        """
        touched: dict[_Key, Noise] = {}
        for (_, side), group in groupby(rows, key=lambda row: (row.exchange_id, row.side)):
            items = list(group)
            for metric in WATCHED:
                cap = cap_of(metric, subject.budget)
                seen = [(row.pi, x / cap) for row in items if (x := clipped(metric, row, cap)) is not None]
                if not seen:
                    continue
                try:
                    value = group_value(
                        [x for _, x in seen], [pi for pi, _ in seen], smallest[items[0].policy_id], len(seen)
                    )
                except ValueError:
                    continue  # its comparison was not an observation either, and the log says why
                key = (subject.version.id, side, metric.value)
                window = window_of(budget_of(metric, subject.budget))
                before = touched.get(key) or _noise(self._rows.get(key), cap)
                touched[key] = before.seen(min(value.vx, value.v), value.v, window)
        for key in sorted(touched):
            self._update(key, touched[key], subject, at_us=at_us, fold_seq=fold_seq)

    def added(self, version_id: int, metric: str, budget: float) -> float:
        """Return the allowance for a budget of a version, over the cap; budget plus allowance stay below 1."""
        total = sum(
            row.added for side in Side if (row := self._rows.get((version_id, side, metric))) is not None
        )
        return min(total, _MOST_TESTED * (1.0 - budget))

    def too_much(self, version_id: int) -> str:
        """Return why the noise of a version is too high for verdicts, as text; empty where it is not."""
        for side in Side:
            for metric in WATCHED:
                row = self._rows.get((version_id, side, metric.value))
                if row is not None and row.exceeds:
                    return f"noise: the {side.value} differs from itself by too large a part of the {metric.value} budget"
        return ""

    def rows(self) -> list[FloorRow]:
        """Return the floors, in the order of their keys."""
        return [self._rows[key] for key in sorted(self._rows)]

    def take(self) -> tuple[tuple[FloorRow, ...], tuple[NoiseChangeRow, ...]]:
        """Return the floors and changes to write since the last call."""
        rows = tuple(self._rows[key] for key in sorted(self._dirty))
        changes = tuple(self._changes)
        self._dirty, self._changes = set(), []
        return rows, changes

    def _update(self, key: _Key, noise: Noise, subject: NoiseSubject, *, at_us: int, fold_seq: int) -> None:
        version, budget = subject.version, subject.budget
        before, metric = self._rows.get(key), Metric(key[2])
        accepted, cap = budget_of(metric, budget), cap_of(metric, budget)
        low, high = noise.bounds()
        known = before is not None and before.scale == cap
        after = FloorRow(
            model_version_id=version.id,
            side=key[1],
            metric=key[2],
            scale=cap,
            older_n=noise.older.n,
            older_weight=noise.older.weight,
            older_total=noise.older.total,
            newer_n=noise.newer.n,
            newer_weight=noise.newer.weight,
            newer_total=noise.newer.total,
            low=low,
            high=high,
            added=added(before.added if before and known else 0.0, low, high, accepted),
            budget=accepted,
            exceeds=exceeds(before is not None and before.exceeds, low, high, self._bound * accepted),
            updated_us=at_us,
            fold_seq=fold_seq,
        )
        self._rows[key] = after
        self._dirty.add(key)
        self.generation += before is None or after.added != before.added
        if after.exceeds is not (before is not None and before.exceeds):
            self._changes.append(
                NoiseChangeRow(
                    model_version_id=version.id,
                    side=key[1],
                    metric=key[2],
                    exceeds=after.exceeds,
                    at_us=at_us,
                    fold_seq=fold_seq,
                    event=_event(after, subject, noise, self._bound),
                )
            )


def noise_summary(event: NoiseEvent) -> str:
    """Return one line for people: the version, the side, and its noise against the limit."""
    what = "differs from itself too much" if event.exceeds else "differs from itself little enough again"
    return (
        f"{event.model} {event.version}: the {event.side.value} {what}: {event.measure} {number(event.mean, 3)} "
        f"[{number(event.low, 3)}, {number(event.high, 3)}] where {number(event.limit, 3)} is the limit"
    )


def _event(row: FloorRow, subject: NoiseSubject, noise: Noise, bound: float) -> NoiseEvent:
    version, task = subject.version, subject.task
    metric, scale = Metric(row.metric), row.scale
    return NoiseEvent(
        model=version.model,
        version=version.candidate_version,
        reference=version.reference_digest,
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
        advice=_ADVICE[row.side] if row.exceeds else "Nothing: its slices have verdicts again.",
    )


_ADVICE = {
    Side.REFERENCE: (
        "Its slices are unknown as long as this lasts. Check whether the reference depends on the batch (batch "
        "statistics, dropout that is not off, sampling), on the device or on random numbers; then make it "
        "deterministic, or accept a larger budget."
    ),
    Side.CANDIDATE: (
        "Its slices are unknown as long as this lasts. The candidate gives a different answer to the same request: "
        "check whether it samples, or whether the replica serves another version."
    ),
}


def _key(row: FloorRow) -> _Key:
    return row.model_version_id, row.side, row.metric


def _noise(row: FloorRow | None, cap: float) -> Noise:
    """Return the sums of a row; empty sums where there is no row, or where its cap differs."""
    if row is None or row.scale != cap:
        return Noise()
    return Noise(
        older=Sums(row.older_n, row.older_weight, row.older_total),
        newer=Sums(row.newer_n, row.newer_weight, row.newer_total),
    )


def by_version(rows: Iterable[NoiseRow]) -> Iterator[tuple[int, list[NoiseRow]]]:
    """Yield each version with its items, by version id."""
    found: dict[int, list[NoiseRow]] = {}
    for row in rows:
        found.setdefault(row.model_version_id, []).append(row)
    yield from sorted(found.items())
