"""The embedding of a reference, whose vectors make learned slices: an output, or an inner tensor made an output.

| array of a batch | vector of an item |
|---|---|
| (items,) or (items, width) | as it is |
| (items, tokens, width) | the mean over its tokens, as of a transformer's last layer |
| (items, channels, ...) with four dimensions or more | the mean over all but the channels, as of a convolution |
"""

import difflib
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx

from quantdrift.core.clusters import MOST_WIDTH
from quantdrift.core.errors import OperatorError
from quantdrift.models.tensors.arrays import Array, TensorSpec

_SHOWN: Final = 5
_CLOSE: Final = 0.4


def tensor_name(graph: onnx.GraphProto, wanted: str) -> str:
    """Return the tensor that `wanted` names: an output or an inner tensor, else the first output of a layer (node).

    Raises
    ------
    OperatorError
        There is no such tensor or layer; the message suggests similar names.
    """
    outputs = [output.name for output in graph.output]
    inner = [name for node in graph.node for name in node.output if name]
    layers = {node.name: node.output[0] for node in graph.node if node.name and node.output}
    if wanted in outputs or wanted in inner:
        return wanted
    if wanted in layers:
        return str(layers[wanted])
    names = list(dict.fromkeys((*outputs, *layers, *inner)))
    raise OperatorError(unknown_embedding(wanted, names))


def unknown_embedding(wanted: str, known: list[str]) -> str:
    """Return the message for an embedding that a reference does not have, with similar names."""
    near = difflib.get_close_matches(wanted, known, n=_SHOWN, cutoff=_CLOSE)
    similar = ", ".join(f"`{name}`" for name in near or known[:_SHOWN])
    hint = (
        f"did you mean {similar}?"
        if near
        else f"it has {similar}{' and others' if len(known) > _SHOWN else ''}"
    )
    return f"the reference has no output or layer `{wanted}`, as `models.embedding` names it: {hint}"


def with_output(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """Return the model with tensor `name` as a further output; the model itself if it is an output already."""
    if any(output.name == name for output in model.graph.output):
        return model
    widened = onnx.ModelProto()
    widened.CopyFrom(model)
    # ONNX Runtime infers its type.
    widened.graph.output.append(onnx.ValueInfoProto(name=name))
    return widened


def check_spec(spec: TensorSpec) -> None:
    """Check that a tensor can be an embedding.

    Raises
    ------
    OperatorError
        It is not floating point, has no dimension of items, or its vectors are too wide.
    """
    if spec.dtype.kind != "f" or not spec.shape:
        raise OperatorError(
            f"`models.embedding` names {spec}: an embedding is floating point, with one entry per item"
        )
    width = _width(spec.shape)
    if width is not None and width > MOST_WIDTH:
        raise OperatorError(
            f"`models.embedding` names {spec}: its vectors have {width} numbers, the limit is {MOST_WIDTH}. "
            "Name a later, smaller layer"
        )


def vectors_of(array: Array) -> npt.NDArray[np.float32]:
    """Return the vectors of a batch : (items, width), float32.

    Parameters
    ----------
    array
        The embedding of a batch, with at least one dimension.
    """
    rows = len(array)
    if array.ndim <= 2:
        return array.reshape(rows, -1 if array.size else 0).astype(np.float32)
    over = (1,) if array.ndim == 3 else tuple(range(2, array.ndim))
    with np.errstate(over="ignore", invalid="ignore"):
        pooled: npt.NDArray[np.float32] = array.mean(axis=over, dtype=np.float64).astype(np.float32)
    return pooled


def _width(shape: tuple[int | None, ...]) -> int | None:
    if len(shape) == 1:
        return 1
    return shape[2] if len(shape) == 3 else shape[1]
