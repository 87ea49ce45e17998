"""Make a tiny detector and a copy with weights of 4 bits: `python -m examples.detection.make`.

It looks at each cell of 8 by 8 pixels: its class is the brightest colour, its score how bright that is, its box how far
light reaches from the middle of the cell.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

REFERENCE, CANDIDATE = "reference.onnx", "candidate.onnx"
SIDE, CELL, CLASSES = 64, 8, 3
_CELLS = SIDE // CELL
_GAIN = 12.0

Images = npt.NDArray[np.float32]


def make(directory: Path) -> None:
    """Write reference and candidate to `directory`."""
    weight = _weight()
    step = np.abs(weight).max() / 7  # of 4 bits with a sign
    onnx.save(_model(weight), directory / REFERENCE)
    onnx.save(_model((np.rint(weight / step) * step).astype(np.float32)), directory / CANDIDATE)


def images(n_items: int, seed: int) -> Images:
    """Return blocks of red, green and blue in the dark : (items, 3, 64, 64), in [0, 1]."""
    rng = np.random.default_rng(seed)
    found = rng.uniform(0, 0.1, size=(n_items, CLASSES, SIDE, SIDE)).astype(np.float32)
    for image in found:
        for y, x in rng.permutation(np.argwhere(np.ones((_CELLS, _CELLS))))[:6] * CELL:
            height, width = rng.integers(5, CELL + 1, size=2)
            image[rng.integers(CLASSES), y : y + height, x : x + width] = rng.uniform(0.7, 1)
    return found


def _weight() -> npt.NDArray[np.float32]:
    """Return what each cell is multiplied with: (left, top, right, bottom, red, green, blue; colours, rows, columns)."""
    weight = np.random.default_rng(1).normal(0, 0.01, size=(4 + CLASSES, CLASSES, CELL, CELL))
    half = CELL // 2
    halves = (np.s_[:, :, :half], np.s_[:, :half], np.s_[:, :, half:], np.s_[:, half:])
    for side, part in enumerate(halves):
        weight[side][part] += 0.1
    for colour in range(CLASSES):
        weight[4 + colour, colour] += _GAIN / CELL**2
    return weight.astype(np.float32)


def _model(weight: npt.NDArray[np.float32]) -> onnx.ModelProto:
    bias = np.array([0, 0, 0, 0, *[-_GAIN / 3] * CLASSES], dtype=np.float32)
    middle = (np.arange(_CELLS, dtype=np.float32) + 0.5) * CELL
    centres = np.stack(np.meshgrid(middle, middle), axis=2).reshape(1, -1, 2)
    nodes = [
        helper.make_node("Conv", ["image", "weight", "bias"], ["cells"], strides=[CELL, CELL]),
        helper.make_node("Reshape", ["cells", "flat"], ["columns"]),
        helper.make_node("Transpose", ["columns"], ["rows"], perm=[0, 2, 1]),
        helper.make_node("Split", ["rows", "parts"], ["before", "behind", "logits"], axis=2),
        helper.make_node("Sub", ["centres", "before"], ["begin"]),
        helper.make_node("Add", ["centres", "behind"], ["end"]),
        helper.make_node("Concat", ["begin", "end"], ["boxes"], axis=2),
        helper.make_node("Sigmoid", ["logits"], ["scores"]),
    ]
    constants = {
        "weight": weight,
        "bias": bias,
        "centres": centres,
        "flat": np.array([0, 4 + CLASSES, _CELLS**2]),
        "parts": np.array([2, 2, CLASSES]),
    }
    graph = helper.make_graph(
        nodes,
        "blocks",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["n", CLASSES, SIDE, SIDE])],
        [
            helper.make_tensor_value_info("boxes", TensorProto.FLOAT, ["n", _CELLS**2, 4]),
            helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", _CELLS**2, CLASSES]),
        ],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


if __name__ == "__main__":
    make(Path(__file__).parent)
