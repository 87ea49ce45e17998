"""What is kept, for how long, and what is forgotten."""

from datetime import UTC, date, datetime, timedelta

import pytest
from sqlalchemy import text

import storage.retention
from quantdrift.core.config.schema import Storage
from storage.database import Database
from storage.partition import ensure_partitions, partition_days
from storage.retention import Maintenance, maintain

pytestmark = pytest.mark.integration

NOW = datetime(2031, 6, 15, 9, 30, tzinfo=UTC)
KEEP = Storage(retention_days=10, quarantine_days=1, partitions_ahead_days=3)
BOOT, OVER = "0" * 32, "1" * 32
TALLY = text("""
    insert into tally values (:source, :boot, 'default', :sequence, :at, :batch, 9, 9, 0, 9, '{}', 0)
""")
BATCH = text("""
    insert into batch (kind, worker, stored_at, captured_from, captured_to, n_rows)
    values ('tally', 'w', :at, :at, :at, 1) returning id
""")
QUARANTINE = text("""
    insert into quarantine (stream_sequence, digest, model, quarantined_at, reason, detail, payload)
    values (:n, '', 'm', :at, 'decode', '', 'bytes')
""")


def ago(days: float) -> datetime:
    """Return the time so many days before now."""
    return NOW - timedelta(days=days)


@pytest.fixture
async def database(postgres_dsn: str):  # type: ignore[no-untyped-def]
    """Return a database without the partitions that the upgrade made today."""
    async with Database(postgres_dsn, KEEP) as opened:
        async with opened.begin() as connection:
            for day in await partition_days(connection):
                await connection.execute(text(f"drop table comparison_{day:%Y%m%d}"))
        yield opened


async def test_partitions_come_and_go_with_the_days(database: Database) -> None:
    """Yesterday to the days ahead are made; a day goes when all of it is too old."""
    async with database.begin() as connection:
        await ensure_partitions(connection, date(2031, 6, 3), date(2031, 6, 6))
    done = await maintain(database, KEEP, NOW)
    assert done.partitions_made == tuple(date(2031, 6, day) for day in range(14, 19))
    assert done.partitions_dropped == (date(2031, 6, 3), date(2031, 6, 4))
    assert done.partitions_busy == ()
    async with database.begin() as connection:
        days = await partition_days(connection)
    assert [day.day for day in days] == [5, 6, 14, 15, 16, 17, 18]


async def test_a_partition_in_use_is_left_for_the_next_round(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is stopped for the sake of tidiness, and the rest is done all the same."""
    monkeypatch.setattr(storage.retention, "_DROP_TIMEOUT_S", 0.05)
    async with database.begin() as connection:
        await ensure_partitions(connection, date(2031, 6, 1), date(2031, 6, 1))
    async with database.begin() as reader:
        await reader.execute(text("select count(*) from comparison_20310601"))
        busy = await maintain(database, KEEP, NOW)
    assert (busy.partitions_dropped, busy.partitions_busy) == ((), (date(2031, 6, 1),))
    assert (await maintain(database, KEEP, NOW)).partitions_dropped == (date(2031, 6, 1),)


async def test_tallies_keep_what_later_ones_are_measured_against(database: Database) -> None:
    """Old tallies go, but for the last one before the border of a boot that goes on; its batch stays with it."""
    async with database.begin() as connection:
        for boot, days in ((BOOT, (12, 11, 10.5, 9, 0)), (OVER, (12, 11))):
            for sequence, at in enumerate(map(ago, days), start=1):
                batch = await connection.scalar(BATCH, {"at": at})
                await connection.execute(
                    TALLY, {"source": "s", "boot": boot, "sequence": sequence, "at": at, "batch": batch}
                )
    before = await coverage(database)
    done = await maintain(database, KEEP, NOW)
    assert (done.n_tallies, done.n_batches) == (4, 4)
    async with database.begin() as connection:
        kept = (await connection.execute(text("select boot, sequence from tally order by at"))).all()
        assert [row.sequence for row in kept] == [3, 4, 5]
        assert await connection.scalar(text("select count(*) from batch")) == 3
    assert (await coverage(database)) == before


async def coverage(database: Database) -> list[tuple[datetime, int]]:
    """Return what the sidecars saw per hour since the border."""
    query = text("select hour, offered from coverage_hour where hour >= :since order by hour")
    async with database.begin() as connection:
        return [(row.hour, row.offered) for row in await connection.execute(query, {"since": ago(10)})]


async def test_payloads_are_forgotten_before_the_fact(database: Database) -> None:
    """A quarantined exchange loses its payload after a day, and the row itself with everything else."""
    async with database.begin() as connection:
        for n, days in enumerate((0.5, 2, 11)):
            await connection.execute(QUARANTINE, {"n": n, "at": ago(days)})
    done = await maintain(database, KEEP, NOW)
    assert (done.n_payloads, done.n_quarantined) == (2, 1)
    async with database.begin() as connection:
        rows = (await connection.execute(text("select payload from quarantine order by id"))).scalars().all()
    assert rows == [b"bytes", None]


async def test_a_policy_goes_after_what_it_sampled(database: Database) -> None:
    """Hundreds are made on a day: the record keeps those whose comparisons it may still hold."""
    async with database.begin() as connection:
        for days in (5, 11, 13):
            values = {"epoch": f"{days} days", "at": ago(days)}
            await connection.execute(
                text("insert into policy (epoch, definition, first_seen_at) values (:epoch, '{}', :at)"),
                values,
            )
    assert (await maintain(database, KEEP, NOW)).n_policies == 1
    async with database.begin() as connection:
        kept = (await connection.execute(text("select epoch from policy order by id"))).scalars().all()
    assert kept == ["5 days", "11 days"]


async def test_many_rows_go_in_small_transactions(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows than one transaction takes are all deleted, and a second round finds nothing."""
    monkeypatch.setattr(storage.retention, "_CHUNK", 4)
    async with database.begin() as connection:
        for n in range(10):
            await connection.execute(QUARANTINE, {"n": n, "at": ago(30)})
    assert (await maintain(database, KEEP, NOW)).n_quarantined == 10
    assert await maintain(database, KEEP, NOW) == Maintenance(
        partitions_made=(),
        partitions_dropped=(),
        partitions_busy=(),
        n_tallies=0,
        n_batches=0,
        n_quarantined=0,
        n_payloads=0,
        n_policies=0,
    )
