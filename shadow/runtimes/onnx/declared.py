"""What an ONNX file declares of its inputs and outputs, and how that contradicts a model's configuration. Nothing is computed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import onnx

from quantdrift.core.config.schema import Model, OutputKind, Reference, Slice
from quantdrift.core.config.wrong_values import nearest
from quantdrift.core.tasks import Task
from quantdrift.shadow.runtimes.onnx.runtime import read_graph

_FLOATS: Final = frozenset(
    {onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
)
_OF_SCORES: Final = frozenset(
    {Task.CLASSIFICATION, Task.MULTILABEL, Task.RANKING, Task.REGRESSION, Task.EMBEDDING}
)
_PASSED: Final = frozenset(
    {
        "Identity",
        "Cast",
        "Reshape",
        "Flatten",
        "Squeeze",
        "Unsqueeze",
        "Transpose",
        "DequantizeLinear",
        "QuantizeLinear",
    }
)
"""Operators that leave the kind of values as it is."""
_PROBABILITIES: Final = frozenset(
    {"Softmax", "Sigmoid", "HardSigmoid", "Normalizer", "TreeEnsembleClassifier"}
)
_LOGITS: Final = frozenset({"Gemm", "MatMul", "Conv", "Add", "LogSoftmax"})


class Declared(msgspec.Struct, frozen=True, kw_only=True):
    """What a file declares.

    Parameters
    ----------
    inputs
        Names.
    outputs
        Names, each with whether its elements are floating-point numbers.
    last
        Of each output the operator that gives its kind of values; empty where it is not known.
    """

    inputs: tuple[str, ...]
    outputs: dict[str, bool]
    last: dict[str, str]


def declared(path: Path) -> Declared:
    """Return what the file declares.

    Raises
    ------
    OperatorError
        It cannot be read.
    """
    graph = read_graph(path).graph
    weights = {weight.name for weight in graph.initializer}
    made_by = {name: node for node in graph.node for name in node.output}
    return Declared(
        inputs=tuple(entry.name for entry in graph.input if entry.name not in weights),
        outputs={entry.name: entry.type.tensor_type.elem_type in _FLOATS for entry in graph.output},
        last={entry.name: _last(entry.name, made_by) for entry in graph.output},
    )


def _last(name: str, made_by: dict[str, onnx.NodeProto]) -> str:
    seen: set[str] = set()
    while name in made_by and name not in seen:
        seen.add(name)
        node = made_by[name]
        if node.op_type not in _PASSED or not node.input:
            return str(node.op_type)
        name = node.input[0]
    return ""


def contradictions(
    model: Model, reference: Reference, found: Declared, slices: tuple[Slice, ...]
) -> Iterator[str]:
    """Yield what contradicts the configuration, each with what to write instead.

    Parameters
    ----------
    slices
        All of the configuration; those of other models are left out.
    """
    where = _where(model, reference)
    output = reference.output or model.output or next(iter(found.outputs), "")
    floats = [name for name, is_float in found.outputs.items() if is_float]
    if model.task in _OF_SCORES and output in found.outputs and not found.outputs[output]:
        instead = f'set output = "{floats[0]}"' if floats else "export an output with scores"
        what = (
            f"its output `{output}`" if model.output or reference.output else f"its first output, `{output}`,"
        )
        yield (
            f"{where}: {what} has no floating-point numbers, such as the labels that scikit-learn exports first, and every"
            f" exchange with it would be set aside: {instead}"
        )
    for rule in slices:
        if rule.model in {"", model.name} and rule.input and rule.input not in found.inputs:
            yield (
                f"{where}: it has no input `{rule.input}`, which slice `{rule.name}` names:"
                f" {nearest(rule.input, found.inputs)}"
            )


def doubts(model: Model, reference: Reference, found: Declared) -> Iterator[str]:
    """Yield that `output_kind` does not fit the last operator, which leaves the kind of values open now and then."""
    if model.task is not Task.CLASSIFICATION:
        return
    floats = [name for name, is_float in found.outputs.items() if is_float]
    output = reference.output or model.output or next(iter(floats), "")
    last = found.last.get(output, "")
    kind = (
        OutputKind.PROBABILITIES if last in _PROBABILITIES else OutputKind.LOGITS if last in _LOGITS else None
    )
    if kind is not None and kind is not model.output_kind:
        yield (
            f"{_where(model, reference)}: `{output}` comes from {last}, so it seems to have {kind}, but output_kind is"
            f' `{model.output_kind}`: set output_kind = "{kind}", or divergences are wrong'
        )


def _where(model: Model, reference: Reference) -> str:
    return f"model `{model.name}`: the reference {reference.path}"
