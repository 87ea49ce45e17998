"""Open Inference over gRPC: messages to tensors, or to the reason why they cannot be used."""

import gzip
import struct
import zlib
from typing import Any

import msgspec
import pytest

from quantdrift.core.config.schema import Model
from quantdrift.core.open_inference_pb2 import (
    InferRequest,
    InferResponse,
    Parameter,
    RequestedOutput,
    StreamResponse,
)
from quantdrift.core.open_inference_pb2 import Tensor as WireTensor
from quantdrift.core.records import Loss, Tensor
from quantdrift.core.tasks import Task
from quantdrift.sidecar.protocols.content import pack_strings
from quantdrift.sidecar.protocols.decoder import DecodedRequest, DecodedResponse, WireContext
from quantdrift.sidecar.protocols.errors import LostError
from quantdrift.sidecar.protocols.http_message import Head
from quantdrift.sidecar.protocols.oip_grpc import OipGrpc, OipGrpcStream

pytestmark = pytest.mark.unit

LIMIT = 1 << 20
TWO = struct.pack("<2f", 1.5, -2.5)


def prefixed(*messages: bytes, compressed: bool = False) -> bytes:
    """Return a body of messages."""
    return b"".join(struct.pack("!?I", compressed, len(each)) + each for each in messages)


def request(**fields: Any) -> InferRequest:
    """Return a request with one tensor of bytes, unless told otherwise."""
    given = {
        "model_name": "digits",
        "inputs": [WireTensor(name="x", datatype="FP32", shape=[1, 2])],
        "raw_input_contents": [TWO],
    }
    return InferRequest(**{**given, **fields})


def response(**fields: Any) -> InferResponse:
    """Return a response with one tensor of bytes, unless told otherwise."""
    given = {
        "model_name": "digits",
        "model_version": "7",
        "outputs": [WireTensor(name="y", datatype="FP32", shape=[1, 2])],
        "raw_output_contents": [TWO],
    }
    return InferResponse(**{**given, **fields})


def answers(*fields: dict[str, Any]) -> list[bytes]:
    """Return the responses of a stream."""
    return [StreamResponse(infer_response=response(**each)).SerializeToString() for each in fields]


def head(**fields: str) -> Head:
    """Return a request's head."""
    told = {name.replace("_", "-"): value for name, value in fields.items()}
    return Head(start=("POST", "/inference.GRPCInferenceService/ModelInfer", "HTTP/2"), headers=told)


def ended(version: str = "HTTP/2", **fields: str) -> Head:
    """Return a response's head."""
    told = {name.replace("_", "-"): value for name, value in fields.items()}
    return Head(start=(version, "200", ""), headers=told)


def asked(*messages: InferRequest, wire: WireContext | None = None) -> DecodedRequest:
    """Return the decoded request, of a stream where there are not one."""
    decoder = OipGrpc() if len(messages) == 1 else OipGrpcStream()
    body = prefixed(*(each.SerializeToString() for each in messages))
    return decoder.request(head(), body, wire or WireContext(max_bytes=LIMIT))


def answered(message: InferResponse, at: Head | None = None) -> DecodedResponse:
    """Return the decoded response."""
    return OipGrpc().response(
        at or ended(grpc_status="0"),
        prefixed(message.SerializeToString()),
        DecodedRequest(inputs=()),
        WireContext(max_bytes=LIMIT),
    )


def loss_of(call: Any, *arguments: Any, **named: Any) -> Loss:
    """Return why an exchange cannot be used."""
    with pytest.raises(LostError) as caught:
        call(*arguments, **named)
    return caught.value.loss


def test_a_request_names_its_model_and_its_parameters() -> None:
    """What is not a tensor is told as the same request in JSON would tell it."""
    parameters = {
        "a": Parameter(bool_param=True),
        "b": Parameter(int64_param=-3),
        "c": Parameter(string_param="s"),
        "d": Parameter(double_param=0.5),
        "e": Parameter(uint64_param=2**63),
        "f": Parameter(),
    }
    outputs = [RequestedOutput(name="y", parameters={"classification": Parameter(int64_param=3)})]
    query = asked(request(model_version="3", id="r", parameters=parameters, outputs=outputs))
    told = {"a": True, "b": -3, "c": "s", "d": 0.5, "e": 2**63}
    assert (query.model, query.version, query.parameters) == ("digits", "3", told)
    assert query.inputs == (Tensor(name="x", datatype="FP32", shape=(1, 2), data=TWO),)
    assert query.document == {
        "model_name": "digits",
        "model_version": "3",
        "id": "r",
        "parameters": told,
        "outputs": [{"name": "y", "parameters": {"classification": 3}}],
    }


