"""The policy's way over a real NATS: into the bucket, to the capture process, to the relay workers."""

import asyncio
import json
import secrets
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import msgspec
import pytest
from click.testing import CliRunner

from quantdrift.cli.main import main
from quantdrift.core.clock import ManualClock
from quantdrift.core.codec import decode_exchange
from quantdrift.core.config.schema import Config, Stream
from quantdrift.core.process.run import Stop
from quantdrift.core.records import Exchange
from quantdrift.core.sampling.policy_message import (
    MAX_BYTES,
    POLICY_KEY,
    SUMMARY_KEY,
    PlannedSlice,
    PolicySummary,
    encode,
)
from quantdrift.core.stream.connection import Queue
from quantdrift.core.stream.keyvalue import Entry, KeyValue
from quantdrift.sidecar.state.counters import POLICY_REFUSALS, Gauge
from tests.support.sidecar.policy_messages import BEGIN, CONFIG, directive
from tests.support.sidecar.policy_path import Pod, following
from tests.support.sidecar.raw_exchanges import REQUEST, RESPONSE
from tests.support.sidecar.relay_process import Backend, SidecarProcess, sidecar, wait
from tests.support.sidecar.relay_rig import post, until

pytestmark = pytest.mark.integration

BODY = json.dumps(REQUEST).encode()


@pytest.fixture
def stream(nats_url: str) -> Stream:
    """Return a stream of this test's own."""
    return Stream(url=nats_url, name=f"t-{secrets.token_hex(6)}")


@pytest.fixture
async def queue(stream: Stream) -> AsyncIterator[Queue]:
    """Return a connection."""
    made = await Queue.connect(stream, client_name="test")
    yield made
    await made.close()


@pytest.fixture
def backend(backend: Backend) -> Backend:
    """Return a backend that answers as a model does."""
    backend.reply = lambda _: json.dumps(RESPONSE).encode()
    return backend


def on(stream: Stream, **sampling: object) -> Config:
    """Return the tests' configuration on this stream."""
    changed = msgspec.structs.replace(CONFIG.sampling, **sampling)
    return msgspec.structs.replace(CONFIG, stream=stream, sampling=changed)


async def test_a_watcher_sees_what_is_there_and_every_change(queue: Queue, stream: Stream) -> None:
    """Nothing at first, then each value; a key that is deleted, and a bucket that is gone and made anew."""
    bucket, seen = KeyValue(queue, stream, 60.0), asyncio.Queue[Entry | None]()

    async def watch() -> None:
        async with aclosing(KeyValue(queue, stream).watch(POLICY_KEY)) as entries:
            async for entry in entries:
                await seen.put(entry)

    async with asyncio.timeout(20):
        watching = asyncio.create_task(watch())
        assert await seen.get() is None
        assert await bucket.put(POLICY_KEY, b"1") == 1
        assert await seen.get() == Entry(value=b"1", revision=1)
        await bucket.put("another", b"x")
        assert await bucket.put(POLICY_KEY, b"2") == 3
        assert await seen.get() == Entry(value=b"2", revision=3)
        jetstream = (await queue.live()).jetstream()
        store = await jetstream.key_value(bucket.name)
        assert (await store.get(POLICY_KEY)).value == b"2"  # as any client of NATS sees it
        await store.delete(POLICY_KEY)
        assert await seen.get() is None
        await jetstream.delete_stream(f"KV_{bucket.name}")
        assert await bucket.get(POLICY_KEY) is None
        await bucket.put(POLICY_KEY, b"3")
        assert await seen.get() == Entry(value=b"3", revision=1)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_the_bucket_is_bounded(queue: Queue, stream: Stream) -> None:
    """One value per key, a time to live, a largest value, and as many bytes as were said; limits follow the option."""
    for ttl_s in (60.0, 30.0):
        bucket = KeyValue(queue, stream, ttl_s)
        await bucket.put(POLICY_KEY, b"1")
        info = await (await queue.live()).jetstream().stream_info(f"KV_{bucket.name}")
        assert (info.config.max_age, info.config.max_msgs_per_subject) == (ttl_s, 1)
        assert (info.config.max_msg_size, info.config.max_bytes) == (MAX_BYTES + 1024, 2**20)


