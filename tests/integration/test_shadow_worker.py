"""The shadow worker with a real stream and a real database."""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import msgspec
import numpy as np
import pytest

from quantdrift.core.codec import encode
from quantdrift.core.config.load import Secrets
from quantdrift.core.config.schema import Config, Model, Reference, Runtime, Slice
from quantdrift.core.config.state import config_state
from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.core.keys import Key, KeyRing, write_keys
from quantdrift.core.process.nats_server import NatsServer
from quantdrift.core.process.run import Stop
from quantdrift.core.process_state import bounded
from quantdrift.core.records import Exchange, Latency, Protocol, StratumCount, Tally, Tensor
from quantdrift.core.sealing import seal, unseal
from quantdrift.core.stream.backlog import read_backlog
from quantdrift.core.stream.connection import Queue
from quantdrift.core.stream.numbering import Numbered
from quantdrift.demo.otlp_receiver import OtlpReceiver
from quantdrift.shadow.pipeline import metrics
from quantdrift.shadow.pipeline.in_flight import InFlight
from quantdrift.shadow.worker import serve
from quantdrift.storage.server.postgres import PostgresServer
from tests.support.shadow.onnx_models import exchange_of, inputs_of, linear_model, logits_of, saved
from tests.support.shadow.shadow_workers import serving, worker_config
from tests.support.sidecar.relay_process import free_port

DEADLINE_S = 30.0


@pytest.fixture
def config(tmp_path: Path, nats_url: str) -> Config:
    """Return a configuration with one model and a stream of its own."""
    path = saved(linear_model(), tmp_path / "linear.onnx")
    model = Model(name="digits", top_k=2, references=(Reference(path=str(path), versions=("int8*",)),))
    slices = (
        Slice(name="scanner", header="x-scanner"),
        Slice(name="norm", feature="norm", edges=(1.0,)),
    )
    found = worker_config(nats_url, [model], ack_wait_s=2.0, max_deliveries=2)
    return msgspec.structs.replace(found, slices=slices)


async def _publish(queue: Queue, *exchanges: Exchange) -> None:
    """Publish each until it is acknowledged; the stream drops what it has already."""
    for exchange in exchanges:

        async def published(exchange: Exchange = exchange) -> bool:
            try:
                await queue.publish_exchange(exchange.model, exchange.id, encode(exchange))
            except RetryError:
                return False
            return True

        await _until(published)


