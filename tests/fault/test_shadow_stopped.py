"""A shadow worker that stands still: another one takes over what it had, and nothing is stored twice when it goes on."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import asyncpg
import pytest

from quantdrift.core.codec import encode
from quantdrift.core.config.schema import Stream
from quantdrift.core.stream.backlog import read_backlog
from quantdrift.core.stream.connection import Queue
from tests.support.shadow.onnx_models import exchange_of, inputs_of, linear_model, saved

pytestmark = pytest.mark.fault

DEADLINE_S = 60.0
N_EACH = 30
ACK_WAIT_S = 3.0


@contextmanager
def _worker(config: Path, dsn: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a shadow worker in a process of its own, and kill it afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-m", "quantdrift", "shadow", "-c", str(config)],
        env={**os.environ, "QUANTDRIFT_DSN": dsn},
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


async def _count(dsn: str, what: str) -> int:
    connection = await asyncpg.connect(dsn)
    try:
        return int(await connection.fetchval(f"select {what} from comparison"))
    finally:
        await connection.close()


async def test_what_a_stopped_worker_had_is_stored_once_by_another(
    tmp_path: Path, nats_url: str, postgres_dsn: str
) -> None:
    """The exchanges that were delivered to it come again after `shadow.ack_wait_s`; it goes on later, and doubles none."""
    saved(linear_model(), tmp_path / "linear.onnx")
    stream = Stream(url=nats_url, name=f"stopped{os.getpid()}")
    config = tmp_path / "config.toml"
    config.write_text(
        f'[stream]\nurl = "{stream.url}"\nname = "{stream.name}"\n'
        f'[shadow]\nprovider = "cpu"\nthreads = 1\nbatch_delay_s = 0.05\nack_wait_s = {ACK_WAIT_S}\n'
        'admin = "127.0.0.1:0"\n[[models]]\nname = "digits"\n[[models.references]]\npath = "linear.onnx"\n'
    )
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
