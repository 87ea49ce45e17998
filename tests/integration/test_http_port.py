"""An HTTP port and callers who hold connections, heads and content: each is bounded, and others are served."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Self, cast

import psutil
import pytest
import uvloop
from aiohttp import web

from quantdrift.core.config.load import Secrets
from quantdrift.core.config.schema import Config, Model, Web
from quantdrift.core.process.admin import Admin
from quantdrift.core.process.http_port import LIMITS, HttpPort, PortLimits
from quantdrift.show.page.server import page_port
from quantdrift.storage.database import Database
from tests.support.sidecar.relay_process import free_port, sidecar

pytestmark = pytest.mark.integration

DEADLINE_S = 20
N_CALLERS = 300
MIB = 1 << 20
# An allowance for 256 connections and 4 MiB of heads. Without bounds these callers cost more than 200 MiB.
GROWTH_BYTES = 24 * MIB
GET = b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n"

Peer = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Served:
    """A port that echoes content, ignores it, or answers when it is told to."""

    def __init__(self, limits: PortLimits) -> None:
        app = web.Application()
        routes = [
            web.post("/echo", self._echo),
            web.post("/ignore", self._ignore),
            web.get("/wait", self._wait),
        ]
        app.add_routes(routes)
        self._http = HttpPort(app, limits, shutdown_timeout=0.1)
        self.go_on = asyncio.Event()
        self.n_asked = 0
        self.port = 0
        self.stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        self.port = await self._http.open(("127.0.0.1", 0))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stack.aclose()
        await self._http.close()

    async def peer(self, sent: bytes = b"") -> Peer:
        """Connect, and send something."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.stack.callback(writer.close)
        writer.write(sent)
        return reader, writer

    async def until_asked(self, n: int) -> None:
        """Wait until so many wait for their answer."""
        async with asyncio.timeout(DEADLINE_S):
            while self.n_asked < n:
                await asyncio.sleep(0.01)

    async def _echo(self, request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    async def _ignore(self, _: web.Request) -> web.Response:
        return web.Response(text="ignored")

    async def _wait(self, _: web.Request) -> web.Response:
        self.n_asked += 1
        await self.go_on.wait()
        return web.Response(text="waited")


@contextlib.asynccontextmanager
async def serving(**limits: Any) -> AsyncIterator[Served]:
    """Serve with some limits that are not the usual ones."""
    async with asyncio.timeout(3 * DEADLINE_S), Served(LIMITS._replace(**limits)) as served:
        yield served


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Return the status and the content of the next answer; status 0 where the connection has ended."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            head = await reader.readuntil(b"\r\n\r\n")
            fields = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:-2])
            return int(head.split()[1]), await reader.readexactly(int(fields[b"content-length"]))
    except (asyncio.IncompleteReadError, ConnectionError):
        return 0, b""


def post(path: str, content: bytes, length: int | None = None) -> bytes:
    """Return a request, as long as it says or shorter."""
    length = len(content) if length is None else length
    return f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n".encode() + content


async def pour(writer: asyncio.StreamWriter, piece: bytes) -> None:
    """Send a piece again and again for as long as it is taken, and less than the whole content of a large request."""
    for _ in range(10**9 // len(piece) - 1):
        writer.write(piece)
        await writer.drain()
    pytest.fail("everything is taken")


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[int, psutil.Process]]]:
    """Return the HTTP ports of a sidecar and the processes that have them."""
    listen = free_port()
    options = {"SIDECAR__LISTEN": "", "INTAKE__LISTEN": f"127.0.0.1:{listen}"}
    with sidecar(tmp_path_factory.mktemp("sidecar"), 0, **options) as running:
        intake = next(
            one for one in running.root.children() if "quantdrift.sidecar.intake.process" in one.cmdline()
        )
        yield {"admin": (running.admin_port, running.root), "intake": (listen, intake)}


