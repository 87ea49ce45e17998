"""The list of slices for people: definition, share of the traffic, and current verdict."""

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

import msgspec
from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.clusters import CLUSTER_KEY, NOVELTY_KEY
from quantdrift.core.records import Predicate
from quantdrift.facts.status import Serving
from quantdrift.storage.alerts.alerts import AlertFact, find_alert
from quantdrift.storage.figures.figures import last_day, versions
from quantdrift.storage.fold.read import detector_row
from quantdrift.storage.fold_rows import DetectorRow
from quantdrift.storage.schema.slice_tables import DiscoveryStatus
from quantdrift.storage.serving import servings

# A slice is shown with the version on which it was last seen.
_SLICES: Final = text("""
    select s.id as slice_id, d.id as discovery_id, s.model, s.name, s.predicate, s.definition, s.created_at,
        d.status, d.metric, d.found_mean, d.overall_mean, d.null_mean, d.found_share, d.log_evidence,
        d.log_threshold, d.n_groups as n_tested, d.first_found_at, d.frozen_at, d.tested_at, d.confirmed_at,
        d.expired_at, d.waits_since, d.held, v.verdict, v.reason, v.evidence, v.threshold, v.n_groups, v.last_at,
        w.candidate_version, v.model_version_id, s.lapsed_at
    from slice s
    left join discovery d on d.slice_id = s.id
    left join lateral (
        select * from verdict where slice_id = s.id order by last_at desc, model_version_id desc limit 1
    ) v on true
    left join model_version w on w.id = v.model_version_id
    where :model = '' or s.model = :model
    union all
    select null, d.id, d.model, d.name, d.predicate, d.definition, d.first_found_at,
        d.status, d.metric, d.found_mean, d.overall_mean, d.null_mean, d.found_share, d.log_evidence,
        d.log_threshold, d.n_groups, d.first_found_at, d.frozen_at, d.tested_at, d.confirmed_at,
        d.expired_at, d.waits_since, d.held, null, null, null, null, null, null, w.candidate_version, null, null
    from discovery d join model_version w on w.id = d.model_version_id
    where d.slice_id is null and (:model = '' or d.model = :model)
    order by model, slice_id nulls last, discovery_id
""")
_SIGNALS: Final = text("""
    select * from detector
    where slice_id = :slice and retired_at is null and model_version_id = (
        select model_version_id from verdict where slice_id = :slice
        order by last_at desc, model_version_id desc limit 1
    )
    order by metric, kind
""")


_ALERT: Final = text("""
    select id from alert where slice_id = :slice and resolved_at is null order by id desc limit 1
""")


LAPSED: Final = "lapsed"
"""Status of a slice whose value has no place: its items count as `(other)`."""


class SliceKind(StrEnum):
    """The origin of a slice."""

    ALL = "all"
    DECLARED = "declared"  # an attribute's value
    BINNED = "binned"  # a bin of an input feature
    CROSSED = "crossed"  # several of these combined
    LEARNED = "learned"  # a cluster
    DISCOVERED = "discovered"  # found by a search, confirmed on later traffic
    NOVEL = "novel"  # traffic that was never seen before


class SliceTrial(msgspec.Struct, frozen=True, kw_only=True):
    """The test of a slice that a search found; columns as in `discovery`."""

    id: int
    status: str
    metric: str
    found_mean: float
    overall_mean: float
    null_mean: float
    found_share: float
    log_evidence: float
    log_threshold: float
    n_tested: int
    first_found_at: datetime
    frozen_at: datetime
    tested_at: datetime
    confirmed_at: datetime | None
    expired_at: datetime | None
    waits_since: datetime | None
    held: bool


