"""What is fuzzed: whatever reads bytes of strangers. Each target takes bytes, and raises where a promise is broken."""

import contextlib
import json
from collections.abc import Callable

import msgspec

from quantdrift.core.config.schema import Model, ModelTensor
from quantdrift.core.records import Loss, Protocol, Tensor
from quantdrift.sidecar.protocols import DECODERS
from quantdrift.sidecar.protocols.adapters import load_adapter
from quantdrift.sidecar.protocols.content import check_content, check_shape
from quantdrift.sidecar.protocols.decoder import DecodedRequest, WireContext
from quantdrift.sidecar.protocols.errors import LostError
from quantdrift.sidecar.protocols.http_message import Head, parse_head, read_body
from quantdrift.sidecar.state.counters import Gauge
from tests.property.test_decoders import test_whatever_comes_is_tensors_or_lost as any_document
from tests.support.sidecar.http2_wire import ANSWER, OPENING, Ends, data, headers
from tests.support.sidecar.relay_ends import relayed
from tests.support.sidecar.relay_rig import INFER, Bench

_MODELS = (
    None,
    Model(
        name="m",
        inputs=(ModelTensor(name="x", datatype="FP32", shape=(-1, 2)),),
        outputs=(ModelTensor(name="y", datatype="FP32"),),
        labels=("a", "b"),
    ),
)
_ADAPTERS = tuple(load_adapter(name) for name in ("bytes", "json", "scores"))
_TYPES = ("", "application/json", "multipart/form-data; boundary=b", "text/event-stream")
_MAX_BYTES, _MAX_VALUES = 100_000, 2_000


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is fuzzed.

    Parameters
    ----------
    run
        Takes any bytes.
    seeds
        What it is begun with: well formed.
    """

    run: Callable[[bytes], None]
    seeds: tuple[bytes, ...]


def _decoding(*protocols: Protocol) -> Callable[[bytes], None]:
    """Return what decodes bytes as request and response: the first of them chooses what is configured."""

    def run(given: bytes) -> None:
        chosen, body = (given[0], given[1:]) if given else (0, b"")
        told = {"content-type": _TYPES[chosen >> 2 & 3]}
        if chosen & 0x10:  # as if the JSON part ended at the first line feed
            told["inference-header-content-length"] = str(body.find(b"\n") + 1)
        head = Head(start=("POST", "/", ""), headers=told)
        wire = WireContext(
            max_bytes=_MAX_BYTES,
            max_values=_MAX_VALUES,
            model=_MODELS[chosen & 1],
            adapter=_ADAPTERS[(chosen >> 5) % len(_ADAPTERS)],
        )
        for protocol in protocols:
            query = DecodedRequest(inputs=(Tensor(name="", datatype="BYTES", shape=(1,), data=bytes(4)),))
            with contextlib.suppress(LostError):
                query = DECODERS[protocol].request(head, body, wire)
                _check(query.inputs)
            with contextlib.suppress(LostError):
                _check(DECODERS[protocol].response(head, body, query, wire).outputs)

    return run


def _check(tensors: tuple[Tensor, ...]) -> None:
    for tensor in tensors:
        check_shape(tensor.datatype, tensor.shape)
        check_content(tensor.datatype, tensor.shape, tensor.data)


def _documents(given: bytes) -> None:
    """Decode documents that are nearly right: bytes choose among them, as they do for Hypothesis."""
    any_document.hypothesis.fuzz_one_input(given)  # type: ignore[attr-defined]  # put there by Hypothesis


def _message(given: bytes) -> None:
    """Read a message as the recorder does."""
    head, _, body = given.partition(b"\r\n\r\n")
    with contextlib.suppress(LostError):
        assert len(read_body(parse_head(head), body, _MAX_BYTES)) <= _MAX_BYTES


def _relaying(opening: bytes) -> Callable[[bytes], None]:
    """Return what relays bytes cut at each NUL, by turns from client and backend, behind an opening of the client."""
    bench = Bench()

    def run(given: bytes) -> None:
        pieces = [(place % 2 == 0, piece) for place, piece in enumerate(given.split(b"\0\0")) if piece]
        steps = [(True, opening), *pieces] if opening else pieces
        to_backend, to_client, connection = relayed(bench, steps, 0)
        assert to_backend == b"".join(piece for from_client, piece in steps if from_client)
        assert to_client == b"".join(piece for from_client, piece in steps if not from_client)
        connection.backend.eof_received()
        connection.client.connection_lost(None)
        connection.backend.connection_lost(None)
        assert bench.slot.gauge(Gauge.OBSERVER_ERRORS) == bench.lost(Loss.OBSERVER_ERROR) == 0
        assert bench.balance() == bench.slot.gauge(Gauge.HELD_BYTES) == bench.slot.gauge(Gauge.OPEN) == 0

    return run


def _http2_seed() -> bytes:
    ends = Ends()
    asked = headers(1, ends.request()) + data(1, b"in", ends=True)
    answered = ANSWER + headers(1, ends.response()) + data(1, b"out") + headers(1, ends.trailers(), ends=True)
    return asked + b"\0\0" + answered


_STREAM = (
    b'data: {"choices":[{"index":0,"delta":{"content":"a","tool_calls":[{"index":0,"id":"b","function":{"name":"f",'
    b'"arguments":"{}"}}]},"logprobs":{"content":[{"token":"a","logprob":-1,"bytes":[97],"top_logprobs":[]}]},'
    b'"token_ids":[1]}]}\r\n\r\n: comment\n\ndata: {"choices":[],\ndata: "usage":{"prompt_tokens":1}}\n\ndata: [DONE]\n\n'
)
_TENSOR = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
_BINARY = {"name": "x", "shape": [2], "datatype": "BYTES", "parameters": {"binary_data_size": 10}}
_FORM = (
    b'--b\r\nContent-Disposition: form-data; name="data"\r\nContent-Type: a/b\r\n\r\n[[1, 2]]\r\n--b--\r\n'
)

TARGETS = {
    "sse": Target(run=_decoding(Protocol.OPENAI_CHAT), seeds=(b"\0" + _STREAM,)),
    "openai": Target(
        run=_decoding(Protocol.OPENAI_COMPLETIONS, Protocol.OPENAI_EMBEDDINGS),
        seeds=(
            b'\0{"model":"m","prompt":["a",[1]],"input":"a","n":2}',
            b'\0{"data":[{"index":0,"embedding":"AACAPg=="}]}',
            b'\0{"choices":[{"index":0,"text":"a","logprobs":{"tokens":["a"],"token_logprobs":[null],"top_logprobs":[{"a":-1}]}}]}',
        ),
    ),
    "chats": Target(
        run=_decoding(
            Protocol.OPENAI_RESPONSES,
            Protocol.ANTHROPIC_MESSAGES,
            Protocol.OLLAMA_CHAT,
            Protocol.OLLAMA_GENERATE,
            Protocol.GENERATE,
        ),
        seeds=(
            (
                b'\0{"input":[{"role":"user","content":[{"type":"input_text","text":"a"}]}],"messages":[{"role":"user","content":'
                b'[{"type":"tool_result","content":"a"}]}],"prompt":"a","text_input":"a","tools":[{"type":"function","name":"f"}]}'
            ),
            (
                b'\0{"status":"completed","output":[{"type":"message","content":[{"text":"a"}]}],"content":[{"type":"text","text":"a"}],'
                b'"message":{"content":"a"},"done":true,"text_output":"a"}'
            ),
            b'\0event: response.completed\ndata: {"response":{"output":[{"type":"function_call","name":"f"}]}}\n\n',
            (
                b'\0data: {"type":"content_block_start","index":0,"content_block":{"type":"tool_use","name":"f"}}\n\ndata: '
                b'{"type":"content_block_delta","index":0,"delta":{"partial_json":"{}"}}\n\ndata: {"type":"message_stop"}\n\n'
            ),
        ),
    ),
    "oip": Target(
        run=_decoding(Protocol.OIP_REST),
        seeds=(
            b"\0" + json.dumps({"inputs": [_TENSOR], "outputs": [_TENSOR]}).encode(),
            b"\x10" + json.dumps({"inputs": [_TENSOR, _BINARY]}).encode() + b"\n\1\0\0\0a\1\0\0\0b",
            b"\x11" + bytes(16),
        ),
    ),
    "v1": Target(
        run=_decoding(Protocol.KSERVE_V1),
        seeds=(
            b'\0{"instances":[{"a":[1,2.5],"b":{"b64":"AA=="}}],"predictions":[[true]]}',
            b'\1{"inputs":{"x":[[1]]},"outputs":"a","signature_name":"s"}',
        ),
    ),
    "torchserve": Target(
        run=_decoding(Protocol.TORCHSERVE),
        seeds=(b"\x08" + _FORM, b"\x28" + _FORM, b'\x41{"a":0.5,"b":0.25}', b'\x20{"predictions":[1]}'),
    ),
    "grpc": Target(
        run=_decoding(Protocol.OIP_GRPC),
        seeds=(b"\0\0\0\0\0\x16\n\1m*\x0c\n\1x\x12\4FP32\x1a\1\1:\4\0\0\0\0",),
    ),
    "documents": Target(run=_documents, seeds=(bytes(200), bytes(range(200)))),
    "message": Target(
        run=_message,
        seeds=(
            b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n0\r\n\r\n",
            b"POST / HTTP/1.1\r\nContent-Encoding: deflate\r\n\r\nx\x9cKLJ\x06\x00\x02M\x01'",
        ),
    ),
    "http1": Target(
        run=_relaying(b""),
        seeds=(
            b"POST %b HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nin\0\0HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nout"
            % INFER,
            b"POST %b HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nin\r\n0\r\n\r\n\0\0HTTP/1.1 204 No\r\n\r\n"
            % INFER,
        ),
    ),
    "http2": Target(run=_relaying(OPENING), seeds=(_http2_seed(),)),
}
