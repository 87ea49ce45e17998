"""The intake process told by a client that speaks as Envoy does: what it is told is in the stream, or counted as lost."""

import asyncio
import contextlib
import json
import socket
import struct
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from quantdrift.core.records import Protocol
from tests.support.sidecar.envoy_messages import (
    ANSWERED,
    ASKED,
    GRPC_PATH,
    METHOD,
    exchange,
    request_body,
    request_headers,
    response_body,
    response_headers,
)
from tests.support.sidecar.envoy_pod import FAINT, LIMIT_BYTES, Pod, pod
from tests.support.sidecar.grpc_backend import answer
from tests.support.sidecar.relay_process import DEADLINE_S, wait

pytestmark = pytest.mark.integration

N_STREAMS = 200
T = TypeVar("T")


def talk(made: Pod, work: Callable[[grpc.aio.Channel], Awaitable[T]]) -> T:
    """Do something with a connection to the sidecar."""

    async def connected() -> T:
        async with (
            asyncio.timeout(DEADLINE_S),
            grpc.aio.insecure_channel(f"127.0.0.1:{made.port}") as channel,
        ):
            return await work(channel)

    return asyncio.run(connected())


def told(made: Pod, *exchanges: Sequence[bytes]) -> list[grpc.StatusCode]:
    """Tell exchanges one after the other; return how the streams were closed, which this end never does."""

    async def each(channel: grpc.aio.Channel) -> list[grpc.StatusCode]:
        return [await tell(channel, messages) for messages in exchanges]

    return talk(made, each)


async def tell(channel: grpc.aio.Channel, messages: Sequence[bytes], **metadata: str) -> grpc.StatusCode:
    """Tell one exchange on a stream of its own until the other end closes it; return how it did."""
    call = channel.stream_stream(METHOD)(metadata=tuple(metadata.items()))
    with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):  # closed before everything was told
        for message in messages:
            await call.write(message)
    return await call.code()


@pytest.fixture(scope="module")
def envoyed(tmp_path_factory: pytest.TempPathFactory, nats_url: str) -> Iterator[Pod]:
    """Return a running sidecar that all tests here share."""
    with pod(tmp_path_factory.mktemp("ext-proc"), nats_url) as made:
        begin(made)
        yield made


def begin(made: Pod) -> None:
    """Wait until what is told is published."""
    made.begin(lambda: told(made, exchange(headers=FAINT)))


def test_a_request_that_envoy_reports_becomes_an_exchange(envoyed: Pod) -> None:
    """JSON, binary tensors and gRPC, in as many pieces as they come; every stream is closed as soon as it is complete."""
    values = np.arange(6, dtype="<f4").reshape(2, 3)
    tensor = {"name": "x", "shape": [2, 3], "datatype": "FP32", "parameters": {"binary_data_size": 24}}
    part = json.dumps({"inputs": [tensor]}).encode()
    request = service_pb2.ModelInferRequest(model_name="digits")
    request.inputs.add(name="x", datatype="FP32", shape=values.shape)
    request.raw_input_contents.append(values.tobytes())
    binary = {"inference-header-content-length": str(len(part)), **FAINT}
    over_grpc = exchange(
        cut(framed(request), 7),
        cut(framed(answer(request)), 5),
        {"content-type": "application/grpc", **FAINT},
        path=GRPC_PATH,
        trailers={"grpc-status": "0"},
    )
    closed = told(
        envoyed,
        exchange(cut(ASKED, 10), cut(ANSWERED, 1), FAINT),
        exchange([part, values.tobytes()], [ANSWERED], binary),
        over_grpc,
    )
    assert closed == [grpc.StatusCode.OK] * 3
    # They are published side by side.
    stored = {(one.protocol, one.inputs[0].shape): one for one in envoyed.stored(3)}
    by_json = stored[Protocol.OIP_REST, (1, 2)]
    assert by_json.attributes == {"header.x-scanner": "faint"}
    assert by_json.inputs[0].data == b"\0\0\x80?\0\0\0@"
    assert by_json.outputs[0].name == "y"
    by_bytes, by_grpc = stored[Protocol.OIP_REST, (2, 3)], stored[Protocol.OIP_GRPC, (2, 3)]
    assert by_bytes.inputs[0].data == by_grpc.inputs[0].data == values.tobytes()
    assert (by_grpc.version, by_grpc.outputs[0].shape) == ("7", (2, 6))


