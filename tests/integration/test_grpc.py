"""gRPC through the relay, with Triton's client library and grpcio's server: the same answers, and the tensors in the record."""

import asyncio
import json
import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import ml_dtypes
import msgspec
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from quantdrift.core.config import Config, SamplingOptions
from quantdrift.core.config.schema import Model
from quantdrift.core.records import Exchange, Loss, Protocol, Tensor
from quantdrift.core.tasks import Task
from quantdrift.models.language.from_exchange import scoring_inputs
from quantdrift.sidecar.capture.recorder import Recorder, SidecarIdentity
from quantdrift.sidecar.protocols.errors import LostError
from quantdrift.sidecar.relay.connection import QUIET_S, Relay
from quantdrift.sidecar.state.config import LiveConfig
from quantdrift.sidecar.state.counters import Count, Gauge
from tests.support.sidecar.grpc_backend import Doubling, running_grpc
from tests.support.sidecar.raw_exchanges import all_recorded_by, recorded_by
from tests.support.sidecar.relay_process import sidecar, wait
from tests.support.sidecar.relay_rig import DEADLINE_S, Bench, Taken, rig, until

pytestmark = pytest.mark.integration

CONFIG = Config(models=(Model(name="digits"),), sampling=SamplingOptions(rate=1.0))
ORIGIN = SidecarIdentity(source="pod", version="", salt=b"s", hmac_key=b"")
SEED = 20_261_121


@pytest.fixture
def server() -> Iterator[tuple[Doubling, int]]:
    """Return a running server's servicer, and its port."""
    with running_grpc() as running:
        yield running


def recorded(taken: Taken) -> Exchange:
    """Return what the capture process makes of an exchange."""
    exchange = recorded_by(Recorder(LiveConfig.of(CONFIG), ORIGIN), taken.meta, taken.request, taken.response)
    assert exchange is not None
    return exchange


def arrays() -> list[tuple[str, np.ndarray[Any, Any]]]:
    """Return content of every datatype that Triton's client sends."""
    seeded = np.random.default_rng(SEED)
    whole = ["INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"]
    return [
        *((name, seeded.integers(0, 100, (2, 3)).astype(name.lower())) for name in whole),
        ("BOOL", seeded.random((2, 3)) < 0.5),
        ("FP16", seeded.random((2, 3)).astype(np.float16)),
        ("FP32", seeded.random((2, 3), dtype=np.float32)),
        ("FP64", seeded.random((2, 3))),
        ("BF16", seeded.random((2, 3)).astype(ml_dtypes.bfloat16)),
        ("BYTES", np.array([[b"", b"a\x00", "ü".encode()], [b"b" * 300, b"c", b"d"]], dtype=np.object_)),
    ]


def asked(name: str, datatype: str, array: np.ndarray[Any, Any]) -> Any:
    """Return an input of a request."""
    tensor = triton.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


def raw(tensor: Any, contents: bytes, name: str) -> Tensor:
    """Return a tensor of Triton's messages as it should be in the record."""
    return Tensor(name=name, datatype=tensor.datatype, shape=tuple(tensor.shape), data=contents)


def infer(port: int, *inputs: Any, **options: Any) -> Any:
    """Return the response to one request."""
    with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
        return client.infer("digits", list(inputs), client_timeout=DEADLINE_S, **options).get_response()


async def through(
    port: int, *inputs: Any, bench: Bench | None = None, **options: Any
) -> tuple[Any, Any, Bench]:
    """Return the response to a request asked directly, that to the same through a relay, and what it took."""
    bench = bench or Bench()
    async with rig(bench, port) as at:
        direct = await asyncio.to_thread(infer, port, *inputs, **options)
        relayed = await asyncio.to_thread(infer, at.port, *inputs, **options)
        await at.quiet()
    assert bench.slot.gauge(Gauge.BLIND) == bench.slot.gauge(Gauge.OBSERVER_ERRORS) == bench.balance() == 0
    return direct, relayed, bench


