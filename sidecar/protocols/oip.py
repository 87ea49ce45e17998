"""Open Inference Protocol v2, REST: requests and responses to tensors.

JSON with flat or nested data, and the binary tensor extension: the JSON object, then the tensors' bytes in JSON
order, where `Inference-Header-Content-Length` is the JSON part's length. Both may be mixed in one message.
"""

import json
import math
import struct
from collections.abc import Mapping
from itertools import chain
from typing import Any, TypeVar

import msgspec
import numpy as np

from quantdrift.core.datatype import DTYPES
from quantdrift.core.records import Loss, Tensor
from sidecar.protocols.decoder import Query, Reply, Wire
from sidecar.protocols.lost import LostError
from sidecar.protocols.message import Head

_JSON_LENGTH = "inference-header-content-length"

_LENGTH = struct.Struct("<I")
_T = TypeVar("_T")
_MAX_RANK = 32
_MAX_SIZE = 2**63 - 1

# BF16 comes only as bytes.
_ITEM_BYTES: Mapping[str, int] = {"BF16": 2} | {name: dtype.itemsize for name, dtype in DTYPES.items()}
# What JSON may hold for each kind of type. A server whose JSON knows no NaN writes null.
_JSON_TYPES: Mapping[str, frozenset[type]] = {
    "b": frozenset({bool}),
    "u": frozenset({int}),
    "i": frozenset({int}),
    "f": frozenset({int, float, type(None)}),
}


class _WireTensor(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] | None = None
    data: Any = None


class _WireOutput(msgspec.Struct):
    parameters: dict[str, Any] | None = None


class _WireRequest(msgspec.Struct):
    inputs: list[_WireTensor]
    outputs: list[_WireOutput] | None = None
    parameters: dict[str, Any] | None = None


class _WireResponse(msgspec.Struct):
    outputs: list[_WireTensor]
    model_version: str | int | None = None


class OipRest:
    """Decoder of requests `POST /v2/models/NAME/infer` and their responses."""

    def request(self, head: Head, body: bytes, wire: Wire) -> Query:
        """Return the request.

        Raises
        ------
        LostError
            `decode`: not what the protocol says. `shared_memory`: a tensor did not travel. `sequence`: one step of a
            stateful sequence cannot be replayed alone. `too_large`: more values than may be held.
        """
        part, tail = _split(head, body)
        document = read_document(part, wire.max_values)
        asked = _convert(document, _WireRequest)
        parameters = asked.parameters or {}
        refuse_sequence(parameters)
        for output in asked.outputs or ():
            refuse_shared_memory(output.parameters)
        return Query(document=document, parameters=parameters, inputs=_tensors(asked.inputs, tail))

    def response(self, head: Head, body: bytes, query: Query, wire: Wire) -> Reply:
        """Return the response; errors as for a request."""
        part, tail = _split(head, body)
        answer = _convert(read_document(part, wire.max_values), _WireResponse)
        version = "" if answer.model_version is None else str(answer.model_version)
        return Reply(version=version, outputs=_tensors(answer.outputs, tail))


def refuse_sequence(parameters: Mapping[str, Any]) -> None:
    """Raise where a request is a step of a stateful sequence: it cannot be replayed alone."""
    if parameters.get("sequence_id"):  # 0 and the empty string stand for none
        raise LostError(Loss.SEQUENCE, "it belongs to a sequence")


def refuse_shared_memory(parameters: Mapping[str, Any] | None) -> None:
    """Raise where a tensor's parameters say that it did not travel."""
    if parameters and "shared_memory_region" in parameters:
        raise LostError(Loss.SHARED_MEMORY, "a tensor is in shared memory")


def _split(head: Head, body: bytes) -> tuple[bytes, memoryview]:
    json_length = head.headers.get(_JSON_LENGTH)
    if json_length is None:
        return body, memoryview(b"")
    length = int(json_length) if json_length.isdecimal() and len(json_length) < 12 else -1
    if length == 0:
        raise LostError(Loss.DECODE, "a raw request: its tensor's type and shape did not travel")
    if not 0 < length <= len(body):
        raise LostError(Loss.DECODE, f"{_JSON_LENGTH} does not fit the body")
    return body[:length], memoryview(body)[length:]


def read_document(part: bytes, max_values: int) -> dict[str, Any]:
    """Return the JSON object in `part`, which holds at most `max_values` values.

    Raises
    ------
    LostError
        `decode`: it is none. `too_large`: it holds more.
    """
    if part.count(b",") + part.count(b"[") + part.count(b"{") > max_values:
        raise LostError(Loss.TOO_LARGE, f"the JSON part holds more than {max_values} values")
    try:
        document = msgspec.json.decode(part)
    except (msgspec.DecodeError, UnicodeDecodeError):
        document = _lenient(part)
    except RecursionError as error:
        raise LostError(Loss.DECODE, "the JSON part is nested too deeply") from error
    if not isinstance(document, dict):
        raise LostError(Loss.DECODE, "the JSON part is no object")
    return document


