"""Turns wire tensors into arrays, and inputs into exactly what the reference takes."""

import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from quantdrift.core.config.schema import ModelTensor
from quantdrift.core.datatype import DTYPES
from quantdrift.core.errors import QuarantineError, QuarantineReason
from quantdrift.core.records import Tensor
from shadow.runtime import Array, TensorSpec

MAX_ITEMS = 32_767  # `comparison.item` is a smallint
_LENGTH = struct.Struct("<I")
_BFLOAT16_BITS = 16


def decode(tensor: Tensor) -> Array:
    """Return the elements of `tensor` : shape as on the wire.

    BF16 becomes float32, which holds it exactly; BYTES becomes an object array of `bytes`. All others keep their
    type, and share memory with `tensor.data`.

    Raises
    ------
    QuarantineError
        Reason `schema`: an unknown datatype, or not as many bytes as datatype and shape ask for.
    """
    n_elements = math.prod(tensor.shape)
    if min(tensor.shape, default=0) < 0:
        raise _schema(f"`{tensor.name}` has a negative dimension: {list(tensor.shape)}")
    if tensor.datatype == "BYTES":
        texts = list(_texts(tensor))
        if len(texts) != n_elements:
            raise _schema(f"`{tensor.name}` holds {len(texts)} elements, its shape asks for {n_elements}")
        elements = np.empty(n_elements, dtype=object)
        elements[:] = texts
        return _shaped(tensor, elements)
    is_bfloat16 = tensor.datatype == "BF16"
    dtype = np.dtype("<u2") if is_bfloat16 else DTYPES.get(tensor.datatype)
    if dtype is None:
        raise _schema(f"`{tensor.name}` has the unknown datatype {tensor.datatype!r}")
    if len(tensor.data) != n_elements * dtype.itemsize:
        raise _schema(
            f"`{tensor.name}` holds {len(tensor.data)} bytes, {tensor.datatype}{list(tensor.shape)} needs "
            f"{n_elements * dtype.itemsize}"
        )
    array: Array = np.frombuffer(tensor.data, dtype=dtype)
    if is_bfloat16:  # the upper half of a float32
        array = (array.astype(np.uint32) << _BFLOAT16_BITS).view(np.float32)
    return _shaped(tensor, array)


def encode(name: str, datatype: str, array: Array) -> Tensor:
    """Return an array as the protocols carry it; text goes as UTF-8.

    Parameters
    ----------
    name, datatype
        Of the tensor; the datatype is that of `array`.
    array
        Any shape.
    """
    if datatype == "BYTES":
        texts = [one if isinstance(one, bytes) else str(one).encode() for one in array.ravel().tolist()]
        data = b"".join(_LENGTH.pack(len(text)) + text for text in texts)
    else:
        data = np.ascontiguousarray(array, dtype=DTYPES[datatype]).tobytes()
    return Tensor(name=name, datatype=datatype, shape=array.shape, data=data)


def specs_of(told: Sequence[ModelTensor]) -> tuple[TensorSpec, ...]:
    """Return what the configuration, or a server, says of tensors; BF16 is given and taken as float32.

    Parameters
    ----------
    told
        Name, datatype and shape of each, with -1 where any length will do.
    """
    return tuple(
        TensorSpec(
            name=tensor.name,
            dtype=_dtype_of(tensor.datatype),
            shape=tuple(None if size < 0 else size for size in tensor.shape),
        )
        for tensor in told
    )


def _dtype_of(datatype: str) -> np.dtype[Any]:
    if datatype == "BYTES":
        return np.dtype(object)
    return np.dtype(np.float32) if datatype == "BF16" else DTYPES[datatype]


def fit_inputs(tensors: Sequence[Tensor], wanted: Sequence[TensorSpec], *, batched: bool) -> dict[str, Array]:
    """Return the inputs of one exchange as the reference takes them, items along the first dimension.

    Floating point is cast up, never down; everything else must be of the reference's own type. Where the model is
    not batched, a first dimension of one item is added.

    Parameters
    ----------
    tensors
        As captured.
    wanted
        The reference's inputs.
    batched
        Whether the first dimension counts items.

    Returns
    -------
    dict
        Name to array : (items, ...), in the order of the request.

    Raises
    ------
    QuarantineError
        Reason `schema`: names, types or shapes do not fit; the detail names both sides.
    """
    specs = {spec.name: spec for spec in wanted}
    given = [tensor.name for tensor in tensors]
    if sorted(given) != sorted(specs):
        raise _schema(f"the exchange has the inputs {sorted(given)}, the reference takes {sorted(specs)}")
    arrays = {tensor.name: _fit(tensor, specs[tensor.name], batched=batched) for tensor in tensors}
    counts = {name: len(array) for name, array in arrays.items()}
    n_items = next(iter(counts.values()), 0)
    if any(count != n_items for count in counts.values()):
        raise _schema(f"the inputs differ in their first dimension: {counts}")
    if not 1 <= n_items <= MAX_ITEMS:
        raise _schema(f"an exchange must hold 1 to {MAX_ITEMS} items, this one holds {n_items}")
    return arrays


def _fit(tensor: Tensor, spec: TensorSpec, *, batched: bool) -> Array:
    array = decode(tensor)
    sides = (
        f"`{tensor.name}`: the exchange has {tensor.datatype}{list(tensor.shape)}, the reference takes {spec}"
    )
    # A fixed number of items is the replay's business, not the exchange's.
    expected = (None, *spec.shape[1:]) if batched and spec.shape else spec.shape
    if len(array.shape) != len(expected) or (batched and not expected):
        raise _schema(sides)
    if any(want is not None and want != have for have, want in zip(array.shape, expected, strict=True)):
        raise _schema(sides)
    if array.dtype == np.dtype(object):
        if spec.dtype != np.dtype(object):
            raise _schema(sides)
        array = _text_array(tensor.name, array)
    elif array.dtype != spec.dtype:
        if array.dtype.kind != "f" or not np.can_cast(array.dtype, spec.dtype, "safe"):
            raise _schema(sides)
        array = array.astype(spec.dtype)
    return array if batched else array[np.newaxis]


def _text_array(name: str, array: Array) -> Array:
    try:
        texts = [element.decode() for element in array.ravel()]
    except UnicodeDecodeError as error:
        raise _schema(f"`{name}` holds bytes that are no UTF-8 text") from error
    decoded = np.empty(len(texts), dtype=object)
    decoded[:] = texts
    return decoded.reshape(array.shape)


def _shaped(tensor: Tensor, elements: Array) -> Array:
    try:
        return elements.reshape(tensor.shape)
    except (ValueError, OverflowError) as error:  # the elements are as many as they should be
        raise _schema(f"`{tensor.name}` has a shape that no array can have") from error


def _texts(tensor: Tensor) -> Iterator[bytes]:
    at, data = 0, tensor.data
    while at < len(data):
        begin = at + _LENGTH.size
        if begin > len(data):
            raise _schema(f"`{tensor.name}` ends within the length of an element")
        at = begin + _LENGTH.unpack_from(data, at)[0]
        if at > len(data):
            raise _schema(f"`{tensor.name}` ends within an element")
        yield data[begin:at]


def _schema(detail: str) -> QuarantineError:
    return QuarantineError(QuarantineReason.SCHEMA, detail)