@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
async def test_tensors_of_every_type_are_recorded_as_they_were_sent(
    server: tuple[Doubling, int], compression: str | None
) -> None:
    """Request and response, whatever compresses them; the response is the server's, byte for byte."""
    inputs = [asked(f"x_{name}", name, array) for name, array in arrays()]
    direct, relayed, bench = await through(
        server[1],
        *inputs,
        request_id="r1",
        headers={
            "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "x-request-id": "mine",
        },
        compression_algorithm=compression,
        parameters={"compress": True, "tenant": "t"} if compression else {"tenant": "t"},
    )
    assert relayed.SerializeToString(deterministic=True) == direct.SerializeToString(deterministic=True)
    (taken,) = bench.taken
    assert (b"grpc-encoding: " + (compression or "-").encode() in taken.request) is bool(compression)
    assert (b"grpc-encoding: gzip" in taken.response) is bool(compression)
    exchange = recorded(taken)
    assert exchange.protocol is Protocol.OIP_GRPC
    assert (exchange.model, exchange.version, exchange.trace) == (
        "digits",
        "7",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    )
    assert exchange.attributes == {"header.x-request-id": "mine"}
    assert exchange.inputs == tuple(
        raw(each._get_tensor(), each._get_content(), each.name()) for each in inputs
    )
    assert exchange.outputs == tuple(
        raw(output, contents, output.name)
        for output, contents in zip(direct.outputs, direct.raw_output_contents, strict=True)
    )


async def test_a_large_tensor_in_many_frames_is_recorded_whole(server: tuple[Doubling, int]) -> None:
    """An image of 3x224x224 numbers, among the frames of flow control."""
    array = np.random.default_rng(SEED).random((1, 3, 224, 224), dtype=np.float32)
    direct, relayed, bench = await through(server[1], asked("x", "FP32", array))
    assert relayed == direct
    exchange = recorded(bench.taken[0])
    assert exchange.inputs[0].data == array.tobytes()
    assert exchange.outputs[0].data == direct.raw_output_contents[0]


def typed() -> Any:
    """Return a request with typed contents."""
    request = service_pb2.ModelInferRequest(model_name="digits", model_version="3", id="r1")
    for datatype, field, values in (
        ("BOOL", "bool_contents", [True, False]),
        ("INT8", "int_contents", [-128, 127]),
        ("INT32", "int_contents", [-(2**31), 2**31 - 1]),
        ("INT64", "int64_contents", [-(2**63), 2**63 - 1]),
        ("UINT16", "uint_contents", [0, 65_535]),
        ("UINT64", "uint64_contents", [0, 2**64 - 1]),
        ("FP32", "fp32_contents", [0.5, float("nan")]),
        ("FP64", "fp64_contents", [0.1, float("-inf")]),
        ("BYTES", "bytes_contents", [b"", b"\x00ab"]),
    ):
        tensor = request.inputs.add(name=f"x_{datatype}", datatype=datatype, shape=[1, 2])
        getattr(tensor.contents, field).extend(values)
    return request


async def test_typed_contents_are_recorded_as_bytes(server: tuple[Doubling, int]) -> None:
    """As numpy has them, each type from its own field."""
    bench = Bench()

    def ask(port: int) -> Any:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            return service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(typed())

    async with rig(bench, server[1]) as at:
        relayed = await asyncio.to_thread(ask, at.port)
        direct = await asyncio.to_thread(ask, server[1])
    assert relayed.SerializeToString(deterministic=True) == direct.SerializeToString(deterministic=True)
    exchange = recorded(bench.taken[0])
    expected = {
        "BOOL": b"\x01\x00",
        "INT8": b"\x80\x7f",
        "INT32": np.array([-(2**31), 2**31 - 1], "<i4").tobytes(),
        "INT64": np.array([-(2**63), 2**63 - 1], "<i8").tobytes(),
        "UINT16": b"\x00\x00\xff\xff",
        "UINT64": bytes(8) + b"\xff" * 8,
        "FP32": np.array([0.5, np.nan], "<f4").tobytes(),
        "FP64": np.array([0.1, -np.inf], "<f8").tobytes(),
        "BYTES": bytes(4) + b"\x03\x00\x00\x00\x00ab",
    }
    assert {each.datatype: each.data for each in exchange.inputs} == expected
    assert {each.datatype: each.data for each in exchange.outputs} == {k: 2 * v for k, v in expected.items()}
    assert {each.shape for each in exchange.outputs} == {(1, 4)}


Asking = tuple[str, np.ndarray[Any, Any], dict[str, Any]]