async def test_a_directive_reaches_the_relay_worker_and_lapses(
    queue: Queue, stream: Stream, tmp_path: Path
) -> None:
    """Followed as long as it is confirmed; with the bucket gone the configuration's rates hold after valid_s."""
    clock = ManualClock(BEGIN)
    pod, bucket = Pod(tmp_path, on(stream), clock), KeyValue(queue, stream, 60.0)
    assert pod.is_local()
    async with following(pod, queue):
        given = directive(0.5, 1.0, 0.125, 0.0625)
        await bucket.put(POLICY_KEY, encode(given))
        await until(lambda: pod.follows(given))
        clock.advance(600.0)
        confirmed = msgspec.structs.replace(given, issued_at=clock.now())
        await bucket.put(POLICY_KEY, encode(confirmed))
        await until(lambda: pod.slot.gauge(Gauge.POLICY_ISSUED_S) == int(clock.now().timestamp()))
        assert pod.follows(given)
        assert pod.slot.gauge(Gauge.POLICY_CHANGES) == 1
        await (await queue.live()).jetstream().delete_stream(f"KV_{bucket.name}")
        clock.advance(899.0)
        assert pod.follows(given)
        clock.advance(1.0)
        assert pod.is_local()
        assert pod.slot.gauge(Gauge.POLICY_STALE) == 1
        assert pod.slot.gauge(Gauge.POLICY_CHANGES) == 2
        assert pod.slot.gauge(Gauge.POLICY_ISSUED_S) == 0
        again = msgspec.structs.replace(given, issued_at=clock.now())
        await bucket.put(POLICY_KEY, encode(again))
        await until(lambda: pod.follows(again))


async def test_what_is_refused_leaves_the_configurations_rates(
    queue: Queue, stream: Stream, tmp_path: Path
) -> None:
    """Garbage, another fleet's strata and a wrong clock: each counted by its reason, and a good one is followed."""
    pod, bucket = Pod(tmp_path, on(stream), ManualClock(BEGIN)), KeyValue(queue, stream, 60.0)
    good = directive(0.5, 1.0, 0.125, 0.0625)
    other = directive(0.5, config=Config())
    bad = {
        Gauge.POLICY_UNREADABLE: b"garbage",
        Gauge.POLICY_STRATA: encode(other),
        Gauge.POLICY_RATES: encode(directive(0.5, 1.0, 2.0, 0.0625)),
        Gauge.POLICY_STALE: encode(directive(0.5, 1.0, 0.125, 0.0625, valid_s=0.0)),
        Gauge.POLICY_EARLY: encode(msgspec.structs.replace(good, issued_at=datetime(2027, 1, 1, tzinfo=UTC))),
    }
    async with following(pod, queue):
        for gauge, wire in bad.items():
            await bucket.put(POLICY_KEY, encode(good))
            await until(lambda: pod.follows(good))
            await bucket.put(POLICY_KEY, wire)
            await until(pod.is_local)
            assert pod.slot.gauge(gauge) == 1
        await bucket.put(POLICY_KEY, encode(good))
        await until(lambda: pod.follows(good))
    assert sum(pod.slot.gauge(gauge) for gauge in bad) == len(bad)


async def test_two_sidecars_with_one_salt_take_the_same_users(
    queue: Queue, stream: Stream, tmp_path: Path
) -> None:
    """Under a directive as under the configuration; the users change with the directive."""
    config, clock = on(stream, sticky_header="X-User", rate=0.5), ManualClock(BEGIN)
    pods = [Pod(tmp_path / name, config, clock) for name in ("a", "b")]

    def taken(pod: Pod) -> set[int]:
        return {user for user in range(200) if pod.takes(user)}

    before = taken(pods[0])
    assert before == taken(pods[1])
    given = directive(1.0, 1.0, 1.0, 0.5)
    async with following(pods[0], queue), following(pods[1], queue):
        await KeyValue(queue, stream, 60.0).put(POLICY_KEY, encode(given))
        await until(lambda: all(pod.follows(given) for pod in pods))
    after = taken(pods[0])
    assert after == taken(pods[1])
    assert before != after
    assert 50 < len(after) < 150  # of 200 at one half: outside with p < 1e-12


