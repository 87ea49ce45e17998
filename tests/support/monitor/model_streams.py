"""A fleet of three models in one database: stored comparisons with known truth, in one order of batches, with tallies between them."""

from datetime import timedelta
from typing import Final

import asyncpg
import msgspec

from quantdrift.core.config.schema import Config, Model, Monitor
from quantdrift.storage.fold_rows import BatchRows, from_us
from tests.support.monitor.fold_stream import (
    BEGIN,
    BEGIN_US,
    CATALOG,
    POLICY,
    SECOND_US,
    batches,
    store_batch,
)
from tests.support.storage.comparisons import make_partitions

MODELS: Final = ("digits", "letters", "words")
CONFIG: Final = Config(
    models=tuple(Model(name=name) for name in MODELS),
    monitor=Monitor(min_groups=50, reorder_s=0.5, shards=3),
)
_SLICES: Final = len(CATALOG.slices)


def streams(n: int) -> list[BatchRows]:
    """Return the batches of the fleet in the order in which they were stored; each model has `n`, tallies among them.

    `letters` begins when a third of `digits` is over; a tally in four is of all models.
    """
    found: list[tuple[int, int, BatchRows]] = []
    for place, model in enumerate(MODELS):
        delay_us = (place == 1) * n * SECOND_US
        for number, rows in enumerate(batches(n, seed=7 + place, tally_every=4 if place == 0 else n + 1)):
            found.append((rows.stored_us + delay_us, place, _of(rows, place, model, delay_us, number)))
    found.sort(key=lambda each: each[:2])
    return [rows for _, _, rows in found]


def _of(rows: BatchRows, place: int, model: str, delay_us: int, number: int) -> BatchRows:
    return msgspec.structs.replace(
        rows,
        model="" if rows.tallies else model,
        stored_us=rows.stored_us + delay_us,
        comparisons=tuple(
            msgspec.structs.replace(
                row,
                model_version_id=place + 1,
                slice_ids=tuple(slice_id + place * _SLICES for slice_id in row.slice_ids),
                captured_us=row.captured_us + delay_us,
                exchange_id=f"{place:x}{number:07x}{row.exchange_id[8:]}",
            )
            for row in rows.comparisons
        ),
    )


async def fill(dsn: str) -> None:
    """Fill an empty database with the fleet."""
    await fill_catalog(dsn)
    connection = await asyncpg.connect(dsn)
    try:
        for rows in streams(120):
            await store_batch(connection, rows)
    finally:
        await connection.close()


async def fill_catalog(dsn: str) -> None:
    """Fill an empty database with what the batches of the fleet refer to, and a decision of a person."""
    connection = await asyncpg.connect(dsn)
    try:
        for place, model in enumerate(MODELS):
            await connection.execute(
                "insert into model_version (id, model, candidate_version, reference_digest, first_seen_at)"
                " overriding system value values ($1, $2, '1', $3, $4)",
                place + 1,
                model,
                "d" * 64,
                from_us(BEGIN_US),
            )
            for row in CATALOG.slices.values():
                await connection.execute(
                    "insert into slice (id, model, predicate, name, definition) overriding system value"
                    " values ($1, $2, $3, $4, $5)",
                    row.id + place * _SLICES,
                    model,
                    row.predicate,
                    row.name,
                    msgspec.json.encode({"where": row.where}).decode(),
                )
        await connection.execute(
            "insert into policy (id, epoch, definition) overriding system value values (1, 'e1', $1)",
            msgspec.json.encode(POLICY).decode(),
        )
        # A decision about another model than that of the first batch.
        await connection.execute(
            "insert into baseline (model_version_id, slice_id, metric, kind, source, made_by, reason, n_groups, content)"
            " values (3, $1, 'flip', 'budget', 'imported', 'ada', 'evaluated', 1000, '{\"budget\": 0.02}')",
            2 * _SLICES + 2,
        )
        await make_partitions(connection, [(BEGIN + timedelta(days=day)).date() for day in range(2)])
    finally:
        await connection.close()
