"""Several models in one shadow worker, with a real stream and a real database."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import asyncpg
import msgspec
import numpy as np
import pytest

from quantdrift.core.config.load import Secrets
from quantdrift.core.config.schema import Config, Model, Reference
from quantdrift.core.process.run import Stop
from quantdrift.core.records import Exchange
from quantdrift.shadow.worker import serve
from tests.support.shadow.onnx_models import BIAS, WEIGHT, exchange_of, inputs_of, linear_model, saved
from tests.support.shadow.shadow_workers import DEADLINE_S, published, work_off, worker_config

pytestmark = pytest.mark.integration

SCALES = {"flood": 1.0, "small": 2.0, "third": 3.0}


@pytest.fixture
def config(tmp_path: Path, nats_url: str) -> Config:
    """Return three models of which one reference at a time may be open."""
    paths = {
        name: saved(linear_model(weight=np.float32(scale) * WEIGHT), tmp_path / f"{name}.onnx")
        for name, scale in SCALES.items()
    }
    models = [
        Model(name=name, top_k=2, references=(Reference(path=str(path)),)) for name, path in paths.items()
    ]
    return worker_config(nats_url, models, reference_memory_bytes=1)


def _exchanges(model: str, n: int) -> list[Exchange]:
    """Return exchanges whose candidate answers exactly what the model's reference does."""
    weight = np.float32(SCALES[model]) * WEIGHT
    given = [inputs_of(1, seed) for seed in range(n)]
    return [exchange_of(x, x @ weight + BIAS, model=model) for x in given]


async def _worked_off(config: Config, dsn: str, exchanges: Sequence[Exchange]) -> list[asyncpg.Record]:
    """Publish, run a worker until the stream is empty, and return the comparisons in the order of their batches."""
    await work_off(config, dsn, exchanges)
    return await _compared(dsn)


async def _compared(dsn: str) -> list[asyncpg.Record]:
    connection = await asyncpg.connect(dsn)
    try:
        return list(await connection.fetch(_COMPARISONS))
    finally:
        await connection.close()


async def test_a_flood_starves_nobody(config: Config, postgres_dsn: str) -> None:
    """What other models sent after a flood of 100 batches is compared while most of it still waits.

    Each is compared with its own reference, although one at a time fits into memory.
    """
    exchanges = [*_exchanges("flood", 800), *_exchanges("small", 8), *_exchanges("third", 8)]
    rows = await _worked_off(config, postgres_dsn, exchanges)
    assert len(rows) == 816
    assert max(row["divergence"] for row in rows) == pytest.approx(0, abs=1e-6)
    places = [index for index, row in enumerate(rows) if row["model"] != "flood"]
    assert max(places) < 400


async def test_a_budget_is_for_one_model_alone(config: Config, postgres_dsn: str) -> None:
    """A model that has used its budget up waits; what it may not take others do, and once it may all is compared."""
    n_flood, n_small = 200, 200
    models = tuple(
        msgspec.structs.replace(model, max_replay_ratio=1e-6 if model.name == "flood" else 0.0)
        for model in config.models
    )
    queue = await published(config, [*_exchanges("flood", n_flood), *_exchanges("small", n_small)])
    await queue.close()
    stop, compared = Stop(), Counter[str]()
    capped = msgspec.structs.replace(config, models=models)
    worker = asyncio.create_task(serve(capped, Secrets(dsn=postgres_dsn), stop))
    until_s = time.monotonic() + DEADLINE_S
    while compared["small"] < n_small:
        assert time.monotonic() < until_s, f"in time only {compared}"
        await asyncio.sleep(0.05)
        compared = Counter(row["model"] for row in await _compared(postgres_dsn))
    stop.set()
    assert await asyncio.wait_for(worker, DEADLINE_S) == 0
    assert 0 < compared["flood"] < n_flood / 2
    rows = await _worked_off(config, postgres_dsn, [])
    assert Counter(row["model"] for row in rows) == {"flood": n_flood, "small": n_small}


_COMPARISONS = """
    select model, divergence from comparison
    join batch on batch.id = batch_id join model_version on model_version.id = model_version_id
    order by batch.id, exchange_id
"""
