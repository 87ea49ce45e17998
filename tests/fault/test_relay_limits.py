"""Clients that exceed the limits of an observer: it stops observing, and the bytes are forwarded."""

import asyncio
import contextlib
import errno
import hashlib
import socket
from asyncio import StreamReader, StreamWriter
from typing import Any

import pytest
from hpack import Encoder

from quantdrift.cli.config_summary import WAITING_BYTES
from quantdrift.core.records import Loss
from quantdrift.sidecar.relay import backpressure
from quantdrift.sidecar.relay.connection import Relay, RelayedConnection
from quantdrift.sidecar.relay.http1.observer import Http1Observer
from quantdrift.sidecar.relay.http2.frames import PREFACE
from quantdrift.sidecar.relay.listener import Listener
from quantdrift.sidecar.relay.observing import limit
from quantdrift.sidecar.relay.worker import Watchdog
from quantdrift.sidecar.state.counters import Count, Gauge
from tests.support.sidecar.http2_wire import ACK, INFER, PING, frame, headers, settings
from tests.support.sidecar.relay_rig import (
    DEADLINE_S,
    Bench,
    Rig,
    answer,
    end,
    on_both_loops,
    post,
    rig,
    until,
)

pytestmark = pytest.mark.fault

KIB = 1024
PARTIAL_REQUEST = b"POST /v2/models/digits/infer HTTP/1.1\r\nHost: h"
FEW_FILES = 64 + 2 * 3  # for three clients


async def echo(reader: StreamReader, writer: StreamWriter) -> None:
    """Answer each request with its body."""
    while head := await _head(reader):
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        writer.write(answer(await reader.readexactly(length)))
        await writer.drain()


