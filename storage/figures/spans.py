"""What the comparison of two candidate versions reads first: when each was compared, and how often."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy import Interval, bindparam, text

from quantdrift.storage.figures.periods import SumWindow, VersionSpan
from quantdrift.storage.snapshot import SnapshotReader

# The verdicts say when a version was compared last: neither `comparison` nor the roll-ups have an index on the version.
_SPANS = text("""
    with version as (
        select model_version_id as id, least(max(last_at), cast(:end as timestamptz)) as last
        from verdict where model_version_id = any(cast(:versions as int[])) group by 1
    )
    select id as version_id, first, date_trunc('hour', last) + interval '1 hour' as last
    from version cross join lateral (
        select min(hour) as first from rollup_hour
        where hour >= date_trunc('hour', last - cast(:length as interval)) and hour < last and model_version_id = id
    ) as rollup
    where first is not null
""")

# Of a version that no fold has reached yet only the comparisons are there, from about its first appearance on. They are
# read for these versions alone: the time of it grows with the rows since then.
_UNFOLDED = text("""
    select id from model_version v
    where id = any(cast(:versions as int[])) and not exists (select from verdict where model_version_id = v.id)
""")

_UNFOLDED_SPANS = text("""
    select v.id as version_id, date_trunc('hour', min(c.captured_at)) as first,
        date_trunc('hour', max(c.captured_at)) + interval '1 hour' as last
    from model_version v cross join lateral comparisons(v.first_seen_at - interval '1 day', 'infinity') c
    where c.model_version_id = v.id and v.id = any(cast(:versions as int[])) and c.captured_at < coalesce(cast(:end as timestamptz), 'infinity')
    group by 1
""")

_COUNT = text("""
    select count(*) as n, min(captured_at) as first, max(captured_at) as last from (
        select captured_at from comparisons(:begin, :end) where model_version_id = :version limit :most
    ) as row
""")


class VersionReader(SnapshotReader):
    """Single versions in one snapshot."""

    async def spans(
        self, versions: Sequence[int], length: timedelta, end: datetime | None
    ) -> dict[int, VersionSpan]:
        """Return, by id, when each version was compared last: at most `length` before its last comparison, or before `end`.

        Versions without a comparison before `end` are left out.
        """
        wanted = {"versions": list(versions), "end": end}
        within = _SPANS.bindparams(bindparam("length", type_=Interval))
        rows = list(await self._rows(within, length=length, **wanted))
        unfolded = [row["id"] for row in await self._rows(_UNFOLDED, versions=list(versions))]
        if unfolded:
            rows += await self._rows(_UNFOLDED_SPANS, versions=unfolded, end=end)
        return {row["version_id"]: VersionSpan(**row) for row in rows}

    async def extent(
        self, window: SumWindow, version: int, most: int
    ) -> tuple[int, datetime | None, datetime | None]:
        """Return how many comparisons of a version a window has, counted no further than `most`, and the first and the last of them."""
        wanted = {"begin": window.begin, "end": window.end, "version": version, "most": most}
        (row,) = await self._rows(_COUNT, **wanted)
        return int(row["n"]), row["first"], row["last"]
