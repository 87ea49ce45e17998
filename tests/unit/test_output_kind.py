"""What an output holds, by the last operators of its graph."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from quantdrift.core.config.schema import OutputKind
from quantdrift.models.runtimes.onnx.output_kind import LastOperator, last_operator

pytestmark = pytest.mark.unit

LOGITS, PROBABILITIES = OutputKind.LOGITS, OutputKind.PROBABILITIES
SQUARE = np.eye(3, dtype=np.float32)


def _node(operator: str, *inputs: str, **attributes: Any) -> onnx.NodeProto:
    domain = "ai.onnx.ml" if operator in {"Normalizer", "TreeEnsembleClassifier"} else ""
    outputs = ["label", "y"] if operator == "TreeEnsembleClassifier" else ["y"]
    return helper.make_node(operator, inputs, outputs, domain=domain, **attributes)


def _renamed(node: onnx.NodeProto, name: str) -> onnx.NodeProto:
    node.output[0] = name
    return node


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([_node("Gemm", "x", "w")], LastOperator(LOGITS, "Gemm")),
        (
            [_renamed(_node("MatMul", "x", "w"), "xw"), _node("Add", "xw", "b")],
            LastOperator(LOGITS, "MatMul"),
        ),
        ([_node("LogSoftmax", "x")], LastOperator(LOGITS, "LogSoftmax")),
        (
            [_renamed(_node("Softmax", "x"), "s"), _node("Identity", "s")],
            LastOperator(PROBABILITIES, "Softmax", sums_to_one=True),
        ),
        ([_node("Sigmoid", "x")], LastOperator(PROBABILITIES, "Sigmoid")),
        (
            [_node("Normalizer", "x", norm="L1")],
            LastOperator(PROBABILITIES, "Normalizer", sums_to_one=True),
        ),
        ([_node("Normalizer", "x", norm="L2")], None),
        ([_node("TreeEnsembleClassifier", "x", post_transform="NONE")], None),
        (
            [_node("TreeEnsembleClassifier", "x", post_transform="LOGISTIC")],
            LastOperator(PROBABILITIES, "TreeEnsembleClassifier"),
        ),
        (
            [
                _renamed(_node("Sigmoid", "x"), "p"),
                _renamed(_node("Sub", "one", "p"), "q"),
                _node("Concat", "q", "p", axis=1),
            ],
            LastOperator(PROBABILITIES, "Sigmoid", sums_to_one=True),
        ),
        ([_renamed(_node("Softmax", "x"), "s"), _node("MatMul", "s", "w")], None),
        ([_node("MatMul", "x", "x")], None),
        ([_node("Add", "x", "x")], None),
        ([_node("Relu", "x")], None),
    ],
    ids=lambda case: " ".join(node.op_type for node in case) if isinstance(case, list) else "",
)
def test_the_last_operators_tell_what_an_output_holds(
    tmp_path: Path, nodes: list[onnx.NodeProto], expected: LastOperator | None
) -> None:
    """Nothing is said of what may be either, such as an average of probabilities."""
    weights = {"w": SQUARE, "b": SQUARE[0], "one": np.ones(1, dtype=np.float32)}
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph), path)
    assert last_operator(path, "y") == expected
    assert last_operator(path, "x") is None
