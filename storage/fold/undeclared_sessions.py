"""The exchanges that are tested for undeclared sessions, and the evidence so far."""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

import msgspec
from sqlalchemy import text
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.storage.schema import tables

_NEWEST: Final = text("select coalesce(max(id), 0) from batch where kind = 'comparison'")
# Exchanges of sessions that are declared are one observation together already. A block that the monitor has made knows no batch: it is
# found by the times of the batches that are asked for.
_EXCHANGES: Final = text("""
    with asked as materialized (
        select min(captured_from) as first, max(captured_to) as last from batch
        where id > :after and id <= :until and kind = 'comparison'
    )
    select c.model_version_id, c.exchange_id::text, c.captured_at, c.slice_ids, c.attributes,
        coalesce(c.divergence, c.flip::int::double precision) as outcome
    from (
        select * from comparison where batch_id > :after and batch_id <= :until
        union all
        select r.* from condensed_block b cross join lateral block_rows(b) r where b.of_batch > :after and b.of_batch <= :until
        union all
        select r.* from asked join condensed_block b on b.captured_to >= asked.first and b.captured_from <= asked.last
        cross join lateral block_rows(b) r
        where b.of_batch is null and r.batch_id > :after and r.batch_id <= :until
    ) c
    where c.item = 0 and c.group_key = ''
        and coalesce(c.divergence, c.flip::int::double precision) is not null
    order by c.batch_id, c.captured_at, c.exchange_id limit :most
""")
_FOUND: Final = text("""
    select distinct on (model_version_id, slice_id) model_version_id, slice_id, attribute from undeclared_session
    where found_at is not null order by model_version_id, slice_id, found_at, attribute
""")


class ExchangeOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The first item of an exchange; `outcome` is its divergence, or whether its decision differs."""

    model_version_id: int
    exchange_id: str
    captured_at: datetime
    slice_ids: tuple[int, ...]
    attributes: dict[str, str]
    outcome: float


class SessionEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `undeclared_session`."""

    model_version_id: int
    slice_id: int
    attribute: str
    n_exchanges: int
    log_evidence: float
    log_threshold: float
    tested_at: datetime
    found_at: datetime | None
    comes_back: bool


async def newest_batch(connection: AsyncConnection) -> int:
    """Return the newest batch of comparisons; 0 without any."""
    return int(await connection.scalar(_NEWEST) or 0)


async def exchanges_between(
    connection: AsyncConnection, after: int, until: int, most: int
) -> list[ExchangeOutcome]:
    """Return the exchanges of the batches above `after`, up to `until`, at most `most`, in the order of storing."""
    rows = await connection.execute(_EXCHANGES, {"after": after, "until": until, "most": most})
    return [ExchangeOutcome(**{**row, "slice_ids": tuple(row["slice_ids"])}) for row in rows.mappings()]


async def session_evidence(connection: AsyncConnection, version_id: int) -> list[SessionEvidence]:
    """Return the evidence of a version so far."""
    table = tables.UndeclaredSessionTable.__table__
    rows = await connection.execute(table.select().where(table.c.model_version_id == version_id))
    return [SessionEvidence(**row) for row in rows.mappings()]


async def write_session_evidence(connection: AsyncConnection, rows: Sequence[SessionEvidence]) -> None:
    """Store the evidence; a row that exists is replaced."""
    for row in rows:
        values = msgspec.structs.asdict(row)
        keys = ("model_version_id", "slice_id", "attribute")
        changed = {name: value for name, value in values.items() if name not in keys}
        await connection.execute(
            upsert(tables.UndeclaredSessionTable)
            .values(**values)
            .on_conflict_do_update(index_elements=keys, set_=changed)
        )


async def found_sessions(connection: AsyncConnection) -> dict[tuple[int, int], str]:
    """Return per version and slice the attribute that was found first."""
    rows = await connection.execute(_FOUND)
    return {(row.model_version_id, row.slice_id): row.attribute for row in rows}
