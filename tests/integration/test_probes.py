"""The listener for probes: it answers two paths, whatever strangers send."""

import asyncio
import contextlib
import socket
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator

import pytest

from quantdrift.core.process import probes
from quantdrift.core.process.probes import MAX_CONNECTIONS, MAX_HEAD_BYTES, Probes

pytestmark = pytest.mark.integration


class Health:
    """A listener, and what it says."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.ready = self.live = True

    async def connect(self) -> tuple[StreamReader, StreamWriter]:
        """Return a new connection."""
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def ask(self, request: bytes) -> bytes:
        """Send a request, and return everything that comes back."""
        reader, writer = await self.connect()
        writer.write(request)
        async with asyncio.timeout(20):
            answer = await reader.read()
        writer.close()
        return answer


@pytest.fixture
async def health() -> AsyncIterator[Health]:
    """Return a running listener."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    health = Health(listener.getsockname()[1])
    running = Probes(listener, ready=lambda: health.ready, live=lambda: health.live)
    await running.start()
    yield health
    running.stop()


def get(path: bytes, method: bytes = b"GET") -> bytes:
    """Return a request."""
    return b"%b %b HTTP/1.1\r\nHost: pod\r\nUser-Agent: kube-probe/1.33\r\n\r\n" % (method, path)


def status(answer: bytes) -> int:
    """Return the status of an answer."""
    return int(answer.split(b" ")[1])


async def test_it_answers_two_paths_and_closes(health: Health) -> None:
    """Ready and live are asked for separately; everything else is not found."""
    assert await health.ask(get(b"/readyz")) == (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 3\r\nConnection: close\r\n\r\nok\n"
    )
    health.ready = False
    assert status(await health.ask(get(b"/readyz?verbose"))) == 503
    assert status(await health.ask(get(b"/livez"))) == 200
    health.live = False
    assert status(await health.ask(get(b"/livez", b"HEAD"))) == 503
    for request in (
        get(b"/metrics"),
        get(b"/"),
        get(b"/pause", b"POST"),
        get(b"/livez", b"POST"),
        b"?\r\n\r\n",
    ):
        assert status(await health.ask(request)) == 404


async def test_of_pipelined_requests_the_first_is_answered(health: Health) -> None:
    """The connection is closed after it."""
    assert (await health.ask(get(b"/readyz") * 5)).count(b"HTTP/1.1") == 1


async def test_a_long_head_is_cut_off(health: Health) -> None:
    """As soon as it is longer than any probe's."""
    reader, writer = await health.connect()
    writer.write(b"GET /livez HTTP/1.1\r\nX: " + b"y" * MAX_HEAD_BYTES)
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    writer.close()


async def test_a_head_that_does_not_come_to_an_end_is_cut_off(
    health: Health, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a client that sends a byte now and then."""
    monkeypatch.setattr(probes, "MAX_S", 0.2)
    reader, writer = await health.connect()
    writer.write(b"G")
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(20):
            assert await reader.read() == b""
    writer.close()


async def test_probes_are_answered_while_strangers_hold_every_connection(health: Health) -> None:
    """The connection that has been open longest makes way."""
    held = [await health.connect() for _ in range(MAX_CONNECTIONS + 10)]
    for _, writer in held:
        writer.write(b"GET /livez")
    assert status(await health.ask(get(b"/readyz"))) == 200
    first = held[0][0]
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(20):
            assert await first.read() == b""
    for _, writer in held:
        writer.close()
