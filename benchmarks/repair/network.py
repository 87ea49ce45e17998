"""A deeper residual network that reads digits, in FP32 and as ONNX Runtime quantises it, made within a second.

Its convolutions are random and its last layer is a ridge regression on what they compute: nothing is trained. It has what
quantised networks have: batch norms to fold, Relu and Clip that ranges replace, residual additions, a concatenation, a
matrix product and a Gemm.
"""

import contextlib
import io
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import onnx
from numpy.random import Generator
from onnx import TensorProto, helper, numpy_helper

INPUT, OUTPUT = "image", "logits"
Images = npt.NDArray[np.float32]
_OPSET = 17
_CHANNELS = 16
_HIDDEN = 64
_RIDGE = 100.0
_COPIES = 3
_SHARPNESS = 12.0  # of the logits: a regression on 0 and 1 has differences below 1
_CALIBRATION = 256
_BRANCH = 0.5  # standard deviation of what a residual block adds


class Pages(msgspec.Struct, frozen=True, kw_only=True):
    """Digits to learn and calibrate from, and others : (n, 1, 8, 8), float32."""

    learnable: Images
    labels: npt.NDArray[np.int64]
    held_out: Images
    truth: npt.NDArray[np.int64]


def pages(seed: int = 0) -> Pages:
    """Return scikit-learn's digits, a third held out."""
    from sklearn.datasets import load_digits  # noqa: PLC0415 - a second of imports, for its users alone

    bundled = load_digits()
    order = np.random.default_rng(seed).permutation(len(bundled.target))
    images = (bundled.images[order, np.newaxis] / 16).astype(np.float32)
    labels = bundled.target[order].astype(np.int64)
    return Pages(
        learnable=images[:1_200], labels=labels[:1_200], held_out=images[1_200:], truth=labels[1_200:]
    )


def drawn(images: Images, n: int, rng: Generator) -> Images:
    """Draw pages with replacement, each with noise of its own."""
    chosen = images[rng.integers(len(images), size=n)]
    return np.clip(chosen + rng.normal(0, 0.05, chosen.shape), 0, 1).astype(np.float32)


class _Maker:
    """Adds layers to a graph while it computes them for the learnable pages."""

    def __init__(self, images: Images, rng: Generator) -> None:
        self._rng = rng
        self.values: dict[str, Images] = {INPUT: images}
        self.nodes: list[Any] = []
        self.stored: list[Any] = []

    def store(self, name: str, array: npt.NDArray[Any]) -> str:
        self.stored.append(numpy_helper.from_array(array, name))
        return name

    def node(self, kind: str, inputs: list[str], output: str, value: Images, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [output], name=f"node_{output}", **attributes))
        self.values[output] = value
        return output

    def conv(self, source: str, name: str, channels: int, spread: float) -> str:
        """Add a convolution with a batch norm that gives each channel the standard deviation `spread`."""
        x = self.values[source]
        fan = x.shape[1] * 9
        weight = self._rng.normal(0, fan**-0.5, (channels, x.shape[1], 3, 3)).astype(np.float32)
        made = self.node(
            "Conv",
            [source, self.store(f"{name}.weight", weight)],
            f"{name}_conv",
            _convolved(x, weight),
            kernel_shape=[3, 3],
            pads=[1, 1, 1, 1],
        )
        y = self.values[made]
        mean = y.mean(axis=(0, 2, 3))
        variance = y.var(axis=(0, 2, 3)) + 1e-3
        gamma = (spread * self._rng.uniform(0.7, 1.3, channels)).astype(np.float32)
        beta = (spread * self._rng.uniform(-0.3, 0.5, channels)).astype(np.float32)
        parts = {"gamma": gamma, "beta": beta, "mean": mean, "variance": variance}
        column = {part: array.reshape(1, -1, 1, 1) for part, array in parts.items()}
        normal = (y - column["mean"]) / np.sqrt(column["variance"] + 1e-5)
        return self.node(
            "BatchNormalization",
            [
                made,
                *(self.store(f"{name}.{part}", array.astype(np.float32)) for part, array in parts.items()),
            ],
            f"{name}_norm",
            (normal * column["gamma"] + column["beta"]).astype(np.float32),
            epsilon=1e-5,
        )

    def relu(self, source: str, name: str) -> str:
        return self.node("Relu", [source], name, np.maximum(self.values[source], 0))

    def clip(self, source: str, name: str, high: float) -> str:
        low = self.store(f"{name}.low", np.array(0, np.float32))
        top = self.store(f"{name}.high", np.array(high, np.float32))
        return self.node("Clip", [source, low, top], name, np.clip(self.values[source], 0, high))

    def add(self, left: str, right: str, name: str) -> str:
        return self.node("Add", [left, right], name, self.values[left] + self.values[right])


def _convolved(x: Images, weight: Images) -> Images:
    wide = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(wide, (3, 3), axis=(2, 3))
    columns = windows.transpose(0, 2, 3, 1, 4, 5).reshape(-1, x.shape[1] * 9)
    flat = columns @ weight.reshape(len(weight), -1).T
    return np.ascontiguousarray(flat.reshape(len(x), 8, 8, -1).transpose(0, 3, 1, 2)).astype(np.float32)


