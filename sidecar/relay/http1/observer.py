"""Rides along on one connection's bytes: pairs requests with responses, and holds those that were sampled.

It is given the very bytes that were forwarded, after they were. Nothing it does can change or delay them; if it
raises, the relay goes on without it.
"""

import re
from collections import deque

from quantdrift.core.records import Loss
from quantdrift.sidecar.handoff.frame import MAX_HEADER_BYTES
from quantdrift.sidecar.relay.http1.framing import TUNNEL, MessageFramer
from quantdrift.sidecar.relay.observing.head_cache import CachedHead
from quantdrift.sidecar.relay.observing.heads import FramingError, RequestHead, parse_request, parse_response
from quantdrift.sidecar.relay.observing.observer import (
    CaptureBuffer,
    CaptureScope,
    ExchangeObserver,
    is_marked,
)
from quantdrift.sidecar.sampling.first_phase import SamplingKey
from quantdrift.sidecar.state.counters import Count, Gauge

_MAX_PIPELINED = 256
_TO_HTTP2 = re.compile(rb"\r\nupgrade:[ \t]*h2c[ \t]*\r\n", re.IGNORECASE)


class _Asked:
    """A request that waits for its response."""

    __slots__ = ("expect", "held", "is_connect", "is_head", "upgrade")

    def __init__(
        self, method: bytes, *, upgrade: bool, expect: bool, held: CaptureBuffer | None = None
    ) -> None:
        self.is_head = method == b"HEAD"
        self.is_connect = method == b"CONNECT"
        self.upgrade = upgrade
        self.expect = expect
        self.held = held  # where it was sampled


# Most requests need no object of their own.
_PLAIN = _Asked(b"POST", upgrade=False, expect=False)
_HEAD_ONLY = _Asked(b"HEAD", upgrade=False, expect=False)


class Http1Observer(ExchangeObserver):
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
        "_asks",
        "_generation",
        "_head",
        "_interim",
        "_place",
        "_requests",
        "_responses",
        "_sending",
        "_tells",
    )

    def __init__(self, scope: CaptureScope) -> None:
        super().__init__(scope)
        limit = MAX_HEADER_BYTES
        parts = scope.parts
        self._requests = MessageFramer(
            self._request_head, self._request_piece, self._request_end, limit, parts
        )
        self._responses = MessageFramer(
            self._response_head, self._response_piece, self._response_end, limit, parts
        )
        self._answering: deque[_Asked] = deque()  # requests whose response is not complete, in order
        self._sending: _Asked | None = None  # the request that is not complete
        self._interim = False
        self._generation = scope.generation
        self._asks = CachedHead(scope.asks)
        self._tells = CachedHead(scope.tells)
        self._head: RequestHead | None = None  # the last one, and what decided on it
        self._place: SamplingKey | None = None

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

    def skip_request(self, n_bytes: int) -> int:
        """Take note of the next bytes of the client without seeing them; return how many that does for."""
        return self._requests.skip(n_bytes) if self.is_active else n_bytes

    def skip_response(self, n_bytes: int) -> int:
        """Take note of the next bytes of the backend without seeing them; return how many that does for."""
        return self._responses.skip(n_bytes) if self.is_active else n_bytes

    def response_eof(self) -> None:
        """Take note that the backend will send no more."""
        if self.is_active:
            self._responses.eof()

    def abandon(self, loss: Loss) -> None:
        """Let go of everything held, counted under `loss`, and follow no more."""
        super().abandon(loss)
        self._answering.clear()
        self._sending = None
        self._requests.forget()
        self._responses.forget()

    def _request_head(self, data: bytes, start: int, stop: int) -> int:
        scope = self._scope
        if scope.generation != self._generation:
            self._forget()
        habit = self._asks
        head = habit.find(data, start, stop) or parse_request(data, start, stop, scope.lines, habit)
        if len(self._answering) >= _MAX_PIPELINED:
            raise FramingError("too many requests wait for their responses")
        if head is not self._head:
            self._head, self._place = head, scope.place(head, data, start, stop)
        place = self._place
        draw = None
        if place is None:
            scope.ignore(is_unknown=head.method == b"POST" and not is_marked(head.wanted))
        else:
            scope.slot.add(place.stratum, Count.OFFERED)
            draw = scope.sampler.take(place)
        if draw is not None and not scope.refuses(draw.stratum):
            held = self._take(draw)
            held.request_head_bytes = stop - start
            asked = _Asked(head.method, upgrade=head.upgrade, expect=head.expect, held=held)
            self._requests.keep = self._keep(held, held.request, data, start, stop)
            held.request_bytes += stop - start
        elif head.upgrade or head.expect:
            asked = _Asked(head.method, upgrade=head.upgrade, expect=head.expect)
        else:
            asked = _HEAD_ONLY if head.method == b"HEAD" else _PLAIN
        self._answering.append(asked)
        self._sending = asked
        return head.body

    def _forget(self) -> None:
        """Let go of what was remembered under another configuration."""
        self._generation = self._scope.generation
        self._asks, self._tells = CachedHead(self._scope.asks), CachedHead(self._scope.tells)
        self._head = self._place = None

    def _request_piece(self, data: bytes, start: int, stop: int) -> None:
        assert self._sending is not None
        held = self._sending.held
        assert held is not None
        self._requests.keep = self._keep(held, held.request, data, start, stop)
        held.request_bytes += stop - start

    def _request_end(self) -> None:
        asked, self._sending = self._sending, None
        assert asked is not None
        if asked.upgrade:
            self._requests.pause()
        if asked.held is not None and asked.held.captured_at_ns:
            self._hand_over(asked.held)

    def _response_head(self, data: bytes, start: int, stop: int) -> int:
        habit = self._tells
        head = habit.find(data, start, stop) or parse_response(data, start, stop, self._scope.lines, habit)
        if not self._answering:
            raise FramingError("a response to no request")
        asked = self._answering[0]
        if head.status < 200 and head.status != 101:
            self._interim = True
            return 0
        if head.status == 101 or (asked.is_connect and head.status < 300):
            if not asked.upgrade or self._sending is asked:
                raise FramingError("a change of protocol that was not asked for")
            if _TO_HTTP2.search(data, start, stop):
                self._scope.slot.note(Gauge.BLIND)  # it carries exchanges still, which are not followed
            self.abandon(Loss.FRAMING)
            self._requests.tunnel()
            return TUNNEL
        if asked.expect and self._sending is asked:
            raise FramingError("refused before its body came, which may be left out now")
        if asked.upgrade:
            asked.upgrade = False
            self._requests.resume()
        held = asked.held
        if held is not None and held in self._held:
            held.response_head_bytes = stop - start
            self._responses.keep = self._keep(held, held.response, data, start, stop)
            held.response_bytes += stop - start
        return 0 if asked.is_head or head.status in (204, 304) else head.body

    def _response_piece(self, data: bytes, start: int, stop: int) -> None:
        held = self._answering[0].held
        assert held is not None
        self._responses.keep = self._keep(held, held.response, data, start, stop)
        held.response_bytes += stop - start

    def _response_end(self) -> None:
        if self._interim:
            self._interim = False
            return
        asked = self._answering.popleft()
        if asked.held is not None:
            self._answered(asked.held)
            if self._sending is not asked:
                self._hand_over(asked.held)