class Conversation:
    """A stream of Triton's client library."""

    def __init__(self, port: int) -> None:
        self._client = triton.InferenceServerClient(f"127.0.0.1:{port}")
        self._results: queue.Queue[tuple[Any, Any]] = queue.Queue()

    def ask(self, requests: list[Asking]) -> list[Any]:
        """Send requests on one stream, and return its responses or errors once it has ended."""
        self._client.start_stream(lambda result, error: self._results.put((result, error)))
        for identifier, array, parameters in requests:
            self._client.async_stream_infer(
                "digits", [asked("x", "FP32", array)], request_id=identifier, parameters=parameters
            )
        self._client.stop_stream()
        self._client.close()
        found = []
        while not self._results.empty():
            result, error = self._results.get()
            found.append(error or result.get_response())
        return found


ROWS = [np.full((n + 1, 2), n, np.float32) for n in range(3)]


@pytest.mark.parametrize("named", [True, False])
async def test_a_stream_of_requests_is_one_exchange_of_many_items(
    server: tuple[Doubling, int], *, named: bool
) -> None:
    """Its tensors lie one after the other, as a batch's would, requests and responses in the same order."""
    bench = Bench()
    requests: list[Asking] = [(f"r{n}" if named else "", array, {}) for n, array in enumerate(ROWS)]
    async with rig(bench, server[1]) as at:
        responses = await asyncio.to_thread(lambda: Conversation(at.port).ask(requests))
        direct = await asyncio.to_thread(lambda: Conversation(server[1]).ask(requests))
        await until(lambda: bool(bench.taken))
    assert responses == direct
    assert bench.slot.count(0, Count.OFFERED) == 1
    exchange = recorded(bench.taken[0])
    assert exchange.protocol is Protocol.OIP_GRPC_STREAM
    assert exchange.inputs == (
        Tensor(name="x", datatype="FP32", shape=(6, 2), data=np.concatenate(ROWS).tobytes()),
    )
    together = np.concatenate([np.concatenate([rows, rows], axis=-1) for rows in ROWS])
    assert exchange.outputs == (Tensor(name="y_x", datatype="FP32", shape=(6, 4), data=together.tobytes()),)


@pytest.mark.parametrize(
    ("parameters", "loss"),
    [
        ({"n_responses": 3}, Loss.UNPAIRED),
        ({"n_responses": 0}, Loss.UNPAIRED),
        ({"fail": True}, Loss.ERROR_STATUS),
    ],
)
async def test_a_stream_that_cannot_be_paired_is_lost_and_counted(
    server: tuple[Doubling, int], parameters: dict[str, Any], loss: Loss
) -> None:
    """A decoupled model's many responses or none, a failed request, a sequence: never guessed."""
    bench = Bench()
    async with rig(bench, server[1]) as at:
        await asyncio.to_thread(lambda: Conversation(at.port).ask([("r1", ROWS[0], parameters)]))
        await until(lambda: bool(bench.taken))
    with pytest.raises(LostError) as caught:
        recorded(bench.taken[0])
    assert caught.value.loss is loss


@pytest.mark.parametrize(
    ("ids", "loss"), [(("a",), None), (("",), None), (("a", "b"), None), (("", ""), Loss.UNPAIRED)]
)
async def test_the_pieces_of_a_text_are_one_answer(
    server: tuple[Doubling, int], ids: tuple[str, ...], loss: Loss | None
) -> None:
    """A decoupled model sends a response for each piece, of several requests in turns: their ids tell them apart."""
    texts = ["größe drifts here", "the relay forwards all bytes"][: len(ids)]
    options = np.array([b'{"temperature": "0", "max_tokens": 8}'], dtype=np.object_)

    def ask(port: int) -> list[Any]:
        got: queue.Queue[tuple[Any, Any]] = queue.Queue()
        with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
            client.start_stream(lambda result, error: got.put((result, error)))
            for identifier, text in zip(ids, texts, strict=True):
                inputs = [
                    asked("text_input", "BYTES", np.array([text.encode()], dtype=np.object_)),
                    asked("sampling_parameters", "BYTES", options),
                ]
                client.async_stream_infer("story", inputs, request_id=identifier)
            client.stop_stream()
        answers = [got.get_nowait() for _ in range(got.qsize())]
        assert all(error is None for _, error in answers)
        return [result.get_response() for result, _ in answers]

    bench = Bench()
    async with rig(bench, server[1]) as at:
        relayed = await asyncio.to_thread(ask, at.port)
        direct = await asyncio.to_thread(ask, server[1])
        await until(lambda: bool(bench.taken))
    assert relayed == direct
    assert len(relayed) > len(ids) + 2
    config = msgspec.structs.replace(CONFIG, models=(Model(name="story", task=Task.GENERATION),))
    recorder = Recorder(LiveConfig.of(config), ORIGIN)
    taken = bench.taken[0]
    if loss is not None:
        with pytest.raises(LostError) as caught:
            all_recorded_by(recorder, taken.meta, taken.request, taken.response)
        assert caught.value.loss is loss
        return
    exchanges = all_recorded_by(recorder, taken.meta, taken.request, taken.response)
    found = []
    for exchange in exchanges:
        inputs, candidate = scoring_inputs(exchange)
        (request,), (answer,) = inputs["request"].tolist(), candidate["answer"].tolist()
        assert answer.is_greedy
        found.append((request.prompt, request.served))
    assert found == [(text, " ".join(word.upper() for word in text.split())) for text in texts]
    assert len({exchange.id for exchange in exchanges}) == len(ids)


