"""An HTTP port with bounds on what its callers may hold: aiohttp, which is given whole heads alone.

aiohttp bounds single header fields, and neither a head nor the number of connections: one caller who sends 128 long
fields and no end of them costs 2 MiB. Here a head is held as it came until it is complete, so an unfinished one costs
its own bytes.
"""

import asyncio
import logging
import socket
from typing import Any, NamedTuple, cast

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

_END = b"\r\n\r\n"
_UNREAD_BYTES = 1 << 20  # of content that no handler reads: whoever sends more is cut off
_TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_LOG = logging.getLogger(__name__)


class Limits(NamedTuple):
    """What a port lets its callers hold.

    Parameters
    ----------
    connections
        Open at the same time. One more closes the one that has waited longest without a whole request; where all have
        one in hand, the new one is closed. It is above what the event loop accepts in one turn, so that a connection
        is not closed before it was read.
    head_bytes
        Of one head; above it the answer is 431.
    heads_bytes
        Of all heads that are incomplete or not answered; above it those that have waited longest are closed.
    head_s
        From the first byte of a head, or from the beginning of a connection, to the end of the head.
    idle_s
        From an answer to the next request. It is above the time after which common clients let go of a connection.
    """

    connections: int = 256
    head_bytes: int = 16 * 1024
    heads_bytes: int = 4 * 1024 * 1024
    head_s: float = 10.0
    idle_s: float = 120.0


LIMITS = Limits()


class HttpPort:
    """Serves an application within limits.

    Parameters
    ----------
    app
        What is served; it gets one more middleware, the outermost.
    limits
        What callers may hold.
    options
        Of aiohttp's runner, beside those that the limits give.
    """

    def __init__(self, app: web.Application, limits: Limits = LIMITS, **options: Any) -> None:
        self._room = _Room(limits)
        self._connections: dict[web.RequestHandler, _Connection] = {}
        self._server: asyncio.Server | None = None

        @web.middleware
        async def noted(request: web.Request, handler: Handler) -> web.StreamResponse:
            connection = self._connections.get(request.protocol)
            if connection is None:  # closed meanwhile
                return await handler(request)
            connection.begin(request.content)
            try:
                return await handler(request)
            finally:
                connection.end()

        app.middlewares.insert(0, noted)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=_server_log(),
            max_line_size=limits.head_bytes,
            max_field_size=limits.head_bytes,
            **options,
        )

    async def open(self, where: socket.socket | tuple[str, int]) -> int:
        """Listen, and return the port.

        Parameters
        ----------
        where
            A listening socket, or host and port.

        Raises
        ------
        OSError
            The port cannot be opened.
        """
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        if isinstance(where, socket.socket):
            self._server = await loop.create_server(self._accept, sock=where)
        else:
            self._server = await loop.create_server(self._accept, *where)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Listen no more, and end every connection."""
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()

    def _accept(self) -> "_Connection":
        assert self._runner.server is not None
        return _Connection(self._runner.server, self._room, self._connections)


class _Room:
    """What all connections of a port hold together."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._open: set[_Connection] = set()
        self._waiting: dict[_Connection, None] = {}  # without a whole request, the longest waiting first
        self._heads_bytes = 0

    def enter(self, connection: "_Connection") -> bool:
        """Count a new connection; return whether there is room for it."""
        if len(self._open) >= self.limits.connections:
            _LOG.warning(
                "an HTTP port has %d open connections, its limit: the one that has waited longest without a whole "
                "request is closed",
                len(self._open),
            )
            if not self._shed():
                return False
        self._open.add(connection)
        self.wait(connection)
        return True

    def leave(self, connection: "_Connection") -> None:
        """Count a connection no more."""
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    def wait(self, connection: "_Connection") -> None:
        """Take note that a connection has no whole request from now on."""
        self._waiting.pop(connection, None)
        self._waiting[connection] = None

    def work(self, connection: "_Connection") -> None:
        """Take note that a connection has a whole request."""
        self._waiting.pop(connection, None)

    def take(self, n_bytes: int) -> bool:
        """Hold so many bytes more of heads; return whether there is room for them."""
        self._heads_bytes += n_bytes
        while self._heads_bytes > self.limits.heads_bytes and self._shed():
            pass
        return self._heads_bytes <= self.limits.heads_bytes

    def give(self, n_bytes: int) -> None:
        """Hold so many bytes fewer."""
        self._heads_bytes -= n_bytes

    def _shed(self) -> bool:
        oldest = next(iter(self._waiting), None)
        if oldest is None:
            return False
        oldest.drop()
        return True


