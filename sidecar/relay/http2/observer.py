"""The observer of an HTTP/2 connection with prior knowledge (h2c).

It pairs requests with responses by stream.

Sampled exchanges are handed over in the form of HTTP/1.1: a head, with the trailers in it, and the content of
the DATA frames.
"""

import re

from quantdrift.core.records import Loss
from quantdrift.sidecar.handoff.frame import MAX_HEADER_BYTES
from quantdrift.sidecar.handoff.http_head import field_lines, request_head
from quantdrift.sidecar.relay.http2.frames import PREFACE, Frames
from quantdrift.sidecar.relay.http2.hpack import HeaderBlock, HeaderBlockDecoder, text
from quantdrift.sidecar.relay.observing.heads import FramingError
from quantdrift.sidecar.relay.observing.memory import MemoryShare
from quantdrift.sidecar.relay.observing.observer import CaptureBuffer, CaptureScope, ExchangeObserver
from quantdrift.sidecar.sampling.first_phase import add_header
from quantdrift.sidecar.state.counters import Count

_MAX_STREAMS = 10_000
_STREAMS_AT_ONCE = 100  # the usual limit of servers
_STREAM_BYTES = 200
_HEAD_BYTES = 1024  # longest head that is cached
_VERSION = b"HTTP/2"
_PROBES = re.compile(rb"/grpc\.|/inference\.GRPCInferenceService/(?:Server|ModelReady|ModelMetadata)")
_NO_TARGET = re.compile(rb"[^!-~\x80-\xff]")
# Fields of an HTTP/1.1 connection. If a client sends them over HTTP/2, they must not decide how a body is
# read.
_OF_CONNECTION = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
)

# Which half of a stream is complete.
_NOTHING = 0
_REQUEST = 1
_RESPONSE = 2


class _RequestBlock:
    """What the header block of a request says: its sampling key, and on demand its head."""

    __slots__ = ("_block", "_head", "_method", "_target", "generation", "is_unknown", "sampling_key")

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
                    add_header(headers, b"host", text(value))
            elif field in names and not (field == b"host" and has_authority):  # the same rule as in `_fields`
                add_header(headers, field, text(value))
        self.generation = scope.generation
        self._block = block
        self._head = b""
        self._method = method
        self._target = target
        path = None if _NO_TARGET.search(target) else scope.routes.find(method, target)
        self.sampling_key = None if path is None else scope.sampler.key_for_headers(method, path, headers)
        self.is_unknown = path is None and method == b"POST" and not _PROBES.match(target)

    @property
    def head(self) -> bytes:
        """The head of the same request in the form of HTTP/1.1."""
        head = self._head or request_head(self._method, self._target, _fields(self._block), _VERSION)
        if len(head) <= _HEAD_BYTES:  # a short block may expand to a long head, and blocks are cached
            self._head = head
        return head


