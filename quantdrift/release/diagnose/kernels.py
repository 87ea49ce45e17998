"""Operators whose integer kernels compute something else than the candidate's file says.

A QDQ file says: dequantise, compute in floating point, quantise. ONNX Runtime computes most operators with integers in place of that,
and some of its kernels give other results: on processors without VNNI, products of 8-bit numbers are added up in pairs in 16 bits, which
saturates (https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html). Signed activations saturate as unsigned ones do:
on x64 ONNX Runtime makes unsigned ones of them where it sees a whole pair. Each operator is therefore run alone, in both ways, between the
whole pairs that quantise its inputs and its result, on the values that the file gives it: no error comes from the operators before it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import onnx
from onnx import helper, numpy_helper

from quantdrift.core.errors import OperatorError
from quantdrift.models.tensors.arrays import Array
from quantdrift.release.sites import Graph, loaded, outputs_of, session_of

_ITEMS: Final = 64
_FLOAT: Final = 1e-3  # of the largest value: more is no rounding of float32
_OTHERS: Final = 1e-3
_QUANTISE: Final = "QuantizeLinear"
_DEQUANTISE: Final = "DequantizeLinear"
REMEDY: Final = (
    "Processors without VNNI add up products of 8-bit activations and signed weights (MatMul, Gemm, Conv) in 16 bits, which saturates: quantise"
    " with reduce_range=True, or with unsigned activations and weights (QUInt8); or keep the file and set `session.x64quantprecision` to 1"
    " in the server's session options; or, if the server has VNNI, run this on such a processor"
)

REMEDY_OF_BLOCKS: Final = (
    "Products with weights in blocks round what goes into them to 8 bits at an accuracy level of 4, with kernels that not every processor has:"
    " quantise with accuracy_level=1, or set `session.qdq_matmulnbits_accuracy_level` to 1 in the server's session options"
)


class OtherKernel(msgspec.Struct, frozen=True, kw_only=True):
    """An operator whose kernel computes something else.

    Parameters
    ----------
    node, operator
        Its name, and its type.
    others
        Share of its results that are apart by more than one step, or by 0.1 % of the largest where it returns floating point.
    steps
        Share of its results that are apart by one step or more.
    """

    node: str
    operator: str
    others: float
    steps: float


def kernels_of(candidate: Path, inputs: Mapping[str, Array], threads: int = 1) -> tuple[OtherKernel, ...]:
    """Return how the kernel of each operator that can be run alone differs from the file on at most 64 of these inputs, the worst first."""
    graph = Graph(loaded(candidate, "candidate"), candidate, only=())
    few = {name: array[:_ITEMS] for name, array in inputs.items()}
    values = _values(graph, candidate, few, threads)
    kernels = []
    for node in graph.graph.node:
        alone = None if node.op_type in {_QUANTISE, _DEQUANTISE} else _alone(graph, node, values)
        if alone is not None:
            others, steps = _others(alone, candidate, values, _step(graph, alone), threads)
            kernels.append(
                OtherKernel(
                    node=node.name or node.output[0], operator=node.op_type, others=others, steps=steps
                )
            )
    return tuple(sorted(kernels, key=lambda kernel: -kernel.others))


def others_among(kernels: Sequence[OtherKernel]) -> tuple[OtherKernel, ...]:
    """Return those that compute something else than their file says."""
    return tuple(kernel for kernel in kernels if kernel.others > _OTHERS)


def _values(graph: Graph, path: Path, inputs: Mapping[str, Array], threads: int) -> dict[str, Array]:
    """Return what each pair makes of its values, as the file says, by the name of its integers."""
    model = type(graph.model).FromString(graph.model.SerializeToString())
    output_names = {info.name for info in model.graph.output}
    names = {
        pair.quantise.output[0]: pair.dequantise[0].output[0]
        for pair in graph.pairs()
        if pair.quantise is not None and pair.source not in graph.constants
    }
    model.graph.output.extend(
        onnx.ValueInfoProto(name=name) for name in names.values() if name not in output_names
    )
    session = session_of(model.SerializeToString(), str(path), threads, keep_pairs=True)
    values = outputs_of(session, [*names.values()], inputs)
    return {integers: values[name] for integers, name in names.items()}


def _alone(graph: Graph, node: Any, values: Mapping[str, Array]) -> Any:
    """Return a model of one operator with its pairs, from values; None where it gets a tensor that is not quantised."""
    before = []
    for name in node.input:
        source = graph.producer.get(name)
        if not name or name in graph.constants:
            continue
        if source is None or source.op_type != _DEQUANTISE:
            return None
        if source.input[0] not in values and source.input[0] not in graph.constants:
            return None
        before.append(source)
    quantise = {
        source.input[0]: graph.producer[source.input[0]] for source in before if source.input[0] in values
    }
    if not quantise or len(node.output) != 1:
        return None
    readers = graph.readers[node.output[0]]
    after = readers if len(readers) == 1 and readers[0].op_type == _QUANTISE else []
    if after:
        after = [*after, *graph.readers[after[0].output[0]][:1]]
    nodes = [*quantise.values(), *{id(source): source for source in before}.values(), node, *after]
    needed = {name for each in nodes for name in each.input}
    inputs = {pair.input[0]: values[integers].dtype for integers, pair in quantise.items()}
    operator_graph = helper.make_graph(
        [type(each).FromString(each.SerializeToString()) for each in nodes],
        "alone",
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(kind), None)
            for name, kind in inputs.items()
        ],
        [onnx.ValueInfoProto(name=nodes[-1].output[0])],
        [
            numpy_helper.from_array(np.array(graph.constants[name], order="C"), name)
            for name in sorted(needed & graph.constants.keys())
        ],
    )
    return helper.make_model(
        operator_graph, opset_imports=graph.model.opset_import, ir_version=graph.model.ir_version
    )


def _step(graph: Graph, alone: Any) -> float | None:
    """Return by how much neighbours differ in what such a model returns; None: by nothing certain, it is floating point."""
    last = alone.graph.node[-1]
    if last.op_type == _QUANTISE:
        return 1.0
    return float(graph.constants[last.input[1]].max()) if last.op_type == _DEQUANTISE else None


def _others(
    alone: Any, path: Path, values: Mapping[str, Array], step: float | None, threads: int
) -> tuple[float, float]:
    names = [info.name for info in alone.graph.output]
    inputs = {node.input[0]: values[node.output[0]] for node in alone.graph.node if node.output[0] in values}
    sides: list[Array] = []
    try:
        for keep_pairs in (False, True):
            session = session_of(alone.SerializeToString(), str(path), threads, keep_pairs=keep_pairs)
            sides.append(outputs_of(session, names, inputs)[names[0]])
    except OperatorError:  # it cannot be run alone
        return 0.0, 0.0
    kernel, file = (side.astype(np.float64) for side in sides)
    apart = np.abs(kernel - file)
    if step is None:
        far = float((apart > _FLOAT * max(np.abs(file).max(initial=0.0), 1e-30)).mean())
        return far, far
    return float((apart > 1.5 * step).mean()), float((apart > 0.5 * step).mean())


def said_of(others: Sequence[OtherKernel], most: int = 3) -> str:
    """Return the operators in words, the worst first."""
    words = [
        f"{other.operator} at `{other.node}` ({100 * other.others:.2g} % of its results)"
        for other in others[:most]
    ]
    more = f" and {len(others) - most} more" if len(others) > most else ""
    return f"{', '.join(words)}{more}"