class ListedSlice(msgspec.Struct, frozen=True, kw_only=True):
    """A slice, or a candidate for one.

    Parameters
    ----------
    id
        Id in the table `slice`; None for a candidate.
    status
        `active`, or `lapsed` if its value has no place; for a slice that a search found `candidate`, `confirmed`, `expired` or `retired`.
    share
        Of the answers of its version, that of `SliceFigures`, on the last day with data. None where there was no traffic, or no such
        hour yet.
    verdict, reason, evidence, threshold, n_groups, last_at, candidate_version
        The last verdict; None before the first one. The evidence of a firing slice is that of its alarm.
    discovery
        For a slice that a search found, else None.
    serving
        Whether `candidate_version` serves and is paused; None before the first verdict.
    """

    id: int | None
    model: str
    name: str
    predicate: str
    kind: SliceKind
    status: str
    share: float | None
    verdict: str | None
    reason: str | None
    evidence: float | None
    threshold: float | None
    n_groups: int | None
    last_at: datetime | None
    candidate_version: str | None
    created_at: datetime
    discovery: SliceTrial | None
    serving: Serving | None = None

    @property
    def ended(self) -> bool:
        """Whether it is neither monitored nor tested any more."""
        return self.status in {DiscoveryStatus.EXPIRED, DiscoveryStatus.RETIRED, LAPSED}


async def list_slices(
    connection: AsyncConnection, *, model: str, as_of: datetime, max_share: float = 1.0
) -> list[ListedSlice]:
    """Return every slice and every candidate of `model`, or of all models where it is empty.

    Parameters
    ----------
    as_of
        When it is asked.
    max_share
        As of `quantdrift.storage.serving.servings`.
    """
    result = (await connection.execute(_SLICES, {"model": model})).mappings().all()
    serving = await servings(connection, max_share, model=model)
    ids = {row["model_version_id"] for row in result if row["model_version_id"] is not None}
    shares = {
        (version_id, slice_id): figures.share
        for version_id, version in (await versions(connection, sorted(ids))).items()
        for slice_id, figures in (await last_day(connection, version, as_of, slice_ids=())).items()
    }
    return [_listed(row, serving, shares) for row in result]


async def signals_of(connection: AsyncConnection, slice_id: int) -> list[DetectorRow]:
    """Return the live detectors of a slice, of the candidate version that it was last seen on."""
    rows = await connection.execute(_SIGNALS, {"slice": slice_id})
    return [detector_row(row) for row in rows.mappings()]


async def where_of(connection: AsyncConnection, slice_id: int) -> tuple[Predicate, ...]:
    """Return the conditions of a slice."""
    definition = await connection.scalar(
        text("select definition from slice where id = :id"), {"id": slice_id}
    )
    return msgspec.convert((definition or {}).get("where", []), tuple[Predicate, ...])


async def alert_of(connection: AsyncConnection, slice_id: int) -> AlertFact | None:
    """Return a slice's open alert, the newest one; None where there is none."""
    alert_id = await connection.scalar(_ALERT, {"slice": slice_id})
    return None if alert_id is None else await find_alert(connection, alert_id)


def kind_of(where: tuple[Predicate, ...], *, discovered: bool) -> SliceKind:
    """Return the origin of a slice with these conditions."""
    keys = {condition.key for condition in where}
    if discovered:
        return SliceKind.DISCOVERED
    if not keys:
        return SliceKind.ALL
    if keys == {CLUSTER_KEY}:
        return SliceKind.LEARNED
    if keys == {NOVELTY_KEY}:
        return SliceKind.NOVEL
    if len(where) > 1:
        return SliceKind.CROSSED
    is_number = where[0].low is not None or where[0].high is not None
    return SliceKind.BINNED if is_number else SliceKind.DECLARED


def _listed(
    row: RowMapping, serving: Mapping[tuple[str, str], Serving], shares: Mapping[tuple[int, int], float]
) -> ListedSlice:
    discovered = row["discovery_id"] is not None
    where = msgspec.convert(row["definition"].get("where", []), tuple[Predicate, ...])
    return ListedSlice(
        id=row["slice_id"],
        kind=kind_of(where, discovered=discovered),
        status=row["status"] if discovered else LAPSED if row["lapsed_at"] else "active",
        discovery=_trial(row) if discovered else None,
        share=shares.get((row["model_version_id"], row["slice_id"])),
        serving=None if row["verdict"] is None else serving.get((row["model"], row["candidate_version"])),
        **{
            name: row[name]
            for name in (
                "model",
                "name",
                "predicate",
                "verdict",
                "reason",
                "evidence",
                "threshold",
                "n_groups",
                "last_at",
                "candidate_version",
                "created_at",
            )
        },
    )


def _trial(row: RowMapping) -> SliceTrial:
    values: Mapping[str, Any] = {name: row[name] for name in SliceTrial.__struct_fields__ if name != "id"}
    return SliceTrial(id=row["discovery_id"], **values)
