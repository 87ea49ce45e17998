"""What ONNX Runtime's own tools make of a network: INT8 static and dynamic, FP16, and INT4 weights."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from onnxruntime.quantization.onnx_model import ONNXModel
from onnxruntime.quantization.shape_inference import quant_pre_process
from onnxruntime.transformers.float16 import convert_float_to_float16
from scipy.special import log_softmax, rel_entr

from quantdrift.core.config.schema import Provider
from quantdrift.core.errors import OperatorError
from quantdrift.models.runtimes.onnx.runtime import OnnxRuntime
from tests.quantised.digits import Digits, Images, Logits, divergence_of

pytestmark = pytest.mark.integration


class _Calibration(CalibrationDataReader):  # type: ignore[misc] # the base has no types
    def __init__(self, images: Images) -> None:
        self._batches: Iterator[Images] = iter(np.array_split(images, 8))

    def get_next(self) -> dict[str, Images] | None:
        images = next(self._batches, None)
        return None if images is None else {"image": images}


def _static(digits: Digits, path: Path) -> None:
    prepared = path.with_suffix(".prepared.onnx")
    quant_pre_process(str(digits.path), str(prepared))
    quantize_static(
        str(prepared),
        str(path),
        _Calibration(digits.calibration),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        reduce_range=True,  # else products saturate on processors without VNNI, which is more than coarse numbers do
        weight_type=QuantType.QInt8,
        activation_type=QuantType.QInt8,
    )


def _dynamic(digits: Digits, path: Path) -> None:
    quantize_dynamic(
        str(digits.path), str(path), weight_type=QuantType.QUInt8, op_types_to_quantize=["MatMul", "Gemm"]
    )


def _half(digits: Digits, path: Path) -> None:
    onnx.save(convert_float_to_float16(onnx.load(digits.path), keep_io_types=True), path)


def _four_bits(digits: Digits, path: Path) -> None:
    whole = ONNXModel(onnx.load(digits.path))
    whole.replace_gemm_with_matmul()
    quantiser = MatMulNBitsQuantizer(whole.model, block_size=32, is_symmetric=True)
    quantiser.process()
    onnx.save(quantiser.model.model, path)


MAKERS: dict[str, Callable[[Digits, Path], None]] = {
    "int8-static": _static,
    "int8-dynamic": _dynamic,
    "fp16": _half,
    "int4-weights": _four_bits,
}


@pytest.fixture(scope="module")
def candidates(digits: Digits, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make every candidate once."""
    folder = tmp_path_factory.mktemp("candidates")
    made = {name: folder / f"{name}.onnx" for name in MAKERS}
    for name, path in made.items():
        MAKERS[name](digits, path)
    return made


@pytest.fixture(scope="module")
def reference(digits: Digits) -> OnnxRuntime:
    """Return the network in FP32, as the shadow replays it."""
    return OnnxRuntime(digits.path, provider=Provider.CPU)


def _served(path: Path, images: Images) -> Logits:
    """Return a candidate's answers, each scan served alone."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    answers = [session.run(["logits"], {"image": image[np.newaxis]})[0] for image in images]
    return np.concatenate(answers).astype(np.float32)


def test_the_reference_itself_does_not_drift(digits: Digits, reference: OnnxRuntime) -> None:
    """Served one by one and replayed in batches, it differs by no more than rounding: this is the floor."""
    found = divergence_of(_served(digits.path, digits.images), digits, reference)
    assert not found.flip.any()
    assert found.divergence.max() < 1e-9


@pytest.mark.parametrize("name", MAKERS)
def test_a_quantised_candidate_diverges_from_its_reference(
    name: str, digits: Digits, candidates: dict[str, Path], reference: OnnxRuntime
) -> None:
    """Every scan moves, far above the floor; few decisions do, and every figure is what SciPy says of the same logits."""
    answers = _served(candidates[name], digits.images)
    found = divergence_of(answers, digits, reference)
    assert np.median(found.divergence) > (1e-11 if name == "fp16" else 1e-9)
    assert found.flip.mean() < 0.05
    plain = _served(digits.path, digits.images)
    assert (plain.argmax(axis=1) == digits.labels).mean() > 0.95
    np.testing.assert_array_equal(found.flip, answers.argmax(axis=1) != plain.argmax(axis=1))
    p, q = (np.exp(log_softmax(side.astype(np.float64), axis=1)) for side in (plain, answers))
    np.testing.assert_allclose(found.divergence, rel_entr(p, q).sum(axis=1), rtol=1e-3, atol=1e-7)


def test_coarser_numbers_drift_more(
    digits: Digits, candidates: dict[str, Path], reference: OnnxRuntime
) -> None:
    """FP16 least, INT4 weights most."""
    mean = {
        name: divergence_of(_served(path, digits.images), digits, reference).divergence.mean()
        for name, path in candidates.items()
    }
    assert mean["fp16"] < 0.01 * mean["int8-dynamic"]
    assert max(mean, key=mean.__getitem__) == "int4-weights", mean


@pytest.mark.parametrize("name", MAKERS)
def test_no_quantised_model_passes_for_a_reference(name: str, candidates: dict[str, Path]) -> None:
    """Whatever tool made it, its file is refused as an FP32 reference, and the error says what it found."""
    with pytest.raises(OperatorError, match=r"(?i)int8|uint8|float16|quanti|nbits|int4"):
        OnnxRuntime(candidates[name], provider=Provider.CPU)
