"""The conversion of wire tensors to arrays, and of captured inputs to the reference's inputs."""

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from quantdrift.core.config.schema import ModelTensor, ReferenceInput
from quantdrift.core.errors import QuarantineError, QuarantineReason
from quantdrift.core.records import Tensor
from quantdrift.core.tensors import DTYPES
from quantdrift.core.text import plain
from quantdrift.models.tensors.arrays import Array, TensorSpec
from quantdrift.models.tensors.mapping import converted, sources

MAX_ITEMS = 32_767  # `comparison.item` is a smallint
_LENGTH = struct.Struct("<I")
_BFLOAT16_BITS = 16
_LONGEST_DETAIL = 500
_REMEMBERED = 256  # inputs of references, and shapes


def decode(tensor: Tensor) -> Array:
    """Return the elements of `tensor` : shape as on the wire.

    BF16 becomes float32, which holds it exactly; BYTES becomes an object array of `bytes`. All others keep their
    type, and share memory with `tensor.data`.

    Raises
    ------
    QuarantineError
        Reason `schema`: an unknown datatype, or a number of bytes that does not fit datatype and shape.
    """
    n_elements = _n_elements(tensor.shape)
    if n_elements < 0:
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
        raise _schema(f"`{tensor.name}` has a datatype that is not known")
    if len(tensor.data) != n_elements * dtype.itemsize:
        raise _schema(
            f"`{tensor.name}` holds {len(tensor.data)} bytes, {tensor.datatype}{list(tensor.shape)} needs "
            f"{n_elements * dtype.itemsize}"
        )
    array: Array = np.frombuffer(tensor.data, dtype=dtype)
    if is_bfloat16:  # the upper half of a float32
        array = (array.astype(np.uint32) << _BFLOAT16_BITS).view(np.float32)
    return _shaped(tensor, array)


@lru_cache(maxsize=_REMEMBERED)
def _n_elements(shape: tuple[int, ...]) -> int:
    """Return the number of elements; -1: a dimension is negative."""
    return -1 if min(shape, default=0) < 0 else math.prod(shape)


def encode(name: str, datatype: str, array: Array) -> Tensor:
    """Return an array as a wire tensor; text is encoded as UTF-8.

    Parameters
    ----------
    datatype
        The protocol's name for the type of `array`.
    array
        Any shape.
    """
    if datatype == "BYTES":
        texts = [text if isinstance(text, bytes) else str(text).encode() for text in array.ravel().tolist()]
        data = b"".join(_LENGTH.pack(len(text)) + text for text in texts)
    else:
        data = np.ascontiguousarray(array, dtype=DTYPES[datatype]).tobytes()
    return Tensor(name=name, datatype=datatype, shape=array.shape, data=data)


def specs_of(tensors: Sequence[ModelTensor]) -> tuple[TensorSpec, ...]:
    """Return the specifications of tensors that the configuration or a server declares; BF16 is exchanged as float32.

    Parameters
    ----------
    tensors
        Name, datatype and shape of each, with -1 where any length will do.
    """
    return tuple(
        TensorSpec(
            name=tensor.name,
            dtype=_dtype_of(tensor.datatype),
            shape=tuple(None if size < 0 else size for size in tensor.shape),
        )
        for tensor in tensors
    )


def _dtype_of(datatype: str) -> np.dtype[Any]:
    if datatype == "BYTES":
        return np.dtype(object)
    return np.dtype(np.float32) if datatype == "BF16" else DTYPES[datatype]


