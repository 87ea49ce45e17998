"""An embedded server that hangs, or whose disk was full, is ended by the process around it and works when started again."""

import asyncio
import contextlib
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import asyncpg
import msgspec
import psutil
import pytest

from quantdrift.cli.run.embedded import Report
from quantdrift.core.clock import SystemClock
from quantdrift.core.config.schema import MIB, Config, Stream
from quantdrift.core.data_directory import at_server
from quantdrift.core.errors import RetryError
from quantdrift.core.process.nats_server import NatsServer, make_encryption, server_url
from quantdrift.core.process.run import Stop
from quantdrift.core.records import Loss
from quantdrift.core.stream.connection import Queue
from quantdrift.core.stream.errors import StreamFullError
from quantdrift.core.stream.exemplars import kept_exemplars
from quantdrift.core.stream.rights import NatsRole
from quantdrift.sidecar.capture import publisher as publishing
from quantdrift.sidecar.capture.publisher import Publisher
from quantdrift.sidecar.state.counters import Counters, Gauge
from quantdrift.storage.server.postgres import PostgresServer
from tests.fault.test_nats import exchange
from tests.support.sidecar.relay_process import free_port

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]

DEADLINE_S = 60.0
# The process as `quantdrift up` starts it, with seconds for what lasts half a minute there.
RUNNER = """
import sys
from quantdrift.cli.run import embedded
from quantdrift.core.process import nats_server
embedded.HUNG_S, embedded._CHECK_S, embedded._ANSWER_S = 1.0, 0.2, 0.5
embedded._STOP_S = nats_server._STOP_S = 0.5
raise SystemExit(embedded.main(sys.argv[1:]))
"""
SMALL_STREAM = 8_000_000


