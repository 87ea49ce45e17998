"""What the KServe logger sends: CloudEvents in binary mode, one for a request and one for its response.

Their path, the response's headers and the request's are gone: what protocol it is must be told by the body, and the
end of the JSON part of a body with binary tensors be found.
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
# A string, or what opens or closes something. Nothing is built, and no part can backtrack: anybody may send an event.
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|[{}\[\]]', re.DOTALL)
_MOST_TOKENS = 200_000  # of the JSON part before binary tensors
METADATA_BYTES = 64 * 1024


class EventError(QuantdriftError):
    """An event that nothing can be made of."""


class Half(StrEnum):
    """Which half of an exchange an event tells of."""

    REQUEST = "request"
    RESPONSE = "response"


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """What the headers of one event tell.

    Parameters
    ----------
    half
        Request or response.
    key
        Namespace, service, component and id: the client may have chosen the id, so it may come again.
    service
        The InferenceService: what the model is called.
    headers
        Of the client's request, as far as the logger was told to send them; and its trace context.
    """

    half: Half
    key: tuple[str, ...]
    service: str
    headers: Mapping[str, str]


class _Shape(msgspec.Struct, frozen=True):
    """The members of a JSON document that tell protocols apart; their values are skipped, not built."""

    instances: msgspec.Raw = msgspec.Raw()
    inputs: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


_SHAPE = msgspec.json.Decoder(_Shape)
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # the last: nested too deep


def read_event(headers: Mapping[str, str]) -> Event | None:
    """Return what an event tells of itself, or None where it is none of inference: outliers and drift have their own.

    Parameters
    ----------
    headers
        Of the HTTP request that carries it; looked up without regard to case.

    Raises
    ------
    EventError
        It names no id or no service.
    """
    kind = headers.get("Ce-Type", "")
    if kind not in (_PREFIX + Half.REQUEST, _PREFIX + Half.RESPONSE):
        return None
    service, identifier = unquote(headers.get("Ce-Inferenceservicename", "")), headers.get("Ce-Id", "")
    if not service or not identifier:
        raise EventError("an event needs ce-id and ce-inferenceservicename")
    asked = _metadata(headers.get("Ce-Metadata", ""))
    for name in ("traceparent", "content-type"):
        if name in headers:
            asked.setdefault(name, headers[name])
    return Event(
        half=Half(kind.removeprefix(_PREFIX)),
        key=(headers.get("Ce-Namespace", ""), service, headers.get("Ce-Component", ""), identifier),
        service=service,
        headers=asked,
    )


def target_of(event: Event, body: bytes) -> str:
    """Return the path that a request must have had.

    Parameters
    ----------
    event
        Of the request.
    body
        Its content.

    Raises
    ------
    EventError
        It is in no known protocol.
    """
    if event.headers.get("content-type", "").startswith("application/grpc"):
        return "/inference.GRPCInferenceService/ModelInfer"
    end = json_end(body)
    try:
        shape = _SHAPE.decode(body[:end])
    except _UNREADABLE as error:
        raise EventError("the request is no JSON object") from error
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
    raise EventError("the request is in no protocol that is known")


def with_json_length(headers: Mapping[str, str], body: bytes) -> dict[str, str]:
    """Return `headers` with the length of the JSON part, where tensors follow it: that header was not forwarded.

    Raises
    ------
    EventError
        What follows the JSON part is not as long as its tensors say.
    """
    told = {name: value for name, value in headers.items() if name != _JSON_LENGTH}
    if headers.get("content-type", "").startswith("application/grpc"):
        return told
    end = json_end(body)
    if end >= len(body.rstrip()):
        return told
    try:
        document = msgspec.json.decode(body[:end])
    except _UNREADABLE as error:
        raise EventError("the JSON part is unreadable") from error
    if _tensor_bytes(document) != len(body) - end:
        raise EventError("what follows the JSON part is not what its tensors say")
    return told | {_JSON_LENGTH: str(end)}


def json_end(body: bytes) -> int:
    """Return where the JSON document at the beginning of `body` ends; 0 where there is none.

    Where something follows it, it must be an object, and only its strings and brackets are looked at.
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
    for token in itertools.islice(_TOKEN.finditer(body), _MOST_TOKENS):
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
    """Return the request's headers: JSON of names to a value, or to a list of them. Anything else tells nothing."""
    if not text or len(text) > METADATA_BYTES:
        return {}
    told: Any = None
    for form in (text, unquote(text)):  # the binding has quotes percent-encoded; not every logger does so
        try:
            told = msgspec.json.decode(form)
            break
        except _UNREADABLE:
            continue
    found: dict[str, str] = {}
    for name, value in told.items() if isinstance(told, dict) else ():
        values = value if isinstance(value, list) else [value]
        if all(isinstance(one, str) for one in values):
            found[name.lower()] = ", ".join(values)
    return found
