"""Monitors as processes of their own, and what the record says after them."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg

DEADLINE_S = 120.0
CONFIG = """
[monitor]
min_groups = 50
admin = "127.0.0.1:0"
[storage]
retention_days = 3650
[telemetry]
otlp_endpoint = "{endpoint}"
trace_url = "https://traces.example/{{trace_id}}"
[[models]]
name = "digits"
"""


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    """Open a connection to the record that does not outlive the block."""
    connection = await asyncpg.connect(dsn)
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def running_monitor(
    dsn: str, directory: Path, endpoint: str = "", notify: str = ""
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start `quantdrift monitor` in a process of its own, which does not outlive the block."""
    config = directory / "config.toml"
    config.write_text(CONFIG.format(endpoint=endpoint) + notify)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "quantdrift",
        "monitor",
        "-c",
        str(config),
        env={**os.environ, "QUANTDRIFT_DSN": dsn, "OTEL_METRIC_EXPORT_INTERVAL": "500"},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def stop_monitor(process: asyncio.subprocess.Process) -> int:
    """Ask it to end, once it listens to that, and return its exit code."""

    async def listens() -> bool:
        status = await asyncio.to_thread(Path(f"/proc/{process.pid}/status").read_text)
        caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
        return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)

    await until(listens, "the monitor handles SIGTERM")
    process.terminate()
    async with asyncio.timeout(DEADLINE_S):
        return await process.wait()


async def until(holds: Callable[[], Awaitable[bool]], what: str, timeout_s: float = DEADLINE_S) -> None:
    """Wait until `holds`, polling; fail with `what` when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not await holds():
        assert time.monotonic() < deadline, f"timed out: {what}"
        await asyncio.sleep(0.02)


async def folded(connection: asyncpg.Connection) -> int:
    """Return how far the fold has come."""
    return int(await connection.fetchval("select coalesce(max(fold_seq), 0) from fold"))


async def record_of(connection: asyncpg.Connection) -> dict[str, list[tuple[Any, ...]]]:
    """Return everything that the monitor derived, without surrogate keys and wall-clock times."""
    queries = {
        "fold": "select fold_seq, event_time, mass, n_detectors from fold",
        "detector": "select * from detector order by 1, 2, 3, 4",
        "verdict": "select model_version_id, slice_id, verdict, reason, since, n_groups, evidence, estimate, last_at"
        " from verdict order by 1, 2",
        "transition": "select model_version_id, slice_id, from_verdict, to_verdict, at, details from transition"
        " order by fold_seq, id",
        "alert": "select model_version_id, slice_id, severity, metric, onset_at, opened_at, resolved_at"
        " from alert order by opened_at, slice_id",
        "outbox": "select count(*) from outbox",
        "rollup_hour": "select model_version_id, slice_id, hour, n_items, n_groups, round(weight::numeric, 6),"
        " round(flip::numeric, 6), round(divergence::numeric, 6), n_infinite from rollup_hour order by 1, 2, 3",
        "rollup_day": "select model_version_id, slice_id, day, n_items, n_groups from rollup_day order by 1, 2, 3",
    }
    return {name: [tuple(row) for row in await connection.fetch(query)] for name, query in queries.items()}
