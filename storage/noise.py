"""Noise: the items that the shadow computed twice, and the noise floors and changes that the fold writes.

The floors of versions are in `noise_floor`, those of their slices in `noise_slice`; tests of whether noise explains what is measured
in `noise_test`.
"""

from collections.abc import Sequence
from typing import Final

import msgspec
from sqlalchemy import RowMapping, text
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.records import Side
from quantdrift.storage.fold_rows import FloorRow, NoiseChangeRow, NoiseRow, PairRow, from_us, to_us
from quantdrift.storage.schema import tables

# Lateral and limited: read by its key, whatever the planner believes of the number of rows.
_NOISE: Final = text("""
    select n.batch_id, n.exchange_id::text, n.side, n.captured_at, n.model_version_id, n.policy_id, n.pi1, n.pi2, n.flip,
        n.divergence, n.slice_ids, c.flip as candidate_flip, c.divergence as candidate_divergence
    from noise n left join lateral (
        select flip, divergence from comparisons(n.captured_at, n.captured_at + interval '1 microsecond')
        where captured_at = n.captured_at and exchange_id = n.exchange_id and item = n.item
            and model_version_id = n.model_version_id
        limit 1
    ) c on n.side = 'reference'
    where n.batch_id = any(cast(:batches as bigint[]))
    order by n.batch_id, n.exchange_id, n.side, n.item
""")
_FLOORS: Final = text("select * from noise_floor order by model_version_id, side, metric")
_OF_SLICES: Final = text("select * from noise_slice order by model_version_id, slice_id, side, metric")
_OF_VERSION: Final = text("""
    select * from noise_floor where model_version_id = :version order by side, metric
""")
_OF_SLICE: Final = text("""
    select * from noise_slice where model_version_id = :version and slice_id = :slice order by side, metric
""")
_PAIRS: Final = text("select * from noise_test order by model_version_id, slice_id, metric")
_END_PAIRS: Final = text("""
    delete from noise_test where model_version_id = :version and slice_id = :slice and metric = :metric
""")
_FORGET: Final = text("delete from noise_slice where model_version_id = :version and slice_id = :slice")


async def noise_of(connection: AsyncConnection, batches: Sequence[int]) -> dict[int, tuple[NoiseRow, ...]]:
    """Return the noise items of batches, by batch; those of one exchange and side are next to each other."""
    noise_rows: dict[int, list[NoiseRow]] = {}
    for row in (await connection.execute(_NOISE, {"batches": list(batches)})).mappings():
        noise_rows.setdefault(row["batch_id"], []).append(
            NoiseRow(
                exchange_id=row["exchange_id"],
                side=Side(row["side"]),
                captured_us=to_us(row["captured_at"]),
                model_version_id=row["model_version_id"],
                policy_id=row["policy_id"],
                pi=row["pi1"] * row["pi2"],
                flip=None if row["flip"] is None else float(row["flip"]),
                divergence=row["divergence"],
                slice_ids=None if row["slice_ids"] is None else tuple(row["slice_ids"]),
                candidate_flip=None if row["candidate_flip"] is None else float(row["candidate_flip"]),
                candidate_divergence=row["candidate_divergence"],
            )
        )
    return {batch_id: tuple(rows) for batch_id, rows in noise_rows.items()}


async def floors(connection: AsyncConnection) -> tuple[FloorRow, ...]:
    """Return the noise floors of every version, and those of every slice."""
    versions = (await connection.execute(_FLOORS)).mappings().all()
    slices = (await connection.execute(_OF_SLICES)).mappings().all()
    return tuple(map(_floor, (*versions, *slices)))


async def floors_of(
    connection: AsyncConnection, version_id: int, slice_id: int
) -> tuple[tuple[FloorRow, ...], tuple[FloorRow, ...]]:
    """Return the noise floors of a version, and those of one slice of it; the slice of all traffic has those of the version."""
    wanted = {"version": version_id, "slice": slice_id}
    versions = (await connection.execute(_OF_VERSION, wanted)).mappings().all()
    slices = (await connection.execute(_OF_SLICE, wanted)).mappings().all()
    return tuple(map(_floor, versions)), tuple(map(_floor, slices))