async def _until(ask: Callable[[], Awaitable[bool]]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not await ask():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        await asyncio.sleep(0.02)


async def _until_counted(dsn: str, table: str, count: int) -> None:
    connection = await asyncpg.connect(dsn)
    try:

        async def there() -> bool:
            return bool(await connection.fetchval(f"select count(*) >= {count} from {table}"))

        await _until(there)
    finally:
        await connection.close()


async def _fetch(dsn: str, query: str) -> list[Any]:
    connection = await asyncpg.connect(dsn)
    try:
        return list(await connection.fetch(query))
    finally:
        await connection.close()


async def _until_empty(queue: Queue) -> None:
    async def empty() -> bool:
        return not (await read_backlog(queue)).n_messages

    await _until(empty)


@pytest.mark.integration
async def test_a_replay_is_linked_to_the_production_traces(
    config: Config, postgres_dsn: str, otlp_receiver: OtlpReceiver
) -> None:
    """A span for each batch and version; an exchange without a trace, or with a broken one, is no link."""
    traced = msgspec.structs.replace(
        config, telemetry=msgspec.structs.replace(config.telemetry, otlp_endpoint=otlp_receiver.endpoint)
    )
    traces = ["a" * 31 + str(n) for n in range(3)]
    told = [f"00-{trace}-{'b' * 16}-01" for trace in traces]
    async with serving(traced, postgres_dsn) as queue:
        given = [exchange_of(inputs_of(2, seed)) for seed in range(5)]
        await _publish(
            queue,
            *(
                msgspec.structs.replace(one, trace=trace)
                for one, trace in zip(given, [*told, "", "00-" + "0" * 32 + "-nonsense"], strict=True)
            ),
        )
        await _until_counted(postgres_dsn, "comparison", 10)
    spans = otlp_receiver.spans
    assert {span.name for span in spans} == {"quantdrift.replay"}
    assert sorted(link for span in spans for link in span.links) == traces
    assert sum(span.attributes["quantdrift.exchanges"] for span in spans) == 5
    assert all(span.seconds > 0 for span in spans)


@pytest.mark.integration
async def test_an_answer_is_evaluated_on_the_trace_of_its_client(
    config: Config, postgres_dsn: str, otlp_receiver: OtlpReceiver
) -> None:
    """Each measure of a generated answer is an event below the client's span, or names the response; without either there is none."""
    telemetry = msgspec.structs.replace(
        config.telemetry, otlp_endpoint=otlp_receiver.endpoint, evaluations=True
    )
    parent = ("c" * 32, "d" * 16)
    x = inputs_of(1, 1)
    changed = exchange_of(x, -logits_of(x))
    chat = msgspec.structs.replace(
        changed, protocol=Protocol.OPENAI_CHAT, trace=f"00-{parent[0]}-{parent[1]}-01"
    )
    untraced = msgspec.structs.replace(exchange_of(inputs_of(1, 2)), protocol=Protocol.OPENAI_CHAT)
    usage = Tensor(name="usage", datatype="INT64", shape=(2,), data=np.array([12, 42], np.int64).tobytes())
    named = msgspec.structs.replace(
        exchange_of(inputs_of(1, 4)), protocol=Protocol.OPENAI_CHAT, response_id="chatcmpl-7"
    )
    named = msgspec.structs.replace(named, outputs=(*named.outputs, usage))
    no_text = msgspec.structs.replace(exchange_of(inputs_of(1, 3)), trace=chat.trace)
    async with serving(msgspec.structs.replace(config, telemetry=telemetry), postgres_dsn) as queue:
        await _publish(queue, chat, untraced, named, no_text)
        await _until_counted(postgres_dsn, "comparison", 4)
        ((divergence,),) = await _fetch(
            postgres_dsn, f"select divergence from comparison where exchange_id = '{chat.id}'"
        )
    events = [event for event in otlp_receiver.events if event.name == "gen_ai.evaluation.result"]
    by_id = [event for event in events if event.attributes.get("gen_ai.response.id") == "chatcmpl-7"]
    told = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": named.model,
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.output_tokens": 42,
    }
    assert by_id
    assert all(told.items() <= event.attributes.items() and not any(event.parent) for event in by_id)
    events = [event for event in events if event not in by_id]
    assert {event.parent for event in events} == {parent}
    assert {event.attributes["quantdrift.exchange"] for event in events} == {chat.id}
    scores = {
        event.attributes["gen_ai.evaluation.name"]: event.attributes["gen_ai.evaluation.score.value"]
        for event in events
    }
    assert scores == {"quantdrift.changed": 1.0, "quantdrift.divergence": pytest.approx(divergence, rel=1e-5)}
    labels = [event.attributes.get("gen_ai.evaluation.score.label") for event in events]
    assert labels == ["changed", None]


@pytest.mark.integration
async def test_an_exchange_becomes_comparisons(config: Config, postgres_dsn: str) -> None:
    """Every item is replayed, compared, put into its slices and stored; the stream is empty afterwards."""
    x = inputs_of(3)
    outputs = logits_of(x)
    outputs[1] = outputs[1][::-1]
    changed = exchange_of(x, outputs, attributes={"header.x-scanner": "faint\0"})
    took = Latency(last_byte_s=0.5, first_token_s=0.25, per_token_s=0.125)
    changed = msgspec.structs.replace(changed, latency=took)
    async with serving(config, postgres_dsn) as queue:
        await _publish(queue, changed, *(exchange_of(inputs_of(1, seed)) for seed in range(20)))
        await _until_counted(postgres_dsn, "comparison", 23)
        await _until_empty(queue)
    rows = await _fetch(
        postgres_dsn, f"select * from comparison where exchange_id = '{changed.id}' order by item"
    )
    flipped = bool(logits_of(x)[1].argmax() != outputs[1].argmax())
    assert [row["flip"] for row in rows] == [False, flipped, False]
    assert {(row["latency_s"], row["first_token_s"], row["per_token_s"]) for row in rows} == {
        (0.5, 0.25, 0.125)
    }
    (untimed,) = await _fetch(postgres_dsn, "select count(*) as n from comparison where latency_s is null")
    assert untimed["n"] == 20
    assert rows[0]["divergence"] == pytest.approx(0, abs=1e-9)
    assert rows[1]["divergence"] > 0.01
    assert msgspec.json.decode(rows[0]["features"])["feature.norm"] == pytest.approx(
        float(np.linalg.norm(x[0]))
    )
    names = await _fetch(postgres_dsn, f"select name from slice where id = any(array{rows[0]['slice_ids']})")
    assert {"all", "scanner=faint\N{REPLACEMENT CHARACTER}"} < {name["name"] for name in names}
    batches = await _fetch(postgres_dsn, "select * from batch")
    assert sum(batch["n_rows"] for batch in batches) == 23
    assert all(0 < batch["replay_s"] < 60 for batch in batches if batch["n_rows"])
    provenance = msgspec.json.decode(batches[0]["provenance"])
    (version,) = await _fetch(postgres_dsn, "select * from model_version")
    assert provenance.pop("version")
    assert provenance == {
        "runtime": "onnxruntime",
        "provider": "CPUExecutionProvider",
        "device": "cpu",
        "driver": "",
        "digest": version["reference_digest"],
        "precision": "float32",
    }
    assert msgspec.json.decode(version["reference"])["precision"] == "float32"
    (report,) = await _fetch(postgres_dsn, "select * from process_report")
    assert (report["role"], report["source"]) == ("shadow", socket.gethostname())
    assert msgspec.json.decode(report["options"]) == bounded(config_state(config))


