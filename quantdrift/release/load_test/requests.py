"""Captured exchanges as the requests that clients sent: the body in the protocol that it came in, and the headers that were captured.

What a sidecar does not capture cannot be sent: other headers, the client's choice between JSON and binary tensors (binary is sent), and the version in a path.
Tensors go by the protocol of the endpoint that is driven, HTTP or gRPC, whichever clients used.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final
from urllib.parse import quote, unquote

import msgspec
import numpy as np

from quantdrift.core import open_inference_pb2 as wire
from quantdrift.core.config.schema import Model
from quantdrift.core.errors import OperatorError, QuantdriftError
from quantdrift.core.records import Exchange, Protocol, Tensor
from quantdrift.core.tensors import DTYPES
from quantdrift.core.text import plain
from quantdrift.models.tensors.arrays import Array
from quantdrift.models.tensors.codec import decode, encode
from quantdrift.release.load_test.drive import HttpRequest
from quantdrift.sidecar.protocols.decoder import WireContext
from quantdrift.sidecar.protocols.errors import LostError
from quantdrift.sidecar.protocols.http_message import Head
from quantdrift.sidecar.protocols.oip import OipRest

_HEADER: Final = "header."
_PARAMETER: Final = "parameter."
_JSON_LENGTH: Final = "inference-header-content-length"
_BINARY_ANSWER: Final = "binary_data_output"
_INFER: Final = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")
_METHOD: Final = "/inference.GRPCInferenceService/ModelInfer"
_OF_HTTP: Final = frozenset({"accept", "accept-encoding", "content-type", "user-agent", _JSON_LENGTH})
_METADATA: Final = re.compile(r"(?!grpc-)[0-9a-z_.-]+(?<!-bin)")
_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONNECTION: Final = frozenset(
    {
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""Headers of a connection or of the framing: those of the recorded request are not those of the one that is sent."""
_JSON: Final = {"content-type": "application/json"}
_OIP: Final = frozenset({Protocol.OIP_REST, Protocol.OIP_GRPC, Protocol.OIP_GRPC_STREAM})
_DATATYPES: Final = {dtype: name for name, dtype in DTYPES.items()}


class NotRebuiltError(QuantdriftError):
    """An exchange has not what its request needs; the message is the end of a sentence about it."""


def request_of(exchange: Exchange, slices: tuple[str, ...]) -> HttpRequest:
    """Return the request of an exchange.

    Raises
    ------
    NotRebuiltError
        Its protocol is not one that can be written.
    QuarantineError
        Its tensors do not fit their shapes.
    """
    headers = _captured_headers(exchange.attributes)
    if exchange.protocol in _OIP:
        return _oip(exchange.model, exchange.inputs, exchange.attributes, slices)
    if exchange.protocol == Protocol.KSERVE_V1:
        body = msgspec.json.encode(_rows(exchange.inputs))
        path = f"/v1/models/{quote(exchange.model, safe='')}:predict"
    elif exchange.protocol in (Protocol.OPENAI_CHAT, Protocol.OPENAI_COMPLETIONS):
        body, path = _openai(exchange)
    else:
        raise NotRebuiltError(f"came by {exchange.protocol}, whose requests cannot be written")
    return HttpRequest(method="POST", path=path, headers={**headers, **_JSON}, body=body, slices=slices)


def inference(
    model: str, inputs: Mapping[str, Array], attributes: Mapping[str, str], slices: tuple[str, ...]
) -> HttpRequest:
    """Return a request of the Open Inference Protocol with binary tensors."""
    tensors = [encode(name, _datatype(name, array), array) for name, array in inputs.items()]
    return _oip(model, tensors, attributes, slices)


def completion(line: Mapping[str, Any], model: Model) -> HttpRequest:
    """Return the request of a recorded prompt to an OpenAI-compatible server."""
    kind = "messages" if "messages" in line else "prompt"
    document = {"model": model.name, "max_tokens": model.generation.own_tokens, kind: line[kind]}
    if line.get("tools"):
        document["tools"] = line["tools"]
    path = "/v1/chat/completions" if kind == "messages" else "/v1/completions"
    return HttpRequest(method="POST", path=path, headers=dict(_JSON), body=msgspec.json.encode(document))


