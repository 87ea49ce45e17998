"""What a candidate's weights are by the files alone, and networks full of elementwise operators, which nobody chose."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.random import Generator
from onnx import numpy_helper

from benchmarks.repair.faults import Fault, Kind, Patient
from benchmarks.repair.network import INPUT, OUTPUT, drawn, pages, quantise
from benchmarks.repair.shapes import Shape, write_shape
from quantdrift.core.config.models import OutputKind
from quantdrift.core.config.schema import Reference
from quantdrift.core.errors import OperatorError
from quantdrift.facts.diagnosis import WeightFault, WeightsOrigin
from quantdrift.models.comparators.classes.classification import ClassificationComparator
from quantdrift.models.comparators.protocol import Divergences
from quantdrift.models.tensors.arrays import Outputs
from quantdrift.release.diagnose.blame import diagnose
from quantdrift.release.diagnose.kernels import kernels_of, others_among
from quantdrift.release.origin import check_origin, named, origins_of, origins_of_files
from quantdrift.release.sites import SwitchableCopy, Weight
from tests.support.commands import invoked

pytestmark = pytest.mark.integration

COMPARATOR = ClassificationComparator(OutputKind.LOGITS, 5)
N_PAGES = 600


def _compare(candidate: Outputs, reference: Outputs) -> Divergences:
    return COMPARATOR.compare(candidate[OUTPUT], reference[OUTPUT])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write both networks, and what `quantize_static` makes of them: with weights of 7 bits, whose kernels are exact on every processor."""
    folder = tmp_path_factory.mktemp("origin")
    for shape in Shape:
        write_shape(shape, folder / f"{shape}.onnx", pages())
        quantise(folder / f"{shape}.onnx", folder / f"{shape}-int8.onnx", pages().learnable, reduced=True)
    return folder


def _patient(folder: Path, shape: Shape) -> Patient:
    images = drawn(pages().held_out, N_PAGES, np.random.default_rng(2))
    return Patient(folder / f"{shape}.onnx", folder / f"{shape}-int8.onnx", images, folder)


def _perturbed(path: Path, to: Path, spread: float) -> Path:
    """Write a network whose weights differ by so much of their standard deviation, as those of another checkpoint do."""
    model, rng = onnx.load(path), np.random.default_rng(1)
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.dtype.kind == "f" and array.size > 16:
            moved = array + rng.normal(0, spread * array.std(), array.shape)
            tensor.CopyFrom(numpy_helper.from_array(moved.astype(np.float32), tensor.name))
    onnx.save(model, to)
    return to


@pytest.mark.parametrize(
    ("shape", "fault"),
    [
        (Shape.TRANSFORMER, Fault(site="W:node_block0.down_product", kind=Kind.ROUNDING, strength=5)),
        (Shape.PERCEPTRON, Fault(site="A:block0.gelu_gelu", kind=Kind.NARROW, strength=9)),
    ],
    ids=str,
)
def test_an_ordinary_network_of_another_shape_is_diagnosed(shape: Shape, fault: Fault, folder: Path) -> None:
    """Elementwise operators, softmax and constants of one number are quantised; a fault is still the first that is named."""
    patient = _patient(folder, shape)
    assert patient.flips([fault]) > 0.05
    copy = SwitchableCopy(patient.write([fault]), patient.reference)
    assert any(weight.raw.ndim == 0 for weight in copy.weights)
    found = diagnose(copy, _compare, {INPUT: patient.images}, budget=0.03, elsewhere={INPUT: patient.images})
    assert found.blamed[0].site == fault.site
    assert found.n_tensors > 10


def test_a_tensor_that_is_one_number_has_a_value_for_each_item(folder: Path) -> None:
    """Ranges over scalars are measured like others, however many items one run takes."""
    copy = SwitchableCopy(folder / "perceptron-int8.onnx", folder / "perceptron.onnx")
    images = pages().held_out[:40]
    ranges = copy.ranges({INPUT: images}, [1.0, 0.99])
    assert ranges[0].keys() == ranges[1].keys()
    assert all(low <= high for low, high in ranges[0].values())


