"""Changed copies of a quantised ONNX candidate: with other activation ranges, or with some sites in FP32.

The candidate itself is edited, and nothing is quantised a second time by another tool: all that a repair does not change stays bit
for bit as it is, whichever tool made the candidate. What ONNX Runtime expects of such a graph is kept:

- a stored bias has the scale of its input times that of its weight, so a bias follows the new range of its input;
- the range of a pair can stand for a Relu or Clip (its zero point is at its lowest integer): where such a pair goes, the Relu
  or Clip of the reference comes back.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import helper, numpy_helper

from quantdrift.core.errors import OperatorError
from quantdrift.models.tensors.arrays import Array
from quantdrift.release.forms import BLOCKS, IN_BLOCKS, name_of
from quantdrift.release.scales import along, dequantised
from quantdrift.release.sites import (
    Graph,
    Pair,
    Placed,
    ReferenceWeights,
    Site,
    absorbed,
    loaded,
    placed,
)

_BIASED: Final = frozenset({"Conv", "ConvTranspose", "Gemm"})  # their third input is a bias
_PREFIX: Final = "quantdrift."
_SMALLEST: Final = 1e-30  # a scale: a site whose values are all 0


class CandidateEdits:
    """Makes changed copies of a candidate.

    Parameters
    ----------
    candidate, reference
        ONNX files.

    Raises
    ------
    OperatorError
        A file cannot be read.
    """

    def __init__(self, candidate: Path, reference: Path) -> None:
        self._path = candidate
        self._bytes = loaded(candidate, "candidate").SerializeToString()
        self._reference = ReferenceWeights(loaded(reference, "reference"), reference)

    def with_ranges(self, ranges: Mapping[str, tuple[float, float]]) -> onnx.ModelProto:
        """Return a copy whose activation sites have other ranges.

        Parameters
        ----------
        ranges
            The smallest and the largest value of each site, by its name. As ONNX Runtime's calibration does, a range is extended to
            0, and is symmetric where the candidate's is. A site with a scale for each channel keeps it.
        """
        graph, placement = self._opened()
        for site, pairs in placement.activations:
            if site.name in ranges and site.axis is None:
                _set_range(graph, site, pairs, *ranges[site.name])
        raw = {pair.source: weight.raw for _, matched in placement.weights for pair, weight in matched}
        for node in list(graph.graph.node):
            if node.op_type in _BIASED and len(node.input) > 2 and node.input[2]:
                _rescale_bias(graph, node, raw)
        return _cleaned(graph)

    def in_fp32(self, names: Collection[str]) -> onnx.ModelProto:
        """Return a copy in which the sites of these names are not quantised.

        Raises
        ------
        OperatorError
            The candidate has no such site.
        """
        _, placement = self._opened(None)
        sites = {site.name: site for site, _ in (*placement.activations, *placement.weights)}
        if unknown := [name for name in names if name not in sites]:
            raise OperatorError(f"the candidate {self._path} has no site `{unknown[0]}`")
        weights = {node for name in names if name.startswith("W:") for node in sites[name].nodes}
        inputs = {node for name in names if name.startswith("A:") for node in sites[name].nodes}
        # A product of a weight in blocks says itself that its input shall not be rounded.
        exact = {node for node in inputs - weights if node in self._products}
        graph, placement = self._opened((weights | inputs) - exact)
        for node in graph.graph.node:
            if name_of(node) in exact:
                _set_level(node)
        added: dict[int, list[Any]] = defaultdict(list)
        instead = {
            **self._without_ranges(graph, placement, names, added),
            **_with_weights(graph, placement, names, inputs),
        }
        _reconnect(graph, instead, added)
        return _cleaned(graph)

    def _without_ranges(
        self, graph: Graph, placement: Placed, names: Collection[str], added: dict[int, list[Any]]
    ) -> dict[str, str]:
        """Return what takes the place of the ranges of these names, and of those that no operator of ONNX has."""
        instead: dict[str, str] = {}
        for site, pairs in placement.activations:
            if site.name in names or pairs[0].quantise.op_type == BLOCKS:
                for position, pair in enumerate(pairs):
                    label = f"{_PREFIX}{site.name}.{position}"
                    source = _put_back(graph, pair, self._reference, label, added)
                    instead |= {node.output[0]: source for node in pair.dequantise}
        return instead

    def _opened(self, only: Collection[str] | None = ()) -> tuple[Graph, Placed]:
        """Return the graph, in which some nodes are written as pairs, with its sites; None: all of them are."""
        graph = Graph(onnx.ModelProto.FromString(self._bytes), self._path, only)
        return graph, placed(graph, self._reference)

    @cached_property
    def _products(self) -> frozenset[str]:
        """The names of the products with a weight in blocks, as in the reference."""
        model = onnx.ModelProto.FromString(self._bytes)
        return frozenset(name_of(node) for node in model.graph.node if node.op_type == IN_BLOCKS)


def quantised_range(site: Site, low: float, high: float) -> tuple[float, int]:
    """Return the scale and the zero point with which a site represents the values from `low` to `high`, and 0."""
    low, high = min(low, 0.0), max(high, 0.0)
    if site.lowest < 0 and not int(site.zero_point):  # symmetric
        return max(max(-low, high) / site.highest, _SMALLEST), 0
    scale = max((high - low) / (site.highest - site.lowest), _SMALLEST)
    return scale, int(np.clip(np.rint(site.lowest - low / scale), site.lowest, site.highest))


def _with_weights(
    graph: Graph, placement: Placed, names: Collection[str], inputs: Collection[str]
) -> dict[str, str]:
    """Return what takes the place of the weights of these names, and of those in blocks that have to be dequantised.

    `inputs` are nodes whose input is in FP32: ONNX Runtime would round it again before a weight in blocks.
    """
    instead: dict[str, str] = {}
    for site, matched in placement.weights:
        for pair, weight in matched:
            output = pair.dequantise[0].output[0]
            if site.name in names:
                instead[output] = _constant(graph, f"{_PREFIX}{output}", weight.raw)
            elif output in graph.grids and (output in graph.written or site.place in inputs):
                instead[output] = _constant(graph, f"{_PREFIX}{output}", weight.served)
    for pair, served in placement.as_served:
        output = pair.dequantise[0].output[0]
        if output in graph.written:
            instead[output] = _constant(graph, f"{_PREFIX}{output}", served)
    return instead


def _set_range(graph: Graph, site: Site, pairs: Iterable[Pair], low: float, high: float) -> None:
    scale, zero = quantised_range(site, low, high)
    for pair in pairs:
        first = pair.quantise
        old = graph.constants[first.input[1]]
        stored = graph.constants.get(first.input[2]) if len(first.input) > 2 else None
        integer = np.dtype(np.uint8) if stored is None else stored.dtype
        names = [
            _constant(graph, f"{_PREFIX}{site.name}.scale", np.full_like(old, scale)),
            _constant(graph, f"{_PREFIX}{site.name}.zero_point", np.full(old.shape, zero, integer)),
        ]
        for node in (first, *pair.dequantise):
            source = node.input[0]
            del node.input[:]
            node.input.extend([source, *names])


def _set_level(node: Any) -> None:
    """Let a product with a weight in blocks compute with its input in FP32."""
    kept = [attribute for attribute in node.attribute if attribute.name != "accuracy_level"]
    copies = [type(attribute).FromString(attribute.SerializeToString()) for attribute in kept]
    del node.attribute[:]
    node.attribute.extend([*copies, helper.make_attribute("accuracy_level", 1)])


def _rescale_bias(graph: Graph, node: Any, raw: Mapping[str, Array]) -> None:
    """Give a stored integer bias the scale of its input times that of its weight."""
    sources = [source for name in node.input[:3] if (source := graph.producer.get(name)) is not None]
    if [source.op_type for source in sources] != ["DequantizeLinear"] * 3:
        return
    data, weight, bias = sources
    integers, data_scale, weight_scale = (
        graph.constants.get(name) for name in (bias.input[0], data.input[1], weight.input[1])
    )
    if data_scale is None or weight_scale is None or integers is None or integers.dtype != np.int32:
        return
    old = graph.scale(bias, integers.ndim)
    values = raw.get(bias.input[0], dequantised(integers, old))
    scale = np.asarray(data_scale * weight_scale, np.float64)
    scale = scale.reshape(()) if scale.size == 1 else scale.reshape(-1)
    axis = None if scale.ndim == 0 else 0
    limits = np.iinfo(np.int32)
    rescaled = np.clip(np.rint(values / along(scale, axis, values.ndim)), limits.min, limits.max)
    name = f"{_PREFIX}{bias.output[0]}"
    changed = [
        _constant(graph, f"{name}.integers", rescaled.astype(np.int32)),
        _constant(graph, f"{name}.scale", scale.astype(data_scale.dtype)),
        _constant(graph, f"{name}.zero_point", np.zeros(scale.shape, np.int32)),
    ]
    del bias.input[:]
    bias.input.extend(changed)
    del bias.attribute[:]
    if axis is not None:
        bias.attribute.append(helper.make_attribute("axis", axis))


def _put_back(
    graph: Graph, pair: Pair, reference: ReferenceWeights, label: str, added: dict[int, list[Any]]
) -> str:
    """Return the tensor that takes the place of a pair: its source, behind the Relu or Clip that the pair stands for."""
    rectifier = absorbed(graph, pair, reference)
    if rectifier is None:
        return pair.source
    node, bounds = rectifier
    copy = type(node).FromString(node.SerializeToString())
    copy.name = label
    copy.input[0], copy.output[0] = pair.source, f"{label}.output"
    for position, name in enumerate(node.input[1:], start=1):
        if name:
            copy.input[position] = _constant(graph, f"{label}.{position}", bounds[name])
    added[id(pair.quantise)].append(copy)
    return str(copy.output[0])


def _reconnect(graph: Graph, instead: Mapping[str, str], added: Mapping[int, list[Any]]) -> None:
    """Let every reader of a tensor read another one; an output of the graph keeps its name."""

    def read(name: str) -> str:
        while name in instead:
            name = instead[name]
        return name

    outputs = {info.name for info in graph.graph.output}
    nodes = []
    for node in graph.graph.node:
        kept = [name for name in node.output if name in instead and name in outputs]
        nodes += added.get(id(node), [])
        nodes.append(helper.make_node("Identity", [kept[0]], kept) if kept else node)
    for node in nodes:
        for position, name in enumerate(node.input):
            node.input[position] = read(name)
    copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
    del graph.graph.node[:]
    graph.graph.node.extend(copies)


def _cleaned(graph: Graph) -> onnx.ModelProto:
    """Return the model without nodes and stored tensors that nothing reads."""
    inner = graph.graph
    needed = {info.name for info in inner.output}
    kept = []
    for node in reversed(inner.node):
        if needed & {*node.output}:
            kept.append(node)
            needed |= {name for name in node.input if name}
    copies = [type(node).FromString(node.SerializeToString()) for node in reversed(kept)]
    del inner.node[:]
    inner.node.extend(copies)
    stored = [
        type(tensor).FromString(tensor.SerializeToString())
        for tensor in inner.initializer
        if tensor.name in needed
    ]
    del inner.initializer[:]
    inner.initializer.extend(stored)
    del inner.value_info[:]
    model: onnx.ModelProto = graph.model
    return model


def _constant(graph: Graph, name: str, array: Array) -> str:
    if name not in graph.constants:
        graph.constants[name] = array
        graph.graph.initializer.append(numpy_helper.from_array(np.array(array, order="C"), name))
    return name
