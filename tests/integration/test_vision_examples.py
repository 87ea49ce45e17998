"""The examples of detection and segmentation, from their files to a verdict."""

import asyncio
import importlib
import shutil
import uuid
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg
import msgspec
import numpy as np
import onnxruntime as ort
import pytest
from click.testing import CliRunner

from quantdrift.cli.main import main
from quantdrift.core.codec import encode
from quantdrift.core.config.load import Secrets, load
from quantdrift.core.config.schema import Config, Provider, Shadow, Stream
from quantdrift.core.process.run import Stop
from quantdrift.core.records import Exchange, Verdict
from quantdrift.core.stream.connection import Queue
from quantdrift.models.runtimes.registry import open_reference, runtime_request
from quantdrift.models.tensors.codec import encode as tensor_of
from quantdrift.models.tensors.codec import fit_inputs
from quantdrift.monitor.fold.fold import Fold
from quantdrift.shadow.replay.exchange import PreparedExchange
from quantdrift.shadow.replay.references import References
from quantdrift.shadow.replay.replay import ReplayResult, compare_batch
from quantdrift.shadow.worker import serve
from quantdrift.storage.database import Database
from quantdrift.storage.fold.read import claim, load_catalog, resume
from tests.support.monitor.monitor_processes import connected, until
from tests.support.shadow.onnx_models import exchange_of

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]


class Example(NamedTuple):
    """An example that was made."""

    config: Config
    candidate: Path
    images: Any

    def exchange(self, seed: int, model: Path, *, n_items: int = 4) -> Exchange:
        """Return what `model` answers to some images."""
        images = self.images(n_items, seed)
        session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        arrays = session.run(names, {"image": images})
        return msgspec.structs.replace(
            exchange_of(np.zeros((1, 4), np.float32), model=self.config.models[0].name, version="int4-1"),
            inputs=(tensor_of("image", "FP32", images),),
            outputs=tuple(tensor_of(name, "FP32", array) for name, array in zip(names, arrays, strict=True)),
        )


@pytest.fixture(params=["detection", "segmentation"])
def example(request: pytest.FixtureRequest, tmp_path: Path) -> Example:
    """Return an example in a directory of its own."""
    module = importlib.import_module(f"examples.{request.param}.make")
    module.make(tmp_path)
    shutil.copy(ROOT / "examples" / request.param / "config.toml", tmp_path)
    config = load(tmp_path / "config.toml", {})
    return Example(config=config, candidate=tmp_path / module.CANDIDATE, images=module.images)


def test_the_configuration_is_sound(example: Example) -> None:
    """`quantdrift config check --references` says so, once the model is made."""
    path = example.candidate.parent / "config.toml"
    ran = CliRunner().invoke(main, ["config", "check", "--references", "--config", str(path)])
    assert ran.exit_code == 0, ran.output
    assert "is sound" in ran.output
    assert "does not exist" not in ran.output


def test_the_candidate_diverges_from_its_reference_and_the_reference_does_not(example: Example) -> None:
    """Fewer bits move most images a little, and few decisions."""
    config = example.config
    references = References(
        config.models, lambda model, reference: open_reference(runtime_request(config, model, reference))
    )
    version_reference = references.find(config.models[0].name, "int4-1")
    assert version_reference is not None

    def prepared(model: Path, seed: int) -> PreparedExchange:
        exchange = example.exchange(seed, model)
        inputs = fit_inputs(exchange.inputs, version_reference.runtime.inputs, batched=True)
        return PreparedExchange(
            stream_sequence=1,
            payload=b"",
            exchange=exchange,
            version_reference=version_reference,
            inputs=inputs,
        )

    of_itself, *of_candidate = compare_batch(
        [
            prepared(Path(config.models[0].references[0].path), 0),
            *(prepared(example.candidate, seed) for seed in range(20)),
        ],
        most_items=64,
    )
    references.close()
    assert isinstance(of_itself, ReplayResult)
    # The batch that the reference computes is another one.
    np.testing.assert_allclose(of_itself.divergences.divergence, 0, atol=1e-5)
    found = [outcome.divergences for outcome in of_candidate if isinstance(outcome, ReplayResult)]
    assert len(found) == 20
    divergence = np.concatenate([one.divergence for one in found])
    assert (divergence > 0).mean() > 0.5
    assert divergence.mean() < config.models[0].budget.divergence
    assert np.concatenate([one.flip for one in found]).mean() < config.models[0].budget.flip


async def test_the_worker_stores_them_and_the_fold_gives_a_verdict(
    example: Example, postgres_dsn: str, nats_url: str
) -> None:
    """From the stream to the record and its detail, and through the detectors."""
    config = msgspec.structs.replace(
        example.config,
        stream=Stream(url=nats_url, name=f"t{uuid.uuid4().hex[:8]}"),
        shadow=Shadow(provider=Provider.CPU, threads=1, batch_delay_s=0.05, admin="127.0.0.1:0"),
        monitor=msgspec.structs.replace(example.config.monitor, min_groups=5),
    )
    queue = await Queue.connect(config.stream, client_name="test")
    stop = Stop()
    worker = asyncio.create_task(serve(config, Secrets(dsn=postgres_dsn), stop))
    try:
        await queue.ensure()
        for seed in range(10):
            exchange = example.exchange(seed, example.candidate)
            await queue.publish_exchange(exchange.model, exchange.id, encode(exchange))
        async with connected(postgres_dsn) as record:
            await until(lambda: _stored(record, 40), "everything is compared")
            rows = await record.fetch("select flip, divergence, detail from comparison")
    finally:
        stop.set()
        await queue.close()
        assert await worker == 0
    details = [msgspec.json.decode(row["detail"]) for row in rows]
    assert all(0 <= row["divergence"] < 1 for row in rows)
    assert all(len(detail) >= 4 for detail in details)
    async with Database(postgres_dsn) as database, database.begin() as connection:
        fold = Fold(config, await resume(connection))
        stored = await claim(connection, 0, 100)
        catalog = await load_catalog(connection)
        fold.learn(catalog)
        for batch in stored:
            fold.batch(batch)
    everything = next(row.id for row in catalog.slices.values() if row.name == "all")
    verdict = next(row for row in fold.verdicts() if row.slice_id == everything and row.n_groups)
    assert verdict.n_groups == 10
    assert verdict.verdict is not Verdict.FIRING
    rollups = [row for row in fold.take().rollups if row.slice_id == everything]
    assert sum(row.n_items for row in rollups) == 40
    # Each was taken with one probability.
    mean = sum(row.divergence for row in rollups) / sum(row.divergence_weight for row in rollups)
    assert mean == pytest.approx(np.mean([row["divergence"] for row in rows]))


async def _stored(record: asyncpg.Connection, n_items: int) -> bool:
    return bool(await record.fetchval("select count(*) >= $1 from comparison", n_items))
