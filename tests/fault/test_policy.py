"""What becomes of the sampling policy when the monitor or NATS is killed."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest

from quantdrift.core.clock import ManualClock
from quantdrift.core.config.schema import Stream
from quantdrift.core.errors import RetryError
from quantdrift.core.process.nats_server import NatsServer
from quantdrift.core.sampling.policy_message import POLICY_KEY, PolicyMessage, decode_policy_message, encode
from quantdrift.core.stream.connection import Queue
from quantdrift.core.stream.keyvalue import KeyValue
from tests.support.monitor.policy_record import N_CALM, after, calm, maker_process, prepare, store_and_fold
from tests.support.monitor.policy_record import on as record_on
from tests.support.sidecar.policy_messages import BEGIN, CONFIG, directive
from tests.support.sidecar.policy_path import Pod, following
from tests.support.sidecar.relay_rig import until

pytestmark = pytest.mark.fault


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    """Return a server of this test's own, to be killed."""
    with NatsServer(tmp_path / "nats") as made:
        yield made


async def eventually(work: Callable[[], Awaitable[object]]) -> None:
    """Do something that NATS is needed for, however long it is away."""
    async with asyncio.timeout(30):
        while True:
            try:
                await work()
            except RetryError:
                await asyncio.sleep(0.05)
            else:
                return


async def test_a_sidecar_follows_through_an_outage_of_nats(server: NatsServer, tmp_path: Path) -> None:
    """While NATS is away the last directive holds for its time; when it is back the next is followed."""
    stream = Stream(url=server.url)
    clock = ManualClock(BEGIN)
    pod = Pod(tmp_path / "pod", msgspec.structs.replace(CONFIG, stream=stream), clock)
    queue = await Queue.connect(stream, client_name="test")
    bucket = KeyValue(queue, stream, 86_400.0)
    first, second = directive(0.5, 1.0, 0.125, 0.0625), directive(0.5, 0.5, 0.5, 0.5)
    async with following(pod, queue):
        await bucket.put(POLICY_KEY, encode(first))
        await until(lambda: pod.follows(first))
        server.kill()
        await until(lambda: not queue.connected)
        clock.advance(899.0)
        assert pod.follows(first)
        server.start()
        await eventually(
            lambda: bucket.put(POLICY_KEY, encode(msgspec.structs.replace(second, issued_at=clock.now())))
        )
        await until(lambda: pod.follows(second))
        server.kill()
        await until(lambda: not queue.connected)
        clock.advance(900.0)
        assert pod.is_local()
        server.start()
        await eventually(
            lambda: bucket.put(POLICY_KEY, encode(msgspec.structs.replace(second, issued_at=clock.now())))
        )
        await until(lambda: pod.follows(second))
    await queue.close()


async def test_a_value_that_changes_before_a_watcher_has_reconnected_is_seen_at_once(
    server: NatsServer,
) -> None:
    """The message is gone by then, so the watcher reads the value when its connection is back, not half a minute later."""
    stream = Stream(url=server.url)
    queue = await Queue.connect(stream, client_name="watcher")
    seen: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def watch() -> None:
        async with aclosing(KeyValue(queue, stream).watch(POLICY_KEY)) as entries:
            async for entry in entries:
                seen.put_nowait(None if entry is None else entry.value)

    async def value(wanted: bytes) -> None:
        while await seen.get() != wanted:
            pass

    async def put(given: bytes) -> None:
        other = await Queue.connect(stream, client_name="another")
        try:
            await KeyValue(other, stream, 86_400.0).put(POLICY_KEY, given)
        finally:
            await other.close()

    await put(b"0")
    watching = asyncio.create_task(watch())
    async with asyncio.timeout(60):
        await value(b"0")
    for n in range(3):  # the watcher reconnects once a second: it is hardly ever the first three times
        server.kill()
        await until(lambda: not queue.connected)
        server.start()
        given = b"%d" % (n + 1)
        await eventually(lambda given=given: put(given))  # type: ignore[misc]
        await until(lambda: queue.connected)
        async with asyncio.timeout(20):  # below the half minute in which it looks anyway
            await value(given)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await queue.close()


@pytest.mark.release
async def test_a_killed_monitor_costs_no_policy(
    postgres_dsn: str, server: NatsServer, tmp_path: Path
) -> None:
    """The sidecars go on with the last directive; the next monitor confirms it as it was, also after NATS was killed."""
    stream = Stream(url=server.url)
    await prepare(postgres_dsn)
    await store_and_fold(postgres_dsn, calm())
    queue = await Queue.connect(stream, client_name="test")
    bucket, clock = KeyValue(queue, stream), ManualClock(after(N_CALM))
    pod = Pod(tmp_path / "pod", record_on(stream), clock)

    async def given() -> PolicyMessage | None:
        try:
            entry = await bucket.get(POLICY_KEY)
        except RetryError:
            return None
        return decode_policy_message(entry.value) if entry else None

    async def issued(at: ManualClock) -> PolicyMessage:
        async with asyncio.timeout(60):
            while True:
                found = await given()
                if found is not None and found.issued_at == at.now():
                    return found
                await asyncio.sleep(0.05)

    async with following(pod, queue):
        async with maker_process(postgres_dsn, stream, clock.now()) as process:
            first = await issued(clock)
            process.kill()
            assert await process.wait() == -9
        await until(lambda: pod.follows(first))
        server.kill()
        await until(lambda: not queue.connected)
        clock.advance(600.0)
        server.start()
        async with maker_process(postgres_dsn, stream, clock.now()) as process:
            second = await issued(clock)
            process.terminate()
            assert await process.wait() == 0
        await until(lambda: pod.follows(second))
    assert second.policy == first.policy
    await queue.close()
