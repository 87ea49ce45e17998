"""The TCP port of Envoy's external processing: it counts what has arrived of unfinished messages before gRPC does.

gRPC keeps every message until it is complete, on any number of connections and streams, and has no limit on the sum.
This port accepts the connections, forwards their bytes to the gRPC server on a Unix socket, and follows the frames of
HTTP/2 and the lengths of messages, without keeping any content. When unfinished messages together exceed the memory of
the intake, the connection that has most of them is closed.

TLS ends here. The certificate of a client is found again by the name of the Unix socket of its connection, which the gRPC
server gives as its peer.
"""

import asyncio
import itertools
import logging
import socket
import ssl
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, cast

from quantdrift.sidecar.relay.http2.frames import PREFACE

CONNECTIONS: Final = 256
"""Most open connections; one more closes the one that has been silent longest. An Envoy has one or two for each thread."""
CONNECTION_BYTES: Final = 128 * 1024
"""Memory of a connection: buffers of this port, of the socket in between, and of gRPC."""
_FRAME_HEAD: Final = struct.Struct("!IBI")
_MESSAGE_HEAD_BYTES: Final = 5  # whether it is compressed, and its length
_HANDSHAKE_S: Final = 10.0
_DATA, _RST_STREAM = 0, 3
_END_STREAM, _PADDED = 0x1, 0x8
_STREAM: Final = 0x7FFFFFFF
_MOST_UNFINISHED: Final = 8192  # streams of a connection; gRPC allows fewer
_LOG = logging.getLogger(__name__)


class UnfinishedMessages:
    """The lengths of the messages of one connection that have begun and not ended.

    Attributes
    ----------
    n_bytes
        What has arrived of them.
    """

    __slots__ = ("_ends", "_head", "_left", "_preface", "_stream", "_streams", "n_bytes")

    def __init__(self) -> None:
        self.n_bytes = 0
        self._preface = PREFACE
        self._head = bytearray()
        self._left = 0  # of the content of a frame
        self._stream = 0  # of a DATA frame, else 0
        self._ends = False
        self._streams: dict[int, _PartialMessage] = {}

    def feed(self, data: bytes) -> None:
        """Follow the next bytes of the client.

        Raises
        ------
        ValueError
            The connection does not speak HTTP/2, or in a way that no gRPC client does.
        """
        start = min(len(self._preface), len(data))
        if data[:start] != self._preface[:start]:
            raise ValueError("not HTTP/2")
        self._preface = self._preface[start:]
        while start < len(data):
            if self._left:
                stop = min(start + self._left, len(data))
                if self._stream:
                    self._content(data, start, stop)
                self._left -= stop - start
            else:
                stop = min(start + _FRAME_HEAD.size - len(self._head), len(data))
                self._head += data[start:stop]
                if len(self._head) < _FRAME_HEAD.size:
                    return
                self._begin_frame()
            start = stop
            if not self._left and self._stream and self._ends:
                self._drop(self._stream)

    def _begin_frame(self) -> None:
        length_and_type, flags, stream = _FRAME_HEAD.unpack(self._head)
        self._head.clear()
        self._left, kind = length_and_type >> 8, length_and_type & 0xFF
        self._stream, self._ends = 0, False
        if kind == _DATA:
            if flags & _PADDED:
                raise ValueError("a padded frame")
            self._stream, self._ends = stream & _STREAM, bool(flags & _END_STREAM)
        elif kind == _RST_STREAM:
            self._drop(stream & _STREAM)

    def _content(self, data: bytes, start: int, stop: int) -> None:
        message = self._streams.pop(self._stream, None) or _PartialMessage()
        self.n_bytes -= message.n_bytes
        message.feed(data, start, stop)
        if message.n_bytes:
            self.n_bytes += message.n_bytes
            self._streams[self._stream] = message
            if len(self._streams) > _MOST_UNFINISHED:
                raise ValueError("too many unfinished messages")

    def _drop(self, stream: int) -> None:
        message = self._streams.pop(stream, None)
        if message is not None:
            self.n_bytes -= message.n_bytes


