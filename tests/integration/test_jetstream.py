"""The two streams on a real server."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec
import nats
import pytest
from nats.js.api import AckPolicy, ConsumerConfig, RetentionPolicy

from quantdrift.core.config.schema import Stream
from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.core.stream.backlog import read_backlog, read_waiting
from quantdrift.core.stream.config import exchange_stream
from quantdrift.core.stream.connection import Consumer, Queue, Readers, StreamFullError, TooLargeError
from quantdrift.core.stream.subjects import subject_token
from quantdrift.shadow.pipeline.in_flight import acknowledge

pytestmark = pytest.mark.integration


@pytest.fixture
def stream(nats_url: str) -> Stream:
    """Return a stream of this test's own."""
    return Stream(url=nats_url, name=f"t-{secrets.token_hex(6)}")


Connect = Callable[[Stream], Coroutine[Any, Any, Queue]]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Return a way to connect that disconnects after the test."""
    queues: list[Queue] = []

    async def connected(stream: Stream) -> Queue:
        queues.append(await Queue.connect(stream, client_name="test"))
        return queues[-1]

    yield connected
    for queue in queues:
        await queue.close()


async def test_an_exchange_is_delivered_once_and_then_gone(stream: Stream, connect: Connect) -> None:
    """Published, taken, acknowledged: with that the stream has forgotten its payload."""
    queue = await connect(stream)
    consumer = await queue.consumer("exchange", ack_wait_s=30)
    await queue.publish_exchange("a.b *>é", "id-1", b"payload")
    (delivery,) = await consumer.fetch(1, max_bytes=10_000, timeout_s=5)
    assert (delivery.data, delivery.n_delivered) == (b"payload", 1)
    assert delivery.subject == f"{stream.name}.exchange.a%2Eb%20%2A%3E%C3%A9"
    await delivery.in_progress()
    await delivery.ack()
    assert await consumer.pending() == 0
    client = await nats.connect(stream.url)
    info = await client.jetstream().stream_info(stream.name)
    await client.close()
    assert info.state.messages == 0


async def test_what_is_there_is_fetched_at_once_and_counted_until_it_is_acknowledged(
    stream: Stream, connect: Connect
) -> None:
    """Without a wait nothing is waited for, and another connection sees what one has in hand."""
    queue = await connect(stream)
    consumer = await queue.consumer("exchange", ack_wait_s=30)
    assert await consumer.fetch(2, max_bytes=10_000, timeout_s=0) == []
    for number in range(3):
        await queue.publish_exchange("m", f"id-{number}", b"payload")
    taken = await consumer.fetch(2, max_bytes=10_000, timeout_s=0)
    other = await (await connect(stream)).consumer("exchange", ack_wait_s=30)
    assert (len(taken), await other.unacknowledged(), await other.pending()) == (2, 2, 3)
    for delivery in taken:
        await delivery.ack()
    assert (await other.unacknowledged(), await other.pending()) == (0, 1)


async def test_who_waits_for_messages_is_seen_by_others(stream: Stream, connect: Connect) -> None:
    """A request counts until it has got its messages, or its connection ends; messages count until a worker has them."""
    queue, another = await connect(stream), await connect(stream)
    mine = await queue.consumer("exchange", ack_wait_s=30)
    other = await another.consumer("exchange", ack_wait_s=30)
    assert await mine.readers() == Readers(n_readers=0, n_pending=0)
    waiting = asyncio.create_task(other.fetch(1, max_bytes=1000, timeout_s=60))
    await _until(mine, Readers(n_readers=1, n_pending=0))
    for number in range(2):
        await queue.publish_exchange("m", f"id-{number}", b"payload")
    await waiting
    assert await mine.readers() == Readers(n_readers=0, n_pending=1)
    waiting = asyncio.create_task(other.fetch(5, max_bytes=1000, timeout_s=60))
    await _until(mine, Readers(n_readers=1, n_pending=0))
    waiting.cancel()
    await another.close()
    await _until(mine, Readers(n_readers=0, n_pending=0))


async def _until(consumer: Consumer, wanted: Readers) -> None:
    async with asyncio.timeout(20):
        while await consumer.readers() != wanted:
            await asyncio.sleep(0.02)


async def test_what_the_server_forgot_to_delete_does_not_wait(stream: Stream, connect: Connect) -> None:
    """After a full disk NATS keeps exchanges that were acknowledged. Nobody gets them again: they are done."""
    client = await nats.connect(stream.url)
    config = exchange_stream(stream)
    config.retention = RetentionPolicy.LIMITS  # acknowledged messages stay, as after a full disk
    await client.jetstream().add_stream(config)
    await client.close()
    queue = await connect(stream)
    consumer = await queue.consumer("exchange", ack_wait_s=30, model="m")
    for _ in range(3):
        await queue.publish_exchange("m", secrets.token_hex(16), b"wire")
    assert (await read_waiting(queue, []))["m"].n_messages == 3
    await acknowledge(await consumer.fetch(2, max_bytes=1000, timeout_s=5))
    backlog = await read_backlog(queue)
    assert (backlog.n_messages, backlog.by_model, backlog.n_done) == (1, {"m": 1}, 2)
    assert (await read_waiting(queue, []))["m"].n_messages == 1
    await acknowledge(await consumer.fetch(1, max_bytes=1000, timeout_s=5))
    backlog = await read_backlog(queue)
    assert (backlog.n_messages, backlog.oldest_s, backlog.n_ever) == (0, 0.0, 3)


async def test_the_same_id_is_stored_once(stream: Stream, connect: Connect) -> None:
    """A publish that is tried again after a lost acknowledgement doubles nothing."""
    queue = await connect(stream)
    for _ in range(3):
        await queue.publish_exchange("m", "same", b"x")
    assert await (await queue.consumer("exchange", ack_wait_s=30)).pending() == 1


async def test_a_full_stream_refuses_and_says_so(stream: Stream, connect: Connect) -> None:
    """New exchanges are refused, waiting ones stay, and room made by an acknowledgement is used."""
    stream = msgspec.structs.replace(stream, max_bytes=100_000)
    queue = await connect(stream)
    for i in range(9):
        await queue.publish_exchange("m", f"id-{i}", bytes(10_000))
    with pytest.raises(StreamFullError):
        await queue.publish_exchange("m", "id-9", bytes(10_000))
    consumer = await queue.consumer("exchange", ack_wait_s=30)
    assert await consumer.pending() == 9
    (first,) = await consumer.fetch(1, max_bytes=100_000, timeout_s=1)
    await first.ack()
    await queue.publish_exchange("m", "later", bytes(10_000))


async def test_limits_that_are_changed_reach_an_existing_stream(stream: Stream, connect: Connect) -> None:
    """`ensure` brings an older stream to the new configuration; one that is impossible is an operator's error."""
    queue = await connect(stream)
    await queue.ensure()
    await queue.ensure()
    smaller = await connect(msgspec.structs.replace(stream, max_bytes=50_000, max_age_s=60.0))
    await smaller.ensure()
    client = await nats.connect(stream.url)
    info = await client.jetstream().stream_info(stream.name)
    await client.close()
    assert (info.config.max_bytes, info.config.max_age) == (50_000, 60.0)
    impossible = await connect(msgspec.structs.replace(stream, replicas=3))
    with pytest.raises(OperatorError, match="replicas"):
        await impossible.ensure()