def write(path: Path, learnt: Pages, seed: int) -> None:
    """Write the network in FP32."""
    rng = np.random.default_rng(seed)
    labels = np.tile(learnt.labels, _COPIES)
    images = np.concatenate([learnt.learnable] * _COPIES)
    images = np.clip(images + rng.normal(0, 0.05, images.shape), 0, 1).astype(np.float32)
    made = _Maker(images, rng)
    x = made.relu(made.conv(INPUT, "stem", _CHANNELS, 1.0), "stem_relu")
    for number in range(1, 5):
        name = f"block{number}"
        inner = made.conv(x, f"{name}.a", _CHANNELS, 1.0)
        inner = made.clip(inner, f"{name}_clip", 2.0) if number == 2 else made.relu(inner, f"{name}_inner")
        branch = made.conv(inner, f"{name}.b", _CHANNELS, _BRANCH)
        x = made.relu(made.add(x, branch, f"{name}_sum"), f"{name}_relu")
    sides = [made.relu(made.conv(x, f"side{side}", 8, 1.0), f"side{side}_relu") for side in (1, 2)]
    joined = np.concatenate([made.values[side] for side in sides], axis=1)
    x = made.node("Concat", sides, "joined", joined, axis=1)
    n = len(images)
    pooled = made.values[x].reshape(n, _CHANNELS, 4, 2, 4, 2).max(axis=(3, 5))
    x = made.node("MaxPool", [x], "pooled", pooled, kernel_shape=[2, 2], strides=[2, 2])
    shape = made.store("flat.shape", np.array([-1, _CHANNELS * 16], np.int64))
    x = made.node("Reshape", [x, shape], "flat", pooled.reshape(n, -1))
    dense = rng.normal(0, (_CHANNELS * 16) ** -0.5, (_CHANNELS * 16, _HIDDEN * 4)).astype(np.float32)
    product = made.values[x] @ dense
    x = made.node("MatMul", [x, made.store("dense.weight", dense)], "dense", product)
    x = made.relu(x, "dense_relu")
    last, bias = ridge(made.values[x], labels)
    made.nodes.append(
        helper.make_node(
            "Gemm",
            [x, made.store("last.weight", last), made.store("last.bias", bias)],
            [OUTPUT],
            name="node_last",
        )
    )
    graph = helper.make_graph(
        made.nodes,
        "residual",
        [helper.make_tensor_value_info(INPUT, TensorProto.FLOAT, ["pages", 1, 8, 8])],
        [helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, ["pages", 10])],
        made.stored,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, path)


def ridge(x: Images, labels: npt.NDArray[np.int64]) -> tuple[Images, Images]:
    """Return weight and bias of the last layer, for what the layers before it compute : (n, width)."""
    wide = np.concatenate([x, np.ones((len(x), 1), np.float32)], axis=1).astype(np.float64)
    truth = np.eye(10)[labels] * _SHARPNESS
    solved = np.linalg.solve(wide.T @ wide + _RIDGE * np.eye(wide.shape[1]), wide.T @ truth)
    return solved[:-1].astype(np.float32), solved[-1].astype(np.float32)


@contextlib.contextmanager
def _no_advice() -> Iterator[None]:
    """Log only errors for a while: the tool writes on the root logger, and advises steps that are made here already."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(level)


def reader_of(batches: Iterable[dict[str, npt.NDArray[Any]]]) -> Any:
    """Return what ONNX Runtime calibrates with: inputs by name, a batch at a time."""
    from onnxruntime.quantization import CalibrationDataReader  # noqa: PLC0415 - a second of imports

    class Reader(CalibrationDataReader):  # type: ignore[misc] # the base has no types
        def __init__(self) -> None:
            self._batches = iter(batches)

        def get_next(self) -> dict[str, npt.NDArray[Any]] | None:
            return next(self._batches, None)

    return Reader()


def quantise(
    reference: Path,
    candidate: Path,
    images: Images,
    *,
    per_channel: bool = True,
    unsigned: bool = False,
    unsigned_weights: bool = False,
    reduced: bool = False,
) -> None:
    """Quantise the network with ONNX Runtime's own tool, calibrated on these pages; with `reduced` no processor's kernels saturate."""
    from onnxruntime.quantization import (  # noqa: PLC0415 - a second of imports
        QuantFormat,
        QuantType,
        quantize_static,
    )
    from onnxruntime.quantization.shape_inference import quant_pre_process  # noqa: PLC0415 - as above

    prepared = candidate.with_suffix(".prepared.onnx")
    with _no_advice(), contextlib.redirect_stdout(io.StringIO()):
        quant_pre_process(str(reference), str(prepared))
        quantize_static(
            str(prepared),
            str(candidate),
            reader_of({INPUT: batch} for batch in np.array_split(images[:_CALIBRATION], 4)),
            quant_format=QuantFormat.QDQ,
            per_channel=per_channel,
            reduce_range=reduced,
            weight_type=QuantType.QUInt8 if unsigned_weights else QuantType.QInt8,
            activation_type=QuantType.QUInt8 if unsigned else QuantType.QInt8,
        )
    prepared.unlink()