def _lenient(part: bytes) -> Any:
    """Read what is no strict JSON but is written by servers: NaN and Infinity, which a broken model answers."""
    try:
        return json.loads(part)
    except (ValueError, RecursionError) as error:
        raise LostError(Loss.DECODE, "the JSON part is unreadable") from error


def _convert(document: dict[str, Any], kind: type[_T]) -> _T:
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise LostError(Loss.DECODE, str(error)) from error


def _tensors(wires: list[_WireTensor], tail: memoryview) -> tuple[Tensor, ...]:
    for wire in wires:
        refuse_shared_memory(wire.parameters)
    tensors: list[Tensor] = []
    position = 0
    for wire in wires:
        _check_shape(wire)
        size = (wire.parameters or {}).get("binary_data_size")
        if size is None:
            data = _from_json(wire)
        elif type(size) is not int or size < 0 or wire.data is not None:
            raise LostError(Loss.DECODE, "a tensor's binary_data_size is wrong")
        else:
            data = bytes(tail[position : position + size])
            position += size
            _check_binary(wire, size, data)
        tensors.append(Tensor(name=wire.name, datatype=wire.datatype, shape=tuple(wire.shape), data=data))
    if position != len(tail):
        raise LostError(Loss.DECODE, f"{len(tail) - position} bytes belong to no tensor")
    return tuple(tensors)


def _check_shape(wire: _WireTensor) -> None:
    if wire.datatype not in _ITEM_BYTES and wire.datatype != "BYTES":
        raise LostError(Loss.DECODE, "a tensor's datatype is not known")
    if len(wire.shape) > _MAX_RANK or any(not 0 <= size <= _MAX_SIZE for size in wire.shape):
        raise LostError(Loss.DECODE, "a tensor's shape is none")


def _check_binary(wire: _WireTensor, size: int, data: bytes) -> None:
    n_items = math.prod(wire.shape)
    if len(data) != size:
        raise LostError(Loss.DECODE, "the body ends within a tensor")
    if wire.datatype != "BYTES":
        if size != n_items * _ITEM_BYTES[wire.datatype]:
            raise LostError(Loss.DECODE, "a tensor's bytes do not fill its shape")
        return
    position = n_found = 0
    while position + _LENGTH.size <= size:
        position += _LENGTH.size + _LENGTH.unpack_from(data, position)[0]
        n_found += 1
    if position != size or n_found != n_items:
        raise LostError(Loss.DECODE, "a tensor's strings do not fill its shape")


def _from_json(wire: _WireTensor) -> bytes:
    flat = _flatten(wire.data, wire.shape)
    try:
        if wire.datatype == "BYTES":
            return _strings(flat)
        dtype = DTYPES.get(wire.datatype)
        if dtype is None:
            raise LostError(Loss.DECODE, f"{wire.datatype} does not come as JSON")
        if not _JSON_TYPES[dtype.kind].issuperset(map(type, flat)):
            raise LostError(Loss.DECODE, f"a tensor's data is not {wire.datatype}")
        with np.errstate(over="ignore"):  # the server saw an infinity there, too
            return np.array(flat, dtype=dtype).tobytes()
    except (OverflowError, UnicodeEncodeError) as error:
        raise LostError(Loss.DECODE, f"a tensor's data is not {wire.datatype}") from error


def _strings(flat: list[Any]) -> bytes:
    data = bytearray()
    for text in flat:
        if not isinstance(text, str):
            raise LostError(Loss.DECODE, "a tensor's data is not BYTES")
        raw = text.encode()
        data += _LENGTH.pack(len(raw))
        data += raw
    return bytes(data)


def _flatten(data: Any, shape: list[int]) -> list[Any]:
    """Return row-major elements of `data`, flat or nested exactly as `shape` says."""
    if not isinstance(data, list):
        raise LostError(Loss.DECODE, "a tensor has no data")
    flat = data
    if data and isinstance(data[0], list):
        if not shape or len(data) != shape[0]:
            raise LostError(Loss.DECODE, "a tensor's data does not fill its shape")
        for size in shape[1:]:
            if any(not isinstance(row, list) or len(row) != size for row in flat):
                raise LostError(Loss.DECODE, "a tensor's data does not fill its shape")
            flat = list(chain.from_iterable(flat))
    if len(flat) != math.prod(shape):
        raise LostError(Loss.DECODE, "a tensor's data does not fill its shape")
    return flat
