"""The relay: it forwards bytes between clients and the backend unchanged, then passes them to an observer.

There is one backend connection for each client connection. The serving path waits for the two peers only: a
peer that does not read stops the relay from reading the other one. An observer that raises is removed;
forwarding continues.
"""

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import socket
import struct
import termios
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import cast

from quantdrift.core.records import Loss
from quantdrift.sidecar.relay.backpressure import LONG_READ_BYTES, READ_BYTES, SHARED_BUFFER, Backpressure
from quantdrift.sidecar.relay.observing.limit import FEW_BYTES, ObserverLimit
from quantdrift.sidecar.relay.observing.observer import CaptureScope, ExchangeObserver, Unobserved
from quantdrift.sidecar.relay.protocol_detection import ProtocolDetector
from quantdrift.sidecar.state.counters import Gauge
from quantdrift.sidecar.state.traffic_warnings import connect_errno

_LOG = logging.getLogger(__name__)

CONNECT_S = 10.0
SLOW_S = 1.0
RETRY_S = 0.05
LINGER_S = 60.0
QUIET_S = 1.0
PATIENCE_S = 3.0
REST_S = 0.2  # also for the first request of the clients that were accepted last
HTTP1_LINGER_S = 0.5

_CORK: int | None = getattr(socket, "TCP_CORK", None)
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_PEEK_BYTES = 4096  # looked at first in a long read: a message that begins there mostly states its length
_SHORT_BYTES = 4 * _PEEK_BYTES  # copying so few costs less than asking the observer what it needs


def ignore(_: bytes) -> None:
    """Discard received bytes."""


def skip(n_bytes: int) -> int:
    """Skip all of the next bytes; return their number."""
    return n_bytes


