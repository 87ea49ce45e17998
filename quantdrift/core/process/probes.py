"""A listener for probes from outside: it answers /livez and /readyz, and nothing else.

It has no HTTP library behind it: a request is compared with a few bytes, answered and the connection closed. So it may be
open to strangers in a process that must not die.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import cast

_LOG = logging.getLogger(__name__)

# Above what the event loop accepts in one turn: else connections would be closed before they were read.
MAX_CONNECTIONS = 256
MAX_HEAD_BYTES = 2048  # a kubelet's request has some 150
MAX_S = 5.0  # from the start of a connection to its answer

_END = b"\r\n\r\n"
_ANSWERS = {
    200: (b"200 OK", b"ok\n"),
    503: (b"503 Service Unavailable", b"not ok\n"),
    404: (b"404 Not Found", b""),
}


class Probes:
    """The listener, on a socket that listens already.

    One connection more than `MAX_CONNECTIONS` closes the one that has been open longest.

    Parameters
    ----------
    listener
        Non-blocking; closed by `stop`.
    ready, live
        Called for each request of /readyz and /livez: whether the answer is 200 or 503.
    """

    def __init__(
        self, listener: socket.socket, *, ready: Callable[[], bool], live: Callable[[], bool]
    ) -> None:
        self._listener = listener
        self._checks = {b"/readyz": ready, b"/livez": live}
        self._open: dict[_Connection, None] = {}
        self._server: asyncio.Server | None = None
        self._is_full = False

    async def start(self) -> None:
        """Start answering."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), sock=self._listener)

    def stop(self) -> None:
        """Close the listener and every connection."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._open):
            connection.abort()

    def enter(self, connection: "_Connection") -> None:
        """Add a connection; close the one that has been open longest if there are too many."""
        if len(self._open) >= MAX_CONNECTIONS:
            if not self._is_full:
                self._is_full = True
                _LOG.warning(
                    "sidecar.probes has %d open connections: the longest open one is closed for each further one",
                    MAX_CONNECTIONS,
                )
            next(iter(self._open)).abort()
        self._open[connection] = None

    def leave(self, connection: "_Connection") -> None:
        """Remove a connection."""
        self._open.pop(connection, None)
        if not self._open:
            self._is_full = False

    def answer(self, head: bytes) -> bytes:
        """Return the answer to a request, whose head is complete."""
        method, _, rest = head.partition(b"\r\n")[0].partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        check = self._checks.get(path) if method in (b"GET", b"HEAD") else None
        status, body = _ANSWERS[404 if check is None else 200 if check() else 503]
        return (
            b"HTTP/1.1 %b\r\nContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b"
            % (
                status,
                len(body),
                b"" if method == b"HEAD" else body,
            )
        )


class _Connection(asyncio.Protocol):
    """One connection: one request, one answer."""

    __slots__ = ("_head", "_probes", "_timer", "_transport")

    def __init__(self, probes: Probes) -> None:
        self._probes = probes
        self._head = b""
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's class does not derive from it
        self._timer = asyncio.get_running_loop().call_later(MAX_S, self.abort)
        self._probes.enter(self)

    def data_received(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        self._head += data[: MAX_HEAD_BYTES + 1 - len(self._head)]
        if _END in self._head:
            self._transport.write(self._probes.answer(self._head))
            self._transport.close()  # the timer goes on, because the peer may not read
        elif len(self._head) > MAX_HEAD_BYTES:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._probes.leave(self)
        if self._timer is not None:
            self._timer.cancel()

    def abort(self) -> None:
        """Close it at once."""
        self._probes.leave(self)
        if self._transport is not None:
            self._transport.abort()
