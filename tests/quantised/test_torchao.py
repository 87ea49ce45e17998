"""What PyTorch's current quantisation flow makes of a network: exported static INT8, and INT8 weights in place."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, rel_entr

from quantdrift.core.config.schema import Model, ModelTensor
from quantdrift.core.errors import OperatorError
from quantdrift.models.runtimes.protocol import ReferenceRuntime
from quantdrift.models.runtimes.pytorch.runtime import TorchRuntime
from tests.quantised.digits import Digits, Logits, divergence_of
from tests.quantised.layers import torchao
from tests.support.shadow.torch_models import opening

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

MODEL = Model(
    name="digits",
    inputs=(ModelTensor(name="image", datatype="FP32", shape=(-1, 1, 8, 8)),),
    outputs=(ModelTensor(name="logits", datatype="FP32"),),
)
ITEMS = ({0: torch.export.Dim("items")},)


class _Named(torch.nn.Module):
    """A network whose input and output have names."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return `logits` : (items, 10)."""
        return {"logits": self.network(image)}


def _exported_int8(digits: Digits) -> Any:
    scans = torch.from_numpy(digits.calibration)
    program = torch.export.export(digits.network, (scans[:8],), dynamic_shapes=ITEMS).module()
    pt2e = torchao("quantization.pt2e.quantize_pt2e")
    x86 = torchao("quantization.pt2e.quantizer.x86_inductor_quantizer")
    quantiser = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = pt2e.prepare_pt2e(program, quantiser)
    prepared(scans)
    return pt2e.convert_pt2e(prepared)


def _in_place(config: str) -> Callable[[Digits], Any]:
    def make(digits: Digits) -> Any:
        quantization = torchao("quantization")
        network = copy.deepcopy(digits.network)
        quantization.quantize_(network, getattr(quantization, config)())
        return network

    return make


MAKERS: dict[str, Callable[[Digits], Any]] = {
    "int8-static": _exported_int8,
    "int8-dynamic": _in_place("Int8DynamicActivationInt8WeightConfig"),
    "int8-weights": _in_place("Int8WeightOnlyConfig"),
    "bf16": lambda digits: copy.deepcopy(digits.network).to(torch.bfloat16),
}


def _answers(network: Any, digits: Digits) -> Logits:
    dtype = next((one.dtype for one in network.parameters() if one.dtype is torch.bfloat16), torch.float32)
    with torch.inference_mode():
        logits = network(torch.from_numpy(digits.images).to(dtype))
    answers: Logits = logits.to(torch.float32).numpy()
    return answers


def _saved(network: Any, path: Path) -> Path:
    parameters = list(network.parameters())
    example = torch.zeros(2, 1, 8, 8, dtype=parameters[0].dtype if parameters else torch.float32)
    if example.dtype is not torch.bfloat16:
        example = example.to(torch.float32)
    torch.export.save(
        torch.export.export(_Named(network), (example,), dynamic_shapes={"image": ITEMS[0]}), path
    )
    return path


@pytest.fixture(scope="module")
def reference(digits: Digits, tmp_path_factory: pytest.TempPathFactory) -> ReferenceRuntime:
    """Return the network in FP32 as an exported program, as the shadow replays it."""
    path = _saved(digits.network, tmp_path_factory.mktemp("reference") / "fp32.pt2")
    return TorchRuntime(opening(path, model=MODEL))


@pytest.mark.parametrize("name", MAKERS)
def test_a_quantised_candidate_diverges_from_its_reference(
    name: str, digits: Digits, reference: ReferenceRuntime
) -> None:
    """The network itself shows rounding alone; its quantised copy far more, and exactly what SciPy says."""
    plain = _answers(digits.network, digits)
    floor = divergence_of(plain, digits, reference)
    assert not floor.flip.any()
    assert floor.divergence.max() < 1e-9
    answers = _answers(MAKERS[name](digits), digits)
    found = divergence_of(answers, digits, reference)
    assert np.median(found.divergence) > 1e-9
    assert found.flip.mean() < 0.05
    np.testing.assert_array_equal(found.flip, answers.argmax(axis=1) != plain.argmax(axis=1))
    p, q = (np.exp(log_softmax(side.astype(np.float64), axis=1)) for side in (plain, answers))
    np.testing.assert_allclose(found.divergence, rel_entr(p, q).sum(axis=1), rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("name", ["int8-static", "bf16"])
def test_no_quantised_program_passes_for_a_reference(name: str, digits: Digits, tmp_path: Path) -> None:
    """What it stores or computes with gives it away."""
    path = _saved(MAKERS[name](digits), tmp_path / "candidate.pt2")
    with pytest.raises(OperatorError, match=r"quantised|int8|bfloat16"):
        TorchRuntime(opening(path, model=MODEL))
