"""Bodies given to a decoder as the recorder gives them, and tensors as arrays."""

import json
from collections.abc import Mapping
from typing import Any

from quantdrift.core.config.schema import Model
from quantdrift.core.records import Loss, Tensor
from quantdrift.sidecar.protocols.decoder import (
    Adapter,
    DecodedRequest,
    DecodedResponse,
    Decoder,
    WireContext,
)
from quantdrift.sidecar.protocols.errors import LostError
from quantdrift.sidecar.protocols.http_message import Head
from quantdrift.testing.protocols import contents

MAX_BYTES = 1_000_000
MAX_VALUES = 100_000
ASKED = DecodedRequest(
    inputs=(Tensor(name="text", datatype="BYTES", shape=(1,), data=bytes(4)),)
)  # where none is given


def ask(
    decoder: Decoder,
    body: Any,
    *,
    headers: Mapping[str, str] | None = None,
    model: Model | None = None,
    adapter: Adapter | None = None,
    max_values: int = MAX_VALUES,
) -> DecodedRequest:
    """Return the request in `body`; what is not bytes is sent as JSON."""
    wire = WireContext(max_bytes=MAX_BYTES, max_values=max_values, model=model, adapter=adapter)
    return decoder.request(Head(start=("POST", "/", ""), headers=headers or {}), _bytes(body), wire)


def answer(
    decoder: Decoder,
    body: Any,
    query: DecodedRequest | None = None,
    *,
    headers: Mapping[str, str] | None = None,
    model: Model | None = None,
    adapter: Adapter | None = None,
    max_values: int = MAX_VALUES,
) -> DecodedResponse:
    """Return the response in `body`; what is not bytes is sent as JSON."""
    wire = WireContext(max_bytes=MAX_BYTES, max_values=max_values, model=model, adapter=adapter)
    head = Head(start=("HTTP/1.1", "200", ""), headers=headers or {})
    return decoder.response(head, _bytes(body), query or ASKED, wire)


def values(tensors: tuple[Tensor, ...]) -> dict[str, Any]:
    """Return tensors by name, as nested lists."""
    return {name: value for name, (_, value) in contents(tensors).items()}


def datatypes(tensors: tuple[Tensor, ...]) -> dict[str, str]:
    """Return the types of tensors by name."""
    return {tensor.name: tensor.datatype for tensor in tensors}


def lost(decode: Any, *given: Any, **more: Any) -> Loss:
    """Return why what is decoded is lost."""
    try:
        decode(*given, **more)
    except LostError as error:
        return error.loss
    raise AssertionError("it was not lost")


def _bytes(body: Any) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()
