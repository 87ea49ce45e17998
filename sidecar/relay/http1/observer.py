"""The observer of an HTTP/1.1 connection: it pairs requests with responses and buffers the sampled ones.

It gets the bytes after they were forwarded and cannot change or delay them. If it raises, the relay goes on
without it.
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
)
from quantdrift.sidecar.sampling.first_phase import SamplingKey
from quantdrift.sidecar.state.counters import Count

_MAX_PIPELINED = 256
_FINAL_HEAD = re.compile(rb"HTTP/1\.1 [2-5]\d\d[ \r](?:[^\n]*\n)(?:[^\r\n][^\n]*\n)*\r\n")
_CONNECTION = re.compile(rb"\r\nconnection:[ \t]*([^\r\n]*)\r\n", re.IGNORECASE)
_TO_HTTP2 = re.compile(rb"\r\nupgrade:[ \t]*h2c[ \t]*\r\n", re.IGNORECASE)


class _PendingRequest:
    """A request whose response is not complete."""

    __slots__ = ("buffer", "expect", "is_connect", "is_head", "upgrade")

    def __init__(
        self, method: bytes, *, upgrade: bool, expect: bool, buffer: CaptureBuffer | None = None
    ) -> None:
        self.is_head = method == b"HEAD"
        self.is_connect = method == b"CONNECT"
        self.upgrade = upgrade
        self.expect = expect
        self.buffer = buffer  # None: it was not sampled


# Most requests share these objects.
_PLAIN = _PendingRequest(b"POST", upgrade=False, expect=False)
_HEAD_ONLY = _PendingRequest(b"HEAD", upgrade=False, expect=False)


class Http1Observer(ExchangeObserver):
    """Observes one HTTP/1.1 connection, until framing is lost or the protocol changes.

    If a method raises, `abandon` must be called, and no other method after it.

    Parameters
    ----------
    scope
        Shared by the worker's observers.

    Attributes
    ----------
    is_active : bool
        Whether the connection is still observed.
    """

    is_resumable = True
    __slots__ = (
        "_generation",
        "_head",
        "_incomplete",
        "_interim",
        "_pending",
        "_request_cache",
        "_requests",
        "_response_cache",
        "_responses",
        "_sampling_key",
    )

    _requests: MessageFramer
    _responses: MessageFramer

    def __init__(self, scope: CaptureScope) -> None:
        super().__init__(scope)
        limit = MAX_HEADER_BYTES
        memory = scope.memory
        self._requests = MessageFramer(
            self._request_head, self._request_piece, self._request_end, limit, memory
        )
        self._responses = MessageFramer(
            self._response_head, self._response_piece, self._response_end, limit, memory
        )
        self._pending: deque[_PendingRequest] = deque()  # requests whose response is not complete, in order
        self._incomplete: _PendingRequest | None = None  # the request that is not complete
        self._interim = False
        self._generation = scope.generation
        self._request_cache = CachedHead(scope.request_heads)
        self._response_cache = CachedHead(scope.response_heads)
        self._head: RequestHead | None = None  # the last request head, and its sampling key
        self._sampling_key: SamplingKey | None = None

    @property
    def is_idle(self) -> bool:
        """Whether the connection is known to be between exchanges."""
        return self.is_active and not self._pending and self._requests.is_between_messages

    @property
    def waits_for_client(self) -> bool:
        """Whether the client, not the backend, must send something next."""
        return not self._pending or (len(self._pending) == 1 and self._incomplete is self._pending[0])

    @property
    def has_no_whole_head(self) -> bool:
        """Whether nothing is due but the rest of the head of a request."""
        return not self._pending and self._incomplete is None

    @property
    def last_row(self) -> int | None:
        """Row in the table of counts of the last inference request; None: there was none."""
        return None if self._sampling_key is None else self._sampling_key.stratum

    def closing(self, chunk: bytes) -> bytes:
        """Return `chunk` with `Connection: close`, if it begins with the whole head of the only response that is due.

        The header belongs to the hop from relay to client, which ends after this response (RFC 9110, 7.6.1).
        Everything else stays as it is, and so does the chunk where anything is unusual.
        """
        if (
            not self.is_active
            or len(self._pending) != 1
            or self._pending[0].upgrade
            or self._pending[0].is_connect
        ):
            return chunk
        if not self._requests.is_between_messages or not self._responses.is_between_messages:
            return chunk
        return with_close(chunk)

    def skip_request(self, n_bytes: int) -> int:
        """Skip the next bytes of the client if their content is not needed; return how many were skipped."""
        return self._requests.skip(n_bytes) if self.is_active else super().skip_request(n_bytes)

    def skip_response(self, n_bytes: int) -> int:
        """Skip the next bytes of the backend if their content is not needed; return how many were skipped."""
        return self._responses.skip(n_bytes) if self.is_active else super().skip_response(n_bytes)

    def response_eof(self) -> None:
        """Handle the end of file of the backend."""
        if self.is_active:
            self._responses.eof()

    def abandon(self, loss: Loss) -> None:
        """Drop all buffered exchanges, counted under `loss`, and stop observing."""
        super().abandon(loss)
        self._pending.clear()
        self._incomplete = None
        self._requests.forget()
        self._responses.forget()

    def _request_head(self, data: bytes, start: int, stop: int) -> int:
        scope = self._scope
        if scope.generation != self._generation:
            self._clear_caches()
        cached_head = self._request_cache
        head = cached_head.find(data, start, stop) or parse_request(
            data, start, stop, scope.field_cache, cached_head
        )
        if len(self._pending) >= _MAX_PIPELINED:
            raise FramingError("too many requests without a response")
        if head is not self._head:
            self._head, self._sampling_key = head, scope.sampling_key(head, data, start, stop)
        sampling_key = self._sampling_key
        draw = None
        if sampling_key is None:
            scope.count_ignored(is_unknown=head.method == b"POST")
        else:
            scope.slot.add(sampling_key.stratum, Count.OFFERED)
            draw = scope.sampler.take(sampling_key)
        if draw is not None and not scope.refuses(draw.stratum):
            buffer = self._start_capture(draw)
            buffer.request_head_bytes = stop - start
            pending = _PendingRequest(head.method, upgrade=head.upgrade, expect=head.expect, buffer=buffer)
            self._requests.keep = self._keep(buffer, buffer.request, data, start, stop)
            buffer.request_bytes += stop - start
        elif head.upgrade or head.expect:
            pending = _PendingRequest(head.method, upgrade=head.upgrade, expect=head.expect)
        else:
            pending = _HEAD_ONLY if head.method == b"HEAD" else _PLAIN
        self._pending.append(pending)
        self._incomplete = pending
        return head.body

    def _clear_caches(self) -> None:
        """Drop what was cached under an earlier configuration."""
        self._generation = self._scope.generation
        self._request_cache, self._response_cache = (
            CachedHead(self._scope.request_heads),
            CachedHead(self._scope.response_heads),
        )
        self._head = self._sampling_key = None

    def _request_piece(self, data: bytes, start: int, stop: int) -> None:
        assert self._incomplete is not None
        buffer = self._incomplete.buffer
        assert buffer is not None
        self._requests.keep = self._keep(buffer, buffer.request, data, start, stop)
        buffer.request_bytes += stop - start

    def _request_end(self) -> None:
        pending, self._incomplete = self._incomplete, None
        assert pending is not None
        if pending.upgrade:
            self._requests.pause()
        if pending.buffer is not None:
            self._mark_asked(pending.buffer)
            if pending.buffer.captured_at_ns:
                self._hand_over(pending.buffer)

    def _response_head(self, data: bytes, start: int, stop: int) -> int:
        cached_head = self._response_cache
        head = cached_head.find(data, start, stop) or parse_response(
            data, start, stop, self._scope.field_cache, cached_head
        )
        if not self._pending:
            raise FramingError("a response without a request")
        pending = self._pending[0]
        if head.status < 200 and head.status != 101:
            self._interim = True
            return 0
        if head.status == 101 or (pending.is_connect and head.status < 300):
            if not pending.upgrade or self._incomplete is pending:
                raise FramingError("a change of protocol that no request asked for")
            if _TO_HTTP2.search(data, start, stop):
                self._go_blind()  # it still carries exchanges
            else:
                self.abandon(Loss.FRAMING)
            self._requests.tunnel()
            return TUNNEL
        if pending.expect and self._incomplete is pending:
            raise FramingError(
                "a final response before the body of a request with Expect: the body may be left out"
            )
        if pending.upgrade:
            pending.upgrade = False
            self._requests.resume()
        buffer = pending.buffer
        if buffer is not None and buffer in self._buffers:
            buffer.response_head_bytes = stop - start
            self._responses.keep = self._keep(buffer, buffer.response, data, start, stop)
            buffer.response_bytes += stop - start
        return 0 if pending.is_head or head.status in (204, 304) else head.body

    def _response_piece(self, data: bytes, start: int, stop: int) -> None:
        buffer = self._pending[0].buffer
        assert buffer is not None
        self._mark_first_byte(buffer)
        self._responses.keep = self._keep(buffer, buffer.response, data, start, stop)
        buffer.response_bytes += stop - start

    def _response_end(self) -> None:
        if self._interim:
            self._interim = False
            return
        pending = self._pending.popleft()
        if pending.buffer is not None:
            self._mark_complete(pending.buffer)
            if self._incomplete is not pending:
                self._hand_over(pending.buffer)


def with_close(chunk: bytes) -> bytes:
    """Return `chunk` with `Connection: close` in the head that it begins with; unchanged where that head is not whole.

    `Connection: keep-alive` is replaced. Any other `Connection` header stays alone.
    """
    if (head := _FINAL_HEAD.match(chunk)) is None:
        return chunk
    end = head.end()
    if (header := _CONNECTION.search(chunk, 0, end)) is None:
        start = chunk.index(b"\n") + 1
        return b"%sConnection: close\r\n%s" % (chunk[:start], chunk[start:])
    if header[1].strip().lower() != b"keep-alive":
        return chunk
    return b"%sclose%s" % (chunk[: header.start(1)], chunk[header.end(1) :])
