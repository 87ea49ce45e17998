"""The log of changes of discovered slices and of slices of values: the fold applies them, and people read them."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Final

import msgspec
from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.storage.fold_rows import SliceChange
from quantdrift.storage.schema.slice_tables import DiscoveryStatus

# The fold ignores candidates; a retired slice stays retired until it is confirmed again.
_FOLLOW: Final = text("""
    with taken as (
        update discovery_change set fold_seq = :fold_seq where fold_seq is null
        returning id, discovery_id, status, made_by, reason, fold_seq
    )
    select taken.*, d.slice_id from taken join discovery d on d.id = taken.discovery_id
    where taken.status in ('confirmed', 'retired') and d.slice_id is not null order by taken.id
""")
_FOLLOWED: Final = text("""
    select c.*, d.slice_id from discovery_change c join discovery d on d.id = c.discovery_id
    where c.fold_seq between :first and :last and c.status in ('confirmed', 'retired') and d.slice_id is not null
    order by c.id
""")
_FOLLOW_PLACES: Final = text("""
    with taken as (
        update slice_change set fold_seq = :fold_seq where fold_seq is null
        returning id, slice_id, status, made_by, reason, fold_seq
    )
    select * from taken order by id
""")
_FOLLOWED_PLACES: Final = text("""
    select id, slice_id, status, made_by, reason, fold_seq from slice_change
    where fold_seq between :first and :last order by id
""")
_LAPSED: Final = text("""
    select slice_id from (
        select distinct on (slice_id) slice_id, status from slice_change
        where fold_seq <= :last order by slice_id, id desc
    ) newest where status = 'lapsed' order by 1
""")
_RETIRED: Final = text("""
    select slice_id from (
        select distinct on (c.discovery_id) d.slice_id, c.status
        from discovery_change c join discovery d on d.id = c.discovery_id
        where c.fold_seq <= :last and c.status in ('confirmed', 'retired') and d.slice_id is not null
        order by c.discovery_id, c.id desc
    ) newest where status = 'retired' order by 1
""")
_PLACE_HISTORY: Final = text("""
    select status, made_by, made_at, reason from slice_change where slice_id = :slice order by id
""")
_HISTORY: Final = text("""
    select status, made_by, made_at, reason from discovery_change where discovery_id = :discovery order by id
""")


class StatusChange(msgspec.Struct, frozen=True, kw_only=True):
    """A change of status as people read it; columns as in `discovery_change` and `slice_change`."""

    status: str
    made_by: str
    made_at: datetime
    reason: str


async def follow(connection: AsyncConnection, fold_seq: int) -> Mapping[int, tuple[SliceChange, ...]]:
    """Assign the changes that the fold has not applied yet to `fold_seq`; return them under that number."""
    number = {"fold_seq": fold_seq}
    rows = (await connection.execute(_FOLLOW, number)).mappings().all()
    places = (await connection.execute(_FOLLOW_PLACES, number)).mappings().all()
    return _by_fold([*places, *rows])


async def followed(
    connection: AsyncConnection, first: int, last: int
) -> Mapping[int, tuple[SliceChange, ...]]:
    """Return the changes that the fold applied from `first` to `last`, by `fold_seq`."""
    numbers = {"first": first, "last": last}
    rows = (await connection.execute(_FOLLOWED, numbers)).mappings().all()
    places = (await connection.execute(_FOLLOWED_PLACES, numbers)).mappings().all()
    return _by_fold([*places, *rows])


async def retired(connection: AsyncConnection, last: int) -> tuple[int, ...]:
    """Return the slices that the fold does not watch any more after the batch `last`."""
    return tuple((await connection.scalars(_RETIRED, {"last": last})).all())


async def lapsed(connection: AsyncConnection, last: int) -> tuple[int, ...]:
    """Return the slices of values that had lost their place by the batch `last`."""
    return tuple((await connection.scalars(_LAPSED, {"last": last})).all())


async def changes_of(connection: AsyncConnection, discovery_id: int) -> list[StatusChange]:
    """Return all changes of a discovery, in order."""
    rows = await connection.execute(_HISTORY, {"discovery": discovery_id})
    return [StatusChange(**row) for row in rows.mappings()]


async def place_changes_of(connection: AsyncConnection, slice_id: int) -> list[StatusChange]:
    """Return when a slice of a value lost its place and got it back, in order."""
    rows = await connection.execute(_PLACE_HISTORY, {"slice": slice_id})
    return [StatusChange(**row) for row in rows.mappings()]


def _by_fold(rows: Iterable[RowMapping]) -> dict[int, tuple[SliceChange, ...]]:
    changes: dict[int, tuple[SliceChange, ...]] = {}
    for row in rows:
        change = SliceChange(
            slice_id=row["slice_id"],
            watched=row["status"] in {DiscoveryStatus.CONFIRMED, "admitted"},
            lapsed=row["status"] == "lapsed",
            made_by=row["made_by"],
            reason=row["reason"],
        )
        changes[row["fold_seq"]] = (*changes.get(row["fold_seq"], ()), change)
    return changes
