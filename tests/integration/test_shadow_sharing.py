"""Several models in one shadow worker, with a real stream and a real database."""

from collections.abc import Sequence
from pathlib import Path

import asyncpg
import msgspec
import numpy as np
import pytest

from quantdrift.core.config.schema import Config, Model, Reference
from quantdrift.core.records import Exchange
from tests.onnx_models import BIAS, WEIGHT, exchange_of, inputs_of, linear_model, saved
from tests.workers import work_off, worker_config

pytestmark = pytest.mark.integration

DEADLINE_S = 60.0
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
    """A model that has used its budget up waits; what it may not take others do, and in the end all is compared."""
    capped = next(model for model in config.models if model.name == "flood")
    models = tuple(
        msgspec.structs.replace(model, max_replay_ratio=0.001) if model is capped else model
        for model in config.models
    )
    exchanges = [*_exchanges("flood", 24), *_exchanges("small", 200)]
    rows = await _worked_off(msgspec.structs.replace(config, models=models), postgres_dsn, exchanges)
    assert len(rows) == 224
    assert [row["model"] for row in rows][-1] == "flood"


_COMPARISONS = """
    select model, divergence from comparison
    join batch on batch.id = batch_id join model_version on model_version.id = model_version_id
    order by batch.id, exchange_id
"""
