"""The relay on real sockets: what a client and a backend see of it, which is nothing."""

import asyncio
import contextlib
import errno
import hashlib
import random
import socket
import struct
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Callable
from enum import StrEnum, auto

import aiohttp
import pytest
from aiohttp import web

from quantdrift.core.records import Loss
from quantdrift.sidecar.relay.backpressure import HIGH_WATER_BYTES, MAX_READ_BYTES
from quantdrift.sidecar.state.counters import Count, Gauge
from tests.support.sidecar.relay_rig import (
    DEADLINE_S,
    Bench,
    Serve,
    answer,
    end,
    on_both_loops,
    post,
    rig,
    until,
)

pytestmark = pytest.mark.integration

MIB = 1 << 20
# What sockets' own buffers may hold on the way, and the relay.
IN_FLIGHT_BYTES = 24 * MIB


def script(*turns: tuple[bytes, bytes]) -> Serve:
    """Return a backend that waits for exactly the first of each pair, then sends the second, and at last closes."""

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        for expected, reply in turns:
            assert await reader.readexactly(len(expected)) == expected
            writer.write(reply)
            await writer.drain()

    return serve


@on_both_loops
async def test_a_connection_is_kept_alive() -> None:
    """Many exchanges on one connection, one backend connection behind it, each taken byte for byte."""
    turns = [(post(b"q%d" % n * n), answer(b"a%d" % n * n)) for n in range(50)]
    bench = Bench()
    async with rig(bench, script(*turns)) as at:
        reader, writer = await at.client()
        for request, response in turns:
            writer.write(request)
            assert await reader.readexactly(len(response)) == response
        assert await reader.read() == b""
        await end(writer)
        await at.quiet()
    assert bench.pairs == turns
    assert bench.slot.gauge(Gauge.CONNECTIONS) == bench.slot.gauge(Gauge.BACKEND_REACHED) == 1
    assert bench.slot.gauge(Gauge.FORWARDED_BYTES) == sum(len(a) + len(b) for a, b in turns)


@on_both_loops
async def test_the_time_of_a_streamed_answer_is_measured() -> None:
    """From the end of the request, which comes late, to the first byte of the content and to the last."""
    request, response = post(b"in"), answer(b"out")
    has_first, may_end, asked_s = asyncio.Event(), asyncio.Event(), 0.0

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        nonlocal asked_s
        await reader.readexactly(len(request) - 1)
        asked_s = time.monotonic()
        may_end.set()
        await reader.readexactly(1)
        writer.write(response[:-2])
        await has_first.wait()
        writer.write(response[-2:])
        await writer.drain()

    bench = Bench()
    async with rig(bench, serve) as at, asyncio.timeout(DEADLINE_S):
        reader, writer = await at.client()
        writer.write(request[:-1])
        await may_end.wait()
        writer.write(request[-1:])
        await reader.readexactly(len(response) - 2)
        has_first.set()
        await reader.readexactly(2)
        await until(lambda: len(bench.taken) == 1)
        took_s = time.monotonic() - asked_s
        await end(writer)
    meta = bench.taken[0].meta
    assert meta.first_byte_s is not None
    assert meta.latency_s is not None
    assert 0 <= meta.first_byte_s < meta.latency_s < took_s


@on_both_loops
async def test_requests_may_be_pipelined() -> None:
    """Sent at once, answered at once, told apart all the same."""
    turns = [(post(b"q%d" % n), answer(b"a%d" % n)) for n in range(50)]
    requests, responses = (b"".join(part) for part in zip(*turns, strict=True))
    bench = Bench()
    async with rig(bench, script((requests, responses))) as at:
        assert await at.talk(requests) == responses
    assert bench.pairs == turns


CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n4;x=y\r\nabcd\r\n1\r\ne\r\n0\r\nT: u\r\n\r\n"


