"""The traffic of the slices of versions in a time, and how long the versions served in it."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.facts.daily import DailyTraffic

# The hours come from the roll-ups. Of the first and of the last one, the comparisons say where in it the data begins and ends; where
# they are deleted already, the whole hour counts. An hour in which only another version of the model was compared does not count.
_SERVED: Final = text("""
    with hours as (
        select r.model_version_id as id, v.model, r.slice_id as everything, min(r.hour) as first, max(r.hour) as last
        from rollup_hour r join model_version v on v.id = r.model_version_id
        join slice s on s.id = r.slice_id and s.model = v.model and s.predicate = 'true'
        where r.model_version_id = any(cast(:versions as int[]))
            and r.hour >= date_trunc('hour', cast(:begin as timestamptz)) and r.hour < :end
        group by 1, 2, 3
    )
    select id,
        coalesce((
            select min(c.captured_at) from comparison c where c.model_version_id = h.id
                and c.captured_at >= greatest(h.first, :begin) and c.captured_at < least(h.first + interval '1 hour', :end)
        ), greatest(h.first, :begin)) as first_at,
        coalesce((
            select max(c.captured_at) from comparison c where c.model_version_id = h.id
                and c.captured_at >= greatest(h.last, :begin) and c.captured_at < least(h.last + interval '1 hour', :end)
        ), least(h.last + interval '1 hour', :end)) as last_at,
        (
            select count(distinct o.hour) from rollup_hour o join model_version w on w.id = o.model_version_id
            where w.model = h.model and w.id <> h.id and o.slice_id = h.everything and o.hour > h.first and o.hour < h.last
                and not exists (
                    select from rollup_hour own
                    where own.model_version_id = h.id and own.slice_id = h.everything and own.hour = o.hour
                )
        ) as n_away
    from hours h
""")
_SUMS: Final = text(
    """
    select slice_id, sum(weight) as requests, sum(n_groups)::bigint as n_exchanges, sum(n_items)::bigint as n_answers,
        sum(flip) / nullif(sum(flip_weight), 0) as changed_share
    from rollup_hour where model_version_id = :version and hour >= :begin and hour < :end group by 1
""".replace("::", "\\:\\:")
)
_NEWEST: Final = text("select max(last_at) from verdict where model_version_id = :version")
_HOUR_S: Final = 3600.0


def last_day(last_at: datetime) -> tuple[datetime, datetime]:
    """Return the whole hours of the last day with data that ends with the newest exchange: begin, and end."""
    begin = last_at - timedelta(days=1)
    hour = begin.replace(minute=0, second=0, microsecond=0)
    return hour if hour == begin else hour + timedelta(hours=1), last_at + timedelta(microseconds=1)


async def served_s(
    connection: AsyncConnection, versions: Sequence[int], begin: datetime, end: datetime
) -> dict[int, float]:
    """Return for how many seconds of [begin, end) each version served: from its first exchange that was compared to its last.

    Hours between them in which other versions of the model were compared, and this one was not, are left out. Versions without
    data are left out, too.
    """
    values = {"versions": list(versions), "begin": begin, "end": end}
    return {
        row.id: max((row.last_at - row.first_at).total_seconds() - _HOUR_S * row.n_away, 0.0)
        for row in await connection.execute(_SERVED, values)
    }


async def traffic(
    connection: AsyncConnection, version: int, begin: datetime, end: datetime
) -> Mapping[int, DailyTraffic]:
    """Return the traffic of each slice of a version, from the whole hours in [begin, end)."""
    seconds = (await served_s(connection, [version], begin, end)).get(version, 0.0)
    found = await connection.execute(_SUMS, {"version": version, "begin": begin, "end": end})
    return {
        row.slice_id: DailyTraffic(
            requests=row.requests,
            n_exchanges=row.n_exchanges,
            n_answers=row.n_answers,
            seconds=seconds,
            changed_share=row.changed_share,
        )
        for row in found
    }


async def newest_traffic(connection: AsyncConnection, version: int) -> Mapping[int, DailyTraffic]:
    """Return the same of the last day with data of a version; empty where nothing of it was compared."""
    last_at = await connection.scalar(_NEWEST, {"version": version})
    return await traffic(connection, version, *last_day(last_at)) if last_at else {}
