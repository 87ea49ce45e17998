"""Candidate versions: what is known of each, and what people see of it now."""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.tasks import Measure
from quantdrift.storage.figures.figures import SeenVersion, SliceFigures, last_day
from quantdrift.storage.snapshot import rows

_VERSIONS_NOW: Final = text("""
    select v.id, v.model, v.candidate_version as version, v.reference_digest as reference, v.first_seen_at as first_at,
        max(n.last_at) as last_at, min(n.since) filter (where n.verdict = 'firing') as firing_since,
        min(n.since) filter (where n.predicate = 'true') as since,
        max(n.verdict) filter (where n.predicate = 'true') as whole,
        max(n.reason) filter (where n.predicate = 'true') as reason,
        max(n.slice_id) filter (where n.predicate = 'true') as all_id,
        count(n.slice_id) filter (where n.verdict = 'firing') as n_firing,
        count(n.slice_id) filter (where n.verdict = 'warning') as n_warning,
        count(n.slice_id) filter (where n.verdict = 'unknown') as n_unknown,
        count(n.slice_id) as n_slices, max(s.last_at) as seen_at, max(s.replaced_at) as replaced_at
    from model_version v left join slice_now n on n.model_version_id = v.id left join serving s on s.model_version_id = v.id
    group by v.id order by v.model, max(n.last_at) desc nulls last, v.id desc limit 500
""")
_VERSIONS = text("""
    select id, model, candidate_version, reference_digest, coalesce(reference ->> 'precision', '') as precision, first_seen_at,
        coalesce(doubt, '') as doubt
    from model_version left join doubt using (model, reference_digest)
    where :model = '' or model = :model order by model, id
""")
_DIVERGENCES = text("""
    select coalesce(detail ->> 'measure', '') as measure, count(*) as n from (
        select detail from (
            select model_version_id, detail from comparison where captured_at < :before
            order by captured_at desc, exchange_id desc, item desc limit :scanned
        ) newest
        where model_version_id = :version
        union all
        select r.detail from condensed_block b cross join lateral block_rows(b) r
        where r.captured_at < :before and b.model_version_id = :version and b.captured_from < :before
            and b.captured_to >= (select newest_from(1000, '-infinity', :before, :version))
        limit :most
    ) of_version group by 1
""")
_NEWEST: Final = 1_000  # answers that tell which divergence a version's answers have
_SCANNED: Final = 20_000  # answers of all versions among which they are looked for


class VersionNow(msgspec.Struct, frozen=True, kw_only=True):
    """A version of a model, with the verdicts on its slices.

    Parameters
    ----------
    whole, reason, since
        Verdict on all of its traffic, why, and since when; None: nothing was folded yet.
    firing_since
        When the first of its slices that fire began to.
    all_id
        The slice of all traffic.
    seen_at, replaced_at
        Capture time of its newest exchange, and when it was found that another version serves instead; None: not known, and it
        serves.
    """

    id: int
    model: str
    version: str
    reference: str
    first_at: datetime
    last_at: datetime | None
    firing_since: datetime | None
    since: datetime | None
    whole: str | None
    reason: str | None
    all_id: int | None
    n_firing: int
    n_warning: int
    n_unknown: int
    n_slices: int
    seen_at: datetime | None = None
    replaced_at: datetime | None = None

    @property
    def n_ok(self) -> int:
        """Slices within their budget; the overview's template reads it."""
        return self.n_slices - self.n_firing - self.n_warning - self.n_unknown

    @property
    def verdict(self) -> str:
        """The worst verdict on it: a single slice that fires makes it `firing`; `unknown` where nothing is known."""
        if self.n_firing:
            return "firing"
        if self.n_warning:
            return "warning"
        return self.whole or "unknown"


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate version with its reference; digest and precision of it are empty where it has none.

    `doubt` is what that reference's outputs say against the configuration; empty: nothing.
    """

    id: int
    model: str
    candidate_version: str
    reference_digest: str
    precision: str = ""
    doubt: str = ""
    first_seen_at: datetime


async def versions_now(connection: AsyncConnection) -> list[VersionNow]:
    """Return every version by model, that with the newest traffic first."""
    return await rows(connection, VersionNow, _VERSIONS_NOW)


async def traffic_now(
    connection: AsyncConnection, version: VersionNow, as_of: datetime, slice_ids: Sequence[int] = ()
) -> dict[int, SliceFigures]:
    """Return the figures of each slice of a version in the last day with data; intervals count the people of `slice_ids`."""
    of = seen(version)
    return {} if of is None else await last_day(connection, of, as_of, slice_ids=slice_ids)


def seen(version: VersionNow) -> SeenVersion | None:
    """Return a version as figures are of it; None: nothing of it was folded yet."""
    if version.last_at is None:
        return None
    return SeenVersion(
        id=version.id,
        model=version.model,
        version=version.version,
        first_at=version.first_at,
        last_at=version.last_at,
    )


async def candidate_versions(connection: AsyncConnection, model: str = "") -> list[Version]:
    """Return the candidate versions of `model`, or of all, oldest first."""
    return await rows(connection, Version, _VERSIONS, model=model)


async def measure_of_text(
    connection: AsyncConnection, version_id: int, measure: Measure, before: datetime
) -> Measure:
    """Return the measure of generated text with the name of what the newest answers before a time have: KL, regret or both.

    Of a version that has none among the newest 20,000 of all it is the name of the task.
    """
    if not measure.measured_by_divergence:
        return measure
    found = await connection.execute(
        _DIVERGENCES, {"version": version_id, "before": before, "most": _NEWEST, "scanned": _SCANNED}
    )
    return measure.of({row.measure: row.n for row in found})
