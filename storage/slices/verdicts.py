"""Slices with their verdicts: now, at the end of a period, and how they changed."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.records import Metric, Verdict
from quantdrift.facts.estimate import Estimate
from quantdrift.facts.status import WORST_FIRST
from quantdrift.storage.alerts.timeline import VerdictStep
from quantdrift.storage.snapshot import rows

# Worst first: what pages, what may, what nobody knows, then the rest by evidence.
ORDER: Final = f"array_position({WORST_FIRST}, n.verdict), n.evidence_ratio desc nulls last, n.slice"
_SLICES_NOW: Final = text(f"""
    select n.slice_id, n.slice, n.predicate, n.verdict, n.reason, n.since, n.n_groups, n.evidence_ratio,
        n.flip_mean, n.flip_low, n.flip_high, n.flip_budget, n.divergence_mean, n.divergence_low, n.divergence_high,
        n.divergence_budget, n.alert_id, n.onset_at, n.last_at, n.flip_missing, count(*) over () as n_found
    from slice_now n
    where n.model_version_id = :version and (:verdict = '' or n.verdict = :verdict)
        and (:words = '' or strpos(lower(n.slice || ' ' || n.predicate), lower(:words)) > 0)
        and (not :parts or n.predicate <> 'true')
    order by {ORDER} limit :most offset :first
""")  # noqa: S608 - a constant
_CHANGES: Final = text("""
    select t.slice_id, t.from_verdict as before, t.to_verdict as after, t.at from transition t
    where t.model_version_id = :version and t.slice_id = any(:slices) and t.at >= :begin order by t.slice_id, t.at, t.id
""")
_REASONS: Final = text("""
    select n.reason, count(*) as n, (array_agg(n.slice order by n.n_groups desc))[1:3] as slices from slice_now n
    where n.model_version_id = :version and n.verdict = 'unknown' group by 1 order by 2 desc limit 5
""")
_SLICES = text(
    "select id, model, name, predicate from slice where :model = '' or model = :model order by model, id"
)
_VERDICTS = text("""
    with later as (
        select distinct on (model_version_id, slice_id) model_version_id, slice_id, from_verdict
        from transition where at >= :end order by model_version_id, slice_id, fold_seq, id
    )
    select v.model_version_id, v.slice_id, coalesce(l.from_verdict, v.verdict) as verdict,
        case when l.from_verdict is null then v.reason else '' end as reason, v.since, v.estimate
    from verdict v left join later l using (model_version_id, slice_id)
    where v.model_version_id = any(cast(:versions as int[])) order by 1, 2
""")


class SliceNow(msgspec.Struct, frozen=True, kw_only=True):
    """A slice with its verdict: the columns of the view `slice_now`."""

    slice_id: int
    slice: str
    predicate: str
    verdict: str
    reason: str
    since: datetime
    n_groups: int
    evidence_ratio: float | None
    flip_mean: float | None
    flip_low: float | None
    flip_high: float | None
    flip_budget: float | None
    divergence_mean: float | None
    divergence_low: float | None
    divergence_high: float | None
    divergence_budget: float | None
    alert_id: int | None
    onset_at: datetime | None
    last_at: datetime | None
    flip_missing: int | None
    n_found: int


class Unknown(msgspec.Struct, frozen=True, kw_only=True):
    """Slices whose health is not known, by reason, with the names of some."""

    reason: str
    n: int
    slices: tuple[str, ...]


class SliceName(msgspec.Struct, frozen=True, kw_only=True):
    """A slice with its name and predicate."""

    id: int
    model: str
    name: str
    predicate: str


class VerdictFact(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict of a slice at the end of the period.

    Parameters
    ----------
    reason
        In words.
    budgets
        Accepted mean by metric, as the monitor wrote it; may lack some.
    noise
        The allowance for noise that was added to the budget, if there was one.
    recent
        By metric the recent mean, over the detector's window.
    """

    version_id: int
    slice_id: int
    verdict: Verdict
    reason: str
    since: datetime
    budgets: dict[Metric, float]
    noise: dict[Metric, float] = {}
    recent: dict[Metric, Estimate] = {}


async def slices_now(
    connection: AsyncConnection,
    version_id: int,
    *,
    words: str = "",
    verdict: str = "",
    most: int = 100,
    first: int = 0,
    parts: bool = False,
) -> list[SliceNow]:
    """Return slices of a version, worst first.

    Parameters
    ----------
    words, verdict
        Only slices with these words in their name or condition, and with this verdict; empty: all.
    parts
        Leave out the slice of all traffic.
    """
    return await rows(
        connection,
        SliceNow,
        _SLICES_NOW,
        version=version_id,
        words=words,
        verdict=verdict,
        most=most,
        first=first,
        parts=parts,
    )


async def verdict_changes(
    connection: AsyncConnection, version_id: int, slice_ids: list[int], begin: datetime
) -> dict[int, list[VerdictStep]]:
    """Return the changes of verdict of slices since `begin`, in order."""
    by_slice: dict[int, list[VerdictStep]] = {}
    for change in await rows(
        connection, VerdictStep, _CHANGES, version=version_id, slices=slice_ids, begin=begin
    ):
        by_slice.setdefault(change.slice_id, []).append(change)
    return by_slice


async def unknown_reasons(connection: AsyncConnection, version_id: int) -> list[Unknown]:
    """Return why the health of slices is not known, the most frequent reasons first."""
    return await rows(connection, Unknown, _REASONS, version=version_id)


async def slice_names(connection: AsyncConnection, model: str = "") -> list[SliceName]:
    """Return the slices of `model`, or of all."""
    return await rows(connection, SliceName, _SLICES, model=model)


async def verdicts_at(
    connection: AsyncConnection, end: datetime, versions: Sequence[int]
) -> list[VerdictFact]:
    """Return the verdict of each slice at `end`; the reason is empty where the verdict has changed since."""
    return [
        VerdictFact(
            version_id=row["model_version_id"],
            slice_id=row["slice_id"],
            verdict=Verdict(row["verdict"]),
            reason=row["reason"],
            since=row["since"],
            budgets=_of_estimate(row["estimate"], "budget"),
            noise=_of_estimate(row["estimate"], "noise"),
            recent=_recent(row["estimate"]),
        )
        for row in (await connection.execute(_VERDICTS, {"end": end, "versions": list(versions)})).mappings()
    ]


def _recent(estimate: Mapping[str, Any]) -> dict[Metric, Estimate]:
    """Return, by metric, the recent mean with its interval."""
    means, lows, highs = (_of_estimate(estimate, member) for member in ("mean", "low", "high"))
    return {
        metric: Estimate(mean=mean, low=lows.get(metric), high=highs.get(metric))
        for metric, mean in means.items()
    }


def _of_estimate(estimate: Mapping[str, Any], member: str) -> dict[Metric, float]:
    """Return, by metric, one member of the objects in `verdict.estimate`, where it is present."""
    return {
        Metric(name): float(entry[member])
        for name, entry in estimate.items()
        if name in Metric.names() and isinstance(entry, Mapping) and entry.get(member) is not None
    }
