"""What an operator sees while something is away: the lag of the stream, lost exchanges, and logs that stay small."""

import asyncio
import contextlib
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from quantdrift.core.clock import SystemClock
from quantdrift.core.codec import encode
from quantdrift.core.config.schema import Config, SamplingOptions, Stream
from quantdrift.core.process.log_file import MOST_BYTES, keep_small
from quantdrift.core.process.nats_server import NatsServer
from quantdrift.core.process.run import Stop
from quantdrift.core.stream.connection import Queue
from quantdrift.demo.otlp_receiver import OtlpReceiver
from quantdrift.sidecar.capture.publisher import Publisher
from quantdrift.sidecar.state.counters import Counters, Gauge
from quantdrift.storage.server.postgres import PostgresServer
from tests.support.monitor.monitor_processes import running_monitor
from tests.support.shadow.onnx_models import exchange_of, inputs_of
from tests.support.sidecar.relay_process import free_port, wait

pytestmark = pytest.mark.fault


@pytest.mark.release
async def test_the_lag_is_shown_while_no_monitor_leads_and_no_shadow_runs(
    nats_url: str, tmp_path: Path, otlp_receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Postgres away a monitor still shows what waits of each model, its bytes and the age of the oldest."""
    name = f"t{secrets.token_hex(6)}"
    monkeypatch.setenv("QUANTDRIFT__STREAM__URL", nats_url)
    monkeypatch.setenv("QUANTDRIFT__STREAM__NAME", name)
    queue = await Queue.connect(Stream(url=nats_url, name=name), client_name="test")
    for seed in range(3):
        exchange = exchange_of(inputs_of(1, seed=seed))
        await queue.publish_exchange("words", exchange.id, encode(exchange))
    await queue.close()

    def shown(receiver: OtlpReceiver) -> bool:
        values = {(point.name, point.attributes.get("model", "")): point.value for point in receiver.metrics}
        return (
            values.get(("quantdrift.stream.waiting", "words")) == 3
            and values.get(("quantdrift.stream.waiting", "digits")) == 0
            and values.get(("quantdrift.stream.stored", ""), 0) > 100
            and values.get(("quantdrift.stream.age", ""), 0) > 0
            and values.get(("quantdrift.monitor.leader", "")) == 0
        )

    away = f"postgresql://user:password@127.0.0.1:{free_port()}/away"
    async with running_monitor(away, tmp_path, otlp_receiver.endpoint):
        assert await asyncio.to_thread(otlp_receiver.wait_for, shown, 60)


async def test_a_full_stream_is_a_warning_with_the_model_and_the_reason(
    nats_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One line tells what to change; the age of the oldest exchange that waits is 0 again once none does."""
    config = Config(
        stream=Stream(url=nats_url, name=f"t-{secrets.token_hex(6)}", max_bytes=4_000),
        sampling=SamplingOptions(max_exchanges_per_s=1e6),
    )
    slot, stop = Counters.create(1, 1).slot(0), Stop()
    publisher = Publisher(config, slot, SystemClock())
    for seed in range(40):
        publisher.put(exchange_of(inputs_of(1, seed=seed)), 0)
    assert slot.gauge(Gauge.QUEUED_SINCE_S) > 0
    running = asyncio.create_task(publisher.run(stop))
    assert await publisher.drained(30)
    stop.set()
    await running
    await publisher.close()
    assert slot.gauge(Gauge.QUEUED_SINCE_S) == 0
    lines = [record for record in caplog.records if "lost" in record.getMessage()]
    assert [line.levelname for line in lines] == ["WARNING"]
    assert (
        lines[0]
        .getMessage()
        .startswith("model digits: lost 1 captured exchanges (stream_full): the stream is full")
    )


async def test_the_log_of_postgres_is_cut_while_it_writes(postgres_server: PostgresServer) -> None:
    """It stays below its limit, the newest lines are kept beside it, and the server goes on at its beginning."""
    connection = await asyncpg.connect(postgres_server.dsn)
    log, older = postgres_server.log, postgres_server.log.with_name("log.1")

    async def fail(times: int) -> None:
        for _ in range(times):
            with contextlib.suppress(asyncpg.PostgresError):
                await connection.execute("select nothing_of_that_name from nowhere")

    await fail(100)
    assert log.stat().st_size > 8192
    keep_small(log, 8192)
    assert log.stat().st_size == 0
    assert older.read_text().splitlines()[-1]
    assert 2000 < older.stat().st_size <= 4096
    await fail(1)
    await connection.close()
    assert log.read_bytes().startswith(b"20")
    assert b"nowhere" in log.read_bytes()


@pytest.fixture(params=["postgres", "nats"])
def embedded(request: pytest.FixtureRequest, memory_path: Path) -> Iterator[Path]:
    """Run an embedded server as `up` does; return its log."""
    kind = str(request.param)
    command = [
        sys.executable,
        "-m",
        "quantdrift.cli.run.embedded",
        kind,
        str(memory_path / kind),
        str(free_port()),
        *([Stream().name] if kind == "nats" else []),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            yield memory_path / kind / ("log" if kind == "postgres" else "nats.log")
        finally:
            process.terminate()
            process.wait(60)


def test_an_embedded_server_keeps_its_log_small(embedded: Path) -> None:
    """A log that has grown for months is cut within a moment, without a restart of the server."""
    with embedded.open("ab") as log:
        log.write(b"a line of a server\n" * (MOST_BYTES // 19 + 10))
    wait(lambda: embedded.stat().st_size < MOST_BYTES // 2, "the log is cut")
    older = embedded.with_name(f"{embedded.name}.1")
    assert 0 < older.stat().st_size <= MOST_BYTES // 2
    assert older.read_bytes().startswith(b"a line of a server\n")


def test_a_server_that_fails_to_start_names_its_own_last_error(tmp_path: Path) -> None:
    """Lines of an earlier start stay in the log and are not taken for the reason."""
    server = NatsServer(tmp_path / "nats")
    (tmp_path / "nats").mkdir()
    server.log.write_text("[1] 2026/01/01 00:00:00.000000 [FTL] an error of long ago\n")
    server.start()
    server.stop()
    assert "long ago" not in server.last_error()
    assert "an error of long ago" in server.log.read_text()
