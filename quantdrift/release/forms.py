"""Other forms of quantised ONNX files, written as pairs that dequantise: weights in blocks, and INT8 whose ranges are found while it runs.

| form | what writes it | what becomes of it |
|---|---|---|
| `MatMulNBits` | ONNX Runtime's quantiser, exporters of GPTQ and AWQ | MatMul of a dequantised weight |
| DequantizeLinear of INT4 in blocks | the same with QuantFormat.QDQ | it stays |
| DynamicQuantizeLinear with MatMulInteger or ConvInteger | `quantize_dynamic` | MatMul or Conv of a dequantised input and weight |
| Gather of integers, then DequantizeLinear | `quantize_dynamic` | Gather of a dequantised table |

With an accuracy level of 4, which is that of INT4 in QDQ form, ONNX Runtime rounds what goes into such a product to 8 bits, in the
blocks of the weight. That is a range like others, found for each block (`BLOCKS`).

What is written here is for a copy or an edit that replaces it: ONNX has no blocks with an order of their own, and `BLOCKS` is no operator.
"""

from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from onnx import TensorProto, helper, numpy_helper

from quantdrift.core.errors import OperatorError
from quantdrift.models.tensors.arrays import Array
from quantdrift.release.scales import Scale

DYNAMIC: Final = "DynamicQuantizeLinear"
BLOCKS: Final = "quantdrift.Blocks"
"""What stands for the rounding of a product's input to 8 bits, in blocks."""
QUANTISES: Final = frozenset({"QuantizeLinear", DYNAMIC, BLOCKS})
_DEQUANTISE: Final = "DequantizeLinear"
IN_BLOCKS: Final = "MatMulNBits"
_INTEGER: Final = {"MatMulInteger": "MatMul", "ConvInteger": "Conv"}
_ENDS: Final = ("_quant", "_matmul_Q4", "_Q2", "_Q4", "_Q8")  # what quantisers add to the name of a node
_INT8: Final = 4  # the accuracy level
_HIGHEST: Final = 127
_TINY: Final = 1e-30


