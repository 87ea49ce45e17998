"""The insertion of `comparison` rows by COPY: at line rate, and safe to repeat."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, date, datetime
from operator import attrgetter
from typing import Any, Final

import asyncpg
import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.records import Exchange, Latency, Way
from quantdrift.storage.comparisons.rows import ComparedExchange, VersionKey

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
Columns = dict[str, Sequence[Any]]
"""The values of each of `COLUMNS`, in this order."""
InsertRows = Callable[[AsyncConnection, list[Row]], Awaitable[tuple[int, frozenset[date]]]]
_JSON: Final = msgspec.json.Encoder()
_OF_EXCHANGE: Final = attrgetter(
    "captured_at", "id", "source", "group", "attributes", "trace", "sampling", "way", "caller", "latency"
)
_OF_SAMPLING: Final = attrgetter("header_stratum", "body_stratum", "pi1", "pi2", "u1", "u2", "policy.epoch")
_OF_ITEM: Final = attrgetter(
    *("flip", "topk", "js", "divergence", "margin", "candidate_margin", "reference_margin", "detail"),
    *("features", "tie", "slices"),
)


def comparison_columns(
    compared: Sequence[ComparedExchange],
    batch_id: int,
    versions: Mapping[VersionKey, int],
    policies: Mapping[str, int],
    slice_ids: Mapping[int, list[int]],
) -> Columns:
    """Return the columns of comparisons, one for each item of the exchanges; `attributes` and `features` are not JSON yet.

    Parameters
    ----------
    compared
        Exchanges, in their order.
    batch_id, versions, policies
        Ids of the rows that the comparisons refer to.
    slice_ids
        Ids of the slices of an item, in rising order, by the `id` of `item.slices`.
    """
    by_version = {
        id(one.version): versions[one.version] for one in {id(c.version): c for c in compared}.values()
    }
    items = [entry for one in compared for entry in one.items]
    if not items:
        return dict.fromkeys(COLUMNS, ())
    exchanges: list[Exchange] = []
    of, item, n_items = list[int](), list[int](), list[int]()
    for one in compared:
        n = len(one.items)
        if n == 1:
            exchanges.append(one.exchange)
            of.append(by_version[id(one.version)])
            item.append(0)
            n_items.append(1)
        else:
            exchanges += [one.exchange] * n
            of += [by_version[id(one.version)]] * n
            item += range(n)
            n_items += [n] * n
    times, ids, sources, groups, attributes, traces, samplings, ways, callers, latencies = zip(
        *map(_OF_EXCHANGE, exchanges), strict=True
    )
    header, body, pi1, pi2, u1, u2, epochs = zip(*map(_OF_SAMPLING, samplings), strict=True)
    flip, topk, js, divergence, margin, candidate, reference, detail, features, tie, slices = zip(
        *map(_OF_ITEM, items), strict=True
    )
    return {
        "captured_at": times,
        "exchange_id": ids,
        "item": item,
        "batch_id": [batch_id] * len(items),
        "model_version_id": of,
        "policy_id": [policies[epoch] for epoch in epochs],
        "slice_ids": [slice_ids[id(of_item)] for of_item in slices],
        "n_items": n_items,
        "source": sources,
        "header_stratum": header,
        "body_stratum": body,
        "pi1": pi1,
        "pi2": pi2,
        "u1": u1,
        "u2": u2,
        "group_key": groups,
        "flip": flip,
        "topk": topk,
        "js": js,
        "divergence": divergence,
        "margin": margin,
        "candidate_margin": candidate,
        "reference_margin": reference,
        "detail": detail,
        "attributes": attributes,
        "features": features,
        "trace": traces,
        "tie": tie,
        "origin": [
            None if way is Way.RELAY else f"{way.value} {caller}".rstrip()
            for way, caller in zip(ways, callers, strict=True)
        ],
        **dict(
            zip(
                ("latency_s", "first_token_s", "per_token_s"),
                zip(*map(_times, latencies), strict=True),
                strict=True,
            )
        ),
    }


def _times(took: Latency | None) -> tuple[float | None, float | None, float | None]:
    return (None, None, None) if took is None else (took.last_byte_s, took.first_token_s, took.per_token_s)


def json_lines(values: Sequence[Any]) -> str:
    """Return the JSON text of each value, one after another, each followed by a line break, which JSON never contains."""
    return _JSON.encode_lines(values).decode()


def _as_json(columns: Columns) -> Columns:
    return {name: json_lines(columns[name]).split("\n")[:-1] for name in ("attributes", "features")}


def rows_of(columns: Columns) -> list[Row]:
    """Return comparisons row by row, as they are copied."""
    values = columns | _as_json(columns)
    return list(zip(*(values[name] for name in COLUMNS), strict=True))


def columns_of(rows: Sequence[Row]) -> Columns:
    """Return the columns of rows as they are copied, the reverse of `rows_of`."""
    columns: Columns = dict(zip(COLUMNS, zip(*rows, strict=True), strict=True))
    as_values = {name: list(map(msgspec.json.decode, columns[name])) for name in ("attributes", "features")}
    return columns | as_values


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


def column_values(columns: Columns) -> list[Sequence[Any]]:
    """Return the values of columns as `rows_insertion` takes them; the id of their batch is not read."""
    slices = [f"{{{','.join(map(str, ids))}}}" for ids in columns["slice_ids"]]
    values = columns | _as_json(columns) | {"slice_ids": slices}
    return [values[name] for name in _SENT]


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
