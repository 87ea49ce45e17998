"""Batches that are split into few sizes and filled up to them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from quantdrift.core.config.schema import ModelTensor
from quantdrift.core.errors import OperatorError, QuarantineError
from quantdrift.models.runtimes.pytorch.runtime import PaddedPart, TorchRuntime, filled, joined, steps_of
from quantdrift.models.tensors.arrays import Array
from tests.support.shadow.onnx_models import WEIGHT, inputs_of, logits_of
from tests.support.shadow.torch_models import FACTORY, MODEL, exported, opening, weights

pytestmark = pytest.mark.integration

BUCKETS = (1, 4, 8)


@given(st.integers(1, 300), st.sets(st.integers(1, 64), min_size=1, max_size=8))
def test_every_item_is_computed_once_in_a_bucket(n_items: int, buckets: set[int]) -> None:
    """In order, and more than half of what is computed is of use where a smaller bucket could have been filled."""
    sizes = sorted(buckets)
    steps = list(steps_of(n_items, sizes))
    assert [step.begin for step in steps] == [sum(s.n_items for s in steps[:i]) for i in range(len(steps))]
    assert sum(step.n_items for step in steps) == n_items
    for step in steps:
        assert step.size in buckets
        assert 1 <= step.n_items <= step.size
        assert 2 * step.n_items >= step.size or step.n_items < sizes[0]


@given(st.integers(1, 40))
def test_what_is_split_and_filled_comes_back_as_it_was(n_items: int) -> None:
    """The items that fill a step up are gone again; an output that holds no items is that of the first step."""
    x = inputs_of(n_items)
    steps = list(steps_of(n_items, BUCKETS))
    parts = [filled({"x": x}, step) for step in steps]
    assert [len(part["x"]) for part in parts] == [step.size for step in steps]
    assert all(
        (part["x"][step.n_items :] == part["x"][step.n_items - 1]).all()
        for part, step in zip(parts, steps, strict=True)
    )
    found: list[dict[str, Array]] = [{"x": part["x"], "scale": np.full(9, i)} for i, part in enumerate(parts)]
    whole = joined(steps, found)
    np.testing.assert_array_equal(whole["x"], x)
    np.testing.assert_array_equal(whole["scale"], np.zeros(9))


def test_little_is_computed_for_nothing() -> None:
    """Nine items are eight and one, not sixty-four; forty fill a bucket of sixty-four well enough."""
    assert [step.size for step in steps_of(9, (1, 8, 64))] == [8, 1]
    assert list(steps_of(40, (1, 8, 64))) == [PaddedPart(begin=0, n_items=40, size=64)]
    assert [step.size for step in steps_of(150, (1, 8, 64))] == [64, 64, 8, 8, 8]


@contextmanager
def _nothing_is_compiled() -> Iterator[None]:
    torch.compiler.set_stance("fail_on_recompile")
    try:
        yield
    finally:
        torch.compiler.set_stance("default")


@pytest.mark.release
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's compiler, about PyTorch
def test_after_the_start_nothing_is_compiled_whatever_the_size(tmp_path: Path) -> None:
    """Without buckets a single item would be compiled anew."""
    path = weights(tmp_path / "linear.safetensors")
    runtime = TorchRuntime(opening(path, factory=FACTORY, compile=True, buckets=BUCKETS, embedding="product"))
    with _nothing_is_compiled():
        for n_items in range(1, 20):
            x = inputs_of(n_items)
            found = runtime.run({"x": x})
            np.testing.assert_allclose(found["logits"], logits_of(x), rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(found["product"], x @ WEIGHT, rtol=1e-5, atol=1e-6)
    torch.compiler.reset()
    runtime = TorchRuntime(opening(path, factory=FACTORY, compile=True))
    with _nothing_is_compiled(), pytest.raises(QuarantineError, match=r"RuntimeError in eval_frame"):
        runtime.run({"x": inputs_of(1)})


class Sums(torch.nn.Module):
    """Takes items of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((1,), 2.0))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return `logits` : (items, 1), twice the sums of `x` : (items, length)."""
        return {"logits": x.sum(dim=1, keepdim=True) * self.scale}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's compiler, about PyTorch
@pytest.mark.parametrize("buckets", [pytest.param((), marks=pytest.mark.release), (2, 4)])
def test_after_the_start_nothing_is_compiled_whatever_the_length(
    tmp_path: Path, buckets: tuple[int, ...]
) -> None:
    """What is compiled for as many items as they are long would do for no others, and the first batch would wait for more."""
    save_file(Sums().state_dict(), tmp_path / "sums.safetensors")
    inputs = (ModelTensor(name="x", datatype="FP32", shape=(-1, -1)),)
    runtime = TorchRuntime(
        opening(
            tmp_path / "sums.safetensors",
            model=msgspec.structs.replace(MODEL, inputs=inputs),
            factory=f"{__name__}:Sums",
            compile=True,
            buckets=buckets,
        )
    )
    with _nothing_is_compiled():
        for n_items, length in ((4, 9), (2, 30), (3, 3), (7, 2)):
            x = np.arange(n_items * length, dtype=np.float32).reshape(n_items, length)
            found = runtime.run({"x": x})["logits"]
            np.testing.assert_allclose(found[:, 0], 2 * x.sum(axis=1), rtol=1e-5)


def test_a_graph_is_nothing_to_a_cpu(tmp_path: Path) -> None:
    """One configuration does for machines with a GPU and without."""
    path = exported(tmp_path / "linear.pt2")
    runtime = TorchRuntime(opening(path, buckets=BUCKETS, cuda_graphs=True))
    assert runtime.provenance.provider == "cpu"
    x = inputs_of(13)
    np.testing.assert_allclose(runtime.run({"x": x})["logits"], logits_of(x), rtol=1e-5, atol=1e-6)


def test_buckets_need_a_number_of_items_that_varies(tmp_path: Path) -> None:
    """The reference says which input does not."""
    path = weights(tmp_path / "linear.safetensors")
    fixed = (ModelTensor(name="x", datatype="FP32", shape=(4, 4)),)
    with pytest.raises(OperatorError, match=r"x: float32\[4, 4\], whose first dimension"):
        TorchRuntime(
            opening(
                path, model=msgspec.structs.replace(MODEL, inputs=fixed), factory=FACTORY, buckets=BUCKETS
            )
        )
