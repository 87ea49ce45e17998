"""The inputs of the sampling policy: recent items, traffic by slice, evidence, and the offered requests.

Every query is limited by a time window on an index, and by a number of rows.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec
from sqlalchemy import RowMapping, TextClause, text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.records import Predicate, Verdict
from quantdrift.storage.database import Database
from quantdrift.storage.newest_rows import newest

MOST_ITEMS: Final = 20_000
MOST_SIGNALS: Final = 5_000
_TRAFFIC: Final = timedelta(hours=24)

# Along the primary key of the partitions, backwards from now.
_ITEMS: Final = text(f"""
    with latest as {
    newest(
        "c.captured_at, c.exchange_id, c.item, c.slice_ids, c.n_items, c.header_stratum, c.pi1, c.pi2, c.candidate_margin, c.flip",
        since="cast(:since as timestamptz)",
        before="timestamptz 'infinity'",
        most="cast(:most as integer)",
    )
}
    select slice_ids, n_items, header_stratum, pi1 * pi2 as pi, flip,
        min(candidate_margin) over (partition by captured_at, exchange_id) as margin
    from latest order by captured_at, exchange_id, item
""")  # noqa: S608 - constants
# Counts are cumulative: two short intervals give the rate between them, however many tallies there are. A sidecar that is
# not in the later one is gone.
_OFFERED: Final = text("""
    with edges as (
        select source, boot, stratum, min(at) as first, max(at) as last,
            max(offered) - min(offered) as offered
        from tally
        where (at > :begin and at <= cast(:begin as timestamptz) + cast(:edge as interval))
            or at > cast(:end as timestamptz) - cast(:edge as interval)
        group by 1, 2, 3
    )
    select stratum, array_agg(distinct source) as sources,
        sum(offered / extract(epoch from last - first))::double precision as per_s
    from edges
    where last > first and last > cast(:end as timestamptz) - cast(:edge as interval)
    group by 1
""")
# Summed weights estimate exchanges, here multiplied by their items. A slice without a live detector was retired and
# gets no share from then on.
_TRAFFICS: Final = text("""
    select s.id, s.model, s.name, s.predicate, s.definition,
        sum(r.weight * r.n_items / r.n_groups)::double precision as weight
    from verdict v join slice s on s.id = v.slice_id
        join rollup_hour r on r.model_version_id = v.model_version_id and r.slice_id = v.slice_id
    where v.last_at > :since and r.hour > :since and r.n_groups > 0 and exists (
        select from detector d
        where d.model_version_id = v.model_version_id and d.slice_id = v.slice_id and d.retired_at is null
    ) group by 1
""")
_NOTE_LAG: Final = text("update fold set lag_factor = :factor returning true")
_SIGNALS: Final = text("""
    select d.slice_id, d.model_version_id, v.verdict, d.kind, d.evidence, d.state
    from detector d join verdict v on v.model_version_id = d.model_version_id and v.slice_id = d.slice_id
    where d.retired_at is null and v.last_at > :since order by d.evidence desc, d.slice_id limit :most
""")
_EVIDENCE: Final = text("""
    select slice_id, max(evidence) as evidence from verdict v
    where last_at > :since and verdict <> 'firing' and exists (
        select from detector d
        where d.model_version_id = v.model_version_id and d.slice_id = v.slice_id and d.retired_at is null
    ) group by 1 order by 2 desc limit :most
""")
_REPLAYED: Final = text("""
    select coalesce(sum(n_rows), 0) from batch where stored_at > :since and kind = 'comparison'
