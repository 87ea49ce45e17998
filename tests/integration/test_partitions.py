"""Daily partitions, while other connections read and write."""

import asyncio
from datetime import UTC, date, datetime, timedelta
from uuid import uuid4

import msgspec
import pytest
import sqlalchemy
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.errors import RetryError
from quantdrift.storage.database import Database
from quantdrift.storage.schema import tables
from quantdrift.storage.schema.partitions import (
    AHEAD_DAYS,
    drop_partition,
    ensure_partitions,
    partition_days,
)
from tests.support.storage.comparisons import Comparison

pytestmark = pytest.mark.integration

FIRST, LAST = date(2031, 12, 30), date(2032, 1, 2)
DAYS = [FIRST + timedelta(days=n) for n in range(4)]


async def insert(connection: AsyncConnection, at: datetime) -> None:
    """Store one comparison captured at `at`."""
    row = Comparison(captured_at=at, exchange_id=uuid4(), batch_id=1, model_version_id=1)
    values = {**msgspec.structs.asdict(row), "attributes": {}, "features": {}}
    await connection.execute(sqlalchemy.insert(tables.ComparisonTable).values(values))


async def test_an_upgrade_makes_yesterday_to_the_days_ahead(postgres_dsn: str) -> None:
    """What is captured from now on finds its place, as does what was captured around midnight."""
    async with Database(postgres_dsn) as database, database.begin() as connection:
        days = await partition_days(connection)
    today = datetime.now(UTC).date()
    assert days[0] in {today - timedelta(days=1), today - timedelta(days=2)}
    assert len(days) == AHEAD_DAYS + 2
    assert days == [days[0] + timedelta(days=n) for n in range(len(days))]


async def test_each_day_takes_exactly_its_rows(postgres_dsn: str) -> None:
    """A partition begins at midnight UTC and ends before the next; it has the keys and checks of the whole."""
    async with Database(postgres_dsn) as database:
        async with database.begin() as connection:
            assert await ensure_partitions(connection, FIRST, LAST) == DAYS
            assert await ensure_partitions(connection, FIRST, LAST) == []
            midnight = datetime(2032, 1, 1, tzinfo=UTC)
            await insert(connection, midnight)
            await insert(connection, midnight - timedelta(microseconds=1))
            for day in (date(2031, 12, 31), date(2032, 1, 1)):
                n_rows = await connection.scalar(text(f"select count(*) from comparison_{day:%Y%m%d}"))
                assert n_rows == 1
        with pytest.raises(Exception, match="no partition of relation"):
            async with database.begin() as connection:
                await insert(connection, datetime(2032, 1, 3, tzinfo=UTC))


async def test_several_makers_at_once_make_each_day_once(postgres_dsn: str) -> None:
    """Two monitors and an upgrade do not get into each other's way."""
    async with Database(postgres_dsn) as database:

        async def make() -> list[date]:
            async with database.begin() as connection:
                return await ensure_partitions(connection, FIRST, LAST)

        made = await asyncio.gather(*(make() for _ in range(4)))
    assert sorted(made) == [[], [], [], DAYS]


async def test_making_one_does_not_wait_for_writers_and_readers(postgres_dsn: str) -> None:
    """A partition is made while a writer and a reader are in the middle of a transaction."""
    async with (
        Database(postgres_dsn) as database,
        database.begin() as writer,
        database.begin() as reader,
    ):
        await insert(writer, datetime.now(UTC))
        await reader.execute(text("select count(*) from comparison"))
        async with asyncio.timeout(10), database.begin() as maker:
            assert await ensure_partitions(maker, FIRST, LAST) == DAYS


async def test_dropping_one_gives_way_to_whoever_uses_it(postgres_dsn: str) -> None:
    """While a reader is in the middle of a transaction the drop gives up soon, and succeeds later."""
    async with Database(postgres_dsn) as database:
        async with database.begin() as connection:
            await ensure_partitions(connection, FIRST, LAST)
        async with database.begin() as reader:
            await reader.execute(text("select count(*) from comparison"))
            with pytest.raises(RetryError, match="lock timeout"):
                async with database.begin() as connection:
                    await drop_partition(connection, FIRST, lock_timeout_s=0.05)
        async with database.begin() as connection:
            await drop_partition(connection, FIRST, lock_timeout_s=5)
            assert FIRST not in await partition_days(connection)
