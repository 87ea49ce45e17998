"""Two further networks that read digits: a Transformer, and a perceptron with layer norms and GELU, each made within a second.

Their layers are random and the last one is a ridge regression on what they compute, as in `network`. Both are full of what
`quantize_static` quantises by its defaults beside layers: elementwise operators, softmax, and constants that are one number.
"""

import tempfile
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from numpy.random import Generator
from onnx import TensorProto, helper, numpy_helper

from benchmarks.repair.network import INPUT, OUTPUT, Images, Pages, ridge
from quantdrift.release.sites import session_of

_OPSET: Final = 17
_TOKENS: Final = 16  # patches of 2 x 2
_WIDTH: Final = 32
_HEADS: Final = 4
_HIDDEN: Final = 128
_BLOCKS: Final = 2
_COPIES: Final = 3


class Shape(StrEnum):
    """Which network."""

    TRANSFORMER = "transformer"
    PERCEPTRON = "perceptron"


class _Layers:
    """Adds the layers of a graph."""

    def __init__(self, rng: Generator) -> None:
        self._rng = rng
        self.nodes: list[Any] = []
        self.stored: list[Any] = []

    def store(self, name: str, values: npt.NDArray[Any] | float) -> str:
        array = np.asarray(values)
        self.stored.append(
            numpy_helper.from_array(array.astype(np.float32) if array.dtype.kind == "f" else array, name)
        )
        return name

    def node(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [output], name=f"node_{output}", **attributes))
        return output

    def linear(self, source: str, name: str, n_in: int, n_out: int) -> str:
        weight = self._rng.normal(0, n_in**-0.5, (n_in, n_out))
        product = self.node("MatMul", [source, self.store(f"{name}.weight", weight)], f"{name}_product")
        bias = self.store(f"{name}.bias", self._rng.normal(0, 0.1, n_out))
        return self.node("Add", [product, bias], f"{name}_sum")

    def norm(self, source: str, name: str, width: int) -> str:
        """Add a layer norm as exporters wrote it before there was an operator for it."""
        mean = self.node("ReduceMean", [source], f"{name}_mean", axes=[-1], keepdims=1)
        apart = self.node("Sub", [source, mean], f"{name}_apart")
        square = self.node("Pow", [apart, self.store(f"{name}.two", 2.0)], f"{name}_square")
        variance = self.node("ReduceMean", [square], f"{name}_variance", axes=[-1], keepdims=1)
        above = self.node("Add", [variance, self.store(f"{name}.epsilon", 1e-2)], f"{name}_above")
        spread = self.node("Sqrt", [above], f"{name}_spread")
        normal = self.node("Div", [apart, spread], f"{name}_normal")
        gamma = self.store(f"{name}.gamma", self._rng.uniform(0.7, 1.3, width))
        scaled = self.node("Mul", [normal, gamma], f"{name}_scaled")
        return self.node("Add", [scaled, self.store(f"{name}.beta", np.zeros(width))], f"{name}_norm")

    def gelu(self, source: str, name: str) -> str:
        divided = self.node("Div", [source, self.store(f"{name}.root", 2**0.5)], f"{name}_divided")
        erf = self.node("Erf", [divided], f"{name}_erf")
        above = self.node("Add", [erf, self.store(f"{name}.one", 1.0)], f"{name}_above")
        product = self.node("Mul", [source, above], f"{name}_product")
        return self.node("Mul", [product, self.store(f"{name}.half", 0.5)], f"{name}_gelu")

    def shaped(self, source: str, name: str, shape: list[int]) -> str:
        sizes = self.store(f"{name}.shape", np.array(shape, np.int64))
        return self.node("Reshape", [source, sizes], f"{name}_shaped")

    def transposed(self, source: str, name: str, order: list[int]) -> str:
        return self.node("Transpose", [source], f"{name}_transposed", perm=order)

    def attention(self, source: str, name: str) -> str:
        each = _WIDTH // _HEADS
        heads = {}
        for part, order in (("query", [0, 2, 1, 3]), ("key", [0, 2, 3, 1]), ("value", [0, 2, 1, 3])):
            whole = self.linear(source, f"{name}.{part}", _WIDTH, _WIDTH)
            split = self.shaped(whole, f"{name}.{part}", [-1, _TOKENS, _HEADS, each])
            heads[part] = self.transposed(split, f"{name}.{part}", order)
        scores = self.node("MatMul", [heads["query"], heads["key"]], f"{name}_scores")
        scaled = self.node("Mul", [scores, self.store(f"{name}.scale", 2 * each**-0.5)], f"{name}_scaled")
        weights = self.node("Softmax", [scaled], f"{name}_weights", axis=-1)
        mixed = self.node("MatMul", [weights, heads["value"]], f"{name}_mixed")
        joined = self.shaped(
            self.transposed(mixed, f"{name}.mixed", [0, 2, 1, 3]), f"{name}.mixed", [-1, _TOKENS, _WIDTH]
        )
        return self.linear(joined, f"{name}.out", _WIDTH, _WIDTH)


