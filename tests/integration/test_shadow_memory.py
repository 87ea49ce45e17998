"""Memory of what a shadow worker does with each batch, over mixed shapes and references that come and go."""

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from quantdrift.core.config.schema import Config, Model, Provider, Slice
from quantdrift.core.records import Exchange
from quantdrift.models.comparators.registry import comparator_of
from quantdrift.models.runtimes.cache import CachedRuntime, RuntimeCache, files_bytes
from quantdrift.models.runtimes.onnx.runtime import OnnxRuntime
from quantdrift.models.tensors.codec import fit_inputs
from quantdrift.shadow.pipeline.assess import Assessor
from quantdrift.shadow.replay.exchange import PreparedExchange
from quantdrift.shadow.replay.references import VersionReference
from tests.support.resident_memory import MB, apart, resident_bytes
from tests.support.shadow.onnx_models import WEIGHT, exchange_of, model_of, saved

pytestmark = pytest.mark.integration

LENGTHS = (1, 17, 300, 2_000, 9_000)
N_BATCHES = 500
WIDTH = 4_000_000


def _mean_model(path: Path) -> Path:
    """Write `logits = mean over any length of x, times a weight`."""
    graph = helper.make_graph(
        [
            helper.make_node("ReduceMean", ["x", "axes"], ["mean"], keepdims=0),
            helper.make_node("MatMul", ["mean", "w"], ["logits"]),
        ],
        "mean",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", "length", 4])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 3])],
        [numpy_helper.from_array(WEIGHT, "w"), numpy_helper.from_array(np.array([1], np.int64), "axes")],
    )
    return saved(model_of(graph), path)


def _wide_model(path: Path) -> Path:
    """Write `logits = mean of x times WIDTH ones`: a file of 16 MB, and as much for each item on the way."""
    ones = np.ones((1, WIDTH), np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("Mul", ["x", "ones"], ["wide"]),
            helper.make_node("ReduceMean", ["wide", "axes"], ["logits"]),
        ],
        "wide",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 1])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 1])],
        [numpy_helper.from_array(ones, "ones"), numpy_helper.from_array(np.array([1], np.int64), "axes")],
    )
    return saved(model_of(graph), path)


def test_memory_stays_flat_over_mixed_shapes(tmp_path: Path) -> None:
    """After the first third nothing grows any more: arenas, shapes, slices, references that are opened again."""
    assert apart(_growth_over_mixed_shapes, tmp_path) < 4 * MB


def test_what_a_reference_computes_in_counts(tmp_path: Path) -> None:
    """ONNX Runtime keeps it for the next batch, and it may be far more than the file: the bound is for both."""
    most_bytes = 400 * MB
    counted, grown = apart(_most_of_wide_models, tmp_path, most_bytes)
    assert counted <= most_bytes
    assert grown < most_bytes + 50 * MB


def _growth_over_mixed_shapes(tmp_path: Path) -> float:
    model = Model(name="digits", top_k=2)
    config = Config(models=(model,), slices=(Slice(name="contrast", feature="contrast", edges=(1.0,)),))
    assessor = Assessor(config, "test")
    shelf = RuntimeCache(1)
    comparator = comparator_of(model)
    references = []
    for name in ("first", "second"):
        path = _mean_model(tmp_path / f"{name}.onnx")
        load = lambda path=path: OnnxRuntime(path, provider=Provider.CPU, threads=1)  # noqa: E731
        references.append(CachedRuntime(shelf, load, 1 << 30))
    rng = np.random.default_rng(3)
    resident = []
    for number in range(N_BATCHES):
        runtime = references[number // 10 % 2]
        version_reference = VersionReference(model=model, runtime=runtime, comparator=comparator)
        length = int(rng.choice(LENGTHS))
        batch = []
        for _ in range(int(rng.integers(1, 9))):
            exchange: Exchange = exchange_of(
                rng.standard_normal((1, length, 4), dtype=np.float32), np.zeros((1, 3), np.float32)
            )
            inputs = fit_inputs(exchange.inputs, runtime.inputs, batched=True)
            batch.append(
                PreparedExchange(
                    stream_sequence=1,
                    payload=b"",
                    exchange=exchange,
                    version_reference=version_reference,
                    inputs=inputs,
                )
            )
        stored = assessor.assess(batch, exchange.captured_at)
        assert len(stored.compared) == len(batch)
        resident.append(resident_bytes())
    assert shelf.n_open == 1
    third = N_BATCHES // 3
    return float(np.median(resident[-third:]) - np.median(resident[third : 2 * third]))


def _most_of_wide_models(tmp_path: Path, most_bytes: int) -> tuple[int, int]:
    """Return the most bytes that the shelf counted while models took turns, and by how many the process grew."""
    shelf = RuntimeCache(most_bytes)
    before = resident_bytes()
    references = []
    for name in ("first", "second", "third", "fourth"):
        path = _wide_model(tmp_path / f"{name}.onnx")
        load = lambda path=path: OnnxRuntime(path, provider=Provider.CPU, threads=1)  # noqa: E731
        references.append(CachedRuntime(shelf, load, files_bytes(str(path))))
    assert shelf.n_open == len(references)
    counted, grown = [], []
    x = np.arange(1, 9, dtype=np.float32)[:, np.newaxis]
    for runtime in references * 2:
        for n_items in (8, 1, 8):
            found = runtime.run({"x": x[:n_items]})["logits"]
            np.testing.assert_allclose(found, x[:n_items], rtol=1e-5)
        counted.append(shelf.n_bytes)
        grown.append(resident_bytes() - before)
    return max(counted), max(grown)
