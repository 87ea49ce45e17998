"""The switchable copy of a QDQ candidate: it is the reference with all sites in FP32, and the candidate with none."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper
from onnxruntime.quantization import QuantFormat, quantize_static

from benchmarks.repair.network import INPUT, OUTPUT, Images, drawn, pages, quantise, write
from quantdrift.core.errors import OperatorError
from quantdrift.release.diagnose.copies import check
from quantdrift.release.sites import SiteKind, SwitchableCopy

pytestmark = pytest.mark.integration

VARIANTS: dict[str, dict[str, Any]] = {
    "int8 by channel": {"reduced": True},
    "uint8 by tensor": {"per_channel": False, "unsigned": True, "reduced": True},
    "uint8 weights": {"per_channel": False, "unsigned": True, "unsigned_weights": True},
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the residual network in FP32."""
    path = tmp_path_factory.mktemp("sites") / "fp32.onnx"
    write(path, pages(), 1)
    return path


@pytest.fixture(scope="module")
def candidate(reference: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Quantise it as ONNX Runtime does by default."""
    path = tmp_path_factory.mktemp("sites") / "int8.onnx"
    quantise(reference, path, pages().learnable)
    return path


@pytest.fixture(scope="module")
def images() -> Images:
    """Draw pages that no calibration has seen."""
    return drawn(pages().held_out, 2_000, np.random.default_rng(2))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_copy_is_the_reference_or_the_candidate(
    variant: str, reference: Path, images: Images, tmp_path: Path
) -> None:
    """Conv, Gemm, MatMul, Add, Concat, batch norms, Relu and Clip: within 1e-4 of the reference, and the kernels' decisions."""
    candidate = tmp_path / "int8.onnx"
    quantise(reference, candidate, pages().learnable, **VARIANTS[variant])
    kinds = {node.op_type for node in onnx.load(candidate).graph.node}
    assert {"Conv", "Gemm", "MatMul", "Add", "Concat"} <= kinds
    assert not kinds & {"BatchNormalization", "Relu", "Clip"}
    copy = SwitchableCopy(candidate, reference)
    found = check(copy, {INPUT: images})
    assert copy.unmatched == ()
    assert found.difference < 1e-4
    assert found.agreement >= 0.999
    assert found.holds
    names = [site.name for site in copy.sites]
    assert {"A:image", "A:stem_relu", "A:block2_clip", "A:joined", "A:logits", "W:node_last"} <= set(names)
    assert len(names) == len(set(names))


def test_one_site_changes_what_its_range_has_done(reference: Path, candidate: Path, images: Images) -> None:
    """The logits' own pair rounds to its steps; in FP32 they are no longer on its grid, and nothing before it has changed."""
    copy = SwitchableCopy(candidate, reference)
    number = [site.name for site in copy.sites].index("A:logits")
    step = float(copy.sites[number].scale)
    inputs = {INPUT: images[:64]}
    rounded, free = (copy.run(inputs, restored)[OUTPUT] for restored in ((), (number,)))
    np.testing.assert_allclose(rounded / step, np.rint(rounded / step), atol=1e-3)
    assert np.abs(free / step - np.rint(free / step)).mean() > 0.1
    assert np.abs(rounded - free).max() <= step / 2 * 1.001


def test_factors_of_one_change_nothing_and_others_do(
    reference: Path, candidate: Path, images: Images
) -> None:
    """A placebo multiplies scales: by 1 it is the candidate, bit by bit."""
    copy = SwitchableCopy(candidate, reference)
    inputs = {INPUT: images[:64]}
    ones = np.ones(len(copy.sites))
    np.testing.assert_array_equal(copy.run(inputs)[OUTPUT], copy.run(inputs, factors=ones)[OUTPUT])
    assert (copy.run(inputs)[OUTPUT] != copy.run(inputs, factors=1.03 * ones)[OUTPUT]).any()


def test_weights_are_matched_by_value_where_names_differ(
    reference: Path, candidate: Path, tmp_path: Path
) -> None:
    """A reference whose weights were renamed gives the same copy; one with other values is reported, and is not guessed."""
    renamed, other = (tmp_path / f"{name}.onnx" for name in ("renamed", "other"))
    folded = tmp_path / "folded.onnx"
    _fold(reference, folded)
    model = onnx.load(folded)
    _rename(model, "stranger.")
    onnx.save(model, renamed)
    assert SwitchableCopy(candidate, renamed).unmatched == ()
    for tensor in model.graph.initializer:
        if tensor.name == "stranger.last.weight":
            array = numpy_helper.to_array(tensor)
            tensor.CopyFrom(numpy_helper.from_array(array[::-1].copy(), tensor.name))
    onnx.save(model, other)
    copy = SwitchableCopy(candidate, other)
    assert copy.unmatched == ("last.weight",)
    weights = [site.name for site in copy.sites if site.kind is SiteKind.WEIGHT]
    assert "W:node_last" in weights, "its bias is matched"


def test_a_candidate_of_a_fixed_number_of_items_is_run_in_steps(
    reference: Path, candidate: Path, tmp_path: Path
) -> None:
    """A graph for four items at once computes nine as the free one does."""
    fixed = tmp_path / "fixed.onnx"
    model = onnx.load(candidate)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 4
    onnx.save(model, fixed)
    inputs = {INPUT: pages().held_out[:9]}
    free, stepped = (SwitchableCopy(path, reference).run(inputs)[OUTPUT] for path in (candidate, fixed))
    assert stepped.shape == (9, 10)
    np.testing.assert_allclose(stepped, free, atol=1e-5)


def test_static_operators_on_integers_and_files_in_fp32_are_refused(reference: Path, tmp_path: Path) -> None:
    """No site is named in integer operators or in a graph without quantisation; the message says what would do."""
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):  # type: ignore[misc] # the base has no types
        def __init__(self) -> None:
            self._batches = iter([pages().learnable[:64]])

        def get_next(self) -> dict[str, Images] | None:
            batch = next(self._batches, None)
            return None if batch is None else {INPUT: batch}

    operators = tmp_path / "operators.onnx"
    quantize_static(str(reference), str(operators), Reader(), quant_format=QuantFormat.QOperator)
    with pytest.raises(OperatorError, match=r"QLinear.*QDQ"):
        SwitchableCopy(operators, reference)
    with pytest.raises(OperatorError, match="nothing that is quantised"):
        SwitchableCopy(reference, reference)
    with pytest.raises(OperatorError, match="cannot be read"):
        SwitchableCopy(tmp_path / "missing.onnx", reference)


def _fold(reference: Path, path: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(path)
    onnxruntime.InferenceSession(str(reference), options, providers=["CPUExecutionProvider"])


def _rename(model: Any, prefix: str) -> None:
    """Rename all initialisers."""
    names = {tensor.name for tensor in model.graph.initializer}
    for tensor in model.graph.initializer:
        tensor.name = prefix + tensor.name
    for node in model.graph.node:
        for place, name in enumerate(node.input):
            if name in names:
                node.input[place] = prefix + name