@pytest.mark.parametrize("is_there", [True, False])
async def test_copies_of_a_models_exchanges_come_to_who_asks(
    stream: Stream, connect: Connect, *, is_there: bool
) -> None:
    """Of this model alone, from then on, and workers still get each exchange; the limits of the stream stay."""
    queue = await connect(stream)
    if is_there:
        await queue.ensure()
        await queue.publish_exchange("m.1", "before", b"before")
    other = await connect(msgspec.structs.replace(stream, max_age_s=60.0))
    async with (other if is_there else queue).copies("m.1") as copies, asyncio.timeout(60):
        await queue.publish_exchange("other", "a", b"other")
        copy, n_published = None, 0
        while copy is None:  # the server may lose the first ones
            n_published += 1
            await queue.publish_exchange("m.1", f"b{n_published}", b"mine")
            copy = await copies.next(1.0)
        assert copy == b"mine"
        assert await copies.next(0.05) is None
    assert (await read_backlog(queue)).n_messages == 1 + n_published + is_there
    client = await nats.connect(stream.url)
    info = await client.jetstream().stream_info(stream.name)
    await client.close()
    assert info.config.max_age == stream.max_age_s


async def test_two_processes_may_create_the_streams_at_once(stream: Stream, connect: Connect) -> None:
    """However many start together with slightly different limits, each finds the streams afterwards."""
    queues = [await connect(msgspec.structs.replace(stream, max_bytes=1_000_000 + i % 2)) for i in range(6)]
    await asyncio.gather(*(queue.ensure() for queue in queues))
    await queues[0].publish_exchange("m", "id", b"x")