async def _head(reader: StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""


async def asks(client: tuple[StreamReader, StreamWriter], body: bytes) -> None:
    """Send a request and check its answer."""
    reader, writer = client
    writer.write(post(body))
    async with asyncio.timeout(DEADLINE_S):
        assert await reader.readexactly(len(answer(body))) == answer(body)


@on_both_loops
async def test_idle_connections_give_way_to_those_that_speak() -> None:
    """Far more connections than the limit: every request is observed, as long as few are busy at a time."""
    bench = Bench(max_connections=2)
    async with rig(bench, echo) as at:
        idle = [await at.client() for _ in range(3)]
        await until(lambda: len(at.relay.connections) == 3)
        clients = [await at.client() for _ in range(4)]
        for _ in range(3):
            for client in clients:
                await asks(client, b"x")
                assert len(at.relay.observed) <= 2
        assert len(bench.taken) == bench.slot.count(0, Count.OFFERED) == 12
        assert bench.slot.gauge(Gauge.UNOBSERVED) == bench.slot.gauge(Gauge.BLIND) == 0
        for _, writer in (*idle, *clients):
            await end(writer)
        await at.quiet()
        assert len(at.relay.observed) == 0
    assert bench.balance() == 0


@on_both_loops
async def test_where_all_observed_connections_are_busy_requests_are_counted_as_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clients that wait for their answers keep their observers; what others ask is served, and counted."""
    monkeypatch.setattr(limit, "_SEARCH_S", 0.0)
    answers = asyncio.Event()

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        while head := await _head(reader):
            body = await reader.readexactly(
                int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            )
            if body == b"slow":
                await answers.wait()
            writer.write(answer(body))

    bench = Bench(max_connections=2)
    async with rig(bench, serve) as at:
        busy = [await at.client() for _ in range(2)]
        for _, writer in busy:
            writer.write(post(b"slow"))
        await until(lambda: bench.slot.count(0, Count.OFFERED) == 2)
        other = await at.client()
        for n in range(5):
            await asks(other, b"%d" % n)
        await asks(other, bytes(300_000))  # a long read
        assert bench.slot.gauge(Gauge.UNOBSERVED) == 1
        assert bench.slot.gauge(Gauge.UNSEEN_REQUESTS) == bench.lost(Loss.UNOBSERVED) == 6
        answers.set()
        for reader, _ in busy:
            assert await reader.readexactly(len(answer(b"slow"))) == answer(b"slow")
        again = await at.client()
        await asks(again, b"observed")
        assert len(bench.taken) == 3
        assert bench.slot.count(0, Count.OFFERED) == 9
        for _, writer in (*busy, other, again):
            await end(writer)
    assert bench.balance() == 0


@pytest.mark.parametrize(
    ("start", "quiet_s"),
    [(b"P", 1e9), (PARTIAL_REQUEST, 1e9), (PREFACE + settings(), 1e9), (post(bytes(99))[:-9], 0.0)],
    ids=["a byte", "a head", "HTTP/2", "a body"],
)
@on_both_loops
async def test_clients_that_never_finish_a_request_do_not_keep_their_observers(
    start: bytes, quiet_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that speaks is observed in place of an unfinished head at once, of an unfinished body after a while."""
    monkeypatch.setattr(limit, "QUIET_S", quiet_s)
    bench = Bench(max_connections=2)
    async with rig(bench, echo) as at:
        stuck = [await at.client() for _ in range(4)]
        for _, writer in stuck:
            writer.write(start)
        await until(lambda: sum(c.client.n_bytes for c in at.relay.connections) == 4 * len(start))
        client = await at.client()
        for n in range(3):
            await asks(client, b"%d" % n)
        assert len(bench.taken) == 3
        assert bench.slot.gauge(Gauge.UNOBSERVED) == 0
        for _, writer in (*stuck, client):
            await end(writer)
        await at.quiet()
    assert bench.scope.memory.n_bytes == bench.balance() == 0


@on_both_loops
async def test_unfinished_heads_that_go_on_byte_by_byte_keep_nobody_from_being_observed() -> None:
    """More than may be observed, each with a byte now and then: every request of others is, on each new connection."""
    bench = Bench(max_connections=50)
    sent = bytearray(PARTIAL_REQUEST)
    async with rig(bench, echo) as at:
        stuck = [await at.client() for _ in range(52)]
        for n in range(5):
            chunk = bytes(sent) if not n else b"x"
            for _, writer in stuck:
                writer.write(chunk)
            n_bytes = len(stuck) * (len(sent) + n)
            await until(lambda n=n_bytes: sum(c.client.n_bytes for c in at.relay.connections) >= n)  # type: ignore[misc]
            at.relay.tick()
            client = await at.client()
            await asks(client, b"%d" % n)
            await end(client[1])
        assert bench.slot.count(0, Count.OFFERED) == len(bench.taken) == 5
        assert bench.slot.gauge(Gauge.UNSEEN_REQUESTS) == bench.slot.gauge(Gauge.UNOBSERVED) == 0
        for _, writer in stuck:
            await end(writer)
        await at.quiet()
    assert bench.scope.memory.n_bytes == bench.balance() == 0


@on_both_loops
async def test_a_body_that_goes_on_byte_by_byte_counts_as_silent_and_an_upload_does_not() -> None:
    """Else a byte a second keeps an observer for ever. Whoever sends at least a kibibyte in a second keeps it."""
    bench = Bench(max_connections=2)
    async with rig(bench, echo) as at:
        slow, fast = await at.client(), await at.client()
        for _, writer in (slow, fast):
            writer.write(post(bytes(100_000))[:-90_000])
        await until(lambda: sum(c.client.n_bytes for c in at.relay.connections) > 20_000)
        by_port = {c.client.transport.get_extra_info("peername")[1]: c for c in at.relay.connections}  # type: ignore[union-attr]
        dripping, uploading = (by_port[writer.get_extra_info("sockname")[1]] for _, writer in (slow, fast))
        at.relay.tick()
        before = dripping.spoke_s, uploading.spoke_s
        slow[1].write(b"x")
        fast[1].write(bytes(limit.FEW_BYTES))
        n_bytes = dripping.client.n_bytes + uploading.client.n_bytes + 1 + limit.FEW_BYTES
        await until(lambda: dripping.client.n_bytes + uploading.client.n_bytes == n_bytes)
        at.relay.tick()
        assert dripping.spoke_s == before[0]
        assert uploading.spoke_s > before[1]
        for _, writer in (slow, fast):
            await end(writer)
        await at.quiet()
    assert bench.balance() == 0


@on_both_loops
async def test_pings_do_not_keep_the_observer_of_an_http2_connection_that_asks_nothing() -> None:
    """The backend answers each of them; a new request counts, a ping does not."""

    async def pong(reader: StreamReader, writer: StreamWriter) -> None:
        writer.write(settings())
        while await reader.read(65_536):
            writer.write(frame(PING, ACK, 0, bytes(8)))

    bench = Bench(max_connections=2)
    encoder = Encoder()
    async with rig(bench, pong) as at:
        reader, writer = await at.client()
        assert await reader.readexactly(len(settings())) == settings()

        async def passed(chunk: bytes) -> float:
            """Send something; return when the connection counts as having spoken."""
            writer.write(chunk)
            async with asyncio.timeout(DEADLINE_S):
                await reader.readexactly(17)
            at.relay.tick()
            (connection,) = at.relay.connections
            return connection.spoke_s

        asks = [headers(n, encoder.encode([(":method", "POST"), (":path", INFER)])) for n in (1, 3)]
        began_s = await passed(PREFACE + settings() + asks[0])
        for _ in range(3):
            assert await passed(frame(PING, 0, 0, bytes(8))) == began_s
        assert await passed(asks[1]) > began_s
        await end(writer)
        await at.quiet()
    assert bench.balance() == 0


@on_both_loops
async def test_clients_wait_where_there_are_no_files_for_them() -> None:
    """Those who are in are served on; the next one is connected, waits, and is served when another has gone."""
    bench = Bench()
    async with rig(bench, echo, FEW_FILES) as at:
        clients = [await at.client() for _ in range(3)]
        for client in clients:
            await asks(client, b"in")
        waits = await at.client()
        task = asyncio.create_task(asks(waits, b"at last"))
        await until(lambda: bench.slot.gauge(Gauge.ACCEPT_PAUSES) > 0)
        for client in clients:
            await asks(client, b"still in")
        assert len(at.relay.connections) == 3
        assert not task.done()
        await end(clients.pop()[1])
        await task
        assert bench.slot.gauge(Gauge.BACKEND_FAILED) == 0
        for _, writer in (*clients, waits):
            await end(writer)


class Full(socket.socket):
    """A listening socket in a process that has no file left."""

    n_tries = 0

    def accept(self) -> tuple[socket.socket, Any]:
        """Fail."""
        self.n_tries += 1
        raise OSError(errno.EMFILE, "planted")


@on_both_loops
async def test_without_files_nobody_turns_in_circles() -> None:
    """A client that waits makes the listening socket ready again at once: it is looked at again only later."""
    loop, bench = asyncio.get_running_loop(), Bench()
    with Full() as listener, socket.socket() as client:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        door = Listener(listener, Relay("127.0.0.1", 1, bench.scope, loop), 1000)
        door.open()
        client.connect(listener.getsockname())
        await until(lambda: listener.n_tries == 3)
        began = listener.n_tries
        for _ in range(100):
            await asyncio.sleep(0)
        assert listener.n_tries <= began + 1
        assert bench.slot.gauge(Gauge.ACCEPT_PAUSES) == 1
        door.close()


PARTIAL = post(b"x", fields=b"X: " + b"y" * 10_000 + b"\r\n")


@pytest.mark.parametrize("whose", ["HTTP/1.1", "HTTP/2"])
@on_both_loops
async def test_unfinished_heads_share_a_bound(whose: str) -> None:
    """Clients that send slowly cost the observer memory: past the bound it lets their connections go, and they are served."""
    bench = Bench(max_connections=5)
    limit = bench.scope.memory.limit_bytes
    bytes_in = 0

    async def serve(reader: StreamReader, _: StreamWriter) -> None:
        nonlocal bytes_in
        while data := await reader.read(65_536):
            bytes_in += len(data)

    start = PARTIAL[:-100]
    if whose == "HTTP/2":
        start = PREFACE + settings() + headers(1, bytes(10_000))[:-100]
    async with rig(bench, serve) as at:
        bench.scope.max_connections = 12  # that the memory for five stays
        clients = [await at.client() for _ in range(12)]
        for n, (_, writer) in enumerate(clients):
            writer.write(start)
            await until(lambda n=n: bytes_in == (n + 1) * len(start))  # type: ignore[misc]
        assert bench.slot.gauge(Gauge.BLIND) > 0
        assert 0 < bench.scope.memory.n_bytes <= limit
        for _, writer in clients:
            await end(writer)
        await at.quiet()
    assert bench.scope.memory.n_bytes == 0
    assert bench.slot.gauge(Gauge.OBSERVER_ERRORS) == 0


N_SLOW = 60
FEW = 8  # instead of what a worker really has memory for
LARGE = bytes(range(256)) * 4 * KIB


class Slow:
    """Clients with small buffers that ask for something large and do not read it."""

    def __init__(self, at: Rig, n: int) -> None:
        self._at = at
        self._n = n
        self.ends: list[socket.socket] = []

    async def __aenter__(self) -> list[socket.socket]:
        loop = asyncio.get_running_loop()
        # What is accepted inherits it. The kernel's own buffers would take all of it for them.
        self._at.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * KIB)
        for _ in range(self._n):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * KIB)
            client.setblocking(False)
            self.ends.append(client)
            await loop.sock_connect(client, ("127.0.0.1", self._at.port))
            await loop.sock_sendall(client, post(b""))
        return self.ends

    async def __aexit__(self, *_: object) -> None:
        for client in self.ends:
            client.close()


