"""Carries bytes between clients and the backend, unchanged, and shows them to an observer afterwards.

One backend connection per client connection. The serving path waits for nothing but the peers' own pace: whoever
does not read stops the other side from being read. An observer that raises is let go of; the bytes flow on.
"""

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Callable
from typing import cast

from quantdrift.core.records import Loss
from sidecar.counters import Gauge
from sidecar.relay.observer import Observer, Scope

_LOG = logging.getLogger(__name__)

CONNECT_S = 10.0
LINGER_S = 60.0
# A little above what one read may bring, so that a single large read does not stop the reading.
_HIGH_WATER_BYTES = 256 * 1024
_READ_BYTES = 256 * 1024
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


def _ignore(_: bytes) -> None:
    """See nothing."""


class Relay:
    """Makes a `Connection` of each client that connects, and knows those that are open.

    Parameters
    ----------
    host, port
        The backend.
    scope
        Shared by the connections' observers.
    loop
        The loop that everything runs on.
    """

    def __init__(self, host: str, port: int, scope: Scope, loop: asyncio.AbstractEventLoop) -> None:
        self.host = host
        self.port = port
        self.scope = scope
        self.loop = loop
        self.connections: set[Connection] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    def accept(self) -> asyncio.Protocol:
        """Return the protocol of a client that is connecting."""
        return Connection(self).client

    def opened(self, connection: "Connection") -> None:
        """Take note of a new connection."""
        self.connections.add(connection)
        self._empty.clear()
        self.scope.slot.note(Gauge.CONNECTIONS)
        self.scope.slot.note(Gauge.OPEN)

    def closed(self, connection: "Connection") -> None:
        """Take note that both ends are gone."""
        if connection not in self.connections:
            return
        self.connections.discard(connection)
        self.scope.slot.note(Gauge.FORWARDED_BYTES, connection.report())
        self.scope.slot.note(Gauge.OPEN, -1)
        if not self.connections:
            self._empty.set()

    def tick(self) -> None:
        """Count what was forwarded, and end what lingers. Called about once a second."""
        now_s = self.loop.time()
        moved = 0
        for connection in list(self.connections):
            moved += connection.report()
            connection.expire(now_s)
        self.scope.slot.note(Gauge.FORWARDED_BYTES, moved)

    async def drain(self) -> None:
        """Close every connection as soon as it is between exchanges; return when all are closed."""
        for connection in list(self.connections):
            connection.drain()
        await self._empty.wait()

    def abort(self) -> None:
        """Close every connection at once."""
        for connection in list(self.connections):
            connection.abort()