@pytest.mark.parametrize(
    ("request_", "response"),
    [
        (b"POST /v2/models/m/infer HTTP/1.1\r\nHost: h\r\n" + CHUNKED, b"HTTP/1.1 200 OK\r\n" + CHUNKED),
        (post(b"x"), b"HTTP/1.1 200 OK\r\n\r\nuntil the end"),
        (post(b"x"), b"HTTP/1.0 200 OK\r\n\r\nuntil the end"),
        (post(b"x"), b"HTTP/1.1 204 None\r\n\r\n"),
        (post(b"x"), b"HTTP/1.1 103 Early\r\nA: b\r\n\r\n" + answer(b"late")),
    ],
    ids=["chunked", "until close", "HTTP/1.0", "no content", "interim"],
)
@on_both_loops
async def test_every_kind_of_body_passes(request_: bytes, response: bytes) -> None:
    """Bytes are unchanged in both directions, and what is taken is what passed (interim responses left out)."""
    bench = Bench()
    async with rig(bench, script((request_, response))) as at:
        assert await at.talk(request_[:30], request_[30:]) == response
        await at.quiet()
    assert len(bench.pairs) == 1
    assert bench.pairs[0][0] == request_
    assert response.endswith(bench.pairs[0][1])


@on_both_loops
async def test_a_head_request_has_no_body() -> None:
    """The length in its response announces nothing, so the next exchange is told apart."""
    head, response = b"HEAD / HTTP/1.1\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"
    bench = Bench()
    async with rig(bench, script((head, response), (post(b"q"), answer(b"a")))) as at:
        assert await at.talk(head + post(b"q")) == response + answer(b"a")
    assert bench.pairs == [(post(b"q"), answer(b"a"))]


@on_both_loops
async def test_a_client_may_wait_for_100_continue() -> None:
    """The interim response comes through at once, the body after it."""
    request = post(b"body", fields=b"Expect: 100-continue\r\n")
    interim = b"HTTP/1.1 100 Continue\r\n\r\n"
    bench = Bench()
    async with rig(bench, script((request[:-4], interim), (b"body", answer(b"ok")))) as at:
        reader, writer = await at.client()
        writer.write(request[:-4])
        assert await reader.readexactly(len(interim)) == interim
        writer.write(request[-4:])
        assert await reader.read() == answer(b"ok")
        await end(writer)
    assert bench.pairs == [(request, answer(b"ok"))]


@on_both_loops
async def test_an_upgraded_connection_passes_through() -> None:
    """After 101 anything flows, in both directions, unobserved; that is not blindness."""
    request = b"GET /ws HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    response = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n"
    noise = random.Random(1).randbytes(300_000)

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        await reader.readexactly(len(request))
        writer.write(response)
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()

    bench = Bench()
    async with rig(bench, serve) as at:
        reader, writer = await at.client()
        writer.write(request)
        assert await reader.readexactly(len(response)) == response
        sending = asyncio.create_task(_send(writer, noise))
        assert await reader.read() == noise
        await sending
        await end(writer)
    assert bench.slot.gauge(Gauge.BLIND) == 0


