"""Sites of an ONNX candidate in FP16 or BF16: one for each operator that computes in 16 bits, and repairs of them.

The copy computes in FP32. Behind each operator its result is rounded to 16 bits, as the file says, and its weights are the candidate's;
where its site is switched to FP32, neither is so. The copy stands for the candidate, too: on a processor ONNX Runtime computes several
operators after each other in FP32 and rounds nothing between, so its answers are better than those of a GPU, and it has hardly any kernels for
BF16. A GPU may lose more than the copy, because it can add up in 16 bits. Operators that only move values, such as Reshape or Relu,
round nothing and have no site.

A placebo multiplies what is rounded by a factor and divides by it afterwards: that moves each rounding, and repairs nothing.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from quantdrift.core.errors import OperatorError
from quantdrift.facts.diagnosis import HalfUse
from quantdrift.models.tensors.arrays import Array
from quantdrift.release.sites import (
    FACTORS,
    SWITCHES,
    Multiplications,
    ReferenceWeights,
    Site,
    SiteKind,
    Weight,
    fixed_rows,
    in_runs,
    loaded,
    session_of,
)

_HALVES: Final[dict[int, str]] = {TensorProto.FLOAT16: "FP16", TensorProto.BFLOAT16: "BF16"}
_MOVES: Final = frozenset(
    {
        "Abs",
        "Clip",
        "Concat",
        "Constant",
        "ConstantOfShape",
        "DepthToSpace",
        "Dropout",
        "Expand",
        "Flatten",
        "Gather",
        "GatherElements",
        "GatherND",
        "GlobalMaxPool",
        "Identity",
        "Max",
        "MaxPool",
        "Min",
        "Neg",
        "Pad",
        "Relu",
        "Reshape",
        "ReduceMax",
        "ReduceMin",
        "ScatterND",
        "Shape",
        "Slice",
        "SpaceToDepth",
        "Split",
        "Squeeze",
        "Tile",
        "TopK",
        "Transpose",
        "Trilu",
        "Unsqueeze",
        "Where",
    }
)
_CAST: Final = "Cast"
_MOST: Final[dict[int, float]] = {TensorProto.FLOAT16: 65_504.0, TensorProto.BFLOAT16: 3.39e38}
_LEAST: Final[dict[int, float]] = {TensorProto.FLOAT16: 2.0**-14, TensorProto.BFLOAT16: 2.0**-126}
_BITS: Final[dict[int, int]] = {TensorProto.FLOAT16: 10, TensorProto.BFLOAT16: 7}  # of a fraction
_STEP: Final = 16  # items whose values are in memory together
_SUBGRAPHS: Final = frozenset({onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS})


def is_half(path: Path) -> bool:
    """Return whether an ONNX file computes in FP16 or BF16, and has no other quantisation."""
    model = loaded(path, "candidate")
    kinds = {node.op_type for node in model.graph.node}
    if any("Quantize" in kind or "Integer" in kind or kind.endswith("Bits") for kind in kinds):
        return False
    stored = {tensor.data_type for tensor in model.graph.initializer}
    casts = {int(to) for node in model.graph.node if (to := _to(node)) is not None}
    return bool((stored | casts) & _HALVES.keys())


class HalfCopy:
    """A copy of a candidate in FP16 or BF16 in which each operator can be switched to FP32.

    Parameters
    ----------
    candidate, reference
        ONNX files.
    threads
        CPU threads, 0 for one per core.

    Raises
    ------
    OperatorError
        A file cannot be read, or no operator computes in 16 bits.
    """

    file: Path | None = None

    def __init__(self, candidate: Path, reference: Path, *, threads: int = 1) -> None:
        self._path, self._threads = candidate, threads
        self._bytes = _in_order(loaded(candidate, "candidate")).SerializeToString()
        model = onnx.ModelProto.FromString(self._bytes)
        if any(attribute.type in _SUBGRAPHS for node in model.graph.node for attribute in node.attribute):
            raise OperatorError(f"the candidate {candidate} has a subgraph: such graphs cannot be diagnosed")
        self._reference = ReferenceWeights(loaded(reference, "reference"), reference)
        found = _Found(model, self._reference)
        if not found.nodes:
            raise OperatorError(f"no operator of the candidate {candidate} computes in 16 bits")
        self._found = found
        multiplications = Multiplications(model)
        self.sites = found.sites
        self.weights = found.weights
        self.unmatched = found.unmatched
        self.costs = tuple(multiplications.share(site.nodes) for site in self.sites)
        self.inputs = tuple(info.name for info in model.graph.input)
        self.outputs = tuple(info.name for info in model.graph.output)
        self._model = found.switchable()
        self._session = session_of(_without(self._model, found.raws), str(candidate), threads)
        self._rows = fixed_rows(self._session)
        self._expected = session_of(str(reference), str(reference), threads)

    @property
    def everywhere(self) -> range:
        """The numbers of all sites."""
        return range(len(self.sites))

    @property
    def kind(self) -> str:
        """`FP16` or `BF16`."""
        return _HALVES[self._found.kinds[0]]

    def run(
        self, inputs: Mapping[str, Array], restored: Iterable[int] = (), factors: Array | None = None
    ) -> dict[str, Array]:
        """Return the outputs with some sites in FP32; what is rounded is multiplied by its factor and divided by it afterwards."""
        return self._computed(self._session, self.outputs, inputs, restored, factors)

    def raw(self, inputs: Mapping[str, Array], restored: Iterable[int] = ()) -> dict[int, Array]:
        """Return nothing: no site is an activation range."""
        del inputs, restored
        return {}

    def served(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return what the candidate computes, as its file says."""
        return self.run(inputs)

    def expected(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return what the reference computes."""
        return in_runs(self._expected, self.outputs, inputs, {}, fixed_rows(self._expected))

    def use_of(self, number: int, inputs: Mapping[str, Array]) -> HalfUse:
        """Return how the results of a site fit into 16 bits, with everything in FP32."""
        kind = self._found.kinds[number]
        n_values = n_over = n_under = 0
        largest = 0.0
        for begin in range(0, len(next(iter(inputs.values()))), self._rows or _STEP):
            part = {name: array[begin : begin + (self._rows or _STEP)] for name, array in inputs.items()}
            for values in self._computed(
                self._probed, self._found.raws_of(number), part, self.everywhere, None
            ).values():
                sizes = np.abs(values[np.isfinite(values)])
                n_values += values.size
                n_over += int((sizes > _MOST[kind]).sum())
                n_under += int(((sizes > 0) & (sizes < _LEAST[kind])).sum())
                largest = max(largest, float(sizes.max(initial=0.0)))
        return HalfUse(
            kind=_HALVES[kind],
            bits=_BITS[kind] + 1,
            largest=largest,
            most=_MOST[kind],
            above=n_over / max(n_values, 1),
            below=n_under / max(n_values, 1),
        )

    def runner(self, model: bytes) -> Callable[[Mapping[str, Array]], dict[str, Array]]:
        """Return what computes a changed candidate, as its file says."""
        found = _Found(_in_order(onnx.ModelProto.FromString(model)), self._reference)
        session = session_of(_without(found.switchable(), found.raws), str(self._path), self._threads)
        feed = {
            SWITCHES: np.zeros(max(len(found.nodes), 1), np.bool_),
            FACTORS: np.ones(max(len(found.nodes), 1), np.float32),
        }
        return lambda inputs: in_runs(session, self.outputs, _given(inputs), feed, self._rows)

    def kernels(self, model: bytes) -> Callable[[Mapping[str, Array]], dict[str, Array]]:
        """Return what computes a changed candidate with ONNX Runtime's kernels, without any in the copy; empty: the candidate itself."""
        model = model or self._bytes
        try:
            session = session_of(model, str(self._path), 1)
        except OperatorError:  # hardly any kernels are there for BF16
            return self.runner(model)
        kinds = {node.name: node.type for node in session.get_inputs()}

        def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
            given = {
                name: array.astype(np.float16) if kinds.get(name) == "tensor(float16)" else array
                for name, array in inputs.items()
            }
            return in_runs(session, self.outputs, given, {}, self._rows)

        return run

    def in_fp32(self, names: Collection[str]) -> onnx.ModelProto:
        """Return the candidate with some sites in FP32.

        Such an operator has the reference's weights, and hands its results on in FP32: an operator that reads these computes in FP32,
        too, with its own weights, and rounds its result.

        Raises
        ------
        OperatorError
            The candidate has no such site.
        """
        if unknown := [name for name in names if name not in {site.name for site in self.sites}]:
            raise OperatorError(f"the candidate {self._path} has no site `{unknown[0]}`")
        model = onnx.ModelProto.FromString(self._bytes)
        numbers = {number for number, site in enumerate(self.sites) if site.name in names}
        return _Retyped(model, self._found, numbers).finish()

    @cached_property
    def _probed(self) -> Any:
        return session_of(self._model.SerializeToString(), str(self._path), self._threads)

    def _computed(
        self,
        session: Any,
        names: Sequence[str],
        inputs: Mapping[str, Array],
        restored: Iterable[int],
        factors: Array | None,
    ) -> dict[str, Array]:
        switches = np.zeros(len(self.sites), dtype=np.bool_)
        switches[list(restored)] = True
        scaled = np.ones(len(self.sites)) if factors is None else factors
        feed = {SWITCHES: switches, FACTORS: scaled.astype(np.float32)}
        return in_runs(session, names, _given(inputs), feed, self._rows)


class _Found:
    """The sites of a candidate: its operators in 16 bits, with what they read."""

    def __init__(self, model: Any, reference: ReferenceWeights) -> None:
        self._model = model
        self._reference = reference
        self.stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        for node in model.graph.node:
            if node.op_type == "Constant":
                for attribute in node.attribute:
                    if attribute.name == "value":
                        self.stored[node.output[0]] = numpy_helper.to_array(attribute.t)
        self.types = _types(model)
        self.nodes = [node for node in model.graph.node if self._rounds(node)]
        self.number_of = {node.output[0]: number for number, node in enumerate(self.nodes)}
        self.kinds = [self.types[node.output[0]] for node in self.nodes]
        self.raw_of: dict[str, Array] = {}
        self._match()
        owners = {name: number for number, node in reversed([*enumerate(self.nodes)]) for name in node.input}
        self.unmatched = tuple(
            name
            for name, array in self.stored.items()
            if self.types.get(name) in _HALVES
            and name in owners
            and name not in self.raw_of
            and _is_inexact(array)
        )
        self.weights = tuple(
            _weight(owners[name], raw, _as_float(self.stored[name]), self.types[name])
            for name, raw in self.raw_of.items()
        )
        self.sites = tuple(
            Site(
                kind=SiteKind.LAYER,
                place=node.name or node.output[0],
                tensors=tuple(node.output),
                nodes=(node.name or node.output[0],),
                scale=np.ones(()),
                zero_point=np.zeros((), np.int64),
                axis=None,
                lowest=0,
                highest=0,
            )
            for node in self.nodes
        )

    @property
    def raws(self) -> frozenset[str]:
        """The results before they are rounded, by name."""
        return frozenset(name for number in range(len(self.nodes)) for name in self.raws_of(number))

    def raws_of(self, number: int) -> list[str]:
        """Return the results of a site before they are rounded, by name."""
        return [f"quantdrift.raw.{name}" for name in self.nodes[number].output if name in self.types]

    def switchable(self) -> Any:
        """Return the graph in FP32, with a rounding behind each site that can be switched off."""
        model = onnx.ModelProto.FromString(self._model.SerializeToString())
        graph = model.graph
        head = [helper.make_node("Constant", [], ["quantdrift.one"], value=_number(np.ones((), np.float32)))]
        nodes = []
        for node in graph.node:
            number = self.number_of.get(node.output[0]) if node.output else None
            copy = _in_float(node)
            if number is None:
                nodes.append(copy)
                continue
            head += _chosen(number)
            for position, name in enumerate(node.input):
                if name in self.raw_of:
                    copy.input[position] = f"quantdrift.weight.{number}.{name}"
                    head.append(
                        _either(
                            number,
                            copy.input[position],
                            _constant(f"{copy.input[position]}.raw", self.raw_of[name]),
                            [helper.make_node("Identity", [name], [f"{copy.input[position]}.own"])],
                        )
                    )
            for position, name in enumerate(node.output):
                if not name:
                    continue
                raw = copy.output[position] = f"quantdrift.raw.{name}"
                nodes.append(
                    _either(
                        number,
                        name,
                        [helper.make_node("Identity", [raw], [f"{name}.whole"])],
                        _rounding(number, raw, f"{name}.rounded", self.kinds[number]),
                    )
                )
            nodes.insert(len(nodes) - sum(bool(name) for name in node.output), copy)
        copies = [type(node).FromString(node.SerializeToString()) for node in (*head, *nodes)]
        del graph.node[:]
        graph.node.extend(copies)
        _float_tensors(graph)
        n_sites = max(len(self.nodes), 1)
        graph.input.extend(
            [
                helper.make_tensor_value_info(SWITCHES, TensorProto.BOOL, [n_sites]),
                helper.make_tensor_value_info(FACTORS, TensorProto.FLOAT, [n_sites]),
            ]
        )
        graph.output.extend(onnx.ValueInfoProto(name=name) for name in sorted(self.raws))
        return model

    def _rounds(self, node: Any) -> bool:
        """Return whether a node computes in 16 bits, or rounds a tensor to these."""
        if not node.output or self.types.get(node.output[0]) not in _HALVES:
            return False
        if node.op_type == _CAST:
            return self.types.get(node.input[0]) not in _HALVES
        return node.op_type not in _MOVES

    def _match(self) -> None:
        """Find the reference's values of what is stored in 16 bits, by name or by value."""
        read = {name for node in self.nodes for name in node.input}
        for name, array in self.stored.items():
            if self.types.get(name) not in _HALVES or name not in read:
                continue
            own = self._reference.weights.get(name)
            if own is not None and own.shape == array.shape:
                self.raw_of[name] = own.astype(np.float32)
                continue
            alike = [
                other
                for other in self._reference.weights.values()
                if other.shape == array.shape and np.array_equal(other.astype(array.dtype), array)
            ]
            if alike and all(np.array_equal(alike[0], other) for other in alike[1:]):
                self.raw_of[name] = alike[0].astype(np.float32)


class _Retyped:
    """A candidate with some sites in FP32."""

    def __init__(self, model: Any, found: _Found, numbers: Collection[int]) -> None:
        self._graph, self._model, self._found = model.graph, model, found
        self._floats: dict[str, str] = {}  # a tensor in 16 bits: the same in FP32
        self._nodes: list[Any] = []
        self._cast: set[str] = set()
        for node in model.graph.node:
            self._node(node, numbers)

    def finish(self) -> onnx.ModelProto:
        """Return the model."""
        needed = {info.name for info in self._graph.output}
        kept = []
        for node in reversed(self._nodes):
            if needed & {*node.output}:
                kept.append(node)
                needed |= {*node.input}
        copies = [type(node).FromString(node.SerializeToString()) for node in reversed(kept)]
        del self._graph.node[:]
        self._graph.node.extend(copies)
        stored = [
            type(tensor).FromString(tensor.SerializeToString())
            for tensor in self._graph.initializer
            if tensor.name in needed
        ]
        del self._graph.initializer[:]
        self._graph.initializer.extend(stored)
        del self._graph.value_info[:]
        model: onnx.ModelProto = self._model
        return model

    def _node(self, node: Any, numbers: Collection[int]) -> None:
        found = self._found
        number = found.number_of.get(node.output[0]) if node.output else None
        is_named = number in numbers
        reads = any(name in self._floats for name in node.input)
        if node.op_type == _CAST and (is_named or reads):
            source = self._floats.get(node.input[0], node.input[0])
            self._nodes.append(node)
            if is_named or (reads and found.types.get(node.output[0]) in _HALVES):
                self._floats[node.output[0]] = source
            elif reads and _to(node) == TensorProto.FLOAT:
                self._nodes[-1] = helper.make_node("Identity", [source], node.output)
            return
        if not is_named and not reads:
            self._nodes.append(node)
            return
        copy = _in_float(node)
        for position, name in enumerate(node.input):
            copy.input[position] = self._in_float(name, is_named=is_named)
        keeps = is_named or node.op_type in _MOVES
        for position, name in enumerate(node.output):
            kind = found.types.get(name)
            if not name or kind not in _HALVES:
                continue
            copy.output[position] = f"{name}.fp32"
            if keeps:
                self._floats[name] = f"{name}.fp32"
        self._nodes.append(copy)
        self._nodes += [
            helper.make_node(_CAST, [f"{name}.fp32"], [name], to=found.types[name])
            for name in node.output
            if found.types.get(name) in _HALVES
        ]

    def _in_float(self, name: str, *, is_named: bool) -> str:
        """Return the tensor in FP32."""
        if name in self._floats:
            return self._floats[name]
        if self._found.types.get(name) not in _HALVES:
            return name
        wide = f"{name}.{'whole' if is_named and name in self._found.raw_of else 'wide'}"
        if wide not in self._cast:
            self._cast.add(wide)
            if wide.endswith(".whole"):
                self._graph.initializer.append(numpy_helper.from_array(self._found.raw_of[name], wide))
            else:
                self._nodes.append(helper.make_node(_CAST, [name], [wide], to=TensorProto.FLOAT))
        return wide


def _in_order(model: Any) -> Any:
    """Sort the nodes of a graph, so that each comes behind those that it reads: converters add casts at its end."""
    graph = model.graph
    produced = {name for node in graph.node for name in node.output}
    done: set[str] = set()
    left, nodes = [*graph.node], list[Any]()
    while left:
        ready = [node for node in left if all(name in done or name not in produced for name in node.input)]
        if not ready:  # a circle: the session says so
            break
        nodes += ready
        done |= {name for node in ready for name in node.output}
        left = [node for node in left if not any(node is each for each in ready)]
    copies = [type(node).FromString(node.SerializeToString()) for node in (*nodes, *left)]
    del graph.node[:]
    graph.node.extend(copies)
    return model


def _given(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return inputs in FP32 where they are numbers in floating point."""
    return {
        name: array.astype(np.float32) if array.dtype.kind == "f" else array for name, array in inputs.items()
    }


def _types(model: Any) -> dict[str, int]:
    """Return the element type of each tensor whose type is known."""
    try:
        inferred = onnx.shape_inference.infer_shapes(model)
    except (onnx.shape_inference.InferenceError, ValueError):
        inferred = model
    types = {tensor.name: int(tensor.data_type) for tensor in model.graph.initializer}
    for info in (*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output):
        if kind := info.type.tensor_type.elem_type:
            types.setdefault(info.name, int(kind))
    for node in model.graph.node:  # of other domains: a result has the type of what goes in
        for name in node.output:
            if name and name not in types and node.input and node.input[0] in types:
                types[name] = types[node.input[0]]
    return types


def _weight(site: int, raw: Array, served: Array, kind: int) -> Weight:
    """Return a weight with its steps, which are those of 16 bits at each value."""
    sizes = np.maximum(np.abs(raw.astype(np.float64)), _LEAST[kind])
    step = np.exp2(np.floor(np.log2(sizes)) - _BITS[kind])
    most = np.asarray(_MOST[kind])
    return Weight(site=site, raw=raw, served=served, axis=None, step=step, low=-most, high=most)


def _is_inexact(array: Array) -> bool:
    """Return whether a stored tensor may have been rounded: small whole numbers are not."""
    values = _as_float(array)
    return bool((values != np.rint(values)).any())


def _as_float(array: Array) -> Array:
    return array if array.dtype.kind in "iub" else array.astype(np.float32)


def _to(node: Any) -> int | None:
    if node.op_type != _CAST:
        return None
    return next((int(attribute.i) for attribute in node.attribute if attribute.name == "to"), None)


def _in_float(node: Any) -> Any:
    """Return a copy of a node whose attributes say FP32 where they say 16 bits."""
    copy = type(node).FromString(node.SerializeToString())
    for attribute in copy.attribute:
        if attribute.name in {"to", "dtype"} and attribute.i in _HALVES:
            attribute.i = TensorProto.FLOAT
        if attribute.type == onnx.AttributeProto.TENSOR and attribute.t.data_type in _HALVES:
            attribute.t.CopyFrom(_number(numpy_helper.to_array(attribute.t).astype(np.float32)))
    return copy


def _float_tensors(graph: Any) -> None:
    """Make stored tensors, inputs and outputs FP32."""
    for tensor in graph.initializer:
        if tensor.data_type in _HALVES:
            array = numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    for info in (*graph.input, *graph.output):
        if info.type.tensor_type.elem_type in _HALVES:
            info.type.tensor_type.elem_type = TensorProto.FLOAT
    del graph.value_info[:]


def _chosen(number: int) -> list[Any]:
    """Return the nodes that read the switch and the factor of a site."""
    name = f"quantdrift.position.{number}"
    return [
        helper.make_node("Constant", [], [name], value=_number(np.array(number, np.int64))),
        helper.make_node("Gather", [SWITCHES, name], [f"quantdrift.switch.{number}"]),
        helper.make_node("Gather", [FACTORS, name], [f"quantdrift.factor.{number}"]),
    ]


def _rounding(number: int, raw: str, output: str, kind: int) -> list[Any]:
    """Return the nodes that round a tensor to 16 bits, on a grid that the factor of its site moves."""
    factor = f"quantdrift.factor.{number}"
    return [
        helper.make_node("Mul", [raw, factor], [f"{output}.wider"]),
        helper.make_node(_CAST, [f"{output}.wider"], [f"{output}.half"], to=kind),
        helper.make_node(_CAST, [f"{output}.half"], [f"{output}.float"], to=TensorProto.FLOAT),
        helper.make_node("Div", [f"{output}.float", factor], [output]),
    ]


def _either(number: int, output: str, whole: Sequence[Any], own: Sequence[Any]) -> Any:
    """Return a choice: what these nodes compute with the site in FP32, and without."""
    branches: dict[str, Any] = {
        name: helper.make_graph(
            [*nodes],
            f"{output}.{name}",
            [],
            [helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, None)],
        )
        for name, nodes in (("then_branch", whole), ("else_branch", own))
    }
    return helper.make_node("If", [f"quantdrift.switch.{number}"], [output], **branches)


def _constant(name: str, array: Array) -> list[Any]:
    return [helper.make_node("Constant", [], [name], value=_number(array))]


def _number(array: Array) -> Any:
    return numpy_helper.from_array(np.array(array, order="C"))


def _without(model: Any, names: Collection[str]) -> bytes:
    """Return a graph without some of its outputs."""
    copy = type(model).FromString(model.SerializeToString())
    outputs = [output for output in copy.graph.output if output.name not in names]
    del copy.graph.output[:]
    copy.graph.output.extend(outputs)
    return bytes(copy.SerializeToString())
