"""Make a tiny segmentation model and a copy with weights of 4 bits: `python -m examples.segmentation.make`.

One convolution gives each pixel a score for background, red, green and blue.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

REFERENCE, CANDIDATE = "reference.onnx", "candidate.onnx"
SIDE, COLOURS = 48, 3

Images = npt.NDArray[np.float32]


def make(directory: Path) -> None:
    """Write reference and candidate to `directory`."""
    weight = _weight()
    step = np.abs(weight).max() / 7  # of 4 bits with a sign
    onnx.save(_model(weight), directory / REFERENCE)
    onnx.save(_model((np.rint(weight / step) * step).astype(np.float32)), directory / CANDIDATE)


def images(n_items: int, seed: int) -> Images:
    """Return discs of red, green and blue in the dark : (items, 3, 48, 48), in [0, 1]."""
    rng = np.random.default_rng(seed)
    found = rng.uniform(0, 0.2, size=(n_items, COLOURS, SIDE, SIDE)).astype(np.float32)
    rows, columns = np.mgrid[:SIDE, :SIDE]
    for image in found:
        for colour in rng.permutation(COLOURS):
            y, x = rng.integers(0, SIDE, size=2)
            image[colour, (rows - y) ** 2 + (columns - x) ** 2 < rng.integers(8, 16) ** 2] += 0.7
    return found


def _weight() -> npt.NDArray[np.float32]:
    """Return what the neighbourhood of a pixel is multiplied with : (classes, colours, 3, 3)."""
    weight = np.random.default_rng(1).normal(0, 0.01, size=(1 + COLOURS, COLOURS, 3, 3))
    around = np.array([[1, 2, 1], [2, 4, 2], [1, 2, 1]]) / 16
    for colour in range(COLOURS):
        weight[1 + colour, colour] += around
    return weight.astype(np.float32)


def _model(weight: npt.NDArray[np.float32]) -> onnx.ModelProto:
    bias = np.array([0.45, *[0.0] * COLOURS], dtype=np.float32)
    graph = helper.make_graph(
        [helper.make_node("Conv", ["image", "weight", "bias"], ["masks"], pads=[1, 1, 1, 1])],
        "discs",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["n", COLOURS, SIDE, SIDE])],
        [helper.make_tensor_value_info("masks", TensorProto.FLOAT, ["n", 1 + COLOURS, SIDE, SIDE])],
        [numpy_helper.from_array(weight, "weight"), numpy_helper.from_array(bias, "bias")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


if __name__ == "__main__":
    make(Path(__file__).parent)
