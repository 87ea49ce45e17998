"""What the relay's benchmark sends and gets: Open Inference requests and responses that decode."""

import struct
from enum import StrEnum
from pathlib import Path

import msgspec
import numpy as np

JSON_LENGTH = "inference-header-content-length"
SCANNER = "x-scanner"  # the header of the benchmark's stratum
_N_CLASSES = 10
# A pixel takes four bytes of JSON as well as of binary, so that both bodies hold the same tensor.
_SHAPES = {"small": (1, 730), "large": (1, 3, 224, 224)}

_MOST_REQUESTS = 4096  # made beforehand
_MADE_BYTES = 40_000_000
_SCRIPT = """\
local requests, n = {{}}, 0

function init(arguments)
  local file = io.open({body}, "rb")
  wrk.method, wrk.body = "POST", file:read("*a")
  file:close()
{headers}
  for i = 1, {n} do
    wrk.headers["traceparent"] = string.format("00-0af7651916cd43dd8448eb211c80319c-%016x-01", i)
    requests[i] = wrk.format()
  end
end

function request()
  n = n % #requests + 1
  return requests[n]
end
"""


class Size(StrEnum):
    """Length of a request's body."""

    SMALL = "small"  # 3 kB
    LARGE = "large"  # 600 kB


class Wire(StrEnum):
    """How tensors travel. It is the served model's name, too, so that a path tells the answer."""

    JSON = "json"
    BINARY = "binary"
    GRPC = "grpc"


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """One request or response.

    Parameters
    ----------
    headers
        Those that belong to the body.
    body
        Bytes on the wire; of gRPC one message with its five bytes of prefix.
    """

    headers: dict[str, str]
    body: bytes


def path(wire: Wire) -> str:
    """Return the path of an inference request."""
    if wire is Wire.GRPC:
        return "/inference.GRPCInferenceService/ModelInfer"
    return f"/v2/models/{wire}/infer"


def request(size: Size, wire: Wire) -> Payload:
    """Return a request with an image of one decimal per pixel, the same at each call."""
    shape = _SHAPES[size]
    pixels = np.random.default_rng(1).integers(0, 10, shape) / 10
    own = {SCANNER: "mobile", "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    made = _message("inputs", "image", pixels.astype(np.float32), wire)
    return Payload(headers=own | made.headers, body=made.body)


def response(wire: Wire) -> Payload:
    """Return an answer with ten logits."""
    logits = np.linspace(-1.0, 1.25, _N_CLASSES, dtype=np.float32).reshape(1, _N_CLASSES)
    return _message("outputs", "logits", logits, wire)


def write_script(payload: Payload, directory: Path, stem: str) -> Path:
    """Write what wrk reads (Lua, and the body beside it) and return the script's path.

    Every request has a `traceparent` of its own, as in a traced fleet: no head comes twice for a long while.
    """
    body = directory / f"{stem}.body"
    body.write_bytes(payload.body)
    script = directory / f"{stem}.lua"
    headers = "\n".join(
        f"  wrk.headers[{_text(name)}] = {_text(value)}" for name, value in payload.headers.items()
    )
    n_requests = min(_MOST_REQUESTS, _MADE_BYTES // len(payload.body))
    script.write_text(_SCRIPT.format(body=_text(str(body)), headers=headers, n=n_requests), encoding="utf-8")
    return script


def _text(value: str) -> str:
    return msgspec.json.encode(value).decode()


def _message(role: str, name: str, tensor: np.ndarray, wire: Wire) -> Payload:
    if wire is Wire.GRPC:
        return _grpc(role, name, tensor)
    entry: dict[str, object] = {"name": name, "shape": list(tensor.shape), "datatype": "FP32"}
    document: dict[str, object] = {role: [entry]}
    if role == "outputs":
        document |= {"model_name": str(wire), "model_version": "1"}
    if wire is Wire.JSON:
        # float32's 0.1 is a longer number as float64, which is what JSON writers see
        entry["data"] = [round(float(value), 2) for value in tensor.flat]
        return Payload(headers={"content-type": "application/json"}, body=msgspec.json.encode(document))
    entry["parameters"] = {"binary_data_size": tensor.nbytes}
    part = msgspec.json.encode(document)
    return Payload(
        headers={"content-type": "application/octet-stream", JSON_LENGTH: str(len(part))},
        body=part + tensor.tobytes(),
    )


def _grpc(role: str, name: str, tensor: np.ndarray) -> Payload:
    """Return a `ModelInferRequest` or `ModelInferResponse` with raw contents, in Protocol Buffers' wire form."""
    shape = b"".join(_varint(size) for size in tensor.shape)
    entry = _field(1, name.encode()) + _field(2, b"FP32") + _field(3, shape)
    if role == "inputs":
        message = _field(1, Wire.GRPC.encode()) + _field(5, entry) + _field(7, tensor.tobytes())
    else:
        message = _field(1, Wire.GRPC.encode()) + _field(2, b"1")
        message += _field(5, entry) + _field(6, tensor.tobytes())
    headers = {"content-type": "application/grpc", "te": "trailers"}
    return Payload(headers=headers, body=struct.pack("!BI", 0, len(message)) + message)


def _field(number: int, content: bytes) -> bytes:
    """Return a length-delimited field."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
