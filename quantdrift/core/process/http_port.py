"""An aiohttp server with limits on the connections and the memory that its callers can use.

aiohttp limits single header fields, but neither the whole head nor the number of connections: a caller who sends 128
long fields without end costs 2 MiB. Here a head is buffered until it is complete and only then given to aiohttp, so that
an incomplete one costs its own bytes only.
"""

import asyncio
import logging
import socket
import ssl
from typing import Any, NamedTuple, cast

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

_END = b"\r\n\r\n"
_UNREAD_BYTES = 1 << 20  # of a body that no handler reads; a caller who sends more is disconnected
_TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_LOG = logging.getLogger(__name__)


class PortLimits(NamedTuple):
    """Limits of a port.

    Parameters
    ----------
    connections
        Open connections. One more closes the one that has waited longest without a complete request, head and body; if all have a
        request in progress, the new one is closed. The limit is above the number that the event loop accepts in one
        turn, so that no connection is closed before it was read.
    head_bytes
        Size of one head; above it the answer is 431.
    heads_bytes
        Size of all heads that are incomplete or unanswered; above it the connections that have waited longest are
        closed.
    head_s
        Time from the first byte of a head, or from the start of a connection, to the end of the head.
    body_s
        Time from the end of a head to the end of its body: of 8 MiB of labels, too.
    idle_s
        Time from an answer to the next request. It is above the time after which common clients close a connection.
    """

    connections: int = 256
    head_bytes: int = 16 * 1024
    heads_bytes: int = 4 * 1024 * 1024
    head_s: float = 10.0
    body_s: float = 30.0
    idle_s: float = 120.0


LIMITS = PortLimits()


class HttpPort:
    """An HTTP server for an application, with limits.

    Parameters
    ----------
    app
        The application; it gets one more middleware, the outermost.
    options
        More options for aiohttp's runner.
    """

    def __init__(self, app: web.Application, limits: PortLimits = LIMITS, **options: Any) -> None:
        self._usage = _PortUsage(limits)
        self._connections: dict[web.RequestHandler, _PortConnection] = {}
        self._server: asyncio.Server | None = None

        @web.middleware
        async def noted(request: web.Request, handler: Handler) -> web.StreamResponse:
            connection = self._connections.get(request.protocol)
            if connection is None:  # closed in the meantime
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

    async def open(self, where: socket.socket | tuple[str, int], tls: ssl.SSLContext | None = None) -> int:
        """Listen, and return the port; 0 for a Unix socket.

        Parameters
        ----------
        where
            A listening socket, or host and port.
        tls
            For a port that speaks TLS only. A connection counts once its handshake is done, for which a client has `head_s`.

        Raises
        ------
        OSError
            The port cannot be opened.
        """
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        handshake_s = None if tls is None else self._usage.limits.head_s
        if isinstance(where, socket.socket) and where.family == socket.AF_UNIX:
            self._server = await loop.create_unix_server(self._accept, sock=where)
        elif isinstance(where, socket.socket):
            self._server = await loop.create_server(
                self._accept, sock=where, ssl=tls, ssl_handshake_timeout=handshake_s
            )
        else:
            self._server = await loop.create_server(
                self._accept, *where, ssl=tls, ssl_handshake_timeout=handshake_s
            )
        name = self._server.sockets[0].getsockname()
        return int(name[1]) if isinstance(name, tuple) else 0

    async def close(self) -> None:
        """Stop listening and close every connection."""
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()

    def _accept(self) -> "_PortConnection":
        assert self._runner.server is not None
        return _PortConnection(self._runner.server, self._usage, self._connections)


class _PortUsage:
    """Connections and buffered bytes of a port, against its limits."""

    def __init__(self, limits: PortLimits) -> None:
        self.limits = limits
        self._open: set[_PortConnection] = set()
        self._waiting: dict[
            _PortConnection, None
        ] = {}  # without a complete request, the longest waiting first
        self._heads_bytes = 0

    def enter(self, connection: "_PortConnection") -> bool:
        """Add a new connection; return whether the limit allows it."""
        if len(self._open) >= self.limits.connections:
            _LOG.warning(
                "an HTTP port has reached its limit of %d open connections: the one that has waited longest without a "
                "complete request is closed",
                len(self._open),
            )
            if not self._shed():
                return False
        self._open.add(connection)
        self.wait(connection)
        return True

    def leave(self, connection: "_PortConnection") -> None:
        """Remove a connection."""
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    def wait(self, connection: "_PortConnection") -> None:
        """Record that a connection has no complete request from now on."""
        self._waiting.pop(connection, None)
        self._waiting[connection] = None

    def work(self, connection: "_PortConnection") -> None:
        """Record that a connection has a complete request."""
        self._waiting.pop(connection, None)

    def take(self, n_bytes: int) -> bool:
        """Add buffered bytes of heads; return whether the limit allows them."""
        self._heads_bytes += n_bytes
        while self._heads_bytes > self.limits.heads_bytes and self._shed():
            pass
        return self._heads_bytes <= self.limits.heads_bytes

    def give(self, n_bytes: int) -> None:
        """Subtract buffered bytes."""
        self._heads_bytes -= n_bytes

    def _shed(self) -> bool:
        oldest = next(iter(self._waiting), None)
        if oldest is None:
            return False
        oldest.drop()
        return True


