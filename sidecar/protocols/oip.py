"""Decoder of the Open Inference Protocol v2 over REST.

JSON with flat or nested data, and the binary tensor extension: the JSON object, then the tensors' bytes in
JSON order, where `Inference-Header-Content-Length` is the JSON part's length. Both may be mixed in one
message. A length of 0 marks a raw request: the whole body is the content of the only input, without name,
type and shape.
"""

import math
from itertools import chain
from typing import Any

import msgspec

from quantdrift.core.config.schema import Model
from quantdrift.core.records import Loss, Tensor
from quantdrift.sidecar.protocols.content import (
    check_content,
    check_shape,
    item_bytes,
    pack_strings,
    refuse_sequence,
    refuse_shared_memory,
)
from quantdrift.sidecar.protocols.decoder import DecodedRequest, DecodedResponse, WireContext
from quantdrift.sidecar.protocols.errors import LostError
from quantdrift.sidecar.protocols.http_message import Head
from quantdrift.sidecar.protocols.json_tensors import convert, pack_values, read_document

_JSON_LENGTH = "inference-header-content-length"


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

    def request(self, head: Head, body: bytes, wire: WireContext) -> DecodedRequest:
        """Return the request.

        Raises
        ------
        LostError
            `decode`: it does not follow the protocol. `shared_memory`: a tensor is not in the message.
            `sequence`: one step of a stateful sequence cannot be replayed alone. `too_large`: too many
            values. `metadata`: a raw request to a model whose input is not configured.
        """
        if head.headers.get(_JSON_LENGTH) == "0":
            return DecodedRequest(inputs=(_raw_input(body, wire.model),))
        part, tail = _split(head, body)
        document = read_document(part, wire.max_values)
        request = convert(document, _WireRequest)
        parameters = request.parameters or {}
        refuse_sequence(parameters)
        for output in request.outputs or ():
            refuse_shared_memory(output.parameters)
        return DecodedRequest(document=document, parameters=parameters, inputs=_tensors(request.inputs, tail))

    def response(self, head: Head, body: bytes, query: DecodedRequest, wire: WireContext) -> DecodedResponse:
        """Return the response; errors as for a request."""
        part, tail = _split(head, body)
        response = convert(read_document(part, wire.max_values), _WireResponse)
        version = "" if response.model_version is None else str(response.model_version)
        return DecodedResponse(version=version, outputs=_tensors(response.outputs, tail))


def _split(head: Head, body: bytes) -> tuple[bytes, memoryview]:
    json_length = head.headers.get(_JSON_LENGTH)
    if json_length is None:
        return body, memoryview(b"")
    length = int(json_length) if json_length.isdecimal() and len(json_length) < 12 else -1
    if not 0 < length <= len(body):
        raise LostError(Loss.DECODE, f"{_JSON_LENGTH} does not fit the body")
    return body[:length], memoryview(body)[length:]


def _raw_input(body: bytes, model: Model | None) -> Tensor:
    """Return the input of a raw request, with name, type and shape from the configuration.

    One variable dimension follows from the length. With two, of which the first counts items, a server that
    makes batches takes the body for one item.
    """
    if model is None or len(model.inputs) != 1 or not model.inputs[0].shape:
        raise LostError(
            Loss.METADATA, "a raw request: give its tensor's name, datatype and shape in models.inputs"
        )
    configured = model.inputs[0]
    shape = list(configured.shape)
    if configured.datatype == "BYTES":  # the body is one string, without its length
        shape, body = [abs(size) for size in shape], pack_strings([body])
    elif shape.count(-1) == 2 and shape[0] == -1 and model.batched:
        shape[0] = 1
    if shape.count(-1) > 1 or (configured.datatype == "BYTES" and math.prod(shape) != 1):
        raise LostError(
            Loss.METADATA, f"a raw request: {list(configured.shape)} in models.inputs leaves its shape open"
        )
    if -1 in shape:
        step_bytes = item_bytes(configured.datatype) * -math.prod(shape)
        shape[shape.index(-1)] = len(body) // step_bytes if step_bytes else 0
    check_content(configured.datatype, shape, body)
    return Tensor(name=configured.name, datatype=configured.datatype, shape=tuple(shape), data=body)


def _tensors(wires: list[_WireTensor], tail: memoryview) -> tuple[Tensor, ...]:
    for wire in wires:
        refuse_shared_memory(wire.parameters)
    tensors: list[Tensor] = []
    position = 0
    for wire in wires:
        check_shape(wire.datatype, wire.shape)
        size = (wire.parameters or {}).get("binary_data_size")
        if size is None:
            data = pack_values(_flatten(wire.data, wire.shape), wire.datatype)
        elif type(size) is not int or size < 0 or wire.data is not None:
            raise LostError(Loss.DECODE, "a tensor has an invalid binary_data_size")
        else:
            data = bytes(tail[position : position + size])
            position += size
            if len(data) != size:
                raise LostError(Loss.DECODE, "the body ends within a tensor")
            check_content(wire.datatype, wire.shape, data)
        tensors.append(Tensor(name=wire.name, datatype=wire.datatype, shape=tuple(wire.shape), data=data))
    if position != len(tail):
        raise LostError(Loss.DECODE, f"{len(tail) - position} bytes belong to no tensor")
    return tuple(tensors)


def _flatten(data: Any, shape: list[int]) -> list[Any]:
    """Return the elements of `data` in row-major order; it is flat, or nested exactly as `shape` says."""
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