def _transformer(layers: _Layers, rng: Generator) -> tuple[str, int]:
    """Add the layers before the last one; return what they compute, and its width."""
    patches = layers.shaped(INPUT, "patches", [-1, 4, 2, 4, 2])
    tokens = layers.shaped(layers.transposed(patches, "patches", [0, 1, 3, 2, 4]), "tokens", [-1, _TOKENS, 4])
    x = layers.linear(tokens, "embedding", 4, _WIDTH)
    places = layers.store("places", rng.normal(0, 0.5, (1, _TOKENS, _WIDTH)))
    x = layers.node("Add", [x, places], "placed")
    for number in range(_BLOCKS):
        name = f"block{number}"
        mixed = layers.attention(layers.norm(x, f"{name}.before", _WIDTH), f"{name}.attention")
        x = layers.node("Add", [x, mixed], f"{name}_attended")
        inner = layers.linear(layers.norm(x, f"{name}.middle", _WIDTH), f"{name}.up", _WIDTH, 2 * _WIDTH)
        inner = layers.linear(layers.gelu(inner, f"{name}.gelu"), f"{name}.down", 2 * _WIDTH, _WIDTH)
        x = layers.node("Add", [x, inner], f"{name}_out")
    width = _TOKENS * _WIDTH
    return layers.shaped(layers.norm(x, "end", _WIDTH), "flat", [-1, width]), width


def _perceptron(layers: _Layers, rng: Generator) -> tuple[str, int]:  # noqa: ARG001 - as above
    x = layers.linear(layers.shaped(INPUT, "flat", [-1, 64]), "first", 64, _HIDDEN)
    for number in range(_BLOCKS):
        name = f"block{number}"
        inner = layers.linear(layers.norm(x, f"{name}.norm", _HIDDEN), f"{name}.up", _HIDDEN, _HIDDEN)
        x = layers.node("Add", [x, layers.gelu(inner, f"{name}.gelu")], f"{name}_out")
    return layers.norm(x, "end", _HIDDEN), _HIDDEN


_BODIES: Final[dict[Shape, Callable[[_Layers, Generator], tuple[str, int]]]] = {
    Shape.TRANSFORMER: _transformer,
    Shape.PERCEPTRON: _perceptron,
}


def write_shape(shape: Shape, path: Path, learnt: Pages, seed: int = 1) -> None:
    """Write a network in FP32, with the names of `network.INPUT` and `network.OUTPUT`."""
    rng = np.random.default_rng(seed)
    images = np.concatenate([learnt.learnable] * _COPIES)
    images = np.clip(images + rng.normal(0, 0.05, images.shape), 0, 1).astype(np.float32)
    layers = _Layers(rng)
    last, width = _BODIES[shape](layers, rng)
    hidden = _computed(_model(layers, last, [None, width], shape), last, images)
    weight, bias = ridge(hidden, np.tile(learnt.labels, _COPIES))
    product = layers.node("MatMul", [last, layers.store("last.weight", weight)], "last_product")
    layers.nodes.append(
        helper.make_node("Add", [product, layers.store("last.bias", bias)], [OUTPUT], name="node_last")
    )
    model = _model(layers, OUTPUT, [None, 10], shape)
    onnx.checker.check_model(model)
    onnx.save(model, path)


def _model(layers: _Layers, output: str, dims: list[int | None], shape: Shape) -> Any:
    graph = helper.make_graph(
        layers.nodes,
        shape.value,
        [helper.make_tensor_value_info(INPUT, TensorProto.FLOAT, ["pages", 1, 8, 8])],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, ["pages", *dims[1:]])],
        layers.stored,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=8)


def _computed(model: Any, output: str, images: Images) -> Images:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "body.onnx"
        onnx.save(model, path)
        session = session_of(str(path), str(path), 1)
        found: Images = session.run([output], {INPUT: images})[0]
    return found