@pytest.mark.parametrize("name", ["admin", "intake"])
def test_heads_without_an_end_cost_little_and_keep_nobody_out(
    ports: dict[str, tuple[int, psutil.Process]], name: str
) -> None:
    """Half of the callers stop below the limit of a head, half go on for as long as they may; others are answered."""
    port, process = ports[name]
    path = b"/livez" if name == "admin" else b"/openapi.json"

    def is_served() -> bool:
        with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as probe:
            probe.sendall(b"GET %s HTTP/1.0\r\n\r\n" % path)
            return probe.recv(100).startswith(b"HTTP/1.0 200")

    assert is_served()
    before = process.memory_info().rss
    with contextlib.ExitStack() as stack:
        for number in range(N_CALLERS):
            caller = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S))
            with contextlib.suppress(ConnectionError):
                caller.sendall(b"GET %s HTTP/1.1\r\nHost: a\r\nx: %s\r\n" % (path, b"a" * 8000))
                for field in range(100) if number % 2 else ():
                    caller.sendall(b"x-%d: %s\r\n" % (field, b"a" * 8000))
            if number % 50 == 49:
                assert is_served()
        assert is_served()
        assert process.memory_info().rss - before < GROWTH_BYTES


@pytest.mark.parametrize("sent", [b"", b"GET /livez HTTP/1.1\r\nHost: a\r\n", b"\r\n\r\n"])
async def test_the_admin_port_closes_on_whoever_sends_no_whole_head(sent: bytes) -> None:
    """After the time for a head."""
    admin = Admin("sidecar.admin", "127.0.0.1:0", lambda: True, limits=PortLimits(head_s=0.1))
    await admin.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", admin.port)
        writer.write(sent)
        async with asyncio.timeout(DEADLINE_S):
            assert await reader.read() == b""
        writer.close()
    finally:
        await admin.stop()


