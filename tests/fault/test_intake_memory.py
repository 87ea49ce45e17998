"""The memory of the intake process while clients send much and finish nothing, with real sockets and a real gRPC server."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from quantdrift.core.clock import SystemClock
from quantdrift.core.config.schema import MIB, Config, Intake, SamplingOptions, Sidecar
from quantdrift.core.records import Loss
from quantdrift.sidecar.handoff.frame import RawMeta, frame
from quantdrift.sidecar.intake.callers import CallersFile
from quantdrift.sidecar.intake.envoy import ExtProc
from quantdrift.sidecar.intake.envoy_port import CONNECTIONS
from quantdrift.sidecar.intake.gateway import Gateway
from quantdrift.sidecar.intake.http import HttpIntake
from quantdrift.sidecar.intake.tap_server import TapServer
from quantdrift.sidecar.relay.http2.frames import PREFACE
from quantdrift.sidecar.relay.observing.observer import CaptureScope
from quantdrift.sidecar.sampling.first_phase import ExchangeIds, Sampler
from quantdrift.sidecar.state.config import LiveConfig
from quantdrift.sidecar.state.counters import Count, Counters, Slot
from quantdrift.sidecar.state.routes import Routes
from quantdrift.sidecar.tap.wire import Rates, exchange_head
from tests.support.sidecar.envoy_messages import METHOD, exchange
from tests.support.sidecar.relay_process import DEADLINE_S, free_port

pytestmark = pytest.mark.fault

NOBODY = CallersFile("", "", SystemClock())

LIMIT = 4 * MIB
N_CLIENTS = 12
FRAME = 16_384


class Bench:
    """A gateway that takes everything, with its counts."""

    def __init__(self, **intake: object) -> None:
        self.config = Config(
            sidecar=Sidecar(max_exchange_bytes=2 * MIB, max_held_bytes=8 * MIB),
            intake=Intake(max_pending_bytes=LIMIT, **intake),  # type: ignore[arg-type]
            sampling=SamplingOptions(rate=1.0),
        )
        self.slot: Slot = Counters.create(1, 4).slot(0)
        self.frames: list[bytes] = []
        scope = CaptureScope(
            self.config.sidecar,
            routes=Routes(self.config.capture.protocols),
            sampler=Sampler(self.config.sampling, b"s", ExchangeIds(), 0.0),
            send_frame=lambda _, buffers: self.frames.append(b"".join(buffers)),
            slot=self.slot,
            clock=SystemClock(),
        )
        self.gateway = Gateway(scope)


async def until(condition: Callable[[], object]) -> None:
    """Wait until a condition is true."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


async def test_unfinished_messages_of_envoys_share_the_memory_of_the_intake(tmp_path: Path) -> None:
    """Twelve connections send 2 MiB each without the last byte; an Envoy that speaks properly is served meanwhile."""
    port = free_port()
    bench = Bench(ext_proc=f"127.0.0.1:{port}")
    most = 0
    async with ExtProc(bench.config, "", bench.gateway, tmp_path):
        clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(N_CLIENTS)]
        head = b"\0" + (2 * MIB).to_bytes(4, "big")
        for _, writer in clients:
            writer.write(PREFACE + struct.pack("!IBI", 4, 0, 0))
        for number in range(120):
            content = head + bytes(FRAME - len(head)) if not number else bytes(FRAME)
            for _, writer in clients:
                writer.write(struct.pack("!IBI", len(content) << 8, 0, 1) + content)
            await asyncio.sleep(0)
            most = max(most, bench.gateway.held_bytes)
        await until(
            lambda: sum(reader.exception() is not None or reader.at_eof() for reader, _ in clients) > 0
        )
        assert most <= LIMIT + MIB, "at most one more read than the limit"
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.stream_stream(METHOD)()
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
                for message in exchange():
                    await call.write(message)
            assert await call.code() is grpc.StatusCode.OK
        await until(lambda: bench.frames or bench.slot.lost_count(0, Loss.HELD_BYTES))
        for _, writer in clients:
            writer.close()
        await until(lambda: bench.gateway.held_bytes == 0)