""")


class RecentItems(msgspec.Struct, frozen=True, kw_only=True):
    """The items that were compared last, a limited number, by column; one entry per item.

    Parameters
    ----------
    pi
        Total inclusion probabilities.
    margin
        The candidate's smallest margin in the exchange, or None.
    """

    slice_ids: tuple[tuple[int, ...], ...]
    n_items: tuple[int, ...]
    header_stratum: tuple[str, ...]
    pi: tuple[float, ...]
    margin: tuple[float | None, ...]
    flip: tuple[bool | None, ...]


class SliceWeight(msgspec.Struct, frozen=True, kw_only=True):
    """A slice with the summed weight of its items in 24 hours."""

    id: int
    model: str
    name: str
    where: tuple[Predicate, ...]
    everything: bool
    weight: float


class SignalEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """The evidence of one detector of a slice and candidate version, with its stored state."""

    slice_id: int
    model_version_id: int
    verdict: Verdict
    kind: str
    evidence: float
    state: bytes


class Offered(msgspec.Struct, frozen=True, kw_only=True):
    """The requests that the sidecars see.

    Parameters
    ----------
    per_s
        Requests per second by header stratum, of the whole fleet.
    n_sources
        Number of sidecars that reported them.
    """

    per_s: dict[str, float]
    n_sources: int


class TrafficRecord(msgspec.Struct, frozen=True, kw_only=True):
    """All inputs of the policy, from one snapshot."""

    items: RecentItems
    offered: Offered
    slices: tuple[SliceWeight, ...]
    signals: tuple[SignalEvidence, ...]


async def read_traffic(
    database: Database, now: datetime, *, window_s: float, tally_s: float, stale_s: float
) -> TrafficRecord:
    """Return the inputs of a policy.

    Parameters
    ----------
    window_s
        Age up to which items and tallies count.
    tally_s
        Interval at which sidecars publish tallies.
    stale_s
        A slice of a version that was not compared for this long has no evidence.

    Raises
    ------
    RetryError
        Postgres is not available.
    """
    window = timedelta(seconds=window_s)
    edge = timedelta(seconds=min(max(6 * tally_s, 60.0), window_s / 2))
    async with database.begin() as connection:
        await connection.execute(text("set transaction isolation level repeatable read, read only"))
        items = await _rows(connection, _ITEMS, since=now - window, most=MOST_ITEMS)
        offered = await _rows(connection, _OFFERED, begin=now - window, end=now, edge=edge)
        slices = await _rows(connection, _TRAFFICS, since=now - _TRAFFIC)
        since = now - timedelta(seconds=stale_s)
        signals = await _rows(connection, _SIGNALS, since=since, most=MOST_SIGNALS)
    return TrafficRecord(
        items=RecentItems(
            slice_ids=tuple(tuple(row["slice_ids"]) for row in items),
            n_items=tuple(row["n_items"] for row in items),
            header_stratum=tuple(row["header_stratum"] for row in items),
            pi=tuple(row["pi"] for row in items),
            margin=tuple(row["margin"] for row in items),
            flip=tuple(row["flip"] for row in items),
        ),
        offered=Offered(
            per_s={row["stratum"]: row["per_s"] for row in offered},
            n_sources=len({source for row in offered for source in row["sources"]}),
        ),
        slices=tuple(
            SliceWeight(
                id=row["id"],
                model=row["model"],
                name=row["name"],
                where=msgspec.convert(row["definition"]["where"], tuple[Predicate, ...]),
                everything=row["predicate"] == "true",
                weight=row["weight"],
            )
            for row in slices
        ),
        signals=tuple(
            SignalEvidence(
                slice_id=row["slice_id"],
                model_version_id=row["model_version_id"],
                verdict=Verdict(row["verdict"]),
                kind=row["kind"],
                evidence=row["evidence"],
                state=bytes(row["state"]),
            )
            for row in signals
        ),
    )


async def read_evidence(database: Database, since: datetime) -> dict[int, float]:
    """Return the largest evidence of each slice that was compared since then and does not fire; a cheap query.

    Raises
    ------
    RetryError
        Postgres is not available.
    """
    async with database.begin() as connection:
        rows = await _rows(connection, _EVIDENCE, since=since, most=MOST_SIGNALS)
    return {row["slice_id"]: row["evidence"] for row in rows}


async def replayed_per_s(database: Database, now: datetime, window_s: float) -> float:
    """Return how many items per second were stored over the last `window_s`.

    Raises
    ------
    RetryError
        Postgres is not available.
    """
    async with database.begin() as connection:
        n = await connection.scalar(_REPLAYED, {"since": now - timedelta(seconds=window_s)})
    return float(n or 0) / window_s


async def note_lag(database: Database, factor: float) -> bool:
    """Note by how much the sampling rates are lowered, for people; return whether there is a fold yet that can have it.

    Raises
    ------
    RetryError
        Postgres is not available.
    """
    async with database.begin() as connection:
        return bool(await connection.scalar(_NOTE_LAG, {"factor": factor}))


async def _rows(
    connection: AsyncConnection, statement: TextClause, **parameters: Any
) -> Sequence[RowMapping]:
    return (await connection.execute(statement, parameters)).mappings().all()