async def test_without_a_budget_of_replays_it_waits_for_lower_rates_alone(
    stream: Stream, tmp_path: Path
) -> None:
    """With `replays_per_s` 0 a connection is asked for, since the monitor may lower the rates; nothing is refused while there is none."""
    pod, stop = Pod(tmp_path, on(stream, replays_per_s=0.0), ManualClock(BEGIN)), Stop()
    stop.set()
    asked = []
    await pod.follower.run(lambda: asked.append(1), stop)
    assert asked
    assert pod.is_local()
    assert not sum(pod.slot.gauge(gauge) for gauge in POLICY_REFUSALS.values())


async def test_a_restarted_capture_process_knows_the_earlier_policies(stream: Stream, tmp_path: Path) -> None:
    """The file tells the directives of before, though NATS is away."""
    clock = ManualClock(BEGIN)
    pod = Pod(tmp_path, on(stream), clock)
    drawn = []
    for rate in (0.25, 0.5):
        pod.follower.handle_policy(encode(directive(1.0, 1.0, 1.0, rate)))
        pod.tick()
        drawn.append(pod.directives.at(clock.now().timestamp()))
    successor = Pod(tmp_path, on(stream), clock)
    assert [successor.directives.of(policy.epoch) for policy in drawn] == drawn
    assert successor.directives.at(clock.now().timestamp()) == drawn[-1]
    (tmp_path / "policy").write_bytes(b"garbage")
    assert Pod(tmp_path, on(stream), clock).is_local()


class Clients:
    """One client that sends request after request until told to stop."""

    def __init__(self, running: SidecarProcess) -> None:
        self._running = running
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.n_sent = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._running.connect() as client:
                for _ in range(50):
                    client.sendall(post(BODY))
                    client.recv(65_536)
                    self.n_sent += 1


def test_the_rate_changes_while_traffic_runs_and_nothing_is_lost(
    tmp_path: Path, backend: Backend, stream: Stream
) -> None:
    """Local rates, a directive, garbage: each exchange states the rates that it was drawn with, and none is lost."""
    options = {
        "STREAM__URL": stream.url,
        "STREAM__NAME": stream.name,
        "MODELS": '[{"name": "digits"}]',
        "SAMPLING__RATE": 0.5,
        "SAMPLING__REPLAYS_PER_S": 100.0,
        "SAMPLING__MAX_EXCHANGES_PER_S": 100_000,
        "SIDECAR__WORKERS": 2,
    }
    config = Config(sampling=msgspec.structs.replace(Config().sampling, rate=0.5))
    given = directive(0.25, base=0.125, config=config, issued_at=datetime.now(UTC))

    def put(wire: bytes) -> None:
        async def once() -> None:
            connection = await Queue.connect(stream, client_name="test")
            await KeyValue(connection, stream, 900.0).put(POLICY_KEY, wire)
            await connection.close()

        asyncio.run(once())

    with sidecar(tmp_path, backend.port, **options) as running:

        def more(clients: Clients, n: int) -> None:
            wanted = clients.n_sent + n
            wait(lambda: clients.n_sent >= wanted, "requests are answered")

        def central() -> float:
            return running.count("quantdrift_sidecar_policy_central")

        with Clients(running) as clients:
            more(clients, 200)
            put(encode(given))
            wait(lambda: central() == 1.0, "the directive is followed")
            assert 0 <= running.count("quantdrift_sidecar_policy_age_seconds") < 60
            wait(lambda: any(e.endswith(given.policy.epoch) for e in epochs(stream)), "it decides")
            more(clients, 200)
            put(b"garbage")
            wait(lambda: central() == 0.0, "the garbage is refused")
            n_before = clients.n_sent
            wait(lambda: clients.n_sent >= n_before + 200, "requests are answered")
        assert running.count("quantdrift_sidecar_policy_refused_total", reason="unreadable") == 1
        assert running.count("quantdrift_sidecar_policy_refused_total") == 1

        def ended() -> float:
            return sum(
                running.count(f"quantdrift_sidecar_{name}_total") for name in ("published", "thinned", "lost")
            )

        wait(
            lambda: ended() == running.count("quantdrift_sidecar_taken_total"), "all is published or thinned"
        )
        assert running.count("quantdrift_sidecar_lost_total") == 0
        assert running.count("quantdrift_sidecar_offered_total") == clients.n_sent
        n_published = running.count("quantdrift_sidecar_published_total")
    found = stored(stream)
    assert len(found) == n_published
    rates = Counter((one.sampling.pi1, one.sampling.pi2) for one in found)
    assert rates.keys() == {(0.5, 1.0), (0.25, 0.5)}
    for one in found:
        assert one.latency is not None
        assert 0 < one.latency.last_byte_s < 60
        policy = one.sampling.policy
        assert policy.epoch.endswith(given.policy.epoch) == (one.sampling.pi1 == 0.25)
        assert policy.header_strata[0].rate == one.sampling.pi1
        assert policy.body_strata[-1].rate == one.sampling.pi1 * one.sampling.pi2 or one.sampling.pi2 == 1.0