class _PortConnection(asyncio.Protocol):
    """One connection: gives aiohttp a head once it is complete, and the body once its request is being handled."""

    def __init__(
        self, server: web.Server, usage: _PortUsage, connections: "dict[web.RequestHandler, _PortConnection]"
    ) -> None:
        self._handler = server()
        self._usage = usage
        self._limits = usage.limits
        self._connections = connections
        self._transport: asyncio.Transport | None = None  # None: refused, dropped or lost
        self._timer: asyncio.TimerHandle | None = None
        self._content: StreamReader | None = None  # of the current request, or of the last one
        self._has_request = False  # from its complete head to its answer
        self._held = bytearray()  # not given to aiohttp yet
        self._n_searched = 0
        self._n_taken = 0
        self._n_unread = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's class does not derive from it
        if not self._usage.enter(self):
            self.drop()
            return
        self._connections[self._handler] = self
        self._expect(self._limits.head_s)
        self._handler.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._release()
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
        if not self._usage.take(len(data)):
            self.drop()
        if self._transport is None:
            return
        if not self._has_request:
            self._read()
        elif len(self._held) > self._limits.head_bytes:
            self._transport.pause_reading()  # until the current request reads its body or is answered

    def begin(self, content: StreamReader) -> None:
        """Record that a request is being handled."""
        self._has_request = True
        self._content = content
        self._n_unread = 0
        if self._transport is None:
            return
        if content.is_eof():
            self._usage.work(self)
            self._stop_timer()
        else:
            self._usage.wait(self)
            self._expect(self._limits.body_s)
        if self._held and not content.is_eof():
            data = bytes(self._held)
            self._held.clear()
            self._settle(self._n_taken - len(data))
            self._transport.resume_reading()
            self._pass_on(data)

    def end(self) -> None:
        """Record that a request has its answer, which may not be sent yet."""
        self._has_request = False
        if self._transport is None:
            return
        self._settle(len(self._held))
        self._usage.wait(self)
        is_read = self._content is None or self._content.is_eof()
        self._expect(self._limits.idle_s if is_read and not self._held else self._limits.head_s)
        if is_read:
            self._transport.resume_reading()
            self._read()

    def drop(self) -> None:
        """Close it at once."""
        transport = self._transport
        self._release()
        if transport is not None:
            transport.abort()

    def _pass_on(self, data: bytes) -> None:
        """Give aiohttp a part of the body; if the request is answered already, only up to a limit."""
        assert self._transport is not None
        if not self._has_request:
            self._n_unread += len(data)
            if self._n_unread > _UNREAD_BYTES:
                self._transport.close()  # the answer is still sent; the timer continues
                return
        self._handler.data_received(data)
        if (
            self._has_request
            and self._content is not None
            and self._content.is_eof()
            and self._transport is not None
        ):
            self._usage.work(self)
            self._stop_timer()

    def _read(self) -> None:
        """Give aiohttp the buffered head if it is complete."""
        assert self._transport is not None
        end = self._held.find(_END, self._n_searched)
        n_bytes = len(self._held) if end < 0 else end + len(_END)
        if n_bytes > self._limits.head_bytes:
            self._held.clear()
            self._settle(0)
            self._transport.write(_TOO_LONG)
            self._transport.close()  # the timer continues, because the peer may not read the answer
        elif end < 0:
            self._n_searched = max(0, n_bytes - len(_END) + 1)
        else:
            head = bytes(self._held[:n_bytes])
            del self._held[:n_bytes]
            self._n_searched = 0
            self._has_request = True
            self._usage.work(self)
            self._handler.data_received(head)

    def _expect(self, within_s: float) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(within_s, self.drop)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _settle(self, n_taken: int) -> None:
        """Set the number of buffered bytes that are counted."""
        self._usage.give(self._n_taken - n_taken)
        self._n_taken = n_taken

    def _release(self) -> None:
        self._stop_timer()
        self._transport = None
        self._held.clear()
        self._settle(0)
        self._usage.leave(self)
        self._connections.pop(self._handler, None)


class _WithoutContent(logging.Filter):
    """Removes what a caller sent from errors about an unreadable head: a path or header field may be a secret."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True: each record is shown."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            record.msg = f"{record.getMessage()}: the request cannot be read ({type(error).__name__})"
            record.args, record.exc_info = None, None
        return True


def _server_log() -> logging.Logger:
    log = logging.getLogger(f"{__name__}.aiohttp")
    if not log.filters:
        log.addFilter(_WithoutContent())
    return log
