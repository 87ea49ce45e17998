"""A server of a reference that hangs, or fails at everything, while a worker replays against it."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest

from quantdrift.core.codec import encode
from quantdrift.core.config.schema import Config, Model, Reference, Runtime
from quantdrift.core.stream.connection import Queue
from tests.support.shadow.onnx_models import exchange_of, inputs_of, linear_model, saved
from tests.support.shadow.shadow_workers import serving, worker_config

pytestmark = pytest.mark.fault

DEADLINE_S = 60.0


@contextmanager
def _server(tmp_path: Path, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], int]]:
    path = saved(linear_model(), tmp_path / "linear.onnx")
    command = [sys.executable, "-m", "quantdrift.demo.oip_server", "--listen", f"127.0.0.1:{port}"]
    with subprocess.Popen(
        [*command, "--model", f"digits={path}"], stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        try:
            yield running, int(running.stdout.readline().rpartition(" ")[2])
        finally:
            running.send_signal(signal.SIGCONT)
            running.terminate()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Return a server that holds the linear model as `digits`, and its port."""
    with _server(tmp_path) as running:
        yield running


@pytest.fixture
def config(server: tuple[subprocess.Popen[str], int], nats_url: str) -> Config:
    """Return a configuration whose reference is at that server."""
    url = f"http://127.0.0.1:{server[1]}"
    reference = Reference(runtime=Runtime.OIP_HTTP, url=url, timeout_s=2.0)
    model = Model(name="digits", top_k=2, references=(reference,))
    return worker_config(nats_url, [model], ack_wait_s=2.0, max_deliveries=2)


def _with_here(config: Config, tmp_path: Path) -> Config:
    """Return the configuration with another model, `here`, whose reference is a file."""
    reference = Reference(path=str(saved(linear_model(), tmp_path / "here.onnx")))
    here = Model(name="here", top_k=2, references=(reference,))
    return msgspec.structs.replace(config, models=(*config.models, here))


async def _publish(queue: Queue, n_exchanges: int, first_seed: int, model: str = "digits") -> None:
    for seed in range(first_seed, first_seed + n_exchanges):
        exchange = exchange_of(inputs_of(1, seed), model=model)
        await queue.publish_exchange(exchange.model, exchange.id, encode(exchange))


async def _until(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not await holds():
        assert time.monotonic() < deadline_s, f"not in time: {what}"
        await asyncio.sleep(0.05)


async def _value(dsn: str, query: str) -> Any:
    connection = await asyncpg.connect(dsn)
    try:
        return await connection.fetchval(query)
    finally:
        await connection.close()


async def test_a_server_that_hangs_costs_no_exchange_and_no_worker(
    server: tuple[subprocess.Popen[str], int],
    config: Config,
    postgres_dsn: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It accepts connections and answers nothing. The worker waits, and goes on when the server does."""

    async def stored(count: int) -> bool:
        return bool(await _value(postgres_dsn, "select count(*) from comparison") == count)

    async def waits() -> bool:
        return caplog.text.count("it could compute before") >= 2

    async with serving(config, postgres_dsn) as queue:
        await _publish(queue, 5, first_seed=0)
        await _until(lambda: stored(5), "the first ones are compared")
        os.kill(server[0].pid, signal.SIGSTOP)
        await _publish(queue, 20, first_seed=5)
        await _until(waits, "the worker says that it waits")
        assert await stored(5)
        os.kill(server[0].pid, signal.SIGCONT)
        await _until(lambda: stored(25), "the others are compared")
    assert await _value(postgres_dsn, "select count(*) from quarantine") == 0
    assert await _value(postgres_dsn, "select sum(n_rows) from batch") == 25
    provenance = msgspec.json.decode(await _value(postgres_dsn, "select provenance from batch limit 1"))
    assert provenance["precision"] == "unverified"


@pytest.mark.release
async def test_other_models_go_on_while_a_server_hangs(
    server: tuple[subprocess.Popen[str], int], config: Config, postgres_dsn: str, tmp_path: Path
) -> None:
    """Far more of the one than may wait in the worker; none of either is lost when the server goes on."""
    config = _with_here(config, tmp_path)

    async def stored(model: str, count: int) -> bool:
        of_model = f"join model_version v on v.id = c.model_version_id where v.model = '{model}'"
        return bool(await _value(postgres_dsn, f"select count(*) from comparison c {of_model}") == count)

    async with serving(config, postgres_dsn) as queue:
        await _publish(queue, 1, first_seed=0)
        await _until(lambda: stored("digits", 1), "the server answers")
        os.kill(server[0].pid, signal.SIGSTOP)
        await _publish(queue, 200, first_seed=1)
        for turn in range(3):
            await _publish(queue, 40, first_seed=1000 + 40 * turn, model="here")
            await _until(lambda turn=turn: stored("here", 40 * (turn + 1)), "the other model goes on")  # type: ignore[misc]
        assert await stored("digits", 1)
        os.kill(server[0].pid, signal.SIGCONT)
        await _until(lambda: stored("digits", 201), "the first model goes on")
    assert await _value(postgres_dsn, "select count(*) from quarantine") == 0
    assert await _value(postgres_dsn, "select sum(n_rows) from batch") == 321


async def test_other_models_begin_while_a_server_is_away(
    config: Config, server: tuple[subprocess.Popen[str], int], postgres_dsn: str, tmp_path: Path
) -> None:
    """It was not there when the worker began; what came for its model waits in the stream, and is compared when it is."""
    running, port = server
    running.terminate()
    running.wait(DEADLINE_S)
    config = _with_here(config, tmp_path)

    async def stored(count: int) -> bool:
        return bool(await _value(postgres_dsn, "select count(*) from comparison") == count)

    async with serving(config, postgres_dsn) as queue:
        await _publish(queue, 7, first_seed=0)
        await _publish(queue, 5, first_seed=100, model="here")
        await _until(lambda: stored(5), "the other model is compared")
        with _server(tmp_path, port):
            await _until(lambda: stored(12), "the server's model is compared")
    assert await _value(postgres_dsn, "select count(*) from quarantine") == 0


async def test_the_messages_that_are_set_aside_share_one_limit(
    config: Config, postgres_dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many models have stages of their own: a wrong configuration must not fill the disk."""
    bad = [exchange_of(inputs_of(1)[:, :2], inputs_of(1), model=model) for model in ("digits", "here")]
    monkeypatch.setattr(
        "quantdrift.storage.comparisons.writer.PAYLOAD_BYTES_PER_HOUR", max(len(encode(one)) for one in bad)
    )
    count = "select count(*) from quarantine"

    async def set_aside() -> bool:
        return bool(await _value(postgres_dsn, count) == 2)

    async with serving(_with_here(config, tmp_path), postgres_dsn) as queue:
        for exchange in bad:
            await queue.publish_exchange(exchange.model, exchange.id, encode(exchange))
        await _until(set_aside, "both are set aside")
    assert await _value(postgres_dsn, f"{count} where payload is not null") == 1
