"""Exact counts of offered, taken and lost exchanges over a period, and the traffic by slice and header stratum."""

from collections import Counter, defaultdict
from datetime import datetime, timedelta
from typing import Final

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.errors import OperatorError
from quantdrift.core.records import Predicate
from quantdrift.storage.account.expiries import EXPIRED
from quantdrift.storage.database import Database
from quantdrift.storage.snapshot import SnapshotReader

_EDGE = timedelta(minutes=15)  # a sidecar's clock may run ahead of the database's by so much

# Counts are cumulative per boot: those of a period are its last tally less the last one before the period, however old
# that is. Where there is none, the boot is counted from zero, as in the view `coverage_hour`.
_TALLIES = text("""
    with edge as (
        select source, boot, stratum, min(sequence) as first, max(sequence) as last
        from tally where at >= :begin and at < :end group by 1, 2, 3
    )
    select e.source, e.boot::text as boot, e.stratum, l.offered - coalesce(b.offered, 0) as offered,
        l.taken - coalesce(b.taken, 0) as taken, l.thinned - coalesce(b.thinned, 0) as thinned,
        l.published - coalesce(b.published, 0) as published, l.lost, coalesce(b.lost, '{}') as lost_before,
        l.models, coalesce(b.models, '{}') as models_before,
        l.blind_connections - coalesce(b.blind_connections, 0) as blind_connections
    from edge e
    join tally l on l.source = e.source and l.boot = e.boot and l.stratum = e.stratum and l.sequence = e.last
    left join lateral (
        select t.* from tally t
        where t.source = e.source and t.boot = e.boot and t.stratum = e.stratum and t.sequence < e.first
        order by t.sequence desc limit 1
    ) b on true
    order by e.stratum, e.source
""")

_EXPIRED = text("""
    select stratum, model, sum(n)::bigint as n from expiry join batch on batch.id = expiry.batch_id
    where batch.stored_at >= :begin and batch.stored_at < :end group by 1, 2
""")

_COMPARED = text("""
    select header_stratum, count(distinct exchange_id) as n from comparisons(:begin, :end) group by 1
""")

_SKIPPED = text("""
    select reason, sum(n::bigint) as n from batch, jsonb_each_text(skipped) as s (reason, n)
    where stored_at >= :edge and captured_to >= :begin and captured_from < :end and skipped <> '{}'
    group by 1 order by 2 desc, 1
""")

_QUARANTINED = text("""
    select reason, count(*) as n, max(detail) as detail from quarantine
    where quarantined_at >= :begin and quarantined_at < :end and (:model = '' or model in ('', :model))
    group by 1 order by 2 desc, 1
""")
_SPAN: Final = text("""
    select extract(epoch from max(at) - min(at)) from tally where at >= :begin and at < :end
""")
# Summed weights estimate traffic: each exchange represents 1 / pi exchanges.
_WEIGHTS: Final = text("""
    select v.model, s.name, s.predicate, s.definition, sum(r.weight) as weight
    from rollup_hour r join model_version v on v.id = r.model_version_id join slice s on s.id = r.slice_id
    where r.hour >= date_trunc('hour', cast(:begin as timestamptz)) and r.hour < :end
    group by 1, 2, 3, 4 order by 5 desc
""")


class StratumCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one header stratum over the period, summed over sidecars.

    Parameters
    ----------
    compared
        Exchanges compared; None where the period is too large to count them by stratum.
    lost
        Taken exchanges that were lost, by reason; `expired` are part of the published ones as well.
    models
        Lost exchanges by model and reason, if the request named its model.
    """

    stratum: str
    offered: int
    taken: int
    thinned: int
    published: int
    compared: int | None
    lost: dict[str, int]
    models: dict[str, dict[str, int]] = {}


class ReasonCount(msgspec.Struct, frozen=True, kw_only=True):
    """Exchanges by reason, with one detail as an example (or empty)."""

    reason: str
    n: int
    detail: str = ""


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """The sidecars of the period.

    Parameters
    ----------
    sources, boots
        Sidecars that published tallies, and their starts.
    blind_connections
        Connections that went unseen.
    """

    sources: int
    boots: int
    blind_connections: int


class Coverage(SnapshotReader):
    """Counts of exchanges in one snapshot."""

    async def strata(
        self, begin: datetime, end: datetime, *, by_stratum: bool
    ) -> tuple[list[StratumCounts], Fleet]:
        """Return the exact counts of a period by header stratum, and the sidecars that reported them.

        Parameters
        ----------
        begin, end
            The period.
        by_stratum
            Count the comparisons of each stratum too: reads `comparison`, so only for short periods.
        """
        compared: dict[str, int] = {}
        if by_stratum:
            rows = await self._rows(_COMPARED, begin=begin, end=end)
            compared = {row["header_stratum"]: row["n"] for row in rows}
        counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        lost: defaultdict[str, Counter[str]] = defaultdict(Counter)
        models: defaultdict[str, defaultdict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
        blind: dict[tuple[str, str], int] = {}
        for row in await self._rows(_TALLIES, begin=begin, end=end):
            stratum = row["stratum"]
            counts[stratum].update({name: row[name] for name in ("offered", "taken", "thinned", "published")})
            lost[stratum].update(row["lost"])
            lost[stratum].subtract(row["lost_before"])
            for name, of in row["models"].items():
                models[stratum][name].update(of["lost"])
            for name, of in row["models_before"].items():
                models[stratum][name].subtract(of["lost"])
            boot = row["source"], row["boot"]
            blind[boot] = max(blind.get(boot, 0), row["blind_connections"])
        for row in await self._rows(_EXPIRED, begin=begin, end=end):
            lost[row["stratum"]][EXPIRED] += row["n"]
            models[row["stratum"]][row["model"]][EXPIRED] += row["n"]
        strata = [
            StratumCounts(
                stratum=stratum,
                offered=counts[stratum]["offered"],
                taken=counts[stratum]["taken"],
                thinned=counts[stratum]["thinned"],
                published=counts[stratum]["published"],
                compared=compared.get(stratum, 0) if by_stratum else None,
                lost=_positive(lost[stratum]),
                models={
                    name: positive
                    for name, of in sorted(models[stratum].items())
                    if (positive := _positive(of))
                },
            )
            for stratum in sorted({*counts, *compared, *lost})
        ]
        fleet = Fleet(
            sources=len({source for source, _ in blind}),
            boots=len(blind),
            blind_connections=sum(blind.values()),
        )
        return strata, fleet

    async def skipped(self, begin: datetime, end: datetime) -> list[ReasonCount]:
        """Return the exchanges of a period that were read but not compared, by reason."""
        rows = await self._rows(_SKIPPED, begin=begin, end=end, edge=begin - _EDGE)
        return [ReasonCount(reason=row["reason"], n=int(row["n"])) for row in rows]

    async def quarantined(self, begin: datetime, end: datetime, model: str = "") -> list[ReasonCount]:
        """Return the exchanges quarantined in a period, by reason, each with one detail."""
        rows = await self._rows(_QUARANTINED, begin=begin, end=end, model=model)
        return [ReasonCount(**row) for row in rows]


def _positive(counts: Counter[str]) -> dict[str, int]:
    return {reason: n for reason, n in counts.most_common() if n > 0}


# A model has one part of the allowance, its detectors share that: as many times its detectors as there are models would share all.
_DETECTORS: Final = text("""
    select coalesce(
        (
            select m.n_detectors * greatest((
                select count(*) from model_span s where f.exchange_time <= s.last_at + interval '30 days'
            ), 1) from model_fold m where m.model = :model
        ),
        f.n_detectors
    ) from fold f
""")


class SliceUsage(msgspec.Struct, frozen=True, kw_only=True):
    """A slice's estimated share of its model's requests."""

    name: str
    predicate: str
    where: tuple[Predicate, ...]
    share: float


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """The traffic of a model.

    Parameters
    ----------
    requests_per_s
        Exact counts of the sidecars, times the model's estimated share of them.
    strata
        Exact shares of all requests by header stratum.
    slices
        Largest first; without `all`.
    n_detectors
        Live detectors of the fleet now.
    """

    requests_per_s: float
    strata: dict[str, float]
    slices: tuple[SliceUsage, ...]
    n_detectors: int


async def usage(database: Database, model: str, begin: datetime, end: datetime) -> Usage:
    """Return the traffic of `model` from `begin` to `end`.

    Raises
    ------
    OperatorError
        There are no tallies, or no comparisons of the model, in that time.
    RetryError
        Postgres is not available.
    """
    async with database.begin() as connection:
        await connection.execute(text("set transaction isolation level repeatable read, read only"))
        return await _usage(connection, model, begin, end)


async def _usage(connection: AsyncConnection, model: str, begin: datetime, end: datetime) -> Usage:
    period = {"begin": begin, "end": end}
    seconds = await connection.scalar(_SPAN, period)
    strata, _ = await Coverage(connection).strata(begin, end, by_stratum=False)
    offered = {stratum.stratum: stratum.offered for stratum in strata}
    total = sum(offered.values())
    if not total or not seconds:
        raise OperatorError(f"the database has no tallies since {begin:%Y-%m-%d %H:%M}: give --rps instead")
    rows = (await connection.execute(_WEIGHTS, period)).mappings().all()
    everything = {row["model"]: float(row["weight"]) for row in rows if row["predicate"] == "true"}
    if not everything.get(model):
        model_names = ", ".join(sorted(everything)) or "none"
        raise OperatorError(
            f"the database has no comparisons of model `{model}` since {begin:%Y-%m-%d %H:%M}; models: {model_names}"
        )
    return Usage(
        requests_per_s=total / float(seconds) * everything[model] / sum(everything.values()),
        strata={name: n / total for name, n in offered.items()},
        slices=tuple(
            SliceUsage(
                name=row["name"],
                predicate=row["predicate"],
                where=msgspec.convert(row["definition"]["where"], tuple[Predicate, ...]),
                share=min(1.0, float(row["weight"]) / everything[model]),
            )
            for row in rows
            if row["model"] == model and row["predicate"] != "true"
        ),
        n_detectors=int(await connection.scalar(_DETECTORS, {"model": model}) or 0),
    )
