"""JSON documents of bounded size, and the conversion of their values to tensors."""

import base64
import binascii
import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeGuard, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from quantdrift.core.config.schema import ModelTensor
from quantdrift.core.records import Loss, Tensor
from quantdrift.core.tensors import DTYPES
from quantdrift.core.text import misfit
from quantdrift.sidecar.protocols.content import check_shape, pack_strings
from quantdrift.sidecar.protocols.cost import check
from quantdrift.sidecar.protocols.errors import LostError

_T = TypeVar("_T")
_MESSAGE_PACK = msgspec.msgpack.Encoder()
_FLOAT = np.dtype([("kind", "u1"), ("value", ">f8")])
_FLOAT_KIND = 0xCB
_ARRAY_HEADS = (1, 3, 5)  # bytes, by the array's length
_MAX_RANK = 32
_BASE64 = "b64"
_SIGNS = np.frombuffer(b"+-", np.uint8)
_FEW_EXTREMES = 1000

# The JSON types for each kind of numpy type. A server whose JSON library has no NaN writes null.
_JSON_TYPES: Mapping[str, frozenset[type]] = {
    "b": frozenset({bool}),
    "u": frozenset({int}),
    "i": frozenset({int}),
    "f": frozenset({int, float, type(None)}),
}


def read_document(part: bytes, max_values: int) -> dict[str, Any]:
    """Return the JSON object in `part`, which may have at most `max_values` values.

    Raises
    ------
    LostError
        `decode`: it is not a JSON object. `too_large`: it has more values.
    """
    document = read_json(part, max_values)
    if not isinstance(document, dict):
        raise LostError(Loss.DECODE, "the JSON part is not an object")
    return document


def read_json(part: bytes, max_values: int) -> Any:
    """Return the JSON value in `part`; errors as for a document."""
    # A value and its separator take at least two bytes, so most documents need not be counted.
    if (len(part) + 1) // 2 > max_values and _most_values(part) > max_values:
        raise LostError(Loss.TOO_LARGE, f"the JSON part holds more than {max_values} values")
    check()
    if _has_extreme_numbers(part):
        return _lenient(part)
    try:
        return msgspec.json.decode(part)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _lenient(part)
    except RecursionError as error:
        raise LostError(Loss.DECODE, "the JSON part is nested too deeply") from error


def _most_values(part: bytes) -> int:
    """Return an upper bound on the values in a document.

    `bytes.count` takes ten times as long where hits are dense.
    """
    codes = np.frombuffer(part, np.uint8)
    return sum(int(np.count_nonzero(codes == code)) for code in b",[{")


def _has_extreme_numbers(part: bytes) -> bool:
    """Return whether many numbers have exponents of three digits.

    msgspec takes 6 to 9 us for a number near the ends of the range of a float, 300 times as long as for others: two
    million of them would take 16 s. The standard library takes 0.2 us for each.
    """
    codes = np.frombuffer(part, np.uint8)
    exponents = np.flatnonzero(codes[: max(len(codes) - 4, 0)] & 0xDF == ord("E"))
    if len(exponents) <= _FEW_EXTREMES:
        return False
    after = exponents + 1
    after += np.isin(codes[after], _SIGNS)
    digits = np.stack([codes[after + position] - ord("0") for position in range(3)])
    return int(np.count_nonzero((digits < 10).all(axis=0))) > _FEW_EXTREMES


def _lenient(part: bytes) -> Any:
    """Parse JSON with NaN and Infinity, which servers write when a model is broken."""
    try:
        return json.loads(part)
    except (ValueError, RecursionError) as error:
        raise LostError(Loss.DECODE, "the JSON part is invalid") from error


def convert(document: Any, kind: type[_T]) -> _T:
    """Convert a document to a record type.

    Raises
    ------
    LostError
        `decode`: it does not fit; the detail says where.
    """
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise LostError(Loss.DECODE, misfit(error)) from error


def write_json(value: Any) -> bytes:
    """Return a decoded JSON value as compact JSON; raise `decode` if it cannot be UTF-8."""
    try:
        return msgspec.json.encode(value)
    except (UnicodeEncodeError, RecursionError) as error:
        raise LostError(Loss.DECODE, "a text cannot be encoded as UTF-8") from error


