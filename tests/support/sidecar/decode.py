"""Bodies given to a decoder as the recorder gives them, and tensors as arrays."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from quantdrift.core.config.schema import Model
from quantdrift.core.records import Loss, Tensor
from quantdrift.core.tensors import DTYPES
from quantdrift.sidecar.protocols.decoder import (
    Adapter,
    DecodedRequest,
    DecodedResponse,
    Decoder,
    WireContext,
)
from quantdrift.sidecar.protocols.errors import LostError
from quantdrift.sidecar.protocols.http_message import Head

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
    return {tensor.name: _values(tensor) for tensor in tensors}


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


def _values(tensor: Tensor) -> Any:
    if tensor.datatype != "BYTES":
        return np.frombuffer(tensor.data, DTYPES[tensor.datatype]).reshape(tensor.shape).tolist()
    texts = np.empty(int(np.prod(tensor.shape)), dtype=object)
    position = 0
    for place in range(len(texts)):
        length = int.from_bytes(tensor.data[position : position + 4], "little")
        position += 4 + length
        texts[place] = tensor.data[position - length : position]
    assert position == len(tensor.data)
    return texts.reshape(tensor.shape).tolist()


def _bytes(body: Any) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()
