"""References for the examples of comparators: one linear layer with random weights, as ONNX."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

N_FEATURES = 8
REFERENCE = "reference.onnx"


def write(directory: Path, outputs: Mapping[str, int]) -> None:
    """Write `reference.onnx`, which takes `features` : (items, 8) and gives each output : (items, n), all float32.

    Parameters
    ----------
    directory
        Is there.
    outputs
        How many numbers each gives for an item, by name.
    """
    rng = np.random.default_rng(7)
    nodes, weights = [], []
    for name, n_outputs in outputs.items():
        weight = rng.normal(size=(N_FEATURES, n_outputs)).astype(np.float32)
        weights.append(numpy_helper.from_array(weight, f"{name}.weight"))
        nodes.append(helper.make_node("MatMul", ["features", f"{name}.weight"], [name]))
    graph = helper.make_graph(
        nodes,
        "linear",
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, ["items", N_FEATURES])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["items", n]) for name, n in outputs.items()],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, directory / REFERENCE)
