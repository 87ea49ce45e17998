"""A relay without processes: its observer's scope, what it hands over, and real sockets around it where asked for."""

import asyncio
import contextlib
import functools
import inspect
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any

import msgspec
import pytest
import uvloop

from quantdrift.core.clock import SystemClock
from quantdrift.core.config import SamplingOptions, Sidecar
from quantdrift.core.records import Loss, Protocol
from quantdrift.sidecar.handoff.frame import HEAD_BYTES, RawMeta, lengths, parse
from quantdrift.sidecar.relay.connection import Relay
from quantdrift.sidecar.relay.listener import Listener
from quantdrift.sidecar.relay.observing.observer import CaptureScope, SendFrame
from quantdrift.sidecar.sampling.first_phase import ExchangeIds, Sampler
from quantdrift.sidecar.state.counters import Count, Counters, Gauge, Slot
from quantdrift.sidecar.state.routes import Routes

INFER = b"/v2/models/digits/infer"
DEADLINE_S = 20.0

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Taken(msgspec.Struct, frozen=True):
    """An exchange as it was handed over."""

    meta: RawMeta
    request: bytes
    response: bytes


class Bench:
    """A scope whose exchanges are collected in `taken`, and the requests of lost ones in `lost_requests`."""

    def __init__(
        self, sampling: SamplingOptions | None = None, send_frame: SendFrame | None = None, **bounds: Any
    ) -> None:
        sampling = sampling or SamplingOptions(rate=1.0)
        self.counters = Counters.create(1, len(sampling.header_strata) + 1)
        self.slot: Slot = self.counters.slot(0)
        self.taken: list[Taken] = []
        self.lost_requests: list[Taken] = []
        self.sidecar = msgspec.structs.replace(Sidecar(), **bounds)
        self.scope = CaptureScope(
            self.sidecar,
            routes=Routes(Protocol),
            sampler=Sampler(sampling, b"secret", ExchangeIds(), 0.0),
            send_frame=send_frame or self._collect,
            slot=self.slot,
            clock=SystemClock(),
        )

    @property
    def pairs(self) -> list[tuple[bytes, bytes]]:
        """The bytes of what was handed over."""
        return [(taken.request, taken.response) for taken in self.taken]

    def lost(self, loss: Loss) -> int:
        """Return how many exchanges of the first stratum were lost for this reason, here or at the capture process."""
        handed_over = sum(one.meta.lost is loss and not one.meta.stratum for one in self.lost_requests)
        return self.slot.lost_count(0, loss) + handed_over

    def balance(self) -> int:
        """Return how many of the first stratum were taken, and neither handed over nor lost."""
        return (
            self.slot.count(0, Count.TAKEN)
            - sum(taken.meta.stratum == 0 for taken in (*self.taken, *self.lost_requests))
            - sum(self.slot.lost_count(0, loss) for loss in Loss)
        )

    def _collect(self, stratum: int, buffers: Sequence[bytes | memoryview]) -> None:
        taken = unframe(b"".join(buffers))
        assert taken.meta.stratum == stratum
        (self.taken if taken.meta.lost is None else self.lost_requests).append(taken)


class Rig:
    """A relay on real sockets."""

    def __init__(self, bench: Bench, relay: Relay, listener: socket.socket) -> None:
        self.bench = bench
        self.relay = relay
        self.listener = listener
        self.port: int = listener.getsockname()[1]

    async def client(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a new connection to the relay."""
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def talk(self, *parts: bytes) -> bytes:
        """Send `parts`, end the sending, and return everything that comes back."""
        reader, writer = await self.client()
        for part in parts:
            writer.write(part)
            await writer.drain()
        writer.write_eof()
        async with asyncio.timeout(DEADLINE_S):
            answer = await reader.read()
        await end(writer)
        return answer

    async def quiet(self) -> None:
        """Wait until every connection is over."""
        await until(lambda: not self.relay.connections)


@contextlib.asynccontextmanager
async def rig(bench: Bench, serve: Serve | int, n_files: int = 20_000) -> AsyncIterator[Rig]:
    """Run a relay before a backend: a handler of streams, or the port of one that is there already."""
    loop = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as stack:
        if isinstance(serve, int):
            port = serve
        else:
            port = await stack.enter_async_context(backend(serve))
        relay = Relay("127.0.0.1", port, bench.scope, loop)
        given = socket.create_server(("127.0.0.1", 0), backlog=1024)
        listener = socket.socket(fileno=given.detach())  # as a worker gets it
        listener.setblocking(False)
        door = Listener(listener, relay, n_files)
        door.open()
        try:
            yield Rig(bench, relay, listener)
        finally:
            door.close()
            relay.abort()
            await until(lambda: not relay.connections)
            assert bench.slot.gauge(Gauge.OPEN) == bench.slot.gauge(Gauge.SLOW) == 0
            assert bench.slot.gauge(Gauge.HELD_BYTES) == 0


@contextlib.asynccontextmanager
async def backend(serve: Serve) -> AsyncIterator[int]:
    """Run a server whose connections `serve` handles; yield its port."""
    tasks: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client went away
        finally:
            tasks.discard(task)
            await end(writer)

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on asyncio's own loop and on uvloop's, which the product uses where there is one."""

    @functools.wraps(test)
    def run(loop_factory: Callable[[], asyncio.AbstractEventLoop], **arguments: Any) -> None:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(test(**arguments))

    signature = inspect.signature(test)
    loop = inspect.Parameter("loop_factory", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[loop, *signature.parameters.values()]
    )
    on_both = pytest.mark.parametrize(
        "loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
    )
    marked: Callable[..., None] = on_both(run)
    return marked


async def end(writer: asyncio.StreamWriter) -> None:
    """Close a connection and wait for it."""
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for `condition`, at most `DEADLINE_S`."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)


def post(body: bytes, target: bytes = INFER, fields: bytes = b"") -> bytes:
    """Return a POST request with Content-Length."""
    return b"POST %s HTTP/1.1\r\nHost: h\r\n%sContent-Length: %d\r\n\r\n%s" % (
        target,
        fields,
        len(body),
        body,
    )


def answer(body: bytes, status: bytes = b"200 OK", fields: bytes = b"") -> bytes:
    """Return a response with Content-Length."""
    return b"HTTP/1.1 %s\r\n%sContent-Length: %d\r\n\r\n%s" % (status, fields, len(body), body)


def unframe(wire: bytes) -> Taken:
    """Return the exchange in one whole frame."""
    n_rest, n_meta = lengths(wire[:HEAD_BYTES])
    assert n_rest == len(wire) - HEAD_BYTES
    meta, request, response = parse(n_meta, wire[HEAD_BYTES:])
    return Taken(meta, bytes(request), bytes(response))
