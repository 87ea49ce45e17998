"""The examples of comparators: each is made, checked, and replayed."""

import importlib
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from quantdrift.cli import main
from quantdrift.core.config.load import load
from quantdrift.core.config.schema import Provider
from shadow.comparators.choice import comparator_of
from shadow.opening import open_reference, opening_of
from shadow.references import Judge
from shadow.replay import Compared, Prepared, compare_batch
from shadow.runtime import Array, ReferenceRuntime
from tests.onnx_models import exchange_of, tensor

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2] / "examples"
NAMES = ("classification", "multilabel", "regression", "embedding", "ranking", "tensor")
EVERY = pytest.mark.parametrize("name", NAMES)


@pytest.fixture
def config_path(name: str, tmp_path: Path) -> Path:
    """Return the configuration of an example, beside the reference that it made."""
    importlib.import_module(f"examples.{name}.make").make(tmp_path)
    return Path(shutil.copy(ROOT / name / "config.toml", tmp_path))


@EVERY
def test_its_configuration_is_sound_and_its_reference_opens(config_path: Path) -> None:
    """As `quantdrift config check --references` says, without a remark about a missing file."""
    ran = CliRunner().invoke(main, ["config", "check", "--references", "--config", str(config_path)])
    assert ran.exit_code == 0, ran.output
    assert "is sound" in ran.output
    assert "sha256" in ran.output
    assert "does not exist" not in ran.output


def _judge(config_path: Path) -> Judge:
    config = load(config_path, {})
    (model,) = config.models
    (reference,) = model.references
    opening = msgspec.structs.replace(
        opening_of(config, model, reference, ""), provider=Provider.CPU, threads=1
    )
    return Judge(model=model, runtime=open_reference(opening), comparator=comparator_of(model))


def _prepared(judge: Judge, x: Array, outputs: dict[str, Array]) -> Prepared:
    exchange = msgspec.structs.replace(
        exchange_of(x, x, model=judge.model.name),
        outputs=tuple(tensor(name, output) for name, output in outputs.items()),
    )
    (spec,) = judge.runtime.inputs
    return Prepared(stream_sequence=1, payload=b"", exchange=exchange, judge=judge, inputs={spec.name: x})


def _answers(runtime: ReferenceRuntime, x: Array) -> dict[str, Array]:
    (spec,) = runtime.inputs
    return runtime.run({spec.name: x})


@EVERY
def test_it_replays_what_is_served(config_path: Path) -> None:
    """What the reference itself would serve does not diverge at all; with noise on it, every item does."""
    judge = _judge(config_path)
    rng = np.random.default_rng(11)
    x: np.ndarray[Any, Any] = rng.normal(size=(12, 8)).astype(np.float32)
    same = _answers(judge.runtime, x)
    off = {name: one + rng.normal(size=one.shape).astype(np.float32) for name, one in same.items()}
    equal, noisy = compare_batch([_prepared(judge, x, same), _prepared(judge, x, off)], most_items=64)
    assert isinstance(equal, Compared)
    assert isinstance(noisy, Compared)
    assert not equal.divergences.flip.any()
    np.testing.assert_allclose(equal.divergences.divergence, 0, atol=1e-5)
    assert noisy.divergences.flip.any()
    assert np.count_nonzero(noisy.divergences.divergence) >= 6