async def _send(writer: StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()
    writer.write_eof()


@on_both_loops
async def test_a_client_may_close_its_half() -> None:
    """The backend sees the end of the request and can still answer."""

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        everything = await reader.read()
        writer.write(answer(hashlib.sha256(everything).digest()))

    request = post(b"x" * MIB)
    bench = Bench()
    async with rig(bench, serve) as at:
        assert await at.talk(request) == answer(hashlib.sha256(request).digest())
    assert len(bench.pairs) == 1


@on_both_loops
async def test_an_early_answer_comes_through_when_the_backend_closes_at_once() -> None:
    """It refuses a large request without reading it: the failed write must not cost the answer that lies unread."""
    refusal = answer(b"no", b"413 No", b"Connection: close\r\n")

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        await reader.readexactly(10)
        writer.write(refusal)

    bench = Bench(max_exchange_bytes=16 * MIB)
    async with rig(bench, serve) as at:
        for _ in range(50):
            reader, writer = await at.client()
            writer.write(post(bytes(8 * MIB)))
            got = b""
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(1000):
                    got += data
            assert got == refusal
            await end(writer)
        await at.quiet()
    # Where the sockets' buffers take all of a request before the answer is read, the exchange is whole.
    assert bench.lost(Loss.TRUNCATED) + len(bench.pairs) == 50
    assert bench.balance() == 0


@on_both_loops
async def test_an_answer_that_nobody_waits_for_ends_its_connection() -> None:
    """The client is gone, what it sent still waits for a backend that answers and resets: both ends are let go."""
    go = asyncio.Event()

    async def serve(_: StreamReader, writer: StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await go.wait()
        writer.write(answer(b"no", b"413 No"))
        await writer.drain()
        held = writer.get_extra_info("socket")
        held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    bench = Bench()
    async with rig(bench, serve) as at:
        _, writer = await at.client()
        writer.write(post(bytes(64 * MIB)))
        await until(lambda: any(held.backend.unsent_bytes for held in at.relay.connections))
        (held,) = at.relay.connections
        held.client.abort()
        await until(lambda: held.client.is_lost)
        assert held.backend.unsent_bytes
        go.set()
        await at.quiet()
        await end(writer)


@on_both_loops
async def test_a_backend_may_close_its_half() -> None:
    """The client sees the end of the response and can still send the rest of its request."""
    received = bytearray()

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        received.extend(await reader.readexactly(10))
        writer.write(answer(b"enough", b"413 No"))
        writer.write_eof()
        received.extend(await reader.read())

    request = post(b"x" * MIB)
    bench = Bench()
    async with rig(bench, serve) as at:
        reader, writer = await at.client()
        writer.write(request[:1000])
        assert await reader.read() == answer(b"enough", b"413 No")
        await _send(writer, request[1000:])
        await until(lambda: len(received) == len(request))
        await end(writer)
        await at.quiet()
    assert bytes(received) == request
    assert bench.pairs == [(request, answer(b"enough", b"413 No"))]


@on_both_loops
async def test_a_client_that_does_not_read_stops_the_backend() -> None:
    """What it has not taken stays with the backend; the relay holds a bounded amount, and nothing is lost."""
    sent = 0
    block = bytes(MIB)
    total = 64

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (total * MIB))
        for _ in range(total):
            writer.write(block)
            await writer.drain()
            sent += MIB

    bench = Bench()
    async with rig(bench, serve) as at:
        reader, writer = await at.client()
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(post(b""))
        await _stuck(lambda: sent)
        assert 0 < sent < IN_FLIGHT_BYTES
        connection = next(iter(at.relay.connections))
        assert connection.client.unsent_bytes <= HIGH_WATER_BYTES + MAX_READ_BYTES
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        for _ in range(total):
            assert await reader.readexactly(MIB) == block
        await end(writer)
    assert bench.lost(Loss.TOO_LARGE) == 1


@on_both_loops
async def test_a_backend_that_does_not_read_stops_the_client() -> None:
    """The other direction likewise."""
    go_on = asyncio.Event()
    digest = hashlib.sha256()

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await go_on.wait()
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        while data := await reader.read(MIB):
            digest.update(data)
        writer.write(answer(b"ok"))

    request = post(bytes(64 * MIB))
    taken = 0
    async with rig(Bench(), serve) as at:
        reader, writer = await at.client()

        async def send() -> None:
            nonlocal taken
            for pos in range(0, len(request), MIB):
                writer.write(request[pos : pos + MIB])
                await writer.drain()
                taken += MIB
            writer.write_eof()

        sending = asyncio.create_task(send())
        await _stuck(lambda: taken)
        assert 0 < taken < IN_FLIGHT_BYTES
        assert next(iter(at.relay.connections)).backend.unsent_bytes <= HIGH_WATER_BYTES + MAX_READ_BYTES
        go_on.set()
        await sending
        assert await reader.read() == answer(b"ok")
        await end(writer)
    assert digest.digest() == hashlib.sha256(request).digest()


async def _stuck(count: Callable[[], int]) -> None:
    """Wait until a count that had begun to rise has stopped rising."""
    before = -1
    async with asyncio.timeout(DEADLINE_S):
        while before <= 0 or count() != before:
            before = count()
            await asyncio.sleep(0.2)


@on_both_loops
async def test_a_client_that_is_early_waits_for_the_backend() -> None:
    """While the backend's queue is full the relay takes one read from the client and no more; then all arrives."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=0)
    first = socket.create_connection(listener.getsockname())  # fills the queue
    listener.setblocking(False)
    loop = asyncio.get_running_loop()
    request = post(bytes(16 * MIB))
    async with rig(Bench(), listener.getsockname()[1]) as at:
        reader, writer = await at.client()
        sending = asyncio.create_task(_send(writer, request))
        await until(lambda: any(each.client.n_bytes for each in at.relay.connections))
        connection = next(iter(at.relay.connections))
        assert connection.backend.transport is None
        assert connection.client.n_bytes <= 256 * 1024
        (await loop.sock_accept(listener))[0].close()
        end_, _ = await loop.sock_accept(listener)
        server_reader, server_writer = await asyncio.open_connection(sock=end_)
        assert await server_reader.readexactly(len(request)) == request
        server_writer.write(answer(b"ok"))
        await end(server_writer)
        assert await reader.read() == answer(b"ok")
        await sending
        await end(writer)
    first.close()
    listener.close()


@on_both_loops
async def test_a_client_that_gives_up_takes_the_backend_with_it() -> None:
    """Its cancellation in the middle of a response closes the backend's connection, so that work can be stopped."""
    gone = asyncio.Event()

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
        try:
            while True:
                writer.write(b"x" * 10_000)
                await writer.drain()
                await asyncio.sleep(0)
        except ConnectionError:
            gone.set()
            raise

    bench = Bench()
    async with rig(bench, serve) as at:
        reader, writer = await at.client()
        writer.write(post(b""))
        await reader.readexactly(1000)
        writer.close()
        async with asyncio.timeout(DEADLINE_S):
            await gone.wait()
        await end(writer)
        await at.quiet()
    assert bench.lost(Loss.CLIENT_ABORT) + bench.lost(Loss.TOO_LARGE) == 1
    assert bench.balance() == 0


class _Ender(StrEnum):
    """Who ends a connection in the middle of an answer."""

    CLIENT = auto()
    CLIENT_FIRST = auto()  # the server hears of it, and closes before the client's end is seen
    SERVER = auto()
    RELAY = auto()


@pytest.mark.parametrize("ender", _Ender)
@on_both_loops
async def test_who_ends_an_answer_first_says_why_it_is_lost(ender: _Ender) -> None:
    """A client that leaves is no loss of the server's answers. The capture process gets the request, which names the model."""
    left = asyncio.Event()

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        await writer.drain()
        if ender is not _Ender.SERVER:
            assert await reader.read() == b""
            left.set()
            while ender is _Ender.CLIENT:  # until the end of the client is seen by writing to it
                writer.write(b"1\r\n!\r\n")
                await writer.drain()

    asked = post(b'{"model": "m"}', b"/v1/chat/completions")
    bench = Bench()
    async with rig(bench, serve) as at:
        reader, writer = await at.client()
        writer.write(asked)
        await reader.readuntil(b"hello\r\n")
        if ender is _Ender.RELAY:
            at.relay.abort()
        elif ender is _Ender.CLIENT:
            await end(writer)
        elif ender is _Ender.CLIENT_FIRST:
            writer.write_eof()
            await left.wait()
        assert ender is _Ender.CLIENT or await reader.read() == b""
        await end(writer)
        await at.quiet()
    (lost,) = bench.lost_requests
    by_client = ender in (_Ender.CLIENT, _Ender.CLIENT_FIRST)
    assert lost.meta.lost is (Loss.CLIENT_ABORT if by_client else Loss.TRUNCATED)
    assert (lost.request, lost.response) == (asked, b"")
    assert bench.balance() == 0


@on_both_loops
async def test_a_reset_is_no_orderly_end() -> None:
    """A response that lasts until the close must not look complete when the backend broke down."""

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nhalf of it")
        await writer.drain()
        writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )

    bench = Bench()
    async with rig(bench, serve) as at:
        reader, writer = await at.client()
        writer.write(post(b""))
        with pytest.raises(ConnectionResetError):
            await reader.read()
        await end(writer)
    assert bench.lost(Loss.TRUNCATED) == 1
    assert bench.pairs == []


