"""Rides along on an HTTP/2 connection with prior knowledge (h2c): pairs by stream what HTTP/1.1 pairs by order.

What is taken is handed over as HTTP/1.1 would have it: a head, trailers in it, and the content of the DATA frames.
"""

import re

from quantdrift.core.records import MARK, Loss
from quantdrift.sidecar.handoff.frame import MAX_HEADER_BYTES
from quantdrift.sidecar.handoff.http_head import field_lines, request_head
from quantdrift.sidecar.relay.http2.frames import PREFACE, Frames
from quantdrift.sidecar.relay.http2.hpack import HeaderBlock, HeaderBlockDecoder, text
from quantdrift.sidecar.relay.observing.heads import FramingError
from quantdrift.sidecar.relay.observing.memory import MemoryShare
from quantdrift.sidecar.relay.observing.observer import CaptureBuffer, CaptureScope, ExchangeObserver
from quantdrift.sidecar.sampling.first_phase import gather
from quantdrift.sidecar.state.counters import Count

_MAX_STREAMS = 10_000
_STREAMS_AT_ONCE = 100  # what servers mostly allow
_STREAM_BYTES = 200
_HEAD_BYTES = 1024  # longest head that is remembered
_VERSION = b"HTTP/2"
_MARK = MARK.encode()
_PROBES = re.compile(rb"/grpc\.|/inference\.GRPCInferenceService/(?:Server|ModelReady|ModelMetadata)")
_NO_TARGET = re.compile(rb"[^!-~\x80-\xff]")
# They speak of an HTTP/1.1 connection. Who writes them here all the same must not have a body read by them.
_OF_CONNECTION = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
)

# What has come to its end, of a stream.
_NOTHING = 0
_REQUEST = 1
_RESPONSE = 2


class _Asked:
    """What a request's header block says."""

    __slots__ = ("_block", "_head", "_method", "_target", "generation", "is_unknown", "place")

    def __init__(self, block: HeaderBlock, scope: CaptureScope) -> None:
        method = target = b""
        has_authority = False
        headers: dict[bytes, bytes] = {}
        names = scope.names
        for name, value, _ in block.fields:
            field = text(name)
            if field == b":method":
                method = text(value)
            elif field == b":path":
                target = text(value)
            elif field == b":authority":
                has_authority = True
                if b"host" in names:
                    gather(headers, b"host", text(value))
            elif field in names and not (field == b"host" and has_authority):  # as in what is handed over
                gather(headers, field, text(value))
        self.generation = scope.generation
        self._block = block
        self._head = b""
        self._method = method
        self._target = target
        passed = _MARK in headers or _NO_TARGET.search(target)
        path = None if passed else scope.routes.find(method, target)
        self.place = None if path is None else scope.sampler.locate(method, path, headers)
        self.is_unknown = (
            path is None and method == b"POST" and _MARK not in headers and not _PROBES.match(target)
        )

    @property
    def head(self) -> bytes:
        """The head of the same request in HTTP/1.1."""
        head = self._head or request_head(self._method, self._target, _fields(self._block), _VERSION)
        if len(head) <= _HEAD_BYTES:  # a short block may say a long one, and blocks are remembered
            self._head = head
        return head


