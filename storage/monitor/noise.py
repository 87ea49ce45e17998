"""Noise: the items that the shadow computed twice, and the noise floors and changes that the fold writes."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from sqlalchemy import text
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.records import Side
from quantdrift.storage.monitor.rows import FloorRow, NoiseChangeRow, NoiseRow, from_us, to_us
from quantdrift.storage.schema import tables

_NOISE: Final = text("""
    select batch_id, exchange_id::text, side, captured_at, model_version_id, policy_id, pi1, pi2, flip, divergence
    from noise where batch_id = any(cast(:batches as bigint[]))
    order by batch_id, noise.exchange_id, side, item
""")
_FLOORS: Final = text("select * from noise_floor order by model_version_id, side, metric")
_OF_VERSION: Final = text("""
    select * from noise_floor where model_version_id = :version order by side, metric
""")


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
            )
        )
    return {batch_id: tuple(rows) for batch_id, rows in noise_rows.items()}


async def floors(connection: AsyncConnection, version_id: int | None = None) -> tuple[FloorRow, ...]:
    """Return the noise floors of every version, or of one."""
    wanted = _FLOORS if version_id is None else _OF_VERSION
    rows = await connection.execute(wanted, {} if version_id is None else {"version": version_id})
    return tuple(
        FloorRow(
            **{name: row[name] for name in _PLAIN},
            side=Side(row["side"]),
            updated_us=to_us(row["updated_at"]),
        )
        for row in rows.mappings()
    )


def floor_values(row: FloorRow) -> dict[str, Any]:
    """Return the columns of a row of `noise_floor`."""
    plain = {name: getattr(row, name) for name in _PLAIN}
    return {**plain, "side": row.side.value, "updated_at": from_us(row.updated_us)}


async def write_noise_change(connection: AsyncConnection, row: NoiseChangeRow) -> None:
    """Store a change of noise and put its event into the outbox."""
    changed = await connection.scalar(
        upsert(tables.NoiseChange)
        .values(
            model_version_id=row.model_version_id,
            side=row.side.value,
            metric=row.metric,
            exceeds=row.exceeds,
            at=from_us(row.at_us),
            fold_seq=row.fold_seq,
            details=msgspec.to_builtins(row.event),
        )
        .returning(tables.NoiseChange.id)
    )
    await connection.execute(upsert(tables.Outbox).values(noise_change_id=changed))


_PLAIN: Final = tuple(
    field.name for field in msgspec.structs.fields(FloorRow) if field.name not in {"side", "updated_us"}
)