def test_a_response_names_the_version_that_answered() -> None:
    """And its tensors."""
    reply = answered(response())
    assert reply == DecodedResponse(
        version="7", outputs=(Tensor(name="y", datatype="FP32", shape=(1, 2), data=TWO),)
    )


@pytest.mark.parametrize(
    ("datatype", "contents", "data"),
    [
        ("BOOL", {"bool_contents": [True, False]}, b"\x01\x00"),
        ("INT8", {"int_contents": [-1, 127]}, b"\xff\x7f"),
        ("UINT64", {"uint64_contents": [1, 2**64 - 1]}, struct.pack("<2Q", 1, 2**64 - 1)),
        ("FP32", {"fp32_contents": [1.5, -2.5]}, TWO),
        ("FP64", {"fp64_contents": [1.5, -2.5]}, struct.pack("<2d", 1.5, -2.5)),
        ("BYTES", {"bytes_contents": [b"a", b""]}, b"\x01\x00\x00\x00a" + bytes(4)),
    ],
)
def test_typed_content_is_as_it_would_be_in_bytes(
    datatype: str, contents: dict[str, Any], data: bytes
) -> None:
    """Packed, as every library writes it."""
    tensor = WireTensor(name="x", datatype=datatype, shape=[2], contents=contents)
    assert asked(request(inputs=[tensor], raw_input_contents=[])).inputs[0].data == data


def test_content_that_is_not_packed_says_the_same() -> None:
    """Old writers may do that, and content in two parts is put together as every reader does."""
    unpacked = b"".join(b"\x35" + struct.pack("<f", value) for value in (1.5, -2.5))
    tensor = WireTensor(name="x", datatype="FP32", shape=[2]).SerializeToString()
    for parts in ([unpacked], [unpacked[:5], unpacked[5:]]):
        whole = tensor + b"".join(b"\x2a" + bytes([len(part)]) + part for part in parts)
        body = b"\x0a\x06digits\x2a" + bytes([len(whole)]) + whole
        query = OipGrpc().request(head(), prefixed(body), WireContext(max_bytes=LIMIT))
        assert query.inputs[0].data == TWO


def test_an_empty_contents_message_may_come_with_raw_bytes() -> None:
    """As MLServer writes it."""
    output = response().outputs[0]
    output.contents.SetInParent()
    assert answered(response(outputs=[output])).outputs == answered(response()).outputs


def test_empty_tensors_have_no_content() -> None:
    """Typed and raw."""
    tensor = WireTensor(name="x", datatype="FP32", shape=[0, 2])
    assert asked(request(inputs=[tensor], raw_input_contents=[])).inputs[0].data == b""
    assert asked(request(inputs=[tensor], raw_input_contents=[b""])).inputs[0].data == b""