@on_both_loops
async def test_without_a_backend_the_client_gets_an_error_at_once() -> None:
    """It is disconnected, and counted."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    bench = Bench()
    async with rig(bench, port) as at:
        reader, writer = await at.client()
        writer.write(post(b""))
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        await end(writer)
        await at.quiet()
    assert bench.slot.gauge(Gauge.BACKEND_FAILED) == 1
    assert bench.slot.gauge(Gauge.BACKEND_ERROR) == errno.ECONNREFUSED
    assert bench.slot.gauge(Gauge.BACKEND_REACHED) == 0


@on_both_loops
async def test_a_client_that_gives_up_before_the_backend_has_accepted_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A backend that hangs would not be seen where clients wait for less time than the relay does."""
    monkeypatch.setattr("quantdrift.sidecar.relay.connection.SLOW_S", -1.0)
    bench = Bench()
    with socket.socket() as full, contextlib.ExitStack() as waiting:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):  # the queue is full: the system answers no further client
            one = waiting.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        async with rig(bench, full.getsockname()[1]) as at:
            _, writer = await at.client()
            await until(lambda: bench.slot.gauge(Gauge.OPEN) == 1)
            writer.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            writer.transport.abort()
            await at.quiet()
            await until(lambda: bench.slot.gauge(Gauge.BACKEND_FAILED) == 1)
    assert bench.slot.gauge(Gauge.BACKEND_ERROR) == errno.ETIMEDOUT


