"""What an output of an ONNX graph holds, logits or probabilities, as far as its last operators tell.

An output is followed backwards through operators that change no value, or only its type and shape. It holds probabilities if it
ends in a softmax, a logistic function, a normalisation to a sum of 1, or a classifier of `ai.onnx.ml` with one of them; logits
if it ends in a product with a constant weight, with or without a bias, or in the logarithm of a softmax. Of anything else
nothing is said: an average of trees may be either.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import onnx
from onnx import numpy_helper

from quantdrift.core.config.schema import OutputKind

_UNCHANGED: Final = frozenset(
    {"Cast", "Dropout", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
)
_PRODUCTS: Final = frozenset({"Conv", "Gemm", "MatMul"})
_CLASSIFIERS: Final = frozenset({"LinearClassifier", "TreeEnsembleClassifier"})
_MOST_STEPS: Final = 32


class LastOperator(NamedTuple):
    """The kind of an output, the operator that tells it, and whether its values add up to 1."""

    kind: OutputKind
    operator: str
    sums_to_one: bool = False


def last_operator(path: Path, output: str) -> LastOperator | None:
    """Return what an output of the graph in `path` holds; None if no operator tells it.

    Parameters
    ----------
    path
        An ONNX file that can be read; its external data is not.
    output
        The output's name.
    """
    graph = onnx.load(path, load_external_data=False).graph
    makers = {name: node for node in graph.node for name in node.output}
    return _of(output, makers, dict(_constants(graph)), _MOST_STEPS)


def _constants(graph: Any) -> Iterator[tuple[str, Any]]:
    yield from ((tensor.name, tensor) for tensor in graph.initializer)
    for node in graph.node:
        if node.op_type == "Constant":
            yield from (
                (node.output[0], attribute.t) for attribute in node.attribute if attribute.name == "value"
            )


def _of(
    name: str, makers: Mapping[str, Any], constants: Mapping[str, Any], steps: int
) -> LastOperator | None:
    node = makers.get(name)
    if node is None or not steps:
        return None
    operator = node.op_type

    def of_input(number: int) -> LastOperator | None:
        return _of(node.input[number], makers, constants, steps - 1)

    last = _normalised(node)
    if operator in _UNCHANGED:
        last = of_input(0)
    elif operator == "LogSoftmax":
        last = LastOperator(OutputKind.LOGITS, operator)
    elif operator in _PRODUCTS and node.input[1] in constants:
        # A product of probabilities, such as their average over several models, may be probabilities again.
        if not _is(OutputKind.PROBABILITIES, of_input(0)):
            last = LastOperator(OutputKind.LOGITS, operator)
    elif operator == "Add":
        free = [number for number in (0, 1) if node.input[number] not in constants]
        before = of_input(free[0]) if len(free) == 1 else None
        last = before if _is(OutputKind.LOGITS, before) else None
    elif operator == "Concat":
        last = _of_two_classes(node, makers, constants, steps)
    return last


def _is(kind: OutputKind, found: LastOperator | None) -> bool:
    return found is not None and found.kind is kind


def _normalised(node: Any) -> LastOperator | None:
    """Return the operator if it makes probabilities."""
    operator = node.op_type
    words = {
        attribute.name: attribute.s.decode()
        for attribute in node.attribute
        if attribute.type == attribute.STRING
    }
    transform = words.get("post_transform") if operator in _CLASSIFIERS else None
    if (
        operator == "Softmax"
        or transform == "SOFTMAX"
        or (operator == "Normalizer" and words.get("norm") == "L1")
    ):
        return LastOperator(OutputKind.PROBABILITIES, operator, sums_to_one=True)
    if operator == "Sigmoid" or transform == "LOGISTIC":
        return LastOperator(OutputKind.PROBABILITIES, operator)
    return None


def _of_two_classes(
    node: Any, makers: Mapping[str, Any], constants: Mapping[str, Any], steps: int
) -> LastOperator | None:
    """Return the operator of p where a node joins 1 - p and p, as exported trees do for two classes."""
    if len(node.input) != 2:
        return None
    other = makers.get(node.input[0])
    if other is None or other.op_type != "Sub" or not _is_one(constants.get(other.input[0])):
        return None
    last = _of(node.input[1], makers, constants, steps - 1)
    return last._replace(sums_to_one=True) if last and _is(OutputKind.PROBABILITIES, last) else None


def _is_one(tensor: Any) -> bool:
    return (
        tensor is not None and not tensor.external_data and bool(np.all(numpy_helper.to_array(tensor) == 1))
    )