@pytest.mark.parametrize(
    ("fields", "loss"),
    [
        ({"raw_input_contents": [TWO, TWO]}, Loss.DECODE),
        ({"raw_input_contents": [TWO + b"?"]}, Loss.DECODE),
        ({"raw_input_contents": []}, Loss.DECODE),
        (
            {"inputs": [WireTensor(datatype="FP32", shape=[2], contents={"fp32_contents": [1, 2]})]},
            Loss.DECODE,
        ),
        (
            {
                "inputs": [WireTensor(datatype="FP32", shape=[2], contents={"fp64_contents": [1, 2]})],
                "raw_input_contents": [],
            },
            Loss.DECODE,
        ),
        (
            {
                "inputs": [WireTensor(datatype="INT8", shape=[1], contents={"int_contents": [128]})],
                "raw_input_contents": [],
            },
            Loss.DECODE,
        ),
        (
            {
                "inputs": [WireTensor(datatype="UINT8", shape=[1], contents={"int_contents": [1]})],
                "raw_input_contents": [],
            },
            Loss.DECODE,
        ),
        (
            {
                "inputs": [WireTensor(datatype="FP16", shape=[1], contents={"fp32_contents": [1]})],
                "raw_input_contents": [],
            },
            Loss.DECODE,
        ),
        (
            {
                "inputs": [
                    WireTensor(
                        datatype="BOOL",
                        shape=[8],
                        contents={"bool_contents": [True, True], "fp32_contents": [1]},
                    )
                ],
                "raw_input_contents": [],
            },
            Loss.DECODE,
        ),
        ({"inputs": [WireTensor(datatype="FP31", shape=[1, 2])]}, Loss.DECODE),
        ({"inputs": [WireTensor(datatype="FP32", shape=[-1, 2])]}, Loss.DECODE),
        ({"parameters": {"sequence_id": Parameter(int64_param=5)}}, Loss.SEQUENCE),
        ({"parameters": {"sequence_id": Parameter(string_param="five")}}, Loss.SEQUENCE),
        (
            {
                "inputs": [
                    WireTensor(
                        datatype="FP32",
                        shape=[2],
                        parameters={"shared_memory_region": Parameter(string_param="r")},
                    )
                ],
                "raw_input_contents": [],
            },
            Loss.SHARED_MEMORY,
        ),
        (
            {"outputs": [RequestedOutput(parameters={"shared_memory_region": Parameter(string_param="r")})]},
            Loss.SHARED_MEMORY,
        ),
        ({"outputs": [RequestedOutput()] * 60_000}, Loss.TOO_LARGE),
        (
            {
                "inputs": [WireTensor(datatype="BOOL", shape=[9], contents={"bool_contents": [True] * 9})],
                "raw_input_contents": [],
                "parameters": {str(n): Parameter() for n in range(60_000)},
            },
            Loss.TOO_LARGE,
        ),
    ],
)
def test_an_unusable_message_is_refused_with_its_reason(fields: dict[str, Any], loss: Loss) -> None:
    """Nothing of it is guessed."""
    assert loss_of(asked, request(**fields)) is loss


def test_sequence_id_zero_means_no_sequence() -> None:
    """As clients say it that always say something."""
    assert asked(request(parameters={"sequence_id": Parameter(int64_param=0)})).inputs


def test_many_small_values_are_refused() -> None:
    """They take eight times their length in memory, and each costs time."""
    tensor = WireTensor(datatype="INT64", shape=[1000], contents={"int64_contents": [1] * 1000})
    wire = WireContext(max_bytes=LIMIT, max_values=999)
    assert loss_of(asked, request(inputs=[tensor], raw_input_contents=[]), wire=wire) is Loss.TOO_LARGE
    wire = WireContext(max_bytes=4000)
    assert loss_of(asked, request(inputs=[tensor], raw_input_contents=[]), wire=wire) is Loss.TOO_LARGE


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x00\x00\x00",
        b"\x00\x00\x00\x00\x09abc",
        prefixed(b"\xff\xff"),
        prefixed(b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"),
        prefixed(b"\x0b"),
        prefixed(request().SerializeToString(), request().SerializeToString()),
        prefixed(b"\x0a\x02\xff\xfe"),
    ],
)
def test_a_body_without_a_message_gives_none(body: bytes) -> None:
    """Cut short, garbage, or more than the one that is due."""
    assert loss_of(OipGrpc().request, head(), body, WireContext(max_bytes=LIMIT)) is Loss.DECODE


