"""Daily partitions of `comparison`: created ahead, emptied when condensed, dropped when old, without blocking readers or writers."""

import re
from datetime import UTC, date, datetime, timedelta
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.storage.locks import lock

_NAME: Final = re.compile(r"comparison_(\d{8})")
_MAKE: Final = text("select partition_make(:day)")
_DROP: Final = text("select partition_drop(:day)")
_EMPTY: Final = text("select partition_empty(:day)")
_PARTITIONS: Final = text("""
    select child.relname
    from pg_inherits
    join pg_class child on child.oid = inhrelid
    where inhparent = 'comparison'::regclass
    order by child.relname
""")


async def partition_days(connection: AsyncConnection) -> list[date]:
    """Return the UTC days that have a partition, in order."""
    names = (await connection.execute(_PARTITIONS)).scalars()
    return [
        datetime.strptime(match[1], "%Y%m%d").replace(tzinfo=UTC).date()
        for name in names
        if (match := _NAME.fullmatch(name))
    ]


AHEAD_DAYS: Final = 14
"""Daily partitions that are made in advance. The monitor makes one each day: it may be away for so long."""


async def ensure_partitions(connection: AsyncConnection, first: date, last: date) -> list[date]:
    """Create the missing partitions of the days `first` to `last`, both included, and return those days.

    Runs in the caller's transaction. Concurrent calls run one after the other, and find what the first one created:
    the lock takes a right that readers do not have. Readers and writers do not wait. A function of the database makes each partition: it
    belongs to a role that nobody logs in as, not to the caller.
    """
    await lock(connection, "partition_lock")
    existing = set(await partition_days(connection))
    days = (first + timedelta(days=n) for n in range((last - first).days + 1))
    missing = [day for day in days if day not in existing]
    for day in missing:
        await connection.execute(_MAKE, {"day": day})
    return missing


async def drop_partition(connection: AsyncConnection, day: date, *, lock_timeout_s: float) -> None:
    """Drop the comparisons of one UTC day, in the caller's transaction.

    Raises
    ------
    RetryError
        Through `Database.begin`: a transaction on `comparison` did not finish in time. While this waits, later
        transactions wait too, so the time should be short.
    """
    await connection.execute(text(f"set local lock_timeout = {int(lock_timeout_s * 1000)}"))
    await lock(connection, "partition_lock")
    await connection.execute(_DROP, {"day": day})


async def empty_partition(connection: AsyncConnection, day: date, *, lock_timeout_s: float) -> bool:
    """Give back the space of a UTC day whose comparisons were all condensed more than an hour ago; return whether there was any.

    Raises
    ------
    RetryError
        As `drop_partition`.
    """
    await connection.execute(text(f"set local lock_timeout = {int(lock_timeout_s * 1000)}"))
    return bool(await connection.scalar(_EMPTY, {"day": day}))
