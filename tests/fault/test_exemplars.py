"""Exemplars while something fails: they are counted as not kept, it is said once, and no comparison is lost."""

import asyncio
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from quantdrift.cli.admin import privacy
from quantdrift.core.clock import ManualClock, SystemClock
from quantdrift.core.codec import encode
from quantdrift.core.config.schema import Config, Model, Reference
from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.core.keys import Key, KeyFile, KeyRing, write_keys
from quantdrift.core.process.nats_server import MAX_PAYLOAD_BYTES, NatsServer, make_encryption
from quantdrift.core.records import Exchange, Exemplar
from quantdrift.core.sealing import envelope_of
from quantdrift.core.stream import config as stream_config
from quantdrift.core.stream.config import EXEMPLARS_EACH
from quantdrift.core.stream.connection import Consumer, Queue
from quantdrift.core.stream.exemplars import KeptExemplar, delete_exemplars, kept_exemplars
from quantdrift.release.diagnose.exemplars import exemplars, opener
from quantdrift.shadow.pipeline import exemplars as keeping
from quantdrift.shadow.pipeline.exemplars import ExemplarKeeper, Offer, Sink
from quantdrift.storage.comparisons.rows import ComparedExchange
from tests.fault.test_embedded_servers import disk, fill  # noqa: F401 - a fixture
from tests.support.commands import invoked
from tests.support.nats_cluster import NatsCluster
from tests.support.shadow.compared_exchanges import compared_of, item_of
from tests.support.shadow.onnx_models import (
    exchange_of,
    inputs_of,
    linear_model,
    logits_of,
    model_of,
    saved,
)
from tests.support.shadow.shadow_workers import published, serving, worker_config

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]

DEADLINE_S = 60.0
NOT_KEPT = "exemplars are not kept"


@pytest.fixture
def config(tmp_path: Path, nats_url: str) -> Config:
    """Return a configuration with a model that keeps exemplars."""
    path = saved(linear_model(), tmp_path / "fp32.onnx")
    return worker_config(
        nats_url, [Model(name="digits", exemplars=True, references=(Reference(path=str(path)),))]
    )


def at(config: Config, url: str, **options: object) -> Config:
    """Return the configuration with another server."""
    return msgspec.structs.replace(config, stream=msgspec.structs.replace(config.stream, url=url, **options))


def flipped(seed: int) -> Exchange:
    """Return an exchange of one item whose answer changes."""
    x = inputs_of(1, seed)
    return exchange_of(x, -logits_of(x))


async def until(ask: Callable[[], Awaitable[bool]]) -> None:
    """Wait until it is so."""
    until_s = time.monotonic() + DEADLINE_S
    while not await ask():
        assert time.monotonic() < until_s, "it did not happen in time"
        await asyncio.sleep(0.02)


async def n_compared(dsn: str) -> int:
    """Return the number of exchanges that are compared."""
    connection = await asyncpg.connect(dsn)
    try:
        return int(await connection.fetchval("select count(distinct exchange_id) from comparison"))
    finally:
        await connection.close()


async def all_compared(dsn: str, number: int) -> None:
    """Wait until so many exchanges are compared."""

    async def are() -> bool:
        return await n_compared(dsn) >= number

    await until(are)
    assert await n_compared(dsn) == number


async def kept_of(queue: Queue) -> list[KeptExemplar]:
    """Return what is kept, with its payload."""
    return [one async for one in kept_exemplars(queue, payload=True)]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what was said about exemplars."""
    return [one.getMessage() for one in caplog.records if NOT_KEPT in one.getMessage()]


def write(config: Config, directory: Path) -> None:
    """Write the configuration for commands and processes."""
    (directory / "config.toml").write_text(f"""