def test_a_sound_candidate_is_the_reference_rounded(folder: Path) -> None:
    """No value of a sound file is off by more than half a step and a little."""
    for shape in Shape:
        compared = origins_of_files(folder / f"{shape}-int8.onnx", folder / f"{shape}.onnx")
        assert compared is not None
        assert (compared[0].origin, compared[0].off, compared[1]) == (WeightsOrigin.ROUNDED, (), ())


@pytest.mark.parametrize("spread", [0.1, 0.5])
def test_a_candidate_of_an_earlier_checkpoint_is_refused_before_any_input_runs(
    spread: float, folder: Path, tmp_path: Path
) -> None:
    """Rounding does not explain most values of most tensors: no cause is made up for them."""
    earlier = _perturbed(folder / "perceptron.onnx", tmp_path / "earlier.onnx", spread)
    quantise(earlier, tmp_path / "int8.onnx", pages().learnable)
    copy = SwitchableCopy(tmp_path / "int8.onnx", folder / "perceptron.onnx")
    assert origins_of(copy.weights).origin is WeightsOrigin.OTHER
    with pytest.raises(OperatorError, match="was not made from this reference"):
        diagnose(copy, _compare, {}, budget=0.01)


def test_the_gate_and_the_check_of_the_configuration_refuse_another_checkpoint(
    folder: Path, tmp_path: Path
) -> None:
    """Exit code 2 with a sentence, before any input is read; a model that was trained further is judged where somebody says so."""
    earlier = _perturbed(folder / "perceptron.onnx", tmp_path / "earlier.onnx", 0.2)
    quantise(earlier, tmp_path / "stale.onnx", pages().learnable)
    np.savez(tmp_path / "rec.npz", allow_pickle=False, **{INPUT: pages().held_out[:40]})
    (tmp_path / "config.toml").write_text(
        f'[[models]]\nname = "digits"\n[[models.references]]\npath = "{folder / "perceptron.onnx"}"\n',
        encoding="utf-8",
    )
    for words in (
        ("gate", "stale.onnx", "--inputs", "rec.npz"),
        ("config", "check", "--references", "--candidate", "stale.onnx"),
    ):
        done = invoked(*words, directory=tmp_path)
        assert (done.returncode, "was not made from this reference" in done.stderr) == (2, True), done.stderr
    judged = invoked("gate", "stale.onnx", "--inputs", "rec.npz", "--other-weights", directory=tmp_path)
    assert judged.returncode in {3, 4}, judged.stderr
    sound = folder / "perceptron-int8.onnx"
    assert check_origin(sound, Reference(path=str(folder / "perceptron.onnx"))) == []


@pytest.mark.parametrize(
    ("site", "fault", "expected"),
    [
        ("W:node_last_product/MatMulAddFusion", Kind.CHANNEL, WeightFault.CHANNELS),
        ("W:node_block0.up_product/MatMulAddFusion", Kind.ROUNDING, WeightFault.VALUES),
    ],
    ids=["channel", "rounding"],
)
def test_one_faulty_tensor_is_named_by_the_files_alone(
    site: str, fault: Kind, expected: WeightFault, folder: Path
) -> None:
    """An injected fault is exactly one tensor, and is told with what is wrong."""
    patient = _patient(folder, Shape.PERCEPTRON)
    file = patient.write([Fault(site=site, kind=fault, strength=4, channel=3)])
    compared = origins_of_files(file, patient.reference)
    assert compared is not None
    (off,) = compared[1]
    assert (off.site, off.tensor.fault) == (site, expected)
    if expected is WeightFault.CHANNELS:
        assert off.tensor.channels == (3,)


def _weights(change: Any, *, bits: int = 8) -> list[Weight]:
    """Return five layers as a change of their values, rounded, has made them."""
    rng = np.random.default_rng(3)
    weights = []
    for site in range(5):
        raw = rng.normal(0, 1, (48, 32)).astype(np.float32)
        top = 2 ** (bits - 1) - 1
        step = np.abs(raw).max() / top
        served = change(raw, step, rng)
        weights.append(
            Weight(
                site=site,
                raw=raw,
                served=served.astype(np.float32),
                axis=None,
                step=np.asarray(step),
                low=np.asarray(-(top + 1) * step),
                high=np.asarray(top * step),
            )
        )
    return weights