class Runner:
    """A running `quantdrift.cli.run.embedded`."""

    def __init__(self, kind: str, directory: Path, port: int) -> None:
        stream = [Stream().name] if kind == "nats" else []
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUNNER, kind, str(directory), str(port), *stream],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"},
        )

    def report(self) -> Report:
        """Return the next line that it writes."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"it has ended: {self.error()}"
        return msgspec.json.decode(line, type=Report)

    def error(self) -> str:
        """Wait for its end, and return what it said."""
        _, error = self.process.communicate(timeout=DEADLINE_S)
        return str(error.decode())

    def server(self) -> psutil.Process:
        """Return the server below it."""
        (server,) = psutil.Process(self.process.pid).children()
        return server

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.terminate()
            self.process.communicate(timeout=DEADLINE_S)
        self.process.kill()
        self.process.wait()


@pytest.fixture
def disk() -> Iterator[Path]:
    """Return a small file system."""
    with tempfile.TemporaryDirectory(prefix="qd-") as directory:
        mount = ["mount", "-t", "tmpfs", "-o", "size=112m", "none", directory]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("needs the right to mount a file system")
        try:
            yield Path(directory)
        finally:
            subprocess.run(["umount", "-l", directory], check=True)


def fill(disk: Path, *, but: int = 0) -> Path:
    """Fill a file system except for `but` bytes, and return the file to remove."""
    stuffing = disk / "stuffing"
    with contextlib.suppress(OSError), stuffing.open("wb", buffering=0) as file:
        for n in (65_536, 512):
            with contextlib.suppress(OSError):
                while file.write(bytes(n)):
                    pass
        file.truncate(file.tell() - but)
    return stuffing


async def publishes(queue: Queue, *, large: bool = False) -> bool:
    """Return whether the stream stores one more exchange."""
    try:
        await queue.publish_exchange("m", secrets.token_hex(16), bytes(200_000 if large else 10))
    except RetryError:
        return False
    return True


async def connected(url: str) -> Queue:
    """Return a connection that does not wait long for an acknowledgement, with its streams."""
    queue = await opened(Stream(url=url, max_bytes=SMALL_STREAM), NatsRole.ADMIN)
    await queue.ensure()
    return queue


async def opened(stream: Stream, role: NatsRole) -> Queue:
    """Return a connection that does not wait long for an acknowledgement."""
    return await Queue.connect(stream, client_name="test", role=role, publish_timeout_s=2.0)


async def as_role(directory: Path, port: int, role: NatsRole) -> Queue:
    """Return a connection to an embedded server with the key of a role."""
    small = Stream(max_bytes=SMALL_STREAM, exemplar_bytes=16 * MIB)
    return await opened(at_server(small, directory, server_url(port), role), role)


async def test_nats_stores_again_once_its_full_disk_has_room(disk: Path) -> None:
    """It is left alone while the disk is full, because what it has can be read, and says why; then it is started again.

    A server that nobody starts again acknowledges nothing for ever.
    """
    port = free_port()
    with Runner("nats", disk / "nats", port) as runner:
        assert not runner.report().problem
        reader = await as_role(disk / "nats", port, NatsRole.SHADOW)
        await reader.ensure()
        queue = await as_role(disk / "nats", port, NatsRole.SIDECAR)
        assert await publishes(queue)
        consumer = await reader.consumer("exchange", ack_wait_s=30)
        stuffing = fill(disk)
        assert not await publishes(queue, large=True)
        problem = runner.report().problem
        assert "no space left on device" in problem
        assert "has 0 MiB left: it is started again once 32 MiB are free" in problem
        assert len(await consumer.fetch(1, max_bytes=1000, timeout_s=5)) == 1, "it can still be read"
        stuffing.unlink()
        assert "no space left on device" in runner.error()
    with Runner("nats", disk / "nats", port) as runner:
        assert not runner.report().problem
        async with asyncio.timeout(DEADLINE_S):
            while not await publishes(queue, large=True):
                await queue.wait_connected()
        await queue.close()
        await reader.close()


async def test_exemplars_go_before_the_disk_is_full_and_exchanges_stay(
    disk: Path,
) -> None:
    """A server whose disk is full stores no exchange until it is started again, so exemplars must not fill it."""
    port = free_port()
    make_encryption(disk / "nats")  # as `quantdrift up` does where a model keeps exemplars
    with Runner("nats", disk / "nats", port) as runner:
        assert not runner.report().problem
        shadow = await as_role(disk / "nats", port, NatsRole.SHADOW)
        await shadow.ensure()
        await shadow.ensure_exemplars()
        sidecar = await as_role(disk / "nats", port, NatsRole.SIDECAR)

        async def keeps() -> bool:
            try:
                await shadow.publish_exemplar("m", "all", "random", secrets.token_hex(16), bytes(1 << 20))
            except StreamFullError:
                return False
            return True

        assert await publishes(sidecar)
        async with asyncio.timeout(DEADLINE_S):
            assert await keeps()
            stuffing = fill(disk, but=48 * MIB)
            while await keeps():
                await asyncio.sleep(0.05)
            assert await publishes(sidecar, large=True)
            assert [one async for one in kept_exemplars(shadow)] == []
            consumer = await shadow.consumer("exchange", ack_wait_s=30)
            assert len(await consumer.fetch(3, max_bytes=1 << 20, timeout_s=1)) == 2
            stuffing.unlink()
            while not await keeps():
                await asyncio.sleep(0.05)
        info = await (await shadow.live()).jetstream().stream_info(shadow.stream_name("exemplar"))
        assert info.config.max_bytes == 16 * MIB
        await sidecar.close()
        await shadow.close()
        runner.process.terminate()
        said = runner.error()
    assert re.search(r"nats: \d+ exemplars were deleted, and none is kept: the disk of", said)
    assert "nats: exemplars are kept again" in said
    assert "no space left" not in said


async def test_nats_started_on_a_full_disk_takes_the_stream_once_there_is_room(disk: Path) -> None:
    """Its limit is the size of the disk and not what was free at its start."""
    (disk / "nats" / "store").mkdir(parents=True)
    stuffing = fill(disk, but=128 * 1024)
    with NatsServer(disk / "nats") as server:
        stuffing.unlink()
        queue = await connected(server.url)
        assert await publishes(queue, large=True)
        await queue.close()


async def test_a_nats_that_stores_nothing_after_a_full_disk_is_named_by_metric_and_log(
    disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that `quantdrift up` does not run: the sidecar can tell it from one that is away, and says what to do."""
    monkeypatch.setattr(publishing, "UNSTORED_S", 1)
    with NatsServer(disk / "nats") as server:
        config = Config(stream=Stream(url=server.url, max_bytes=SMALL_STREAM))
        slot = Counters.create(1, 1).slot(0)
        publisher = Publisher(config, slot, SystemClock(), publish_timeout_s=1.0)
        stop = Stop()
        running = asyncio.create_task(publisher.run(stop))
        publisher.put(exchange(0), 0)
        assert await publisher.drained(DEADLINE_S)
        assert slot.gauge(Gauge.UNSTORED_S) == 0
        stuffing = fill(disk)
        publisher.put(exchange(1, 200_000), 0)
        assert await publisher.drained(DEADLINE_S)
        stuffing.unlink()
        publisher.put(exchange(2), 0)
        assert await publisher.drained(DEADLINE_S)
        assert slot.gauge(Gauge.UNSTORED_S) >= 1
        assert slot.lost_count(0, Loss.PUBLISH) == 2
        (line,) = (record.getMessage() for record in caplog.records if record.levelname == "ERROR")
        assert f"NATS at {config.stream.address} is connected and has stored nothing for" in line
        server.stop()
        server.start()
        publisher.put(exchange(3), 0)
        assert await publisher.drained(DEADLINE_S)
        assert slot.gauge(Gauge.UNSTORED_S) == 0
        stop.set()
        await running
        await publisher.close()


