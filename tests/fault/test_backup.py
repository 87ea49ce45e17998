"""A backup of the database that Postgres' own tools made, and a monitor that goes on from what they restored."""

import subprocess
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from quantdrift.storage.server.postgres import find_binaries
from tests.support.monitor.fold_stream import batches, store_batch, store_catalog
from tests.support.monitor.monitor_processes import (
    connected,
    folded,
    record_of,
    running_monitor,
    stop_monitor,
    until,
)

pytestmark = pytest.mark.fault

BEFORE, AFTER = 30, 20


def _tool(name: str, *arguments: str) -> None:
    """Run one of Postgres' programs, of the server's own version."""
    command = [str(find_binaries().directory / name), *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


async def _until_folded(connection: asyncpg.Connection, n: int) -> None:
    async def all_folded() -> bool:
        return await folded(connection) == n

    await until(all_folded, f"{n} batches are folded")


@pytest.mark.release
async def test_a_monitor_goes_on_from_a_restored_backup_as_if_nothing_had_happened(
    postgres_dsn: str, tmp_path: Path
) -> None:
    """The dump is made while the monitor folds. Restored, no batch is folded twice, left out or paged on twice.

    After the same batches, the database that was restored and the one that was dumped are equal: each detector, verdict,
    alert, event and hourly sum.
    """
    stream = batches(BEFORE + AFTER)
    restored_dsn = urlunsplit(urlsplit(postgres_dsn)._replace(path=urlsplit(postgres_dsn).path + "_restored"))
    dump = tmp_path / "quantdrift.dump"
    async with connected(postgres_dsn) as original:
        await store_catalog(original)
        for rows in stream[:BEFORE]:
            await store_batch(original, rows)
        async with running_monitor(postgres_dsn, tmp_path) as process:
            await until(lambda: _begun(original), "the first batches are folded")
            _tool("pg_dump", "--format=custom", f"--file={dump}", postgres_dsn)
            for rows in stream[BEFORE:]:
                await store_batch(original, rows)
            await _until_folded(original, len(stream))
            assert await stop_monitor(process) == 0
        expected = await record_of(original)

        name = urlsplit(restored_dsn).path.removeprefix("/")
        await original.execute(f'create database "{name}" template template0')
        try:
            restore = ["--exit-on-error", "--single-transaction", "--no-owner"]
            _tool("pg_restore", *restore, f"--dbname={restored_dsn}", str(dump))
            async with connected(restored_dsn) as restored:
                in_dump = await folded(restored)
                assert 0 < in_dump <= BEFORE
                for rows in stream[BEFORE:]:
                    await store_batch(restored, rows)
                async with running_monitor(restored_dsn, tmp_path) as process:
                    await _until_folded(restored, len(stream))
                    assert await stop_monitor(process) == 0
                assert await record_of(restored) == expected
                assert [alert[2] for alert in expected["alert"]] == ["firing"]
        finally:
            await original.execute(f'drop database "{name}" with (force)')


async def _begun(connection: asyncpg.Connection) -> bool:
    return await folded(connection) > 0