@pytest.mark.parametrize(("coding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_messages_are_decompressed_within_the_limit(coding: str, compress: Any) -> None:
    """Each says of itself whether it is compressed; a bomb is refused."""
    message = request().SerializeToString()
    body, wire = prefixed(compress(message), compressed=True), WireContext(max_bytes=LIMIT)
    assert OipGrpc().request(head(grpc_encoding=coding), body, wire).model == "digits"
    assert OipGrpc().request(head(grpc_encoding=coding), prefixed(message), wire).model == "digits"
    assert loss_of(OipGrpc().request, head(), prefixed(message), WireContext(max_bytes=9)) is Loss.TOO_LARGE
    assert loss_of(OipGrpc().request, head(), body, wire) is Loss.DECODE
    assert loss_of(OipGrpc().request, head(grpc_encoding="zstd"), body, wire) is Loss.DECODE
    bomb = prefixed(compress(bytes(LIMIT + 1)), compressed=True)
    assert loss_of(OipGrpc().request, head(grpc_encoding=coding), bomb, wire) is Loss.TOO_LARGE
    half = prefixed(*[compress(bytes(LIMIT // 2 + 1))] * 2, compressed=True)
    assert loss_of(OipGrpcStream().request, head(grpc_encoding=coding), half, wire) is Loss.TOO_LARGE


@pytest.mark.parametrize("at", [ended(grpc_status="13"), ended(), ended(grpc_status="")])
def test_a_failed_call_is_an_error(at: Head) -> None:
    """Also one whose status did not come."""
    assert loss_of(answered, response(), at) is Loss.ERROR_STATUS


def test_a_sender_that_reports_success_in_another_way_needs_no_status() -> None:
    """A logger tells of calls that succeeded, without trailers."""
    assert answered(response(), ended("HTTP/1.1")).version == "7"


def stream(
    requests: list[InferRequest], messages: list[bytes], model: Model | None = None
) -> tuple[DecodedRequest, DecodedResponse]:
    """Return both sides of a stream, as the recorder has them decoded."""
    decoder, wire = OipGrpcStream(), WireContext(max_bytes=LIMIT)
    query = decoder.request(head(), prefixed(*(each.SerializeToString() for each in requests)), wire)
    query = msgspec.structs.replace(query, document={})
    wire = msgspec.structs.replace(wire, model=model or Model(name="digits"))
    return query, decoder.response(ended(grpc_status="0"), prefixed(*messages), query, wire)


def row(value: float) -> dict[str, Any]:
    """Return the fields of a message with one row."""
    return {"raw_input_contents": [struct.pack("<2f", value, value)]}


def out(value: float, identifier: str = "", **fields: Any) -> dict[str, Any]:
    """Return the fields of a response with one row."""
    return {"raw_output_contents": [struct.pack("<2f", value, value)], "id": identifier, **fields}


def test_responses_of_a_stream_are_matched_by_their_ids() -> None:
    """Whatever the order they come in; an answer that only says that there are no more is none."""
    requests = [request(id=name, **row(n)) for n, name in enumerate("abc")]
    farewell = {"triton_final_response": Parameter(bool_param=True)}
    messages = answers(
        out(12, "c"),
        {"id": "c", "outputs": [], "raw_output_contents": [], "parameters": farewell},
        out(10, "a", parameters=farewell),
        out(11, "b"),
    )
    query, reply = stream(requests, messages)
    assert query.inputs[0].data == struct.pack("<6f", 0, 0, 1, 1, 2, 2)
    assert reply.outputs[0].data == struct.pack("<6f", 10, 10, 11, 11, 12, 12)
    assert query.inputs[0].shape == reply.outputs[0].shape == (3, 2)
    assert (query.model, reply.version) == ("digits", "7")


def test_a_stream_of_one_needs_no_id() -> None:
    """There is nothing to be mistaken."""
    query, reply = stream([request(id="a")], answers({}))
    assert query.inputs[0].shape == reply.outputs[0].shape == (1, 2)


TWICE = [request(**row(0)), request(**row(1))]


@pytest.mark.parametrize(
    ("requests", "messages"),
    [
        (TWICE, answers(out(0))),
        (TWICE, answers(out(0), out(1), out(1))),
        ([request(id="a"), request(id="b")], answers(out(0, "a"), out(1, "c"))),
        ([request(id="a"), request(id="b")], answers(out(0), out(1))),
        ([request(id="a"), request(id="a")], answers(out(0, "a"), out(1, "b"))),
        (TWICE, answers(out(0, model_version="7"), out(1, model_version="8"))),
        ([request(), request(model_name="other")], answers(out(0), out(1))),
        ([request(), request(parameters={"a": Parameter(int64_param=1)})], answers(out(0), out(1))),
    ],
)
def test_responses_that_cannot_be_paired_are_reported(
    requests: list[InferRequest], messages: list[bytes]
) -> None:
    """Counts, ids, versions, models and parameters must leave no doubt."""
    assert loss_of(stream, requests, messages) is Loss.UNPAIRED


@pytest.mark.parametrize(
    ("requests", "messages"),
    [
        (
            [request(), request(inputs=[WireTensor(name="z", datatype="FP32", shape=[1, 2])])],
            answers(out(0), out(1)),
        ),
        (
            [request(), request(inputs=[WireTensor(name="x", datatype="FP32", shape=[2, 1])])],
            answers(out(0), out(1)),
        ),
        (
            TWICE,
            answers(*[{"outputs": [WireTensor(name="y", datatype="FP32", shape=[2])]}] * 2),
        ),
        (
            [request(inputs=[WireTensor(name="x", datatype="BYTES")], raw_input_contents=[bytes(4)])] * 2,
            answers(out(0), out(1)),
        ),
    ],
    ids=["names", "widths of requests", "rows of responses", "no dimension"],
)
def test_a_stream_that_is_no_batch_is_an_exchange_for_each_pair(
    requests: list[InferRequest], messages: list[bytes]
) -> None:
    """Such as texts of different lengths, as token ids."""
    _, reply = stream(requests, messages)
    assert len(reply.pairs) == 2
    assert [pair.inputs[0].name for pair in reply.pairs] == [asked.inputs[0].name for asked in requests]
    assert reply.pairs[0].outputs == reply.outputs


def test_the_pairs_of_a_stream_are_matched_by_their_ids() -> None:
    """As its rows are, where it is a batch."""
    wide = {"inputs": [WireTensor(name="x", datatype="FP32", shape=[1, 1])], "raw_input_contents": [bytes(4)]}
    _, reply = stream([request(id="a", **row(0)), request(id="b", **wide)], answers(out(9, "b"), out(8, "a")))
    assert [pair.inputs[0].shape for pair in reply.pairs] == [(1, 2), (1, 1)]
    assert [pair.outputs[0].data for pair in reply.pairs] == [struct.pack("<2f", n, n) for n in (8, 9)]


def test_a_model_that_takes_one_item_has_an_exchange_for_each_request() -> None:
    """Together they would be put along a dimension that counts no items."""
    model = Model(name="digits", batched=False)
    _, reply = stream(TWICE, answers(out(0), out(1)), model)
    assert [pair.inputs[0].data for pair in reply.pairs] == [struct.pack("<2f", n, n) for n in (0, 1)]
    alone = stream(TWICE[:1], answers(out(0)), model)[1]
    assert (alone.version, alone.pairs) == ("7", ())


def test_a_request_of_a_stream_that_fails_makes_it_an_error() -> None:
    """The stream itself goes well."""
    failed = StreamResponse(error_message="no").SerializeToString()
    assert loss_of(stream, TWICE, [*answers(out(0)), failed]) is Loss.ERROR_STATUS


def test_a_stream_without_requests_is_none() -> None:
    """A client may open one and close it."""
    assert loss_of(OipGrpcStream().request, head(), b"", WireContext(max_bytes=LIMIT)) is Loss.DECODE


STORY = WireContext(max_bytes=LIMIT, models={"story": Model(name="story", task=Task.GENERATION)})


def text_of(name: str, *texts: str) -> tuple[WireTensor, bytes]:
    """Return a tensor of texts, and its content."""
    return WireTensor(name=name, datatype="BYTES", shape=[len(texts)]), pack_strings(map(str.encode, texts))


def told(*inputs: tuple[WireTensor, bytes]) -> InferRequest:
    """Return a request to a model that generates text."""
    return request(
        model_name="story",
        inputs=[tensor for tensor, _ in inputs],
        raw_input_contents=[content for _, content in inputs],
    )


def test_one_response_to_a_text_is_its_answer() -> None:
    """Without the prompt, which a server may repeat; options are tensors, or JSON in one of them."""
    tokens = WireTensor(name="max_tokens", datatype="INT32", shape=[1, 1])
    asked = told(
        text_of("text_input", "a fox"),
        text_of("sampling_parameters", '{"temperature": "0.5", "stop": ["."], "user": "u"}'),
        (tokens, struct.pack("<i", 9)),
    )
    decoder = OipGrpc()
    query = decoder.request(ended(), prefixed(asked.SerializeToString()), STORY)
    assert query.parameters == {"max_tokens": 9, "stop": ["."], "temperature": 0.5}
    outputs = [text_of("text_output", "a fox says"), text_of("finish_reason", "length")]
    answered = response(
        outputs=[tensor for tensor, _ in outputs], raw_output_contents=[content for _, content in outputs]
    )
    reply = decoder.response(ended(grpc_status="0"), prefixed(answered.SerializeToString()), query, STORY)
    found = {tensor.name: tensor.data for tensor in reply.outputs}
    assert (found["text"], found["finish_reason"]) == (pack_strings([b" says"]), pack_strings([b"length"]))
    assert reply.version == "7"


@pytest.mark.parametrize(
    "inputs",
    [
        [text_of("prompt", "a")],
        [text_of("text_input", "a", "b")],
        [text_of("text_input", "a"), text_of("image", "iVBO")],
        [text_of("text_input", "a"), text_of("sampling_parameters", "[1]")],
    ],
)
def test_what_is_not_one_text_is_lost(inputs: list[tuple[WireTensor, bytes]]) -> None:
    """It could not be replayed."""
    with pytest.raises(LostError) as caught:
        OipGrpc().request(ended(), prefixed(told(*inputs).SerializeToString()), STORY)
    assert caught.value.loss is Loss.DECODE
