"""The stream's server killed, gone and back."""

import asyncio
import itertools
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest

from quantdrift.core.clock import SystemClock
from quantdrift.core.config.schema import Config, Model, SamplingOptions, Sidecar, Stream
from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.core.process.nats_server import NatsServer
from quantdrift.core.process.run import Stop
from quantdrift.core.records import Exchange, Loss, Policy, Sampling, Tensor
from quantdrift.core.stream.connection import Queue
from quantdrift.sidecar.capture.publisher import Publisher
from quantdrift.sidecar.state.counters import Count, Counters, Gauge

pytestmark = pytest.mark.fault

POLICY = Policy(epoch="e", header_strata=(), body_strata=())


def exchange(number: int, n_bytes: int = 1000) -> Exchange:
    """Return an exchange whose id is `number`."""
    return Exchange(
        id=f"{number:032x}",
        captured_at=datetime.now(UTC),
        source="pod",
        model="m",
        version="1",
        protocol="test",
        inputs=(Tensor(name="x", datatype="UINT8", shape=(n_bytes,), data=bytes(n_bytes)),),
        outputs=(),
        sampling=Sampling(
            policy=POLICY, header_stratum="default", body_stratum="default", pi1=1, pi2=1, u1=0.25, u2=0.25
        ),
    )


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    """Return a server of this test's own, to be killed."""
    with NatsServer(tmp_path / "nats") as made:
        yield made


