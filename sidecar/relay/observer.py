"""Rides along on one connection's bytes: pairs requests with responses, and holds those that were sampled.

It is given the very buffers that were forwarded, after they were. Nothing it does can change or delay them; if it
raises, the relay goes on without it.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta

from quantdrift.core.clock import Clock
from quantdrift.core.config.schema import Sidecar
from quantdrift.core.records import Loss
from sidecar.counters import Count, Gauge, Slot
from sidecar.handoff import RawMeta, frame
from sidecar.relay.framing import PIECE_BYTES, TUNNEL, Delimiter
from sidecar.relay.heads import FramingError, RequestHead, parse_request, parse_response
from sidecar.relay.sampler import Draw, Sampler
from sidecar.routes import Routes

_LOG = logging.getLogger(__name__)

_MAX_PIPELINED = 1000
_HELD_BYTES = 500  # what a held exchange costs beside its buffers
Offer = Callable[[int, Sequence[bytes | memoryview]], None]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class Scope:
    """What the observers of one relay worker share.

    Parameters
    ----------
    sidecar
        Bounds.
    routes
        What is inference.
    sampler
        First sampling phase.
    offer
        Takes a finished exchange: index of its header stratum, and the buffers of its frame.
    slot
        The worker's counts.
    clock
        Tells when a response was complete.

    Attributes
    ----------
    held_bytes : int
        Held for unfinished exchanges by all observers together.
    """

    __slots__ = (
        "clock",
        "held_bytes",
        "max_exchange_bytes",
        "max_header_bytes",
        "max_held_bytes",
        "offer",
        "routes",
        "sampler",
        "slot",
    )

    def __init__(
        self,
        sidecar: Sidecar,
        *,
        routes: Routes,
        sampler: Sampler,
        offer: Offer,
        slot: Slot,
        clock: Clock,
    ) -> None:
        self.max_header_bytes = sidecar.max_header_bytes
        self.max_exchange_bytes = sidecar.max_exchange_bytes
        self.max_held_bytes = sidecar.max_held_bytes
        self.routes = routes
        self.sampler = sampler
        self.offer = offer
        self.slot = slot
        self.clock = clock
        self.held_bytes = 0

    def hold(self, n_bytes: int) -> None:
        """Account for `n_bytes`, which may be negative."""
        self.held_bytes += n_bytes
        self.slot.set(Gauge.HELD_BYTES, self.held_bytes)


class _Asked:
    """A request that waits for its response."""

    __slots__ = ("expect", "is_connect", "is_head", "upgrade")

    def __init__(self, method: bytes, *, upgrade: bool, expect: bool) -> None:
        self.is_head = method == b"HEAD"
        self.is_connect = method == b"CONNECT"
        self.upgrade = upgrade
        self.expect = expect


class _Held(_Asked):
    """A sampled one, with what has been seen of it."""

    __slots__ = (
        "captured_at_ns",
        "charged_bytes",
        "draw",
        "request",
        "request_bytes",
        "request_head_bytes",
        "response",
        "response_bytes",
        "response_head_bytes",
    )

    def __init__(self, head: RequestHead, head_bytes: int, draw: Draw) -> None:
        super().__init__(head.method, upgrade=head.upgrade, expect=head.expect)
        self.draw = draw
        self.request: list[bytes | memoryview] = []
        self.request_head_bytes = head_bytes
        self.request_bytes = 0
        self.response: list[bytes | memoryview] = []
        self.response_head_bytes = 0
        self.response_bytes = 0
        self.charged_bytes = 0
        self.captured_at_ns = 0


# Most requests need no object of their own.
_PLAIN = _Asked(b"POST", upgrade=False, expect=False)
_HEAD_ONLY = _Asked(b"HEAD", upgrade=False, expect=False)


class Observer:
    """Follows one connection. Where framing is lost or the protocol changes, it lets go of it by itself.

    If a method raises all the same, `abandon` must be called, and nothing else any more.

    Parameters
    ----------
    scope
        Shared by the worker's observers.

    Attributes
    ----------
    is_active : bool
        Whether the connection is still followed.
    """

    __slots__ = (
        "_answering",
        "_held",
        "_interim",
        "_requests",
        "_responses",
        "_scope",
        "_sending",
        "is_active",
    )

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        limit = scope.max_header_bytes
        self._requests = Delimiter(self._request_head, self._request_piece, self._request_end, limit)
        self._responses = Delimiter(self._response_head, self._response_piece, self._response_end, limit)
        self._answering: deque[_Asked] = deque()  # requests whose response is not complete, in order
        self._sending: _Asked | None = None  # the request that is not complete
        self._held: set[_Held] = set()
        self._interim = False
        self.is_active = True

    @property
    def is_idle(self) -> bool:
        """Whether the connection is known to be between exchanges."""
        return self.is_active and not self._answering and self._requests.at_rest

    def request(self, chunk: bytes) -> None:
        """Take bytes that the client sent."""
        if self.is_active:
            try:
                self._requests.feed(chunk)
            except FramingError as error:
                self._blind(error)

    def response(self, chunk: bytes) -> None:
        """Take bytes that the backend sent."""
        if self.is_active:
            try:
                self._responses.feed(chunk)
            except FramingError as error:
                self._blind(error)

    def response_eof(self) -> None:
        """Take note that the backend will send no more."""
        if self.is_active:
            self._responses.eof()

    def close(self) -> None:
        """Take note that the connection is over: what is unfinished is lost."""
        self.abandon(Loss.TRUNCATED)

    def abandon(self, loss: Loss) -> None:
        """Let go of everything held, counted under `loss`, and follow no more."""
        self.is_active = False
        for held in list(self._held):
            self._let_go(held, loss)
        self._answering.clear()
        self._sending = None

    def _blind(self, error: FramingError) -> None:
        _LOG.debug("a connection is no longer observed: %s", error)
        self._scope.slot.note(Gauge.BLIND)
        self.abandon(Loss.FRAMING)

    def _request_head(self, data: bytes, start: int, stop: int) -> int:
        head = parse_request(data, start, stop)
        if len(self._answering) >= _MAX_PIPELINED:
            raise FramingError("too many requests wait for their responses")
        slot = self._scope.slot
        path = self._scope.routes.find(head.method, head.target)
        draw = None
        if path is None:
            slot.note(Gauge.IGNORED)
        else:
            draw = self._scope.sampler.draw(head.method, path, data, start, stop)
            slot.add(draw.stratum, Count.OFFERED)
        if draw is not None and draw.taken:
            asked: _Asked = self._take(head, draw, data, start, stop)
        elif head.upgrade or head.expect:
            asked = _Asked(head.method, upgrade=head.upgrade, expect=head.expect)
        else:
            asked = _HEAD_ONLY if head.method == b"HEAD" else _PLAIN
        self._answering.append(asked)
        self._sending = asked
        return head.body

    def _take(self, head: RequestHead, draw: Draw, data: bytes, start: int, stop: int) -> _Held:
        self._scope.slot.add(draw.stratum, Count.TAKEN)
        held = _Held(head, stop - start, draw)
        self._held.add(held)
        self._requests.keep = self._keep(held, held.request, data, start, stop)
        held.request_bytes += stop - start
        return held

    def _request_piece(self, data: bytes, start: int, stop: int) -> None:
        held = self._sending
        assert isinstance(held, _Held)
        self._requests.keep = self._keep(held, held.request, data, start, stop)
        held.request_bytes += stop - start

    def _request_end(self) -> None:
        asked, self._sending = self._sending, None
        assert asked is not None
        if asked.upgrade:
            self._requests.pause()
        if isinstance(asked, _Held) and asked.captured_at_ns:
            self._hand_over(asked)

    def _response_head(self, data: bytes, start: int, stop: int) -> int:
        head = parse_response(data, start, stop)
        if not self._answering:
            raise FramingError("a response to no request")
        asked = self._answering[0]
        if head.status < 200 and head.status != 101:
            self._interim = True
            return 0
        if head.status == 101 or (asked.is_connect and head.status < 300):
            if not asked.upgrade or self._sending is asked:
                raise FramingError("a change of protocol that was not asked for")
            self.abandon(Loss.FRAMING)
            self._requests.tunnel()
            return TUNNEL
        if asked.expect and self._sending is asked:
            raise FramingError("refused before its body came, which may be left out now")
        if asked.upgrade:
            asked.upgrade = False
            self._requests.resume()
        if isinstance(asked, _Held) and asked in self._held:
            asked.response_head_bytes = stop - start
            self._responses.keep = self._keep(asked, asked.response, data, start, stop)
            asked.response_bytes += stop - start
        return 0 if asked.is_head or head.status in (204, 304) else head.body

    def _response_piece(self, data: bytes, start: int, stop: int) -> None:
        held = self._answering[0]
        assert isinstance(held, _Held)
        self._responses.keep = self._keep(held, held.response, data, start, stop)
        held.response_bytes += stop - start

    def _response_end(self) -> None:
        if self._interim:
            self._interim = False
            return
        asked = self._answering.popleft()
        if isinstance(asked, _Held):
            now = self._scope.clock.now()
            asked.captured_at_ns = (now - _EPOCH) // _MICROSECOND * 1000
            if self._sending is not asked:
                self._hand_over(asked)

    def _keep(
        self, held: _Held, pieces: list[bytes | memoryview], data: bytes, start: int, stop: int
    ) -> bool:
        """Hold `data[start:stop]` unless the exchange is let go, or would be too large with it; return whether."""
        if held not in self._held:
            return False
        scope = self._scope
        n_bytes = stop - start
        charge = n_bytes + PIECE_BYTES + (0 if held.charged_bytes else _HELD_BYTES)
        if (
            held.request_bytes + held.response_bytes + n_bytes > scope.max_exchange_bytes
            or scope.held_bytes + charge > scope.max_held_bytes
        ):
            self._let_go(held, Loss.HELD_BYTES)
            return False
        if n_bytes == len(data):
            pieces.append(data)
        elif 2 * n_bytes >= len(data):
            pieces.append(memoryview(data)[start:stop])
        else:
            pieces.append(data[start:stop])  # a view would keep a buffer of more than twice its size
        held.charged_bytes += charge
        scope.hold(charge)
        return True

    def _let_go(self, held: _Held, loss: Loss) -> None:
        self._scope.slot.lose(held.draw.stratum, loss)
        self._release(held)

    def _release(self, held: _Held) -> None:
        self._held.discard(held)
        held.request.clear()
        held.response.clear()
        self._scope.hold(-held.charged_bytes)
        held.charged_bytes = 0

    def _hand_over(self, held: _Held) -> None:
        if held not in self._held:
            return
        meta = RawMeta(
            id=held.draw.id,
            stratum=held.draw.stratum,
            pi1=held.draw.pi1,
            u1=held.draw.u1,
            epoch=held.draw.epoch,
            captured_at_ns=held.captured_at_ns,
            request_head_bytes=held.request_head_bytes,
            request_bytes=held.request_bytes,
            response_head_bytes=held.response_head_bytes,
            response_bytes=held.response_bytes,
        )
        self._scope.offer(held.draw.stratum, frame(meta, [*held.request, *held.response]))
        self._release(held)
