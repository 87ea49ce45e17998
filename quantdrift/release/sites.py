"""Sites of a quantised ONNX candidate, and a copy of it in which each site can be switched to FP32.

A graph in QDQ form computes in floating point between pairs of QuantizeLinear and DequantizeLinear; other forms are written as such pairs first
(`forms`). A **site** is one decision that
the quantiser made: an activation range (`A:`, all pairs that share a scale) or the weight and bias of a node (`W:`).

The copy (`SwitchableCopy`) takes one boolean for each site and computes in its place either the raw value or the dequantised one
(`If`, of which only one branch costs anything). Any subset of sites in FP32 is one run of one session. With all switches on it must
compute the reference, with all off what the integer kernels compute from the candidate: `copies.check` measures both.
"""

import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import onnx
import onnxruntime
from google.protobuf.message import DecodeError
from onnx import helper, numpy_helper

from quantdrift.core.errors import OperatorError
from quantdrift.facts.diagnosis import OffValues
from quantdrift.models.runtimes.onnx.precision import check_external
from quantdrift.models.runtimes.onnx.session import ERRORS
from quantdrift.models.tensors.arrays import Array
from quantdrift.release.forms import (
    DYNAMIC,
    QUANTISES,
    in_steps,
    name_of,
    range_of,
    rounded,
    written_as_pairs,
)
from quantdrift.release.scales import Scale, dequantised

_QUANTISE: Final = "QuantizeLinear"
_DEQUANTISE: Final = "DequantizeLinear"
_PRODUCTS: Final = frozenset({"Conv", "Gemm", "MatMul"})
_RECTIFIERS: Final = frozenset({"Relu", "Clip"})
_UNREAD: Final = frozenset(
    {
        "DynamicQuantizeLSTM",
        "DynamicQuantizeMatMul",
        "GatherBlockQuantized",
        "MatMulBnb4",
        "MatMulFpQ4",
        "MatMulIntegerToFloat",
        "QAttention",
    }
)
_LEAVE_OUT: Final = (
    "no site of such a file can be named. Quantise it again without some of its layers (nodes_to_exclude), and compare the files with"
    " `quantdrift gate`; until then serve the slice by the reference, or roll the candidate back"
)
_SUFFIXES: Final = (
    "_DQ_Q4",
    "_Q2",
    "_Q4",
    "_Q8",
    "_quantized",
    "_QuantizeLinear_Input",
    "_DequantizeLinear_Output",
    "_DequantizeLinear_Output_1",
)
SWITCHES: Final = "quantdrift.switches"
FACTORS: Final = "quantdrift.factors"
_RAW: Final = "quantdrift.raw."
_SAME_INTEGERS: Final = 0.99  # of a weight, to be matched by value: rounding ties differ between tools
_FATAL: Final = 4
_UNFOLDED: tuple[type[Exception], ...] = (*ERRORS, OSError)
_HALVES: Final = frozenset({onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16})
_SMALLEST: Final = 1e-30  # a step
_STEP: Final = 16  # items whose activations are in memory together
_BINS: Final = 16_384  # of a histogram: an outlier of a thousand times the other values leaves them sixteen


class SiteKind(StrEnum):
    """What a site quantises."""

    ACTIVATION = "A"
    WEIGHT = "W"
    LAYER = "L"  # weights and activations that cannot be told apart
    THRESHOLDS = "T"  # of decision trees, at one column of the input
    LEAVES = "V"  # of decision trees


class Site(Scale, frozen=True, kw_only=True, eq=False):
    """One place of a candidate that is quantised, and that can be switched to FP32.

    Parameters
    ----------
    kind
        Activation range or weight.
    place
        The first tensor of an activation range, or the node of a weight.
    tensors
        The tensors that are quantised.
    nodes
        The nodes that read them, by name.
    is_dynamic
        Whether the range is that of each input, found while it is computed: then values are counted in steps, and `scale` is 1.
    values
        How thresholds or leaves of decision trees differ from the reference's; None: it is another kind.
    """

    kind: SiteKind
    place: str
    tensors: tuple[str, ...]
    nodes: tuple[str, ...]
    is_dynamic: bool = False
    values: OffValues | None = None

    @property
    def name(self) -> str:
        """Kind and place, such as `A:image` or `W:conv1`."""
        return f"{self.kind.value}:{self.place}"


