"""Checks of datatype, shape and content of a tensor, for every form of the Open Inference Protocol."""

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quantdrift.core.records import Loss
from quantdrift.core.tensors import DTYPES
from quantdrift.sidecar.protocols.errors import LostError

_LENGTH = struct.Struct("<I")
_MAX_RANK = 32
_MAX_SIZE = 2**63 - 1

# BF16 is only sent as bytes.
_ITEM_BYTES: Mapping[str, int] = {"BF16": 2} | {name: dtype.itemsize for name, dtype in DTYPES.items()}


def item_bytes(datatype: str) -> int:
    """Return the bytes of an element, for any datatype but BYTES."""
    return _ITEM_BYTES[datatype]


def check_shape(datatype: str, shape: Sequence[int]) -> None:
    """Raise `decode` if the datatype is unknown or the shape invalid."""
    if datatype not in _ITEM_BYTES and datatype != "BYTES":
        raise LostError(Loss.DECODE, "the datatype of a tensor is unknown")
    if len(shape) > _MAX_RANK or any(not 0 <= size <= _MAX_SIZE for size in shape):
        raise LostError(Loss.DECODE, "the shape of a tensor is invalid")


def check_content(datatype: str, shape: Sequence[int], data: bytes) -> None:
    """Raise `decode` if binary content does not fill a shape; datatype and shape must have been checked."""
    n_items = math.prod(shape)
    if datatype != "BYTES":
        if len(data) != n_items * _ITEM_BYTES[datatype]:
            raise LostError(Loss.DECODE, "a tensor's bytes do not fill its shape")
        return
    position = n_found = 0
    while position + _LENGTH.size <= len(data):
        position += _LENGTH.size + _LENGTH.unpack_from(data, position)[0]
        n_found += 1
    if position != len(data) or n_found != n_items:
        raise LostError(Loss.DECODE, "a tensor's strings do not fill its shape")


def pack_strings(strings: Iterable[bytes]) -> bytes:
    """Return strings as the content of a tensor of BYTES, each preceded by its length."""
    data = bytearray()
    for string in strings:
        data += _LENGTH.pack(len(string))
        data += string
    return bytes(data)


def unpack_strings(data: bytes) -> list[bytes]:
    """Return the strings in the content of a tensor of BYTES, which must have been checked."""
    strings, position = list[bytes](), 0
    while position < len(data):
        begin = position + _LENGTH.size
        position = begin + _LENGTH.unpack_from(data, position)[0]
        strings.append(data[begin:position])
    return strings


def refuse_sequence(parameters: Mapping[str, Any]) -> None:
    """Raise `sequence` if a request is a step of a stateful sequence, which cannot be replayed alone."""
    if parameters.get("sequence_id"):  # 0 and the empty string stand for none
        raise LostError(Loss.SEQUENCE, "it belongs to a sequence")


def refuse_shared_memory(parameters: Iterable[str] | None) -> None:
    """Raise `shared_memory` if the parameters of a tensor say that its content is not in the message."""
    if parameters and "shared_memory_region" in parameters:
        raise LostError(Loss.SHARED_MEMORY, "a tensor is in shared memory")
