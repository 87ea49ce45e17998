"""A shadow worker that stands still: another one takes over what it had, and nothing is stored twice when it goes on."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

import aiohttp
import asyncpg
import pytest

from quantdrift.core.codec import encode
from quantdrift.core.config.schema import Stream
from quantdrift.core.stream.backlog import read_backlog
from quantdrift.core.stream.connection import Queue
from tests.support.shadow.onnx_models import exchange_of, inputs_of, linear_model, saved
from tests.support.sidecar.relay_process import free_port

pytestmark = pytest.mark.fault

DEADLINE_S = 60.0
N_EACH = 30
ACK_WAIT_S = 3.0
N_ROUNDS = 5


@contextmanager
def _worker(config: Path, dsn: str, admin: str = "127.0.0.1:0") -> Iterator[subprocess.Popen[bytes]]:
    """Run a shadow worker in a process of its own, and kill it afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-m", "quantdrift", "shadow", "-c", str(config)],
        env={**os.environ, "QUANTDRIFT_DSN": dsn, "QUANTDRIFT__SHADOW__ADMIN": admin},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def _stored(dsn: str, n: int) -> None:
    """Wait until `n` comparisons are stored."""
    until_s = time.monotonic() + DEADLINE_S
    while (found := await _count(dsn, "count(*)")) < n:
        assert time.monotonic() < until_s, f"{found} of {n} are stored"
        await asyncio.sleep(0.05)


async def _ready(admin: str) -> None:
    """Wait until a worker reads."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(DEADLINE_S):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"http://{admin}/readyz") as answer:
                    if answer.status == HTTPStatus.OK:
                        return
            await asyncio.sleep(0.05)


async def _count(dsn: str, what: str) -> int:
    connection = await asyncpg.connect(dsn)
    try:
        return int(await connection.fetchval(f"select {what} from comparison"))
    finally:
        await connection.close()


def _configured(folder: Path, stream: Stream, **shadow: float) -> Path:
    """Write the configuration of a worker with one model, and return its file."""
    saved(linear_model(), folder / "linear.onnx")
    options = "".join(f"{name} = {value}\n" for name, value in shadow.items())
    config = folder / "config.toml"
    config.write_text(
        f'[stream]\nurl = "{stream.url}"\nname = "{stream.name}"\n'
        f'[shadow]\nprovider = "cpu"\nthreads = 1\n{options}'
        '[[models]]\nname = "digits"\n[[models.references]]\npath = "linear.onnx"\n'
    )
    return config


async def test_what_a_stopped_worker_had_is_stored_once_by_another(
    tmp_path: Path, nats_url: str, postgres_dsn: str
) -> None:
    """The exchanges that were delivered to it come again after `shadow.ack_wait_s`; it goes on later, and doubles none."""
    stream = Stream(url=nats_url, name=f"stopped{os.getpid()}")
    config = _configured(tmp_path, stream, batch_delay_s=0.05, ack_wait_s=ACK_WAIT_S)
    queue = await Queue.connect(stream, client_name="test")
    await queue.ensure()

    async def publish() -> None:
        for seed in range(N_EACH):
            exchange = exchange_of(inputs_of(1, seed))
            await queue.publish_exchange(exchange.model, exchange.id, encode(exchange))

    try:
        with _worker(config, postgres_dsn) as stopped:
            await publish()
            await _stored(postgres_dsn, N_EACH)
            stopped.send_signal(signal.SIGSTOP)
            await publish()  # its requests for more still wait at the server: these are delivered to it
            with _worker(config, postgres_dsn):
                await _stored(postgres_dsn, 2 * N_EACH)
                stopped.send_signal(signal.SIGCONT)
                await publish()
                await _stored(postgres_dsn, 3 * N_EACH)
                until_s = time.monotonic() + DEADLINE_S
                while (await read_backlog(queue)).n_messages:
                    assert time.monotonic() < until_s, "all are acknowledged"
                    await asyncio.sleep(0.05)
        assert stopped.returncode == -signal.SIGKILL, "it ran until the end"
    finally:
        await queue.close()
    assert await _count(postgres_dsn, "count(*)") == 3 * N_EACH
    assert await _count(postgres_dsn, "count(distinct exchange_id)") == 3 * N_EACH


async def test_one_of_two_workers_reads_a_model_and_the_other_one_takes_over(
    tmp_path: Path, nats_url: str, postgres_dsn: str
) -> None:
    """Together they make the batches that one would make; the one that reads is killed, and the other one reads."""
    stream = Stream(url=nats_url, name=f"one{os.getpid()}")
    config = _configured(tmp_path, stream, batch_delay_s=1, ack_wait_s=ACK_WAIT_S)
    queue = await Queue.connect(stream, client_name="test")
    await queue.ensure()
    connection = await asyncpg.connect(postgres_dsn)
    n_published = 0

    async def round_of(n: int) -> set[str]:
        """Publish exchanges within moments, wait until they are stored, and return the workers that stored them."""
        nonlocal n_published
        last = await connection.fetchval("select coalesce(max(id), 0) from batch")
        for seed in range(n):
            exchange = exchange_of(inputs_of(1, n_published + seed))
            await queue.publish_exchange(exchange.model, exchange.id, encode(exchange))
        n_published += n
        await _stored(postgres_dsn, n_published)
        return {
            row["worker"]
            for row in await connection.fetch("select worker from batch where id > $1 and n_rows > 0", last)
        }

    async def until_one_reads() -> str:
        """Return the worker that alone stored what was published, five times in a row."""
        until_s, found = time.monotonic() + DEADLINE_S, list[set[str]]()
        while len(found) < N_ROUNDS or len(set.union(*found[-N_ROUNDS:])) > 1:
            assert time.monotonic() < until_s, found
            found.append(await round_of(N_ROUNDS))
        return found[-1].pop()

    try:
        first, second = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        with _worker(config, postgres_dsn, first) as one, _worker(config, postgres_dsn, second) as other:
            for admin in (first, second):
                await _ready(admin)
            reader = await until_one_reads()
            (killed,) = (worker for worker in (one, other) if reader.endswith(f":{worker.pid}"))
            killed.kill()
            (instead,) = await round_of(N_ROUNDS)
            assert instead != reader
    finally:
        await connection.close()
        await queue.close()
    assert (
        await _count(postgres_dsn, "count(distinct exchange_id)")
        == await _count(postgres_dsn, "count(*)")
        == n_published
    )
