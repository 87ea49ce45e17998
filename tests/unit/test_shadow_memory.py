"""Memory of what a shadow worker does with each batch, over mixed shapes and references that come and go."""

import resource
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from quantdrift.core.config.schema import Config, Model, Provider, Slice
from quantdrift.core.records import Exchange
from shadow.assessor import Assessor
from shadow.comparators.choice import comparator_of
from shadow.onnx_runtime import OnnxRuntime
from shadow.prepared import Prepared
from shadow.references import Judge
from shadow.shelf import Shelf, ShelvedRuntime
from shadow.tensor import fit_inputs
from tests.onnx_models import WEIGHT, exchange_of, model_of, saved

pytestmark = pytest.mark.unit

LENGTHS = (1, 17, 300, 2_000, 9_000)
N_BATCHES = 500
MB = 1_000_000


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


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_memory_stays_flat_over_mixed_shapes(tmp_path: Path) -> None:
    """After the first third nothing grows any more: arenas, shapes, slices, references that are opened again."""
    model = Model(name="digits", top_k=2)
    config = Config(models=(model,), slices=(Slice(name="contrast", feature="contrast", edges=(1.0,)),))
    assessor = Assessor(config, "test", ())
    shelf = Shelf(1)
    comparator = comparator_of(model)
    references = []
    for name in ("first", "second"):
        path = _mean_model(tmp_path / f"{name}.onnx")
        load = lambda path=path: OnnxRuntime(path, provider=Provider.CPU, threads=1)  # noqa: E731
        references.append(ShelvedRuntime(shelf, load, 1 << 30))
    rng = np.random.default_rng(3)
    resident = []
    for number in range(N_BATCHES):
        runtime = references[number // 10 % 2]
        judge = Judge(model=model, runtime=runtime, comparator=comparator)
        length = int(rng.choice(LENGTHS))
        batch = []
        for _ in range(int(rng.integers(1, 9))):
            exchange: Exchange = exchange_of(
                rng.standard_normal((1, length, 4), dtype=np.float32), np.zeros((1, 3), np.float32)
            )
            inputs = fit_inputs(exchange.inputs, runtime.inputs, batched=True)
            batch.append(
                Prepared(stream_sequence=1, payload=b"", exchange=exchange, judge=judge, inputs=inputs)
            )
        stored = assessor.assess(batch, exchange.captured_at)
        assert len(stored.compared) == len(batch)
        resident.append(_resident_bytes())
    assert shelf.n_open == 1
    third = N_BATCHES // 3
    growth = np.median(resident[-third:]) - np.median(resident[third : 2 * third])
    assert growth < 4 * MB
