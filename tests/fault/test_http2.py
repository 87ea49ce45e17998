"""HTTP/2 when something goes wrong: the bytes flow, clients see what they would see without a relay, losses are counted."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2, service_pb2_grpc

from quantdrift.core.records import Loss
from quantdrift.sidecar.relay.http2 import observer as http2
from quantdrift.sidecar.relay.http2.frames import Frames
from quantdrift.sidecar.relay.http2.hpack import HeaderBlockDecoder
from quantdrift.sidecar.relay.http2.observer import Http2Observer
from quantdrift.sidecar.relay.observing import observer
from quantdrift.sidecar.relay.protocol_detection import ProtocolDetector
from quantdrift.sidecar.sampling.first_phase import Sampler
from quantdrift.sidecar.state.counters import Count, Gauge
from tests.support.sidecar.grpc_backend import Doubling, running_grpc
from tests.support.sidecar.http2_wire import ANSWER, OPENING, Ends, data, headers, reset, settings
from tests.support.sidecar.planted_faults import failing
from tests.support.sidecar.relay_ends import relayed
from tests.support.sidecar.relay_process import sidecar, wait
from tests.support.sidecar.relay_rig import DEADLINE_S, Bench, rig, until

pytestmark = pytest.mark.fault

# Everything that is called back while a connection is observed.
POINTS: list[tuple[Any, str]] = [
    (ProtocolDetector, "request"),
    (ProtocolDetector, "response"),
    (Http2Observer, "__init__"),
    (Http2Observer, "request"),
    (Http2Observer, "response"),
    (Http2Observer, "_request_block"),
    (Http2Observer, "_request_piece"),
    (Http2Observer, "_request_end"),
    (Http2Observer, "_response_block"),
    (Http2Observer, "_response_piece"),
    (Http2Observer, "_response_end"),
    (Http2Observer, "_begin_head"),
    (Http2Observer, "_extend_head"),
    (Http2Observer, "_reset"),
    (Http2Observer, "_complete"),
    (Http2Observer, "_keep"),
    (Http2Observer, "_hand_over"),
    (Frames, "__init__"),
    (Frames, "feed"),
    (Frames, "_add"),
    (Frames, "allow"),
    (HeaderBlockDecoder, "read"),
    (Sampler, "key_for_headers"),
    (Sampler, "take"),
    (http2, "request_head"),
    (observer, "frame"),
]


@pytest.fixture
def server() -> Iterator[tuple[Doubling, int]]:
    """Return a running server's servicer, and its port."""
    with running_grpc() as running:
        yield running


def conversation() -> list[tuple[bool, bytes]]:
    """Return three calls on a connection, of which one is reset."""
    ends = Ends()
    steps = [(False, ANSWER[:9]), (True, OPENING), (False, ANSWER[9:] + settings((5, 20_000)))]
    for stream in (1, 3, 5):
        request = headers(stream, ends.request(("x-n", str(stream))))
        steps += [(True, request), (True, data(stream, b"x" * 50_000, ends=True)[:-3]), (True, b"xxx")]
        response = headers(stream, ends.response()) + data(stream, b"y" * 20_000)
        steps += [(False, response[:100]), (False, response[100:])]
        end = headers(stream, ends.trailers(), ends=True)
        steps.append((False, reset(stream) if stream == 3 else end))
    return steps


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize(("owner", "name"), POINTS, ids=[f"{o.__name__}.{n}" for o, n in POINTS])
def test_bytes_flow_wherever_the_observer_raises(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, nth: int
) -> None:
    """At its first call or later: both sides get every byte, what was taken is counted, and the error too."""
    monkeypatch.setattr(owner, name, failing(getattr(owner, name), nth))
    bench, steps = Bench(), conversation()
    to_backend, to_client, connection = relayed(bench, steps, 0)
    assert to_backend == b"".join(chunk for from_client, chunk in steps if from_client)
    assert to_client == b"".join(chunk for from_client, chunk in steps if not from_client)
    once = {
        (ProtocolDetector, "request"),
        (ProtocolDetector, "response"),
        (Http2Observer, "__init__"),
        (Http2Observer, "_reset"),
        (Frames, "allow"),
    }
    assert bench.slot.gauge(Gauge.OBSERVER_ERRORS) == (nth == 1 or (owner, name) not in once)
    connection.client.connection_lost(None)
    connection.backend.connection_lost(None)
    assert bench.balance() == bench.scope.held_bytes == 0
    n_lost = sum(bench.lost(loss) for loss in (Loss.OBSERVER_ERROR, Loss.TRUNCATED, Loss.UNOBSERVED))
    assert n_lost + len(bench.taken) == bench.slot.count(0, Count.TAKEN)


