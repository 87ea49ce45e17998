"""How long things take: replays, relays, and an item on each side."""

from datetime import datetime
from functools import partial
from typing import Final

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.facts.speed import ItemTimes
from quantdrift.storage import cost, queries, snapshot
from quantdrift.storage.cost import ReplayTime
from quantdrift.storage.snapshot import in_time, rows

_REPLAYS: Final = text("""
    with minute as (
        select provenance ->> 'runtime' as runtime, provenance ->> 'version' as version, provenance ->> 'provider' as provider,
            provenance ->> 'device' as device, date_trunc('minute', stored_at) as at, sum(n_rows) as n,
            sum(replay_s) as seconds, sum(n_rows) filter (where replay_s is not null) as n_timed,
            array_agg(distinct worker) as workers, max(extract(epoch from stored_at - captured_from)) as longest_s
        from batch where kind = 'comparison' and stored_at >= :begin and n_rows > 0 group by 1, 2, 3, 4, 5
    )
    select coalesce(runtime, '') as runtime, coalesce(version, '') as version, coalesce(provider, '') as provider,
        coalesce(device, '') as device, cast(sum(n) as bigint) as n, cast(max(n) as bigint) as n_busiest,
        max(longest_s) as longest_s, sum(seconds) as seconds, cast(coalesce(sum(n_timed), 0) as bigint) as n_timed,
        (select count(distinct w) from minute m cross join unnest(m.workers) as w
         where (m.runtime, m.version, m.provider, m.device) is not distinct from
             (minute.runtime, minute.version, minute.provider, minute.device)) as n_workers
    from minute group by minute.runtime, minute.version, minute.provider, minute.device order by 5 desc
""")
# Counts are cumulative since a boot, so the last one minus the first one is what came between. The processor time is that of
# the whole sidecar, and stands beside each of its strata.
_RELAYS: Final = text("""
    with counted as (
        select source, boot, stratum, max(offered) - min(offered) as offered, max(relay_cpu_s) - min(relay_cpu_s) as cpu_s,
            min(at) as begin, max(at) as last
        from tally where at >= :begin and relay_cpu_s is not null group by 1, 2, 3
    ), started as (
        select source, sum(offered) as offered, max(cpu_s) as cpu_s, max(last) as last,
            extract(epoch from max(last) - min(begin)) as span_s
        from counted group by source, boot
    )
    select source, cast(sum(offered) as bigint) as n, sum(cpu_s) as cpu_s, cast(sum(span_s) as double precision) as span_s,
        max(last) as last
    from started group by 1 having sum(span_s) > 0 order by sum(cpu_s) desc, 1 limit 50
""")


class ReplayCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What one kind of replica of the references did in a time.

    Parameters
    ----------
    runtime, version, provider, device
        What ran the references; empty: the batches do not say it.
    n, n_busiest
        Items replayed and stored, in the whole time and in its busiest minute.
    longest_s
        Longest time from a capture to the stored comparison, seconds.
    n_workers
        Workers that stored them.
    seconds, n_timed
        Seconds in which the references computed, and the items of that time; None: no batch says it.
    """

    runtime: str
    version: str
    provider: str
    device: str
    n: int
    n_busiest: int
    longest_s: float
    n_workers: int
    seconds: float | None
    n_timed: int


class RelayTime(msgspec.Struct, frozen=True, kw_only=True):
    """The processor time of one sidecar's relay workers between its first and its last counts of a time.

    Parameters
    ----------
    source
        The sidecar.
    n
        Inference requests that were offered between them.
    cpu_s, span_s
        Processor time of the workers, all together, and how long it took, seconds.
    last
        When the last ones were read.
    """

    source: str
    n: int
    cpu_s: float
    span_s: float
    last: datetime


async def item_times_quickly(
    connection: AsyncConnection, begin: datetime, end: datetime
) -> list[ItemTimes] | None:
    """Return the same as `item_times`; None: it takes too long to read."""
    return await in_time(connection, partial(item_times, connection, begin, end), snapshot.PATIENCE_S)


async def item_times(connection: AsyncConnection, begin: datetime, end: datetime) -> list[ItemTimes]:
    """Return how long an item took on each side, by version and device, in the newest 500 batches of a time."""
    result = (
        await connection.exec_driver_sql(queries.filled(queries.ITEM_TIMES, begin=begin, end=end))
    ).mappings()
    return [msgspec.convert(dict(row), ItemTimes, strict=False) for row in result]


async def replays_since(connection: AsyncConnection, begin: datetime) -> list[ReplayCounts]:
    """Return what was replayed since `begin`, by runtime and device, the busiest first."""
    return await rows(connection, ReplayCounts, _REPLAYS, begin=begin)


async def replay_times_quickly(
    connection: AsyncConnection, begin: datetime, end: datetime
) -> dict[str, ReplayTime]:
    """Return how long references computed in a time, by model; empty where it takes too long to read."""
    return (
        await in_time(connection, partial(cost.replay_times, connection, begin, end), snapshot.PATIENCE_S)
        or {}
    )


async def relays_since(connection: AsyncConnection, begin: datetime) -> list[RelayTime]:
    """Return what the relays of 50 sidecars used since `begin`, the busiest first; empty where it takes too long to read."""
    read = partial(rows, connection, RelayTime, _RELAYS, begin=begin)
    return await in_time(connection, read, snapshot.PATIENCE_S) or []