class ConnectionEnd(asyncio.Protocol):
    """One end of a connection: what it reads, the other end writes.

    An end that has had a long read uses the shared buffer from then on (`SharedReader`). From there a long
    read is written straight to the other end's socket if that end has no unsent data. Only what the socket
    does not take, and what the observer needs, is copied. Short reads are cheaper with buffers of the event
    loop.

    Parameters
    ----------
    connection
        The connection that this end belongs to.

    Attributes
    ----------
    transport : asyncio.Transport or None
        None until it is connected.
    forward, observe : callable
        Called with received bytes: first `forward`, then `observe`.
    skip : callable
        Called with the number of the next bytes; returns how many of them `observe` does not need.
    n_bytes : int
        Received so far.
    has_ended : bool
        Whether the peer has sent its end of file.
    is_stalled : bool
        Whether its unsent data is above the limit, so that the other end is not read.
    is_lost : bool
        Whether the connection is closed or broken.
    """

    __slots__ = (
        "connection",
        "forward",
        "has_ended",
        "is_lost",
        "is_stalled",
        "n_bytes",
        "observe",
        "skip",
        "target",
        "target_fd",
        "transport",
        "uses_shared_buffer",
    )

    def __init__(self, connection: "RelayedConnection") -> None:
        self.connection = connection
        self.transport: asyncio.Transport | None = None
        self.target: asyncio.Transport | None = None
        self.target_fd = -1
        self.forward: Callable[[bytes], None] = connection.buffer_early
        self.observe: Callable[[bytes], None] = ignore
        self.skip: Callable[[int], int] = skip
        self.n_bytes = 0
        self.has_ended = False
        self.uses_shared_buffer = False
        self.is_stalled = False
        self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport and apply the present limits."""
        self.transport = cast("asyncio.Transport", transport)
        self.connection.connected(self)
        self.connection.backpressure.limit_new(self)

    def shared_data_received(self, nbytes: int) -> None:
        """Forward the first `nbytes` of the shared buffer, then observe them."""
        if nbytes <= _SHORT_BYTES:
            self.data_received(bytes(SHARED_BUFFER[:nbytes]))
            return
        data, n_sent = SHARED_BUFFER[:nbytes], 0
        target = self.target
        if target is not None and not target.get_write_buffer_size() and not target.is_closing():
            try:  # noqa: SIM105 - contextlib.suppress costs more than everything else here
                n_sent = os.write(self.target_fd, data)
            except OSError:
                pass  # its transport meets the same error, and waits or closes
        if n_sent < nbytes:
            self.forward(bytes(data[n_sent:]))
        self.n_bytes += nbytes
        self._observe(data, nbytes)

    def data_received(self, data: bytes) -> None:
        """Forward, then observe."""
        self.forward(data)
        n_bytes = len(data)
        self.n_bytes += n_bytes
        self._observe(data, n_bytes)
        if n_bytes >= LONG_READ_BYTES and not self.uses_shared_buffer:
            self.read_shared()

    def set_reader(self, reader: asyncio.BaseProtocol) -> None:
        """Set the protocol that reads from the transport: this end, or a `SharedReader` that calls it."""
        if self.transport is None or self.transport.is_closing():
            return
        self.uses_shared_buffer = reader is not self
        is_reading = self.transport.is_reading()
        if is_reading:
            self.transport.pause_reading()
        self.transport.set_protocol(reader)
        if is_reading:
            self.transport.resume_reading()

    def read_shared(self) -> None:
        """Read into the buffer that all ends of the worker share."""
        self.set_reader(SharedReader(self))

    def read_private(self) -> None:
        """Read into buffers of its own."""
        self.set_reader(self)

    def forward_to(self, target: asyncio.Transport) -> None:
        """Forward received bytes to `target` from now on."""
        self.forward = target.write
        target_socket = target.get_extra_info("socket")
        if target_socket is not None:
            self.target, self.target_fd = target, target_socket.fileno()

    def stop_forwarding(self) -> None:
        """Discard received bytes from now on."""
        self.forward, self.target = ignore, None

    def eof_received(self) -> bool:
        """Pass the peer's end of file on to the other end."""
        self.connection.eof_received(self)
        return True  # the other direction goes on

    def pause_writing(self) -> None:
        """Stop reading from the other end, because this peer does not read."""
        self.mark_stalled()
        self.connection.other(self).pause()

    def resume_writing(self) -> None:
        """Read from the other end again."""
        self.mark_drained()
        self.connection.other(self).resume()

    def connection_lost(self, exc: Exception | None) -> None:
        """Close the other end too; after an error, read first what the backend has sent."""
        if exc is not None and self is self.connection.backend and not self.connection.client.is_lost:
            self.read_remaining()
        self.is_lost = True
        self.mark_drained()
        self.connection.lost(self, exc)

    def mark_stalled(self) -> None:
        """Note that its unsent data is above the limit."""
        if not self.is_stalled and not self.is_lost:
            self.is_stalled = True
            self.connection.backpressure.peer_stalled()

    def mark_drained(self) -> None:
        """Note that its unsent data is below the limit again, or that it is closed."""
        if self.is_stalled:
            self.is_stalled = False
            self.connection.backpressure.peer_resumed()

    def limit(self, high_bytes: int) -> None:
        """Set how much data may be unsent before the other end is no longer read."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.set_write_buffer_limits(high=high_bytes)

    @property
    def unsent_bytes(self) -> int:
        """Bytes in the write buffer of its transport."""
        return 0 if self.transport is None else self.transport.get_write_buffer_size()

    def pause(self) -> None:
        """Stop reading from it."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()

    def resume(self) -> None:
        """Read from it again."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    def read_remaining(self) -> None:
        """Read what has arrived already.

        A failed write closes the transport, and an early answer (413, say) may be unread.
        """
        if self.transport is None:
            return
        own_socket = self.transport.get_extra_info("socket")
        with contextlib.suppress(OSError):  # there is no more data, or the connection was reset
            while data := os.read(own_socket.fileno(), READ_BYTES):
                self.data_received(data)

    def cork(self, *, on: bool) -> None:
        """Hold back the last, incomplete packet (Linux), so that an end of file can go with it."""
        if self.transport is not None and not self.transport.is_closing() and _CORK is not None:
            with contextlib.suppress(OSError):
                self.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, _CORK, int(on))

    @property
    def has_unread(self) -> bool:
        """Whether bytes of the peer have arrived that the event loop has not read yet."""
        if self.transport is None or self.transport.is_closing():
            return False
        own_socket = self.transport.get_extra_info("socket")
        try:
            return any(fcntl.ioctl(own_socket.fileno(), termios.FIONREAD, bytes(4)))
        except OSError:
            return False

    def send_eof(self) -> None:
        """Send what is unsent, then an end of file."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write_eof()

    def close(self, *, reset: bool = False) -> None:
        """Send what is unsent, then close; `reset` sends the peer a reset instead of an orderly end."""
        if self.transport is None:
            return
        if reset and not self.is_lost:
            own_socket = self.transport.get_extra_info("socket")
            own_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.transport.close()

    def abort(self) -> None:
        """Close without sending what is unsent."""
        if self.transport is not None:
            self.transport.abort()

    def _observe(self, data: bytes | memoryview, n_bytes: int) -> None:
        """Pass the observer the bytes that it needs, cut into whatever parts are cheapest."""
        try:
            if n_bytes > _SHORT_BYTES:
                start = self.skip(n_bytes)
                if n_bytes - start > _SHORT_BYTES:
                    stop = start + _PEEK_BYTES
                    self.observe(bytes(data[start:stop]))
                    start = stop + self.skip(n_bytes - stop)
                if start == n_bytes:
                    return
                data = data[start:]
            self.observe(bytes(data))
        except Exception:  # noqa: BLE001 - an observer on the serving path
            self.connection.drop_observer()

    # The code that calls an observer and catches whatever it raises; `find_observer_call` looks for it.
    observe_code = _observe.__code__