@pytest.mark.integration
async def test_bad_messages_are_set_aside_and_others_go_on(config: Config, postgres_dsn: str) -> None:
    """Undecodable, misshapen, labelled and late exchanges get their reason; a version without a reference counts."""
    good, x = exchange_of(inputs_of(1)), inputs_of(1)
    late = exchange_of(x, captured_at=datetime.now(UTC) - timedelta(days=400))
    async with serving(config, postgres_dsn) as queue:
        await queue.publish_exchange("digits", "x", b"no exchange")
        await _publish(
            queue,
            exchange_of(x[:, :2], logits_of(x)),
            exchange_of(x, logits_of(x)[:, :2]),
            late,
            exchange_of(x, version="fp4"),
            exchange_of(x, model="unheard-of"),
            good,
        )
        await _until_counted(postgres_dsn, "quarantine", 4)
        await _until_counted(postgres_dsn, "comparison", 1)
        await _until_empty(queue)
    aside = await _fetch(postgres_dsn, "select reason, payload from quarantine order by reason")
    assert [row["reason"] for row in aside] == ["decode", "output", "schema", "too_late"]
    assert aside[3]["payload"] == encode(late)
    skipped: dict[str, int] = {}
    for row in await _fetch(postgres_dsn, "select skipped from batch"):
        for reason, count in msgspec.json.decode(row["skipped"]).items():
            skipped[reason] = skipped.get(reason, 0) + count
    assert skipped == {"decode": 1, "output": 1, "schema": 1, "too_late": 1, "no_reference": 2}
    versions = await _fetch(postgres_dsn, "select * from model_version where reference_digest = ''")
    assert {(row["model"], row["candidate_version"]) for row in versions} == {
        ("digits", "fp4"),
        ("unheard-of", "int8"),
    }


@pytest.mark.integration
async def test_what_comes_again_is_stored_once_and_what_comes_too_often_is_poison(
    config: Config, postgres_dsn: str
) -> None:
    """A worker that died left messages behind.

    They are replayed alone, each in a batch of its own, and stored once; one beyond its last try is quarantined.
    """
    queue = await Queue.connect(config.stream, client_name="test")
    await queue.ensure()
    poison, *again = (exchange_of(inputs_of(1, seed)) for seed in range(6))
    await _publish(queue, poison)
    consumer = await queue.consumer("exchange", ack_wait_s=config.shadow.ack_wait_s, model="digits")
    for _ in range(config.shadow.max_deliveries):
        (delivery,) = await consumer.fetch(1, max_bytes=1 << 20, timeout_s=10)
        await delivery.nak(0)
    await _publish(queue, *again)
    for delivery in await consumer.fetch(6, max_bytes=1 << 20, timeout_s=1):
        await delivery.nak(0)
    await queue.close()
    async with serving(config, postgres_dsn) as queue:
        await _until_counted(postgres_dsn, "comparison", 5)
        await _until_counted(postgres_dsn, "quarantine", 1)
        await _until_empty(queue)
    (row,) = await _fetch(postgres_dsn, "select * from quarantine")
    assert (row["reason"], row["payload"], row["exchange_id"]) == ("poison", encode(poison), None)
    batches = await _fetch(postgres_dsn, "select n_rows from batch where n_rows > 0")
    assert [batch["n_rows"] for batch in batches] == [1] * 5


