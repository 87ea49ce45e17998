"""The intake's HTTP port, with clients that send much, little, or nothing."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import pytest

from quantdrift.core.clock import SystemClock
from quantdrift.core.config import Config
from quantdrift.core.config.schema import Intake
from quantdrift.sidecar.intake import http
from quantdrift.sidecar.intake import kserve_logger as logger
from quantdrift.sidecar.intake.gateway import Gateway
from quantdrift.sidecar.intake.http import HttpIntake
from quantdrift.sidecar.intake.kserve_logger import KserveSink
from quantdrift.sidecar.relay.observing.observer import CaptureScope
from quantdrift.sidecar.sampling.first_phase import ExchangeIds, Sampler
from quantdrift.sidecar.state.counters import INTAKE_DENIALS, Counters, Gauge, Slot
from quantdrift.sidecar.state.routes import Routes

pytestmark = pytest.mark.integration

LIMIT = 1 << 20
EVENT = {
    "Ce-Type": "org.kubeflow.serving.inference.request",
    "Ce-Inferenceservicename": "digits",
    "Ce-Id": "1",
    "Content-Type": "application/json",
    "Authorization": "Bearer t0ken",
}


class Server:
    """The way, its port and its counts."""

    def __init__(self, sink: KserveSink, ports: tuple[int, int], slot: Slot) -> None:
        self.sink, self.ports, self.slot = sink, ports, slot

    @asynccontextmanager
    async def asking(
        self, length: int, target: str = "/", **headers: str
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Send the head of a request whose body is to be `length` bytes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.ports[target.startswith("/v1/")])
        fields = EVENT | {"Host": "a", "Content-Length": f"{length}"} | headers
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        writer.write(f"POST {target} HTTP/1.1\r\n{lines}\r\n".encode())
        try:
            yield reader, writer
        finally:
            writer.close()


@asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    """Serve on two free ports."""
    intake = Intake(max_pending_bytes=LIMIT)
    config = msgspec.structs.replace(Config(), intake=intake)
    slot = Counters.create(1, 4).slot(0)
    scope = CaptureScope(
        config.sidecar,
        routes=Routes(config.capture.protocols),
        sampler=Sampler(config.sampling, b"s", ExchangeIds(), 0.0),
        send_frame=lambda *_: None,
        slot=slot,
        clock=SystemClock(),
    )
    gateway = Gateway(scope)
    with socket.create_server(("127.0.0.1", 0)) as events, socket.create_server(("127.0.0.1", 0)) as batches:
        sink = KserveSink(config, "t0ken", gateway, events)
        ports = events.getsockname()[1], batches.getsockname()[1]
        async with sink, HttpIntake(config, "t0ken", gateway, batches):
            yield Server(sink, ports, slot)


async def status(reader: asyncio.StreamReader) -> int:
    """Return the status of an answer."""
    async with asyncio.timeout(20):
        return int((await reader.readline()).split()[1])


@pytest.mark.parametrize("target", ["/", "/v1/exchanges"])
async def test_a_body_that_never_comes_is_given_up(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """Whoever sends a head and then nothing holds nothing for ever."""
    monkeypatch.setattr(logger, "_QUIET_S", 0.1)
    monkeypatch.setattr(http, "_READ_S", 0.1)
    async with serving() as server, server.asking(10, target) as (reader, _):
        assert await status(reader) == 400


async def test_the_end_waits_for_no_body() -> None:
    """What waits for its other half must still be counted, and the hand-off be finished, before the process is killed."""
    async with AsyncExitStack() as stack, asyncio.timeout(15), serving() as server:
        await stack.enter_async_context(server.asking(10))
        reader, writer = await stack.enter_async_context(server.asking(2))
        writer.write(b"{}")
        assert await status(reader) == 200


async def test_all_unfinished_bodies_share_one_limit() -> None:
    """A flood of connections that each send the half of something holds no more than may wait."""
    async with serving() as server, AsyncExitStack() as stack:
        for _ in range(12):
            _, writer = await stack.enter_async_context(server.asking(800_000))
            writer.write(b" " * 400_000)
            await writer.drain()
        reader, writer = await stack.enter_async_context(server.asking(2))
        writer.write(b"{}")
        assert await status(reader) == 200
        held = 0
        async with asyncio.timeout(20):
            while held < LIMIT // 3:  # it is told, too
                server.sink.tick()
                held = server.slot.gauge(Gauge.HELD_BYTES)
                assert held <= LIMIT
                await asyncio.sleep(0.01)


async def test_a_client_with_long_headers_is_logged() -> None:
    """The logger forwards them as one field."""
    metadata = '{"authorization":["' + "x" * 30_000 + '"]}'
    async with serving() as server, server.asking(2, **{"Ce-Metadata": metadata}) as (reader, writer):
        writer.write(b"{}")
        assert await status(reader) == 200


@pytest.mark.parametrize(
    ("target", "authorization", "expected", "counted"),
    [
        ("/", "", 401, Gauge.NO_TOKEN),
        ("/", "Basic t0ken", 401, Gauge.NO_TOKEN),
        ("/", "Bearer other", 401, Gauge.WRONG_TOKEN),
        ("/v1/exchanges", "", 401, Gauge.NO_TOKEN),
        ("/v1/exchanges", "Bearer t0ke", 401, Gauge.WRONG_TOKEN),
        ("/kserve/other", "", 404, Gauge.WRONG_TOKEN),
        ("/kserve/other", "Bearer t0ken", 404, Gauge.WRONG_TOKEN),
    ],
)
async def test_a_caller_without_the_token_learns_nothing(
    target: str, authorization: str, expected: int, counted: Gauge
) -> None:
    """The content is not waited for: none of it was sent here."""
    asked = {"Authorization": authorization}
    async with serving() as server, server.asking(10**9, target, **asked) as (reader, _):
        assert await status(reader) == expected
        noted = {gauge: server.slot.gauge(gauge) for gauge in INTAKE_DENIALS.values()}
        assert noted == {gauge: int(gauge is counted) for gauge in INTAKE_DENIALS.values()}


async def test_content_that_nobody_may_send_is_not_read_to_its_end() -> None:
    """The connection is closed long before: what is read of it is bounded."""
    async with (
        serving() as server,
        server.asking(10**9, Authorization="Bearer other") as (_, writer),
        asyncio.timeout(20),
    ):
        n_sent = 0
        with contextlib.suppress(ConnectionError):
            while n_sent < 10**9:
                writer.write(bytes(1 << 20))
                await writer.drain()
                n_sent += 1 << 20
        assert n_sent < 64 << 20  # what is on its way in both ends' buffers