@on_both_loops
async def test_what_waits_for_clients_that_do_not_read_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many they are: little is read for each; others are served, and when they read they get every byte."""

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        while head := await _head(reader):
            if b"Content-Length: 0" in head:
                writer.write(answer(LARGE))
                await writer.drain()
            else:
                writer.write(answer(await reader.readexactly(5)))

    monkeypatch.setattr(backpressure, "MAX_STALLED", FEW)
    monkeypatch.setattr(backpressure, "FULL_LIMIT_CONNECTIONS", FEW)
    bound = FEW * (2 * backpressure.HIGH_WATER_BYTES + backpressure.READ_BYTES) + backpressure.MAX_READ_BYTES
    bench = Bench(max_held_bytes=KIB)
    async with rig(bench, serve) as at, Slow(at, N_SLOW) as clients:
        most = 0

        def waits() -> int:
            nonlocal most
            now = sum(c.client.unsent_bytes + c.backend.unsent_bytes for c in at.relay.connections)
            most = max(most, now)
            return now

        before = -1
        async with asyncio.timeout(DEADLINE_S):
            while before <= 0 or waits() != before:
                before = waits()
                await asyncio.sleep(0.1)
        assert bench.slot.gauge(Gauge.SLOW) > FEW
        assert most <= bound + N_SLOW * 2 * backpressure.MIN_READ_BYTES
        quick = await at.client()
        await asks(quick, b"quick")
        await end(quick[1])
        loop = asyncio.get_running_loop()
        expected = hashlib.sha256(answer(LARGE)).digest()

        async def read(client: socket.socket) -> None:
            digest, left = hashlib.sha256(), len(answer(LARGE))
            while left:
                data = await loop.sock_recv(client, 64 * KIB)
                assert data
                digest.update(data)
                left -= len(data)
            assert digest.digest() == expected

        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*(read(client) for client in clients))
        at.relay.tick()
        assert bench.slot.gauge(Gauge.SLOW) == 0
        await loop.sock_sendall(clients[0], post(b"after"))
        assert await loop.sock_recv(clients[0], KIB) == answer(b"after")


def test_config_check_reckons_with_what_may_wait() -> None:
    """The figure is stated twice, since configuration must not import the relay."""
    assert backpressure.MAX_UNSENT_BYTES == WAITING_BYTES
    shared = backpressure.Backpressure(lambda: (), Bench().slot)
    most = 2 * backpressure.FULL_LIMIT_CONNECTIONS * backpressure.HIGH_WATER_BYTES
    while len(shared.read_buffer) > backpressure.MIN_READ_BYTES:
        most += len(shared.read_buffer)  # a peer that was just below its mark
        shared.peer_stalled()
    assert most == backpressure.MAX_UNSENT_BYTES


@on_both_loops
async def test_many_connections_have_little_room_each_and_few_have_more() -> None:
    """So that all together stay within the same bound."""
    bench = Bench()
    async with rig(bench, echo) as at:
        one = await at.client()
        await asks(one, b"x")
        shared = at.relay.backpressure
        assert shared.high_bytes == backpressure.HIGH_WATER_BYTES
        clients = [await at.client() for _ in range(2 * backpressure.FULL_LIMIT_CONNECTIONS)]
        await until(lambda: len(at.relay.connections) > 2 * backpressure.FULL_LIMIT_CONNECTIONS)
        assert (
            shared.high_bytes * len(at.relay.connections)
            <= backpressure.FULL_LIMIT_CONNECTIONS * backpressure.HIGH_WATER_BYTES
        )
        for _, writer in clients:
            await end(writer)
        await until(lambda: len(at.relay.connections) == 1)
        at.relay.tick()
        assert shared.high_bytes == backpressure.HIGH_WATER_BYTES
        await asks(one, b"y" * 600_000)
        await end(one[1])


@on_both_loops
async def test_an_observer_that_does_not_come_to_an_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection goes on without it, others with theirs; after three of them nobody is observed any more."""

    def hang(*_: object) -> int:
        while True:
            pass

    bench = Bench()
    async with rig(bench, echo) as at:
        loop = asyncio.get_running_loop()
        watchdog = Watchdog(
            RelayedConnection.find_observer_call,
            lambda: loop.call_soon(at.relay.stop_observing),
            loop,
            cpu_s=0.1,
        )
        watchdog.start()
        try:
            other = await at.client()
            await asks(other, b"before")
            for n in range(3):
                with monkeypatch.context() as planted:
                    planted.setattr(Http1Observer, "_request_end", hang)
                    client = await at.client()
                    await asks(client, b"hangs")
                await asks(client, b"goes on")
                await asks(other, b"not concerned")
                assert bench.slot.gauge(Gauge.OBSERVER_ERRORS) == n + 1
                await end(client[1])
            n_taken, n_unseen = len(bench.taken), bench.lost(Loss.UNOBSERVED)
            await asks(other, b"nor served otherwise now")
            fresh = await at.client()
            await asks(fresh, b"nor observed")
            assert len(bench.taken) == n_taken
            assert bench.lost(Loss.UNOBSERVED) == n_unseen + 2
            for _, writer in (other, fresh):
                await end(writer)
        finally:
            watchdog.stop()
    assert bench.balance() == 0


