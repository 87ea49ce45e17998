"""Decoder of the Open Inference Protocol v2 over gRPC: `ModelInfer` and `ModelStreamInfer`.

Tensors are typed (`contents`) or bytes (`raw_*_contents`, in the order of the tensors), never both. A sampled
stream is one exchange: its requests are concatenated along their first dimension, like a batch. Where that is impossible, as for token ids of
texts of different lengths, each request with its response is an exchange. Requests to a model with `task = "generation"` are recorded as
completions; a decoupled model answers each with several responses, whose texts are joined.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from google.protobuf.message import DecodeError, Message

from quantdrift.core import open_inference_pb2 as wire_format
from quantdrift.core.records import Loss, Tensor
from quantdrift.core.tasks import Task
from quantdrift.core.tensors import DTYPES
from quantdrift.sidecar.protocols.chats.generate import (
    TextRequest,
    request_of_tensors,
    response_of_tensors,
)
from quantdrift.sidecar.protocols.content import (
    check_content,
    check_shape,
    pack_strings,
    refuse_sequence,
    refuse_shared_memory,
)
from quantdrift.sidecar.protocols.decoder import DecodedRequest, DecodedResponse, Pair, WireContext
from quantdrift.sidecar.protocols.errors import LostError
from quantdrift.sidecar.protocols.http_message import Head, expand

_M = TypeVar("_M", bound=Message)


_PREFIX = struct.Struct("!?I")  # whether it is compressed, and its length
# A field of two bytes on the wire takes up to 50 bytes in memory, so the length of a message is not a bound.
_MAX_FIELDS = 50_000
_MAX_VARINT_BYTES = 10

Nested = Mapping[int, "Nested"]
"""The fields that are messages themselves, by number, each with its own nested fields."""


def read_messages(head: Head, body: bytes, max_bytes: int) -> list[bytes]:
    """Return the messages in a body, decompressed.

    Parameters
    ----------
    head
        Its `grpc-encoding` is the compression of messages that are marked as compressed.
    body
        The content of the DATA frames.
    max_bytes
        Most bytes of all messages together.

    Raises
    ------
    LostError
        `decode`: the messages are malformed. `too_large`: above the limit.
    """
    messages: list[bytes] = []
    position, bytes_left = 0, max_bytes
    while position < len(body):
        stop = position + _PREFIX.size
        if stop > len(body):
            raise LostError(Loss.DECODE, "a message's prefix is cut short")
        compressed, n_bytes = _PREFIX.unpack_from(body, position)
        message = body[stop : stop + n_bytes]
        position = stop + n_bytes
        if len(message) != n_bytes:
            raise LostError(Loss.DECODE, "a message is cut short")
        if compressed:
            message = expand(head.headers.get("grpc-encoding", "identity"), message, bytes_left)
        bytes_left -= len(message)
        if bytes_left < 0:
            raise LostError(Loss.TOO_LARGE, f"messages of more than {max_bytes} bytes")
        messages.append(message)
        if len(messages) > _MAX_FIELDS:
            raise LostError(Loss.TOO_LARGE, f"more than {_MAX_FIELDS} messages")
    return messages


def check_fields(messages: list[bytes], nested: Nested) -> None:
    """Raise `too_large` if messages have too many fields, or `decode` if they are malformed.

    Parameters
    ----------
    messages
        Serialised.
    nested
        The fields whose messages are counted, too.
    """
    fields_left = _MAX_FIELDS
    for message in messages:
        try:
            fields_left = _count(message, 0, len(message), nested, fields_left)
        except IndexError as error:
            raise LostError(Loss.DECODE, "a message is cut short") from error


def _count(data: bytes, position: int, stop: int, nested: Nested, left: int) -> int:
    """Return the number of fields still allowed, of `left`, after those of `data[position:stop]`."""
    while position < stop:
        left -= 1
        if left < 0:
            raise LostError(Loss.TOO_LARGE, f"more than {_MAX_FIELDS} fields")
        tag, position = _varint(data, position)
        kind = tag & 7
        if kind == 0:
            _, position = _varint(data, position)
        elif kind == 2:
            n_bytes, position = _varint(data, position)
            inner = nested.get(tag >> 3)
            if inner is not None:
                left = _count(data, position, min(position + n_bytes, stop), inner, left)
            position += n_bytes
        elif kind in (1, 5):
            position += 8 if kind == 1 else 4
        else:
            raise LostError(Loss.DECODE, "a message has a malformed field")
    return left


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for n in range(_MAX_VARINT_BYTES):
        byte = data[position + n]
        value |= (byte & 0x7F) << (7 * n)
        if byte < 0x80:
            return value, position + n + 1
    raise LostError(Loss.DECODE, "a message has a malformed number")


_TENSORS: Nested = {5: {}}
_NESTED: Mapping[type[Message], Nested] = {
    wire_format.InferRequest: {**_TENSORS, 6: {}},
    wire_format.InferResponse: _TENSORS,
    wire_format.StreamResponse: {2: _TENSORS},
}

# Datatypes whose packed field has the same bytes as a raw tensor: the tag of the field.
_PACKED = {"BOOL": 0x0A, "FP32": 0x32, "FP64": 0x3A}
# The field of the other datatypes.
_FIELDS = {
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "BYTES": "bytes_contents",
}


class RequestStream(DecodedRequest, frozen=True, kw_only=True):
    """The requests of a stream, concatenated if they can be; else its inputs are those of the first request.

    Parameters
    ----------
    ids
        The id that the client gave each request, or empty.
    n_rows
        First dimension of the inputs of each request; for a single request it may be 0.
    parts
        The inputs of each request.
    is_joined
        Whether the requests are concatenated.
    texts
        What each request asks for, if the model generates text; else empty.
    """

    ids: tuple[str, ...]
    n_rows: tuple[int, ...]
    parts: tuple[tuple[Tensor, ...], ...]
    is_joined: bool
    texts: tuple[TextRequest, ...] = ()


class _Budget:
    """The bytes and values still allowed in one direction of an exchange."""

    def __init__(self, wire: WireContext) -> None:
        self._n_bytes = wire.max_bytes
        self._n_values = wire.max_values

    def take_values(self, n_values: int) -> None:
        self._n_values -= n_values
        if self._n_values < 0:
            raise LostError(Loss.TOO_LARGE, "too many typed values")

    def take_bytes(self, n_bytes: int) -> None:
        self._n_bytes -= n_bytes
        if self._n_bytes < 0:
            raise LostError(Loss.TOO_LARGE, "too many bytes in tensors")


class OipGrpc:
    """Decoder of `ModelInfer`."""

    def request(self, head: Head, body: bytes, wire: WireContext) -> DecodedRequest:
        """Return the request.

        Raises
        ------
        LostError
            `decode`: it does not follow the protocol. `shared_memory`: a tensor is not in the message.
            `sequence`: one step of a stateful sequence cannot be replayed alone. `too_large`: above a limit.
        """
        (message,) = _parse(wire_format.InferRequest, _one(read_messages(head, body, wire.max_bytes)))
        query = _query(message, _Budget(wire))
        return _text_query(query) if _is_text(query, wire) else query

    def response(self, head: Head, body: bytes, query: DecodedRequest, wire: WireContext) -> DecodedResponse:
        """Return the response; errors as for a request, and `error_status`."""
        refuse_error(head)
        (message,) = _parse(wire_format.InferResponse, _one(read_messages(head, body, wire.max_bytes)))
        reply = _reply(message, _Budget(wire))
        if isinstance(query, TextRequest):
            return response_of_tensors([reply.outputs], query, wire, reply.version)
        return reply


class OipGrpcStream:
    """Decoder of `ModelStreamInfer`, where each request of the stream has one response, or several with the pieces of a text."""

    def request(self, head: Head, body: bytes, wire: WireContext) -> RequestStream:
        """Return the requests.

        Raises
        ------
        LostError
            As for one request; `unpaired`: they differ in their model or parameters.
        """
        stream = _parse(wire_format.InferRequest, read_messages(head, body, wire.max_bytes))
        if not stream:
            raise LostError(Loss.DECODE, "a stream without a request")
        budget = _Budget(wire)
        queries = [_query(message, budget) for message in stream]
        first = queries[0]
        common = first.model, first.version, first.parameters
        if any((item.model, item.version, item.parameters) != common for item in queries):
            raise LostError(Loss.UNPAIRED, "requests of one stream differ in their model or parameters")
        if _is_text(first, wire):
            return _text_stream(queries, [message.id for message in stream])
        n_rows = tuple(_n_rows(item.inputs) for item in queries)
        parts = tuple(item.inputs for item in queries)
        is_joined = len(queries) == 1 or (0 not in n_rows and _fit(parts))
        return RequestStream(
            inputs=_joined(parts) if is_joined else parts[0],
            parts=parts,
            is_joined=is_joined,
            parameters=first.parameters,
            document={
                name: value for name, value in first.document.items() if name != "id" or len(stream) == 1
            },
            model=first.model,
            version=first.version,
            ids=tuple(message.id for message in stream),
            n_rows=n_rows,
        )

    def response(self, head: Head, body: bytes, query: DecodedRequest, wire: WireContext) -> DecodedResponse:
        """Return the responses in the order of their requests, concatenated or in pairs with them; errors as for the requests.

        They are in pairs if requests or responses cannot be concatenated, if a response has not a row for each row of its request, or if the
        model takes one item. If every request has its own id, responses are matched by id, else by order: a server that answers
        each request once keeps the order.
        """
        assert isinstance(query, RequestStream)
        refuse_error(head)
        stream = _parse(wire_format.StreamResponse, read_messages(head, body, wire.max_bytes))
        if any(item.error_message for item in stream):
            raise LostError(Loss.ERROR_STATUS, "a request of the stream failed")
        answers = [item.infer_response for item in stream if not _is_final_marker(item.infer_response)]
        if query.texts:
            return _text_reply(answers, query, wire)
        if len(answers) != len(query.ids):
            raise LostError(Loss.UNPAIRED, f"{len(answers)} responses to {len(query.ids)} requests")
        budget = _Budget(wire)
        replies = [_reply(message, budget) for message in _in_order(answers, query.ids)]
        outputs = [item.outputs for item in replies]
        is_joined = len(replies) == 1 or (
            query.is_joined
            and (wire.model is None or wire.model.batched)
            and all(_n_rows(item) == rows for item, rows in zip(outputs, query.n_rows, strict=True))
            and _fit(outputs)
        )
        versions = {item.version for item in replies}
        if len(versions) > 1:
            raise LostError(Loss.UNPAIRED, "several versions answered one stream")
        if is_joined:
            return DecodedResponse(version=versions.pop(), outputs=_joined(outputs))
        pairs = (Pair(inputs=given, outputs=made) for given, made in zip(query.parts, outputs, strict=True))
        return DecodedResponse(version=versions.pop(), outputs=outputs[0], pairs=tuple(pairs))


def _is_text(query: DecodedRequest, wire: WireContext) -> bool:
    model = wire.models.get(query.model, wire.model)
    return model is not None and model.task is Task.GENERATION


def _text_query(query: DecodedRequest) -> TextRequest:
    asked = request_of_tensors(query.inputs, query.parameters)
    return msgspec.structs.replace(asked, document=query.document, model=query.model, version=query.version)


def _text_stream(queries: Sequence[DecodedRequest], ids: Sequence[str]) -> RequestStream:
    """Return the requests for texts; what is known of all alike is that of the only one."""
    first = queries[0]
    texts = tuple(map(_text_query, queries))
    is_one = len(texts) == 1
    return RequestStream(
        inputs=texts[0].inputs,
        parts=tuple(item.inputs for item in texts),
        is_joined=False,
        parameters=texts[0].parameters if is_one else first.parameters,
        document=first.document if is_one else {},
        text=texts[0].text if is_one else {},
        model=first.model,
        version=first.version,
        ids=tuple(ids),
        n_rows=(1,) * len(texts),
        texts=texts,
    )


def _text_reply(
    answers: Sequence[wire_format.InferResponse], query: RequestStream, wire: WireContext
) -> DecodedResponse:
    """Return the texts of a stream, each joined from the responses to its request."""
    if len(versions := {message.model_version for message in answers}) > 1:
        raise LostError(Loss.UNPAIRED, "several versions answered one stream")
    budget = _Budget(wire)
    replies = [
        response_of_tensors(
            [_reply(message, budget).outputs for message in pieces], asked, wire, "".join(versions)
        )
        for pieces, asked in zip(_by_request(answers, query.ids), query.texts, strict=True)
    ]
    if len(replies) == 1:
        return replies[0]
    pairs = (
        Pair(inputs=asked, outputs=reply.outputs) for asked, reply in zip(query.parts, replies, strict=True)
    )
    return msgspec.structs.replace(replies[0], pairs=tuple(pairs))


def _by_request(
    answers: Sequence[wire_format.InferResponse], ids: Sequence[str]
) -> list[list[wire_format.InferResponse]]:
    """Return the responses to each request, of which each has one at least.

    They are matched by id if each request has its own. Without ids they are those of the only request, or one to each in their order.
    """
    if len(ids) == 1:
        groups = [list(answers)]
    elif len(set(ids)) == len(ids) and "" not in ids:
        by_id: dict[str, list[wire_format.InferResponse]] = {name: [] for name in ids}
        for message in answers:
            if message.id not in by_id:
                raise LostError(Loss.UNPAIRED, "the ids of responses do not match those of requests")
            by_id[message.id].append(message)
        groups = list(by_id.values())
    elif len(answers) == len(ids):
        groups = [[message] for message in answers]
    else:
        raise LostError(
            Loss.UNPAIRED, f"{len(answers)} responses to {len(ids)} requests without ids of their own"
        )
    if not all(groups):
        raise LostError(Loss.UNPAIRED, "a request without a response")
    return groups


def refuse_error(head: Head) -> None:
    """Raise `error_status` if a call failed.

    Over HTTP/2 every response has a status; exchanges from other sources without a status have succeeded.
    """
    status = head.headers.get("grpc-status", "" if head.start[0] == "HTTP/2" else "0")
    if status != "0":
        raise LostError(
            Loss.ERROR_STATUS, f"grpc-status {status}" if status.isdecimal() else "no grpc-status"
        )


def _one(messages: list[bytes]) -> list[bytes]:
    if len(messages) != 1:
        raise LostError(Loss.DECODE, f"{len(messages)} messages instead of one")
    return messages


def _parse(kind: type[_M], messages: list[bytes]) -> list[_M]:
    check_fields(messages, _NESTED[kind])
    try:
        return [kind.FromString(message) for message in messages]
    except DecodeError as error:
        raise LostError(Loss.DECODE, "a message cannot be parsed") from error


def _query(message: wire_format.InferRequest, budget: _Budget) -> DecodedRequest:
    parameters = _values(message.parameters)
    refuse_sequence(parameters)
    for output in message.outputs:
        refuse_shared_memory(output.parameters)
    # The form of the same request in JSON, without its tensors.
    document = {
        "model_name": message.model_name,
        "model_version": message.model_version,
        "id": message.id,
        "parameters": parameters,
        "outputs": [{"name": item.name, "parameters": _values(item.parameters)} for item in message.outputs],
    }
    return DecodedRequest(
        inputs=_tensors(message.inputs, message.raw_input_contents, budget),
        parameters=parameters,
        document={name: value for name, value in document.items() if value},
        model=message.model_name,
        version=message.model_version,
    )


def _reply(message: wire_format.InferResponse, budget: _Budget) -> DecodedResponse:
    outputs = _tensors(message.outputs, message.raw_output_contents, budget)
    return DecodedResponse(version=message.model_version, outputs=outputs)


def _values(parameters: Mapping[str, wire_format.Parameter]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, parameter in parameters.items():
        kind = parameter.WhichOneof("choice")
        if kind is not None:
            values[name] = getattr(parameter, kind)
    return values


def _tensors(
    wires: Sequence[wire_format.Tensor], raw: Sequence[bytes], budget: _Budget
) -> tuple[Tensor, ...]:
    for wire in wires:
        refuse_shared_memory(wire.parameters)
    # MLServer writes an empty message `contents` in addition to the bytes.
    if raw and (len(raw) != len(wires) or any(wire.contents.ByteSize() for wire in wires)):
        raise LostError(Loss.DECODE, "the raw contents do not match the tensors")
    tensors: list[Tensor] = []
    for index, wire in enumerate(wires):
        shape = tuple(wire.shape)
        check_shape(wire.datatype, shape)
        data = raw[index] if raw else _typed(wire, budget)
        budget.take_bytes(len(data))
        check_content(wire.datatype, shape, data)
        tensors.append(Tensor(name=wire.name, datatype=wire.datatype, shape=shape, data=data))
    return tuple(tensors)


def _typed(wire: wire_format.Tensor, budget: _Budget) -> bytes:
    """Return typed content as bytes."""
    contents = wire.contents
    kinds = [field.name for field, _ in contents.ListFields()]
    if not kinds:
        return b""
    if wire.datatype in _PACKED:
        return _packed(wire, contents.SerializeToString(deterministic=True))
    field = _FIELDS.get(wire.datatype)
    if field is None:
        raise LostError(Loss.DECODE, f"{wire.datatype} is only allowed as bytes")
    if kinds != [field]:
        raise LostError(Loss.DECODE, f"a tensor's content is not {wire.datatype}")
    values = getattr(contents, field)
    budget.take_values(len(values))
    if field == "bytes_contents":
        return pack_strings(values)
    dtype = DTYPES[wire.datatype]
    wide = np.fromiter(values, np.uint64 if dtype.kind == "u" else np.int64, len(values))
    narrow = wide.astype(dtype)
    if not np.array_equal(narrow, wide):
        raise LostError(Loss.DECODE, f"a tensor's content is not {wire.datatype}")
    return narrow.tobytes()


def _packed(wire: wire_format.Tensor, serialised: bytes) -> bytes:
    """Return the little-endian bytes of a packed field, which must be the only field."""
    length = position = 0
    for position, byte in enumerate(serialised[1:6], start=1):
        length |= (byte & 0x7F) << (7 * (position - 1))
        if byte < 0x80:
            break
    data = serialised[position + 1 :]
    if serialised[0] != _PACKED[wire.datatype] or length != len(data):
        raise LostError(Loss.DECODE, f"a tensor's content is not {wire.datatype}")
    return data


def _fit(parts: Sequence[tuple[Tensor, ...]]) -> bool:
    """Return whether the tensors of several messages can be concatenated along the first dimension."""
    kinds = {tuple((item.name, item.datatype, item.shape[1:]) for item in tensors) for tensors in parts}
    return len(kinds) == 1 and all(item.shape for tensors in parts for item in tensors)


def _joined(parts: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Return the tensors of several messages that fit, concatenated along the first dimension."""
    if len(parts) == 1:
        return parts[0]
    return tuple(
        msgspec.structs.replace(
            same[0],
            shape=(sum(item.shape[0] for item in same), *same[0].shape[1:]),
            data=b"".join(item.data for item in same),
        )
        for same in zip(*parts, strict=True)
    )


def _n_rows(tensors: tuple[Tensor, ...]) -> int:
    """Return the common first dimension, or 0 if there is none."""
    counts = {item.shape[0] if item.shape else 0 for item in tensors}
    return counts.pop() if len(counts) == 1 else 0


def _is_final_marker(message: wire_format.InferResponse) -> bool:
    """Return whether a response only marks the end, which a client may request from a decoupled model."""
    name = "triton_final_response"
    return not message.outputs and name in message.parameters and message.parameters[name].bool_param


def _in_order(
    answers: list[wire_format.InferResponse], ids: Iterable[str]
) -> list[wire_format.InferResponse]:
    expected = list(ids)
    if len(expected) == 1 or [message.id for message in answers] == expected:
        return answers
    by_id = {message.id: message for message in answers}
    if len(by_id) != len(answers) or by_id.keys() != set(expected):
        raise LostError(Loss.UNPAIRED, "the ids of responses do not match those of requests")
    return [by_id[item] for item in expected]