def fit_inputs(
    tensors: Sequence[Tensor],
    wanted: Sequence[TensorSpec],
    *,
    batched: bool,
    mapping: tuple[ReferenceInput, ...] = (),
) -> dict[str, Array]:
    """Return the inputs of one exchange as the reference takes them, items along the first dimension.

    Numbers are cast to a wider type of their kind, and to other types only if `mapping` asks for it. If the model is not
    batched, a first dimension of one item is added.

    Parameters
    ----------
    tensors
        As captured.
    wanted
        The reference's inputs.
    batched
        Whether the first dimension counts items.
    mapping
        `models.references.inputs`: inputs that have another name or type in the exchange.

    Returns
    -------
    dict
        The reference's name to array : (items, ...), in the order of the request.

    Raises
    ------
    QuarantineError
        Reason `schema`: names, types or shapes do not fit; the detail names both sides.
    """
    entries = _entries(tuple(wanted), mapping)
    if len(tensors) != len(entries) or {tensor.name for tensor in tensors} != entries.keys():
        names = sorted(tensor.name for tensor in tensors)
        taken = sorted(_source_text(name, entry) for name, (entry, _) in entries.items())
        raise _schema(
            f"the exchange has the inputs {names}, the reference takes {taken}; map them in `models.references.inputs`"
        )
    arrays = {}
    for tensor in tensors:
        entry, spec = entries[tensor.name]
        arrays[entry.name] = _fit(tensor, entry, spec, batched=batched)
    counts = [len(array) for array in arrays.values()]
    n_items = counts[0] if counts else 0
    if len(set(counts)) > 1:
        by_name = dict(zip(arrays, counts, strict=True))
        raise _schema(f"the inputs differ in their first dimension: {by_name}")
    if not 1 <= n_items <= MAX_ITEMS:
        raise _schema(f"an exchange must hold 1 to {MAX_ITEMS} items, this one holds {n_items}")
    return arrays


@lru_cache(maxsize=_REMEMBERED)
def _entries(
    wanted: tuple[TensorSpec, ...], mapping: tuple[ReferenceInput, ...]
) -> Mapping[str, tuple[ReferenceInput, TensorSpec]]:
    """Return the entry and the specification of the reference's input for each captured name."""
    specs = {spec.name: spec for spec in wanted}
    return {name: (entry, specs[entry.name]) for name, entry in sources(mapping, specs).items()}


def _source_text(captured: str, entry: ReferenceInput) -> str:
    return captured if captured == entry.name else f"{captured} (as {entry.name})"


def _fit(tensor: Tensor, entry: ReferenceInput, spec: TensorSpec, *, batched: bool) -> Array:
    array = decode(tensor)
    if not _has_shape(array.shape, spec.shape, batched):
        raise _misfit(tensor, spec)
    if array.dtype.kind == "O":
        if spec.dtype != np.dtype(object):
            raise _misfit(tensor, spec)
        array = _text_array(tensor.name, array)
    else:
        numbers = converted(array, entry, spec)
        if numbers is None:
            raise _misfit(tensor, spec, _advice(entry))
        array = numbers
    return array if batched else array[np.newaxis]


@lru_cache(maxsize=_REMEMBERED)
def _has_shape(shape: tuple[int, ...], wanted: tuple[int | None, ...], batched: bool) -> bool:  # noqa: FBT001 - remembered
    # The reference may require a fixed number of items: the replay splits and pads for that.
    expected = (None, *wanted[1:]) if batched and wanted else wanted
    if len(shape) != len(expected) or (batched and not expected):
        return False
    return all(want in {None, have} for have, want in zip(shape, expected, strict=True))


def _misfit(tensor: Tensor, spec: TensorSpec, advice: str = "") -> QuarantineError:
    captured = f"{tensor.datatype}{list(tensor.shape)}"
    return _schema(f"`{tensor.name}`: the exchange has {captured}, the reference takes {spec}{advice}")


def _advice(entry: ReferenceInput) -> str:
    if entry.scale:
        return ", and `scale` in `models.references.inputs` is only for integers"
    if entry.cast:
        return ", and its values do not fit that type"
    return "; set `cast` or `scale` in `models.references.inputs`"


def _text_array(name: str, array: Array) -> Array:
    try:
        texts = [element.decode() for element in array.ravel()]
    except UnicodeDecodeError as error:
        raise _schema(f"`{name}` holds bytes that are not UTF-8 text") from error
    decoded = np.empty(len(texts), dtype=object)
    decoded[:] = texts
    return decoded.reshape(array.shape)


def _shaped(tensor: Tensor, elements: Array) -> Array:
    try:
        return elements.reshape(tensor.shape)
    except (ValueError, OverflowError) as error:  # although the number of elements fits
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
    return QuarantineError(QuarantineReason.SCHEMA, plain(detail, _LONGEST_DETAIL))
