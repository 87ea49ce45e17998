"""Noise from end to end: a reference that looks at its batch, a replica that is asked again, and what the monitor says."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import numpy as np
import numpy.typing as npt
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from quantdrift.cli.main import main
from quantdrift.core.codec import encode
from quantdrift.core.config.load import Secrets
from quantdrift.core.config.schema import Config, Model, Recheck, Reference
from quantdrift.core.errors import RetryError
from quantdrift.core.process.run import Stop
from quantdrift.core.stream.connection import Queue
from quantdrift.demo.oip_server import InferenceServer, OnnxModel
from quantdrift.demo.otlp_receiver import OtlpReceiver
from quantdrift.shadow.worker import serve
from quantdrift.storage.database import Database
from quantdrift.storage.noise_suspects import suspects
from quantdrift.storage.schema.roles import SHADOW
from tests.support.monitor.fold_stream import (
    ALL_ID,
    CATALOG,
    FAINT_ID,
    batches,
    store_batch,
    store_catalog,
    with_noise,
    with_pairs,
    with_slice_noise,
)
from tests.support.monitor.folds import fold_all
from tests.support.monitor.monitor_processes import connected, folded, running_monitor, stop_monitor, until
from tests.support.shadow.onnx_models import (
    BIAS,
    N_CLASSES,
    N_FEATURES,
    WEIGHT,
    exchange_of,
    inputs_of,
    model_of,
    saved,
)
from tests.support.shadow.shadow_workers import worker_config
from tests.support.storage.logins import login_in

pytestmark = pytest.mark.integration


def linear(*, batch_statistics: bool) -> onnx.ModelProto:
    """Return a linear model that adds up each item by itself, after taking away the mean of its batch if asked to."""
    inputs = [helper.make_node("Identity", ["x"], ["centred"])]
    if batch_statistics:
        inputs = [
            helper.make_node("ReduceMean", ["x", "items"], ["mean"], keepdims=1),
            helper.make_node("Sub", ["x", "mean"], ["centred"]),
        ]
    graph = helper.make_graph(
        [
            *inputs,
            helper.make_node("Unsqueeze", ["centred", "last"], ["column"]),
            helper.make_node("Mul", ["column", "w"], ["products"]),
            helper.make_node("ReduceSum", ["products", "features"], ["sums"], keepdims=0),
            helper.make_node("Add", ["sums", "b"], ["logits"]),
        ],
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", N_FEATURES])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", N_CLASSES])],
        [
            numpy_helper.from_array(WEIGHT, "w"),
            numpy_helper.from_array(BIAS, "b"),
            numpy_helper.from_array(np.array([0]), "items"),
            numpy_helper.from_array(np.array([1]), "features"),
            numpy_helper.from_array(np.array([2]), "last"),
        ],
    )
    return model_of(graph)


def config_of(url: str, path: Path, recheck: Recheck | None = None) -> Config:
    """Return a configuration that has every exchange computed again."""
    models = [
        Model(
            name="digits",
            top_k=2,
            references=(Reference(path=str(path), versions=("int8*",)),),
            recheck=recheck or Recheck(),
        ),
    ]
    return worker_config(url, models, noise_share=1.0)


@asynccontextmanager
async def traffic(
    config: Config, dsn: str, outputs: npt.NDArray[np.float32] | None = None
) -> AsyncIterator[asyncpg.Connection]:
    """Run a worker and publish exchanges all the time; yield a connection to the record.

    Replaying again takes a share of the replay time: where the machine held up a second replay, many more exchanges must be
    replayed before the next.
    """
    queue = await Queue.connect(config.stream, client_name="test")
    stop = Stop()
    worker = asyncio.create_task(serve(config, Secrets(dsn=dsn), stop))
    clients = None
    try:
        await until(lambda: _has_stream(queue), "the worker is there")
        clients = asyncio.create_task(_publish(queue, outputs))
        async with connected(dsn) as connection:
            yield connection
        assert not clients.done()
    finally:
        if clients is not None:
            clients.cancel()
        stop.set()
        await queue.close()
        assert await asyncio.wait_for(worker, 30) == 0


async def _publish(queue: Queue, outputs: npt.NDArray[np.float32] | None) -> None:
    for seed in itertools.count():
        exchange = exchange_of(inputs_of(1, seed), outputs)
        await queue.publish_exchange(exchange.model, exchange.id, encode(exchange))


async def _has_stream(queue: Queue) -> bool:
    try:
        await queue.models()
    except RetryError:
        return False
    return True


async def _n_noise(connection: asyncpg.Connection, side: str) -> int:
    return int(await connection.fetchval("select count(*) from noise where side = $1", side))


@pytest.mark.parametrize("batch_statistics", [False, True])
async def test_noise_of_the_reference_is_stored(
    postgres_dsn: str, nats_url: str, tmp_path: Path, *, batch_statistics: bool
) -> None:
    """Exactly none where items do not see each other, and some nearly everywhere where they do."""
    path = saved(linear(batch_statistics=batch_statistics), tmp_path / "reference.onnx")
    async with traffic(config_of(nats_url, path), postgres_dsn) as record:

        async def measured() -> bool:
            return await _n_noise(record, "reference") >= 32

        await until(measured, "items are replayed again")
        rows = await record.fetch(
            "select n.*, c.captured_at = n.captured_at as same, c.policy_id = n.policy_id as same_policy,"
            " n.slice_ids = c.slice_ids as same_slices, b.kind from noise n join comparison c using (exchange_id, item) join batch b on b.id = n.batch_id"
        )
    assert len(rows) >= 32
    assert all(row["same"] and row["same_policy"] and row["kind"] == "comparison" for row in rows)
    assert all(row["same_slices"] for row in rows)
    assert {(row["side"], row["pi1"], row["pi2"]) for row in rows} == {("reference", 0.5, 1.0)}
    differing = np.mean([row["divergence"] > 0 for row in rows])
    if batch_statistics:
        assert differing > 0.9
        assert any(row["flip"] for row in rows)
    else:
        assert differing == 0.0
        assert not any(row["flip"] for row in rows)


@pytest.mark.parametrize("same", [True, False])
async def test_noise_of_the_candidate_is_stored_where_its_operator_allows_it(
    postgres_dsn: str, nats_url: str, tmp_path: Path, *, same: bool
) -> None:
    """A replica that answers as the candidate did, or otherwise."""
    path = saved(linear(batch_statistics=False), tmp_path / "reference.onnx")
    replica = InferenceServer([OnnxModel("digits", "int8", path)])
    await replica.start()
    recheck = Recheck(url=f"http://127.0.0.1:{replica.port}", versions=("int8",))
    outputs = None if same else np.array([[3, 0, 0]], dtype=np.float32)
    try:
        async with traffic(config_of(nats_url, path, recheck), postgres_dsn, outputs) as record:

            async def measured() -> bool:
                return await _n_noise(record, "candidate") > 0

            await until(measured, "the replica is asked")
            divergences = await record.fetch("select divergence from noise where side = 'candidate'")
    finally:
        await replica.stop()
    assert all((row["divergence"] < 1e-9) is same for row in divergences)


@pytest.mark.release
async def test_too_much_noise_is_an_event_a_gauge_and_no_verdict(
    postgres_dsn: str, tmp_path: Path, otlp_receiver: OtlpReceiver
) -> None:
    """Through the outbox like every alert; `slices show` tells what is added."""
    stream = with_noise(batches(50, faint_flips=0.001), 0.05)
    async with connected(postgres_dsn) as record:
        await store_catalog(record)
        for rows in stream:
            await store_batch(record, rows)

        def told(receiver: OtlpReceiver) -> bool:
            return any(event.name == "quantdrift.noise" for event in receiver.events)

        def gauged(receiver: OtlpReceiver) -> bool:
            labels = {"model": "digits", "version": "1", "side": "reference", "metric": "flip"}
            shown = {
                point.name: point.value for point in receiver.metrics if dict(point.attributes) == labels
            }
            return shown.get("quantdrift.noise.exceeded") == 1 and shown["quantdrift.noise.high"] > 5

        async def all_folded() -> bool:
            return await folded(record) == len(stream)

        async with running_monitor(postgres_dsn, tmp_path, otlp_receiver.endpoint) as process:
            await until(all_folded, "everything is folded")
            assert await asyncio.to_thread(otlp_receiver.wait_for, told, 30)
            assert await asyncio.to_thread(otlp_receiver.wait_for, gauged, 30)
            assert await stop_monitor(process) == 0
        (event,) = [event for event in otlp_receiver.events if event.name == "quantdrift.noise"]
        assert event.severity == 13
        assert event.attributes["quantdrift.side"] == "reference"
        assert event.attributes["quantdrift.exceeds"] is True
        assert event.attributes["quantdrift.low"] > event.attributes["quantdrift.limit"] == 0.005
        reasons = await record.fetch("select distinct verdict, reason from verdict where n_groups > 0")
        assert [(row["verdict"], row["reason"][:20]) for row in reasons] == [
            ("unknown", "noise: the reference")
        ]
        estimate = json.loads(
            await record.fetchval("select estimate from verdict where slice_id = $1", ALL_ID)
        )
        assert estimate["flip"]["budget"] == pytest.approx(0.01)
        assert estimate["flip"]["noise"] > 0.05
    shown = await asyncio.to_thread(_shown, postgres_dsn, tmp_path)
    assert " and noise of " in shown
    assert "flip reference" in shown
    assert "too much" in shown
    (flips,) = (
        one
        for one in (await asyncio.to_thread(_told, postgres_dsn, tmp_path))["noise"]
        if one["metric"] == "flip"
    )
    assert flips["exceeds"]
    assert flips["low"] < flips["mean"] < flips["high"]


@pytest.mark.release
async def test_noise_is_reported_in_the_unit_of_its_metric(postgres_dsn: str, tmp_path: Path) -> None:
    """As its budget and its signals are, not over the cap."""
    stream = [
        msgspec.structs.replace(
            rows, noise=tuple(msgspec.structs.replace(row, divergence=0.03) for row in rows.noise)
        )
        for rows in with_noise(batches(10), 0.0)
    ]
    async with connected(postgres_dsn) as record:
        await store_catalog(record)
        for rows in stream:
            await store_batch(record, rows)

        async def all_folded() -> bool:
            return await folded(record) == len(stream)

        async with running_monitor(postgres_dsn, tmp_path) as process:
            await until(all_folded, "everything is folded")
            assert await stop_monitor(process) == 0
    told = await asyncio.to_thread(_told, postgres_dsn, tmp_path)
    (noise,) = (one for one in told["noise"] if one["metric"] == "divergence")
    (signal,) = (one for one in told["signals"] if (one["metric"], one["kind"]) == ("divergence", "budget"))
    assert noise["mean"] == pytest.approx(0.03)
    assert noise["budget"] == pytest.approx(0.02) == signal["budget"]


async def test_a_slice_has_its_own_noise_from_the_record_to_the_command(
    postgres_dsn: str, tmp_path: Path
) -> None:
    """Also after the monitor was started again: figures, interval, exchanges, what is added, and the event."""
    stream = with_slice_noise(batches(80, faint_flips=0.001), 0.05, 0.0)
    async with connected(postgres_dsn) as record:
        await store_catalog(record)
        for half in (stream[:40], stream[40:]):
            for rows in half:
                await store_batch(record, rows)
            n_folded = half[-1].fold_seq

            async def all_folded(until_seq: int = n_folded) -> bool:
                return await folded(record) == until_seq

            async with running_monitor(postgres_dsn, tmp_path) as process:
                await until(all_folded, "everything is folded")
                assert await stop_monitor(process) == 0
        _, outcome = fold_all(stream)
        expected = {
            (row.slice_id, row.metric): (row.older_n, row.high, row.added, row.own) for row in outcome.floors
        }
        stored = {
            (row["slice_id"], row["metric"]): (row["older_n"], row["high"], row["added"], row["own"])
            for row in await record.fetch("select * from noise_slice")
        }
        assert stored == {key: value for key, value in expected.items() if key[0]}
        changes = await record.fetch("select slice_id, exceeds, details->>'slice' as name from noise_change")
        assert [tuple(row) for row in changes] == [(FAINT_ID, True, "scanner=faint")]
        verdicts = await record.fetch("select slice_id, verdict, reason from verdict where n_groups > 0")
        assert {row["slice_id"] for row in verdicts if "in this slice" in row["reason"]} == {FAINT_ID}
    faint = await asyncio.to_thread(_told, postgres_dsn, tmp_path, "scanner=faint")
    (flips,) = (one for one in faint["noise"] if one["metric"] == "flip")
    assert (flips["n_groups"], flips["own"], flips["exceeds"]) == (expected[FAINT_ID, "flip"][0], True, True)
    assert flips["low"] < flips["mean"] < flips["high"]
    shown = await asyncio.to_thread(_shown, postgres_dsn, tmp_path, "scanner=faint")
    assert f"{flips['n_groups']:,}" in shown
    assert "too much" in shown
    clear = await asyncio.to_thread(_shown, postgres_dsn, tmp_path, "scanner=clear")
    assert "as over all traffic: too few exchanges of this slice" in clear
    assert "live page" not in clear
    config = tmp_path / "config.toml"
    config.write_text('[web]\nurl = "https://drift.example.com/"\n' + config.read_text())
    page = f"https://drift.example.com/slice/1/{FAINT_ID}"
    shown = await asyncio.to_thread(_shown, postgres_dsn, tmp_path, "scanner=faint")
    assert f"  live page  {page}\n" in shown
    assert (await asyncio.to_thread(_told, postgres_dsn, tmp_path, "scanner=faint"))["page"] == page


async def test_workers_read_which_slices_are_suspect_from_the_tests_of_the_monitor(
    postgres_dsn: str, tmp_path: Path
) -> None:
    """Second replays are joined to their comparisons, and a monitor that starts again goes on with the same bits."""
    stream = with_pairs(batches(24), 0.02)
    async with connected(postgres_dsn) as record:
        await store_catalog(record)
        for half in (stream[:19], stream[19:]):
            for rows in half:
                await store_batch(record, rows)
            n_folded = half[-1].fold_seq

            async def all_folded(until_seq: int = n_folded) -> bool:
                return await folded(record) == until_seq

            async with running_monitor(postgres_dsn, tmp_path) as process:
                await until(all_folded, "everything is folded")
                assert await stop_monitor(process) == 0
        _, outcome = fold_all(stream)
        stored = await record.fetch("select * from noise_test order by slice_id, metric")
        assert [(row["slice_id"], row["metric"], row["suspect"], row["n"]) for row in stored] == [
            (row.slice_id, row.metric, row.suspect, row.n) for row in outcome.pairs
        ]
        assert [tuple(row["wealth"]) for row in stored] == [row.wealth for row in outcome.pairs]
        assert any(row["suspect"] and row["n"] for row in stored)
    async with Database(await login_in(postgres_dsn, SHADOW)) as of_shadow:
        suspect = await suspects(of_shadow)
    assert CATALOG.slices[FAINT_ID].predicate in {predicate for _, predicate in suspect}
    assert {version.candidate_version for version, _ in suspect} == {"1"}


def _told(dsn: str, directory: Path, which: str = "all") -> Any:
    return json.loads(_shown(dsn, directory, which, "--json"))


def _shown(dsn: str, directory: Path, which: str = "all", *options: str) -> str:
    arguments = ["slices", "show", which, "--model", "digits", "-c", str(directory / "config.toml"), *options]
    result = CliRunner(env={"QUANTDRIFT_DSN": dsn}).invoke(main, arguments)
    assert result.exit_code == 0, result.output
    return str(result.output)