async def write_floors(
    connection: AsyncConnection, rows: Sequence[FloorRow], forgotten: Sequence[tuple[int, int]]
) -> None:
    """Delete the floors of versions and slices that are `forgotten`, then insert or replace `rows`."""
    for version_id, slice_id in forgotten:
        await connection.execute(_FORGET, {"version": version_id, "slice": slice_id})
    for table, names in (
        (tables.NoiseFloorTable, _PLAIN),
        (tables.NoiseSliceTable, (*_PLAIN, *_OF_SLICE_ALONE)),
    ):
        values = [
            {name: getattr(row, name) for name in names}
            | {"side": row.side.value, "updated_at": from_us(row.updated_us)}
            for row in rows
            if bool(row.slice_id) is (table is tables.NoiseSliceTable)
        ]
        if not values:
            continue
        statement = upsert(table)
        keys = [column.name for column in table.__table__.primary_key]
        changed = {name: statement.excluded[name] for name in values[0] if name not in keys}
        await connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=changed), values)


async def pairs(connection: AsyncConnection) -> tuple[PairRow, ...]:
    """Return the tests of whether noise explains what is measured, by version, slice and metric."""
    rows = (await connection.execute(_PAIRS)).mappings()
    return tuple(
        PairRow(
            **{name: row[name] for name in _PAIR_PLAIN},
            since_us=to_us(row["since"]),
            wealth=tuple(row["wealth"]),
            enough_us=0 if row["enough_at"] is None else to_us(row["enough_at"]),
            paired_us=0 if row["paired_at"] is None else to_us(row["paired_at"]),
        )
        for row in rows
    )


async def write_pairs(
    connection: AsyncConnection, rows: Sequence[PairRow], ended: Sequence[tuple[int, int, str]]
) -> None:
    """Delete the tests that have `ended`, then insert or replace `rows`."""
    for version_id, slice_id, metric in ended:
        await connection.execute(_END_PAIRS, {"version": version_id, "slice": slice_id, "metric": metric})
    if not rows:
        return
    values = [
        {name: getattr(row, name) for name in _PAIR_PLAIN}
        | {
            "since": from_us(row.since_us),
            "wealth": list(row.wealth),
            "enough_at": from_us(row.enough_us) if row.enough_us else None,
            "paired_at": from_us(row.paired_us) if row.paired_us else None,
        }
        for row in rows
    ]
    statement = upsert(tables.NoiseTestTable)
    keys = [column.name for column in tables.NoiseTestTable.__table__.primary_key]
    changed = {name: statement.excluded[name] for name in values[0] if name not in keys}
    await connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=changed), values)


async def write_noise_change(connection: AsyncConnection, row: NoiseChangeRow) -> None:
    """Store a change of noise and put its event into the outbox."""
    changed = await connection.scalar(
        upsert(tables.NoiseChangeTable)
        .values(
            model_version_id=row.model_version_id,
            slice_id=row.slice_id or None,
            side=row.side.value,
            metric=row.metric,
            exceeds=row.exceeds,
            at=from_us(row.at_us),
            fold_seq=row.fold_seq,
            details=msgspec.to_builtins(row.event),
        )
        .returning(tables.NoiseChangeTable.id)
    )
    await connection.execute(upsert(tables.OutboxTable).values(noise_change_id=changed))


def _floor(row: RowMapping) -> FloorRow:
    return FloorRow(
        **{name: row[name] for name in (*_PLAIN, *_OF_SLICE_ALONE) if name in row},
        side=Side(row["side"]),
        updated_us=to_us(row["updated_at"]),
    )


_OF_SLICE_ALONE: Final = ("slice_id", "own", "announced")
_PLAIN: Final = tuple(
    field.name
    for field in msgspec.structs.fields(FloorRow)
    if field.name not in {"side", "updated_us", *_OF_SLICE_ALONE}
)
_PAIR_PLAIN: Final = tuple(
    field.name
    for field in msgspec.structs.fields(PairRow)
    if field.name not in {"since_us", "wealth", "enough_us", "paired_us"}
)