[stream]
url = "{config.stream.url}"
name = "{config.stream.name}"
payload_key_file = "{config.stream.payload_key_file}"
[shadow]
threads = 1
batch_items = 8
ack_wait_s = 5
admin = "127.0.0.1:0"
[[models]]
name = "digits"
exemplars = true
[[models.references]]
path = "fp32.onnx"
""")


class Counting:
    """A keeper with a real queue, and what it has counted."""

    def __init__(self, config: Config, sink: Sink, keys: KeyFile | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self.keeper = ExemplarKeeper(config, sink, SystemClock(), keys=keys, count=self._count)

    def _count(self, _model: str, outcome: str, number: int) -> None:
        self.counts[outcome] += number

    async def keep(self, *compared: ComparedExchange) -> Counter[str]:
        """Offer a batch, wait until it is done, and return what was counted of it."""
        self.counts.clear()
        self.keeper.offer(
            Offer(
                compared=compared or [compared_of(item_of(flip=True))],
                outputs={1: {}},
                without_place=frozenset(),
                at=datetime.now(UTC),
            )
        )
        await asyncio.wait_for(self.keeper.keep_one(), DEADLINE_S)
        return self.counts


@asynccontextmanager
async def queue_of(config: Config, publish_timeout_s: float = 5.0) -> AsyncIterator[Queue]:
    """Return a connection."""
    queue = await Queue.connect(config.stream, client_name="test", publish_timeout_s=publish_timeout_s)
    try:
        yield queue
    finally:
        await queue.close()


async def test_a_full_disk_costs_exemplars_and_no_waiting_exchange(
    config: Config,
    postgres_dsn: str,
    disk: Path,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What waits is compared. The outcome is `unavailable` until the server is restarted, because it answers nothing."""
    with NatsServer(disk / "nats", store_bytes=1 << 40) as server:
        full = at(config, server.url, max_bytes=8 << 20)
        async with serving(full, postgres_dsn):
            connection = await asyncpg.connect(postgres_dsn)
            async with connection.transaction():
                await connection.execute("lock table comparison")  # the worker reads, and stores nothing yet
                queue = await published(full, [flipped(seed) for seed in range(20)])
                await queue.ensure_exemplars()
                consumer = await queue.consumer("exchange", ack_wait_s=30, model="digits")
                await until(lambda: _all_taken(consumer))
                stuffing = fill(disk)
            await all_compared(postgres_dsn, 20)
            await until(lambda: _is(bool(warnings_of(caplog))))
            await connection.close()
            await queue.close()
        (said,) = warnings_of(caplog)
        assert "no acknowledgement" in said
        stuffing.unlink()
        server.stop()
        server.start()
        async with queue_of(full) as queue:
            assert (await Counting(full, queue).keep())["stored"] == 2


async def _all_taken(consumer: Consumer) -> bool:
    return await consumer.pending() == await consumer.unacknowledged() == 20


async def _is(found: bool) -> bool:  # noqa: FBT001
    return found


async def test_on_a_full_disk_an_erasure_says_that_nothing_is_erased(config: Config, disk: Path) -> None:  # noqa: F811
    """Not `0 exemplars are erased`; once the server works again, they are erased."""
    with NatsServer(disk / "nats", store_bytes=1 << 40) as server:
        async with queue_of(at(config, server.url, max_bytes=8 << 20), publish_timeout_s=1.0) as queue:
            await queue.ensure_exemplars()
            for number in range(3):
                await queue.publish_exemplar("digits", "all", "random", f"{number}", b"payload")
            stuffing = fill(disk)
            with pytest.raises(RetryError):
                await queue.publish_exemplar("digits", "all", "random", "large", os.urandom(1 << 20))
            found = await kept_of(queue)
            assert len(found) == 3
            with pytest.raises(RetryError, match=r"0 of 3 are erased .*no space left on device"):
                await delete_exemplars(queue, found)
            stuffing.unlink()
            server.stop()
            server.start()
        async with queue_of(at(config, server.url)) as queue:
            assert await delete_exemplars(queue, found) == 3
            assert await delete_exemplars(queue, found) == 0  # gone already


@asynccontextmanager
async def cluster_of(config: Config, directory: Path) -> AsyncIterator[tuple[NatsCluster, Config]]:
    """Start a cluster, and return the configuration for it once it has its streams."""
    with NatsCluster(directory) as cluster:
        three = at(config, cluster.url, replicas=3)

        async def is_ready() -> bool:
            try:
                async with queue_of(three) as queue:
                    await queue.ensure()
            except (RetryError, OperatorError):  # until the servers have chosen a leader
                return False
            return True

        await until(is_ready)
        yield cluster, three


async def leader_of(queue: Queue) -> int:
    """Return the number of the server that leads the stream of exemplars, which all three have."""
    info = await (await queue.live()).jetstream().stream_info(queue.stream_name("exemplar"))
    assert info.config.num_replicas == 3
    assert info.cluster is not None
    return int(str(info.cluster.leader))


