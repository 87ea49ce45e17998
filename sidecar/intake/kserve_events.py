"""Events of the KServe logger: CloudEvents in binary mode, one for a request and one for its response.

They have neither the path nor the original headers. So the protocol must be found from the body, and in a
body with binary tensors the end of the JSON part must be searched for.
"""

import itertools
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any
from urllib.parse import quote, unquote

import msgspec

from quantdrift.core.errors import QuantdriftError

_PREFIX = "org.kubeflow.serving.inference."
_BINARY_TENSOR = "binary_data_size"
_JSON_LENGTH = "inference-header-content-length"
# A string or a bracket. Nothing is built and no part can backtrack, because the sender may be hostile.
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|[{}\[\]]', re.DOTALL)
_MAX_TOKENS = 200_000  # of the JSON part before binary tensors
METADATA_BYTES = 64 * 1024


class EventError(QuantdriftError):
    """An event that cannot be used."""


class Half(StrEnum):
    """The half of an exchange that an event is for."""

    REQUEST = "request"
    RESPONSE = "response"


class KserveEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The headers of one event.

    Parameters
    ----------
    half
        Request or response.
    key
        Namespace, service, component and id. The client may choose the id, so a key is not unique.
    service
        The InferenceService, which is the name of the model.
    headers
        Those of the client's request that the logger is configured to send, and its trace context.
    """

    half: Half
    key: tuple[str, ...]
    service: str
    headers: Mapping[str, str]


class _Shape(msgspec.Struct, frozen=True):
    """The members of a JSON document that distinguish protocols; their values are skipped, not built."""

    instances: msgspec.Raw = msgspec.Raw()
    inputs: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


_SHAPE = msgspec.json.Decoder(_Shape)
_UNREADABLE = (
    msgspec.DecodeError,
    UnicodeDecodeError,
    RecursionError,
)  # the last one for documents that are nested too deeply


def read_event(headers: Mapping[str, str]) -> KserveEvent | None:
    """Return the event, or None if it is not about inference (outlier and drift detectors send others).

    Parameters
    ----------
    headers
        Headers of the HTTP request that carries the event; names are case-insensitive.

    Raises
    ------
    EventError
        It has no id or no service.
    """
    kind = headers.get("Ce-Type", "")
    if kind not in (_PREFIX + Half.REQUEST, _PREFIX + Half.RESPONSE):
        return None
    service, identifier = unquote(headers.get("Ce-Inferenceservicename", "")), headers.get("Ce-Id", "")
    if not service or not identifier:
        raise EventError("an event needs ce-id and ce-inferenceservicename")
    request_headers = _metadata(headers.get("Ce-Metadata", ""))
    for name in ("traceparent", "content-type"):
        if name in headers:
            request_headers.setdefault(name, headers[name])
    return KserveEvent(
        half=Half(kind.removeprefix(_PREFIX)),
        key=(headers.get("Ce-Namespace", ""), service, headers.get("Ce-Component", ""), identifier),
        service=service,
        headers=request_headers,
    )


def target_of(event: KserveEvent, body: bytes) -> str:
    """Return the path that the request must have had.

    Parameters
    ----------
    event
        Event of the request.
    body
        Its content.

    Raises
    ------
    EventError
        The protocol is not known.
    """
    if event.headers.get("content-type", "").startswith("application/grpc"):
        return "/inference.GRPCInferenceService/ModelInfer"
    end = json_end(body)
    try:
        shape = _SHAPE.decode(body[:end])
    except _UNREADABLE as error:
        raise EventError("the request is not a JSON object") from error
    name = quote(event.service, safe="")
    if end < len(body.rstrip()) or b'"datatype"' in bytes(shape.inputs):
        return f"/v2/models/{name}/infer"
    if shape.instances or shape.inputs:
        return f"/v1/models/{name}:predict"
    for member, path in ((shape.messages, "chat/completions"), (shape.prompt, "completions")):
        if member:
            return f"/v1/{path}"
    if shape.input:
        return "/v1/embeddings"
    raise EventError("the request is in no known protocol")


def with_json_length(headers: Mapping[str, str], body: bytes) -> dict[str, str]:
    """Return `headers` with the length of the JSON part if binary tensors follow it.

    The event lacks that header.

    Raises
    ------
    EventError
        The bytes after the JSON part are not as many as its tensors say.
    """
    fields = {name: value for name, value in headers.items() if name != _JSON_LENGTH}
    if headers.get("content-type", "").startswith("application/grpc"):
        return fields
    end = json_end(body)
    if end >= len(body.rstrip()):
        return fields
    try:
        document = msgspec.json.decode(body[:end])
    except _UNREADABLE as error:
        raise EventError("the JSON part is invalid") from error
    if _tensor_bytes(document) != len(body) - end:
        raise EventError("the bytes after the JSON part do not match the sizes of its tensors")
    return fields | {_JSON_LENGTH: str(end)}


def json_end(body: bytes) -> int:
    """Return the end of the JSON document at the beginning of `body`, or 0 if there is none.

    If bytes follow it, it must be an object, and only its strings and brackets are read.
    """
    try:
        _SHAPE.decode(body)
    except _UNREADABLE:
        pass
    else:
        return len(body)
    if body[:1] != b"{":
        return 0
    depth = 0
    for token in itertools.islice(_TOKEN.finditer(body), _MAX_TOKENS):
        first = token[0][:1]
        depth += (first in b"{[") - (first in b"}]")
        if not depth:
            return token.end()
    return 0


def _tensor_bytes(document: Any) -> int:
    sizes = 0
    for member in ("inputs", "outputs"):
        tensors = document.get(member) if isinstance(document, dict) else None
        for tensor in tensors if isinstance(tensors, list) else ():
            parameters = tensor.get("parameters") if isinstance(tensor, dict) else None
            size = parameters.get(_BINARY_TENSOR) if isinstance(parameters, dict) else None
            sizes += size if type(size) is int else 0
    return sizes


def _metadata(text: str) -> dict[str, str]:
    """Return the request's headers from JSON of names to a value or a list of values.

    Anything else is ignored.
    """
    if not text or len(text) > METADATA_BYTES:
        return {}
    fields: Any = None
    for form in (
        text,
        unquote(text),
    ):  # the HTTP binding percent-encodes quotes, but not every logger does so
        try:
            fields = msgspec.json.decode(form)
            break
        except _UNREADABLE:
            continue
    metadata: dict[str, str] = {}
    for name, value in fields.items() if isinstance(fields, dict) else ():
        values = value if isinstance(value, list) else [value]
        if all(isinstance(value, str) for value in values):
            metadata[name.lower()] = ", ".join(values)
    return metadata