class Weight(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A quantised weight or bias with the reference's.

    Parameters
    ----------
    site
        Number of its site.
    raw
        The reference's values.
    served
        The candidate's values: the integers, dequantised.
    axis
        The dimension of the channels; None: one scale for the tensor.
    step, low, high
        Width of a step, and the smallest and the largest value that can be represented: for each value or for all; None: unknown.
    """

    site: int
    raw: Array
    served: Array
    axis: int | None
    step: Array | None = None
    low: Array | None = None
    high: Array | None = None


class Pair(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Where a tensor is quantised: a QuantizeLinear with the DequantizeLinear that read it, or a stored integer tensor."""

    source: str
    quantise: Any
    dequantise: list[Any]
    key: tuple[str, str]


class SwitchableCopy:
    """A copy of a candidate in which each site can be switched to FP32, in one session of ONNX Runtime on the CPU.

    Assumption: between its pairs the candidate is the reference's graph, with batch norms folded and with Relu or Clip
    possibly left to the range of the next pair. Such a Relu or Clip is put back where the site is in FP32. Weights are those of
    the reference with the same name, or whose quantisation gives the candidate's integers; what is not matched stays quantised
    and is in `unmatched`.

    Parameters
    ----------
    candidate, reference
        ONNX files.
    threads
        CPU threads, 0 for one per core.

    Raises
    ------
    OperatorError
        A file cannot be read, or the candidate has no pairs, and cannot be written as such: no site can be named.
    """

    def __init__(self, candidate: Path, reference: Path, *, threads: int = 1) -> None:
        model = loaded(candidate, "candidate")
        parent = ReferenceWeights(loaded(reference, "reference"), reference)
        graph = Graph(model, candidate)
        if graph.has_blocks and any(tensor.data_type in _HALVES for tensor in model.graph.initializer):
            raise OperatorError(
                f"the candidate {candidate} has weights in blocks and computes in 16 bits: quantise the model in FP32 with the same settings, which"
                " gives the same weights in blocks, and diagnose that file"
            )
        multiplications = Multiplications(model, graph.constants)
        self.sites, self.weights, self.unmatched = _rewritten(graph, parent)
        if not self.sites:
            raise OperatorError(
                f"the candidate {candidate} has nothing that is quantised and can be switched: no pair in QDQ form, no weight in blocks, no"
                " dynamic INT8. What is left: serve the slice by the reference, or roll the candidate back"
            )
        self.costs = tuple(multiplications.share(site.nodes) for site in self.sites)
        self.inputs = tuple(node.name for node in model.graph.input if node.name not in {SWITCHES, FACTORS})
        self.outputs = tuple(node.name for node in model.graph.output if not node.name.startswith(_RAW))
        self.file = candidate
        self._model, self._candidate, self._threads = model, str(candidate), threads
        self._session = session_of(_without_raw(model), str(candidate), threads, keep_pairs=True)
        self._rows = fixed_rows(self._session) or int(graph.is_dynamic)
        self._served = session_of(str(candidate), str(candidate), threads)
        self._expected = session_of(str(reference), str(reference), threads)

    def run(
        self,
        inputs: Mapping[str, Array],
        restored: Iterable[int] = (),
        factors: Array | None = None,
    ) -> dict[str, Array]:
        """Return the outputs with some sites in FP32.

        Parameters
        ----------
        inputs
            By name : (items, ...).
        restored
            Numbers of the sites in FP32.
        factors
            (sites,): each scale is multiplied by its factor, before and after; None: they are as in the candidate.
        """
        return self._computed(self.outputs, inputs, restored, factors)

    def raw(self, inputs: Mapping[str, Array], restored: Iterable[int] = ()) -> dict[int, Array]:
        """Return the values before quantisation at the first tensor of each activation site : (items, ...) by site."""
        numbers = [number for number, site in enumerate(self.sites) if site.kind is SiteKind.ACTIVATION]
        if not numbers:
            return {}
        values = self._computed(
            [_raw_name(number, 0) for number in numbers], inputs, restored, None, session=self._probed
        )
        return dict(zip(numbers, values.values(), strict=True))

    def extremes(self, inputs: Mapping[str, Array]) -> dict[int, tuple[float, float]]:
        """Return the smallest and the largest value of the reference in each activation range, at all of its tensors, by site."""
        ends: dict[int, tuple[float, float]] = {}
        for number, values in self._reference_values(inputs):
            low, high = ends.get(number, (np.inf, -np.inf))
            ends[number] = (min(low, float(values.min())), max(high, float(values.max())))
        return ends

    def ranges(
        self, inputs: Mapping[str, Array], kept: Sequence[float]
    ) -> list[dict[int, tuple[float, float]]]:
        """Return for each share the ranges that hold so large a share of the reference's values, by site.

        What is left out is cut off at both ends alike. Quantiles are those of histograms, so the values are never in memory together.

        Parameters
        ----------
        inputs
            By name : (items, ...).
        kept
            Shares, in (0, 1]; a share of 1 gives the `extremes`.
        """
        extremes = self.extremes(inputs)
        counts = {number: np.zeros(_BINS, dtype=np.int64) for number in extremes}
        if any(share < 1.0 for share in kept):
            for number, values in self._reference_values(inputs):
                if np.isfinite(extremes[number]).all():
                    counts[number] += np.histogram(values, _BINS, extremes[number])[0]
        return [
            {number: _holding(share, counts[number], limits) for number, limits in extremes.items()}
            for share in kept
        ]

    def _reference_values(self, inputs: Mapping[str, Array]) -> Iterator[tuple[int, Array]]:
        """Yield the values of the reference at each tensor of each activation range, with the number of the site, a few items at a time."""
        names = [
            (number, _raw_name(number, position))
            for number, site in enumerate(self.sites)
            if site.kind is SiteKind.ACTIVATION and not site.is_dynamic
            for position in range(len(site.tensors))
        ]
        for begin in range(0, len(next(iter(inputs.values()))), _STEP):
            part = {name: array[begin : begin + _STEP] for name, array in inputs.items()}
            computed = self._computed(
                [name for _, name in names], part, self.everywhere, None, session=self._probed
            )
            yield from ((number, computed[name]) for number, name in names)

    @cached_property
    def _probed(self) -> Any:
        """A session that also returns the raw values: they cost a copy each, so the other one does without."""
        return session_of(self._model.SerializeToString(), self._candidate, self._threads, keep_pairs=True)

    @property
    def everywhere(self) -> range:
        """The numbers of all sites."""
        return range(len(self.sites))

    def served(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return what the candidate's own kernels compute."""
        return in_runs(self._served, self.outputs, inputs, {}, self._rows)

    def runner(self, model: bytes) -> Callable[[Mapping[str, Array]], dict[str, Array]]:
        """Return what computes a changed candidate with ONNX Runtime's kernels."""
        session = session_of(model, str(self.file), 1)
        return lambda inputs: in_runs(session, self.outputs, inputs, {}, self._rows)

    def expected(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return what the reference computes."""
        return outputs_of(self._expected, self.outputs, inputs)

    def _computed(
        self,
        names: Sequence[str],
        inputs: Mapping[str, Array],
        restored: Iterable[int],
        factors: Array | None,
        *,
        session: Any = None,
    ) -> dict[str, Array]:
        switches = np.zeros(len(self.sites), dtype=np.bool_)
        switches[list(restored)] = True
        scaled = np.ones(len(self.sites)) if factors is None else factors
        feed = {SWITCHES: switches, FACTORS: scaled.astype(np.float32)}
        return in_runs(session or self._session, names, inputs, feed, self._rows)


class Multiplications:
    """How many multiplications each operator of a graph takes for one item.

    Parameters
    ----------
    model
        The graph.
    constants
        Its stored tensors by name, where they are not all among its initialisers.
    """

    def __init__(self, model: Any, constants: Mapping[str, Array] | None = None) -> None:
        stored = _constants(model.graph) if constants is None else constants
        self._counts = _multiplications(model, stored)

    def share(self, nodes: Sequence[str]) -> float | None:
        """Return the share of multiplications that some operators take; None: a shape is unknown."""
        counts = [self._counts.get(node, 0) for node in nodes]
        known_counts = [count for count in counts if count is not None]
        total = [count for count in self._counts.values() if count is not None]
        if len(known_counts) < len(counts) or len(total) < len(self._counts) or not sum(total):
            return None
        return sum(known_counts) / sum(total)


def _multiplications(model: Any, constants: Mapping[str, Array]) -> dict[str, int | None]:
    """Return the multiplications of each convolution and matrix product for one item, by node; None: its shape is unknown."""
    try:
        inferred = onnx.shape_inference.infer_shapes(_of_one_item(model), data_prop=True)
    except (onnx.shape_inference.InferenceError, ValueError):
        inferred = model
    shapes = {name: array.shape for name, array in constants.items()}
    for info in (*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output):
        dims = info.type.tensor_type.shape.dim
        if all(dim.HasField("dim_value") for dim in dims):
            shapes[info.name] = tuple(dim.dim_value for dim in dims)
    counts: dict[str, int | None] = {}
    for node in model.graph.node:
        if node.op_type in {"Conv", "ConvTranspose", "Gemm", "MatMul"}:
            output_shape, weight = shapes.get(node.output[0]), shapes.get(node.input[1])
            count = None
            if output_shape is not None and weight is not None and node.op_type == "Conv":
                count = int(np.prod(output_shape[2:])) * int(np.prod(weight))
            elif weight is not None and node.op_type == "ConvTranspose":
                source = shapes.get(node.input[0])
                count = None if source is None else int(np.prod(source[2:])) * int(np.prod(weight))
            elif output_shape is not None and weight is not None:
                turned = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
                count = int(np.prod(output_shape)) * weight[-1 if turned else -2]
            counts[node.name or node.output[0]] = count
    return counts


def _of_one_item(model: Any) -> Any:
    """Return the graph for one item, so that all shapes are known."""
    copy = type(model).FromString(model.SerializeToString())
    for info in copy.graph.input:
        dims = info.type.tensor_type.shape.dim
        if dims and not dims[0].HasField("dim_value"):
            dims[0].dim_value = 1
    del copy.graph.value_info[:]
    for info in copy.graph.output:
        info.type.tensor_type.ClearField("shape")
    return copy


def loaded(path: Path, what: str) -> Any:
    """Return an ONNX file with its external data."""
    try:
        check_external(path, onnx.load(path, load_external_data=False), what)
        return onnx.load(path)
    except DecodeError as error:
        raise OperatorError(f"the {what} {path} is not an ONNX model") from error
    except (onnx.checker.ValidationError, ValueError) as error:
        raise OperatorError(f"the {what} {path} has external data that does not fit it") from error
    except OSError as error:
        raise OperatorError(
            f"the {what} {error.filename or path} cannot be read: {error.strerror}"
        ) from error


def session_of(source: Any, path: str, threads: int, *, keep_pairs: bool = False) -> Any:
    """Return a session of a file, or of bytes, on the processor; with `keep_pairs` it computes the pairs as they are, without integer kernels."""
    onnxruntime.set_default_logger_severity(_FATAL)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = _FATAL
    options.use_deterministic_compute = True
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if keep_pairs:
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    try:
        return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except ERRORS as error:
        raise OperatorError(f"ONNX Runtime cannot load {path}: {error}".strip()) from error


def outputs_of(session: Any, names: Sequence[str], inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return the outputs of a session, of as many items in a run as its graph takes."""
    return in_runs(session, names, inputs, {}, fixed_rows(session))


def fixed_rows(session: Any) -> int:
    """Return the number of items of one run where the graph fixes it, else 0."""
    first = [
        node.shape[0] for node in session.get_inputs() if node.shape and node.name not in {SWITCHES, FACTORS}
    ]
    return next((rows for rows in first if isinstance(rows, int)), 0)


def in_runs(
    session: Any, names: Sequence[str], inputs: Mapping[str, Array], feed: Mapping[str, Array], rows: int
) -> dict[str, Array]:
    """Run all items at once, or as many as the graph takes; the last step is filled up with its first item."""
    wanted = {node.name for node in session.get_inputs()}
    mine = {name: array for name, array in inputs.items() if name in wanted}
    n_items = len(next(iter(mine.values())))
    step = rows or max(n_items, 1)
    parts = []
    for begin in range(0, n_items, step):
        end = min(begin + step, n_items)
        taken = np.arange(begin, begin + step)
        taken[end - begin :] = begin
        part = {name: array[taken] for name, array in mine.items()} if rows else mine
        try:
            outputs = [np.asarray(array) for array in session.run(list(names), {**part, **feed})]
        except ERRORS as error:
            raise OperatorError(f"ONNX Runtime cannot compute these inputs: {error}".strip()) from error
        # A tensor that is one number is that of every item.
        outputs = [array if array.ndim else np.full(step, array) for array in outputs]
        parts.append([array[: end - begin] if rows else array for array in outputs])
    return {
        name: np.concatenate(column) for name, column in zip(names, zip(*parts, strict=True), strict=True)
    }


class ReferenceWeights:
    """The reference's weights and rectifiers by name, as it is and after ONNX Runtime has folded what is constant."""

    def __init__(self, model: Any, path: Path) -> None:
        models = [model, *_folded(path)]
        self.weights: dict[str, Array] = {}
        self.rectifiers: dict[str, tuple[Any, dict[str, Array]]] = {}
        self.read_by: dict[str, tuple[str, ...]] = {}
        for reference_model in models:
            constants = _constants(reference_model.graph)
            self.weights |= {name: array for name, array in constants.items() if array.dtype.kind == "f"}
            for node in reference_model.graph.node:
                if node.op_type in _PRODUCTS and node.input[1] in constants:
                    self.read_by.setdefault(name_of(node), (str(node.input[1]),))
                if node.op_type in _RECTIFIERS:
                    bounds = {name: constants[name] for name in node.input[1:] if name in constants}
                    self.rectifiers[node.output[0]] = (node, bounds)

    def weight(self, names: Iterable[str], integers: Array, site: Scale) -> Array | None:
        """Return the weight that became these integers; None where the reference does not tell."""
        for name in names:
            for array in _turned(self.weights.get(name)):
                if array.shape == integers.shape:
                    return array.astype(np.float32)
        matches: list[Array] = []
        for stored in self.weights.values():
            for array in _turned(stored):
                if array.shape == integers.shape and _same_integers(array, integers, site):
                    matches.append(array.astype(np.float32))
                    break
        if matches and all(np.array_equal(matches[0], other) for other in matches[1:]):
            return matches[0]
        return None


def _turned(array: Array | None) -> Iterator[Array]:
    if array is not None:
        yield array
        if array.ndim == 2:
            yield array.T


def _same_integers(array: Array, integers: Array, site: Scale) -> bool:
    scale, zero = (site.along(part, integers.ndim) for part in (site.scale, site.zero_point))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        quantised = np.clip(np.rint(array / scale) + zero, site.lowest, site.highest)
    apart = np.abs(quantised - integers.astype(np.int64))
    return bool((apart <= 1).all() and (apart == 0).mean() >= _SAME_INTEGERS)


def _folded(path: Path) -> list[Any]:
    """Return the reference as quantisers prepare it, batch norms and constants folded; none where it cannot be made."""
    with tempfile.TemporaryDirectory() as folder:
        folded_path = Path(folder) / "folded.onnx"
        options = onnxruntime.SessionOptions()
        options.log_severity_level = _FATAL
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(folded_path)
        try:
            onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            return [onnx.load(folded_path)]
        except _UNFOLDED:
            return []


def _constants(graph: Any) -> dict[str, Array]:
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant":
            for attribute in node.attribute:
                if attribute.name == "value":
                    constants[node.output[0]] = numpy_helper.to_array(attribute.t)
    return constants


class Graph:
    """A candidate's graph with its constants, producers, readers and pairs.

    Parameters
    ----------
    model
        It is changed: other forms of quantisation are written as pairs (`forms`).
    path
        Of the file, for errors.
    only
        Names of nodes: only these are written as pairs; None: all.
    """

    def __init__(self, model: Any, path: Path, only: Collection[str] | None = None) -> None:
        self.model = model
        self.graph = model.graph
        self.path = path
        try:
            self.constants = _constants(self.graph)
        except (TypeError, ValueError) as error:
            raise OperatorError(f"{path} has a constant that is not what its shape says: {error}") from error
        forms = written_as_pairs(model, self.constants, path, only)
        self.grids, self.written = forms.grids, forms.written
        self.is_dynamic, self.has_blocks = forms.is_dynamic, forms.has_blocks
        self.producer = {name: node for node in self.graph.node for name in node.output}
        self.readers: dict[str, list[Any]] = defaultdict(list)
        for node in self.graph.node:
            name = node.name or node.output[0]
            if node.op_type in _UNREAD:
                raise OperatorError(
                    f"the candidate {path} computes `{name}` with {node.op_type}, whose weights cannot be read here: {_LEAVE_OUT}"
                )
            if node.op_type == "QGemm" or node.op_type.startswith("QLinear"):  # made of pairs
                raise OperatorError(
                    f"the candidate {path} computes `{name}` with {node.op_type}, which computes on"
                    " integers with static ranges: such files can be diagnosed in QDQ form only. Quantise with QuantFormat.QDQ, or keep the QDQ file that it was made from"
                )
            if any(attribute.type in {5, 10} for attribute in node.attribute):
                raise OperatorError(
                    f"the candidate {path} has a subgraph at `{name}` ({node.op_type}): such graphs cannot be diagnosed"
                )
            for tensor in node.input:
                self.readers[tensor].append(node)

    def pairs(self) -> Iterator[Pair]:
        """Yield what is quantised and dequantised, in the order of the graph."""
        for node in self.graph.node:
            if node.op_type in QUANTISES and (node.op_type != _QUANTISE or node.input[1] in self.constants):
                readers = self.readers[node.output[0]]
                if readers and all(reader.op_type == _DEQUANTISE for reader in readers):
                    yield Pair(source=node.input[0], quantise=node, dequantise=readers, key=_key(node))
            elif (
                node.op_type == _DEQUANTISE
                and node.input[0] in self.constants
                and (node.output[0] in self.grids or node.input[1] in self.constants)
            ):
                yield Pair(source=node.input[0], quantise=None, dequantise=[node], key=_key(node))

    def scale(self, node: Any, n_dims: int) -> Scale:
        """Return scale and zero point of a node."""
        if node.op_type in QUANTISES - {_QUANTISE}:
            return range_of(node)
        if node.output[0] in self.grids:
            return self.grids[node.output[0]]
        scale = self.constants[node.input[1]].astype(np.float64)
        stored = self.constants.get(node.input[2]) if len(node.input) > 2 else None
        integers = self.constants.get(node.input[0]) if node.op_type == _DEQUANTISE else None
        zero = np.zeros(scale.shape, np.int64) if stored is None else stored.astype(np.int64)
        kind = (
            stored.dtype
            if stored is not None
            else integers.dtype
            if integers is not None
            else np.dtype(np.uint8)
        )
        lowest, highest = _limits(kind, self.path, node)
        axis = None
        if scale.size > 1:
            axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)
            axis += n_dims if axis < 0 else 0
            if scale.ndim != 1:
                raise OperatorError(
                    f"the candidate {self.path} quantises `{node.input[0]}` by blocks: {_LEAVE_OUT}"
                )
        return Scale(
            scale=scale if axis is not None else scale.reshape(()),
            zero_point=zero if axis is not None else zero.reshape(()),
            axis=axis,
            lowest=lowest,
            highest=highest,
        )

    def reader(self, tensor: str) -> Any:
        """Return the first node that computes with a tensor, behind transpositions; None: it is an output."""
        for node in self.readers[tensor]:
            if node.op_type in {"Transpose", "Reshape", "Identity", "Squeeze", "Unsqueeze"}:
                return self.reader(node.output[0]) or node
            return node
        return None


def _limits(kind: Any, path: Path, node: Any) -> tuple[int, int]:
    if kind.kind in "iu":
        return int(np.iinfo(kind).min), int(np.iinfo(kind).max)
    bits = {"int4": (-8, 7), "uint4": (0, 15)}.get(kind.name)
    if bits is None:
        raise OperatorError(
            f"the candidate {path} quantises `{node.input[0]}` to {kind.name}: only integers can be diagnosed"
        )
    return bits


def _key(node: Any) -> tuple[str, str]:
    if node.op_type != _QUANTISE:
        return "", str(node.output[0])
    return str(node.input[1]), str(node.input[2]) if len(node.input) > 2 else ""


class Placed(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The sites of a graph and where they are.

    Parameters
    ----------
    activations
        Each activation range with its pairs.
    weights
        Each weight with the stored tensors that the reference has, too, and their values there.
    unmatched
        Stored tensors that the reference does not have: they stay as they are.
    as_served
        Those of them in blocks, with their values.
    """

    activations: tuple[tuple[Site, tuple[Pair, ...]], ...]
    weights: tuple[tuple[Site, tuple[tuple[Pair, Weight], ...]], ...]
    unmatched: tuple[str, ...]
    as_served: tuple[tuple[Pair, Array], ...] = ()


def placed(graph: Graph, reference: ReferenceWeights) -> Placed:
    """Return the sites of a graph, activation ranges first."""
    ranges: dict[tuple[str, str], list[Pair]] = {}
    stored: dict[str, list[Pair]] = {}
    for pair in graph.pairs():
        if pair.quantise is not None and pair.source not in graph.constants:
            ranges.setdefault(pair.key, []).append(pair)
        else:
            node = graph.reader(pair.dequantise[0].output[0])
            site_name = (node.name or node.output[0]) if node is not None else stem(pair.source)
            stored.setdefault(site_name, []).append(pair)
    activations = tuple((_activation(graph, pairs), tuple(pairs)) for pairs in ranges.values())
    weights: list[tuple[Site, tuple[tuple[Pair, Weight], ...]]] = []
    unmatched: list[str] = []
    as_served: list[tuple[Pair, Array]] = []
    for site_name, pairs in stored.items():
        number = len(activations) + len(weights)
        matches = [(pair, _weight(graph, pair, number, reference)) for pair in pairs]
        unmatched += [stem(pair.source) for pair, weight in matches if weight is None]
        as_served += [
            (pair, dequantised(graph.constants[pair.source], graph.grids[pair.dequantise[0].output[0]]))
            for pair, weight in matches
            if weight is None and pair.dequantise[0].output[0] in graph.grids
        ]
        matched = tuple((pair, weight) for pair, weight in matches if weight is not None)
        if matched:
            largest = max(matched, key=lambda match: match[1].raw.size)[0]
            weights.append((_weight_site(graph, site_name, largest, [pair for pair, _ in matched]), matched))
    return Placed(
        activations=activations,
        weights=tuple(weights),
        unmatched=tuple(unmatched),
        as_served=tuple(as_served),
    )


def _rewritten(
    graph: Graph, reference: ReferenceWeights
) -> tuple[tuple[Site, ...], tuple[Weight, ...], tuple[str, ...]]:
    """Make a graph switchable in place; return its sites, its matched weights, and the weights that stay as they are."""
    placement = placed(graph, reference)
    edit = _Edit(graph)
    for number, (_, pairs) in enumerate(placement.activations):
        edit.activation(number, pairs, reference)
    # Where no range can be changed at random, the steps of weights are.
    has_factors = graph.has_blocks or not placement.activations
    for number, (_, matched) in enumerate(placement.weights, start=len(placement.activations)):
        for pair, weight in matched:
            edit.weight(number, pair, weight, has_factor=has_factors)
    for pair, served in placement.as_served:
        edit.served(pair, served)
    sites = tuple(site for site, _ in (*placement.activations, *placement.weights))
    edit.finish(len(sites), [len(pairs) for _, pairs in placement.activations])
    weights = tuple(weight for _, matched in placement.weights for _, weight in matched)
    return sites, weights, placement.unmatched


def _activation(graph: Graph, pairs: Sequence[Pair]) -> Site:
    scale = graph.scale(pairs[0].quantise, 0)
    readers = [
        node
        for pair in pairs
        for dequantise in pair.dequantise
        for node in graph.readers[dequantise.output[0]]
    ]
    return Site(
        kind=SiteKind.ACTIVATION,
        place=stem(pairs[0].source),
        tensors=tuple(pair.source for pair in pairs),
        nodes=tuple(
            dict.fromkeys(node.name or node.output[0] for node in readers if node.op_type != _QUANTISE)
        ),
        scale=scale.scale,
        zero_point=scale.zero_point,
        axis=scale.axis,
        lowest=scale.lowest,
        highest=scale.highest,
        is_dynamic=pairs[0].quantise.op_type != _QUANTISE,
    )


def _weight_site(graph: Graph, place: str, largest: Pair, pairs: Sequence[Pair]) -> Site:
    scale = graph.scale(largest.dequantise[0], graph.constants[largest.source].ndim)
    return Site(
        kind=SiteKind.WEIGHT,
        place=place,
        tensors=tuple(stem(pair.source) for pair in pairs),
        nodes=(place,),
        scale=scale.scale,
        zero_point=scale.zero_point,
        axis=scale.axis,
        lowest=scale.lowest,
        highest=scale.highest,
        blocks=scale.blocks,
        block_size=scale.block_size,
    )


def _weight(graph: Graph, pair: Pair, site: int, reference: ReferenceWeights) -> Weight | None:
    """Return a stored tensor with the reference's; None where that has none that matches."""
    node = pair.dequantise[0]
    array = graph.constants[pair.source]
    scale = graph.scale(node, array.ndim)
    if pair.quantise is None:
        integers = array
    else:
        step, zero = (scale.along(part, array.ndim) for part in (scale.scale, scale.zero_point))
        integers = np.clip(np.rint(array / step) + zero, scale.lowest, scale.highest).astype(np.int64)
    served = dequantised(integers, scale)
    names = (pair.source, stem(pair.source), node.output[0], stem(node.output[0]))
    # Tools that write blocks give tensors names of their own.
    reader = graph.reader(node.output[0]) if node.output[0] in graph.grids else None
    read = () if reader is None else reference.read_by.get(name_of(reader), ())
    raw = reference.weight(dict.fromkeys((*names, *read)), integers, scale)
    if raw is None:
        return None
    width = np.maximum(np.abs(scale.scale), _SMALLEST)  # a block of zeros has a scale of 0
    step, low, high = (scale.along(part, array.ndim) for part in (width, scale.low, scale.high))
    return Weight(site=site, raw=raw, served=served, axis=scale.axis, step=step, low=low, high=high)


def absorbed(graph: Graph, pair: Pair, reference: ReferenceWeights) -> tuple[Any, dict[str, Array]] | None:
    """Return the Relu or Clip that the range of a pair has replaced, with its bounds by name; None: there is none."""
    rectifier = reference.rectifiers.get(pair.source)
    producer = graph.producer.get(pair.source)
    return None if rectifier is None or producer is None or producer.op_type in _RECTIFIERS else rectifier


def stem(name: str) -> str:
    """Return the name that a tensor had before a quantiser added to it."""
    for suffix in _SUFFIXES:
        if name.endswith(suffix) and name != suffix:
            return name[: -len(suffix)]
    return name


def _holding(share: float, counts: Array, limits: tuple[float, float]) -> tuple[float, float]:
    """Return the range that holds a share of the values; `counts` are those of equal bins between the limits."""
    if share >= 1.0 or not counts.any():
        return limits
    reached = np.cumsum(counts) / counts.sum()
    edges = np.histogram_bin_edges([], len(counts), limits)
    cut = (1.0 - share) / 2.0
    first, last = np.searchsorted(reached, [cut, 1.0 - cut], side="right")
    ends = np.clip([edges[first], edges[min(last, len(counts) - 1) + 1]], *limits)
    return float(ends[0]), float(ends[1])


class _Edit:
    """The edits of a graph, gathered and then made at once."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._head: list[Any] = []
        self._before: dict[int, list[Any]] = defaultdict(list)
        self._instead: dict[int, list[Any]] = {}
        self._factored: set[int] = set()
        self._stored: set[str] = set()
        self._switched: set[int] = set()
        self._scale_of: dict[str, str] = {}  # multiplied by a factor: the scale in the file

    def activation(self, number: int, pairs: Sequence[Pair], reference: ReferenceWeights) -> None:
        """Put a switch behind each pair of an activation range, and a factor to its scale."""
        self._switch(number)
        if pairs[0].quantise.op_type != _QUANTISE:
            self._found(number, pairs)
            return
        scale = pairs[0].quantise.input[1]
        scaled = f"quantdrift.scale.{number}"
        kind = _element_type(self._graph.constants[scale])
        factor = self._factor(number, kind)
        self._scale_of[scaled] = scale
        self._head.append(helper.make_node("Mul", [scale, factor], [scaled]))
        for index, pair in enumerate(pairs):
            raw = self._raw(f"{number}.{index}", pair, reference)
            pair.quantise.input[1] = scaled
            for node in pair.dequantise:
                node.input[1] = scaled
                self._either(number, node, raw, _following([pair.quantise, node], node))
            self._instead[id(pair.quantise)] = [
                helper.make_node("Identity", [raw], [_raw_name(number, index)])
            ]

    def _found(self, number: int, pairs: Sequence[Pair]) -> None:
        """Put a switch behind each pair of a range that is found while it runs, and a factor to its step."""
        factor = self._factor(number, onnx.TensorProto.FLOAT)
        for index, pair in enumerate(pairs):
            node = pair.quantise
            for each in pair.dequantise:
                self._either(
                    number, each, pair.source, rounded(node, pair.source, factor, _served_name(number, each))
                )
            self._instead[id(node)] = [
                *([node] if node.op_type == DYNAMIC else []),
                *in_steps(node, pair.source, _raw_name(number, index)),
            ]

    def weight(self, number: int, pair: Pair, weight: Weight, *, has_factor: bool) -> None:
        """Put a switch behind a stored tensor, and a factor to its steps.

        A factor changes the rounding and repairs nothing: what is wrong with a weight beside its rounding stays.
        """
        self._switch(number)
        node = pair.dequantise[0]
        label = f"{number}.{node.output[0]}"
        raw = self._constant(f"quantdrift.weight.{label}", weight.raw)
        output = _served_name(number, node)
        in_blocks = node.output[0] in self._graph.grids
        if not has_factor and not in_blocks:
            self._either(number, node, raw, _following([node], node))
            return
        served = self._constant(f"quantdrift.served.{label}", weight.served)
        if not has_factor or weight.step is None:
            self._either(number, node, raw, [helper.make_node("Identity", [served], [output])])
            return
        factor = self._factor(number, onnx.TensorProto.FLOAT)
        step = weight.step.astype(np.float32)
        beside = weight.served - (np.rint(weight.raw / step) * step).astype(np.float32)
        steps = self._constant(f"quantdrift.step.{label}", step)
        fixed = self._constant(f"quantdrift.beside.{label}", beside)
        name = f"{output}.part"
        changed = [
            helper.make_node("Mul", [steps, factor], [f"{name}.wider"]),
            helper.make_node("Div", [raw, f"{name}.wider"], [f"{name}.ratio"]),
            helper.make_node("Round", [f"{name}.ratio"], [f"{name}.integers"]),
            helper.make_node("Mul", [f"{name}.integers", f"{name}.wider"], [f"{name}.rounded"]),
            helper.make_node("Add", [f"{name}.rounded", fixed], [f"{name}.changed"]),
        ]
        same = [helper.make_node("Identity", [served], [f"{name}.same"])]
        branches: dict[str, Any] = {
            key: helper.make_graph(
                nodes, f"{name}.{key}", [], [_typed(nodes[-1].output[0], onnx.TensorProto.FLOAT)]
            )
            for key, nodes in (("then_branch", same), ("else_branch", changed))
        }
        self._either(number, node, raw, [helper.make_node("If", [f"{factor}.is_one"], [output], **branches)])

    def served(self, pair: Pair, values: Array) -> None:
        """Put the values of a stored tensor in its place."""
        (node,) = pair.dequantise
        name = self._constant(f"quantdrift.served.{node.output[0]}", values)
        self._instead[id(node)] = [helper.make_node("Identity", [name], [node.output[0]])]

    def finish(self, n_sites: int, n_pairs: Sequence[int]) -> None:
        """Write the nodes in their new order, with the inputs and outputs of the copy; `n_pairs` are those of each activation range."""
        graph = self._graph.graph
        nodes = list(self._head)
        for node in graph.node:
            nodes += [*self._before[id(node)], *self._instead.get(id(node), [node])]
        copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(copies)
        graph.input.extend(
            [
                helper.make_tensor_value_info(SWITCHES, onnx.TensorProto.BOOL, [n_sites]),
                helper.make_tensor_value_info(FACTORS, onnx.TensorProto.FLOAT, [n_sites]),
            ]
        )
        graph.output.extend(
            onnx.ValueInfoProto(name=_raw_name(number, position))
            for number, count in enumerate(n_pairs)
            for position in range(count)
        )

    def _switch(self, number: int) -> None:
        if number not in self._switched:
            self._switched.add(number)
            position = self._constant(f"quantdrift.switch_position.{number}", np.array(number, np.int64))
            self._head.append(helper.make_node("Gather", [SWITCHES, position], [_switch_name(number)]))

    def _factor(self, number: int, kind: int) -> str:
        """Return the factor of a site, as a number of a type; beside it, whether it is 1."""
        name = f"quantdrift.factor.{number}"
        if number not in self._factored:
            self._factored.add(number)
            position = self._constant(f"quantdrift.position.{number}", np.array(number, np.int64))
            one = self._constant("quantdrift.one", np.array(1.0, np.float32))
            self._head += [
                helper.make_node("Gather", [FACTORS, position], [f"{name}.float"]),
                helper.make_node("Equal", [f"{name}.float", one], [f"{name}.is_one"]),
                helper.make_node("Cast", [f"{name}.float"], [name], to=kind),
            ]
        return name

    def _either(self, number: int, node: Any, raw: str, quantised: Sequence[Any]) -> None:
        """Put a choice in the place of a DequantizeLinear: the raw value, or what these nodes compute, the last of them its result."""
        label = f"quantdrift.{number}.{node.output[0]}"
        stored = self._graph.constants.get(
            self._scale_of.get(node.input[1], node.input[1]) if len(node.input) > 1 else ""
        )
        is_float = stored is None or node.output[0] in self._graph.grids
        kind = onnx.TensorProto.FLOAT if is_float or stored is None else _element_type(stored)
        copy = helper.make_node("Identity", [raw], [f"{label}.raw"])
        branches: dict[str, Any] = {
            name: helper.make_graph(nodes, f"{label}.{name}", [], [_typed(nodes[-1].output[0], kind)])
            for name, nodes in (("then_branch", [copy]), ("else_branch", [*quantised]))
        }
        self._instead[id(node)] = [
            helper.make_node("If", [_switch_name(number)], [node.output[0]], **branches)
        ]

    def _raw(self, label: str, pair: Pair, reference: ReferenceWeights) -> str:
        """Return the tensor in FP32, behind the Relu or Clip that the range has replaced."""
        rectifier = absorbed(self._graph, pair, reference)
        if rectifier is None:
            return pair.source
        node, bounds = rectifier
        copy = type(node).FromString(node.SerializeToString())
        copy.name = ""
        copy.input[0], copy.output[0] = pair.source, f"quantdrift.rectified.{label}"
        for position, name in enumerate(node.input[1:], start=1):
            if name:
                copy.input[position] = self._constant(f"quantdrift.bound.{label}.{position}", bounds[name])
        self._before[id(pair.quantise)].append(copy)
        return str(copy.output[0])

    def _constant(self, name: str, array: Array) -> str:
        if name not in self._stored:
            self._stored.add(name)
            # `ascontiguousarray` would give a number one dimension.
            self._graph.graph.initializer.append(numpy_helper.from_array(np.array(array, order="C"), name))
        return name


def _following(nodes: Sequence[Any], node: Any) -> list[Any]:
    """Return copies of nodes, each of which reads the one before it, in the place of a DequantizeLinear."""
    label = _served_name("", node)
    copies = [type(operator).FromString(operator.SerializeToString()) for operator in nodes]
    for operator, following in pairwise(copies):
        operator.output[0] = following.input[0] = f"{label}.integers"
    copies[-1].output[0] = label
    return copies


def _served_name(number: int | str, node: Any) -> str:
    return f"quantdrift.{number}.{node.output[0]}.dequantised"


def _without_raw(model: Any) -> bytes:
    """Return a switchable copy that computes its outputs and nothing else."""
    copy = type(model).FromString(model.SerializeToString())
    outputs = [output for output in copy.graph.output if not output.name.startswith(_RAW)]
    nodes = [node for node in copy.graph.node if not node.output[0].startswith(_RAW)]
    del copy.graph.output[:]
    del copy.graph.node[:]
    copy.graph.output.extend(outputs)
    copy.graph.node.extend(nodes)
    return bytes(copy.SerializeToString())


def _typed(name: str, kind: int) -> Any:
    """Return a tensor of a subgraph whose shape only the run knows."""
    return helper.make_tensor_value_info(name, kind, None)


def _raw_name(number: int, place: int) -> str:
    return f"{_RAW}{number}.{place}"


def _switch_name(number: int) -> str:
    return f"quantdrift.switch.{number}"


def _element_type(array: Array) -> int:
    return int(helper.np_dtype_to_tensor_dtype(array.dtype))
