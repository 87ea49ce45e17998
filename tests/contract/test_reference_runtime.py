"""What every reference runtime must do."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from quantdrift.core.config.schema import Model, Provider
from quantdrift.core.errors import QuarantineError
from quantdrift.core.tasks import Task
from quantdrift.models.comparators.registry import comparator_of
from quantdrift.models.runtimes.linear import LinearRuntime
from quantdrift.models.runtimes.onnx.runtime import OnnxRuntime
from quantdrift.models.runtimes.protocol import ReferenceRuntime, replayed_by
from quantdrift.models.runtimes.self_test import SelfTestedRuntime
from quantdrift.shadow.replay.exchange import PreparedExchange
from quantdrift.shadow.replay.references import VersionReference
from quantdrift.shadow.replay.replay import ReplayResult, compare_batch
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


RUNTIMES = pytest.mark.parametrize(
    "make",
    [
        _linear,
        _onnx,
        _proven,
        *(pytest.param(make, marks=pytest.mark.slow) for make in (_exported, _factory, _torchscript)),
    ],
    ids=["linear", "onnxruntime", "proven", "torch-exported", "torch-factory", "torchscript"],
)


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
    """The digest is the same for the same reference, specs name every tensor, and all of it can be recorded."""
    (tmp_path / "again").mkdir()
    first, second = make(tmp_path), make(tmp_path / "again")
    assert first.artefact.digest == second.artefact.digest
    assert len(first.artefact.digest) == 64
    assert [str(spec) for spec in first.inputs] == ["x: float32[?, 4]"]
    assert [str(spec) for spec in first.outputs] == ["logits: float32[?, 3]"]
    assert first.provenance.runtime
    assert first.provenance.provider
    assert first.artefact.precision == "float32"
    for told in (replayed_by(first), first.artefact):
        assert msgspec.json.decode(msgspec.json.encode(told), type=type(told)) == told


@RUNTIMES
def test_the_order_and_company_of_items_do_not_matter(make: Make, tmp_path: Path) -> None:
    """Items in another order, and among others, give what they gave."""
    runtime = make(tmp_path)
    x = inputs_of(64)
    order = np.random.default_rng(3).permutation(len(x))
    first = runtime.run({"x": x})["logits"]
    np.testing.assert_allclose(runtime.run({"x": x[order]})["logits"], first[order], rtol=0, atol=1e-6)
    np.testing.assert_allclose(runtime.run({"x": x[5:12]})["logits"], first[5:12], rtol=0, atol=1e-6)


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


@RUNTIMES
def test_inputs_may_be_views_and_read_only(make: Make, tmp_path: Path) -> None:
    """What comes from a message cannot be written to, and a part of it need not be contiguous; neither is changed."""
    runtime = make(tmp_path)
    wide = np.repeat(inputs_of(6), 2, axis=1)
    x = wide[::2, ::2]
    wide.flags.writeable = x.flags.writeable = False
    np.testing.assert_allclose(runtime.run({"x": x})["logits"], logits_of(x), rtol=1e-5, atol=1e-6)


@RUNTIMES
def test_a_closed_runtime_computes_no_more_and_may_be_closed_again(make: Make, tmp_path: Path) -> None:
    """Closing leaves nothing behind that would complain."""
    runtime = make(tmp_path)
    runtime.close()
    runtime.close()


@RUNTIMES
def test_without_an_embedding_there_is_none(make: Make, tmp_path: Path) -> None:
    """It is asked for by name."""
    assert make(tmp_path).embedding == ""


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