def test_a_nats_that_hangs_is_ended_with_its_process(memory_path: Path) -> None:
    """It lives and does not answer."""
    with Runner("nats", memory_path / "nats", free_port()) as runner:
        runner.report()
        server = runner.server()
        server.suspend()
        error = runner.error()
        assert "it does not answer" in error
        assert error.rstrip().endswith("and was ended")
        assert not psutil.pid_exists(server.pid)


@pytest.mark.parametrize("part", ["postmaster", "one of its processes"])
async def test_a_postgres_that_hangs_is_ended_and_has_its_data_when_started_again(
    memory_path: Path, part: str
) -> None:
    """The postmaster or one other process lives and does nothing; nothing that was committed is lost."""
    port = free_port()
    with Runner("postgres", memory_path / "postgres", port) as runner:
        dsn = runner.report().address
        connection = await asyncpg.connect(dsn)
        await connection.execute("create table kept as select 42 as n")
        await connection.close()
        postmaster = runner.server()
        family = [postmaster, *postmaster.children()]
        (postmaster if part == "postmaster" else family[1]).suspend()
        error = runner.error()
        assert ("does not answer" if part == "postmaster" else f"process {family[1].pid} is stopped") in error
        assert psutil.wait_procs(family, timeout=DEADLINE_S)[1] == []
    with Runner("postgres", memory_path / "postgres", port) as runner:
        connection = await asyncpg.connect(runner.report().address)
        assert await connection.fetchval("select n from kept") == 42
        await connection.close()


def test_a_postgres_that_hangs_and_lost_its_owner_is_killed_by_the_next_one(memory_path: Path) -> None:
    """It was asked to end when its owner died, and cannot; it would keep its data for ever."""
    with Runner("postgres", memory_path / "postgres", free_port()) as runner:
        runner.report()
        orphan = runner.server()
        orphan.suspend()
        runner.process.kill()
        runner.process.wait()
        with PostgresServer(memory_path / "postgres", durable=False, stop_timeout_s=0.5) as server:
            assert server.alive()
            assert not psutil.pid_exists(orphan.pid) or orphan.status() == psutil.STATUS_ZOMBIE


def test_a_nats_that_hangs_does_not_outlive_its_owner(memory_path: Path) -> None:
    """It would keep the port, and write to the store of its successor later."""
    with Runner("nats", memory_path / "nats", free_port()) as runner:
        runner.report()
        server = runner.server()
        server.suspend()
        runner.process.kill()
        runner.process.wait()
        server.wait(DEADLINE_S)


def test_the_store_of_nats_may_be_as_large_as_its_disk(disk: Path) -> None:
    """What the stream may take is `stream.max_bytes` alone, unless it is larger than the disk."""
    with NatsServer(disk / "nats"):
        text = (disk / "nats" / "nats.conf").read_text()
    assert f"max_file_store: {112 * MIB}" in text
