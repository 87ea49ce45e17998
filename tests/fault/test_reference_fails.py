"""References that fail on what they are given, or never come to an end, while a worker replays with them."""

import asyncio
import sys
import time
from collections import Counter
from pathlib import Path

import asyncpg
import msgspec
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from quantdrift.core.config.schema import Config, Model, Reference, Runtime
from quantdrift.core.stream.backlog import read_backlog
from quantdrift.core.stream.connection import Queue
from tests.support.shadow import torch_models
from tests.support.shadow.onnx_models import (
    BIAS,
    WEIGHT,
    exchange_of,
    inputs_of,
    linear_model,
    model_of,
    saved,
)
from tests.support.shadow.shadow_workers import DEADLINE_S, published, work_off, worker_config

pytestmark = pytest.mark.fault

FOREVER = 1e15


def _looping() -> onnx.ModelProto:
    """Return the linear model, which first goes as often round a loop as its largest input says."""
    boolean, number = TensorProto.BOOL, TensorProto.INT64
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["go_on"]), helper.make_node("Identity", ["kept"], ["next"])],
        "body",
        [
            helper.make_tensor_value_info("turn", number, []),
            helper.make_tensor_value_info("go", boolean, []),
            helper.make_tensor_value_info("kept", TensorProto.FLOAT, ["n", 4]),
        ],
        [
            helper.make_tensor_value_info("go_on", boolean, []),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, ["n", 4]),
        ],
    )
    linear = linear_model().graph
    graph = helper.make_graph(
        [
            helper.make_node("ReduceMax", ["x"], ["largest"], keepdims=0),
            helper.make_node("Cast", ["largest"], ["turns"], to=number),
            helper.make_node("Loop", ["turns", "", "x"], ["same"], body=body),
            helper.make_node("MatMul", ["same", "w"], ["xw"]),
            helper.make_node("Add", ["xw", "b"], ["logits"]),
        ],
        "looping",
        linear.input,
        linear.output,
        [numpy_helper.from_array(WEIGHT, "w"), numpy_helper.from_array(BIAS, "b")],
    )
    return model_of(graph)


def _picking() -> onnx.ModelProto:
    """Return the linear model with a bias that is chosen by an input: the provider fails where there is none."""
    linear = linear_model().graph
    graph = helper.make_graph(
        [
            helper.make_node("ReduceMax", ["x"], ["largest"], keepdims=0),
            helper.make_node("Div", ["largest", "many"], ["share"]),
            helper.make_node("Cast", ["share"], ["which"], to=TensorProto.INT64),
            helper.make_node("Gather", ["b", "which"], ["bias"], axis=0),
            helper.make_node("MatMul", ["x", "w"], ["xw"]),
            helper.make_node("Add", ["xw", "bias"], ["logits"]),
        ],
        "picking",
        linear.input,
        linear.output,
        [
            numpy_helper.from_array(WEIGHT, "w"),
            numpy_helper.from_array(BIAS[np.newaxis], "b"),
            numpy_helper.from_array(np.array(1000, np.float32), "many"),
        ],
    )
    return model_of(graph)


@pytest.fixture
def config(nats_url: str, tmp_path: Path) -> Config:
    """Return a configuration with one model, which is well."""
    here = Reference(path=str(saved(linear_model(), tmp_path / "here.onnx")))
    model = Model(name="here", top_k=2, references=(here,))
    return worker_config(nats_url, [model], ack_wait_s=1.5, max_deliveries=2, noise_share=0.0)


def _with(config: Config, *models: Model) -> Config:
    return msgspec.structs.replace(config, models=(*config.models, *models))


async def _stored(dsn: str) -> tuple[Counter[str], Counter[tuple[str, str]], list[str]]:
    """Return comparisons by model, what was set aside by model and reason, and why."""
    connection = await asyncpg.connect(dsn)
    try:
        compared = await connection.fetch(
            "select v.model from comparison c join model_version v on v.id = c.model_version_id"
        )
        aside = await connection.fetch("select model, reason, detail from quarantine")
    finally:
        await connection.close()
    return (
        Counter(row["model"] for row in compared),
        Counter((row["model"] or "", row["reason"]) for row in aside),
        [row["detail"] for row in aside],
    )