@pytest.mark.integration
async def test_what_is_in_hand_is_kept_alive(config: Config) -> None:
    """A delivery that is held longer than `ack_wait_s` is given to nobody else, until it is let go."""
    queue = await Queue.connect(config.stream, client_name="test")
    consumer = await queue.consumer("exchange", ack_wait_s=1.0)
    await _publish(queue, exchange_of(inputs_of(1)))
    (delivery,) = await consumer.fetch(1, max_bytes=1 << 20, timeout_s=DEADLINE_S)
    in_flight = InFlight()
    in_flight.add(delivery)
    until_s = time.monotonic() + 2.5
    while time.monotonic() < until_s:
        await in_flight.keep_alive()
        assert await consumer.fetch(1, max_bytes=1 << 20, timeout_s=0.3) == []
    in_flight.release([delivery])
    await in_flight.keep_alive()
    (again,) = await consumer.fetch(1, max_bytes=1 << 20, timeout_s=DEADLINE_S)
    assert (again.sequence, again.n_delivered) == (delivery.sequence, 2)
    await queue.close()


@pytest.mark.integration
async def test_the_same_exchange_twice_in_the_stream_is_stored_once(
    config: Config, postgres_dsn: str
) -> None:
    """A sidecar that publishes again after the window of deduplication doubles nothing."""
    exchange = exchange_of(inputs_of(2))
    async with serving(config, postgres_dsn) as queue:
        await queue.publish_exchange("digits", "first", encode(exchange))
        await queue.publish_exchange("digits", "second", encode(exchange))
        await _until_counted(postgres_dsn, "comparison", 2)
        await _until_empty(queue)
    assert len(await _fetch(postgres_dsn, "select 1 from comparison")) == 2
    assert [row["n_rows"] for row in await _fetch(postgres_dsn, "select n_rows from batch")] == [2]


@pytest.mark.integration
async def test_a_worker_stores_blocks_and_what_comes_twice_once(config: Config, postgres_dsn: str) -> None:
    """With `storage.write_blocks` one row has a batch; an exchange that is published again, late, under another number is left out."""
    config = msgspec.structs.replace(
        config, storage=msgspec.structs.replace(config.storage, write_blocks=True)
    )
    now = datetime.now(UTC)
    exchanges = [exchange_of(inputs_of(1, seed), captured_at=now) for seed in range(40)]
    late = [exchange_of(inputs_of(1, seed), captured_at=now - timedelta(minutes=5)) for seed in range(3)]
    queue = await Queue.connect(config.stream, client_name="test")
    await queue.ensure()

    async def published(queue: Queue, exchanges: list[Exchange], first: int) -> None:
        for number, exchange in enumerate(exchanges, first):
            numbered = Numbered(boot="b" * 32, row=0, number=number)
            await queue.publish_exchange("digits", f"{number}", encode(exchange), numbered)

    await published(queue, exchanges, 1)
    await queue.close()
    async with serving(config, postgres_dsn) as queue:
        await _until_counted(postgres_dsn, "comparisons('-infinity', 'infinity')", 40)
        for first in (41, 44):
            await published(queue, late, first)
            await _until_counted(postgres_dsn, "comparisons('-infinity', 'infinity')", 43)
        await _until_empty(queue)
    everything = "select exchange_id from comparisons('-infinity', 'infinity')"
    stored = sorted(row["exchange_id"].hex for row in await _fetch(postgres_dsn, everything))
    assert stored == sorted(exchange.id for exchange in (*exchanges, *late))
    (blocks,) = await _fetch(
        postgres_dsn, "select coalesce(sum(n), 0) as n, max(of_batch) as batch from condensed_block"
    )
    assert blocks["n"] >= 16
    assert blocks["batch"] is not None


