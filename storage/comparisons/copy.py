"""The insertion of `comparison` rows by COPY: at line rate, and safe to repeat."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, date, datetime
from typing import Any, Final

import asyncpg
import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.records import Way
from quantdrift.storage.comparisons.rows import ComparedExchange

_TYPES: Final = {
    "captured_at": "timestamptz",
    "exchange_id": "uuid",
    "item": "smallint",
    "batch_id": "bigint",
    "model_version_id": "integer",
    "policy_id": "integer",
    "slice_ids": "integer[]",
    "n_items": "smallint",
    "source": "text",
    "header_stratum": "text",
    "body_stratum": "text",
    "pi1": "float8",
    "pi2": "float8",
    "u1": "float8",
    "u2": "float8",
    "group_key": "text",
    "flip": "boolean",
    "topk": "boolean",
    "js": "float8",
    "divergence": "float8",
    "margin": "float8",
    "candidate_margin": "float8",
    "reference_margin": "float8",
    "detail": "jsonb",
    "attributes": "jsonb",
    "features": "jsonb",
    "trace": "text",
    "tie": "boolean",
    "origin": "text",
    "latency_s": "float8",
    "first_token_s": "float8",
    "per_token_s": "float8",
}
COLUMNS: Final = tuple(_TYPES)
_STAGING: Final = "comparison_staging"
_CREATE_STAGING: Final = f"""
    create temp table if not exists {_STAGING} (like comparison including defaults) on commit drop;
    truncate {_STAGING}
"""
_MERGE: Final = f"""
    insert into comparison ({", ".join(COLUMNS)}) select {", ".join(COLUMNS)} from {_STAGING}
    on conflict do nothing
"""  # noqa: S608 - constants

# The values of each column are one parameter. Arrays of arrays have equal lengths in Postgres, so slices are text there.
_SENT: Final = {
    name: ("text", f"::{kind}") if kind.endswith("[]") else (kind, "")
    for name, kind in _TYPES.items()
    if name != "batch_id"
}
N_COLUMNS: Final = len(_SENT)

MOST_ALONE: Final = 128
"""Comparisons up to which one statement for all of a batch costs less than a transaction with COPY."""

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


def rows_insertion(batch: str, first: int, source: str) -> str:
    """Return the statement that inserts rows, of which `column_values` makes the parameters.

    Parameters
    ----------
    batch
        Expression: the id of their batch.
    first
        Number of the first of its `N_COLUMNS` parameters.
    source
        A table with one row, of which `batch` may name columns.
    """
    arrays = ", ".join(f"${number}::{kind}[]" for number, (kind, _) in enumerate(_SENT.values(), first))
    values = ", ".join(f"one.{name}{cast}" for name, (_, cast) in _SENT.items())
    return f"""
        insert into comparison (batch_id, {", ".join(_SENT)}) select {batch}, {values}
        from {source}, unnest({arrays}) as one ({", ".join(_SENT)})
    """  # noqa: S608 - constants


def column_values(rows: Sequence[Row]) -> list[Sequence[Any]]:
    """Return the values of each column of rows, as `rows_insertion` takes them; the id of their batch is not read."""
    values = dict(zip(COLUMNS, zip(*rows, strict=True), strict=True))
    del values["batch_id"]
    values["slice_ids"] = tuple([f"{{{','.join(map(str, ids))}}}" for ids in values["slice_ids"]])
    return list(values.values())


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