@on_both_loops
async def test_what_is_slow_and_no_observer_is_not_cut() -> None:
    """The watchdog looks where the interpreter is: a busy loop that forwards is left alone."""
    bench = Bench()
    async with rig(bench, echo) as at:
        watchdog = Watchdog(
            RelayedConnection.find_observer_call, lambda: None, asyncio.get_running_loop(), cpu_s=0.02
        )
        watchdog.start()
        try:
            client = await at.client()
            for _ in range(3):
                sum(range(2_000_000))
                await asks(client, b"x" * 100_000)
            await end(client[1])
        finally:
            watchdog.stop()
    assert bench.slot.gauge(Gauge.OBSERVER_ERRORS) == 0


@on_both_loops
async def test_a_client_that_is_cut_off_in_the_middle_costs_its_own_exchange() -> None:
    """A reset in the middle of a request: the backend hears of it, memory is given back, the next client is served."""
    bench = Bench()
    async with rig(bench, echo) as at:
        reader, writer = await at.client()
        writer.write(post(bytes(100_000))[:50_000])
        await until(lambda: bench.scope.held_bytes > 0)
        writer.transport.abort()
        await at.quiet()
        assert bench.scope.held_bytes == 0
        with contextlib.suppress(ConnectionError):
            await reader.read()
        client = await at.client()
        await asks(client, b"next")
        await end(client[1])
        await at.quiet()
    assert bench.balance() == 0
    assert len(bench.taken) == 1