def test_a_call_that_failed_is_lost_by_its_trailers(envoyed: Pod) -> None:
    """Status 200, but gRPC's own says otherwise."""
    before = envoyed.lost("error_status")
    headers = {"content-type": "application/grpc", **FAINT}
    asked = [framed(service_pb2.ModelInferRequest(model_name="digits"))]
    told(envoyed, exchange(asked, [b""], headers, path=GRPC_PATH, trailers={"grpc-status": "13"}))
    wait(lambda: envoyed.lost("error_status") == before + 1, "it is counted")


def test_what_is_not_taken_is_closed_after_its_headers(envoyed: Pod) -> None:
    """So is what is no inference; Envoy goes on by itself where a stream ends without an error."""
    offered, ignored = envoyed.count("offered", stratum="default"), envoyed.count("ignored")
    closed = told(
        envoyed, [request_headers()], [request_headers(path="/metrics")], [request_headers(observes=False)]
    )
    assert closed == [grpc.StatusCode.OK] * 3
    wait(lambda: envoyed.count("offered", stratum="default") == offered + 2, "they are counted")
    assert envoyed.count("ignored") == ignored + 1
    assert envoyed.count("taken", stratum="default") == 0


def test_a_stream_that_is_cut_is_lost(envoyed: Pod) -> None:
    """A client went away in the middle, and Envoy reset its own stream; or it ended the stream early."""
    before, taken = envoyed.lost("truncated"), envoyed.count("taken")

    async def cut_off(channel: grpc.aio.Channel) -> None:
        calls = [channel.stream_stream(METHOD)() for _ in range(2)]
        for call in calls:
            for message in (request_headers(FAINT), request_body(ASKED, ends=True), response_headers()):
                await call.write(message)
        await asyncio.to_thread(wait, lambda: envoyed.count("taken") == taken + 2, "both are taken")
        calls[0].cancel()
        await calls[1].done_writing()
        assert await calls[1].code() is grpc.StatusCode.OK

    talk(envoyed, cut_off)
    wait(lambda: envoyed.lost("truncated") == before + 2, "both are counted")


def test_two_hundred_streams_at_once(envoyed: Pod) -> None:
    """On one connection, their messages mixed: each is an exchange of its own."""
    queries = [
        json.dumps({"inputs": [{"name": "x", "shape": [1], "datatype": "INT64", "data": [n]}]}).encode()
        for n in range(N_STREAMS)
    ]

    async def at_once(channel: grpc.aio.Channel) -> list[grpc.StatusCode]:
        calls = [channel.stream_stream(METHOD)() for _ in queries]
        told = [exchange(cut(query, 20), cut(ANSWERED, 50), FAINT) for query in queries]
        for place in range(max(map(len, told))):
            for call, messages in zip(calls, told, strict=True):
                if place < len(messages):
                    await call.write(messages[place])
        return [await call.code() for call in calls]

    assert set(talk(envoyed, at_once)) == {grpc.StatusCode.OK}
    stored = envoyed.stored(N_STREAMS)
    assert sorted(struct.unpack("<q", one.inputs[0].data)[0] for one in stored) == list(range(N_STREAMS))
    assert len({one.id for one in stored}) == N_STREAMS
    wait(lambda: envoyed.running.count("quantdrift_sidecar_held_bytes") == 0, "nothing is held")


def test_an_exchange_that_is_too_large_is_dropped(envoyed: Pod) -> None:
    """In many pieces, or in one above what gRPC may receive at all; the next exchange is taken in."""
    before, cut_short = envoyed.lost("too_large"), envoyed.lost("truncated")
    pieces = [request_headers(FAINT), *[request_body(bytes(100_000)) for _ in range(20)]]
    told(envoyed, pieces)
    wait(lambda: envoyed.lost("too_large") == before + 1, "it is counted")
    told(envoyed, [request_headers(FAINT), request_body(bytes(3 * LIMIT_BYTES))])
    wait(lambda: envoyed.lost("truncated") == cut_short + 1, "it is counted")
    told(envoyed, exchange(headers=FAINT))
    assert len(envoyed.stored(1)) == 1