class SharedReader(asyncio.BufferedProtocol):
    """The protocol of an end that reads into the shared buffer: it passes every call on to the end."""

    __slots__ = ("_end",)

    def __init__(self, end: "ConnectionEnd") -> None:
        self._end = end

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next read."""
        return self._end.connection.backpressure.read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Pass on received bytes."""
        self._end.shared_data_received(nbytes)

    def eof_received(self) -> bool:
        """Pass on the end of file."""
        return self._end.eof_received()

    def pause_writing(self) -> None:
        """Pass on that the peer does not read."""
        self._end.pause_writing()

    def resume_writing(self) -> None:
        """Pass on that the peer reads again."""
        self._end.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass on that the connection is lost."""
        self._end.connection_lost(exc)


class Relay:
    """The set of open connections; it makes a `RelayedConnection` for each client.

    Parameters
    ----------
    host, port
        The backend.
    scope
        Shared by the connections' observers.
    loop
        The event loop of the worker.
    """

    def __init__(self, host: str, port: int, scope: CaptureScope, loop: asyncio.AbstractEventLoop) -> None:
        self.host = host
        self.port = port
        self.scope = scope
        self.loop = loop
        self.connections: set[RelayedConnection] = set()
        self.backpressure = Backpressure(self._ends, scope.slot)
        self.observed = ObserverLimit()
        self.is_observing = True
        self._empty = asyncio.Event()
        self._empty.set()

    def accept(self) -> asyncio.Protocol:
        """Return the protocol of a client that is connecting."""
        return RelayedConnection(self).client

    def opened(self, connection: "RelayedConnection") -> None:
        """Register a new connection."""
        self.connections.add(connection)
        self._empty.clear()
        self.scope.slot.adjust(Gauge.CONNECTIONS)
        self.scope.slot.adjust(Gauge.OPEN)
        self.backpressure.opened(len(self.connections))

    def closed(self, connection: "RelayedConnection") -> None:
        """Remove a connection whose two ends are closed."""
        if connection not in self.connections:
            return
        self.connections.discard(connection)
        self.scope.slot.adjust(Gauge.FORWARDED_BYTES, connection.report())
        self.scope.slot.adjust(Gauge.OPEN, -1)
        if not self.connections:
            self._empty.set()

    def tick(self) -> None:
        """Count forwarded bytes and close connections that have been idle for too long.

        Called about once a second.
        """
        now_s, spoke_s = self.loop.time(), time.monotonic()
        n_forwarded = 0
        for connection in list(self.connections):
            n_bytes = connection.report()
            if n_bytes:
                progress = connection.progress
                if n_bytes >= FEW_BYTES or progress != connection.last_progress:
                    connection.spoke_s, connection.last_progress = spoke_s, progress
                n_forwarded += n_bytes
            connection.expire(now_s)
        self.scope.slot.adjust(Gauge.FORWARDED_BYTES, n_forwarded)
        self.backpressure.rebalance(len(self.connections))

    def stop_observing(self) -> None:
        """Stop observing all connections, present and future, until this process ends."""
        self.is_observing = False
        for connection in list(self.connections):
            connection.stop_observing()

    async def drain(self) -> None:
        """Close every connection as soon as it is between exchanges; return when all are closed.

        What a client sends while its connection is being closed fails. The end of file of an HTTP/1.1 connection
        goes with the last bytes of a response, before its client can begin another request. One that has no
        response within `REST_S` rests, and is closed then.

        An HTTP/2 client may send a request at any time. So its connection is closed once it has been quiet for
        `QUIET_S`; after `PATIENCE_S`, at the first moment without an exchange.
        """
        for connection in list(self.connections):
            connection.drain(patient=True)
        await self._wait_empty(REST_S)
        for connection in list(self.connections):
            connection.close_if_rests()
        await self._wait_empty(PATIENCE_S)
        for connection in list(self.connections):
            connection.drain(patient=False)
        await self._empty.wait()

    async def _wait_empty(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()

    def abort(self) -> None:
        """Close every connection at once."""
        for connection in list(self.connections):
            connection.abort()

    def _ends(self) -> Iterable[ConnectionEnd]:
        for connection in list(self.connections):
            yield connection.client
            yield connection.backend


class RelayedConnection:
    """A client's connection together with its backend connection.

    Parameters
    ----------
    relay
        The relay that it belongs to.

    Attributes
    ----------
    client, backend
        Its two ends.
    backpressure
        The limits on unsent data of the worker.
    spoke_s : float
        When it last came on, or passed more than a few bytes, to a second, on the monotonic clock.
    last_progress : int
        How far it was then.
    """

    __slots__ = (
        "_connecting",
        "_early_data",
        "_is_closing",
        "_is_corking",
        "_is_draining",
        "_is_patient",
        "_is_without_client",
        "_last_activity",
        "_observer",
        "_quiet_since_s",
        "_relay",
        "_reported_bytes",
        "backend",
        "backpressure",
        "client",
        "last_progress",
        "spoke_s",
    )

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._early_data: list[bytes] = []
        self._connecting: asyncio.Task[None] | None = None
        self._is_closing = False
        self._is_draining = self._is_patient = self._is_corking = False
        self._is_without_client = False  # the client ended first: it does not want the rest of an answer
        self._reported_bytes = 0
        self._last_activity: tuple[int, int, int] | None = None
        self._quiet_since_s = 0.0
        self._observer: ExchangeObserver | None = None
        self.spoke_s = time.monotonic()
        self.last_progress = 0
        self.backpressure = relay.backpressure
        self.client = ConnectionEnd(self)
        self.backend = ConnectionEnd(self)

    def other(self, end: ConnectionEnd) -> ConnectionEnd:
        """Return the end that is not `end`."""
        return self.backend if end is self.client else self.client

    def buffer_early(self, data: bytes) -> None:
        """Keep what the client sent before the backend was connected, and stop reading from the client."""
        self._early_data.append(data)
        self.backend.mark_stalled()
        self.client.pause()

    def connected(self, end: ConnectionEnd) -> None:
        """Handle a connected end: start observing and connect to the backend, or start forwarding."""
        if end is self.client:
            self._relay.opened(self)
            self._guard(self._start_observing if self._relay.is_observing else self._count_only)
            self._connecting = self._relay.loop.create_task(self._connect())
        elif self.client.is_lost:
            end.abort()
        else:
            self._start_forwarding()

    def eof_received(self, end: ConnectionEnd) -> None:
        """Pass the end of file of `end` on; close once both ends have sent theirs."""
        end.has_ended = True
        self._note_end(end)
        if end is self.backend and self._observer is not None:
            self._guard(self._observer.response_eof)
        self.other(end).send_eof()
        if self.other(end).has_ended:
            self._close()

    def lost(self, end: ConnectionEnd, error: Exception | None) -> None:
        """Close the other end in the same way as `end`: orderly, or with a reset."""
        self._note_end(end)
        if (observer := self._observer) is not None:
            loss = Loss.CLIENT_ABORT if self._is_without_client else Loss.TRUNCATED
            self._guard(lambda: observer.close(loss))
            self._detach_observer()
        other = self.other(end)
        if other.transport is None and self._connecting is not None:
            self._connecting.cancel()
        if not other.is_lost:
            other.close(reset=error is not None)
            if end is self.client and error is not None:
                other.abort()  # no client is left to read an answer
        if other.is_lost or other.transport is None:
            other.mark_drained()
            self._relay.closed(self)

    def _note_end(self, end: ConnectionEnd) -> None:
        """Note whether the client is the first to end, and not the backend or the relay itself."""
        if end is self.client and not (self.backend.has_ended or self.backend.is_lost or self._is_closing):
            self._is_without_client = True

    def drain(self, *, patient: bool) -> None:
        """Close after the next response, or in a pause. Where exchanges are not known, the connection stays open.

        Parameters
        ----------
        patient
            Whether to wait for a response, or for a quiet period where the client may send something at any
            time; if not, the connection is also closed at once if it is between exchanges.
        """
        self._is_draining = True
        self._is_patient = patient
        if self._observer is not None:
            self._attach_observer(self._observer)
            if not patient:
                self._guard(self._close_if_idle)

    def close_if_rests(self) -> None:
        """Close a draining HTTP/1.1 connection that is between exchanges."""
        if not self._waits_for_quiet:
            self._guard(self._close_if_idle)

    def abort(self) -> None:
        """Close at once."""
        self._is_closing = True
        self.client.abort()
        self.backend.abort()

    def expire(self, now_s: float) -> None:
        """Close a closing or draining connection that has been idle for long enough.

        Called about once a second.
        """
        if self._is_closing or self.backend.has_ended:
            limit_s, close = LINGER_S, self.abort
        elif self._is_draining:
            limit_s, close = QUIET_S, self._close_if_idle
        else:
            return
        state = (self.client.n_bytes, self.client.unsent_bytes, self.backend.unsent_bytes)
        if state != self._last_activity:
            self._last_activity = state
            self._quiet_since_s = now_s
        elif now_s - self._quiet_since_s >= limit_s:
            self._guard(close)

    def report(self) -> int:
        """Return how many bytes were forwarded since the last report."""
        total = self.client.n_bytes + self.backend.n_bytes
        n_forwarded, self._reported_bytes = total - self._reported_bytes, total
        return n_forwarded

    def stop_observing(self) -> None:
        """Remove the observer; forwarding continues, and requests are counted."""
        self._replace_observer(Loss.OBSERVER_ERROR)

    @property
    def can_resume(self) -> bool:
        """Whether nothing is lost if its observer is dropped now: it is observed again when it speaks."""
        observer = self._observer
        return observer is not None and (
            not observer.is_active or (observer.is_resumable and observer.is_idle)
        )

    @property
    def waits_for_client(self) -> bool:
        """Whether the client, not the backend, must speak next."""
        return self._observer is not None and self._observer.waits_for_client

    @property
    def progress(self) -> int:
        """A number that changes when the connection comes on: with a request over HTTP/2, else with what the backend sends."""
        n_begun = None if self._observer is None else self._observer.last_stream
        return self.backend.n_bytes if n_begun is None else n_begun

    @property
    def has_no_whole_head(self) -> bool:
        """Whether nothing is due but the rest of the head of a request, or the first request of an HTTP/2 connection."""
        return self._observer is not None and self._observer.has_no_whole_head

    def give_way(self) -> None:
        """Drop the observer, because another connection needs one."""
        observer = self._observer
        if observer is not None and observer.is_active and self.can_resume:
            self._guard(self._start_observing)
            self._guard(lambda: observer.abandon(Loss.UNOBSERVED))  # gives its memory back
        else:
            self._replace_observer(Loss.UNOBSERVED)

    def drop_observer(self) -> None:
        """Count and log the exception of the observer, and remove it."""
        slot = self._relay.scope.slot
        slot.adjust(Gauge.OBSERVER_ERRORS)
        n_errors = slot.gauge(Gauge.OBSERVER_ERRORS)
        if n_errors & (n_errors - 1) == 0:  # 1, 2, 4, 8: a fault on every connection must not flood the log
            _LOG.exception(
                "an observer raised an exception (%d so far); the connection is forwarded without observing it",
                n_errors,
            )
        self.stop_observing()

    @classmethod
    def find_observer_call(cls, frame: FrameType | None) -> FrameType | None:
        """Return the stack frame, at or above `frame`, that has called an observer, else None.

        It is the frame that catches what the observer raises.
        """
        callee: FrameType | None = None
        while frame is not None:
            if frame.f_code is cls._guard.__code__:
                return frame
            if frame.f_code is ConnectionEnd.observe_code:
                return frame if callee is not None else None
            callee, frame = frame, frame.f_back
        return None

    def _guard(self, step: Callable[[], object]) -> None:
        try:
            step()
        except Exception:  # noqa: BLE001 - an observer on the serving path
            self.drop_observer()

    def _start_observing(self) -> None:
        """Wait for the first bytes of the client, which costs little and does not count as observing."""
        self._attach_observer(ProtocolDetector(self._relay.scope, self._observe_with))

    def _observe_with(self, kind: Callable[[CaptureScope], ExchangeObserver]) -> ExchangeObserver:
        """Observe the connection, which speaks, if the limit allows it; return the observer."""
        relay = self._relay
        if not relay.observed.enter(self, relay.scope.max_connections):
            return self._count_only()
        observer = kind(relay.scope)
        self._attach_observer(observer)
        return observer

    def _count_only(self) -> ExchangeObserver:
        """Count the requests of the connection instead of observing it."""
        self._relay.scope.slot.adjust(Gauge.UNOBSERVED)
        observer = Unobserved(self._relay.scope)
        self._attach_observer(observer)
        return observer

    def _replace_observer(self, loss: Loss) -> None:
        """Count the requests from now on, and drop what the observer has buffered."""
        observer = self._observer
        if observer is None:
            return
        if observer.is_active:
            self._relay.scope.slot.adjust(Gauge.BLIND)
        self._relay.observed.leave(self)
        if self._is_corking:
            self.client.cork(on=False)
        self._attach_observer(Unobserved(self._relay.scope, observer))
        self._guard(lambda: observer.abandon(loss))

    def _attach_observer(self, observer: ExchangeObserver) -> None:
        """Pass bytes to `observer` from now on."""
        self._observer = observer
        self.client.observe, self.backend.observe = observer.request, observer.response
        self.client.skip, self.backend.skip = observer.skip_request, observer.skip_response
        if self._is_draining and not self._waits_for_quiet:
            self.client.observe = self._close_after(observer.request)
            self.backend.observe = self._close_after(observer.response)
            self.client.skip = self.backend.skip = _skip_nothing
            self._announce_end()

    @property
    def _waits_for_quiet(self) -> bool:
        return self._is_patient and self._observer is not None and self._observer.client_may_send_anytime

    def _announce_end(self) -> None:
        """Announce the end of the connection in the next response, and send the end of file with its last bytes.

        The last packet is held back until it is known whether it ends a response.
        """
        write = self.backend.forward
        if self._is_corking or self.client.transport is None or self.backend.transport is None:
            return  # without a backend there is no response yet

        def forward(data: bytes) -> None:
            if self._is_corking:
                self.client.cork(on=True)
                data = self._closing(data)
            write(data)

        self._is_corking = True
        self.backend.stop_forwarding()  # long reads must not be written past `forward`
        self.backend.forward = forward

    def _closing(self, data: bytes) -> bytes:
        announced = data

        def announce() -> None:
            nonlocal announced
            if self._observer is not None:
                announced = self._observer.closing(data)

        self._guard(announce)
        return announced

    def _detach_observer(self) -> None:
        if self._is_corking:
            self._is_corking = False
            self.client.cork(on=False)
        self._observer = None
        self._relay.observed.leave(self)
        self.client.observe = self.backend.observe = ignore
        self.client.skip = self.backend.skip = skip

    def _close_after(self, observe: Callable[[bytes], None]) -> Callable[[bytes], None]:
        """Return a function that calls `observe`, then closes the connection if it is between exchanges."""

        def observe_and_close(data: bytes) -> None:
            observe(data)
            self._close_if_idle()
            if self._is_corking:
                self.client.cork(on=False)

        return observe_and_close

    def _close_if_idle(self) -> None:
        observer = self._observer
        if observer is None or not observer.is_idle or self.client.has_unread:
            return
        self._close_gracefully()
        if not observer.client_may_send_anytime:
            # Its client may look at the connection only when it has a request to send.
            self._relay.loop.call_later(HTTP1_LINGER_S, self._close)

    def _close_gracefully(self) -> None:
        """Send the client an end of file, and close once it has closed.

        What it sends until then is discarded.

        Closing at once would reset the connection as soon as the client sends anything, and the client would
        lose what it has not read yet.
        """
        self._is_closing = True
        self.client.stop_forwarding()
        self.backend.stop_forwarding()
        self.backend.has_ended = True
        self.client.send_eof()
        self._is_corking = False
        self._detach_observer()

    async def _connect(self) -> None:
        slot = self._relay.scope.slot
        try:
            async with asyncio.timeout(CONNECT_S) as limit:
                await self._reach_backend()
        except OSError as error:
            slot.adjust(Gauge.BACKEND_FAILED)
            slot.set(Gauge.BACKEND_ERROR, connect_errno(error))
            self.abort()
        except asyncio.CancelledError:
            ends_s = limit.when()
            if ends_s is not None and ends_s - self._relay.loop.time() < CONNECT_S - SLOW_S:
                slot.adjust(Gauge.BACKEND_FAILED)  # the client gave up first
                slot.set(Gauge.BACKEND_ERROR, errno.ETIMEDOUT)
            raise
        else:
            slot.adjust(Gauge.BACKEND_REACHED)

    async def _reach_backend(self) -> None:
        relay = self._relay
        while True:
            try:
                await relay.loop.create_connection(lambda: self.backend, relay.host, relay.port)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                await asyncio.sleep(RETRY_S)  # other connections will close
            else:
                return

    def _start_forwarding(self) -> None:
        assert self.client.transport is not None
        assert self.backend.transport is not None
        self.client.forward_to(self.backend.transport)
        self.backend.forward_to(self.client.transport)
        if self._is_draining and self._observer is not None and not self._waits_for_quiet:
            self._announce_end()
        self.backend.mark_drained()
        self.client.resume()
        for data in self._early_data:
            self.client.forward(data)
        self._early_data.clear()
        if self.client.has_ended:
            self.backend.send_eof()

    def _close(self) -> None:
        self._is_closing = True
        self.client.close()
        self.backend.close()
        if self._connecting is not None and self.backend.transport is None:
            self._connecting.cancel()


def _skip_nothing(_: int) -> int:
    """Skip none of the next bytes."""
    return 0
