"""Carries bytes between clients and the backend, unchanged, and shows them to an observer afterwards.

One backend connection per client connection. The serving path waits for nothing but the peers' own pace: whoever
does not read stops the other side from being read. An observer that raises is let go of; the bytes flow on.
"""

import asyncio
import contextlib
import errno
import logging
from collections.abc import Callable, Iterable
from types import FrameType

from quantdrift.core.records import Loss
from quantdrift.sidecar.relay.backpressure import Backpressure
from quantdrift.sidecar.relay.connection_end import ConnectionEnd, ignore, skip
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