class _PartialMessage:
    """The unfinished message of a stream; `n_bytes` of it have arrived, 0: it is between two messages."""

    __slots__ = ("_head", "_left", "n_bytes")

    def __init__(self) -> None:
        self.n_bytes = 0
        self._head = bytearray()
        self._left = 0

    def feed(self, data: bytes, start: int, stop: int) -> None:
        while start < stop:
            if self._left:
                taken = min(self._left, stop - start)
                self._left -= taken
            else:
                taken = min(_MESSAGE_HEAD_BYTES - len(self._head), stop - start)
                self._head += data[start : start + taken]
                if len(self._head) == _MESSAGE_HEAD_BYTES:
                    self._left = int.from_bytes(self._head[1:], "big")
            start += taken
            self.n_bytes += taken
            if not self._left and len(self._head) == _MESSAGE_HEAD_BYTES:
                self.n_bytes = 0
                self._head.clear()


class EnvoyPort:
    """The port, while it is open.

    Parameters
    ----------
    inner
        Path of the Unix socket of the gRPC server.
    limit_bytes
        Returns how many bytes unfinished messages may have now.
    on_change
        Called with the change of the bytes of unfinished messages.
    tls
        For a port that speaks TLS only.
    """

    def __init__(
        self,
        inner: str,
        limit_bytes: Callable[[], int],
        on_change: Callable[[int], object],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._inner = inner
        self._limit_bytes = limit_bytes
        self._on_change = on_change
        self._tls = tls
        self._open: dict[_Client, None] = {}  # the one that has been silent longest first
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count()
        self._certificates: dict[str, Mapping[str, Any]] = {}  # by the name of the Unix socket
        self.n_bytes = 0

    async def open(self, host: str, port: int) -> None:
        """Listen.

        Raises
        ------
        OSError
            The port cannot be opened.
        """
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Client(self),
            host,
            port,
            reuse_port=False,
            ssl=self._tls,
            ssl_handshake_timeout=None if self._tls is None else _HANDSHAKE_S,
        )

    def stop_accepting(self) -> None:
        """Refuse new connections; those that are open go on."""
        if self._server is not None:
            self._server.close()

    def close(self) -> None:
        """Close everything."""
        self.stop_accepting()
        for client in list(self._open):
            client.drop()

    def enter(self, client: "_Client") -> None:
        """Add a connection, and connect it to the gRPC server."""
        while len(self._open) >= CONNECTIONS:
            next(iter(self._open)).drop()
        self._open[client] = None
        task = asyncio.get_running_loop().create_task(self._connect(client))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def certificate_of(self, peer: str) -> Mapping[str, Any] | None:
        """Return the verified certificate of a client; None if it has none.

        Parameters
        ----------
        peer
            The other end of its connection, as the gRPC server names it.
        """
        return self._certificates.get(peer.removeprefix("unix:"))

    def speaks(self, client: "_Client") -> None:
        """Note that a connection has sent something."""
        del self._open[client]
        self._open[client] = None

    def leave(self, client: "_Client") -> None:
        """Remove a connection."""
        self._open.pop(client, None)
        self._certificates.pop(client.name, None)

    def count(self, change: int) -> None:
        """Count bytes of unfinished messages; above the limit, close the connections that have most of them."""
        self.n_bytes += change
        self._on_change(change)
        while change > 0 and self.n_bytes > max(self._limit_bytes(), 0):
            largest = max(self._open, key=lambda client: client.n_counted, default=None)
            if largest is None or not largest.n_counted:
                return
            _LOG.warning(
                "unfinished messages of Envoys exceed intake.max_pending_bytes: closing the connection that has %d bytes",
                largest.n_counted,
            )
            largest.drop()

    async def _connect(self, client: "_Client") -> None:
        loop = asyncio.get_running_loop()
        try:
            if client not in self._open:
                return
            if not client.certificate:
                await loop.create_unix_connection(lambda: _Server(client), self._inner)
                return
            client.name = f"{self._inner}-{next(self._numbers)}"
            self._certificates[client.name] = client.certificate
            inner = _named_socket(Path(client.name))
            try:
                await loop.sock_connect(inner, self._inner)
            except OSError:
                inner.close()
                raise
            await loop.create_unix_connection(lambda: _Server(client), sock=inner)
        except OSError as error:
            _LOG.warning("the gRPC server of the intake cannot be reached: %s", error)
            client.drop()