@pytest.mark.integration
async def test_tallies_are_stored(config: Config, postgres_dsn: str) -> None:
    """A tally becomes rows; one that cannot be read is dropped and holds nothing up."""
    stratum = StratumCount(stratum="default", offered=9, taken=5, thinned=1, published=4)
    tally = Tally(
        source="pod",
        boot="f" * 32,
        sequence=1,
        at=datetime.now(UTC),
        strata=(stratum,),
        blind_connections=0,
    )
    async with serving(config, postgres_dsn) as queue:
        await queue.publish_tally("other", "0" * 32, 1, b"no tally")
        await queue.publish_tally("pod", tally.boot, 1, encode(tally))
        await _until_counted(postgres_dsn, "tally", 1)
    (row,) = await _fetch(postgres_dsn, "select kind, n_rows from batch")
    assert tuple(row) == ("tally", 1)


@pytest.mark.fault
async def test_postgres_may_go_and_come_back(
    config: Config, postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While Postgres is away nothing is acknowledged, and the worker is not ready; when it is back everything is stored, once."""
    monkeypatch.setattr(metrics, "READY_S", 3600.0)  # the failure counts, not that it was long ago
    admin = f"127.0.0.1:{free_port()}"
    config = msgspec.structs.replace(config, shadow=msgspec.structs.replace(config.shadow, admin=admin))
    dsn = postgres_server.dsn
    async with serving(config, dsn) as queue, aiohttp.ClientSession() as client:

        async def answers(status: int) -> bool:
            async with client.get(f"http://{admin}/readyz") as answer:
                return answer.status == status

        await _publish(queue, exchange_of(inputs_of(1)))
        await _until_counted(dsn, "comparison", 1)
        await _until(partial(answers, 200))
        postgres_server.kill()
        await _publish(queue, *(exchange_of(inputs_of(1, seed)) for seed in range(40)))
        assert (await read_backlog(queue)).n_messages == 40
        await _until(partial(answers, 503))
        postgres_server.start()
        await _until(partial(answers, 200))
        await _until_counted(dsn, "comparison", 41)
        await _until_empty(queue)
    assert len(await _fetch(dsn, "select 1 from comparison")) == 41
    assert sum(row["n_rows"] for row in await _fetch(dsn, "select n_rows from batch")) == 41


@pytest.mark.integration
async def test_what_a_host_sends_whose_clock_jumps_is_stored_or_set_aside_by_name(
    config: Config, postgres_dsn: str
) -> None:
    """Behind by hours, or ahead by less than one, it is compared; what is further ahead, or so old that no day takes it, says why."""
    now = datetime.now(UTC)
    jumps = {
        timedelta(0): "",
        timedelta(minutes=30): "",
        timedelta(hours=-2): "",
        timedelta(hours=2): "too_early",
        timedelta(days=-3000): "too_late",
    }
    sent = [
        (exchange_of(inputs_of(1, seed), captured_at=now + jump), why)
        for seed, (jump, why) in enumerate(jumps.items())
    ]
    async with serving(config, postgres_dsn) as queue:
        await _publish(queue, *(exchange for exchange, _ in sent))
        await _until_empty(queue)
    stored = await _fetch(postgres_dsn, "select exchange_id, captured_at from comparison")
    assert {row["exchange_id"].hex: row["captured_at"] for row in stored} == {
        exchange.id: exchange.captured_at for exchange, why in sent if not why
    }
    aside = await _fetch(postgres_dsn, "select reason from quarantine")
    assert sorted(row["reason"] for row in aside) == sorted(why for _, why in sent if why)


@pytest.mark.release
@pytest.mark.fault
async def test_a_worker_ends_while_postgres_is_away(config: Config, postgres_server: PostgresServer) -> None:
    """What cannot be stored is given back, and the next worker stores it."""
    dsn = postgres_server.dsn
    async with serving(config, dsn) as queue:
        await _publish(queue, exchange_of(inputs_of(1)))
        await _until_counted(dsn, "comparison", 1)
        postgres_server.kill()
        await _publish(queue, exchange_of(inputs_of(1)))
    postgres_server.start()
    async with serving(config, dsn):
        await _until_counted(dsn, "comparison", 2)


@pytest.mark.fault
async def test_nats_may_go_and_come_back(config: Config, postgres_dsn: str, tmp_path: Path) -> None:
    """The worker connects again, and what the stream delivers anew is stored once."""
    server = NatsServer(tmp_path / "nats")
    server.start()
    config = msgspec.structs.replace(config, stream=msgspec.structs.replace(config.stream, url=server.url))
    try:
        async with serving(config, postgres_dsn) as queue:
            await queue.ensure()
            await _publish(queue, *(exchange_of(inputs_of(1, seed)) for seed in range(20)))
            server.kill()
            server.start()
            await _publish(queue, *(exchange_of(inputs_of(1, seed)) for seed in range(20)))
            await _until_counted(postgres_dsn, "comparison", 40)
            await _until_empty(queue)
    finally:
        server.stop()
    assert len(await _fetch(postgres_dsn, "select 1 from comparison")) == 40
    assert sum(row["n_rows"] for row in await _fetch(postgres_dsn, "select n_rows from batch")) == 40


@pytest.mark.integration
async def test_a_missing_reference_is_the_operators_to_mend(config: Config, postgres_dsn: str) -> None:
    """The worker does not start, and says what to check."""
    model = msgspec.structs.replace(config.models[0], references=(Reference(path="/nowhere.onnx"),))
    with pytest.raises(OperatorError, match=r"models\.references\.path"):
        await serve(msgspec.structs.replace(config, models=(model,)), Secrets(dsn=postgres_dsn), Stop())


@pytest.mark.integration
async def test_a_server_of_a_reference_that_is_away_is_waited_for(
    config: Config, postgres_dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of its model is taken from the stream meanwhile, and the worker ends when it is told to."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: every connection is refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        away = (Reference(runtime=Runtime.OIP_HTTP, url=url), *config.models[0].references)
        model = msgspec.structs.replace(config.models[0], references=away)
        stop = Stop()
        worker = asyncio.create_task(
            serve(msgspec.structs.replace(config, models=(model,)), Secrets(dsn=postgres_dsn), stop)
        )
        deadline = time.monotonic() + DEADLINE_S
        while f"{url} is away" not in caplog.text:
            assert time.monotonic() < deadline, "nobody says that it is away"
            await asyncio.sleep(0.02)
        stop.set()
        assert await asyncio.wait_for(worker, DEADLINE_S) == 0


@pytest.mark.integration
async def test_encrypted_exchanges_are_replayed_and_the_quarantine_holds_no_plain_payload(
    config: Config, postgres_dsn: str, tmp_path: Path
) -> None:
    """They wait in the stream while the keys cannot be read. What no key opens, or what was moved to another model, is kept as it came."""
    path = tmp_path / "keys.json"
    now = datetime.now(UTC)
    key, other = Key.create(now), Key.create(now)
    stream = msgspec.structs.replace(config.stream, payload_key_file=str(path))
    good, odd, foreign, plain = (exchange_of(inputs_of(1, seed)) for seed in range(4))
    odd = msgspec.structs.replace(
        odd, outputs=exchange_of(inputs_of(1), logits_of(inputs_of(1))[:, :2]).outputs
    )
    plain = msgspec.structs.replace(plain, outputs=odd.outputs)

    def sealed(exchange: Exchange, key: Key, model: str = "digits") -> bytes:
        return seal(encode(exchange), key, model=model, exchange_id=exchange.id)

    async with serving(msgspec.structs.replace(config, stream=stream), postgres_dsn) as queue:
        given = {
            good.id: sealed(good, key),
            odd.id: sealed(odd, key),
            foreign.id: sealed(foreign, other),
            "moved": sealed(good, key, "wagons"),
            plain.id: encode(plain),
        }
        for name, wire in given.items():
            await queue.publish_exchange("digits", name, wire)
        backlog = await read_backlog(queue)
        assert backlog.n_messages == 5
        write_keys(path, KeyRing(keys=(key,)), is_new=True)
        await _until_counted(postgres_dsn, "quarantine", 4)
        await _until_counted(postgres_dsn, "comparison", 1)
        await _until_empty(queue)
    rows = await _fetch(postgres_dsn, "select * from quarantine order by reason, model, stream_sequence")
    assert [row["reason"] for row in rows] == ["decode", "encrypted", "output", "output"]
    moved, closed, opened, was_plain = rows
    assert (moved["model"], moved["payload"]) == ("digits", given["moved"])
    assert (closed["model"], closed["exchange_id"].hex, closed["payload"]) == (
        "digits",
        foreign.id,
        given[foreign.id],
    )
    assert opened["payload"] == given[odd.id]
    assert was_plain["exchange_id"].hex == plain.id
    ring = KeyRing(keys=(key, other))
    assert [unseal(row["payload"], ring, "digits") for row in rows[1:]] == [
        encode(foreign),
        encode(odd),
        encode(plain),
    ]