async def test_a_server_of_a_cluster_that_is_killed_costs_no_comparison_and_no_kept_exemplar(
    config: Config, postgres_dsn: str, tmp_path: Path
) -> None:
    """While the stream has no leader exemplars are dropped; with the next one they are kept again."""
    async with cluster_of(config, tmp_path) as (cluster, three), serving(three, postgres_dsn) as queue:
        given: list[Exchange] = []

        async def publishes() -> bool:
            exchange = flipped(len(given))
            try:
                await queue.publish_exchange(exchange.model, exchange.id, encode(exchange))
            except RetryError:
                return False
            given.append(exchange)
            return True

        async def n_kept() -> int:
            try:
                return len(await kept_of(queue))
            except RetryError:
                return -1

        for _ in range(5):
            await until(publishes)
        await all_compared(postgres_dsn, 5)
        await until(lambda: _is_more(n_kept, 0))
        kept = {one.sequence for one in await kept_of(queue)}
        cluster.kill(await leader_of(queue))
        for _ in range(5):
            await until(publishes)

        async def is_kept() -> bool:
            return await publishes() and await n_kept() > len(kept)

        await until(is_kept)
        assert kept <= {one.sequence for one in await kept_of(queue)}
        await all_compared(postgres_dsn, len(given))


async def test_with_one_server_of_three_exemplars_are_dropped_until_another_is_back(
    config: Config, tmp_path: Path
) -> None:
    """A batch costs one wait, and not one for each exemplar."""
    async with cluster_of(config, tmp_path) as (cluster, three), queue_of(three, 1.0) as queue:
        counting = Counting(three, queue)
        assert (await counting.keep())["stored"] == 2
        leader = await leader_of(queue)
        for number in {0, 1, 2} - {leader}:
            cluster.kill(number)
        batch = [compared_of(item_of(flip=True)) for _ in range(20)]
        assert set(await counting.keep(*batch)) == {"unavailable"}
        cluster.start((leader + 1) % 3)

        async def stores_again() -> bool:
            return (await Counting(three, queue).keep())["stored"] > 0  # whose allowance is not used up

        await until(stores_again)


async def _is_more(ask: Callable[[], Awaitable[int]], than: int) -> bool:
    return await ask() > than


N_WIDE = 1_500_000


def wide_model() -> ModelProto:
    """Return a model whose answer is a line through the mean of an item of 6 MB."""
    graph = helper.make_graph(
        [
            helper.make_node("ReduceMean", ["x", "axes"], ["mean"], keepdims=1),
            helper.make_node("Mul", ["mean", "w"], ["logits"]),
        ],
        "wide",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", "width"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 3])],
        [
            numpy_helper.from_array(np.array([1], np.int64), "axes"),
            numpy_helper.from_array(np.array([[1.0, 2.0, 3.0]], np.float32), "w"),
        ],
    )
    return model_of(graph)