def _named_socket(name: Path) -> socket.socket:
    """Return a Unix socket with a name, of which no file stays."""
    name.unlink(missing_ok=True)  # of an intake process that was killed
    named = socket.socket(socket.AF_UNIX)
    try:
        named.setblocking(False)
        named.bind(str(name))
        name.unlink()
    except OSError:
        named.close()
        raise
    return named


class _Client(asyncio.Protocol):
    """A connection of an Envoy."""

    def __init__(self, port: EnvoyPort) -> None:
        self._port = port
        self._transport: asyncio.Transport | None = None
        self._server: asyncio.Transport | None = None
        self._messages = UnfinishedMessages()
        self.certificate: Mapping[str, Any] | None = None
        self.name = ""  # of its Unix socket, if it has a certificate
        self._early = bytearray()  # arrived before the gRPC server was connected
        self.n_counted = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's class does not derive from it
        self._transport.pause_reading()
        self.certificate = transport.get_extra_info("peercert")
        self._port.enter(self)

    def joined(self, server: asyncio.Transport) -> asyncio.Transport | None:
        """Begin to forward to `server`; return this end, None if it is closed already."""
        if self._transport is not None:
            self._server = server
            server.write(bytes(self._early))
            self._early.clear()
            self._transport.resume_reading()
        return self._transport

    def data_received(self, data: bytes) -> None:
        if self._transport is None:
            return
        self._port.speaks(self)
        try:
            self._messages.feed(data)
        except ValueError as error:
            _LOG.debug("closing a connection of an Envoy: %s", error)
            self.drop()
            return
        change, self.n_counted = self._messages.n_bytes - self.n_counted, self._messages.n_bytes
        self._port.count(change)
        if self._server is not None:
            self._server.write(data)
        elif self._transport is not None:  # uvloop begins to read whatever `connection_made` says
            self._early += data
            self._transport.pause_reading()

    def eof_received(self) -> None:
        if self._server is not None:
            self._server.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.drop()

    def pause_writing(self) -> None:
        if self._server is not None:
            self._server.pause_reading()

    def resume_writing(self) -> None:
        if self._server is not None:
            self._server.resume_reading()

    def set_reading(self, *, reads: bool) -> None:
        """Read on, or not, because the other side does not keep up."""
        if self._transport is not None:
            (self._transport.resume_reading if reads else self._transport.pause_reading)()

    def drop(self) -> None:
        """Close both sides at once."""
        transport, server = self._transport, self._server
        self._transport = self._server = None
        self._port.leave(self)
        change, self.n_counted = -self.n_counted, 0
        self._port.count(change)
        if transport is not None:
            transport.abort()
        if server is not None:
            server.abort()


class _Server(asyncio.Protocol):
    """The connection to the gRPC server that belongs to a client's."""

    def __init__(self, client: _Client) -> None:
        self._client = client
        self._answers: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        inner = cast("asyncio.Transport", transport)
        self._answers = self._client.joined(inner)
        if self._answers is None:
            inner.abort()

    def data_received(self, data: bytes) -> None:
        if self._answers is not None and not self._answers.is_closing():
            self._answers.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answers is not None:
            self._answers.close()

    def pause_writing(self) -> None:
        self._client.set_reading(reads=False)

    def resume_writing(self) -> None:
        self._client.set_reading(reads=True)