async def test_out_of_memory_and_a_failing_provider_cost_the_exchange_that_fails_alone(
    config: Config, postgres_dsn: str, tmp_path: Path
) -> None:
    """Smaller batches are tried, of one exchange too; what fails alone is set aside with its reason, all else is compared."""
    weights = torch_models.weights(tmp_path / "linear.safetensors")
    hungry = Reference(
        runtime=Runtime.TORCH, factory="tests.support.shadow.torch_models:Hungry", path=str(weights)
    )
    picking = Reference(path=str(saved(_picking(), tmp_path / "picking.onnx")))
    config = _with(
        config,
        msgspec.structs.replace(torch_models.MODEL, name="hungry", top_k=2, references=(hungry,)),
        Model(name="picking", top_k=2, references=(picking,)),
    )
    beyond = inputs_of(1) + np.float32(5000)
    exchanges = [
        *(exchange_of(inputs_of(1, seed), model=model) for seed in range(8) for model in ("hungry", "here")),
        exchange_of(inputs_of(4), model="hungry"),
        exchange_of(beyond, model="hungry"),
        *(exchange_of(inputs_of(1, seed), model="picking") for seed in range(4)),
        exchange_of(beyond, model="picking"),
        *(exchange_of(inputs_of(1, seed), model="here") for seed in range(8, 12)),
    ]
    await work_off(config, postgres_dsn, exchanges)
    compared, aside, details = await _stored(postgres_dsn)
    assert compared == {"hungry": 12, "here": 12, "picking": 4}
    assert aside == {("hungry", "replay"): 1, ("picking", "replay"): 1}
    assert sorted(any(word in detail for word in ("memory", "Gather")) for detail in details) == [
        True,
        True,
    ], details


# A hang is ten times `ack_wait_s`: twice does for a test.
_WORKER = """
import sys
import msgspec
from quantdrift.core.config.load import Secrets
from quantdrift.core.config.schema import Config
from quantdrift.core.process.run import run
from quantdrift.shadow import worker
worker._WAITS_PER_REPLAY = 2.0
config = msgspec.json.decode(sys.argv[1], type=Config)
sys.exit(run(lambda stop: worker.serve(config, Secrets(dsn=sys.argv[2]), stop), grace_s=10))
"""


async def test_a_reference_that_never_ends_costs_the_exchange_that_it_hangs_on(
    config: Config, postgres_dsn: str, tmp_path: Path
) -> None:
    """A thread cannot be ended: the worker ends itself, and the next one goes on. Twice, then the exchange is set aside."""
    looping = Reference(path=str(saved(_looping(), tmp_path / "looping.onnx")))
    config = _with(config, Model(name="looping", top_k=2, references=(looping,)))
    exchanges = [
        *(exchange_of(inputs_of(1, seed), model="looping") for seed in range(3)),
        exchange_of(np.full((1, 4), FOREVER, np.float32), inputs_of(1)[:, :3], model="looping"),
        *(exchange_of(inputs_of(1, seed), model="here") for seed in range(5)),
    ]
    queue = await published(config, exchanges)
    said = await _worked_off(config, queue, postgres_dsn)
    assert ["did not end within 3 s" in log for log in said] == [True] * config.shadow.max_deliveries
    compared, aside, _ = await _stored(postgres_dsn)
    assert compared == {"looping": 3, "here": 5}
    assert aside == {("", "poison"): 1}


@pytest.mark.release
async def test_what_others_hold_when_a_worker_ends_again_and_again_is_not_taken_for_poison(
    config: Config, postgres_dsn: str, tmp_path: Path
) -> None:
    """Everything comes again when a worker has ended, of every model: only what ends it is in its hands at each end."""
    looping = Reference(path=str(saved(_looping(), tmp_path / "looping.onnx")))
    config = _with(config, Model(name="looping", top_k=2, references=(looping,)))
    n_here = 60
    exchanges = [
        exchange_of(np.full((1, 4), FOREVER, np.float32), inputs_of(1)[:, :3], model="looping"),
        *(exchange_of(inputs_of(1, seed), model="looping") for seed in range(3)),
        *(exchange_of(inputs_of(1, seed), model="here") for seed in range(n_here)),
    ]
    queue = await published(config, exchanges)
    for model in ("looping", "here"):  # by a worker that ends with all of it in hand
        consumer = await queue.consumer("exchange", ack_wait_s=config.shadow.ack_wait_s, model=model)
        assert await consumer.fetch(n_here, max_bytes=1_000_000, timeout_s=1.0)
    said = await _worked_off(config, queue, postgres_dsn)
    assert ["did not end within 3 s" in log for log in said] == [True] * (config.shadow.max_deliveries - 1)
    compared, aside, _ = await _stored(postgres_dsn)
    assert compared == {"looping": 3, "here": n_here}
    assert aside == {("", "poison"): 1}


async def _worked_off(config: Config, queue: Queue, dsn: str) -> list[str]:
    """Run worker after worker until the stream is empty; return the logs of those that ended themselves."""
    command = [sys.executable, "-c", _WORKER, msgspec.json.encode(config).decode(), dsn]
    said: list[str] = []
    until_s = time.monotonic() + 2 * DEADLINE_S  # for several workers
    while (await read_backlog(queue)).n_messages:
        worker = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        ended = asyncio.create_task(worker.communicate())
        while not ended.done() and (await read_backlog(queue)).n_messages:
            assert time.monotonic() < until_s, "not in time"
            await asyncio.sleep(0.05)
        if worker.returncode is None:
            worker.terminate()
        _, log = await ended
        if worker.returncode:
            said.append(log.decode())
    await queue.close()
    return said