class _Side(asyncio.Protocol):
    """One end of a connection: what it reads, the other writes."""

    __slots__ = ("connection", "forward", "has_ended", "is_lost", "n_bytes", "observe", "transport")

    def __init__(self, connection: "Connection") -> None:
        self.connection = connection
        self.transport: asyncio.Transport | None = None
        self.forward: Callable[[bytes], None] = connection.wait
        self.observe: Callable[[bytes], None] = _ignore
        self.n_bytes = 0
        self.has_ended = False  # it sends no more
        self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=_HIGH_WATER_BYTES)
        self.connection.made(self)

    def data_received(self, data: bytes) -> None:
        self.forward(data)
        self.n_bytes += len(data)
        try:
            self.observe(data)
        except Exception:  # noqa: BLE001 - an observer on the serving path
            self.connection.let_go()

    def eof_received(self) -> bool:
        self.connection.ended(self)
        return True  # the other direction goes on

    def pause_writing(self) -> None:
        self.connection.other(self).pause()

    def resume_writing(self) -> None:
        self.connection.other(self).resume()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None and self is self.connection.backend:
            self.read_rest()
        self.is_lost = True
        self.connection.lost(self, exc)

    @property
    def waiting_bytes(self) -> int:
        return 0 if self.transport is None else self.transport.get_write_buffer_size()

    def pause(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()

    def resume(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    def read_rest(self) -> None:
        """Take what has arrived: a failed write ends the transport, and an early answer (413, say) may lie unread."""
        if self.transport is None:
            return
        end = self.transport.get_extra_info("socket")
        with contextlib.suppress(OSError):  # there is nothing more, or it was reset
            while data := os.read(end.fileno(), _READ_BYTES):
                self.data_received(data)

    def end(self) -> None:
        """Send what waits, then say that no more comes."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write_eof()

    def close(self, *, reset: bool = False) -> None:
        """Send what waits, then close; `reset` tells the peer that it was no orderly end."""
        if self.transport is None:
            return
        if reset and not self.is_lost:
            end = self.transport.get_extra_info("socket")
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.transport.close()

    def abort(self) -> None:
        """Close without sending what waits."""
        if self.transport is not None:
            self.transport.abort()


class Connection:
    """A client's connection and the backend's that belongs to it.

    Parameters
    ----------
    relay
        Knows the backend and all connections.

    Attributes
    ----------
    client, backend
        Its two ends.
    """

    __slots__ = (
        "_connecting",
        "_early",
        "_is_closing",
        "_observer",
        "_quiet",
        "_quiet_since_s",
        "_relay",
        "_reported_bytes",
        "backend",
        "client",
    )

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._early: list[bytes] = []
        self._connecting: asyncio.Task[None] | None = None
        self._is_closing = False
        self._reported_bytes = 0
        self._quiet: tuple[int, int, int] | None = None
        self._quiet_since_s = 0.0
        self._observer: Observer | None = None
        self.client = _Side(self)
        self.backend = _Side(self)
        self._guard(self._watch)

    def other(self, side: _Side) -> _Side:
        """Return the end that is not `side`."""
        return self.backend if side is self.client else self.client

    def wait(self, data: bytes) -> None:
        """Keep what the client sent before the backend was there, and let it send no more."""
        self._early.append(data)
        self.client.pause()

    def made(self, side: _Side) -> None:
        """Take note that one end is connected."""
        if side is self.client:
            self._relay.opened(self)
            self._connecting = self._relay.loop.create_task(self._connect())
        elif self.client.is_lost:
            side.abort()
        else:
            self._join()

    def ended(self, side: _Side) -> None:
        """Take note that `side` sends no more, and tell the other one."""
        side.has_ended = True
        if side is self.backend and self._observer is not None:
            self._guard(self._observer.response_eof)
        self.other(side).end()
        if self.other(side).has_ended:
            self._close()

    def lost(self, side: _Side, error: Exception | None) -> None:
        """Take note that `side` is gone, and end the other one in the same way."""
        if self._observer is not None:
            self._guard(self._observer.close)
            self._stop_watching()
        other = self.other(side)
        if other.transport is None and self._connecting is not None:
            self._connecting.cancel()
        if not other.is_lost:
            other.close(reset=error is not None)
            if side is self.client and error is not None:
                other.abort()  # nobody is left to want an answer
        if other.is_lost or other.transport is None:
            self._relay.closed(self)

    def drain(self) -> None:
        """Close as soon as it is between exchanges. Where that is not known, it stays."""
        if self._observer is not None:
            self.backend.observe = self._observe_last
            self._guard(self._close_if_idle)

    def abort(self) -> None:
        """Close at once."""
        self._is_closing = True
        self.client.abort()
        self.backend.abort()

    def expire(self, now_s: float) -> None:
        """Close at once where an end came from us or the backend, and nothing has moved since `LINGER_S`."""
        if not self._is_closing and not self.backend.has_ended:
            return
        state = (self.client.n_bytes, self.client.waiting_bytes, self.backend.waiting_bytes)
        if state != self._quiet:
            self._quiet = state
            self._quiet_since_s = now_s
        elif now_s - self._quiet_since_s >= LINGER_S:
            self.abort()

    def report(self) -> int:
        """Return how many bytes were forwarded since the last report."""
        total = self.client.n_bytes + self.backend.n_bytes
        moved, self._reported_bytes = total - self._reported_bytes, total
        return moved

    def let_go(self) -> None:
        """Go on without the observer, which has just raised."""
        slot = self._relay.scope.slot
        slot.note(Gauge.OBSERVER_ERRORS)
        n_errors = slot.gauge(Gauge.OBSERVER_ERRORS)
        if n_errors & (n_errors - 1) == 0:  # 1, 2, 4, 8: a fault on every connection must not flood the log
            _LOG.exception("an observer failed (%d times so far): bytes flow on without it", n_errors)
        observer = self._observer
        self._stop_watching()
        if observer is not None:
            if observer.is_active:
                slot.note(Gauge.BLIND)
            self._guard(lambda: observer.abandon(Loss.OBSERVER_ERROR))

    def _guard(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception:  # noqa: BLE001 - an observer on the serving path
            self.let_go()

    def _watch(self) -> None:
        observer = Observer(self._relay.scope)
        self._observer = observer
        self.client.observe = observer.request
        self.backend.observe = observer.response

    def _stop_watching(self) -> None:
        self._observer = None
        self.client.observe = self.backend.observe = _ignore

    def _observe_last(self, data: bytes) -> None:
        if self._observer is not None:
            self._observer.response(data)
            self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._observer is not None and self._observer.is_idle:
            self._close()

    async def _connect(self) -> None:
        relay = self._relay
        try:
            async with asyncio.timeout(CONNECT_S):
                await relay.loop.create_connection(lambda: self.backend, relay.host, relay.port)
        except OSError as error:
            relay.scope.slot.note(Gauge.BACKEND_FAILED)
            _LOG.debug("the backend cannot be reached: %s", error)
            self.abort()

    def _join(self) -> None:
        assert self.client.transport is not None
        assert self.backend.transport is not None
        self.client.forward = self.backend.transport.write
        self.backend.forward = self.client.transport.write
        self.client.resume()
        for data in self._early:
            self.client.forward(data)
        self._early.clear()
        if self.client.has_ended:
            self.backend.end()

    def _close(self) -> None:
        self._is_closing = True
        self.client.close()
        self.backend.close()
        if self._connecting is not None and self.backend.transport is None:
            self._connecting.cancel()
