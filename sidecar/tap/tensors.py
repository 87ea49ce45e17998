"""Encoding of the values of a Python server as Open Inference tensors: arrays, tensors, text and numbers."""

import struct
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from quantdrift.core.errors import QuantdriftError

_LENGTH = struct.Struct("<I")
_DATATYPES = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
    "bfloat16": "BF16",
}


class TensorError(QuantdriftError):
    """A value cannot be encoded as a tensor."""


class TensorMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of the binary tensor extension.

    Parameters
    ----------
    document
        The JSON part.
    buffers
        The bytes of the tensors, in the order of the document. They are copies, so the caller may change its
        values.
    """

    document: bytes
    buffers: list[bytes]


def encode_tensors(kind: str, values: Mapping[str, Any], members: Mapping[str, Any]) -> TensorMessage:
    """Return the message with `values` as tensors.

    Parameters
    ----------
    kind
        `inputs` or `outputs`.
    values
        By name: numpy arrays, CPU tensors of torch, text, bytes, numbers, or lists of these.
    members
        Further members of the document.

    Raises
    ------
    TensorError
        A value is of another kind, or is on a device, because fetching it would delay the caller.
    """
    tensors: list[dict[str, Any]] = []
    buffers = []
    for name, value in values.items():
        datatype, shape, data = _read(value)
        parameters = {"binary_data_size": len(data)}
        tensors.append({"name": name, "shape": shape, "datatype": datatype, "parameters": parameters})
        buffers.append(data)
    return TensorMessage(document=msgspec.json.encode({**members, kind: tensors}), buffers=buffers)


def _read(value: Any) -> tuple[str, list[int], bytes]:
    if isinstance(value, str | bytes):
        value = [value]
    if hasattr(value, "detach"):
        return _from_torch(value)
    if isinstance(value, list | tuple) and value and all(isinstance(item, str | bytes) for item in value):
        return "BYTES", [len(value)], _pack_strings(value)
    import numpy as np  # noqa: PLC0415 - a server without arrays need not load it

    array = np.asarray(value)
    if array.dtype.kind in "OSU":
        flat = array.ravel().tolist()
        if not all(isinstance(item, str | bytes) for item in flat):
            raise TensorError("an array of objects that are not text")
        return "BYTES", list(array.shape), _pack_strings(flat)
    datatype = _DATATYPES.get(array.dtype.name)
    if datatype is None:
        raise TensorError(f"no Open Inference datatype for {array.dtype.name}")
    if array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and sys.byteorder == "big"):
        array = array.astype(array.dtype.newbyteorder("<"))
    return datatype, list(array.shape), array.tobytes()


def _from_torch(value: Any) -> tuple[str, list[int], bytes]:
    if value.device.type != "cpu":
        raise TensorError("a tensor on a device: pass a copy on the host, `tensor.cpu()`")
    name = str(value.dtype).removeprefix("torch.")
    datatype = _DATATYPES.get(name)
    if datatype is None:
        raise TensorError(f"no Open Inference datatype for {name}")
    host = value.detach()
    if datatype == "BF16":
        host = host.view(sys.modules["torch"].int16)  # numpy has no such type; only the bits are needed
    return datatype, list(value.shape), host.numpy().tobytes()


def _pack_strings(values: Any) -> bytes:
    data = bytearray()
    for item in values:
        raw = item.encode() if isinstance(item, str) else item
        data += _LENGTH.pack(len(raw))
        data += raw
    return bytes(data)