def _by_gptq(raw: Any, step: float, rng: Generator) -> Any:
    """Round row by row, and let the rows that are left make up for each error, as GPTQ does with inputs that are correlated."""
    inputs = rng.normal(size=(512, len(raw))) @ rng.normal(size=(len(raw), len(raw)))
    hessian = inputs.T @ inputs / len(inputs)
    hessian += 0.01 * np.diag(hessian).mean() * np.eye(len(raw))
    factor = np.linalg.cholesky(np.linalg.inv(hessian)).T
    left, served = raw.astype(np.float64), np.zeros(raw.shape)
    for row in range(len(raw)):
        served[row] = np.rint(left[row] / step) * step
        left[row:] -= np.outer(factor[row, row:], (left[row] - served[row]) / factor[row, row])
    return served


def _by_awq(raw: Any, step: float, rng: Generator) -> Any:
    factors = np.exp(-np.abs(rng.normal(0, 0.4, (len(raw), 1))))
    return np.clip(np.rint(raw * factors / step), -128, 127) * step


def _shifted(raw: Any, step: float, rng: Generator) -> Any:  # noqa: ARG001 - as the others
    return (np.rint(raw / step) + 3) * step


@pytest.mark.parametrize("bits", [4, 8])
def test_methods_that_move_weights_on_purpose_are_told_from_another_checkpoint(bits: int) -> None:
    """GPTQ moves some values of each tensor by whole steps; its answers judge it. AWQ scales channels, and says so."""
    moved = origins_of(_weights(_by_gptq, bits=bits))
    assert (moved.origin, moved.refusal) == (WeightsOrigin.MOVED, "")
    assert len(moved.off) == moved.n_tensors == 5
    assert named(moved, ()) == ()
    scaled = origins_of(_weights(_by_awq))
    assert scaled.origin is WeightsOrigin.SCALED
    assert "AWQ" in scaled.refusal


def test_a_wrong_zero_point_is_a_shift_of_all_values() -> None:
    """Every value is off by the same number of steps."""
    (only, *_) = _weights(_shifted)
    (off,) = origins_of([only]).off
    assert off.fault is WeightFault.SHIFT


@pytest.mark.parametrize(
    ("shape", "form"), [(Shape.TRANSFORMER, {}), (Shape.PERCEPTRON, {"unsigned": True})], ids=str
)
def test_kernels_that_compute_something_else_are_named_with_a_remedy(
    shape: Shape, form: dict[str, bool], folder: Path, tmp_path: Path
) -> None:
    """Signed weights of 8 bits saturate on processors without VNNI; unsigned weights, and 7 bits, do not anywhere.

    So they do with signed activations, of which ONNX Runtime makes unsigned ones there.
    """
    patient, images = _patient(folder, shape), drawn(pages().held_out, 2_000, np.random.default_rng(2))
    assert others_among(kernels_of(patient.candidate, {INPUT: images})) == ()
    quantise(
        patient.reference, tmp_path / "u8u8.onnx", pages().learnable, unsigned=True, unsigned_weights=True
    )
    assert others_among(kernels_of(tmp_path / "u8u8.onnx", {INPUT: images})) == ()
    quantise(patient.reference, tmp_path / "x8s8.onnx", pages().learnable, **form)
    others = others_among(kernels_of(tmp_path / "x8s8.onnx", {INPUT: images}))
    if not others:
        pytest.skip("this processor adds up products of 8-bit numbers in 32 bits")
    assert {other.operator for other in others} <= {"Gemm", "MatMul"}
    copy = SwitchableCopy(tmp_path / "x8s8.onnx", patient.reference)
    with pytest.raises(
        OperatorError, match=r"in (Gemm|MatMul) at .*reduce_range=True.*x64quantprecision.*VNNI"
    ):
        diagnose(copy, _compare, {INPUT: images}, budget=0.01)