def epochs(stream: Stream) -> set[str]:
    """Return the epochs of what the stream holds."""
    return {one.sampling.policy.epoch for one in stored(stream)}


def stored(stream: Stream) -> list[Exchange]:
    """Return every exchange that the stream holds, which stays there."""

    async def read() -> list[Exchange]:
        connection = await Queue.connect(stream, client_name="test")
        jetstream = (await connection.live()).jetstream()
        info = await jetstream.stream_info(stream.name)
        found = []
        for sequence in range(info.state.first_seq, info.state.last_seq + 1):
            message = await jetstream.get_msg(stream.name, seq=sequence)
            found.append(decode_exchange(message.data or b""))
        await connection.close()
        return found

    return asyncio.run(read())


def test_the_policy_is_shown_with_its_reasons(tmp_path: Path, stream: Stream) -> None:
    """As text for people and as JSON for machines; with nothing in the bucket it says whose rates hold."""
    path = tmp_path / "config.toml"
    path.write_text(f'[stream]\nurl = "{stream.url}"\nname = "{stream.name}"\n')
    nothing = CliRunner().invoke(main, ["policy", "show", "-c", str(path)], catch_exceptions=False)
    assert "the configured rates are in effect" in nothing.output
    nowhere = CliRunner().invoke(main, ["policy", "show", "-c", str(path), "--data", str(tmp_path / "none")])
    assert (nowhere.exit_code, "has no file `nats.url`" in nowhere.output) == (2, True)
    given = msgspec.structs.replace(
        directive(0.25, 0.5, 0.125, 0.125, issued_at=datetime.now(UTC)), lag_factor=0.5
    )
    share = PlannedSlice(
        model="digits", name="scanner=faint", traffic_per_s=5.0, replays_per_s=2.0, evidence_share=0.75
    )
    account = PolicySummary(
        epoch=given.policy.epoch,
        made_at=datetime.now(UTC),
        budget_per_s=10.0,
        replays_per_s=8.0,
        taken_per_s=20.0,
        n_items=1234,
        n_unboosted=3,
        n_slices=2,
        slices=(share,),
    )

    async def put() -> None:
        connection = await Queue.connect(stream, client_name="test")
        bucket = KeyValue(connection, stream, 900.0)
        await bucket.put(SUMMARY_KEY, encode(account))
        await bucket.put(POLICY_KEY, encode(given))
        await connection.close()

    asyncio.run(put())
    text = CliRunner().invoke(main, ["policy", "show", "-c", str(path)], catch_exceptions=False).output
    for words in (
        "is in effect",
        "4 of 10 items/s",
        "scanner=faint",
        "75.0%",
        "every rate is multiplied by 0.5",
        "and 1 more",
    ):
        assert words in text
    shown = json.loads(
        CliRunner().invoke(main, ["policy", "show", "-c", str(path), "--json"], catch_exceptions=False).output
    )
    assert shown["holds"] is True
    assert shown["account"]["slices"][0]["name"] == "scanner=faint"
    assert shown["directive"]["policy"]["epoch"] == given.policy.epoch