class Forms(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What was written as pairs.

    Parameters
    ----------
    grids
        The scales of weights, by the name of the dequantised tensor.
    is_dynamic
        Whether ranges are those of all items of a run.
    has_blocks
        Whether weights are in blocks.
    written
        The dequantised tensors that are no operator of ONNX: their values must take their place.
    """

    grids: dict[str, Scale]
    written: frozenset[str]
    is_dynamic: bool
    has_blocks: bool


def written_as_pairs(
    model: Any, constants: dict[str, Array], path: Path, only: Collection[str] | None = None
) -> Forms:
    """Write a model's other forms as pairs, in place, and return their scales.

    Parameters
    ----------
    model
        The graph.
    constants
        Its stored tensors by name; integers of weights in blocks are added.
    path
        Of the file, for errors.
    only
        The names of nodes as in the reference; all others stay as they are. None: all.

    Raises
    ------
    OperatorError
        An operator is not as ONNX Runtime documents it.
    """
    writer = _Writer(model.graph, constants, path, only)
    for node in list(model.graph.node):
        if node.op_type == IN_BLOCKS:
            writer.blocks(node)
        elif node.op_type in _INTEGER:
            writer.integers(node)
        elif node.op_type == _DEQUANTISE:
            writer.dequantised(node)
    return writer.finish()


def name_of(node: Any) -> str:
    """Return the name that a node has in the reference, or that of what it computes."""
    for end in _ENDS:
        if node.name.endswith(end) and node.name != end:
            return str(node.name[: -len(end)])
    return str(node.name or node.output[0])


def rounded(quantise: Any, raw: str, factor: str, output: str) -> list[Any]:
    """Return the nodes that round a tensor as a range does that is found while it runs, with its step times a factor."""
    name = f"{output}.part"
    if quantise.op_type == DYNAMIC:
        _, scale, zero = quantise.output
        return [
            helper.make_node("Mul", [scale, factor], [f"{name}.step"]),
            helper.make_node("QuantizeLinear", [raw, f"{name}.step", zero], [f"{name}.integers"]),
            helper.make_node(_DEQUANTISE, [f"{name}.integers", f"{name}.step", zero], [output]),
        ]
    return [
        *_steps(quantise, raw, name),
        helper.make_node("Mul", [f"{name}.steps", factor], [f"{name}.wider"]),
        helper.make_node("Div", [f"{name}.blocks", f"{name}.wider"], [f"{name}.ratio"]),
        helper.make_node("Round", [f"{name}.ratio"], [f"{name}.integers"]),
        helper.make_node("Mul", [f"{name}.integers", f"{name}.wider"], [f"{name}.rounded"]),
        *_joined(quantise, f"{name}.rounded", name, output),
    ]


def in_steps(quantise: Any, raw: str, output: str) -> list[Any]:
    """Return the nodes that count a tensor in steps of a range that is found while it runs."""
    name = f"{output}.part"
    if quantise.op_type == DYNAMIC:
        _, scale, zero = quantise.output
        return [
            helper.make_node("Div", [raw, scale], [f"{name}.ratio"]),
            helper.make_node("Cast", [zero], [f"{name}.zero"], to=TensorProto.FLOAT),
            helper.make_node("Add", [f"{name}.ratio", f"{name}.zero"], [output]),
        ]
    return [
        *_steps(quantise, raw, name),
        helper.make_node("Div", [f"{name}.blocks", f"{name}.steps"], [f"{name}.ratio"]),
        *_joined(quantise, f"{name}.ratio", name, output),
    ]


def range_of(quantise: Any) -> Scale:
    """Return the scale of a range that is found while it runs: values are counted in steps."""
    lowest, highest = (0, 255) if quantise.op_type == DYNAMIC else (-_HIGHEST, _HIGHEST)
    return Scale(
        scale=np.ones(()), zero_point=np.zeros((), np.int64), axis=None, lowest=lowest, highest=highest
    )


def _steps(quantise: Any, raw: str, name: str) -> list[Any]:
    """Return the nodes that cut a tensor into blocks along its last dimension, with the step of each block."""
    size, width = (_attribute(quantise, key) for key in ("block_size", "width"))
    more = -width % size
    constants: dict[str, Array] = {
        "row": np.array([-1, width], np.int64),
        "block": np.array([-1, 1, size], np.int64),
        "pads": np.array([0, 0, 0, more], np.int64),
        "highest": np.array(_HIGHEST, np.float32),
        "least": np.array(_TINY, np.float32),
    }
    return [
        *(
            helper.make_node("Constant", [], [f"{name}.{key}"], value=numpy_helper.from_array(array))
            for key, array in constants.items()
        ),
        helper.make_node("Shape", [raw], [f"{name}.shape"]),
        helper.make_node("Reshape", [raw, f"{name}.row"], [f"{name}.rows"]),
        helper.make_node("Pad", [f"{name}.rows", f"{name}.pads"], [f"{name}.padded"]),
        helper.make_node("Reshape", [f"{name}.padded", f"{name}.block"], [f"{name}.blocks"]),
        helper.make_node("Abs", [f"{name}.blocks"], [f"{name}.sizes"]),
        helper.make_node("GlobalMaxPool", [f"{name}.sizes"], [f"{name}.largest"]),
        helper.make_node("Div", [f"{name}.largest", f"{name}.highest"], [f"{name}.exact"]),
        helper.make_node("Max", [f"{name}.exact", f"{name}.least"], [f"{name}.steps"]),
    ]


def _joined(quantise: Any, blocks: str, name: str, output: str) -> list[Any]:
    """Return the nodes that put blocks together again."""
    size, width = (_attribute(quantise, key) for key in ("block_size", "width"))
    constants: dict[str, Array] = {
        "padded_row": np.array([-1, width + -width % size], np.int64),
        "first": np.array([0], np.int64),
        "last": np.array([width], np.int64),
        "axis": np.array([1], np.int64),
    }
    return [
        *(
            helper.make_node("Constant", [], [f"{name}.{key}"], value=numpy_helper.from_array(array))
            for key, array in constants.items()
        ),
        helper.make_node("Reshape", [blocks, f"{name}.padded_row"], [f"{name}.long"]),
        helper.make_node(
            "Slice", [f"{name}.long", f"{name}.first", f"{name}.last", f"{name}.axis"], [f"{name}.cut"]
        ),
        helper.make_node("Reshape", [f"{name}.cut", f"{name}.shape"], [output]),
    ]


class _Writer:
    """Writes one node after the other, and gathers what takes its place."""

    def __init__(
        self, graph: Any, constants: dict[str, Array], path: Path, only: Collection[str] | None
    ) -> None:
        self._graph = graph
        self._constants = constants
        self._path = path
        self._only = only
        self._producer = {name: node for node in graph.node for name in node.output}
        self._readers: dict[str, list[Any]] = defaultdict(list)
        for node in graph.node:
            for name in node.input:
                self._readers[name].append(node)
        self._instead: dict[int, list[Any]] = {}
        self._after: dict[int, list[Any]] = defaultdict(list)
        self._done: set[str] = set()
        self._grids: dict[str, Scale] = {}
        self._written: set[str] = set()
        self._has_blocks = False

    def blocks(self, node: Any) -> None:
        """Write a MatMulNBits as the product with a dequantised weight, and its bias."""
        if not self._is_wanted(node):
            return
        width, columns = _attribute(node, "K"), _attribute(node, "N")
        bits, size = _attribute(node, "bits", 4), _attribute(node, "block_size")
        inputs = [*node.input, *[""] * (6 - len(node.input))]
        stored = [self._constants.get(name) for name in inputs]
        missing = any(name and array is None for name, array in zip(inputs[1:5], stored[1:5], strict=True))
        if missing or 8 % bits or stored[1] is None or stored[2] is None:
            raise OperatorError(
                f"the candidate {self._path} computes `{node.name}` with {IN_BLOCKS} of {bits} bits in a form that cannot be read: its weight must"
                " be stored in the file, in 2, 4 or 8 bits"
            )
        integers = _unpacked(stored[1].reshape(columns, -1), bits)[:, :width].T
        scale = stored[2].reshape(columns, -1).T.astype(np.float64)
        index = np.arange(width) // size if stored[4] is None else stored[4][:width].astype(np.int64)
        if stored[3] is None:
            zero = np.full(scale.shape, float(1 << (bits - 1)))
        elif stored[3].dtype == np.uint8:
            zero = _unpacked(stored[3].reshape(columns, -1), bits)[:, : len(scale)].T.astype(np.float64)
        else:
            zero = stored[3].reshape(columns, -1).T.astype(np.float64)
        name = f"{inputs[1]}.dequantised"
        self._constants[inputs[1]] = integers
        self._grids[name] = Scale(
            scale=scale,
            zero_point=zero,
            axis=1,
            lowest=0,
            highest=(1 << bits) - 1,
            blocks=(0, index),
            block_size=size,
        )
        self._written.add(name)
        self._has_blocks = True
        source = str(node.input[0])
        written = [helper.make_node(_DEQUANTISE, [inputs[1], inputs[2]], [name])]
        if _attribute(node, "accuracy_level", 0) == _INT8:
            source = self._in_int8(written, source, width, size)
        product = f"{node.output[0]}.product" if inputs[5] else str(node.output[0])
        written.append(helper.make_node("MatMul", [source, name], [product], name=name_of(node)))
        if inputs[5]:
            written.append(helper.make_node("Add", [product, inputs[5]], [node.output[0]]))
        self._instead[id(node)] = written

    def integers(self, node: Any) -> None:
        """Write a product of integers, whose scales come behind it, as that of dequantised numbers."""
        if not self._is_wanted(node):
            return
        cast = self._only_reader(node.output[0], "Cast")
        product = None if cast is None else self._only_reader(cast.output[0], "Mul")
        scales = None if product is None or cast is None else self._other(product, cast.output[0])
        both = None if scales is None else self._producer.get(scales)
        sides = [] if both is None else [self._side(node, position, both) for position in (0, 1)]
        if product is None or not all(sides):
            raise OperatorError(
                f"the candidate {self._path} computes `{node.name}` with {node.op_type} whose scales are not where `quantize_dynamic` writes them:"
                " no site of such a file can be named"
            )
        attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        self._instead[id(node)] = []
        self._instead[id(product)] = [
            helper.make_node(
                _INTEGER[node.op_type], sides, [product.output[0]], name=name_of(node), **attributes
            )
        ]

    def dequantised(self, node: Any) -> None:
        """Put a table of integers behind its scale, where what was gathered of it is dequantised; note where a weight is in blocks."""
        gather = self._producer.get(node.input[0])
        if node.input[0] in self._constants:
            if size := _attribute(node, "block_size", 0):
                self._in_blocks(node, size)
        elif (
            gather is not None
            and gather.op_type == "Gather"
            and gather.input[0] in self._constants
            and self._constants.get(node.input[1], np.ones(2)).size == 1
            and len(self._readers[gather.output[0]]) == 1
            and self._is_wanted(gather)
        ):
            name = f"{gather.input[0]}.dequantised"
            attributes = {
                attribute.name: helper.get_attribute_value(attribute) for attribute in gather.attribute
            }
            self._instead[id(gather)] = []
            table = [helper.make_node(_DEQUANTISE, [gather.input[0], *node.input[1:]], [name])]
            self._instead[id(node)] = [
                *(table if name not in self._done else []),
                helper.make_node(
                    "Gather", [name, gather.input[1]], [node.output[0]], name=name_of(gather), **attributes
                ),
            ]
            self._done.add(name)

    def finish(self) -> Forms:
        """Put the nodes into the graph."""
        if self._instead or self._after:
            nodes = []
            for node in self._graph.node:
                nodes += [*self._instead.get(id(node), [node]), *self._after[id(node)]]
            copies = [type(node).FromString(node.SerializeToString()) for node in _needed(nodes, self._graph)]
            del self._graph.node[:]
            self._graph.node.extend(copies)
            del self._graph.value_info[:]
        return Forms(
            grids=self._grids,
            written=frozenset(self._written),
            is_dynamic=any(node.op_type == DYNAMIC for node in self._graph.node),
            has_blocks=self._has_blocks,
        )

    def _is_wanted(self, node: Any) -> bool:
        return self._only is None or name_of(node) in self._only

    def _in_int8(self, written: list[Any], source: str, width: int, size: int) -> str:
        """Return a tensor in 8 bits, in blocks along its last dimension."""
        name = f"{source}.blocks.{size}"
        if name not in self._done:
            self._done.add(name)
            integers = f"{name}.integers"
            written += [
                helper.make_node(BLOCKS, [source], [integers], block_size=size, width=width),
                helper.make_node(_DEQUANTISE, [integers], [name]),
            ]
        return name

    def _in_blocks(self, node: Any, size: int) -> None:
        """Note the scale of a weight in blocks in QDQ form; a product with one of 4 bits gets its input in INT8."""
        scale = self._constants.get(node.input[1])
        integers = self._constants[node.input[0]]
        axis = _attribute(node, "axis", 1) % integers.ndim
        if scale is None or integers.ndim != 2:
            raise OperatorError(
                f"the candidate {self._path} quantises `{node.input[0]}` by blocks of a tensor that is no matrix: no site of it can be named"
            )
        kind = integers.dtype.name
        lowest, highest = {"int4": (-8, 7), "uint4": (0, 15), "int8": (-128, 127), "uint8": (0, 255)}[kind]
        zero = self._constants.get(node.input[2]) if len(node.input) > 2 else None
        self._grids[node.output[0]] = Scale(
            scale=scale.astype(np.float64),
            zero_point=np.zeros(scale.shape) if zero is None else zero.astype(np.float64),
            axis=1 - axis,
            lowest=lowest,
            highest=highest,
            blocks=(axis, np.arange(integers.shape[axis]) // size),
            block_size=size,
        )
        self._has_blocks = True
        reader = self._only_reader(node.output[0], "MatMul")
        if reader is None or not self._is_wanted(reader):
            return
        written: list[Any] = []
        source = str(reader.input[0])
        # ONNX Runtime makes a MatMulNBits of such a product, whose accuracy level is 4 unless the session says otherwise.
        if highest - lowest == 15 and axis == 0 and size >= 16 and not size & (size - 1):
            source = self._in_int8(written, source, integers.shape[0], size)
        written.append(
            helper.make_node("MatMul", [source, reader.input[1]], reader.output, name=name_of(reader))
        )
        self._instead[id(reader)] = written

    def _side(self, node: Any, position: int, scales: Any) -> str:
        """Return one side of a product of integers, dequantised; empty where its scale is not known."""
        integers = node.input[position]
        zero = node.input[position + 2] if len(node.input) > position + 2 else ""
        source = self._producer.get(integers)
        name = f"{integers}.dequantised"
        if source is not None and source.op_type == DYNAMIC and source.output[1] in scales.input:
            if name not in self._done:
                self._done.add(name)
                self._after[id(source)].append(helper.make_node(_DEQUANTISE, source.output, [name]))
            return name
        other = next((each for each in scales.input if each in self._constants), "")
        array = self._constants.get(integers)
        if array is None or not other or scales.op_type != "Mul":
            return ""
        scale = self._constants[other].reshape(-1)
        axis = 0 if node.op_type == "ConvInteger" else array.ndim - 1
        if scale.size not in {1, array.shape[axis]}:
            return ""
        if name not in self._done:
            self._done.add(name)
            stored = self._constants.get(zero, np.zeros((), array.dtype)).reshape(-1)
            parts = {
                f"{name}.scale": scale if scale.size > 1 else scale.reshape(()),
                f"{name}.zero_point": np.broadcast_to(stored, scale.shape).reshape(
                    scale.shape if scale.size > 1 else ()
                ),
            }
            for key, part in parts.items():
                self._constants[key] = np.ascontiguousarray(part)
                self._graph.initializer.append(numpy_helper.from_array(self._constants[key], key))
            written = helper.make_node(_DEQUANTISE, [integers, *parts], [name], axis=axis)
            self._instead.setdefault(id(node), [])
            self._after[id(node)].append(written)
        return name

    def _only_reader(self, name: str, kind: str) -> Any:
        readers = self._readers[name]
        return readers[0] if len(readers) == 1 and readers[0].op_type == kind else None

    def _other(self, node: Any, name: str) -> str | None:
        return next((each for each in node.input if each != name), None)


def _needed(nodes: list[Any], graph: Any) -> list[Any]:
    """Return the nodes without those that nothing reads any more."""
    needed = {info.name for info in graph.output}
    kept = []
    for node in reversed(nodes):
        if needed & {*node.output}:
            kept.append(node)
            needed |= {name for name in node.input if name}
            if any(
                attribute.type in {5, 10} for attribute in node.attribute
            ):  # a subgraph reads what it likes
                return nodes
    return kept[::-1]


def _unpacked(packed: Array, bits: int) -> Array:
    """Return the integers of each row, which are packed into bytes, the lowest bits first."""
    if bits == 8:
        return packed
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    values = (packed[..., np.newaxis] >> shifts) & np.uint8((1 << bits) - 1)
    return np.asarray(values.reshape(len(packed), -1))


def _attribute(node: Any, name: str, otherwise: int = 0) -> int:
    return next((int(attribute.i) for attribute in node.attribute if attribute.name == name), otherwise)