async def test_large_tensors_are_kept_up_to_the_limit_of_the_server(
    config: Config, postgres_dsn: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An exchange of 6 MB is kept; one that just fits is compared, and is too large together with the reference's answer."""
    path = saved(wide_model(), tmp_path / "wide.onnx")
    (model,) = config.models
    wide = msgspec.structs.replace(
        config, models=(msgspec.structs.replace(model, references=(Reference(path=str(path)),)),)
    )

    def exchange(n_values: int) -> Exchange:
        x = np.ones((1, n_values), np.float32)
        return exchange_of(x, np.array([[3.0, 2.0, 1.0]], np.float32))

    kept = [exchange(N_WIDE) for _ in range(3)]
    overhead = len(encode(exchange(1))) + 64  # lengths of larger numbers, and the headers
    largest = [exchange((MAX_PAYLOAD_BYTES - 512 - overhead) // 4) for _ in range(2)]
    async with serving(wide, postgres_dsn) as queue:
        await queue.ensure()

        async def read() -> list[Exemplar]:
            return [one async for one in exemplars(queue, "digits", "all", opened=opener(wide.stream))]

        async def are_kept(n: int) -> bool:
            return {one.exchange.id for one in await read()} == {one.id for one in kept[:n]}

        # One after another: a batch that comes while an earlier one waits for its place is not looked at.
        for n, one in enumerate((*kept, *largest), 1):
            await queue.publish_exchange(one.model, one.id, encode(one))
            await all_compared(postgres_dsn, n)
            await until(partial(are_kept, n))
        await until(lambda: _is(bool(warnings_of(caplog))))
        found = await read()
    assert all(len(one.exchange.inputs[0].data) == 4 * N_WIDE for one in found)
    (said,) = warnings_of(caplog)
    assert "some exemplars are not kept: the message is larger than the server's `max_payload`" in said


@pytest.mark.release
async def test_a_shadow_that_is_killed_while_it_writes_costs_exemplars_alone(
    config: Config, postgres_dsn: str, tmp_path: Path
) -> None:
    """Every exchange is compared once, and every exemplar that was stored can be read."""
    write(config, tmp_path)
    n_given = 100
    queue = await published(config, [flipped(seed) for seed in range(n_given)])
    shadow = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "quantdrift", "shadow"),
        cwd=tmp_path,
        env={**os.environ, "QUANTDRIFT_DSN": postgres_dsn},
    )
    try:

        async def n_kept() -> int:
            return len([one async for one in kept_exemplars(queue)])

        await until(lambda: _is_more(n_kept, 0))
    finally:
        shadow.kill()
        await shadow.wait()
    n_kept_then, n_then = await n_kept(), await n_compared(postgres_dsn)
    assert n_then < n_given
    assert n_kept_then < 2 * EXEMPLARS_EACH
    waits_less = msgspec.structs.replace(config.shadow, ack_wait_s=5.0)
    async with serving(msgspec.structs.replace(config, shadow=waits_less), postgres_dsn):
        await all_compared(postgres_dsn, n_given)
        await until(lambda: _is_more(n_kept, n_kept_then))
    connection = await asyncpg.connect(postgres_dsn)
    assert await connection.fetchval("select count(*) from comparison") == n_given
    await connection.close()
    problems: list[str] = []
    found = [
        one
        async for one in exemplars(
            queue, "digits", "all", opened=opener(config.stream), unreadable=problems.append
        )
    ]
    assert len(found) == len(await kept_of(queue))
    assert problems == []
    assert len({(one.exchange.id, one.kind) for one in found}) == len(found)
    await queue.close()


async def test_a_new_payload_key_holds_for_new_exemplars_and_a_removed_one_costs_the_old(
    config: Config, postgres_dsn: str, tmp_path: Path
) -> None:
    """The shadow takes over a new key while it runs. Without the old one the others are still read, and an erasure says what to do."""
    file, now = tmp_path / "payload.key", datetime.now(UTC)
    old, new = Key.create(now), Key.create(now, 0.001)
    write_keys(file, KeyRing(keys=(old,)), is_new=True)
    sealed = at(config, config.stream.url, payload_key_file=str(file))
    keys = KeyFile.of(str(file), "stream.payload_key_file", SystemClock())
    async with queue_of(sealed) as queue:
        await queue.ensure()
        counting = Counting(sealed, queue, keys)
        await counting.keep()
        write_keys(file, KeyRing(keys=(old, new)))

        async def is_new() -> bool:
            await counting.keep()
            return envelope_of((await kept_of(queue))[-1].data).key_id == new.id

        await until(is_new)
        n_kept = len(await kept_of(queue))
        n_old = sum(envelope_of(one.data).key_id == old.id for one in await kept_of(queue))
        assert n_old >= 2

        async def read(problems: list[str]) -> int:
            of_slice = exemplars(
                queue,
                "digits",
                "scanner=archive",
                opened=opener(sealed.stream),
                unreadable=problems.append,
            )
            return len([one async for one in of_slice])

        assert await read([]) == n_kept
        write_keys(file, KeyRing(keys=(new,)))
        problems: list[str] = []
        assert await read(problems) == n_kept - n_old
        assert len(problems) == n_old
    write(sealed, tmp_path)
    arguments = ("privacy", "find", "trace", secrets.token_hex(16))
    searched = await asyncio.to_thread(invoked, *arguments, directory=tmp_path, QUANTDRIFT_DSN=postgres_dsn)
    assert searched.returncode == 2
    assert f"{n_old} encrypted exchanges cannot be searched" in searched.stderr
    assert "`quantdrift exemplars erase`" in searched.stderr


def test_the_key_of_the_disk_is_changed_with_the_old_one_beside_it(tmp_path: Path) -> None:
    """As the manual says: exemplars stay, and after one start the old key is not needed any more."""
    server = NatsServer(tmp_path / "nats", store_bytes=1 << 40)
    key_file = make_encryption(server.directory)

    async def n_kept(publish: str = "") -> int:
        async with queue_of(at(worker_config(server.url, []), server.url, name="qd")) as queue:
            if publish:
                await queue.ensure_exemplars()
                await queue.publish_exemplar("digits", "all", "random", publish, b"payload")
            return len(await kept_of(queue))

    def restarted() -> None:
        server.stop()
        server.start()

    server.start()
    assert asyncio.run(n_kept("first")) == 1
    old = key_file.read_text().split('"')[1]
    new = secrets.token_hex(32)
    key_file.write_text(f'cipher: aes\nkey: "{new}"\nprev_key: "{old}"\n')
    restarted()
    assert asyncio.run(n_kept("second")) == 2
    key_file.write_text(f'cipher: aes\nkey: "{new}"\n')
    restarted()
    assert asyncio.run(n_kept()) == 2
    key_file.write_text(f'cipher: aes\nkey: "{secrets.token_hex(32)}"\n')
    restarted()
    assert asyncio.run(n_kept()) == 0
    assert "unable to recover keys" in server.log.read_text()
    server.stop()


class HeldSink:
    """The real stream, whose next exemplars wait until they may go."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self.arrived, self.may_go = asyncio.Event(), asyncio.Event()

    @property
    def max_payload_bytes(self) -> int:
        """Size of the longest message."""
        return self._queue.max_payload_bytes

    async def ensure_exemplars(self) -> None:
        """Create the stream."""
        await self._queue.ensure_exemplars()

    async def publish_exemplar(self, *of: Any) -> None:
        """Store an exemplar once it may go."""
        self.arrived.set()
        await self.may_go.wait()
        await self._queue.publish_exemplar(*of)


@pytest.mark.parametrize("in_time", [True, False])
async def test_an_erasure_waits_for_exemplars_that_a_worker_still_stores(
    config: Config, postgres_dsn: str, monkeypatch: pytest.MonkeyPatch, *, in_time: bool
) -> None:
    """What a worker stores in its time is erased as well, and after that time it stores nothing."""
    monkeypatch.setattr(keeping, "LONGEST_S", DEADLINE_S if in_time else 1.0)
    stored, waits = (compared_of(item_of(flip=True)) for _ in range(2))
    trace = f"00-{secrets.token_hex(16)}-00f067aa0ba902b7-01"
    stored, waits = (
        msgspec.structs.replace(one, exchange=msgspec.structs.replace(one.exchange, trace=trace))
        for one in (stored, waits)
    )
    clock = CountedClock()
    task = privacy._Task(config, postgres_dsn, privacy.wanted_of(config, "trace", trace))
    async with queue_of(config) as queue:
        await queue.ensure()
        assert (await Counting(config, queue).keep(stored))["stored"] == 2
        sink = HeldSink(queue)
        storing = asyncio.create_task(Counting(config, sink).keep(waits))
        if in_time:
            await sink.arrived.wait()
        erasing = asyncio.create_task(
            asyncio.to_thread(lambda: asyncio.run(privacy._erase(task, [], "", lambda _step: None, clock)))
        )
        await until(lambda: _is_none(queue))  # it has searched for the first time
        if in_time:
            sink.may_go.set()
        counts = await storing
        await clock.was_read()  # the time of its wait has begun
        clock.advance(stream_config.LONGEST_S)  # what was sent in the last moment has not arrived yet
        for _ in range(2):
            await clock.was_read()
        assert not erasing.done(), "it waits until everything that was sent has arrived"
        clock.advance(privacy._SENT_S)
        erased = await erasing
        sink.may_go.set()
        assert await kept_of(queue) == []
    assert counts == ({"stored": 2} if in_time else {"late": 2})
    assert not erased.left
    places = {place.place: place.n for place in erased.places}
    assert places["exemplars"] == (4 if in_time else 2)


class CountedClock(ManualClock):
    """A clock that the test moves, and that tells when it was read again."""

    def __init__(self) -> None:
        super().__init__(datetime.now(UTC))
        self._n_read = 0

    def monotonic_s(self) -> float:
        """Return the seconds advanced so far."""
        self._n_read += 1
        return super().monotonic_s()

    async def was_read(self) -> None:
        """Wait until somebody has read it once more."""
        n_read = self._n_read

        async def is_read() -> bool:
            return self._n_read > n_read

        await until(is_read)


async def _is_none(queue: Queue) -> bool:
    return not await kept_of(queue)