async def test_a_message_above_the_payload_limit_has_its_own_error(stream: Stream, connect: Connect) -> None:
    """The largest allowed passes; one byte more will never pass."""
    queue = await connect(stream)
    await queue.publish_exchange("m", "fits", bytes(queue.max_payload_bytes))
    with pytest.raises(TooLargeError):
        await queue.publish_exchange("m", "not", bytes(queue.max_payload_bytes + 1))


async def test_a_fetch_is_bounded_in_bytes(stream: Stream, connect: Connect) -> None:
    """The server sends no more than asked for; one message above the bound comes alone."""
    queue = await connect(stream)
    for i in range(6):
        await queue.publish_exchange("m", f"id-{i}", bytes(400_000))
    consumer = await queue.consumer("exchange", ack_wait_s=30)
    begun = time.monotonic()
    assert len(await consumer.fetch(10, max_bytes=1_000_000, timeout_s=5)) == 2
    assert len(await consumer.fetch(10, max_bytes=1_000, timeout_s=5)) == 1
    assert len(await consumer.fetch(2, max_bytes=16_000_000, timeout_s=5)) == 2
    assert time.monotonic() - begun < 4
    assert len(await consumer.fetch(10, max_bytes=16_000_000, timeout_s=0.1)) == 1
    assert await consumer.fetch(10, max_bytes=16_000_000, timeout_s=0.1) == []


async def test_all_exchanges_come_however_small_the_fetches(stream: Stream, connect: Connect) -> None:
    """Two workers with different bounds share the stream: each exchange goes to exactly one."""
    queue, other = await connect(stream), await connect(stream)
    ids = [f"id-{i}" for i in range(60)]
    await asyncio.gather(*(queue.publish_exchange("m", i, i.encode() + bytes(i == "id-7")) for i in ids))
    taken: list[str] = []

    async def work(owner: Queue, max_bytes: int) -> None:
        consumer = await owner.consumer("exchange", ack_wait_s=30)
        while found := await consumer.fetch(7, max_bytes=max_bytes, timeout_s=0.3):
            for delivery in found:
                taken.append(delivery.data.strip(b"\0").decode())
                await delivery.ack()

    await asyncio.gather(work(queue, 300), work(other, 100_000))
    assert sorted(taken) == sorted(ids)


async def test_what_is_given_back_comes_again_and_holds_nothing_up(stream: Stream, connect: Connect) -> None:
    """A delayed one lets the next pass; its deliveries are counted without a limit."""
    queue = await connect(stream)
    consumer = await queue.consumer("exchange", ack_wait_s=30)
    for name in (b"bad", b"good"):
        await queue.publish_exchange("m", name.decode(), name)
    seen: list[tuple[bytes, int]] = []
    while len(seen) < 8:
        for delivery in await consumer.fetch(1, max_bytes=10_000, timeout_s=1):
            seen.append((delivery.data, delivery.n_delivered))
            if delivery.data == b"bad":
                await delivery.nak(0.02)
            else:
                await delivery.ack()
    assert (b"good", 1) in seen[:3]
    assert [n for data, n in seen if data == b"bad"] == list(range(1, 8))


async def test_each_model_has_its_own_consumer(stream: Stream, connect: Connect) -> None:
    """It gets what was published for that model alone."""
    queue = await connect(stream)
    long = "m" * 300
    for model in ("a.b", "", long):
        await queue.publish_exchange(model, model or "none", model.encode())
    assert await queue.models() == {"a.b", "", long}
    for model in ("a.b", "", long):
        consumer = await queue.consumer("exchange", ack_wait_s=30, model=model)
        (delivery,) = await consumer.fetch(2, max_bytes=10_000, timeout_s=0.3)
        assert delivery.data.decode() == model
        await delivery.ack()
    assert await queue.models() == set()


async def test_a_confirmed_acknowledgement_covers_those_before_it(stream: Stream, connect: Connect) -> None:
    """Only the last of many is waited for: then the stream has forgotten all of them."""
    queue = await connect(stream)
    for number in range(200):
        await queue.publish_exchange("m", str(number), b"x")
    consumer = await queue.consumer("exchange", ack_wait_s=30, model="m")
    deliveries = await consumer.fetch(200, max_bytes=1 << 20, timeout_s=5)
    await acknowledge(deliveries)
    assert (len(deliveries), await consumer.pending()) == (200, 0)


