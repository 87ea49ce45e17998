"""A monitor that is killed, and a record that goes away."""

import asyncio
import random
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


async def test_killed_between_and_in_folds_it_ends_where_it_would_have(
    postgres_server: PostgresServer, tmp_path: Path
) -> None:
    """Killed -9 again and again over the same batches, it leaves the same states, verdicts, alerts and roll-ups."""
    base, _, template = postgres_server.dsn.rpartition("/")
    n, rng = 300, random.Random(1)
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
        for kill in range(4):
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
