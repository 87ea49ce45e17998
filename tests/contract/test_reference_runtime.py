"""What every reference runtime must do."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from quantdrift.core.config.schema import Model, Provider
from quantdrift.core.errors import QuarantineError
from quantdrift.core.tasks import Task
from quantdrift.models.comparators.registry import comparator_of
from quantdrift.models.runtimes.linear import LinearRuntime
from quantdrift.models.runtimes.onnx.runtime import OnnxRuntime
from quantdrift.models.runtimes.protocol import ReferenceRuntime
from quantdrift.models.runtimes.self_test import SelfTestedRuntime
from quantdrift.shadow.replay.exchange import PreparedExchange
from quantdrift.shadow.replay.references import VersionReference
from quantdrift.shadow.replay.replay import ReplayResult, compare_batch
from quantdrift.testing.runtimes import RuntimeCase, RuntimeSuite
from tests.support.shadow.onnx_models import (
    BIAS,
    WEIGHT,
    exchange_of,
    inputs_of,
    linear_model,
    logits_of,
    saved,
)

pytestmark = pytest.mark.contract

SHIFT = 0.25
Make = Callable[[Path], ReferenceRuntime]


def _linear(_: Path) -> ReferenceRuntime:
    return LinearRuntime(WEIGHT, BIAS)


def _onnx(directory: Path) -> ReferenceRuntime:
    return OnnxRuntime(saved(linear_model(), directory / "linear.onnx"), provider=Provider.CPU, threads=1)


def _proven(_: Path) -> ReferenceRuntime:
    return SelfTestedRuntime(LinearRuntime(WEIGHT, BIAS))


def _exported(directory: Path, embedding: str = "") -> ReferenceRuntime:
    from quantdrift.models.runtimes.pytorch.runtime import TorchRuntime
    from tests.support.shadow import torch_models

    path = torch_models.exported(directory / "linear.pt2")
    return TorchRuntime(torch_models.opening(path, embedding=embedding))


def _factory(directory: Path, embedding: str = "") -> ReferenceRuntime:
    from quantdrift.models.runtimes.pytorch.runtime import TorchRuntime
    from tests.support.shadow import torch_models

    path = torch_models.weights(directory / "linear.safetensors")
    opening = torch_models.opening(path, factory=torch_models.FACTORY, embedding=embedding)
    return TorchRuntime(opening)


def _torchscript(directory: Path) -> ReferenceRuntime:
    from quantdrift.models.runtimes.pytorch.runtime import TorchRuntime
    from tests.support.shadow import torch_models

    path = torch_models.scripted(directory / "linear.pt")
    return TorchRuntime(torch_models.opening(path))


def _linear_embedding(_: Path) -> ReferenceRuntime:
    return LinearRuntime(WEIGHT, BIAS, embedding="product")


def _onnx_embedding(directory: Path) -> ReferenceRuntime:
    path = saved(linear_model(), directory / "linear.onnx")
    return OnnxRuntime(path, provider=Provider.CPU, threads=1, embedding="product")


def _proven_embedding(_: Path) -> ReferenceRuntime:
    return SelfTestedRuntime(LinearRuntime(WEIGHT, BIAS, embedding="product"))


def _exported_embedding(directory: Path) -> ReferenceRuntime:
    return _exported(directory, "product")


def _factory_embedding(directory: Path) -> ReferenceRuntime:
    return _factory(directory, "product")


MAKERS: Mapping[str, Make] = {
    "linear": _linear,
    "onnxruntime": _onnx,
    "proven": _proven,
    "torch-exported": _exported,
    "torch-factory": _factory,
    "torchscript": _torchscript,
}
SLOW = {"torch-exported", "torch-factory", "torchscript"}
RUNTIMES = pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=pytest.mark.slow if name in SLOW else ())
        for name, make in MAKERS.items()
    ],
)


def _case(name: str, make: Make) -> RuntimeCase:
    return RuntimeCase(name, make, lambda n_items: {"x": inputs_of(n_items)})


def of_suite(name: str) -> Callable[[Make, Path], None]:
    """Return a test of the suite, for runtimes that are tested elsewhere: on a server, on a device."""

    def behaviour(make: Make, directory: Path) -> None:
        getattr(RuntimeSuite(), name)(_case(name, make), directory)

    behaviour.__name__ = name
    return behaviour


class TestRuntime(RuntimeSuite):
    """What plug-ins must do, too."""

    cases = tuple(_case(name, make) for name, make in MAKERS.items())


@RUNTIMES
def test_results_are_what_the_model_says(make: Make, tmp_path: Path) -> None:
    """To float32."""
    x = inputs_of(9)
    logits = make(tmp_path).run({"x": x})["logits"]
    np.testing.assert_allclose(logits, logits_of(x), rtol=1e-5, atol=1e-6)
    assert logits.dtype == np.float32


@RUNTIMES
def test_inputs_of_another_shape_are_refused(make: Make, tmp_path: Path) -> None:
    """With fewer features than the model takes."""
    with pytest.raises(QuarantineError, match="replay"):
        make(tmp_path).run({"x": inputs_of(2)[:, :2]})


@RUNTIMES
def test_a_runtime_names_its_tensors(make: Make, tmp_path: Path) -> None:
    """With type and shape."""
    runtime = make(tmp_path)
    assert [str(spec) for spec in runtime.inputs] == ["x: float32[?, 4]"]
    assert [str(spec) for spec in runtime.outputs] == ["logits: float32[?, 3]"]


@RUNTIMES
def test_a_candidate_is_as_far_off_as_it_was_moved(make: Make, tmp_path: Path) -> None:
    """Not at all where it answers what the reference gives, in any batch; by SHIFT where every number is moved by that."""
    model = Model(name="digits", task=Task.REGRESSION)
    runtime = make(tmp_path)
    version_reference = VersionReference(model=model, runtime=runtime, comparator=comparator_of(model))
    sizes = (1, 7, 3, 16)
    own = [runtime.run({"x": inputs_of(n_items, n_items)})["logits"] for n_items in sizes]
    for shift in (0.0, SHIFT):
        batch = [
            PreparedExchange(
                stream_sequence=n_items,
                payload=b"",
                exchange=exchange_of(inputs_of(n_items, n_items), (given + shift).astype(np.float32)),
                version_reference=version_reference,
                inputs={"x": inputs_of(n_items, n_items)},
            )
            for n_items, given in zip(sizes, own, strict=True)
        ]
        for outcome, n_items in zip(compare_batch(batch, most_items=8), sizes, strict=True):
            assert isinstance(outcome, ReplayResult)
            error = outcome.divergences.detail["absolute_error"]
            np.testing.assert_allclose(error, [shift] * n_items, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "make",
    [
        _linear_embedding,
        _onnx_embedding,
        _proven_embedding,
        *(pytest.param(make, marks=pytest.mark.slow) for make in (_exported_embedding, _factory_embedding)),
    ],
)
def test_an_embedding_is_an_output_with_one_entry_per_item(make: Make, tmp_path: Path) -> None:
    """It comes under the name that `embedding` says, last, and other outputs stay what they are."""
    runtime = make(tmp_path)
    x = inputs_of(5)
    found = runtime.run({"x": x})
    assert [spec.name for spec in runtime.outputs] == ["logits", runtime.embedding]
    np.testing.assert_allclose(found[runtime.embedding], x @ WEIGHT, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["logits"], logits_of(x), rtol=1e-5, atol=1e-6)
