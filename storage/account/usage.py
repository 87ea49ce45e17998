"""A model's traffic over a period, with its shares by slice and header stratum."""

from datetime import datetime
from typing import Final

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.errors import OperatorError
from quantdrift.core.records import Predicate
from quantdrift.storage.account.coverage import Coverage
from quantdrift.storage.database import Database

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
        n_detectors=int(await connection.scalar(text("select n_detectors from fold")) or 0),
    )