@on_both_loops
async def test_small_writes_are_not_delayed() -> None:
    """Both ends send at once (TCP_NODELAY)."""
    async with rig(Bench(), script((post(b""), answer(b"")), (b"more", b""))) as at:
        reader, writer = await at.client()
        writer.write(post(b""))
        await reader.readexactly(len(answer(b"")))
        connection = next(iter(at.relay.connections))
        for side in (connection.client, connection.backend):
            assert side.transport is not None
            end_ = side.transport.get_extra_info("socket")
            assert end_.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        await end(writer)


@on_both_loops
async def test_a_connection_that_nobody_ends_is_ended() -> None:
    """When the backend has closed and nothing moves any more, a client that lingers is cut after a minute."""
    async with rig(Bench(), script((post(b""), answer(b"")))) as at:
        reader, writer = await at.client()
        writer.write(post(b""))
        assert await reader.read() == answer(b"")
        connection = next(iter(at.relay.connections))
        now_s = at.relay.loop.time()
        connection.expire(now_s)
        connection.expire(now_s + 59)
        assert at.relay.connections
        writer.write(b"still here")
        await until(lambda: connection.client.n_bytes > len(post(b"")))
        connection.expire(now_s + 61)
        connection.expire(now_s + 120)
        assert at.relay.connections
        connection.expire(now_s + 122)
        await at.quiet()
        await end(writer)