class Http2Observer(ExchangeObserver):
    """Observes one HTTP/2 connection from its preface on, until framing or header state is lost.

    If a method raises, `abandon` must be called, and no other method after it.

    Parameters
    ----------
    scope
        Shared by the worker's observers.
    """

    __slots__ = (
        "_captured",
        "_last_row",
        "_last_stream",
        "_max_open",
        "_open",
        "_request_blocks",
        "_requests",
        "_response_blocks",
        "_responses",
        "_share",
    )

    client_may_send_anytime = True
    _requests: Frames
    _responses: Frames

    def __init__(self, scope: CaptureScope) -> None:
        super().__init__(scope)
        limit = MAX_HEADER_BYTES
        self._open: dict[int, int] = {}  # incomplete streams, with the complete half of each
        self._max_open = _STREAMS_AT_ONCE  # open streams that the reserved memory is enough for
        self._share = MemoryShare(scope.memory)
        self._last_stream = 0  # the newest stream
        self._last_row: int | None = None
        self._captured: dict[int, CaptureBuffer] = {}
        self._request_blocks = HeaderBlockDecoder(limit, scope.memory)
        self._response_blocks = HeaderBlockDecoder(limit, scope.memory)
        self._requests = Frames(
            self._captured,
            on_block=self._request_block,
            on_piece=self._request_piece,
            on_end=self._request_end,
            on_reset=self._cancel,
            on_goaway=lambda _: None,  # it concerns streams that the backend opens, which are not observed
            on_frame_bytes=self._set_client_frame_bytes,
            max_header_bytes=limit,
            memory=scope.memory,
            preface_bytes=len(PREFACE),
        )
        self._responses = Frames(
            self._captured,
            on_block=self._response_block,
            on_piece=self._response_piece,
            on_end=self._response_end,
            on_reset=self._reset,
            on_goaway=self._goaway,
            on_frame_bytes=self._requests.allow,
            max_header_bytes=limit,
            memory=scope.memory,
        )

    @property
    def is_idle(self) -> bool:
        """Whether no stream is open."""
        return self.is_active and not self._open and self._requests.is_between_messages

    @property
    def waits_for_client(self) -> bool:
        """Whether the client, not the backend, must send something next."""
        return all(state == _NOTHING for state in self._open.values())

    @property
    def has_no_whole_head(self) -> bool:
        """Whether the first request is still to come."""
        return not self._last_stream

    @property
    def last_stream(self) -> int:
        """Number of the newest stream; 0: there was none. Pings and settings do not change it."""
        return self._last_stream

    @property
    def last_row(self) -> int | None:
        """Row in the table of counts of the last inference request; None: there was none."""
        return self._last_row

    def response_eof(self) -> None:
        """Do nothing: in HTTP/2 the end of file completes no exchange."""

    def abandon(self, loss: Loss) -> None:
        """Drop all buffered exchanges, counted under `loss`, and stop observing."""
        super().abandon(loss)
        self._open.clear()
        self._captured.clear()
        self._share.resize(0)
        for part in (self._requests, self._responses, self._request_blocks, self._response_blocks):
            part.forget()

    def _set_client_frame_bytes(self, n_bytes: int) -> None:
        self._responses.allow(n_bytes)

    def _request_block(self, stream: int, data: bytes, ends: bool) -> None:  # noqa: FBT001 - called back
        block = self._request_blocks.read(data)
        if stream in self._open:  # trailers of a request are not used
            if ends:
                self._request_end(stream)
            return
        if stream <= self._last_stream:
            return  # the stream was reset while this block was on its way
        if not stream & 1:
            raise FramingError("a stream number that a client must not open")
        if len(self._open) >= self._max_open:
            self._allow_more()
        self._last_stream = stream
        self._open[stream] = _NOTHING
        request_block = block.digest
        if not isinstance(request_block, _RequestBlock) or request_block.generation != self._scope.generation:
            request_block = block.digest = _RequestBlock(block, self._scope)
        slot = self._scope.slot
        if request_block.sampling_key is None:
            self._scope.count_ignored(is_unknown=request_block.is_unknown)
        else:
            self._last_row = request_block.sampling_key.stratum
            slot.add(self._last_row, Count.OFFERED)
            draw = self._scope.sampler.take(request_block.sampling_key)
            if draw is not None and not self._scope.refuses(draw.stratum):
                buffer, head = self._start_capture(draw), request_block.head
                buffer.request_head_bytes = len(head)
                self._captured[stream] = buffer
                self._hold_request(stream, buffer, head, 0, len(head))
        if ends:
            self._request_end(stream)

    def _allow_more(self) -> None:
        if self._max_open >= _MAX_STREAMS:
            raise FramingError("too many streams are open")
        self._max_open = min(2 * self._max_open, _MAX_STREAMS)
        self._share.resize(self._max_open * _STREAM_BYTES)

    def _request_piece(self, stream: int, data: bytes, start: int, stop: int) -> None:
        self._hold_request(stream, self._captured[stream], data, start, stop)

    def _hold_request(self, stream: int, buffer: CaptureBuffer, data: bytes, start: int, stop: int) -> None:
        if self._keep(buffer, buffer.request, data, start, stop):
            buffer.request_bytes += stop - start
        else:
            self._captured.pop(stream, None)

    def _request_end(self, stream: int) -> None:
        state = self._open.get(stream)
        if state is not None and (buffer := self._captured.get(stream)) is not None:
            self._mark_asked(buffer)
        if state == _RESPONSE:
            self._complete(stream)
        elif state is not None:
            self._open[stream] = _REQUEST

    def _response_block(self, stream: int, data: bytes, ends: bool) -> None:  # noqa: FBT001 - called back
        block = self._response_blocks.read(data)
        if stream > self._last_stream and stream & 1:
            raise FramingError("a response without a request")
        buffer = self._captured.get(stream)
        if buffer is not None:
            if buffer.response_head_bytes:
                self._extend_head(stream, buffer, field_lines(_fields(block)))  # trailers
            else:
                self._begin_head(stream, buffer, block)
        if ends:
            self._response_end(stream)

    def _begin_head(self, stream: int, buffer: CaptureBuffer, block: HeaderBlock) -> None:
        status = next((text(value) for name, value, _ in block.fields if name == b":status"), b"")
        if status.startswith(b"1"):
            return  # an interim response, before the final one
        head = b"%b %b \r\n%b" % (_VERSION, status, field_lines(_fields(block)))
        if self._hold_response(stream, buffer, head, 0, len(head)):
            buffer.response_head_bytes = len(head)

    def _extend_head(self, stream: int, buffer: CaptureBuffer, lines: bytes) -> None:
        if self._hold_response(stream, buffer, lines, 0, len(lines), pieces=[]):
            buffer.response[0] = b"".join((buffer.response[0], lines))
            buffer.response_head_bytes += len(lines)

    def _response_piece(self, stream: int, data: bytes, start: int, stop: int) -> None:
        buffer = self._captured[stream]
        if buffer.response_head_bytes:
            self._mark_first_byte(buffer)
            self._hold_response(stream, buffer, data, start, stop)
        else:
            self._lose(stream, Loss.FRAMING)  # content before the head

    def _hold_response(
        self,
        stream: int,
        buffer: CaptureBuffer,
        data: bytes,
        start: int,
        stop: int,
        *,
        pieces: list[bytes | memoryview] | None = None,
    ) -> bool:
        keeps = self._keep(buffer, buffer.response if pieces is None else pieces, data, start, stop)
        if keeps:
            buffer.response_bytes += stop - start
        else:
            self._captured.pop(stream, None)
        return keeps

    def _response_end(self, stream: int) -> None:
        state = self._open.get(stream)
        if state is None:
            return
        buffer = self._captured.get(stream)
        if buffer is not None:
            if buffer.response_head_bytes:
                self._extend_head(stream, buffer, b"\r\n")
                self._mark_complete(buffer)
            else:
                self._lose(stream, Loss.FRAMING)
        if state == _REQUEST:
            self._complete(stream)
        else:
            self._open[stream] = _RESPONSE

    def _complete(self, stream: int) -> None:
        del self._open[stream]
        buffer = self._captured.pop(stream, None)
        if buffer is not None:
            self._hand_over(buffer)

    def _cancel(self, stream: int) -> None:
        self._reset(stream, Loss.CLIENT_ABORT)

    def _reset(self, stream: int, loss: Loss = Loss.TRUNCATED) -> None:
        if self._open.pop(stream, None) is not None:
            self._lose(stream, loss)

    def _goaway(self, last: int) -> None:
        """Drop the streams after `last`.

        The backend will not answer them, and the client sends them again elsewhere.
        """
        for stream in [stream for stream in self._open if stream > last]:
            self._reset(stream)

    def _lose(self, stream: int, loss: Loss) -> None:
        buffer = self._captured.pop(stream, None)
        if buffer is not None:
            self._drop(buffer, loss)


def _fields(block: HeaderBlock) -> list[tuple[bytes, bytes]]:
    """Return the fields of a block in the form of an HTTP/1.1 head."""
    fields: list[tuple[bytes, bytes]] = []
    has_authority = False
    for coded_name, coded_value, _ in block.fields:
        name, value = text(coded_name), text(coded_value)
        if name == b":authority":
            has_authority = True
            fields.insert(0, (b"host", value))
        elif name not in _OF_CONNECTION and not (name == b"host" and has_authority):
            # `http_head` leaves out the other pseudo-header fields, whose names are invalid in HTTP/1.1.
            fields.append((name, value))
    return fields