async def test_an_error_is_the_servers_and_is_counted_as_one(server: tuple[Doubling, int]) -> None:
    """The client sees status and message as they were sent; the record has none of it."""
    bench = Bench()
    async with rig(bench, server[1]) as at:
        with pytest.raises(InferenceServerException, match="asked to fail: naïve"):
            await asyncio.to_thread(infer, at.port, asked("x", "FP32", ROWS[0]), parameters={"fail": True})
        await at.quiet()
    with pytest.raises(LostError) as caught:
        recorded(bench.taken[0])
    assert caught.value.loss is Loss.ERROR_STATUS


async def test_concurrent_calls_on_one_channel_are_separate_exchanges(server: tuple[Doubling, int]) -> None:
    """Many streams of one connection at once, each with values of its own."""
    bench = Bench()

    def ask(port: int) -> None:
        with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
            results: queue.Queue[Any] = queue.Queue()
            for n in range(40):
                array = np.full((1, 1 + 4000 * (n % 3)), n, np.float32)
                client.async_infer(
                    "digits", [asked("x", "FP32", array)], lambda result, error: results.put((result, error))
                )
            assert all(results.get(timeout=30)[1] is None for _ in range(40))

    async with rig(bench, server[1]) as at:
        await asyncio.to_thread(ask, at.port)
        await at.quiet()
    assert bench.slot.gauge(Gauge.CONNECTIONS) == 1
    exchanges = [recorded(taken) for taken in bench.taken]
    values = [np.frombuffer(each.inputs[0].data, "<f4") for each in exchanges]
    assert sorted(array[0] for array in values) == list(range(40))
    assert all(len(set(array)) == 1 for array in values)
    assert all(each.outputs[0].data == 2 * each.inputs[0].data for each in exchanges)


class Workers:
    """Relay workers on one port: the kernel gives new connections to those that still accept."""

    def __init__(self, backend_port: int) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.port = self.listener.getsockname()[1]
        self.benches: list[Bench] = []
        self._backend_port = backend_port

    async def start(self) -> tuple[Relay, asyncio.Server]:
        """Start one more."""
        loop = asyncio.get_running_loop()
        self.benches.append(Bench())
        relay = Relay("127.0.0.1", self._backend_port, self.benches[-1].scope, loop)
        return relay, await loop.create_server(relay.accept, sock=self.listener.dup())


async def test_draining_a_worker_loses_no_request_of_a_client_that_rests(
    server: tuple[Doubling, int],
) -> None:
    """It is closed once it has been quiet, and its client, which is not told before, connects to the next worker."""
    workers = Workers(server[1])
    first, accepting = await workers.start()
    with triton.InferenceServerClient(f"127.0.0.1:{workers.port}") as client:

        def ask() -> None:
            client.infer("digits", [asked("x", "FP32", ROWS[0])])

        await asyncio.to_thread(ask)
        second, also_accepting = await workers.start()
        accepting.close()
        draining = asyncio.create_task(first.drain())
        now_s = first.loop.time()
        (connection,) = first.connections
        connection.expire(now_s)
        await asyncio.to_thread(ask)
        connection.expire(now_s + QUIET_S)  # it was not quiet
        assert not draining.done()
        connection.expire(now_s + 2 * QUIET_S)
        await draining
        await asyncio.to_thread(ask)
        assert [len(bench.taken) for bench in workers.benches] == [2, 1]
    second.abort()
    also_accepting.close()
    await until(lambda: not second.connections)
    workers.listener.close()


