"""What every reference runtime must do."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from quantdrift.core.config.schema import Provider
from quantdrift.core.errors import QuarantineError
from shadow.linear import LinearRuntime
from shadow.onnx_runtime import OnnxRuntime
from shadow.proven import ProvenRuntime
from shadow.runtime import ReferenceRuntime
from tests.onnx_models import BIAS, WEIGHT, inputs_of, linear_model, logits_of, saved

pytestmark = pytest.mark.contract

Make = Callable[[Path], ReferenceRuntime]


def _linear(_: Path) -> ReferenceRuntime:
    return LinearRuntime(WEIGHT, BIAS)


def _onnx(directory: Path) -> ReferenceRuntime:
    return OnnxRuntime(saved(linear_model(), directory / "linear.onnx"), provider=Provider.CPU, threads=1)


def _proven(_: Path) -> ReferenceRuntime:
    return ProvenRuntime(LinearRuntime(WEIGHT, BIAS))


def _linear_embedding(_: Path) -> ReferenceRuntime:
    return LinearRuntime(WEIGHT, BIAS, embedding="product")


def _onnx_embedding(directory: Path) -> ReferenceRuntime:
    path = saved(linear_model(), directory / "linear.onnx")
    return OnnxRuntime(path, provider=Provider.CPU, threads=1, embedding="product")


def _proven_embedding(_: Path) -> ReferenceRuntime:
    return ProvenRuntime(LinearRuntime(WEIGHT, BIAS, embedding="product"))


RUNTIMES = pytest.mark.parametrize("make", [_linear, _onnx, _proven], ids=["linear", "onnxruntime", "proven"])


@RUNTIMES
def test_results_do_not_depend_on_the_batch(make: Make, tmp_path: Path) -> None:
    """An item gives the same alone and among others, and it is what the model says."""
    runtime = make(tmp_path)
    x = inputs_of(9)
    together = runtime.run({"x": x})["logits"]
    alone = np.concatenate([runtime.run({"x": x[i : i + 1]})["logits"] for i in range(len(x))])
    np.testing.assert_allclose(together, alone, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(together, logits_of(x), rtol=1e-5, atol=1e-6)
    assert together.dtype == np.float32


@RUNTIMES
def test_inputs_that_cannot_be_computed_are_refused_as_replay_errors(make: Make, tmp_path: Path) -> None:
    """A wrong name and a wrong shape raise `QuarantineError` with the reason `replay`."""
    runtime = make(tmp_path)
    with pytest.raises(QuarantineError, match="replay"):
        runtime.run({"y": inputs_of(2)})
    with pytest.raises(QuarantineError, match="replay"):
        runtime.run({"x": inputs_of(2)[:, :2]})


@RUNTIMES
def test_a_runtime_says_what_it_is(make: Make, tmp_path: Path) -> None:
    """The digest is the same for the same reference, and specs name every tensor."""
    (tmp_path / "again").mkdir()
    first, second = make(tmp_path), make(tmp_path / "again")
    assert first.artefact.digest == second.artefact.digest
    assert len(first.artefact.digest) == 64
    assert [str(spec) for spec in first.inputs] == ["x: float32[?, 4]"]
    assert [str(spec) for spec in first.outputs] == ["logits: float32[?, 3]"]
    assert first.provenance.runtime
    assert first.provenance.provider
    assert first.artefact.precision == "float32"


@RUNTIMES
def test_without_an_embedding_there_is_none(make: Make, tmp_path: Path) -> None:
    """It is asked for by name."""
    assert make(tmp_path).embedding == ""


@pytest.mark.parametrize("make", [_linear_embedding, _onnx_embedding, _proven_embedding])
def test_an_embedding_is_an_output_with_one_entry_per_item(make: Make, tmp_path: Path) -> None:
    """It comes under the name that `embedding` says, last, and other outputs stay what they are."""
    runtime = make(tmp_path)
    x = inputs_of(5)
    found = runtime.run({"x": x})
    assert [spec.name for spec in runtime.outputs] == ["logits", runtime.embedding]
    np.testing.assert_allclose(found[runtime.embedding], x @ WEIGHT, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["logits"], logits_of(x), rtol=1e-5, atol=1e-6)
