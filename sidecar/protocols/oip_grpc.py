"""Open Inference Protocol v2 over gRPC: `ModelInfer` and `ModelStreamInfer`, requests and responses to tensors.

Tensors come typed (`contents`) or as bytes (`raw_*_contents`, in the tensors' order), never both. A stream that was
taken is one exchange: its requests are put together along their first dimension, as a batch would have been.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from google.protobuf.message import DecodeError, Message

from quantdrift.core import open_inference_pb2 as wire_format
from quantdrift.core.records import Loss, Tensor
from quantdrift.core.tensors import DTYPES
from quantdrift.sidecar.protocols.content import (
    check_content,
    check_shape,
    pack_strings,
    refuse_sequence,
    refuse_shared_memory,
)
from quantdrift.sidecar.protocols.decoder import DecodedRequest, DecodedResponse, WireContext
from quantdrift.sidecar.protocols.errors import LostError
from quantdrift.sidecar.protocols.grpc import Nested, check_fields, read_messages
from quantdrift.sidecar.protocols.http_message import Head

_M = TypeVar("_M", bound=Message)

_TENSORS: Nested = {5: {}}
_NESTED: Mapping[type[Message], Nested] = {
    wire_format.InferRequest: {**_TENSORS, 6: {}},
    wire_format.InferResponse: _TENSORS,
    wire_format.StreamResponse: {2: _TENSORS},
}

# Where typed content is as it would be in bytes: the tag of its field, packed.
_PACKED = {"BOOL": 0x0A, "FP32": 0x32, "FP64": 0x3A}
# Where it is not: the field.
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


class Stream(DecodedRequest, frozen=True, kw_only=True):
    """The requests of a stream, as one.

    Parameters
    ----------
    ids
        What each request was called by its client, or empty.
    n_rows
        First dimension of each one's inputs; nothing is asked of that of a single one, and it may be 0.
    """

    ids: tuple[str, ...]
    n_rows: tuple[int, ...]


class _Room:
    """What may still be held of one direction of an exchange."""

    def __init__(self, wire: WireContext) -> None:
        self._n_bytes = wire.max_bytes
        self._n_values = wire.max_values

    def take_values(self, n_values: int) -> None:
        self._n_values -= n_values
        if self._n_values < 0:
            raise LostError(Loss.TOO_LARGE, "more typed values than may be held")

    def take_bytes(self, n_bytes: int) -> None:
        self._n_bytes -= n_bytes
        if self._n_bytes < 0:
            raise LostError(Loss.TOO_LARGE, "tensors of more bytes than may be held")


class OipGrpc:
    """Decoder of `ModelInfer`."""

    def request(self, head: Head, body: bytes, wire: WireContext) -> DecodedRequest:
        """Return the request.

        Raises
        ------
        LostError
            `decode`: not what the protocol says. `shared_memory`: a tensor did not travel. `sequence`: one step of a
            stateful sequence cannot be replayed alone. `too_large`: more than may be held.
        """
        (asked,) = _parse(wire_format.InferRequest, _one(read_messages(head, body, wire.max_bytes)))
        return _query(asked, _Room(wire))

    def response(self, head: Head, body: bytes, query: DecodedRequest, wire: WireContext) -> DecodedResponse:
        """Return the response; errors as for a request, and `error_status`."""
        refuse_error(head)
        (answer,) = _parse(wire_format.InferResponse, _one(read_messages(head, body, wire.max_bytes)))
        return _reply(answer, _Room(wire))


class OipGrpcStream:
    """Decoder of `ModelStreamInfer`, where each request of the stream has one response."""

    def request(self, head: Head, body: bytes, wire: WireContext) -> Stream:
        """Return the requests, as one.

        Raises
        ------
        LostError
            As for one request; `unpaired`: they cannot be put together.
        """
        stream = _parse(wire_format.InferRequest, read_messages(head, body, wire.max_bytes))
        if not stream:
            raise LostError(Loss.DECODE, "a stream without a request")
        room = _Room(wire)
        queries = [_query(asked, room) for asked in stream]
        first = queries[0]
        told = first.model, first.version, first.parameters
        if any((each.model, each.version, each.parameters) != told for each in queries):
            raise LostError(Loss.UNPAIRED, "requests of one stream differ in their model or parameters")
        n_rows = tuple(_n_rows(each.inputs) for each in queries)
        if len(queries) > 1 and 0 in n_rows:
            raise LostError(Loss.UNPAIRED, "inputs without a common first dimension")
        return Stream(
            inputs=_joined([each.inputs for each in queries]),
            parameters=first.parameters,
            document={
                name: value for name, value in first.document.items() if name != "id" or len(stream) == 1
            },
            model=first.model,
            version=first.version,
            ids=tuple(asked.id for asked in stream),
            n_rows=n_rows,
        )

    def response(self, head: Head, body: bytes, query: DecodedRequest, wire: WireContext) -> DecodedResponse:
        """Return the responses in the order of their requests, as one; errors as for the requests.

        Where every request has an id of its own the ids tell which response is whose, else the order does: a server
        that answers each request once keeps it.
        """
        assert isinstance(query, Stream)
        refuse_error(head)
        stream = _parse(wire_format.StreamResponse, read_messages(head, body, wire.max_bytes))
        if any(each.error_message for each in stream):
            raise LostError(Loss.ERROR_STATUS, "a request of the stream failed")
        answers = [each.infer_response for each in stream if not _is_farewell(each.infer_response)]
        if len(answers) != len(query.ids):
            raise LostError(Loss.UNPAIRED, f"{len(answers)} responses to {len(query.ids)} requests")
        room = _Room(wire)
        replies = [_reply(answer, room) for answer in _in_order(answers, query.ids)]
        if len(replies) > 1:
            if wire.model is not None and not wire.model.batched:
                raise LostError(Loss.UNPAIRED, "a stream of requests to a model that takes one item")
            if any(_n_rows(each.outputs) != rows for each, rows in zip(replies, query.n_rows, strict=True)):
                raise LostError(Loss.UNPAIRED, "outputs without a row for each row of the inputs")
        versions = {each.version for each in replies}
        if len(versions) > 1:
            raise LostError(Loss.UNPAIRED, "several versions answered one stream")
        return DecodedResponse(version=versions.pop(), outputs=_joined([each.outputs for each in replies]))


def refuse_error(head: Head) -> None:
    """Raise where a call failed (`error_status`).

    Over HTTP/2 a status comes with every response; who tells of an exchange in another way tells of what succeeded.
    """
    status = head.headers.get("grpc-status", "" if head.start[0] == "HTTP/2" else "0")
    if status != "0":
        raise LostError(
            Loss.ERROR_STATUS, f"grpc-status {status}" if status.isdecimal() else "no grpc-status"
        )


def _one(messages: list[bytes]) -> list[bytes]:
    if len(messages) != 1:
        raise LostError(Loss.DECODE, f"{len(messages)} messages where one is due")
    return messages


def _parse(kind: type[_M], messages: list[bytes]) -> list[_M]:
    check_fields(messages, _NESTED[kind])
    try:
        return [kind.FromString(message) for message in messages]
    except DecodeError as error:
        raise LostError(Loss.DECODE, "a message is unreadable") from error


def _query(asked: wire_format.InferRequest, room: _Room) -> DecodedRequest:
    parameters = _values(asked.parameters)
    refuse_sequence(parameters)
    for output in asked.outputs:
        refuse_shared_memory(output.parameters)
    # As the same request is in JSON, but for its tensors.
    told = {
        "model_name": asked.model_name,
        "model_version": asked.model_version,
        "id": asked.id,
        "parameters": parameters,
        "outputs": [{"name": each.name, "parameters": _values(each.parameters)} for each in asked.outputs],
    }
    return DecodedRequest(
        inputs=_tensors(asked.inputs, asked.raw_input_contents, room),
        parameters=parameters,
        document={name: value for name, value in told.items() if value},
        model=asked.model_name,
        version=asked.model_version,
    )


def _reply(answer: wire_format.InferResponse, room: _Room) -> DecodedResponse:
    outputs = _tensors(answer.outputs, answer.raw_output_contents, room)
    return DecodedResponse(version=answer.model_version, outputs=outputs)


def _values(parameters: Mapping[str, wire_format.Parameter]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, parameter in parameters.items():
        kind = parameter.WhichOneof("choice")
        if kind is not None:
            found[name] = getattr(parameter, kind)
    return found


def _tensors(wires: Sequence[wire_format.Tensor], raw: Sequence[bytes], room: _Room) -> tuple[Tensor, ...]:
    for wire in wires:
        refuse_shared_memory(wire.parameters)
    # MLServer writes a message `contents` beside the bytes, with nothing in it.
    if raw and (len(raw) != len(wires) or any(wire.contents.ByteSize() for wire in wires)):
        raise LostError(Loss.DECODE, "the contents in bytes are not those of the tensors")
    tensors: list[Tensor] = []
    for index, wire in enumerate(wires):
        shape = tuple(wire.shape)
        check_shape(wire.datatype, shape)
        data = raw[index] if raw else _typed(wire, room)
        room.take_bytes(len(data))
        check_content(wire.datatype, shape, data)
        tensors.append(Tensor(name=wire.name, datatype=wire.datatype, shape=shape, data=data))
    return tuple(tensors)


def _typed(wire: wire_format.Tensor, room: _Room) -> bytes:
    """Return typed content as bytes."""
    contents = wire.contents
    kinds = [field.name for field, _ in contents.ListFields()]
    if not kinds:
        return b""
    if wire.datatype in _PACKED:
        return _packed(wire, contents.SerializeToString(deterministic=True))
    field = _FIELDS.get(wire.datatype)
    if field is None:
        raise LostError(Loss.DECODE, f"{wire.datatype} comes only as bytes")
    if kinds != [field]:
        raise LostError(Loss.DECODE, f"a tensor's content is not {wire.datatype}")
    values = getattr(contents, field)
    room.take_values(len(values))
    if field == "bytes_contents":
        return pack_strings(values)
    dtype = DTYPES[wire.datatype]
    wide = np.fromiter(values, np.uint64 if dtype.kind == "u" else np.int64, len(values))
    narrow = wide.astype(dtype)
    if not np.array_equal(narrow, wide):
        raise LostError(Loss.DECODE, f"a tensor's content is not {wire.datatype}")
    return narrow.tobytes()


def _packed(wire: wire_format.Tensor, serialised: bytes) -> bytes:
    """Return the bytes of a packed field, which must be all that there is: little-endian, as tensors are."""
    length = position = 0
    for position, byte in enumerate(serialised[1:6], start=1):
        length |= (byte & 0x7F) << (7 * (position - 1))
        if byte < 0x80:
            break
    data = serialised[position + 1 :]
    if serialised[0] != _PACKED[wire.datatype] or length != len(data):
        raise LostError(Loss.DECODE, f"a tensor's content is not {wire.datatype}")
    return data


def _joined(parts: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Return the tensors of several messages, each one's after the other's along the first dimension."""
    if len(parts) == 1:
        return parts[0]
    kinds = {tuple((each.name, each.datatype, each.shape[1:]) for each in tensors) for tensors in parts}
    if len(kinds) != 1 or any(not each.shape for tensors in parts for each in tensors):
        raise LostError(Loss.UNPAIRED, "messages of one stream whose tensors differ")
    return tuple(
        msgspec.structs.replace(
            same[0],
            shape=(sum(each.shape[0] for each in same), *same[0].shape[1:]),
            data=b"".join(each.data for each in same),
        )
        for same in zip(*parts, strict=True)
    )


def _n_rows(tensors: tuple[Tensor, ...]) -> int:
    """Return the first dimension that all have in common, or 0."""
    counts = {each.shape[0] if each.shape else 0 for each in tensors}
    return counts.pop() if len(counts) == 1 else 0


def _is_farewell(answer: wire_format.InferResponse) -> bool:
    """Say whether it only tells that no more comes, which a client may ask a decoupled model for."""
    name = "triton_final_response"
    return not answer.outputs and name in answer.parameters and answer.parameters[name].bool_param


def _in_order(
    answers: list[wire_format.InferResponse], ids: Iterable[str]
) -> list[wire_format.InferResponse]:
    asked = list(ids)
    if len(asked) == 1 or [answer.id for answer in answers] == asked:
        return answers
    told = {answer.id: answer for answer in answers}
    if len(told) != len(answers) or told.keys() != set(asked):
        raise LostError(Loss.UNPAIRED, "ids do not tell which response is whose")
    return [told[each] for each in asked]