async def test_only_the_last_tally_of_each_boot_is_kept(stream: Stream, connect: Connect) -> None:
    """Tallies are cumulative: a shadow that was away reads one per boot, the newest."""
    queue = await connect(stream)
    for boot in ("b1", "b2"):
        for sequence in (1, 2, 3):
            wire = f"{boot}-{sequence}".encode()
            await queue.publish_tally("pod.a", boot, sequence, wire)
    consumer = await queue.consumer("tally", ack_wait_s=30)
    found = await consumer.fetch(10, max_bytes=10_000, timeout_s=0.3)
    assert [delivery.data for delivery in found] == [b"b1-3", b"b2-3"]


async def test_streams_and_consumers_that_were_deleted_are_made_again(
    stream: Stream, connect: Connect
) -> None:
    """A publisher and a consumer go on after somebody has wiped the server's streams."""
    queue = await connect(stream)
    consumer = await queue.consumer("exchange", ack_wait_s=30)
    client = await nats.connect(stream.url)
    await client.jetstream().delete_stream(stream.name)
    await client.close()
    with pytest.raises(RetryError):
        await consumer.fetch(1, max_bytes=1000, timeout_s=0.2)
    await queue.publish_exchange("m", "id", b"x")
    assert len(await consumer.fetch(1, max_bytes=1000, timeout_s=1)) == 1


async def test_a_model_that_is_gone_leaves_no_consumer(stream: Stream, connect: Connect) -> None:
    """The server drops it once nobody has fetched for longer than exchanges are kept; who comes back misses nothing.

    A consumer that exists with other settings is updated.
    """
    queue = await connect(msgspec.structs.replace(stream, max_age_s=100_000.0))
    client = await nats.connect(stream.url)
    jetstream = client.jetstream()
    existing = ConsumerConfig(
        durable_name="shadow-m",
        filter_subject=f"{stream.name}.exchange.m",
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=30,
        max_deliver=-1,
        max_ack_pending=20_000,
    )
    await queue.ensure()
    await jetstream.add_consumer(stream.name, existing)
    consumer = await queue.consumer("exchange", ack_wait_s=30, model="m")
    assert not await consumer.fetch(1, max_bytes=1000, timeout_s=0.1)
    info = await jetstream.consumer_info(stream.name, "shadow-m")
    assert info.config.inactive_threshold == 100_000
    await queue.publish_exchange("m", "id", b"x")
    await jetstream.delete_consumer(stream.name, "shadow-m")
    await client.close()
    with pytest.raises(RetryError):
        await consumer.fetch(1, max_bytes=1000, timeout_s=1)
    assert len(await consumer.fetch(1, max_bytes=1000, timeout_s=1)) == 1


async def test_a_client_that_has_given_up_is_replaced(stream: Stream, connect: Connect) -> None:
    """The library closes for good on some answers of the server; publishing and fetching go on all the same."""
    queue = await connect(stream)
    consumer = await queue.consumer("exchange", ack_wait_s=30)
    await (await queue.live()).close()
    assert not queue.connected
    await queue.publish_exchange("m", "id", b"x")
    assert len(await consumer.fetch(1, max_bytes=1000, timeout_s=1)) == 1
    await queue.close()
    with pytest.raises(RetryError):
        await queue.publish_exchange("m", "id-2", b"x")


async def test_an_absent_server_is_passing_trouble(stream: Stream) -> None:
    """Connecting to nothing says so in words, and may be tried again."""
    nowhere = msgspec.structs.replace(stream, url="nats://127.0.0.1:9")
    with pytest.raises(RetryError, match=r"nats://127\.0\.0\.1:9 is not reachable"):
        await Queue.connect(nowhere, client_name="test")


def test_names_become_single_tokens_and_stay_apart() -> None:
    """What has a meaning in subjects is encoded; different names never meet."""
    names = ["a", "a.b", "a%2Eb", "a b", "a*", ">", "é", "", "a/b"]
    tokens = [subject_token(name) for name in names]
    assert len(set(tokens)) == len(names)
    assert not any(set(token) & set(".*> \t") or not token for token in tokens)