class Http2Observer(ExchangeObserver):
    """Follows one connection, from its preface on. Where framing or header state is lost, it lets go by itself.

    If a method raises all the same, `abandon` must be called, and nothing else any more.

    Parameters
    ----------
    scope
        Shared by the worker's observers.
    """

    __slots__ = (
        "_last",
        "_most",
        "_open",
        "_request_blocks",
        "_requests",
        "_response_blocks",
        "_responses",
        "_share",
        "_wanted",
    )

    speaks_unasked = True

    def __init__(self, scope: CaptureScope) -> None:
        super().__init__(scope)
        limit = MAX_HEADER_BYTES
        self._open: dict[int, int] = {}  # streams that are not complete
        self._most = _STREAMS_AT_ONCE  # streams that may be open before more room is asked for
        self._share = MemoryShare(scope.parts)
        self._last = 0  # the newest of them
        self._wanted: dict[int, CaptureBuffer] = {}
        self._request_blocks = HeaderBlockDecoder(limit, scope.parts)
        self._response_blocks = HeaderBlockDecoder(limit, scope.parts)
        self._requests = Frames(
            self._wanted,
            on_block=self._request_block,
            on_piece=self._request_piece,
            on_end=self._request_end,
            on_reset=self._reset,
            on_goaway=lambda _: None,  # of streams that the backend opens, which are not followed
            on_frame_bytes=self._client_takes,
            max_header_bytes=limit,
            parts=scope.parts,
            preface_bytes=len(PREFACE),
        )
        self._responses = Frames(
            self._wanted,
            on_block=self._response_block,
            on_piece=self._response_piece,
            on_end=self._response_end,
            on_reset=self._reset,
            on_goaway=self._goaway,
            on_frame_bytes=self._requests.allow,
            max_header_bytes=limit,
            parts=scope.parts,
        )

    @property
    def is_idle(self) -> bool:
        """Whether no stream is known to be open."""
        return self.is_active and not self._open and self._requests.at_rest

    def request(self, chunk: bytes) -> None:
        """Take bytes that the client sent, its preface first."""
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
        """Take note that the backend will send no more: that completes nothing here."""

    def abandon(self, loss: Loss) -> None:
        """Let go of everything held, counted under `loss`, and follow no more."""
        super().abandon(loss)
        self._open.clear()
        self._wanted.clear()
        self._share.hold(0)
        for part in (self._requests, self._responses, self._request_blocks, self._response_blocks):
            part.forget()

    def _client_takes(self, n_bytes: int) -> None:
        self._responses.allow(n_bytes)

    def _request_block(self, stream: int, data: bytes, ends: bool) -> None:  # noqa: FBT001 - called back
        block = self._request_blocks.read(data)
        if stream in self._open:  # trailers: there is nothing in them that is used
            if ends:
                self._request_end(stream)
            return
        if stream <= self._last:
            return  # it was reset while this was on its way
        if not stream & 1:
            raise FramingError("a stream that no client opens")
        if len(self._open) >= self._most:
            self._allow_more()
        self._last = stream
        self._open[stream] = _NOTHING
        asked = block.digest
        if not isinstance(asked, _Asked) or asked.generation != self._scope.generation:
            asked = block.digest = _Asked(block, self._scope)
        slot = self._scope.slot
        if asked.place is None:
            self._scope.ignore(is_unknown=asked.is_unknown)
        else:
            slot.add(asked.place.stratum, Count.OFFERED)
            draw = self._scope.sampler.take(asked.place)
            if draw is not None and not self._scope.refuses(draw.stratum):
                held, head = self._take(draw), asked.head
                held.request_head_bytes = len(head)
                self._wanted[stream] = held
                self._hold_request(stream, held, head, 0, len(head))
        if ends:
            self._request_end(stream)

    def _allow_more(self) -> None:
        if self._most >= _MAX_STREAMS:
            raise FramingError("too many streams are open")
        self._most = min(2 * self._most, _MAX_STREAMS)
        self._share.hold(self._most * _STREAM_BYTES)

    def _request_piece(self, stream: int, data: bytes, start: int, stop: int) -> None:
        self._hold_request(stream, self._wanted[stream], data, start, stop)

    def _hold_request(self, stream: int, held: CaptureBuffer, data: bytes, start: int, stop: int) -> None:
        if self._keep(held, held.request, data, start, stop):
            held.request_bytes += stop - start
        else:
            self._wanted.pop(stream, None)

    def _request_end(self, stream: int) -> None:
        state = self._open.get(stream)
        if state == _RESPONSE:
            self._complete(stream)
        elif state is not None:
            self._open[stream] = _REQUEST

    def _response_block(self, stream: int, data: bytes, ends: bool) -> None:  # noqa: FBT001 - called back
        block = self._response_blocks.read(data)
        if stream > self._last and stream & 1:
            raise FramingError("a response to no request")
        held = self._wanted.get(stream)
        if held is not None:
            if held.response_head_bytes:
                self._extend_head(stream, held, field_lines(_fields(block)))  # trailers
            else:
                self._begin_head(stream, held, block)
        if ends:
            self._response_end(stream)

    def _begin_head(self, stream: int, held: CaptureBuffer, block: HeaderBlock) -> None:
        status = next((text(value) for name, value, _ in block.fields if name == b":status"), b"")
        if status.startswith(b"1"):
            return  # an interim response, before the final one
        head = b"%b %b \r\n%b" % (_VERSION, status, field_lines(_fields(block)))
        if self._hold_response(stream, held, head, 0, len(head)):
            held.response_head_bytes = len(head)

    def _extend_head(self, stream: int, held: CaptureBuffer, lines: bytes) -> None:
        if self._hold_response(stream, held, lines, 0, len(lines), pieces=[]):
            held.response[0] = b"".join((held.response[0], lines))
            held.response_head_bytes += len(lines)

    def _response_piece(self, stream: int, data: bytes, start: int, stop: int) -> None:
        held = self._wanted[stream]
        if held.response_head_bytes:
            self._hold_response(stream, held, data, start, stop)
        else:
            self._lose(stream, Loss.FRAMING)  # content before any head

    def _hold_response(
        self,
        stream: int,
        held: CaptureBuffer,
        data: bytes,
        start: int,
        stop: int,
        *,
        pieces: list[bytes | memoryview] | None = None,
    ) -> bool:
        keeps = self._keep(held, held.response if pieces is None else pieces, data, start, stop)
        if keeps:
            held.response_bytes += stop - start
        else:
            self._wanted.pop(stream, None)
        return keeps

    def _response_end(self, stream: int) -> None:
        state = self._open.get(stream)
        if state is None:
            return
        held = self._wanted.get(stream)
        if held is not None:
            if held.response_head_bytes:
                self._extend_head(stream, held, b"\r\n")
                self._answered(held)
            else:
                self._lose(stream, Loss.FRAMING)
        if state == _REQUEST:
            self._complete(stream)
        else:
            self._open[stream] = _RESPONSE

    def _complete(self, stream: int) -> None:
        del self._open[stream]
        held = self._wanted.pop(stream, None)
        if held is not None:
            self._hand_over(held)

    def _reset(self, stream: int) -> None:
        if self._open.pop(stream, None) is not None:
            self._lose(stream, Loss.TRUNCATED)

    def _goaway(self, last: int) -> None:
        """Take note that the backend will not answer what is newer: its client asks again elsewhere."""
        for stream in [stream for stream in self._open if stream > last]:
            self._reset(stream)

    def _lose(self, stream: int, loss: Loss) -> None:
        held = self._wanted.pop(stream, None)
        if held is not None:
            self._let_go(held, loss)


def _fields(block: HeaderBlock) -> list[tuple[bytes, bytes]]:
    """Return the fields of a block as an HTTP/1.1 head has them."""
    fields: list[tuple[bytes, bytes]] = []
    has_authority = False
    for coded_name, coded_value, _ in block.fields:
        name, value = text(coded_name), text(coded_value)
        if name == b":authority":
            has_authority = True
            fields.insert(0, (b"host", value))
        elif name not in _OF_CONNECTION and not (name == b"host" and has_authority):
            fields.append(
                (name, value)
            )  # the other pseudo-header fields have no name there, and are left out
    return fields