def pack_values(flat: Sequence[Any], datatype: str) -> bytes:
    """Return JSON values as the content of a tensor.

    Parameters
    ----------
    flat
        Row-major. BYTES takes text, which becomes UTF-8, and bytes.
    datatype
        Datatype of the tensor.

    Raises
    ------
    LostError
        `decode`: a value is not of that type, or the type has no form in JSON.
    """
    check()
    try:
        if datatype == "BYTES":
            return pack_strings(_encoded(flat))
        dtype = DTYPES.get(datatype)
        if dtype is None:
            raise LostError(Loss.DECODE, f"{datatype} has no form in JSON")
        if dtype.kind == "f":
            floats = _floats(flat)
            with contextlib.suppress(msgspec.ValidationError), np.errstate(over="ignore"):
                # Takes half the time of the general case below, and the largest tensors are plain numbers.
                if floats is not None:
                    return floats.astype(dtype).tobytes()
                return np.fromiter(msgspec.convert(flat, list[float]), dtype, len(flat)).tobytes()
        if not _JSON_TYPES[dtype.kind].issuperset(map(type, flat)):
            raise LostError(Loss.DECODE, f"a tensor's data is not {datatype}")
        with np.errstate(over="ignore"):  # the server got an infinity, too
            return np.array(flat, dtype=dtype).tobytes()
    except (OverflowError, UnicodeEncodeError) as error:
        raise LostError(Loss.DECODE, f"a tensor's data is not {datatype}") from error


def _floats(flat: Sequence[Any]) -> npt.NDArray[np.float64] | None:
    """Return the values as an array if all are floats, else None.

    It takes less than half the time of checking each.

    The values are encoded as MessagePack and read by NumPy: a float is a type byte and eight bytes, so all
    values are floats if every ninth byte, from the first value on, is that type byte.
    """
    if not flat or type(flat[0]) is not float:
        return None
    try:
        wire = _MESSAGE_PACK.encode(flat)
    except (OverflowError, RecursionError):  # integers of more than 64 bits, or nested lists
        return None
    n_head = len(wire) - len(flat) * _FLOAT.itemsize
    if n_head not in _ARRAY_HEADS:
        return None
    values = np.frombuffer(wire, _FLOAT, offset=n_head)
    return values["value"] if bool((values["kind"] == _FLOAT_KIND).all()) else None


def text_tensor(name: str, texts: Sequence[str | bytes]) -> Tensor:
    """Return texts as a tensor : BYTES, (texts,); errors as for values."""
    return Tensor(name=name, datatype="BYTES", shape=(len(texts),), data=pack_values(texts, "BYTES"))


def untyped_tensor(name: str, data: Any, configured: ModelTensor | None) -> Tensor:
    """Return a tensor from JSON without datatype and shape; the shape is that of the nested lists.

    Parameters
    ----------
    name
        Name of the tensor.
    data
        A value, or rectangular nested lists of values. `{"b64": ...}` is a value of bytes.
    configured
        The configured tensor. Without it numbers are INT64, or FP64 if one has a fraction or is null; truth
        values are BOOL; texts and bytes are BYTES.

    Raises
    ------
    LostError
        `decode`: the lists are not rectangular, or the values are of several kinds. `metadata`: it is empty
        and its type is not configured.
    """
    shape, flat = _rectangle(data)
    if any(isinstance(value, dict) for value in flat):
        flat = [_unwrapped(value) for value in flat]
    datatype = _datatype(flat) if configured is None else configured.datatype
    check_shape(datatype, shape)
    return Tensor(name=name, datatype=datatype, shape=tuple(shape), data=pack_values(flat, datatype))


def is_bytes(value: Any) -> TypeGuard[dict[str, str]]:
    """Return whether a JSON value stands for bytes: `{"b64": ...}`."""
    return isinstance(value, dict) and len(value) == 1 and isinstance(value.get(_BASE64), str)


def _encoded(flat: Iterable[Any]) -> list[bytes]:
    texts = [text.encode() if isinstance(text, str) else text for text in flat]
    if not all(isinstance(text, bytes) for text in texts):
        raise LostError(Loss.DECODE, "a tensor's data is not BYTES")
    return texts


def _rectangle(data: Any) -> tuple[list[int], list[Any]]:
    shape: list[int] = []
    flat = [data]
    while flat and isinstance(flat[0], list):
        size = len(flat[0])
        if len(shape) == _MAX_RANK or any(not isinstance(row, list) or len(row) != size for row in flat):
            raise LostError(Loss.DECODE, "nested lists are not rectangular: rows differ in length or depth")
        shape.append(size)
        flat = list(chain.from_iterable(flat))
    if any(isinstance(value, list) for value in flat):
        raise LostError(Loss.DECODE, "nested lists are not rectangular: rows differ in length or depth")
    return shape, flat


def _unwrapped(value: Any) -> Any:
    if not is_bytes(value):
        return value
    try:
        return base64.b64decode(value[_BASE64], validate=True)
    except (binascii.Error, ValueError) as error:
        raise LostError(Loss.DECODE, "a value is not base64") from error


def _datatype(flat: Sequence[Any]) -> str:
    kinds = set(map(type, flat))
    if not kinds:
        raise LostError(
            Loss.METADATA,
            "the type of an empty list is unknown: configure it in models.inputs and models.outputs",
        )
    for datatype, types in (("BOOL", {bool}), ("INT64", {int}), ("BYTES", {str, bytes})):
        if kinds <= types:
            return datatype
    if kinds <= _JSON_TYPES["f"] and kinds != {type(None)}:
        return "FP64"
    raise LostError(Loss.DECODE, "the values of a tensor are of several kinds")
