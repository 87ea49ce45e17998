"""Rows of the table `comparison`, as a shadow worker stores them: the one place in the tests that lists its columns."""

from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime, time, timedelta
from uuid import UUID

import asyncpg
import msgspec

from quantdrift.storage.comparisons.blocks import Blocks, NotAsBlocksError
from quantdrift.storage.comparisons.copy import COLUMNS, columns_of


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One row, column by column; what a test does not say is that of an exchange of one item that nobody weighs."""

    captured_at: datetime
    exchange_id: UUID | str
    item: int = 0
    batch_id: int
    model_version_id: int
    policy_id: int = 1
    slice_ids: Sequence[int] = (1,)
    n_items: int = 1
    source: str = "pod"
    header_stratum: str = "default"
    body_stratum: str = "default"
    pi1: float = 1.0
    pi2: float = 1.0
    u1: float = 0.0
    u2: float = 0.0
    group_key: str = ""
    flip: bool | None = None
    topk: bool | None = None
    js: float | None = None
    divergence: float | None = None
    margin: float | None = None
    candidate_margin: float | None = None
    reference_margin: float | None = None
    attributes: str = "{}"
    features: str = "{}"
    trace: str = ""
    tie: bool | None = None
    detail: str | None = None
    latency_s: float | None = None


async def store_comparisons(connection: asyncpg.Connection, rows: Iterable[Comparison]) -> None:
    """Insert rows; the partitions of their days must be there."""
    await connection.copy_records_to_table(
        "comparison",
        columns=Comparison.__struct_fields__,
        records=[msgspec.structs.astuple(row) for row in rows],
    )


async def make_partitions(connection: asyncpg.Connection, days: Iterable[date]) -> None:
    """Make the partitions of these days in UTC where they are missing."""
    for day in sorted(set(days)):
        begin = datetime.combine(day, time(), UTC)
        await connection.execute(
            f'create table if not exists "comparison_{day:%Y%m%d}" partition of comparison'
            f" for values from ('{begin.isoformat()}') to ('{(begin + timedelta(days=1)).isoformat()}')"
        )


async def condense(connection: asyncpg.Connection) -> int:
    """Put all comparisons of folded batches into blocks, whatever their day; return how many."""
    days = await connection.fetch("select distinct (captured_at at time zone 'UTC')::date from comparison")
    return sum(
        [
            await connection.fetchval("select n from comparison_condense($1, '-infinity', 1000000)", day)
            for (day,) in days
        ]
    )


async def as_blocks(connection: asyncpg.Connection) -> int:
    """Turn what is in `comparison` into the blocks that a worker would have stored, batch by batch; return how many rows went."""
    n_before = await connection.fetchval("select count(*) from comparison")
    names = ", ".join(COLUMNS)
    for batch in await connection.fetch("select distinct batch_id, stored_at from comparison order by 1"):
        async with connection.transaction():
            rows = await connection.fetch(
                f"delete from comparison where batch_id = $1 and stored_at = $2 returning {names}", *batch
            )
            try:
                blocks = Blocks(columns_of([tuple(row) for row in rows]))
            except NotAsBlocksError:
                blocks = None
            few = [tuple(row) for row in rows] if blocks is None else blocks.few
            await connection.copy_records_to_table("comparison", columns=COLUMNS, records=few)
            if few:
                await connection.execute("update comparison set stored_at = $2 where batch_id = $1", *batch)
            if blocks is not None:
                await blocks.insert(connection, batch["batch_id"])
            # A worker's rows have the time of its transaction.
            await connection.execute(
                "update condensed_block set condensed_at = $2 where of_batch = $1 and condensed_at = now()",
                *batch,
            )
    return int(n_before - await connection.fetchval("select count(*) from comparison"))
