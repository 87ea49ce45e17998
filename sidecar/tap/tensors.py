"""What a Python server has at hand, as Open Inference tensors: arrays, tensors, text and numbers."""

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
    """A value that is no tensor."""


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """One message of the binary tensor extension.

    Parameters
    ----------
    document
        Its JSON part.
    buffers
        The tensors' bytes, in the order of the document. They are copies: the caller may go on writing to its own.
    """

    document: bytes
    buffers: list[bytes]


def write(kind: str, values: Mapping[str, Any], more: Mapping[str, Any]) -> Written:
    """Return the message that tells of `values`.

    Parameters
    ----------
    kind
        `inputs` or `outputs`.
    values
        By name: numpy arrays, CPU tensors of torch, text, bytes, numbers, or lists of these.
    more
        Further members of the document.

    Raises
    ------
    TensorError
        A value is none of these; one on a device is none, since to fetch it would hold the caller up.
    """
    tensors: list[dict[str, Any]] = []
    buffers = []
    for name, value in values.items():
        datatype, shape, data = _read(value)
        parameters = {"binary_data_size": len(data)}
        tensors.append({"name": name, "shape": shape, "datatype": datatype, "parameters": parameters})
        buffers.append(data)
    return Written(document=msgspec.json.encode({**more, kind: tensors}), buffers=buffers)


def _read(value: Any) -> tuple[str, list[int], bytes]:
    if isinstance(value, str | bytes):
        value = [value]
    if hasattr(value, "detach"):
        return _from_torch(value)
    if isinstance(value, list | tuple) and value and all(isinstance(one, str | bytes) for one in value):
        return "BYTES", [len(value)], _packed(value)
    import numpy as np  # noqa: PLC0415 - a server without arrays need not pay for it

    array = np.asarray(value)
    if array.dtype.kind in "OSU":
        flat = array.ravel().tolist()
        if not all(isinstance(one, str | bytes) for one in flat):
            raise TensorError("an array of objects that are no text")
        return "BYTES", list(array.shape), _packed(flat)
    datatype = _DATATYPES.get(array.dtype.name)
    if datatype is None:
        raise TensorError(f"no datatype for {array.dtype.name}")
    if array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and sys.byteorder == "big"):
        array = array.astype(array.dtype.newbyteorder("<"))
    return datatype, list(array.shape), array.tobytes()


def _from_torch(value: Any) -> tuple[str, list[int], bytes]:
    if value.device.type != "cpu":
        raise TensorError("a tensor on a device: hand over its copy on the host")
    name = str(value.dtype).removeprefix("torch.")
    datatype = _DATATYPES.get(name)
    if datatype is None:
        raise TensorError(f"no datatype for {name}")
    host = value.detach()
    if datatype == "BF16":
        host = host.view(sys.modules["torch"].int16)  # numpy has no such type; the bits are what counts
    return datatype, list(value.shape), host.numpy().tobytes()


def _packed(values: Any) -> bytes:
    data = bytearray()
    for one in values:
        raw = one.encode() if isinstance(one, str) else one
        data += _LENGTH.pack(len(raw))
        data += raw
    return bytes(data)
