"""Figures of sites, against closed forms: a linear network with one quantised tensor."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from quantdrift.release.diagnose.probes import range_use, weight_errors
from quantdrift.release.sites import SwitchableCopy

pytestmark = pytest.mark.integration

WIDTH = 1_000
ROWS = 40


def _linear(
    folder: Path, scale: npt.NDArray[np.float32] | np.float32, *, weight_scale: float = 0.0
) -> SwitchableCopy:
    """Return the copy of y = x W with the range [0, 255 scale] at x, and W in INT8 if it has a scale."""
    rng = np.random.default_rng(1)
    weight = rng.uniform(-1, 1, (WIDTH, 4)).astype(np.float32)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", WIDTH])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 4])
    opsets = [helper.make_opsetid("", 17)]
    plain = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")],
        "fp32",
        [x],
        [y],
        [numpy_helper.from_array(weight, "w")],
    )
    stored = [
        numpy_helper.from_array(np.asarray(scale), "s"),
        numpy_helper.from_array(np.zeros(np.shape(scale), np.uint8), "z"),
    ]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], axis=1),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"], axis=1),
    ]
    if weight_scale:
        integers = np.clip(np.rint(weight / weight_scale), -128, 127).astype(np.int8)
        stored += [
            numpy_helper.from_array(integers, "w_quantized"),
            numpy_helper.from_array(np.array(weight_scale, np.float32), "ws"),
        ]
        nodes.append(helper.make_node("DequantizeLinear", ["w_quantized", "ws"], ["wd"]))
    else:
        stored.append(numpy_helper.from_array(weight, "w"))
    nodes.append(helper.make_node("MatMul", ["d", "wd" if weight_scale else "w"], ["y"], name="product"))
    quantised = helper.make_graph(nodes, "int8", [x], [y], stored)
    for name, graph in (("fp32", plain), ("int8", quantised)):
        onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), folder / f"{name}.onnx")
    return SwitchableCopy(folder / "int8.onnx", folder / "fp32.onnx")


def _uniform(low: float, high: float) -> npt.NDArray[np.float32]:
    """Return equally spaced values of U(low, high), mixed over the rows."""
    grid = low + (high - low) * (np.arange(ROWS * WIDTH) + 0.5) / (ROWS * WIDTH)
    return np.random.default_rng(0).permutation(grid).reshape(ROWS, WIDTH).astype(np.float32)


def test_rounding_of_uniform_values_is_a_twelfth_of_the_square_of_the_step(tmp_path: Path) -> None:
    """Inside its range a pair has the error s^2 / 12 within 1 %, clips nothing, and uses all of its levels."""
    step = np.float32(1 / 255)
    use = range_use(_linear(tmp_path, step), {"x": _uniform(0, 1)})[0]
    assert use.error.mean() == pytest.approx(float(step) ** 2 / 12, rel=0.01)
    assert not use.outside.any()
    assert not use.clipping.any()
    assert use.levels.max() <= 256
    assert use.levels.mean() > 240
    assert use.used.mean() == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("reach", [0.25, 0.5, 0.9])
def test_a_range_saturates_exactly_what_lies_outside(reach: float, tmp_path: Path) -> None:
    """The range [0, r] over U(0, 1) saturates 1 - r, and clips the mean square (1 - r)^3 / 3."""
    use = range_use(_linear(tmp_path, np.float32(reach / 255)), {"x": _uniform(0, 1)})[0]
    assert use.outside.mean() == pytest.approx(1 - reach, abs=1e-9)
    assert use.clipping.mean() == pytest.approx((1 - reach) ** 3 / 3, rel=1e-3)


def test_a_range_that_is_too_wide_is_hardly_used(tmp_path: Path) -> None:
    """Of [0, 1], values up to 0.01 use 1 % and three or four levels, whatever else is in the batch."""
    values = np.concatenate([_uniform(0, 0.01), _uniform(0, 1)])
    use = range_use(_linear(tmp_path, np.float32(1 / 255)), {"x": values})[0]
    assert use.used[:ROWS].mean() == pytest.approx(0.01, rel=0.02)
    assert set(use.levels[:ROWS]) <= {3.0, 4.0}
    assert use.levels[ROWS:].mean() > 240


def test_each_channel_has_its_own_range(tmp_path: Path) -> None:
    """Where every second channel reaches to 0.5 alone, a quarter of all values of U(0, 1) are outside."""
    scale = np.full(WIDTH, 1 / 255, np.float32)
    scale[::2] = 0.5 / 255
    copy = _linear(tmp_path, scale)
    use = range_use(copy, {"x": _uniform(0, 1)})[0]
    assert copy.sites[0].axis == 1
    assert use.outside.mean() == pytest.approx(0.25, abs=0.01)


def test_the_error_of_a_weight_is_that_of_its_steps(tmp_path: Path) -> None:
    """Uniform weights in [-1, 1] at a step s have the relative error s / 2; a fourfold step four times of it."""
    fine = weight_errors(_linear(tmp_path, np.float32(1 / 255), weight_scale=2 / 255))
    coarse = weight_errors(_linear(tmp_path, np.float32(1 / 255), weight_scale=8 / 255))
    (site,) = fine
    assert fine[site].relative == pytest.approx(1 / 255, rel=0.03)
    assert coarse[site].relative == pytest.approx(4 / 255, rel=0.03)
    assert fine[site].channel is None