def asked(**parameters: Any) -> Any:
    """Return a request."""
    request = service_pb2.ModelInferRequest(model_name="digits", raw_input_contents=[bytes(8)])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    for name in parameters:
        request.parameters[name].bool_param = True
    return request


async def test_a_call_that_its_client_cancels_is_lost_alone(server: tuple[Doubling, int]) -> None:
    """The server hears of it, the connection goes on, and the next call is taken."""
    servicer, port = server
    bench = Bench()

    async with rig(bench, port) as at:
        with grpc.insecure_channel(f"127.0.0.1:{at.port}") as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            call = stub.ModelInfer.future(asked(wait=True))
            await until(lambda: servicer.n_waiting == 1)
            call.cancel()
            await until(lambda: servicer.n_cancelled == 1)
            await asyncio.to_thread(stub.ModelInfer, asked(), timeout=DEADLINE_S)
        await at.quiet()
    assert bench.slot.gauge(Gauge.CONNECTIONS) == 1
    assert (bench.lost(Loss.CLIENT_ABORT), len(bench.taken)) == (1, 1)
    assert bench.balance() == bench.slot.gauge(Gauge.BLIND) == 0


async def test_a_server_that_goes_away_costs_the_calls_under_way() -> None:
    """Its client is told as it would be without a relay."""
    bench = Bench()
    with running_grpc() as (servicer, port):
        async with rig(bench, port) as at:
            with grpc.insecure_channel(f"127.0.0.1:{at.port}") as channel:
                call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer.future(asked(wait=True))
                await until(lambda: servicer.n_waiting == 1)
                for connection in at.relay.connections:
                    connection.backend.abort()
                error = await asyncio.to_thread(call.exception, DEADLINE_S)
            await at.quiet()
    assert isinstance(error, grpc.RpcError)
    assert call.code() is grpc.StatusCode.UNAVAILABLE
    assert bench.lost(Loss.TRUNCATED) == 1
    assert bench.balance() == 0


async def test_garbage_after_the_preface_gets_the_servers_own_answer(server: tuple[Doubling, int]) -> None:
    """A protocol error is a matter between client and server; the observer has let go before."""
    bench = Bench()
    wire = OPENING + b"\xff" * 100

    def talk(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as client:
            client.sendall(wire)
            got = b""
            while chunk := client.recv(65_536):
                got += chunk
        return got

    async with rig(bench, server[1]) as at:
        direct = await asyncio.to_thread(talk, server[1])
        through = await asyncio.to_thread(talk, at.port)
        await at.quiet()
    assert through == direct
    assert bench.slot.gauge(Gauge.BLIND) == 1
    assert bench.slot.gauge(Gauge.OBSERVER_ERRORS) == 0


async def test_tls_passes_through_unseen(server: tuple[Doubling, int]) -> None:
    """Whatever is in it: here a server that does not speak it, which answers as it does without a relay."""
    bench = Bench()

    def ask(port: int) -> grpc.StatusCode:
        with grpc.secure_channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials()) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                stub.ModelInfer(asked(), timeout=DEADLINE_S)
        code: grpc.StatusCode = caught.value.code()
        return code

    async with rig(bench, server[1]) as at:
        assert await asyncio.to_thread(ask, at.port) is await asyncio.to_thread(ask, server[1])
        await at.quiet()
    assert bench.slot.gauge(Gauge.BLIND) == bench.slot.gauge(Gauge.CONNECTIONS) >= 1
    assert bench.slot.count(0, Count.OFFERED) == 0


@pytest.mark.release
def test_a_killed_worker_costs_the_calls_under_way(tmp_path: Path, server: tuple[Doubling, int]) -> None:
    """The channel connects anew on the same port, to the worker's successor; what was in hand is counted as lost."""
    servicer, port = server
    array = triton.InferInput("x", [1, 2], "FP32")
    array.set_data_from_numpy(np.zeros((1, 2), np.float32))
    failed = threading.Event()
    with (
        sidecar(tmp_path, port, SAMPLING__RATE=1) as running,
        triton.InferenceServerClient(f"127.0.0.1:{running.port}") as client,
    ):

        def told(result: object, error: object) -> None:
            if result is None and error is not None:
                failed.set()

        client.async_infer("digits", [array], told, parameters={"wait": True})
        wait(lambda: servicer.n_waiting == 1, "the server works")
        running.workers[0].kill()
        assert failed.wait(DEADLINE_S)

        def answers() -> bool:
            try:
                client.infer("digits", [array], client_timeout=DEADLINE_S)
            except triton.InferenceServerException:
                return False  # the successor does not listen yet
            return True

        wait(answers, "the successor serves")
        wait(
            lambda: running.count("quantdrift_sidecar_lost_total", reason="process_ended") == 1,
            "what it had in hand is counted",
        )