def as_grpc(request: HttpRequest) -> HttpRequest:
    """Return a request of the Open Inference Protocol over HTTP as one over gRPC, with raw tensors.

    Raises
    ------
    NotRebuiltError
        It is of another protocol.
    """
    named = _INFER.fullmatch(request.path)
    if named is None:
        raise NotRebuiltError("is none of the Open Inference Protocol, which alone goes over gRPC")
    try:
        decoded = OipRest().request(
            Head(start=("POST", request.path, "HTTP/1.1"), headers=request.headers),
            request.body,
            WireContext(max_bytes=len(request.body), max_values=len(request.body)),
        )
    except LostError as error:
        raise NotRebuiltError(f"does not follow the Open Inference Protocol: {error}") from error
    message = wire.InferRequest(
        model_name=unquote(named[1]),
        model_version=unquote(named[2] or ""),
        id="load",
        parameters={
            name: _parameter(value)
            for name, value in (decoded.parameters or {}).items()
            if name != _BINARY_ANSWER and type(value) in (bool, int, float, str)
        },
        inputs=[
            wire.Tensor(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            for tensor in decoded.inputs
        ],
        raw_input_contents=[tensor.data for tensor in decoded.inputs],
    )
    metadata = {
        name: value
        for name, value in request.headers.items()
        if name not in _OF_HTTP and _METADATA.fullmatch(name) and value.isascii()
    }
    return HttpRequest(
        method="POST",
        path=_METHOD,
        headers=metadata,
        body=message.SerializeToString(),
        slices=request.slices,
    )


def _parameter(value: Any) -> wire.Parameter:
    kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    return wire.Parameter(**{kinds[type(value)]: value})


def headers_of(headers: Iterable[tuple[str, str]], where: str) -> dict[str, str]:
    """Return the headers that are sent, with their names in lower case.

    Raises
    ------
    OperatorError
        A name or a value cannot be sent.
    """
    kept = {}
    for name, value in headers:
        if not _NAME.fullmatch(name) or not value.isprintable():
            raise OperatorError(f"{where}: the header `{plain(name, 80)}` cannot be sent")
        if name.lower() not in _CONNECTION:
            kept[name.lower()] = value
    return kept


def _captured_headers(attributes: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for key, value in attributes.items()
        if key.startswith(_HEADER)
        and (name := key.removeprefix(_HEADER).lower()) not in _CONNECTION
        and _NAME.fullmatch(name)
        and value.isprintable()
    }


def _oip(
    model: str, tensors: Iterable[Tensor], attributes: Mapping[str, str], slices: tuple[str, ...]
) -> HttpRequest:
    tensors = list(tensors)
    document: dict[str, Any] = {
        "id": "load",  # optional, and yet some servers fail without it
        "inputs": [
            {
                "name": tensor.name,
                "datatype": tensor.datatype,
                "shape": tensor.shape,
                "parameters": {"binary_data_size": len(tensor.data)},
            }
            for tensor in tensors
        ],
    }
    parameters: dict[str, Any] = {
        key.removeprefix(_PARAMETER): value for key, value in attributes.items() if key.startswith(_PARAMETER)
    }
    document["parameters"] = {**parameters, _BINARY_ANSWER: True}
    head = msgspec.json.encode(document)
    headers = _captured_headers(attributes) | {
        "content-type": "application/octet-stream",
        _JSON_LENGTH: str(len(head)),
    }
    return HttpRequest(
        method="POST",
        path=f"/v2/models/{quote(model, safe='')}/infer",
        headers=headers,
        body=b"".join([head, *(tensor.data for tensor in tensors)]),
        slices=slices,
    )


def _rows(inputs: Iterable[Tensor]) -> dict[str, Any]:
    """Return the body of KServe v1: one input by rows, several by columns."""
    columns = {tensor.name: _plain(decode(tensor).tolist()) for tensor in inputs}
    return {"instances": next(iter(columns.values()))} if len(columns) == 1 else {"inputs": columns}


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise NotRebuiltError("has bytes that are no text") from error


def _openai(exchange: Exchange) -> tuple[bytes, str]:
    """Return body and path of a chat or a completion."""
    tensors = {tensor.name: tensor for tensor in exchange.inputs}
    if "options" not in tensors:
        raise NotRebuiltError("has no options of the request")
    document: dict[str, Any] = {**_json_in(tensors["options"]), "model": exchange.model}
    if exchange.protocol == Protocol.OPENAI_CHAT:
        document["messages"] = _json_in(tensors["messages"])
        if "tools" in tensors:
            document["tools"] = _json_in(tensors["tools"])
        return msgspec.json.encode(document), "/v1/chat/completions"
    if "prompt" not in tensors:
        raise NotRebuiltError("has its prompt as token ids")
    prompts = _plain(decode(tensors["prompt"]).tolist())
    document["prompt"] = prompts[0] if len(prompts) == 1 else prompts
    return msgspec.json.encode(document), "/v1/completions"


def _json_in(tensor: Tensor) -> Any:
    try:
        return msgspec.json.decode(decode(tensor).tolist()[0])
    except (msgspec.DecodeError, IndexError) as error:
        raise NotRebuiltError(f"has `{plain(tensor.name, 40)}` that is no JSON") from error


def _datatype(name: str, array: Array) -> str:
    if array.dtype.kind in "OSU":
        return "BYTES"
    datatype = _DATATYPES.get(np.dtype(array.dtype).newbyteorder("<"))
    if datatype is None:
        raise OperatorError(
            f"--from: the array `{name}` has the type {array.dtype}, which no request can have"
        )
    return datatype
