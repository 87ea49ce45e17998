"""References on PyTorch that are compiled."""

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch

from quantdrift.core.errors import OperatorError
from tests.support.shadow.onnx_models import WEIGHT, inputs_of, logits_of
from tests.support.shadow.torch_models import Linear, of_factory

pytestmark = pytest.mark.integration


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's compiler, about PyTorch
def test_a_compiled_module_gives_the_same(tmp_path: Path) -> None:
    """For any number of items, and with an inner layer."""
    runtime = of_factory(tmp_path, compile=True, embedding="product")
    assert runtime.provenance.provider == "cpu compiled"
    for n_items in (2, 9):  # one item alone would be compiled anew, which takes seconds
        x = inputs_of(n_items)
        found = runtime.run({"x": x})
        np.testing.assert_allclose(found["logits"], logits_of(x), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found["product"], x @ WEIGHT, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's compiler, about PyTorch
def test_a_compiled_module_keeps_its_own_layer(tmp_path: Path) -> None:
    """What was compiled for another module of its class without one does not do for it."""
    x = inputs_of(5)
    plain = of_factory(tmp_path, compile=True)
    layered = of_factory(tmp_path, compile=True, embedding="product")
    np.testing.assert_allclose(layered.run({"x": x})["product"], x @ WEIGHT, rtol=1e-5, atol=1e-6)
    assert list(plain.run({"x": x})) == ["logits"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's compiler, about PyTorch
def test_references_of_one_factory_are_all_compiled(tmp_path: Path) -> None:
    """PyTorch gives a function up that it has compiled several times, and would run the others as they are."""
    # By name: what is imported above takes every test's time.
    counted = importlib.import_module("torch._dynamo.utils").counters["frames"]
    torch.compiler.reset()
    with importlib.import_module("torch._dynamo.config").patch(recompile_limit=1):  # it is eight
        counted.clear()
        for embedding in ("", "product"):
            of_factory(tmp_path, compile=True, embedding=embedding)
        assert (counted["total"], counted["ok"]) == (2, 2)


class Squashed(Linear):
    """What takes a compiler: a product alone is left to a library."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the hyperbolic tangent of each logit."""
        return {"logits": torch.tanh(super().forward(x)["logits"]) + 1}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's compiler, about PyTorch
def test_where_nothing_can_be_compiled_the_error_says_what_to_do(tmp_path: Path) -> None:
    """At the start, in a line, without all that the compiler says."""
    torch.compiler.reset()
    with (
        importlib.import_module("torch._inductor.config").patch({"cpp.cxx": (None, "no-such-compiler")}),
        importlib.import_module("torch._inductor.utils").fresh_cache(),
        pytest.raises(OperatorError, match=r"cannot be compiled .*C\+\+ compiler such as g\+\+") as caught,
    ):
        of_factory(tmp_path, factory=f"{__name__}:Squashed", compile=True)
    assert "no-such-compiler" in str(caught.value)
    assert len(str(caught.value)) < 600
    torch.compiler.reset()
