"""Triton over HTTP/1.1, asked by its own client library: what passes the relay, and what is captured of it."""

import http.client
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton_http
import tritonclient.utils.shared_memory as shm
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

import quantdrift
from quantdrift.core.records import Exchange, Protocol
from tests.servers.answers import Held
from tests.servers.oip_clients import ask_http, http_input
from tests.servers.passage import MARK, Passage, passage, talk
from tests.servers.server import Server
from tests.servers.tensors import N_READABLE, TEXT, TIMES, X, tensor, texts
from tests.support.sidecar.relay_process import DEADLINE_S, wait

pytestmark = [pytest.mark.servers, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def way(triton: Server, tmp_path_factory: pytest.TempPathFactory, nats_url: str) -> Iterator[Passage]:
    """Return a relay before Triton's HTTP port."""
    directory = tmp_path_factory.mktemp("relay")
    told = {"name": "x", "datatype": "FP32", "shape": [-1, 4]}
    models: list[dict[str, Any]] = [
        {"name": "linear", "inputs": [told]},
        {"name": "words"},
        {"name": "story"},
    ]
    with passage(directory, triton.http_port, nats_url, models) as made:
        yield made


@pytest.fixture
def mark(way: Passage) -> Iterator[str]:
    """Return the test's mark; at the end no byte of its connections has changed on the way."""
    yield secrets.token_hex(8)
    way.check()


def linear(*, sent: bool = True, wanted: bool = True, **options: Any) -> tuple[str, list[Any], list[Any]]:
    """Return a request of the model `linear`; binary or JSON each way."""
    outputs = [triton_http.InferRequestedOutput("scores", binary_data=wanted, **options)]
    return "linear", [http_input("x", "FP32", X, binary=sent)], outputs


def words(*, mixed: bool, binary: bool = False) -> tuple[str, list[Any], list[Any]]:
    """Return a request of the model `words`; mixed, each message has one tensor as JSON and one as bytes."""
    inputs = [
        http_input("text", "BYTES", TEXT if mixed or binary else TEXT[:N_READABLE], binary=mixed or binary),
        http_input("times", "INT32", TIMES, binary=binary),
    ]
    outputs = [
        triton_http.InferRequestedOutput("loud", binary_data=mixed or binary),
        triton_http.InferRequestedOutput("length", binary_data=binary),
    ]
    return "words", inputs, outputs


def check_linear(exchange: Exchange, scores: NDArray[np.float32]) -> None:
    """Compare what was captured with what the client sent and got."""
    assert (exchange.protocol, exchange.model, exchange.version) == (Protocol.OIP_REST, "linear", "1")
    assert exchange.inputs == (tensor("x", "FP32", X),)
    assert exchange.outputs == (tensor("scores", "FP32", scores),)


@pytest.mark.parametrize("sent", [True, False], ids=["binary", "json"])
@pytest.mark.parametrize("wanted", [True, False], ids=["binary-answer", "json-answer"])
def test_a_float_tensor_passes_and_is_captured(way: Passage, mark: str, *, sent: bool, wanted: bool) -> None:
    """The client gets through the relay what it gets without it, and both tensors are in the record bit for bit."""
    direct = ask_http(way.direct, mark, *linear(sent=sent, wanted=wanted))
    relayed = ask_http(way.port, mark, *linear(sent=sent, wanted=wanted))
    assert relayed.get_response() == direct.get_response()
    scores = relayed.as_numpy("scores")
    np.testing.assert_array_equal(scores, direct.as_numpy("scores"))
    (exchange,) = way.captured(mark)
    check_linear(exchange, scores)


@pytest.mark.parametrize(
    ("mixed", "binary"), [(True, False), (False, True), (False, False)], ids=["mixed", "binary", "json"]
)
def test_texts_pass_and_are_captured(way: Passage, mark: str, *, mixed: bool, binary: bool) -> None:
    """BYTES elements of any content and length, in JSON, as bytes, and beside a tensor that comes the other way."""
    request = words(mixed=mixed, binary=binary)
    relayed = ask_http(way.port, mark, *request)
    loud, length = relayed.as_numpy("loud"), relayed.as_numpy("length")
    assert relayed.get_response() == ask_http(way.direct, mark, *request).get_response()
    sent = TEXT if mixed or binary else TEXT[:N_READABLE]
    (exchange,) = way.captured(mark)
    assert exchange.inputs == (tensor("text", "BYTES", sent), tensor("times", "INT32", TIMES))
    assert exchange.outputs == (tensor("loud", "BYTES", loud), tensor("length", "INT32", length))


@pytest.mark.parametrize("request_coding", [None, "gzip", "deflate"])
@pytest.mark.parametrize("response_coding", [None, "gzip", "deflate"])
def test_compressed_bodies_pass_and_are_read(
    way: Passage, mark: str, request_coding: str | None, response_coding: str | None
) -> None:
    """Compression each way is undone in the record only: on the wire not a byte changes."""
    codings: dict[str, Any] = {
        "request_compression_algorithm": request_coding,
        "response_compression_algorithm": response_coding,
    }
    relayed = ask_http(way.port, mark, *linear(), **codings)
    ((up, down),) = way.check()
    assert (f"Content-Encoding: {request_coding}".encode() in up) == (request_coding is not None)
    assert (f"Content-Encoding: {response_coding}".encode() in down) == (response_coding is not None)
    (exchange,) = way.captured(mark)
    check_linear(exchange, relayed.as_numpy("scores"))


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_the_classification_extension_is_captured_as_it_was_answered(
    way: Passage, mark: str, *, binary: bool
) -> None:
    """An output asked for with its top classes comes as texts, score and label included."""
    relayed = ask_http(way.port, mark, *linear(wanted=binary, class_count=2))
    classes = relayed.as_numpy("scores")
    assert classes.shape == (3, 2)
    (exchange,) = way.captured(mark)
    assert exchange.inputs == (tensor("x", "FP32", X),)
    assert exchange.outputs == (tensor("scores", "BYTES", classes),)
    assert exchange.outputs[0].data.count(b":high") == len(X)


def test_a_raw_binary_request_passes_and_is_captured(way: Passage, mark: str) -> None:
    """A body of the one input's bytes alone, which models.inputs gives name, type and shape."""
    answers = []
    for port in (way.direct, way.port):
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
        fields = {"Inference-Header-Content-Length": "0", MARK: mark}
        client.request("POST", "/v2/models/linear/infer", X[:1].tobytes(), fields)
        response = client.getresponse()
        answers.append((response.status, response.getheaders(), response.read()))
        client.close()
    assert answers[0] == answers[1]
    assert answers[0][0] == 200
    typed = ask_http(way.direct, mark, "linear", [http_input("x", "FP32", X[:1], binary=True)])
    (exchange,) = way.captured(mark)
    assert exchange.inputs == (tensor("x", "FP32", X[:1]),)
    assert exchange.outputs == (tensor("scores", "FP32", typed.as_numpy("scores")),)


@pytest.mark.parametrize("sent", [True, False], ids=["binary", "json"])
def test_the_response_is_the_servers_byte_for_byte(way: Passage, mark: str, *, sent: bool) -> None:
    """A request written by hand gets the same bytes, head and body, with the relay and without it."""
    _, inputs, outputs = linear(sent=sent, wanted=sent)
    body, json_length = triton_http.InferenceServerClient.generate_request_body(inputs, outputs=outputs)
    length = "" if json_length is None else f"Inference-Header-Content-Length: {json_length}\r\n"
    head = (
        "POST /v2/models/linear/versions/1/infer HTTP/1.1\r\nHost: h\r\nConnection: close\r\n"
        f"{MARK}: {mark}\r\n{length}Content-Length: {len(body)}\r\n\r\n"
    )
    direct = talk(way.direct, head.encode() + body)
    assert direct.startswith(b"HTTP/1.1 200 OK\r\n")
    assert talk(way.port, head.encode() + body) == direct
    way.captured(mark)


def test_a_refusal_passes_and_is_counted(way: Passage, mark: str) -> None:
    """What Triton answers with an error reaches the client, and is a loss with a reason."""
    before = way.lost("error_status")
    seen = []
    for port in (way.direct, way.port):
        with pytest.raises(InferenceServerException, match="shape") as refused:
            ask_http(port, mark, "linear", [http_input("x", "FP32", X[:, :3], binary=True)], [])
        seen.append((str(refused.value), refused.value.status()))
    assert seen[0] == seen[1]
    wait(lambda: way.lost("error_status") == before + 1, "the refusal is counted")


def test_tensors_in_shared_memory_are_counted(way: Passage, mark: str) -> None:
    """The client's request works through the relay; its tensors did not travel: that is counted, never guessed."""
    before = way.lost("shared_memory")
    key = f"/qd-{secrets.token_hex(8)}"
    region = shm.create_shared_memory_region("region", key, X.nbytes)
    try:
        shm.set_shared_memory_region(region, [X])
        with triton_http.InferenceServerClient(f"127.0.0.1:{way.port}") as client:
            client.register_system_shared_memory("region", key, X.nbytes)
            given = triton_http.InferInput("x", list(X.shape), "FP32")
            given.set_shared_memory("region", X.nbytes)
            shared = client.infer("linear", [given], headers={MARK: mark}).as_numpy("scores")
            client.unregister_system_shared_memory("region")
    finally:
        shm.destroy_shared_memory_region(region)
    np.testing.assert_array_equal(shared, ask_http(way.direct, mark, *linear()).as_numpy("scores"))
    wait(lambda: way.lost("shared_memory") == before + 1, "it is counted")


def test_a_step_of_a_sequence_is_counted(way: Passage, mark: str) -> None:
    """A request of a stateful sequence passes, and is not taken for one that can be replayed alone."""
    before = way.lost("sequence")
    ask_http(way.port, mark, *linear(), sequence_id=7, sequence_start=True)
    wait(lambda: way.lost("sequence") == before + 1, "it is counted")


@pytest.mark.parametrize(("path", "said"), [("generate", "größe"), ("generate_stream", "größe matters")])
def test_a_generate_endpoint_is_captured(way: Passage, mark: str, path: str, said: str) -> None:
    """The extension for language models, in one piece and streamed."""
    asked = json.dumps({"text_input": said, "parameters": {"temperature": 0}}).encode()
    request = (
        b"POST /v2/models/story/%b HTTP/1.1\r\nHost: a\r\nConnection: close\r\n%b: %b\r\nContent-Length: %d\r\n\r\n%b"
        % (path.encode(), MARK.encode(), mark.encode(), len(asked), asked)
    )
    assert talk(way.port, request) == talk(way.direct, request)
    (exchange,) = way.captured(mark)
    held = Held(exchange)
    assert (exchange.protocol, exchange.model, exchange.version) == (Protocol.GENERATE, "story", "1")
    assert texts(held.inputs["prompt"]) == [said]
    assert held.document("options") == {"temperature": 0}
    assert held.heard() == [said.upper()]
    assert exchange.latency is not None
    assert (exchange.latency.first_token_s is not None) == (path == "generate_stream")


def test_what_is_no_inference_passes_uncounted(way: Passage, mark: str) -> None:
    """Metadata and health are answered through the relay and offered to nobody."""
    before = way.offered()
    with triton_http.InferenceServerClient(f"127.0.0.1:{way.port}") as client:
        assert client.is_server_live(headers={MARK: mark})
        metadata = client.get_model_metadata("linear")
    with triton_http.InferenceServerClient(f"127.0.0.1:{way.direct}") as client:
        assert client.get_model_metadata("linear") == metadata
    assert way.offered() == before


def test_a_load_test_tells_the_model_from_its_queue(triton: Server, tmp_path: Path) -> None:
    """By Triton's own statistics: the time in the queue and in the model is at most that of the answer, and each request is counted."""
    url = f"http://127.0.0.1:{triton.http_port}"
    (tmp_path / "config.toml").write_text(
        f'load.targets = ["{url}"]\n[[models]]\nname = "linear"\n', encoding="utf-8"
    )
    np.savez(tmp_path / "inputs.npz", x=X)
    test = quantdrift.load(
        url,
        source=tmp_path / "inputs.npz",
        config=tmp_path / "config.toml",
        step_s=0.2,
        sustain_s=0.2,
        sustain_at=50.0,
    ).load_test
    assert test.alone is not None
    assert test.alone.server is not None
    assert test.alone.server.n == test.alone.n
    assert 0 < test.alone.server.compute_s + test.alone.server.queue_s <= test.alone.mean_s.value
    assert all(step.server is not None for step in test.steps)
