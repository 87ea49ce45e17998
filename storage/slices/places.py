"""The places of slices and versions that are made of values: read for a decision, and changed by it."""

import json
from typing import Any, Final

import msgspec
from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.admission import Place, decide
from quantdrift.core.slices import OTHER, SliceKey
from quantdrift.storage.comparisons.places import OF_SOURCE, VERSION, SharesRow, read_shares, write_shares
from quantdrift.storage.database import Database

_SOURCES: Final = text("select model, source from value_share order by 1, 2")
# What has never been compared counts from when its row was made or when it got its place back.
_SLICES: Final = text(f"""
    select taken.predicate,
        greatest(taken.created_at, v.last_at,
            (select max(c.made_at) from slice_change c where c.slice_id = taken.id and c.status = 'admitted')) as seen_at,
        exists (select from alert a where a.slice_id = taken.id and a.resolved_at is null) as protected
    from (select s.* from slice s where s.lapsed_at is null and {OF_SOURCE}) taken
    left join lateral (select max(last_at) as last_at from verdict where slice_id = taken.id) v on true
    order by taken.id
""")  # noqa: S608 - constants
_VERSIONS: Final = text("""
    select m.candidate_version as predicate, greatest(max(m.first_seen_at), max(v.last_at)) as seen_at,
        bool_or(exists (
            select from alert a where a.model_version_id = m.id and a.resolved_at is null
        )) as protected
    from model_version m left join verdict v on v.model_version_id = m.id
    where m.model = :model and m.lapsed_at is null and m.candidate_version <> :other
    group by 1 order by 1
""")
_LAPSE: Final = text("""
    with lapsed as (
        update slice set lapsed_at = now()
        where model = :model and predicate = :predicate and lapsed_at is null returning id
    )
    insert into slice_change (slice_id, status, made_by, reason)
    select id, 'lapsed', :made_by, :reason from lapsed returning slice_id
""")
_ADMIT: Final = text("""
    with admitted as (
        insert into slice (model, predicate, name, definition)
        values (:model, :predicate, :name, cast(:definition as jsonb))
        on conflict (model, predicate) do update set lapsed_at = null returning id
    )
    insert into slice_change (slice_id, status, made_by, reason)
    select id, 'admitted', :made_by, :reason from admitted
""")
_LAPSE_VERSION: Final = text("""
    update model_version set lapsed_at = now()
    where model = :model and candidate_version = :predicate and lapsed_at is null
""")
_ADMIT_VERSION: Final = text("""
    update model_version set lapsed_at = null where model = :model and candidate_version = :predicate
""")
_SWAPPED: Final = text(f"""
    select count(*) from slice s
    where s.lapsed_at > cast(:now as timestamptz) - interval '1 day' and {OF_SOURCE}
""")  # noqa: S608 - constants
_SWAPPED_VERSIONS: Final = text("""
    select count(distinct candidate_version) from model_version
    where model = :model and lapsed_at > cast(:now as timestamptz) - interval '1 day'
""")
_VERSION_ROWS: Final = text("select distinct candidate_version from model_version where model = :model")
MONITOR: Final = "monitor"


class PlaceChange(msgspec.Struct, frozen=True, kw_only=True):
    """A value that lost its place, or got one.

    Parameters
    ----------
    model, source, name
        Whose, and the name of the slice or version.
    admitted
        Whether it got a place.
    reason
        As text.
    """

    model: str
    source: str
    name: str
    admitted: bool
    reason: str


async def sources(database: Database) -> list[tuple[str, str]]:
    """Return the model and the source of all weights.

    Raises
    ------
    RetryError, OperatorError
        As `Database.begin`.
    """
    async with database.begin() as connection:
        return [(row.model, row.source) for row in await connection.execute(_SOURCES)]


async def settle_places(database: Database, model: str, source: str) -> list[PlaceChange]:
    """Decide on the places of one source, in one transaction; return the changes.

    Raises
    ------
    RetryError, OperatorError
        As `Database.begin`.
    """
    async with database.begin() as connection:
        row = await read_shares(connection, model, source)
        if row is None:
            return []
        of_versions = source == VERSION
        what = {"model": model, "other": OTHER} if of_versions else {"model": model, "source": source}
        place_rows = (await connection.execute(_VERSIONS if of_versions else _SLICES, what)).mappings()
        places = [Place(value=place_row["predicate"], **_times(place_row)) for place_row in place_rows]
        if of_versions:
            rows = set((await connection.scalars(_VERSION_ROWS, {"model": model})).all())
            row.reserved = [name for name in row.reserved if name not in rows and name in row.shares.counts]
            places += [Place(value=name, seen_at=row.now) for name in row.reserved]
        swapped = _SWAPPED_VERSIONS if of_versions else _SWAPPED
        n_swapped = int(await connection.scalar(swapped, {**what, "now": row.now}) or 0)
        counts = row.shares.counts
        row.shares.counts = {value: weight for value, weight in counts.items() if value != OTHER}
        decision = decide(row.shares, places, row.places, row.now, most_swaps=row.places - n_swapped)
        row.shares.counts = counts
        for value, reason in decision.lapsed.items():
            await _lapse(connection, row, value, reason)
        for value, reason in decision.admitted.items():
            await _admit(connection, row, value, reason)
        if of_versions:
            await write_shares(connection, row)
    return [
        PlaceChange(model=model, source=source, name=_name(row, value), admitted=admitted, reason=reason)
        for values, admitted in ((decision.lapsed, False), (decision.admitted, True))
        for value, reason in values.items()
    ]


async def forget(
    connection: AsyncConnection, key: SliceKey, source: str, *, made_by: str, reason: str
) -> bool:
    """Take a slice's place away, and what was counted of its value; return whether it had a place."""
    row = await read_shares(connection, key.model, source)
    if row is not None and row.shares.counts.pop(key.predicate, None) is not None:
        await write_shares(connection, row)
    values = {"model": key.model, "predicate": key.predicate, "made_by": made_by, "reason": reason}
    return (await connection.scalar(_LAPSE, values)) is not None


async def _lapse(connection: AsyncConnection, row: SharesRow, value: str, reason: str) -> None:
    values = {"model": row.model, "predicate": value}
    if row.source != VERSION:
        await connection.execute(_LAPSE, {**values, "made_by": MONITOR, "reason": reason})
    elif value in row.reserved:
        row.reserved.remove(value)
    else:
        await connection.execute(_LAPSE_VERSION, values)


async def _admit(connection: AsyncConnection, row: SharesRow, value: str, reason: str) -> None:
    values = {"model": row.model, "predicate": value}
    if row.source == VERSION:
        result = await connection.execute(_ADMIT_VERSION, values)
        if not result.rowcount:
            row.reserved.append(value)
        return
    key = row.keys[value]
    definition = json.dumps({"where": msgspec.to_builtins(key.where)})
    await connection.execute(
        _ADMIT,
        {**values, "name": key.name, "definition": definition, "made_by": MONITOR, "reason": reason},
    )


def _times(place: RowMapping) -> dict[str, Any]:
    return {"seen_at": place["seen_at"], "protected": place["protected"]}


def _name(row: SharesRow, value: str) -> str:
    return row.keys[value].name if value in row.keys else value