async def test_one_connection_more_closes_the_one_that_has_been_silent_longest(tmp_path: Path) -> None:
    """So clients that only connect cannot keep an Envoy out."""
    port = free_port()
    bench = Bench(ext_proc=f"127.0.0.1:{port}")
    async with ExtProc(bench.config, "", bench.gateway, tmp_path):
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(CONNECTIONS)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.stream_stream(METHOD)()
            for message in exchange():
                await call.write(message)
            assert await call.code() is grpc.StatusCode.OK
        await until(lambda: bench.frames)
        async with asyncio.timeout(DEADLINE_S):
            with contextlib.suppress(ConnectionError):
                await idle[0][0].read()  # to its end
        assert not idle[-1][1].transport.is_closing()
        for _, writer in idle:
            writer.close()


async def test_batches_that_arrive_share_the_memory_of_the_intake() -> None:
    """Twelve clients send 2 MiB each without the last byte: two fit, and the others are told to come again."""
    bench = Bench(listen="127.0.0.1:0")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        async with HttpIntake(bench.config, "t0ken", bench.gateway, listener):
            clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(N_CLIENTS)]
            most = 0
            for _, writer in clients:
                writer.write(
                    f"POST /v1/exchanges HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer t0ken\r\n"
                    f"Content-Type: application/json\r\nContent-Length: {2 * MIB}\r\n\r\n".encode()
                )
            first = [asyncio.ensure_future(reader.readline()) for reader, _ in clients]
            for _ in range(127):
                for task, (_, writer) in zip(first, clients, strict=True):
                    if not task.done():
                        writer.write(bytes(FRAME))
                await asyncio.sleep(0)
                most = max(most, bench.gateway.held_bytes)
            await until(lambda: sum(task.done() for task in first) >= N_CLIENTS - 2)
            answers = [task.result() for task in first if task.done()]
            assert all(answer.startswith(b"HTTP/1.1 503") for answer in answers)
            assert most <= LIMIT
            for _, writer in clients:
                writer.close()
            await asyncio.gather(*first, return_exceptions=True)
            await until(lambda: bench.gateway.held_bytes == 0)


async def test_exchanges_of_taps_that_arrive_share_the_memory_of_the_intake(tmp_path: Path) -> None:
    """Four taps send 2 MiB each without the last byte; those beyond the memory are read to their end and counted."""
    bench = Bench(tap=str(tmp_path / "tap"))
    live_config = LiveConfig.of(bench.config)
    rates = Rates(epoch="e", salt=b"", sticky="", strata=(), rows=(0,), max_exchange_bytes=2 * MIB)
    meta = RawMeta(
        id="0" * 32,
        stratum=0,
        pi1=1.0,
        u1=0.5,
        epoch="e",
        captured_at_ns=0,
        request_head_bytes=0,
        request_bytes=MIB,
        response_head_bytes=0,
        response_bytes=MIB,
    )
    whole = b"".join(frame(meta, [bytes(2 * MIB)]))
    message = exchange_head(len(whole)) + whole
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "tap"))
        listener.listen()
        listener.setblocking(False)
        async with TapServer(bench.gateway, listener, NOBODY, lambda: rates, live_config):
            taps = [await asyncio.open_unix_connection(str(tmp_path / "tap")) for _ in range(4)]
            for _, writer in taps:
                writer.write(message[:-1])
            await until(lambda: bench.slot.lost_count(0, Loss.HELD_BYTES) == 3)
            assert bench.gateway.held_bytes <= LIMIT
            for _, writer in taps:
                writer.write(message[-1:])
            await until(lambda: len(bench.frames) == 1)
            taps[1][1].write(message)
            await until(lambda: len(bench.frames) == 2)
            await until(lambda: bench.gateway.held_bytes == 0)
            assert bench.slot.count(0, Count.TAKEN) == 5
            for _, writer in taps:
                writer.close()
