"""Carries bytes between clients and the backend, unchanged, and shows them to an observer afterwards.

One backend connection per client connection. The serving path waits for nothing but the peers' own pace: whoever
does not read stops the other side from being read. An observer that raises is let go of; the bytes flow on.
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterable
from types import FrameType
from typing import cast

from quantdrift.core.records import Loss
from quantdrift.sidecar.relay.backpressure import LONG_BYTES, READ_BYTES, ROOM, Backpressure
from quantdrift.sidecar.relay.observing.observer import CaptureScope, ExchangeObserver
from quantdrift.sidecar.relay.protocol_detection import ProtocolDetector
from quantdrift.sidecar.state.counters import Gauge
from quantdrift.sidecar.state.traffic_warnings import cause

_LOG = logging.getLogger(__name__)

CONNECT_S = 10.0
SLOW_S = 1.0
RETRY_S = 0.05
LINGER_S = 60.0
QUIET_S = 1.0
PATIENCE_S = 3.0

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_GLANCE_BYTES = 4096  # of a long read: what begins in it mostly says how long it is
_SHORT_BYTES = 4 * _GLANCE_BYTES  # it costs less to copy these than to ask


def ignore(_: bytes) -> None:
    """Do nothing with received bytes."""


def skip(n_bytes: int) -> int:
    """Look at none of the next bytes."""
    return n_bytes


class ConnectionEnd(asyncio.Protocol):
    """One end of a connection: what it reads, the other writes.

    An end that has brought a long read reads into a room that all share (`waiting.Reader`). From there a long read goes
    straight to the other end's socket where nothing waits for it; only what it does not take, and what an observer needs
    to see, is copied. Short reads cost less without.

    Parameters
    ----------
    connection
        Whose end it is.

    Attributes
    ----------
    transport : asyncio.Transport or None
        None until it is connected.
    forward, observe : callable
        What is done with received bytes: first this, then that.
    skip : callable
        Told how many bytes come next, returns how many of them `observe` need not see.
    n_bytes : int
        Received so far.
    has_ended : bool
        Whether it sends no more.
    is_full : bool
        Whether more waits for it than may: the other end is not read.
    is_lost : bool
        Whether it is gone.
    """

    __slots__ = (
        "connection",
        "forward",
        "has_ended",
        "has_reader",
        "is_full",
        "is_lost",
        "n_bytes",
        "observe",
        "skip",
        "target",
        "target_fd",
        "transport",
    )

    def __init__(self, connection: "Connection") -> None:
        self.connection = connection
        self.transport: asyncio.Transport | None = None
        self.target: asyncio.Transport | None = None
        self.target_fd = -1
        self.forward: Callable[[bytes], None] = connection.wait
        self.observe: Callable[[bytes], None] = ignore
        self.skip: Callable[[int], int] = skip
        self.n_bytes = 0
        self.has_ended = False  # it sends no more
        self.has_reader = False
        self.is_full = False
        self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take note that it is connected."""
        self.transport = cast("asyncio.Transport", transport)
        self.connection.made(self)
        self.connection.waiting.settle(self)

    def updated(self, nbytes: int) -> None:
        """Forward so many bytes that lie in the room, then observe."""
        if nbytes <= _SHORT_BYTES:
            self.data_received(bytes(ROOM[:nbytes]))
            return
        data, n_sent = ROOM[:nbytes], 0
        target = self.target
        if target is not None and not target.get_write_buffer_size() and not target.is_closing():
            try:  # noqa: SIM105 - what it would call costs more than all else here
                n_sent = os.write(self.target_fd, data)
            except OSError:
                pass  # its transport meets the same, and waits or ends
        if n_sent < nbytes:
            self.forward(bytes(data[n_sent:]))
        self.n_bytes += nbytes
        self._show(data, nbytes)

    def data_received(self, data: bytes) -> None:
        """Forward, then observe."""
        self.forward(data)
        n_bytes = len(data)
        self.n_bytes += n_bytes
        self._show(data, n_bytes)
        if n_bytes >= LONG_BYTES and not self.has_reader:
            self.connection.waiting.widen(self)

    def read_by(self, reader: asyncio.BaseProtocol) -> None:
        """Have another protocol read from it: this one, or one that passes everything on to it."""
        if self.transport is None or self.transport.is_closing():
            return
        self.has_reader = reader is not self
        is_reading = self.transport.is_reading()
        if is_reading:
            self.transport.pause_reading()
        self.transport.set_protocol(reader)
        if is_reading:
            self.transport.resume_reading()

    def read_shared(self) -> None:
        """Read into the buffer that all ends of the worker share."""
        self.read_by(SharedReader(self))

    def read_alone(self) -> None:
        """Read into buffers of its own."""
        self.read_by(self)

    def send_to(self, target: asyncio.Transport) -> None:
        """Forward to another end's transport from now on."""
        self.forward = target.write
        end = target.get_extra_info("socket")
        if end is not None:
            self.target, self.target_fd = target, end.fileno()

    def send_nowhere(self) -> None:
        """Forward no more."""
        self.forward, self.target = ignore, None

    def eof_received(self) -> bool:
        """Take note that it sends no more."""
        self.connection.ended(self)
        return True  # the other direction goes on

    def pause_writing(self) -> None:
        """Let the other end send no more: this one does not read."""
        self.fill()
        self.connection.other(self).pause()

    def resume_writing(self) -> None:
        """Let the other end go on."""
        self.empty()
        self.connection.other(self).resume()

    def connection_lost(self, exc: Exception | None) -> None:
        """Take note that it is gone."""
        if exc is not None and self is self.connection.backend and not self.connection.client.is_lost:
            self.read_rest()
        self.is_lost = True
        self.empty()
        self.connection.lost(self, exc)

    def fill(self) -> None:
        """Take note that more waits for it than may."""
        if not self.is_full and not self.is_lost:
            self.is_full = True
            self.connection.waiting.filled()

    def empty(self) -> None:
        """Take note that it has taken enough, or is gone."""
        if self.is_full:
            self.is_full = False
            self.connection.waiting.emptied()

    def limit(self, high_bytes: int) -> None:
        """Let so much wait for it before the other end is read no more."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.set_write_buffer_limits(high=high_bytes)

    @property
    def waiting_bytes(self) -> int:
        """What it has not taken yet."""
        return 0 if self.transport is None else self.transport.get_write_buffer_size()

    def pause(self) -> None:
        """Read no more from it."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()

    def resume(self) -> None:
        """Read from it again."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    def read_rest(self) -> None:
        """Take what has arrived: a failed write ends the transport, and an early answer (413, say) may lie unread."""
        if self.transport is None:
            return
        end = self.transport.get_extra_info("socket")
        with contextlib.suppress(OSError):  # there is nothing more, or it was reset
            while data := os.read(end.fileno(), READ_BYTES):
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

    def _show(self, data: bytes | memoryview, n_bytes: int) -> None:
        """Let the observer see what it needs to, in as many parts as is cheapest: it counts on none."""
        try:
            if n_bytes > _SHORT_BYTES:
                start = self.skip(n_bytes)
                if n_bytes - start > _SHORT_BYTES:
                    stop = start + _GLANCE_BYTES
                    self.observe(bytes(data[start:stop]))
                    start = stop + self.skip(n_bytes - stop)
                if start == n_bytes:
                    return
                data = data[start:]
            self.observe(bytes(data))
        except Exception:  # noqa: BLE001 - an observer on the serving path
            self.connection.let_go()

    # What of it calls an observer, and catches whatever that raises.
    showing = _show.__code__


class SharedReader(asyncio.BufferedProtocol):
    """Reads for a side into the room that all share.

    Parameters
    ----------
    side
        What is told of everything.
    """

    __slots__ = ("_side",)

    def __init__(self, side: "ConnectionEnd") -> None:
        self._side = side

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes go."""
        return self._side.connection.waiting.room

    def buffer_updated(self, nbytes: int) -> None:
        """Pass on what has come."""
        self._side.updated(nbytes)

    def eof_received(self) -> bool:
        """Pass on that no more comes."""
        return self._side.eof_received()

    def pause_writing(self) -> None:
        """Pass on that it does not read."""
        self._side.pause_writing()

    def resume_writing(self) -> None:
        """Pass on that it reads again."""
        self._side.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass on that it is gone."""
        self._side.connection_lost(exc)


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

    def __init__(self, host: str, port: int, scope: CaptureScope, loop: asyncio.AbstractEventLoop) -> None:
        self.host = host
        self.port = port
        self.scope = scope
        self.loop = loop
        self.connections: set[Connection] = set()
        self.waiting = Backpressure(self._sides, scope.slot)
        self.is_observing = True
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
        self.waiting.opened(len(self.connections))

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
        self.waiting.relax(len(self.connections))

    def look_away(self) -> None:
        """Observe no connection any more, for as long as this process lives."""
        self.is_observing = False
        for connection in list(self.connections):
            connection.look_away()

    async def drain(self) -> None:
        """Close every connection as soon as it is between exchanges; return when all are closed.

        A client of HTTP/2 cannot be told beforehand: what it sends while it is being closed fails. So it is closed
        when it has been quiet for `QUIET_S`, and only after `PATIENCE_S` at the first moment without an exchange.
        """
        for connection in list(self.connections):
            connection.drain(patient=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await self._empty.wait()
        for connection in list(self.connections):
            connection.drain(patient=False)
        await self._empty.wait()

    def abort(self) -> None:
        """Close every connection at once."""
        for connection in list(self.connections):
            connection.abort()

    def _sides(self) -> Iterable[ConnectionEnd]:
        for connection in list(self.connections):
            yield connection.client
            yield connection.backend


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
    waiting
        Bounds what waits for them.
    """

    __slots__ = (
        "_connecting",
        "_early",
        "_is_closing",
        "_is_draining",
        "_is_patient",
        "_observer",
        "_quiet",
        "_quiet_since_s",
        "_relay",
        "_reported_bytes",
        "backend",
        "client",
        "waiting",
    )

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._early: list[bytes] = []
        self._connecting: asyncio.Task[None] | None = None
        self._is_closing = False
        self._is_draining = self._is_patient = False
        self._reported_bytes = 0
        self._quiet: tuple[int, int, int] | None = None
        self._quiet_since_s = 0.0
        self._observer: ExchangeObserver | None = None
        self.waiting = relay.waiting
        self.client = ConnectionEnd(self)
        self.backend = ConnectionEnd(self)

    def other(self, side: ConnectionEnd) -> ConnectionEnd:
        """Return the end that is not `side`."""
        return self.backend if side is self.client else self.client

    def wait(self, data: bytes) -> None:
        """Keep what the client sent before the backend was there, and let it send no more."""
        self._early.append(data)
        self.backend.fill()
        self.client.pause()

    def made(self, side: ConnectionEnd) -> None:
        """Take note that one end is connected."""
        if side is self.client:
            self._relay.opened(self)
            if self._relay.is_observing and len(self._relay.connections) <= self._relay.scope.max_connections:
                self._guard(self._watch)
            else:
                self._relay.scope.slot.note(Gauge.UNOBSERVED)
            self._connecting = self._relay.loop.create_task(self._connect())
        elif self.client.is_lost:
            side.abort()
        else:
            self._join()

    def ended(self, side: ConnectionEnd) -> None:
        """Take note that `side` sends no more, and tell the other one."""
        side.has_ended = True
        if side is self.backend and self._observer is not None:
            self._guard(self._observer.response_eof)
        self.other(side).end()
        if self.other(side).has_ended:
            self._close()

    def lost(self, side: ConnectionEnd, error: Exception | None) -> None:
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
            other.empty()
            self._relay.closed(self)

    def drain(self, *, patient: bool) -> None:
        """Close as soon as it is between exchanges. Where that is not known, it stays.

        Parameters
        ----------
        patient
            Whether a client that may send something at any time must have been quiet for some time.
        """
        self._is_draining = True
        self._is_patient = patient
        if self._observer is not None:
            self._follow(self._observer)
            if not self._waits_for_quiet:
                self._guard(self._close_if_idle)

    def abort(self) -> None:
        """Close at once."""
        self._is_closing = True
        self.client.abort()
        self.backend.abort()

    def expire(self, now_s: float) -> None:
        """Close what is over, or draining, and has not moved for long enough. Called about once a second."""
        if self._is_closing or self.backend.has_ended:
            limit_s, close = LINGER_S, self.abort
        elif self._is_draining:
            limit_s, close = QUIET_S, self._close_if_idle
        else:
            return
        state = (self.client.n_bytes, self.client.waiting_bytes, self.backend.waiting_bytes)
        if state != self._quiet:
            self._quiet = state
            self._quiet_since_s = now_s
        elif now_s - self._quiet_since_s >= limit_s:
            self._guard(close)

    def report(self) -> int:
        """Return how many bytes were forwarded since the last report."""
        total = self.client.n_bytes + self.backend.n_bytes
        moved, self._reported_bytes = total - self._reported_bytes, total
        return moved

    def look_away(self) -> None:
        """Go on without an observer."""
        observer = self._observer
        self._stop_watching()
        if observer is not None:
            if observer.is_active:
                self._relay.scope.slot.note(Gauge.BLIND)
            self._guard(lambda: observer.abandon(Loss.OBSERVER_ERROR))

    def let_go(self) -> None:
        """Go on without the observer, which has just raised."""
        slot = self._relay.scope.slot
        slot.note(Gauge.OBSERVER_ERRORS)
        n_errors = slot.gauge(Gauge.OBSERVER_ERRORS)
        if n_errors & (n_errors - 1) == 0:  # 1, 2, 4, 8: a fault on every connection must not flood the log
            _LOG.exception("an observer failed (%d times so far): bytes flow on without it", n_errors)
        self.look_away()

    @classmethod
    def observing(cls, frame: FrameType | None) -> FrameType | None:
        """Return the frame that has called an observer which is at work in `frame`, and catches what it raises."""
        below: FrameType | None = None
        while frame is not None:
            if frame.f_code is cls._guard.__code__:
                return frame
            if frame.f_code is ConnectionEnd.showing:
                return frame if below is not None else None
            below, frame = frame, frame.f_back
        return None

    def _guard(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception:  # noqa: BLE001 - an observer on the serving path
            self.let_go()

    def _watch(self) -> None:
        self._follow(ProtocolDetector(self._relay.scope, self._follow))

    def _follow(self, observer: ExchangeObserver) -> None:
        """Show the bytes to `observer` from now on."""
        self._observer = observer
        self.client.observe, self.backend.observe = observer.request, observer.response
        self.client.skip, self.backend.skip = observer.skip_request, observer.skip_response
        if self._is_draining and not self._waits_for_quiet:
            self.client.observe = self._closing(observer.request)
            self.backend.observe = self._closing(observer.response)
            self.client.skip = self.backend.skip = _skip_nothing

    @property
    def _waits_for_quiet(self) -> bool:
        return self._is_patient and self._observer is not None and self._observer.speaks_unasked

    def _stop_watching(self) -> None:
        self._observer = None
        self.client.observe = self.backend.observe = ignore
        self.client.skip = self.backend.skip = skip

    def _closing(self, observe: Callable[[bytes], None]) -> Callable[[bytes], None]:
        """Return `observe`, but closing the connection where that leaves it between exchanges."""

        def look(data: bytes) -> None:
            observe(data)
            self._close_if_idle()

        return look

    def _close_if_idle(self) -> None:
        if self._observer is None or not self._observer.is_idle:
            return
        if self._observer.speaks_unasked:
            self._part()
        else:
            self._close()

    def _part(self) -> None:
        """Tell the client that no more comes, and close once it has closed. What it sends until then reaches nobody.

        To close at once would reset its connection as soon as it sends anything, and cost it what it has not read yet.
        """
        self._is_closing = True
        self._stop_watching()
        self.client.send_nowhere()
        self.backend.send_nowhere()
        self.backend.has_ended = True
        self.client.end()

    async def _connect(self) -> None:
        slot = self._relay.scope.slot
        try:
            async with asyncio.timeout(CONNECT_S) as limit:
                await self._reach_backend()
        except OSError as error:
            slot.note(Gauge.BACKEND_FAILED)
            slot.set(Gauge.BACKEND_ERROR, cause(error))
            self.abort()
        except asyncio.CancelledError:
            ends_s = limit.when()
            if ends_s is not None and ends_s - self._relay.loop.time() < CONNECT_S - SLOW_S:
                slot.note(Gauge.BACKEND_FAILED)  # the client gave up first
                slot.set(Gauge.BACKEND_ERROR, errno.ETIMEDOUT)
            raise
        else:
            slot.note(Gauge.BACKEND_REACHED)

    async def _reach_backend(self) -> None:
        relay = self._relay
        while True:
            try:
                await relay.loop.create_connection(lambda: self.backend, relay.host, relay.port)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                await asyncio.sleep(RETRY_S)  # others will go
            else:
                return

    def _join(self) -> None:
        assert self.client.transport is not None
        assert self.backend.transport is not None
        self.client.send_to(self.backend.transport)
        self.backend.send_to(self.client.transport)
        self.backend.empty()
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


def _skip_nothing(_: int) -> int:
    """Look at all of the next bytes."""
    return 0
