"""Triton over gRPC, asked by its own client library: what passes the relay, and what is captured of it."""

import queue
import secrets
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.utils.shared_memory as shm
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from quantdrift.core.records import Exchange, Protocol
from quantdrift.models.language.from_exchange import scoring_inputs
from tests.servers.oip_clients import ask_grpc, grpc_input, serialised
from tests.servers.passage import MARK, Passage, passage
from tests.servers.server import Server
from tests.servers.tensors import TEXT, TIMES, X, tensor
from tests.support.sidecar.relay_process import DEADLINE_S, wait

pytestmark = [pytest.mark.servers, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def way(triton: Server, tmp_path_factory: pytest.TempPathFactory, nats_url: str) -> Iterator[Passage]:
    """Return a relay before Triton's gRPC port."""
    directory = tmp_path_factory.mktemp("relay")
    models = [
        {"name": "linear"},
        {"name": "words"},
        {"name": "steps"},
        {"name": "story", "task": "generation"},
    ]
    with passage(directory, triton.grpc_port, nats_url, models) as made:
        yield made


@pytest.fixture
def mark(way: Passage) -> Iterator[str]:
    """Return the test's mark; at the end no byte of its connections has changed on the way."""
    yield secrets.token_hex(8)
    way.check()


def typed_request() -> Any:
    """Return a request with typed contents, which Triton's client writes no more."""
    request = service_pb2.ModelInferRequest(model_name="words", model_version="1")
    text = request.inputs.add(name="text", datatype="BYTES", shape=TEXT.shape)
    text.contents.bytes_contents.extend(TEXT.tolist())
    times = request.inputs.add(name="times", datatype="INT32", shape=TIMES.shape)
    times.contents.int_contents.extend(TIMES.tolist())
    return request


def check_linear(exchange: Exchange, scores: NDArray[np.float32], x: NDArray[np.float32] = X) -> None:
    """Compare what was captured with what the client sent and got."""
    assert (exchange.protocol, exchange.model, exchange.version) == (Protocol.OIP_GRPC, "linear", "1")
    assert exchange.inputs == (tensor("x", "FP32", x),)
    assert exchange.outputs == (tensor("scores", "FP32", scores),)


@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
def test_raw_contents_pass_and_are_captured(way: Passage, mark: str, compression: str | None) -> None:
    """The client gets through the relay the message that it gets without it; both tensors are in the record."""
    request = ("linear", [grpc_input("x", "FP32", X)])
    direct = ask_grpc(way.direct, mark, *request, compression_algorithm=compression)
    relayed = ask_grpc(way.port, mark, *request, compression_algorithm=compression)
    assert serialised(relayed.get_response()) == serialised(direct.get_response())
    (exchange,) = way.captured(mark)
    check_linear(exchange, relayed.as_numpy("scores"))


def test_typed_contents_and_metadata_pass_and_are_captured(way: Passage, mark: str) -> None:
    """Message, initial and trailing metadata are the server's own; BYTES elements of any content are in the record."""
    answers = []
    for port in (way.direct, way.port):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            infer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer
            message, call = infer.with_call(typed_request(), metadata=((MARK, mark),), timeout=DEADLINE_S)
            answers.append(
                (serialised(message), call.initial_metadata(), call.trailing_metadata(), call.code())
            )
    assert answers[0] == answers[1]
    (exchange,) = way.captured(mark)
    assert (exchange.model, exchange.version) == ("words", "1")
    assert exchange.inputs == (tensor("text", "BYTES", TEXT), tensor("times", "INT32", TIMES))
    loud = np.array([text.upper() * int(TIMES[0]) for text in TEXT], dtype=np.object_)
    length = np.array([len(text) for text in loud], dtype=np.int32)
    assert exchange.outputs == (tensor("loud", "BYTES", loud), tensor("length", "INT32", length))


def test_compressed_answers_are_read(way: Passage, mark: str) -> None:
    """A response message that the server compresses is captured decompressed."""
    text = np.array([b"many times the same, " * 500], dtype=np.object_)
    relayed = ask_grpc(
        way.port, mark, "words", [grpc_input("text", "BYTES", text), grpc_input("times", "INT32", TIMES)]
    )
    loud, length = relayed.as_numpy("loud"), relayed.as_numpy("length")
    ((_, down),) = way.check()
    assert len(down) < len(loud[0])
    (exchange,) = way.captured(mark)
    assert exchange.outputs == (tensor("loud", "BYTES", loud), tensor("length", "INT32", length))


def test_many_requests_at_once_on_one_connection_are_told_apart(way: Passage, mark: str) -> None:
    """Streams of one HTTP/2 connection overlap; each exchange has its own request's answer."""
    n = 60
    xs = [np.full((1, 4), number / n, np.float32) for number in range(n)]
    done: queue.Queue[tuple[int, Any, Any]] = queue.Queue()
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{way.port}") as client:
        for number, x in enumerate(xs):

            def keep(result: Any, error: Any, number: int = number) -> None:
                done.put((number, result, error))

            client.async_infer("linear", [grpc_input("x", "FP32", x)], keep, headers={MARK: mark})
        answers = [done.get(timeout=DEADLINE_S) for _ in xs]
    assert all(error is None for _, _, error in answers)
    expected = {xs[number].tobytes(): result.as_numpy("scores") for number, result, _ in answers}
    exchanges = way.captured(mark, n)
    assert {exchange.inputs[0].data for exchange in exchanges} == expected.keys()
    for exchange in exchanges:
        x = np.frombuffer(exchange.inputs[0].data, np.float32).reshape(1, 4)
        check_linear(exchange, expected[exchange.inputs[0].data], x)


def test_a_large_tensor_passes_under_flow_control(way: Passage, mark: str) -> None:
    """Megabytes in both directions, many frames and window updates: nothing changes, all of it is captured."""
    text = np.array([secrets.token_bytes(3_000_000)], dtype=np.object_)
    once = np.array([1], dtype=np.int32)
    request = ("words", [grpc_input("text", "BYTES", text), grpc_input("times", "INT32", once)])
    relayed = ask_grpc(way.port, mark, *request)
    np.testing.assert_array_equal(relayed.as_numpy("loud"), [text[0].upper()])
    (exchange,) = way.captured(mark)
    assert exchange.inputs[0] == tensor("text", "BYTES", text)
    assert exchange.outputs[0] == tensor("loud", "BYTES", relayed.as_numpy("loud"))


def stream(port: int, mark: str, model: str, requests: list[list[Any]], n: int, **given: Any) -> list[Any]:
    """Send requests on one stream, and return the `n` messages that come back."""
    got: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
        client.start_stream(lambda result, error: got.put((result, error)), headers={MARK: mark})
        for number, inputs in enumerate(requests):
            client.async_stream_infer(model, inputs, request_id=str(number), **given)
        answers = [got.get(timeout=DEADLINE_S) for _ in range(n)]
        client.stop_stream()
    assert all(error is None for _, error in answers)
    return [result for result, _ in answers]


def test_a_stream_of_requests_is_captured_as_one_exchange(way: Passage, mark: str) -> None:
    """Each request has its response: together they are a batch."""
    requests = [[grpc_input("x", "FP32", X[row : row + 1])] for row in range(len(X))]
    direct = stream(way.direct, mark, "linear", requests, len(X))
    relayed = stream(way.port, mark, "linear", requests, len(X))
    assert by_id(relayed) == by_id(direct)
    (exchange,) = way.captured(mark)
    assert (exchange.protocol, exchange.model) == (Protocol.OIP_GRPC_STREAM, "linear")
    rows = {result.get_response().id: result.as_numpy("scores") for result in relayed}
    assert exchange.inputs == (tensor("x", "FP32", X),)
    assert exchange.outputs == (
        tensor("scores", "FP32", np.concatenate([rows[str(row)] for row in range(len(X))])),
    )


def test_a_stream_that_is_no_batch_is_an_exchange_for_each_request(way: Passage, mark: str) -> None:
    """Requests with different numbers of texts and lengths: each is paired with its response, and counted."""
    offered = way.offered()
    texts = [np.array([b"a"], dtype=np.object_), np.array([b"bb", b"ccc"], dtype=np.object_)]
    once = grpc_input("times", "INT32", np.array([1], dtype=np.int32))
    requests = [[grpc_input("text", "BYTES", text), once] for text in texts]
    direct = stream(way.direct, mark, "words", requests, 2)
    relayed = stream(way.port, mark, "words", requests, 2)
    assert by_id(relayed) == by_id(direct)
    exchanges = {exchange.inputs[0].shape: exchange for exchange in way.captured(mark, 2)}
    for text in texts:
        exchange = exchanges[text.shape]
        assert exchange.inputs[0] == tensor("text", "BYTES", text)
        assert exchange.outputs[0] == tensor(
            "loud", "BYTES", np.char.upper(text.astype("S")).astype(np.object_)
        )
        assert exchange.latency is None
    assert len({exchange.group for exchange in exchanges.values()}) == 1
    assert way.offered() == offered + 2


def test_a_stream_with_many_answers_to_a_request_passes_and_is_counted(way: Passage, mark: str) -> None:
    """A decoupled model answers one request three times, which no reference does: a loss with a reason."""
    before = way.lost("unpaired")
    n, base = np.array([3], dtype=np.int32), np.array([1.5], dtype=np.float32)
    requests = [[grpc_input("n", "INT32", n), grpc_input("base", "FP32", base)]]
    seen = [
        stream(port, mark, "steps", requests, 4, enable_empty_final_response=True)
        for port in (way.direct, way.port)
    ]
    direct, relayed = ([serialised(answer.get_response()) for answer in answers] for answers in seen)
    assert relayed == direct
    wait(lambda: way.lost("unpaired") == before + 1, "it is counted")


def test_the_pieces_of_a_text_are_one_answer(way: Passage, mark: str) -> None:
    """A decoupled model of text: each text of a stream is an exchange with all that was said to it."""
    texts = ["what drifts here", "one", "the relay forwards bytes"]
    requests = [[grpc_input("text_input", "BYTES", np.array([t.encode()], dtype=np.object_))] for t in texts]
    n = sum(len(text.split()) for text in texts) + len(texts)
    direct, relayed = (
        stream(port, mark, "story", requests, n, enable_empty_final_response=True)
        for port in (way.direct, way.port)
    )
    for number in map(str, range(len(texts))):
        of_direct, of_relayed = (
            [serialised(one.get_response()) for one in answers if one.get_response().id == number]
            for answers in (direct, relayed)
        )
        assert of_relayed == of_direct
    answered = {}
    for exchange in way.captured(mark, len(texts)):
        inputs, candidate = scoring_inputs(exchange)
        answered[inputs["prompt"][0]] = candidate["answer"][0].text
    assert answered == {text: text.upper() for text in texts}


def test_a_refusal_passes_and_is_counted(way: Passage, mark: str) -> None:
    """A gRPC status other than OK reaches the client as it is, and is a loss with a reason."""
    before = way.lost("error_status")
    seen = []
    for port in (way.direct, way.port):
        with pytest.raises(InferenceServerException, match="shape") as refused:
            ask_grpc(port, mark, "linear", [grpc_input("x", "FP32", X[:, :3])])
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
        with triton_grpc.InferenceServerClient(f"127.0.0.1:{way.port}") as client:
            client.register_system_shared_memory("region", key, X.nbytes)
            given = triton_grpc.InferInput("x", list(X.shape), "FP32")
            given.set_shared_memory("region", X.nbytes)
            shared = client.infer("linear", [given], headers={MARK: mark}).as_numpy("scores")
            client.unregister_system_shared_memory("region")
    finally:
        shm.destroy_shared_memory_region(region)
    np.testing.assert_array_equal(
        shared, ask_grpc(way.direct, mark, "linear", [grpc_input("x", "FP32", X)]).as_numpy("scores")
    )
    wait(lambda: way.lost("shared_memory") == before + 1, "it is counted")


def by_id(answers: list[Any]) -> dict[str, bytes]:
    """Return the messages of a stream by the ids of their requests."""
    return {answer.get_response().id: serialised(answer.get_response()) for answer in answers}
