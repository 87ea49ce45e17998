"""The insertion of `comparison` rows by COPY: at line rate, and safe to repeat."""

from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, date, datetime
from typing import Any, Final

import asyncpg
import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.records import Way
from quantdrift.storage.comparisons.rows import ComparedExchange

COLUMNS: Final = (
    "captured_at",
    "exchange_id",
    "item",
    "batch_id",
    "model_version_id",
    "policy_id",
    "slice_ids",
    "n_items",
    "source",
    "header_stratum",
    "body_stratum",
    "pi1",
    "pi2",
    "u1",
    "u2",
    "group_key",
    "flip",
    "topk",
    "js",
    "divergence",
    "margin",
    "candidate_margin",
    "reference_margin",
    "detail",
    "attributes",
    "features",
    "trace",
    "tie",
    "origin",
    "latency_s",
    "first_token_s",
    "per_token_s",
)
_STAGING: Final = "comparison_staging"
_CREATE_STAGING: Final = f"""
    create temp table if not exists {_STAGING} (like comparison including defaults) on commit drop;
    truncate {_STAGING}
"""
_MERGE: Final = f"""
    insert into comparison ({", ".join(COLUMNS)}) select {", ".join(COLUMNS)} from {_STAGING}
    on conflict do nothing
"""  # noqa: S608 - constants

Row = tuple[Any, ...]
InsertRows = Callable[[AsyncConnection, list[Row]], Awaitable[tuple[int, frozenset[date]]]]


def comparison_rows(
    compared: ComparedExchange,
    batch_id: int,
    version_id: int,
    policy_id: int,
    slice_ids: Mapping[int, list[int]],
) -> list[Row]:
    """Return one row per item of an exchange, in the order of the columns that are copied.

    Parameters
    ----------
    batch_id, version_id, policy_id
        Ids of the rows that the comparisons refer to.
    slice_ids
        Ids of the slices of an item, in rising order, by the `id` of `item.slices`.
    """
    exchange = compared.exchange
    sampling = exchange.sampling
    attributes = msgspec.json.encode(exchange.attributes).decode()
    took = exchange.latency
    times = (None, None, None) if took is None else (took.last_byte_s, took.first_token_s, took.per_token_s)
    return [
        (
            exchange.captured_at,
            exchange.id,
            index,
            batch_id,
            version_id,
            policy_id,
            slice_ids[id(item.slices)],
            len(compared.items),
            exchange.source,
            sampling.header_stratum,
            sampling.body_stratum,
            sampling.pi1,
            sampling.pi2,
            sampling.u1,
            sampling.u2,
            exchange.group,
            item.flip,
            item.topk,
            item.js,
            item.divergence,
            item.margin,
            item.candidate_margin,
            item.reference_margin,
            item.detail,
            attributes,
            msgspec.json.encode(item.features).decode(),
            exchange.trace,
            item.tie,
            None if exchange.way is Way.RELAY else f"{exchange.way.value} {exchange.caller}".rstrip(),
            *times,
        )
        for index, item in enumerate(compared.items)
    ]


async def copy_comparisons(connection: AsyncConnection, rows: list[Row]) -> tuple[int, frozenset[date]]:
    """Insert rows that are all new, of days that have partitions, as `insert_comparisons` does.

    Raises
    ------
    asyncpg.UniqueViolationError, asyncpg.CheckViolationError
        They are not: nothing more can be done in this transaction.
    """
    driver: asyncpg.Connection = (await connection.get_raw_connection()).driver_connection
    await driver.copy_records_to_table("comparison", records=rows, columns=COLUMNS)
    return len(rows), frozenset()


async def insert_comparisons(connection: AsyncConnection, rows: list[Row]) -> tuple[int, frozenset[date]]:
    """Insert rows; return how many were new, and the days without a partition.

    The caller's transaction must have executed a statement before: the adapter begins lazily, and a COPY that
    comes first would survive a rollback.
    """
    if not rows:
        return 0, frozenset()
    try:
        return await _copy_or_merge(connection, rows), frozenset()
    except asyncpg.CheckViolationError as error:
        if error.constraint_name:  # a check of the table itself, not a missing partition
            raise
    # Partitions are days: those without a partition are found by trying each day alone.
    by_day: dict[date, list[Row]] = {}
    for row in rows:
        by_day.setdefault(day_of(row[0]), []).append(row)
    n_rows, missing = 0, set()
    for day, of_day in sorted(by_day.items()):
        try:
            n_rows += await _copy_or_merge(connection, of_day)
        except asyncpg.CheckViolationError as error:
            if error.constraint_name:
                raise
            missing.add(day)
    return n_rows, frozenset(missing)


async def _copy_or_merge(connection: AsyncConnection, rows: list[Row]) -> int:
    """COPY inside a savepoint; where rows exist already, merge them through a staging table instead."""
    driver: asyncpg.Connection = (await connection.get_raw_connection()).driver_connection
    try:
        async with connection.begin_nested():
            await driver.copy_records_to_table("comparison", records=rows, columns=COLUMNS)
    except asyncpg.UniqueViolationError:
        async with connection.begin_nested():
            await driver.execute(_CREATE_STAGING)
            await driver.copy_records_to_table(_STAGING, records=rows, columns=COLUMNS)
            status = await driver.execute(_MERGE)
        return int(status.rpartition(" ")[2])
    return len(rows)


def day_of(at: datetime) -> date:
    """Return the UTC day of `at`, which names its partition."""
    return at.astimezone(UTC).date()