@contextlib.asynccontextmanager
async def echo() -> AsyncIterator[int]:
    """Run an aiohttp server that answers with the digest of what it got; yield its port."""

    async def infer(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        digest = hashlib.sha256(body).digest()
        if len(body) % 2:
            return web.Response(body=digest + body)
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write(digest)
        await response.write(body)
        return response

    app = web.Application(client_max_size=64 * MIB)
    app.router.add_post("/v2/models/digits/infer", infer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield runner.addresses[0][1]
    await runner.cleanup()


@on_both_loops
async def test_a_real_client_and_a_real_server_see_no_difference() -> None:
    """With aiohttp on both sides: concurrent requests, small and large, plain and chunked, all answered and all taken."""
    seeded = random.Random(7)
    bodies = [seeded.randbytes(seeded.choice([0, 1, 100, 5_000, 700_001])) for _ in range(60)]
    bench = Bench(max_held_bytes=256 * MIB)
    async with echo() as port, rig(bench, port) as at, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{at.port}/v2/models/digits/infer"

        async def ask(body: bytes, *, chunked: bool) -> None:
            async with session.post(url, data=body, chunked=chunked or None) as response:
                assert await response.read() == hashlib.sha256(body).digest() + body

        await asyncio.gather(*(ask(body, chunked=n % 3 == 0) for n, body in enumerate(bodies)))
        await until(lambda: len(bench.pairs) == 60)
    assert bench.slot.count(0, Count.OFFERED) == 60
    assert bench.slot.gauge(Gauge.BLIND) == 0


@on_both_loops
async def test_draining_closes_connections_between_exchanges() -> None:
    """Idle ones at once, one in an exchange after its response, one that cannot be followed only when it is cut."""
    released = asyncio.Event()

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        await reader.readexactly(1)
        await released.wait()
        writer.write(answer(b"done"))
        await reader.read()

    bench = Bench()
    async with rig(bench, serve) as at:
        idle, busy, blind = [await at.client() for _ in range(3)]
        busy[1].write(post(b""))
        blind[1].write(b"\x16\x03\x01")
        await until(lambda: sum(each.client.n_bytes > 0 for each in at.relay.connections) == 2)
        draining = asyncio.create_task(at.relay.drain())
        assert await idle[0].read() == b""
        assert len(at.relay.connections) >= 2
        released.set()
        assert await busy[0].read() == answer(b"done", fields=b"Connection: close\r\n")
        assert await blind[0].readexactly(len(answer(b"done"))) == answer(b"done")
        await end(idle[1])
        await end(busy[1])
        await until(lambda: len(at.relay.connections) == 1)
        assert not draining.done()
        at.relay.abort()
        await draining
        await end(blind[1])
    assert bench.pairs == [(post(b""), answer(b"done"))]


@on_both_loops
@pytest.mark.parametrize("n_bytes", [10, 300_000])
async def test_a_draining_relay_ends_the_connection_with_the_last_bytes_of_the_response(n_bytes: int) -> None:
    """A client that has the whole response sees the end of the connection before it can send anything more."""
    body, released = bytes(n_bytes), asyncio.Event()

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        await reader.readexactly(1)
        await released.wait()
        writer.write(answer(body))
        await reader.read()

    expected = answer(body, fields=b"Connection: close\r\n")

    def ask(client: socket.socket) -> bytes:
        got = b""
        while len(got) < len(expected) and (data := client.recv(65_536)):
            got += data
        assert client.recv(1, socket.MSG_DONTWAIT) == b""
        return got

    bench = Bench()
    async with rig(bench, serve) as at:
        with socket.create_connection(("127.0.0.1", at.port), timeout=30) as client:
            client.sendall(post(b""))
            await until(lambda: any(each.client.n_bytes for each in at.relay.connections))
            draining = asyncio.create_task(at.relay.drain())
            asking = asyncio.create_task(asyncio.to_thread(ask, client))
            released.set()
            assert await asking == expected
        await draining
    assert bench.pairs == [(post(b""), answer(body))]


@on_both_loops
async def test_a_request_that_has_arrived_unread_is_served_before_its_connection_is_closed() -> None:
    """The relay looks into the socket before it closes a connection that seems to rest."""

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        await reader.readexactly(len(post(b"first")))
        writer.write(answer(b"1"))
        await reader.readexactly(len(post(b"second")))
        writer.write(answer(b"2"))
        await reader.read()

    bench = Bench()
    async with rig(bench, serve) as at:
        with socket.create_connection(("127.0.0.1", at.port), timeout=30) as client:
            client.sendall(post(b"first"))
            assert await asyncio.to_thread(client.recv, 1000) == answer(b"1")
            await until(lambda: len(bench.pairs) == 1)
            (connection,) = at.relay.connections
            connection.drain(patient=True)
            client.sendall(post(b"second"))
            connection.close_if_rests()  # the event loop had no chance to read
            got = await asyncio.to_thread(client.recv, 1000)
            assert got == answer(b"2", fields=b"Connection: close\r\n")
            assert await asyncio.to_thread(client.recv, 1000) == b""
        await until(lambda: not at.relay.connections)
