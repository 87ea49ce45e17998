"""A record with evidence, and a monitor's part in the policy's way, here or as a process of its own."""

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path

import asyncpg
import msgspec

from quantdrift.core.clock import ManualClock
from quantdrift.core.config.schema import Config, Stream
from quantdrift.core.process.run import Stop, run
from quantdrift.core.telemetry import Telemetry
from quantdrift.monitor.fold.fold import Fold
from quantdrift.monitor.sampling.publish import PolicyMaker
from quantdrift.storage.database import Database
from quantdrift.storage.fold.read import claim, load_catalog, resume
from quantdrift.storage.fold.write import write
from quantdrift.storage.fold_rows import BatchRows
from quantdrift.storage.leader import Leadership
from tests.support.monitor.fold_stream import BEGIN, FAINT_ID, batches, store_batch, store_catalog
from tests.support.sidecar.policy_messages import CONFIG as POLICY_CONFIG

N_CALM = 120
BUDGET_PER_S = 0.5
CONFIG = msgspec.structs.replace(
    POLICY_CONFIG, sampling=msgspec.structs.replace(POLICY_CONFIG.sampling, replays_per_s=BUDGET_PER_S)
)


def on(stream: Stream) -> Config:
    """Return the configuration on this stream."""
    return msgspec.structs.replace(CONFIG, stream=stream)


def after(n_batches: int) -> datetime:
    """Return the time of the stream's end after so many batches."""
    return BEGIN + timedelta(seconds=(n_batches - n_batches // 10) * 16 / 5)  # tallies take no time


def calm() -> list[BatchRows]:
    """Return a stream in which nothing drifts."""
    return batches(N_CALM, faint_flips=0.001)


def onward(n: int, *, faint_flips: float) -> list[BatchRows]:
    """Return its continuation by `n` batches; one slice may flip oftener."""
    return batches(N_CALM + n, seed=2, faint_flips=faint_flips)[N_CALM:]


async def prepare(dsn: str) -> None:
    """Store versions, slices and the policy."""
    async with _connected(dsn) as connection:
        await store_catalog(connection)


async def store_and_fold(dsn: str, stream: Sequence[BatchRows]) -> None:
    """Store what was compared and counted, and fold it as the monitor does."""
    async with _connected(dsn) as connection:
        for rows in stream:
            await store_batch(connection, rows)
        await connection.execute(
            "update comparison set header_stratum = 'x-scanner=' ||"
            f" case when {FAINT_ID} = any(slice_ids) then 'faint' else 'clear' end"
        )
        # As the weights have it: of 31 requests three are faint.
        await connection.execute(
            "update tally set stratum = $1, offered = 9 * sequence where stratum in ('faint', $1)",
            "x-scanner=faint",
        )
        await connection.execute(
            "update tally set stratum = $1, offered = 84 * sequence where stratum in ('default', $1)",
            "x-scanner=clear",
        )
    async with Database(dsn) as database, database.begin() as transaction:
        fold = Fold(CONFIG, await resume(transaction))
        found = await claim(transaction, fold.position.fold_seq, 10_000)
        fold.learn(await load_catalog(transaction))
        for rows in found:
            fold.batch(rows)
        await write(transaction, fold.take(), "")


@contextlib.asynccontextmanager
async def maker(
    dsn: str, config: Config, clock: ManualClock, *, leads: bool = True, stop: Stop | None = None
) -> AsyncIterator[PolicyMaker]:
    """Return a monitor's policy maker."""
    telemetry = Telemetry("test")
    async with Database(dsn) as database:
        made = PolicyMaker(
            config=config,
            database=database,
            telemetry=telemetry,
            clock=clock,
            stop=stop or Stop(),
            leads=lambda: leads,
        )
        try:
            yield made
        finally:
            await made.close()
            telemetry.close()


@contextlib.asynccontextmanager
async def maker_process(dsn: str, stream: Stream, now: datetime) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run one in a process of its own, which does not outlive the block."""
    command = ["-m", "tests.support.monitor.policy_record", stream.url, stream.name, now.isoformat()]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, cwd=Path(__file__).parents[3], env={**os.environ, "QUANTDRIFT_DSN": dsn}
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@contextlib.asynccontextmanager
async def _connected(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(dsn)
    try:
        yield connection
    finally:
        await connection.close()


async def _serve(stream: Stream, now: datetime, stop: Stop) -> int:
    dsn, config = os.environ["QUANTDRIFT_DSN"], on(stream)
    telemetry = Telemetry("test")
    async with Database(dsn) as database, Leadership(dsn) as leadership:
        while not await leadership.acquire():
            await stop.wait(0.05)
        made = PolicyMaker(
            config=config,
            database=database,
            telemetry=telemetry,
            clock=ManualClock(now),
            stop=stop,
            leads=lambda: True,
            look_s=0.05,
        )
        while not stop.is_set():
            await made.turn()
        await made.close()
    telemetry.close()
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("url", "name", "now"):
        parser.add_argument(name)
    given = parser.parse_args()
    at = datetime.fromisoformat(given.now)
    raise SystemExit(run(lambda stop: _serve(Stream(url=given.url, name=given.name), at, stop), grace_s=10.0))