async def test_a_head_in_drops_has_no_more_time_than_another() -> None:
    """Each byte comes in time, and the whole does not."""
    async with serving(head_s=0.3) as served:
        reader, writer = await served.peer(b"GET /wait HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.01)
        assert served.n_asked == 0


async def test_a_connection_that_is_idle_is_closed() -> None:
    """Some time after its last answer; a head that has begun by then has its own time."""
    async with serving(idle_s=0.1) as served:
        reader, _ = await served.peer(post("/echo", b"1"))
        assert await answer(reader) == (200, b"1")
        async with asyncio.timeout(DEADLINE_S):
            assert await reader.read() == b""


async def test_an_answer_that_is_not_read_ends() -> None:
    """A caller who sends requests and takes no answers does not keep a connection for ever."""
    async with serving(idle_s=0.2, head_s=0.2) as served:
        _, writer = await served.peer()
        cast("asyncio.Transport", writer.transport).pause_reading()
        with pytest.raises(ConnectionError):
            await pour(writer, post("/echo", bytes(500_000)))


async def test_a_new_connection_takes_the_place_of_the_one_that_waits_longest() -> None:
    """Those that are answered are left alone; where all are, the new one is refused."""
    async with serving(connections=3) as served:
        busy, _ = await served.peer(b"GET /wait HTTP/1.1\r\nHost: a\r\n\r\n")
        await served.until_asked(1)
        oldest, _ = await served.peer(b"GET /wait HTTP/1.1\r\n")
        newer, writer = await served.peer(b"GET /wait HTTP/1.1\r\n")
        reader, _ = await served.peer(post("/echo", b"in"))
        assert await answer(reader) == (200, b"in")
        assert await answer(oldest) == (0, b"")
        writer.write(b"Host: a\r\n\r\n")
        await served.until_asked(2)
        last, _ = await served.peer(b"GET /wait HTTP/1.1\r\nHost: a\r\n\r\n")
        await served.until_asked(3)
        refused, _ = await served.peer(post("/echo", b"in"))
        assert await answer(refused) == (0, b"")
        served.go_on.set()
        assert [await answer(one) for one in (busy, newer, last)] == [(200, b"waited")] * 3


async def test_a_body_without_an_end_has_its_time() -> None:
    """A caller who holds back the last byte is disconnected, though the handler still reads."""
    async with serving(body_s=0.1) as served:
        reader, _ = await served.peer(post("/echo", b"a", 1000))
        async with asyncio.timeout(DEADLINE_S):
            assert await reader.read() == b""
        reader, writer = await served.peer(post("/echo", b"a", 2))
        writer.write(b"b")
        assert await answer(reader) == (200, b"ab")


async def test_unfinished_logins_keep_no_probe_from_the_page() -> None:
    """Whoever sends the form of a login without its end gives way to the next caller, however many there are."""
    secrets = Secrets(web_token="a-token-of-thirty-two-characters")
    config = Config(models=(Model(name="digits"),), web=Web(listen="127.0.0.1:0"))
    head = b"POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: http://127.0.0.1\r\n"
    form = head + b"Content-Type: application/x-www-form-urlencoded\r\nContent-Length: 1000\r\n\r\na"
    async with (
        Database("postgresql://nobody@127.0.0.1/none") as database,
        contextlib.AsyncExitStack() as stack,
    ):
        page = page_port(config, secrets, database)
        port = await page.open(("127.0.0.1", 0))
        stack.push_async_callback(page.close)
        for _ in range(N_CALLERS):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            writer.write(form)
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            writer.write(GET.replace(b"Host: a", b"Host: 127.0.0.1"))
            assert await answer(reader) == (200, b"ok\n")


async def test_heads_are_bounded_together() -> None:
    """Above the bound the longest waiting is closed, and a whole request is still answered."""
    async with serving(heads_bytes=40_000) as served:
        peers = [await served.peer(b"GET /wait HTTP/1.1\r\nx: " + b"a" * 9000) for _ in range(6)]
        assert [await answer(reader) for reader, _ in peers[:2]] == [(0, b"")] * 2
        reader, _ = await served.peer(post("/echo", b"in"))
        assert await answer(reader) == (200, b"in")


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"])
async def test_a_head_that_is_too_long_is_refused(end: bytes) -> None:
    """With an end or without."""
    async with serving(head_bytes=1000) as served:
        reader, _ = await served.peer(b"GET /wait HTTP/1.1\r\nHost: a\r\nx: " + b"a" * 1000 + end)
        assert (await answer(reader))[0] == 431
        assert await answer(reader) == (0, b"")


@pytest.mark.parametrize("n_bytes", [1, 7, 100, 1_000_000])
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_requests_are_answered_however_their_bytes_come(
    n_bytes: int, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """In pieces of any length, all sent before the first answer; content may look like a head, and need not be read."""
    contents = [b"", b"\r\n\r\n", GET, bytes(300), *[b"\r\n" * 50_000] * (n_bytes > 1000)]

    async def ask() -> None:
        async with serving() as served:
            reader, writer = await served.peer()
            wire = b"".join(post(path, content) for content in contents for path in ("/echo", "/ignore"))
            for start in range(0, len(wire), n_bytes):
                writer.write(wire[start : start + n_bytes])
                await asyncio.sleep(0)
            for content in contents:
                assert await answer(reader) == (200, content)
                assert await answer(reader) == (200, b"ignored")

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(ask())


async def test_what_comes_before_an_answer_waits() -> None:
    """Requests that are sent ahead are answered in their order; more than a head of them is not read."""
    async with serving() as served:
        reader, writer = await served.peer(b"GET /wait HTTP/1.1\r\nHost: a\r\n\r\n")
        await served.until_asked(1)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await pour(writer, post("/echo", b"after") * 1000)
        served.go_on.set()
        assert await answer(reader) == (200, b"waited")
        for _ in range(100):
            assert await answer(reader) == (200, b"after")


async def test_content_that_nobody_reads_is_bounded() -> None:
    """The answer comes first; little of it is passed over, and with much the connection is closed."""
    async with serving() as served:
        reader, writer = await served.peer(post("/ignore", b"", 500_000))
        assert await answer(reader) == (200, b"ignored")
        writer.write(bytes(500_000) + post("/echo", b"next"))
        assert await answer(reader) == (200, b"next")
        reader, writer = await served.peer(post("/ignore", b"", 10**9))
        assert await answer(reader) == (200, b"ignored")
        with pytest.raises(ConnectionError):
            await pour(writer, bytes(MIB))


async def test_what_cannot_be_read_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A path may be a secret."""
    async with serving() as served:
        reader, _ = await served.peer(b"POST /kserve/s3cret HTTP/9.9\r\nHost: a\r\n\r\n")
        assert (await answer(reader))[0] == 400
    assert "cannot be read" in caplog.text
    assert "s3cret" not in caplog.text