class _Connection(asyncio.Protocol):
    """One connection: gives aiohttp a head when it is whole, and content when its request is being handled."""

    def __init__(
        self, server: web.Server, room: _Room, connections: "dict[web.RequestHandler, _Connection]"
    ) -> None:
        self._handler = server()
        self._room = room
        self._limits = room.limits
        self._connections = connections
        self._transport: asyncio.Transport | None = None  # None: refused, dropped or lost
        self._timer: asyncio.TimerHandle | None = None
        self._content: StreamReader | None = None  # of the request in hand, or of the last one
        self._has_request = False  # from its whole head to its answer
        self._held = bytearray()  # what aiohttp has not been given
        self._n_searched = 0
        self._n_taken = 0
        self._n_unread = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class
        if not self._room.enter(self):
            self.drop()
            return
        self._connections[self._handler] = self
        self._expect(self._limits.head_s)
        self._handler.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._let_go()
        self._handler.connection_lost(exc)

    def eof_received(self) -> None:
        self._handler.eof_received()

    def pause_writing(self) -> None:
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._handler.resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._transport is None:
            return
        if self._content is not None and not self._content.is_eof():
            self._pass_on(data)
            return
        if not self._held and not self._has_request:
            self._expect(self._limits.head_s)
        self._held += data
        self._n_taken += len(data)
        if not self._room.take(len(data)):
            self.drop()
        if self._transport is None:
            return
        if not self._has_request:
            self._read()
        elif len(self._held) > self._limits.head_bytes:
            self._transport.pause_reading()  # until the request in hand asks for its content, or has its answer

    def begin(self, content: StreamReader) -> None:
        """Take note that a request is being handled."""
        self._has_request = True
        self._content = content
        self._n_unread = 0
        if self._transport is None:
            return
        self._room.work(self)
        self._stop_timer()
        if self._held and not content.is_eof():
            data = bytes(self._held)
            self._held.clear()
            self._settle(self._n_taken - len(data))
            self._transport.resume_reading()
            self._handler.data_received(data)

    def end(self) -> None:
        """Take note that a request has its answer, which is still to be sent."""
        self._has_request = False
        if self._transport is None:
            return
        self._settle(len(self._held))
        self._room.wait(self)
        is_read = self._content is None or self._content.is_eof()
        self._expect(self._limits.idle_s if is_read and not self._held else self._limits.head_s)
        if is_read:
            self._transport.resume_reading()
            self._read()

    def drop(self) -> None:
        """Close it at once."""
        transport = self._transport
        self._let_go()
        if transport is not None:
            transport.abort()

    def _pass_on(self, data: bytes) -> None:
        """Give aiohttp content; of a request that has its answer already not without end."""
        assert self._transport is not None
        if not self._has_request:
            self._n_unread += len(data)
            if self._n_unread > _UNREAD_BYTES:
                self._transport.close()  # the answer is sent still; the timer goes on
                return
        self._handler.data_received(data)

    def _read(self) -> None:
        """Give aiohttp the head that is held, if it is whole."""
        assert self._transport is not None
        end = self._held.find(_END, self._n_searched)
        n_bytes = len(self._held) if end < 0 else end + len(_END)
        if n_bytes > self._limits.head_bytes:
            self._held.clear()
            self._settle(0)
            self._transport.write(_TOO_LONG)
            self._transport.close()  # the timer goes on: nobody may read the answer
        elif end < 0:
            self._n_searched = max(0, n_bytes - len(_END) + 1)
        else:
            head = bytes(self._held[:n_bytes])
            del self._held[:n_bytes]
            self._n_searched = 0
            self._has_request = True
            self._room.work(self)
            self._handler.data_received(head)

    def _expect(self, within_s: float) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(within_s, self.drop)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _settle(self, n_taken: int) -> None:
        """Hold no more than so many bytes."""
        self._room.give(self._n_taken - n_taken)
        self._n_taken = n_taken

    def _let_go(self) -> None:
        self._stop_timer()
        self._transport = None
        self._held.clear()
        self._settle(0)
        self._room.leave(self)
        self._connections.pop(self._handler, None)


class _WithoutContent(logging.Filter):
    """Leaves out what a caller has sent: a path or a header field of a head that cannot be read may be a secret."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True: each record is shown."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            record.msg = f"{record.getMessage()}: it cannot be read ({type(error).__name__})"
            record.args, record.exc_info = None, None
        return True


def _server_log() -> logging.Logger:
    log = logging.getLogger(f"{__name__}.aiohttp")
    if not log.filters:
        log.addFilter(_WithoutContent())
    return log