RETRIES = {
    "methodConfig": [
        {
            "name": [{}],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.01s",
                "maxBackoff": "0.1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}


async def test_draining_loses_no_request_of_a_client_that_retries(server: tuple[Doubling, int]) -> None:
    """Busy without a pause, it is closed between calls or cut in one; gRPC's own retries make good for it."""
    workers, stop = Workers(server[1]), threading.Event()
    options = [("grpc.service_config", json.dumps(RETRIES))]
    answered = 0

    def ask() -> None:
        nonlocal answered
        request = service_pb2.ModelInferRequest(model_name="digits", raw_input_contents=[bytes(8)])
        request.inputs.add(name="x", datatype="FP32", shape=[1, 2])
        with grpc.insecure_channel(f"127.0.0.1:{workers.port}", options) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            while not stop.is_set():
                stub.ModelInfer(request, timeout=DEADLINE_S)
                answered += 1

    async def more() -> None:
        before = answered
        await until(lambda: answered >= before + 20 or asking.done())

    relay, accepting = await workers.start()
    asking = asyncio.gather(*(asyncio.to_thread(ask) for _ in range(3)))
    try:
        for hard in (False, True, False):
            await more()
            following, also_accepting = await workers.start()
            accepting.close()
            for connection in list(relay.connections):
                if hard:
                    connection.abort()
                else:
                    connection.drain(patient=False)
            await until(lambda: not relay.connections or asking.done())  # noqa: B023 - called at once
            relay, accepting = following, also_accepting
        await more()
    finally:
        stop.set()
        await asking
    assert all(bench.taken for bench in workers.benches)
    relay.abort()
    accepting.close()
    await until(lambda: not relay.connections)
    assert all(bench.balance() == 0 for bench in workers.benches)
    workers.listener.close()


async def test_a_server_that_ages_its_connections_loses_no_request() -> None:
    """Its farewell passes through: the client moves to a new connection by itself, which is followed from its start."""
    bench = Bench()
    options = ("grpc.max_connection_age_ms", 50), ("grpc.max_connection_age_grace_ms", 20_000)

    def ask(port: int) -> int:
        with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
            for n in range(1000):
                client.infer("digits", [asked("x", "FP32", ROWS[0])], client_timeout=DEADLINE_S)
                if bench.slot.gauge(Gauge.CONNECTIONS) > 3:
                    return n + 1
        return 0

    with running_grpc(*options) as (_, port):
        async with rig(bench, port) as at:
            n_asked = await asyncio.to_thread(ask, at.port)
            await at.quiet()
    assert 0 < n_asked == len(bench.taken)
    assert bench.slot.gauge(Gauge.BLIND) == bench.balance() == 0


def test_a_sidecar_serves_grpc(tmp_path: Path, server: tuple[Doubling, int]) -> None:
    """Processes and all: answers are right, calls are counted, those that are no inference are ignored."""
    with (
        sidecar(tmp_path, server[1], SAMPLING__RATE=0.5) as running,
        triton.InferenceServerClient(f"127.0.0.1:{running.port}") as client,
    ):
        for n in range(50):
            result = client.infer("digits", [asked("x", "FP32", ROWS[n % 3])])
            assert np.array_equal(result.as_numpy("y_x"), np.concatenate([ROWS[n % 3]] * 2, axis=-1))
        with pytest.raises(InferenceServerException, match=r"not implemented|UNIMPLEMENTED"):
            client.is_server_live()
        wait(
            lambda: running.count("quantdrift_sidecar_offered_total", stratum="default") == 50,
            "all are counted",
        )
        assert 10 <= running.count("quantdrift_sidecar_taken_total", stratum="default") <= 40
        assert running.count("quantdrift_sidecar_ignored_total") == 1
        assert running.count("quantdrift_sidecar_connections_total") == 1
        assert running.count("quantdrift_sidecar_blind_connections_total") == 0
        client.close()
        wait(lambda: running.count("quantdrift_sidecar_open_connections") == 0, "the connection is over")