def test_a_killed_intake_opens_its_port_again(envoyed: Pod) -> None:
    """What it had in hand is counted as lost by its successor."""
    before, taken = envoyed.lost("process_ended"), envoyed.count("taken")

    async def kill(channel: grpc.aio.Channel) -> None:
        call = channel.stream_stream(METHOD)()
        await call.write(request_headers(FAINT))
        await asyncio.to_thread(wait, lambda: envoyed.count("taken") == taken + 1, "it is taken")
        envoyed.intake().kill()
        assert await call.code() is grpc.StatusCode.UNAVAILABLE

    talk(envoyed, kill)
    begin(envoyed)
    assert envoyed.lost("process_ended") == before + 1


@pytest.mark.release
def test_an_exchange_under_way_may_end_after_sigterm(tmp_path: Path, nats_url: str) -> None:
    """New streams are refused, and what was taken before is published."""
    with pod(tmp_path, nats_url, SIDECAR__DRAIN_DELAY_S=0) as made:
        begin(made)
        taken = made.count("taken")

        async def late(channel: grpc.aio.Channel) -> grpc.StatusCode:
            call = channel.stream_stream(METHOD)()
            await call.write(request_headers(FAINT))
            await call.write(request_body(ASKED, ends=True))
            await asyncio.to_thread(wait, lambda: made.count("taken") == taken + 1, "it is taken")
            made.running.process.terminate()
            await asyncio.to_thread(wait, lambda: not listens(made.port), "the port is closed")
            await call.write(response_headers())
            await call.write(response_body(ANSWERED, ends=True))
            return await call.code()

        assert talk(made, late) is grpc.StatusCode.OK
        assert made.running.process.wait(DEADLINE_S) == 0
        assert len(made.stored(1)) == 1


def test_a_stream_without_the_token_is_refused(tmp_path: Path, nats_url: str) -> None:
    """Where the intake has one: it is counted, and nothing of it is read; a stream that has it is taken.

    It ends without an error, with which an Envoy that does not fail open would fail the request.
    """
    token = tmp_path / "token"
    token.write_text("t0ken-of-16-characters\n")
    with pod(tmp_path, nats_url, INTAKE__TOKEN_FILE=token) as made:

        async def each(channel: grpc.aio.Channel) -> None:
            whole = exchange(headers=FAINT)
            for text in ("t0ken-of-16-characters", "Bearer t0ke", "Bearer "):
                await tell(channel, whole, authorization=text)
            assert await tell(channel, []) is grpc.StatusCode.OK
            assert (
                await tell(channel, whole, authorization="Bearer t0ken-of-16-characters")
                is grpc.StatusCode.OK
            )

        talk(made, each)
        wait(lambda: made.count("published") == 1, "the one that has it is published")
        assert made.count("offered") == made.count("taken") == 1
        assert made.count("intake_refused", reason="no_token") == 3
        assert made.count("intake_refused", reason="wrong_token") == 1


@pytest.mark.release
def test_a_port_that_another_has_is_said_at_once(tmp_path: Path) -> None:
    """The sidecar does not start."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        (tmp_path / "config.toml").write_text(f'[sidecar]\nlisten = ""\n[intake]\next_proc = "{address}"\n')
        ran = subprocess.run(
            [sys.executable, "-m", "quantdrift", "sidecar", "-c", str(tmp_path / "config.toml")],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    assert ran.returncode == 2
    assert f"intake.ext_proc {address} cannot be opened" in ran.stderr


def framed(message: Any) -> bytes:
    """Return a message as it stands in the body of a call."""
    data: bytes = message.SerializeToString()
    return struct.pack("!?I", False, len(data)) + data


def cut(body: bytes, n_bytes: int) -> list[bytes]:
    """Return a body in pieces."""
    return [body[start : start + n_bytes] for start in range(0, len(body), n_bytes)]


def listens(port: int) -> bool:
    """Return whether somebody takes connections."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S).close()
    except ConnectionError:
        return False
    return True