async def until(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    """Wait until `condition` holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)  # another process changes what is waited for


async def test_nothing_acknowledged_is_lost_when_the_server_is_killed(server: NatsServer) -> None:
    """Publishing goes on through kill -9 and restart; the stream holds every acknowledged id once."""
    config = Config(
        models=(Model(name="m"),),
        stream=Stream(url=server.url),
        sampling=SamplingOptions(max_exchanges_per_s=1e6),
    )
    counters = Counters.create(1, 1)
    slot = counters.slot(0)
    publisher = Publisher(config, slot, SystemClock(), publish_timeout_s=1.0)
    stop = Stop()
    running = asyncio.create_task(publisher.run(stop))
    n_offered = 1500
    for number in range(n_offered):
        publisher.put(exchange(number), 0)
        if number in (500, 1000):
            await until(lambda number=number: slot.count(0, Count.PUBLISHED) > number - 300)  # type: ignore[misc]
            server.kill()
            server.start()
        await asyncio.sleep(0)
    assert await publisher.drained(30)
    stop.set()
    await running
    await publisher.close()
    n_lost = sum(slot.lost_count(0, loss) for loss in Loss)
    n_published = slot.count(0, Count.PUBLISHED)
    assert n_published + n_lost == n_offered
    assert n_lost == 0  # an outage shorter than the tries costs nothing

    queue = await Queue.connect(config.stream, client_name="test")
    consumer = await queue.consumer("exchange", ack_wait_s=30)
    found: list[bytes] = []
    while taken := await consumer.fetch(500, max_bytes=16_000_000, timeout_s=0.5):
        found.extend(delivery.data for delivery in taken)
    await queue.close()
    assert len(found) == len(set(found)) == n_offered


async def test_a_consumer_outlives_the_server(server: NatsServer) -> None:
    """While the server is away a fetch says so; afterwards the same consumer takes what waits."""
    queue = await Queue.connect(Stream(url=server.url), client_name="test")
    consumer = await queue.consumer("exchange", ack_wait_s=1.5)
    for i in range(3):
        await queue.publish_exchange("m", str(i), str(i).encode())
    (held,) = await consumer.fetch(1, max_bytes=1000, timeout_s=1)
    server.kill()
    with pytest.raises(RetryError):
        await consumer.fetch(1, max_bytes=1000, timeout_s=0.1)
    with pytest.raises(RetryError):
        await held.ack()
    server.start()
    await asyncio.wait_for(queue.wait_connected(), 10)
    seen: set[bytes] = set()
    deadline = time.monotonic() + 20
    while seen != {b"0", b"1", b"2"} and time.monotonic() < deadline:
        for delivery in await consumer.fetch(5, max_bytes=1000, timeout_s=0.5):
            seen.add(delivery.data)
            await delivery.ack()
    assert seen == {b"0", b"1", b"2"}
    await queue.close()


async def test_that_the_server_is_back_is_said_once_by_a_process_with_several_connections(
    server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    """By the last of those that come back; one that was closed meanwhile holds nobody up."""
    caplog.set_level("INFO", logger="quantdrift.core.stream.connection")
    first, second, closed = [
        await Queue.connect(Stream(url=server.url), client_name="test") for _ in range(3)
    ]

    def n_said(words: str) -> int:
        return sum(words in record.getMessage() for record in caplog.records)

    server.kill()
    await until(lambda: n_said("lost the connection to NATS") == 3)
    await closed.close()
    server.start()
    for queue in (first, second):
        await asyncio.wait_for(queue.wait_connected(), 10)
    await until(lambda: n_said("connected to NATS again") == 1)
    await first.close()
    await second.close()
    assert n_said("connected to NATS again") == 1


async def test_without_a_server_the_queue_is_bounded_and_the_rest_is_counted(tmp_path: Path) -> None:
    """From the start: nothing blocks, what does not fit is `queue_full`; the server comes, and the queue empties."""
    server = NatsServer(tmp_path / "nats")
    server.start()
    server.stop()
    config = Config(
        models=(Model(name="m"),),
        stream=Stream(url=server.url),
        sidecar=Sidecar(max_held_bytes=2 * 50_000, max_exchange_bytes=10_000),
        sampling=SamplingOptions(max_exchanges_per_s=1e6),
    )
    slot = Counters.create(1, 1).slot(0)
    publisher = Publisher(config, slot, SystemClock())
    stop = Stop()
    running = asyncio.create_task(publisher.run(stop))
    begun = time.monotonic()
    for number in range(100):
        publisher.put(exchange(number), 0)
        await asyncio.sleep(0)
    assert time.monotonic() - begun < 2
    n_full = slot.lost_count(0, Loss.QUEUE_FULL)
    assert 50 < n_full < 80
    assert 40_000 < slot.gauge(Gauge.QUEUE_BYTES) <= 50_000
    assert not await publisher.drained(0.05)
    server.start()
    assert await publisher.drained(20)
    assert slot.count(0, Count.PUBLISHED) == 100 - n_full
    assert slot.gauge(Gauge.QUEUE_BYTES) == 0
    stop.set()
    await running
    await publisher.close()
    server.stop()


async def test_what_waits_at_the_end_is_counted_as_lost(server: NatsServer) -> None:
    """With the server gone for good, each queued exchange ends as `publish`."""
    config = Config(stream=Stream(url=server.url))
    slot = Counters.create(1, 1).slot(0)
    publisher = Publisher(config, slot, SystemClock())
    stop = Stop()
    running = asyncio.create_task(publisher.run(stop))
    await until(lambda: publisher.queue is not None)
    server.kill()
    for number in range(30):
        publisher.put(exchange(number), 0)
    assert not await publisher.drained(0.1)
    stop.set()
    await running
    await publisher.close()
    assert slot.lost_count(0, Loss.PUBLISH) == 30
    assert slot.gauge(Gauge.QUEUE_BYTES) == 0


async def test_a_server_that_hangs_costs_one_more_try(server: NatsServer) -> None:
    """What is not acknowledged twice in the time allowed is lost as `publish`; nothing waits for ever."""
    config = Config(stream=Stream(url=server.url))
    slot = Counters.create(1, 1).slot(0)
    publisher = Publisher(config, slot, SystemClock(), publish_timeout_s=1.0)
    stop = Stop()
    running = asyncio.create_task(publisher.run(stop))
    publisher.put(exchange(0), 0)
    assert await publisher.drained(10)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    hung = psutil.Process(server.pid)
    await until(lambda: hung.status() == psutil.STATUS_STOPPED)
    publisher.put(exchange(1), 0)
    assert await publisher.drained(10)
    os.kill(server.pid, signal.SIGCONT)
    assert slot.lost_count(0, Loss.PUBLISH) == 1
    publisher.put(exchange(2), 0)
    assert await publisher.drained(10)
    assert slot.count(0, Count.PUBLISHED) == 2
    stop.set()
    await running
    await publisher.close()


async def test_a_full_stream_and_a_large_exchange_are_counted_by_name(nats_url: str) -> None:
    """Refused by the stream is `stream_full`, above its payload limit `too_large`; nothing is tried again."""
    config = Config(
        stream=Stream(url=nats_url, name=f"t-{secrets.token_hex(6)}", max_bytes=20_000),
        sidecar=Sidecar(max_exchange_bytes=16_777_216),
        sampling=SamplingOptions(max_exchanges_per_s=1e6),
    )
    slot = Counters.create(1, 1).slot(0)
    publisher = Publisher(config, slot, SystemClock())
    stop = Stop()
    running = asyncio.create_task(publisher.run(stop))
    publisher.put(exchange(999, 9_000_000), 0)  # before the limit is known
    await until(lambda: publisher.queue is not None)
    publisher.put(exchange(998, 9_000_000), 0)
    for number in range(30):
        publisher.put(exchange(number), 0)
    assert await publisher.drained(4)
    stop.set()
    await running
    await publisher.close()
    assert slot.lost_count(0, Loss.TOO_LARGE) == 2
    n_full = slot.lost_count(0, Loss.STREAM_FULL)
    assert n_full + slot.count(0, Count.PUBLISHED) == 30
    assert 10 < n_full < 20


async def test_a_server_that_refuses_the_stream_is_logged_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What comes meanwhile is counted, without a word for each; once there is room, exchanges are published."""
    monkeypatch.setattr("quantdrift.sidecar.capture.publisher._REFUSED_S", 0.1, raising=False)
    caplog.set_level(logging.INFO)
    small = NatsServer(tmp_path / "nats", store_bytes=1_000_000)
    small.start()
    config = Config(stream=Stream(url=small.url, max_bytes=10_000_000))
    slot = Counters.create(1, 1).slot(0)
    publisher = Publisher(config, slot, SystemClock())
    stop = Stop()
    running = asyncio.create_task(publisher.run(stop))
    for number in range(20):
        publisher.put(exchange(number), 0)
        assert await publisher.drained(10)
    assert slot.lost_count(0, Loss.PUBLISH) == 20
    refusals = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(refusals) == 1
    assert refusals[0].exc_info is None
    assert "lower stream.max_bytes (10000000)" in refusals[0].getMessage()
    small.stop()
    with NatsServer(tmp_path / "nats", store_bytes=1 << 40) as large:
        large.stop()
        large.start(small.port)
        numbers = itertools.count(20)
        async with asyncio.timeout(30):
            while not slot.count(0, Count.PUBLISHED):
                publisher.put(exchange(next(numbers)), 0)
                await publisher.drained(10)
        stop.set()
        await running
        await publisher.close()
    assert "NATS accepts exchanges again" in caplog.text


def test_the_server_dies_with_its_owner(tmp_path: Path) -> None:
    """A killed owner leaves no server behind, and the directory can be used again."""
    code = (
        "import sys; from pathlib import Path; from quantdrift.core.process.nats_server import NatsServer\n"
        "server = NatsServer(Path(sys.argv[1])); server.start(); print(server.pid, flush=True); sys.stdin.read()"
    )
    directory = tmp_path / "nats"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        server = psutil.Process(int(owner.stdout.readline()))
        owner.kill()
    server.wait(timeout=10)
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE
    with NatsServer(directory):
        pass


def test_a_server_that_cannot_start_says_why(server: NatsServer, tmp_path: Path) -> None:
    """Somebody else's port is not taken for ours; the server's last words are in the message."""
    with pytest.raises(OperatorError, match="address already in use"):
        NatsServer(tmp_path / "other").start(server.port)
    assert server.alive()
