"""A monitor that is killed, and a record that goes away."""

import asyncio
import random
import signal
from pathlib import Path

import asyncpg
import pytest

from quantdrift.storage.server.postgres import PostgresServer
from tests.support.monitor.fold_stream import batches, store_batch, store_catalog
from tests.support.monitor.monitor_processes import (
    connected,
    folded,
    record_of,
    running_monitor,
    stop_monitor,
    until,
)

pytestmark = [pytest.mark.fault, pytest.mark.timeout(400)]


async def _wait_for(connection: asyncpg.Connection, number: int, *, exactly: bool = True) -> None:
    async def there() -> bool:
        found = await folded(connection)
        return found == number or (not exactly and found > number)

    await until(there, f"fold {number} is stored")


@pytest.mark.parametrize(("n", "kills"), [pytest.param(300, 4, marks=pytest.mark.release), (200, 2)])
async def test_killed_between_and_in_folds_it_ends_where_it_would_have(
    postgres_server: PostgresServer, tmp_path: Path, n: int, kills: int
) -> None:
    """Killed -9 again and again over the same batches, it leaves the same states, verdicts, alerts and roll-ups."""
    base, _, template = postgres_server.dsn.rpartition("/")
    rng = random.Random(1)
    async with connected(f"{base}/postgres") as admin:
        await admin.execute(f"create database calm template {template}")
        async with connected(f"{base}/calm") as record:
            await store_catalog(record)
            for rows in batches(n):
                await store_batch(record, rows)
        await admin.execute("create database killed template calm")

    async with connected(f"{base}/calm") as record:
        async with running_monitor(f"{base}/calm", tmp_path) as process:
            await _wait_for(record, n)
            assert await stop_monitor(process) == 0
        expected = await record_of(record)

    async with connected(f"{base}/killed") as record:
        for kill in range(kills):
            async with running_monitor(f"{base}/killed", tmp_path) as process:
                # One fold of this start is in the record; the next is under way or about to begin.
                await _wait_for(record, 64 * kill + 1, exactly=False)
                await asyncio.sleep(
                    rng.uniform(0.0, 0.1)
                )  # the moment of the fault, not a wait for something
                process.kill()
                assert await process.wait() == -9
        async with running_monitor(f"{base}/killed", tmp_path) as process:
            await _wait_for(record, n)
            assert await stop_monitor(process) == 0
        found = await record_of(record)

    for name, derived in expected.items():
        assert found[name] == derived, name
    assert any(row[3] == "firing" for row in found["transition"])


async def test_postgres_away_is_waited_for(postgres_server: PostgresServer, tmp_path: Path) -> None:
    """The monitor does not end when its record is killed, and goes on when it is back."""
    port = int(postgres_server.dsn.rpartition("/")[0].rpartition(":")[2])
    stream = batches(40)
    async with running_monitor(postgres_server.dsn, tmp_path) as process:
        async with connected(postgres_server.dsn) as record:
            await store_catalog(record)
            for rows in stream[:20]:
                await store_batch(record, rows)
            await _wait_for(record, 20)
        postgres_server.kill()
        postgres_server.start(port)
        async with connected(postgres_server.dsn) as record:
            for rows in stream[20:]:
                await store_batch(record, rows)
            await _wait_for(record, 40)
        assert await stop_monitor(process) == 0


@pytest.mark.release
async def test_stopped_in_a_fold_it_loses_the_lead_and_writes_nothing_when_it_wakes(
    postgres_server: PostgresServer, tmp_path: Path
) -> None:
    """The standby leads within 30 s; the former leader then stands by, and everything derived is as if nothing had been."""
    base, _, template = postgres_server.dsn.rpartition("/")
    stream = batches(200)
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    async with connected(f"{base}/postgres") as admin:
        for name in ("calm", "stopped"):
            await admin.execute(f"create database {name} template {template}")
    async with connected(f"{base}/calm") as record:
        await store_catalog(record)
        for rows in stream:
            await store_batch(record, rows)
        async with running_monitor(f"{base}/calm", tmp_path) as process:
            await _wait_for(record, 200)
            assert await stop_monitor(process) == 0
        expected = await record_of(record)

    dsn = f"{base}/stopped"
    async with connected(dsn) as record, connected(dsn) as blocker:
        await store_catalog(record)
        for rows in stream[:100]:
            await store_batch(record, rows)
        async with running_monitor(dsn, tmp_path / "one") as former:
            await _wait_for(record, 100)
            async with running_monitor(dsn, tmp_path / "two") as standby:
                await until(lambda: _sessions(record, 2), "the second monitor stands by")
                transaction = blocker.transaction()
                await transaction.start()
                # The leader's write waits, so that it is stopped with a transaction open and locks held.
                await blocker.execute("lock table rollup_hour in share mode")
                for rows in stream[100:]:
                    await store_batch(record, rows)
                await until(lambda: _waits(record), "the leader is in the middle of a fold")
                former.send_signal(signal.SIGSTOP)
                await transaction.rollback()
                stopped_at = await record.fetchval("select now()")
                await _wait_for(record, 200)
                since = await record.fetchval("select since from leader")
                assert (since - stopped_at).total_seconds() < 30
                former.send_signal(signal.SIGCONT)
                await until(lambda: _sessions(record, 2), "the former leader stands by")
                assert await record.fetchval("select since from leader") == since
                assert await stop_monitor(former) == 0
                assert await stop_monitor(standby) == 0
        found = await record_of(record)
        assert await record.fetchval("select count(*) from outbox where sent_at is null") == 0
    for name, derived in expected.items():
        assert found[name] == derived, name


async def _sessions(record: asyncpg.Connection, number: int) -> bool:
    count = "select count(*) from pg_stat_activity where application_name = 'quantdrift leader'"
    return bool(await record.fetchval(f"{count} and datname = current_database()") == number)


async def _waits(record: asyncpg.Connection) -> bool:
    return bool(
        await record.fetchval(
            "select exists (select from pg_locks where not granted and mode = 'RowExclusiveLock')"
        )
    )
