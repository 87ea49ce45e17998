"""The precision check of an ONNX graph: a reference must be free of quantisation and of reduced precision."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from stat import S_ISREG
from typing import Final

import msgspec
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto

from quantdrift.core.errors import OperatorError
from quantdrift.core.text import plain

_MOST_EXTERNAL: Final = (
    1 << 40
)  # bytes; a sparse file of any length costs nothing to make, and to read it takes for ever

_QUANTISED_PREFIXES = ("QLinear", "QOrdered")
_QUANTISED = frozenset(
    {
        "QuantizeLinear",
        "DequantizeLinear",
        "DynamicQuantizeLinear",
        "QuantizeWithOrder",
        "DequantizeWithOrder",
        "MatMulInteger",
        "ConvInteger",
        "ConvTransposeInteger",
        "MatMulIntegerToFloat",
        "MatMulInteger16",
        "DynamicQuantizeMatMul",
        "DynamicQuantizeLSTM",
        "MatMulNBits",
        "MatMulBnb4",
        "MatMulFpQ4",
        "GatherBlockQuantized",
        "QAttention",
        "QGemm",
        "QMoE",
        "QEmbedLayerNormalization",
    }
)
_REDUCED_FLOATS = frozenset(
    value
    for name, value in TensorProto.DataType.items()
    if name in {"FLOAT16", "BFLOAT16"} or name.startswith(("FLOAT8", "FLOAT4", "FLOAT6"))
)
_SMALL_INTEGERS = frozenset(
    value
    for name, value in TensorProto.DataType.items()
    if name in {"INT8", "UINT8", "INT4", "UINT4", "INT2", "UINT2"}
)
_REDUCED = _REDUCED_FLOATS | _SMALL_INTEGERS
ANY_PRECISION = tuple(sorted(TensorProto.DataType.Name(value).lower() for value in _REDUCED))
"""All element types that `findings` can name: with them any graph is accepted, as that of a candidate."""
_INTEGER_NAMES = frozenset({"int8", "uint8", "int4", "uint4", "int2", "uint2"})


class PrecisionFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One place where a graph is not full precision.

    Parameters
    ----------
    where
        Node, initialiser or value, by name.
    precision
        Element type as the configuration names it (`float16`, `int8`, ...); `quantised` for operators that
        compute on integers or emulate it.
    """

    where: str
    precision: str


def findings(model: ModelProto, allowed: tuple[str, ...] = ()) -> list[PrecisionFinding]:
    """Return the places that make `model` unfit as a reference, subgraphs and local functions included.

    Quantising operators, stored tensors, constants and casts of a reduced element type, and inputs, outputs or
    recorded intermediate values of reduced floating point count. Inputs of small integers do not: images and
    token types come that way.

    Parameters
    ----------
    model
        The graph; external data need not be loaded.
    allowed
        Element types accepted by name. Any small integer type among them accepts quantising operators too.
    """
    accepted = set(allowed)
    if accepted & _INTEGER_NAMES:
        accepted.add("quantised")
    all_findings = [*_graph(model.graph)]
    for function in model.functions:
        all_findings += _nodes(function.node, f"function {function.name}: ")
    return [finding for finding in all_findings if finding.precision not in accepted]


def external_files(model: ModelProto) -> tuple[str, ...]:
    """Return the external data files that the stored tensors of `model` name, sorted."""
    nodes = [node for function in model.functions for node in function.node]
    tensors = [*_stored(model.graph), *(tensor for node in nodes for tensor in _tensors(node))]
    return tuple(
        sorted(
            {
                entry.value
                for tensor in tensors
                if tensor.data_location == TensorProto.EXTERNAL
                for entry in tensor.external_data
                if entry.key == "location"
            }
        )
    )


def check_external(path: Path, model: ModelProto, what: str) -> None:
    """Check, before anything reads them, that the external data files of a graph are ordinary files in its own folder.

    A graph may name anything: a device or a pipe that never ends, or a file of somebody else.

    Raises
    ------
    OperatorError
        One is not, does not exist, or all of them are larger than any model.
    """
    folder, total = path.resolve().parent, 0
    for name in external_files(model):
        try:
            is_inside = (folder / name).resolve(strict=True).is_relative_to(folder)
            status = (folder / name).stat()
        except (OSError, ValueError, RuntimeError) as error:  # a null byte; links in a circle
            why = error.strerror if isinstance(error, OSError) else "it is no path"
            raise OperatorError(
                f"the {what} {plain(f'{folder / name}', 400)} cannot be read ({why}): it is external data of {path.name}"
            ) from error
        if not is_inside or not S_ISREG(status.st_mode):
            raise OperatorError(
                f"the {what} {path} has external data in {plain(name, 200)!r}, which is no ordinary file in the folder of the model: do not use a"
                " model of an origin that you do not trust"
            )
        total += status.st_size
    if total > _MOST_EXTERNAL:
        raise OperatorError(
            f"the {what} {path} has {total:,} bytes of external data: more than {_MOST_EXTERNAL:,}"
        )


def _graph(graph: GraphProto, prefix: str = "") -> Iterator[PrecisionFinding]:
    tensors = [*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer)]
    for tensor in tensors:
        if tensor.data_type in _REDUCED:
            yield _finding(f"{prefix}stored tensor `{tensor.name}`", tensor.data_type)
    for value in (*graph.input, *graph.output, *graph.value_info):
        if (kind := _element_type(value.type)) in _REDUCED_FLOATS:
            yield _finding(f"{prefix}value `{value.name}`", kind)
    yield from _nodes(graph.node, prefix)


def _nodes(nodes: "Iterable[NodeProto]", prefix: str) -> Iterator[PrecisionFinding]:
    for node in nodes:
        where = f"{prefix}{node.op_type} `{node.name}`"
        if node.op_type in _QUANTISED or node.op_type.startswith(_QUANTISED_PREFIXES):
            yield PrecisionFinding(where=where, precision="quantised")
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i in _REDUCED:
                yield _finding(where, attribute.i)
            for tensor in _held(attribute):
                if tensor.data_type in _REDUCED:
                    yield _finding(where, tensor.data_type)
            for graph in _subgraphs(attribute):
                yield from _graph(graph, f"{where}: ")


def _stored(graph: GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        yield from _tensors(node)


def _tensors(node: NodeProto) -> Iterator[TensorProto]:
    for attribute in node.attribute:
        yield from _held(attribute)
        for graph in _subgraphs(attribute):
            yield from _stored(graph)


def _held(attribute: AttributeProto) -> Iterator[TensorProto]:
    if attribute.HasField("t"):
        yield attribute.t
    yield from attribute.tensors
    if attribute.HasField("sparse_tensor"):
        yield attribute.sparse_tensor.values
    yield from (sparse.values for sparse in attribute.sparse_tensors)


def _subgraphs(attribute: AttributeProto) -> Iterator[GraphProto]:
    if attribute.HasField("g"):
        yield attribute.g
    yield from attribute.graphs


def _element_type(kind: TypeProto) -> int:
    """Return the element type inside `kind`, 0 (undefined) if it is not a tensor."""
    return int(kind.tensor_type.elem_type) if kind.HasField("tensor_type") else 0


def _finding(where: str, data_type: int) -> PrecisionFinding:
    return PrecisionFinding(where=where, precision=TensorProto.DataType.Name(data_type).lower())
