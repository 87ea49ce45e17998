"""Frames of one direction of an HTTP/2 connection (RFC 9113). It does no I/O and copies no body.

The content of DATA frames is passed on as offsets; HEADERS and their CONTINUATION frames are passed on as one
block. Flow control, priorities and pings are ignored, because an observer sends nothing.
"""

import struct
from collections.abc import Callable, Container, Mapping
from typing import ClassVar

from quantdrift.sidecar.relay.observing.heads import FramingError
from quantdrift.sidecar.relay.observing.memory import MemoryShare, ObserverMemory

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

_HEAD = struct.Struct("!IBI")  # length and type, flags, stream
_HEAD_BYTES = _HEAD.size
_SETTING = struct.Struct("!HI")
_STREAM = 0x7FFFFFFF
_FRAME_BYTES = 16_384  # longest frame before the first SETTINGS
_MAX_FRAME_SIZE = 5  # the setting
_ANY = -1

_END_STREAM = 0x1
_ACK = 0x1
_END_HEADERS = 0x4
_PADDED = 0x8
_PRIORITY = 0x20


_DATA = 0
_HEADERS = 1
_RST_STREAM = 3
_SETTINGS = 4
_PUSH_PROMISE = 5
_GOAWAY = 7
_CONTINUATION = 9

_PADDING = "a frame's padding is longer than the frame"


class Frames:
    """Finds the frames of one direction.

    Parameters
    ----------
    wanted
        Streams whose content `on_piece` gets.
    on_block
        Called with `stream, block, ends` of a complete header block, of a stream or of a promised stream.
    on_piece
        Called with `stream, data, start, stop` of a part of a wanted stream's content.
    on_end
        Called with a stream that ended in a DATA frame.
    on_reset
        Called with a stream that was reset.
    on_goaway
        Called with the last stream that the sender of this direction has processed or will process.
    on_frame_bytes
        Called with the longest frame that the sender of this direction accepts.
    max_header_bytes
        Longest header block.
    memory
        Shared bound on partly received frames and header blocks.
    preface_bytes
        Length of the preface before the first frame.
    """

    __slots__ = (
        "_block",
        "_block_bytes",
        "_block_ends",
        "_block_of",
        "_block_on",
        "_ends",
        "_left",
        "_max_frame_bytes",
        "_max_header_bytes",
        "_need",
        "_on_block",
        "_on_end",
        "_on_frame_bytes",
        "_on_goaway",
        "_on_piece",
        "_on_reset",
        "_only",
        "_partial",
        "_share",
        "_stream",
        "_tail",
        "_wanted",
    )

    def __init__(
        self,
        wanted: Container[int],
        *,
        on_block: Callable[[int, bytes, bool], None],
        on_piece: Callable[[int, bytes, int, int], None],
        on_end: Callable[[int], None],
        on_reset: Callable[[int], None],
        on_goaway: Callable[[int], None],
        on_frame_bytes: Callable[[int], None],
        max_header_bytes: int,
        memory: ObserverMemory,
        preface_bytes: int = 0,
    ) -> None:
        self._wanted = wanted
        self._on_block = on_block
        self._on_piece = on_piece
        self._on_end = on_end
        self._on_reset = on_reset
        self._on_goaway = on_goaway
        self._on_frame_bytes = on_frame_bytes
        self._max_header_bytes = max_header_bytes
        self._max_frame_bytes = _FRAME_BYTES
        self._only = _SETTINGS  # the only type of frame that may come next
        # Of an incomplete frame: its stream, the bytes left of its content, and the bytes left of its
        # padding.
        self._stream = 0
        self._left = 0
        self._tail = preface_bytes
        self._ends = False
        # An incomplete frame head, or an incomplete frame that must be read whole.
        self._partial = bytearray()
        self._need = 0
        # An incomplete header block.
        self._block = bytearray()
        self._share = MemoryShare(memory)
        self._block_bytes = 0
        self._block_on = 0  # the stream of its frames
        self._block_of = 0  # the stream that it belongs to
        self._block_ends = False

    @property
    def is_between_messages(self) -> bool:
        """Whether the last frame is complete and no byte of another one has arrived."""
        return not (self._partial or self._left or self._tail) and self._only == _ANY

    def allow(self, n_bytes: int) -> None:
        """Allow frames of this length, which the receiver accepts."""
        # A receiver that lowers its limit may still get longer frames until the sender has read the new
        # limit.
        self._max_frame_bytes = max(self._max_frame_bytes, n_bytes)

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the direction.

        Raises
        ------
        FramingError
            Framing is lost; no more bytes may be fed.
        """
        size = len(chunk)
        pos = self._complete(chunk) if self._partial else 0
        while pos < size:
            if self._left or self._tail:
                pos = self._continue_data(chunk, pos)
                continue
            if size - pos < _HEAD_BYTES:
                self._buffer(chunk, pos, _HEAD_BYTES)
                return
            word, flags, stream = _HEAD.unpack_from(chunk, pos)
            length, kind = word >> 8, word & 0xFF
            if length > self._max_frame_bytes:
                raise FramingError("a frame is longer than the receiver allows")
            if self._only not in (kind, _ANY):
                raise FramingError("an unexpected type of frame")
            if kind == _DATA:
                pos = self._data(chunk, pos, length, flags, stream & _STREAM)
                continue
            pos += _HEAD_BYTES
            read = self._READERS.get(kind)
            if read is None:
                self._stream, self._left, self._tail, self._ends = 0, 0, length, False
            elif pos + length <= size:
                read(self, flags, stream & _STREAM, chunk[pos : pos + length])
                pos += length
            else:
                if length > self._max_header_bytes:
                    raise FramingError("a frame is too long to be buffered")
                self._buffer(chunk, pos - _HEAD_BYTES, _HEAD_BYTES + length)
                return

    def _buffer(self, chunk: bytes, pos: int, need: int) -> None:
        self._partial += chunk[pos:]
        self._need = need
        self._account()

    def forget(self) -> None:
        """Discard partly received data; no more bytes may be fed."""
        self._partial.clear()
        self._block.clear()
        self._account()

    def _account(self) -> None:
        self._share.resize(len(self._partial) + len(self._block))

    def _complete(self, chunk: bytes) -> int:
        """Complete a partly received frame; return how many bytes of `chunk` that took."""
        partial = self._partial
        pos = 0
        while True:
            stop = pos + self._need - len(partial)
            partial += chunk[pos:stop]
            self._account()
            if len(partial) < self._need:
                return len(chunk)
            pos = stop
            frame = bytes(partial)
            partial.clear()
            self._account()
            self.feed(frame)
            if not partial:
                return pos

    def _data(self, chunk: bytes, pos: int, length: int, flags: int, stream: int) -> int:
        """Take a DATA frame whose head is at `pos`, as far as it has arrived.

        Return the position after it.
        """
        size = len(chunk)
        start, tail = pos + _HEAD_BYTES, 0
        if flags & _PADDED:
            if start == size:
                self._buffer(chunk, pos, _HEAD_BYTES + 1)
                return size
            tail = chunk[start]
            start, length = start + 1, length - 1 - tail
            if length < 0:
                raise FramingError(_PADDING)
        stop = start + length
        if stop + tail > size:
            self._stream, self._left, self._tail = stream, length, tail
            self._ends = bool(flags & _END_STREAM)
            return start
        if length and stream in self._wanted:
            self._on_piece(stream, chunk, start, stop)
        if flags & _END_STREAM:
            self._on_end(stream)
        return stop + tail

    def _continue_data(self, chunk: bytes, pos: int) -> int:
        """Take more of a frame's content and padding; return the position after it."""
        size = len(chunk)
        if self._left:
            stop = min(size, pos + self._left)
            self._left -= stop - pos
            if self._stream in self._wanted:
                self._on_piece(self._stream, chunk, pos, stop)
            pos = stop
        if not self._left:
            stop = min(size, pos + self._tail)
            self._tail -= stop - pos
            pos = stop
            if not self._tail and self._ends:
                self._on_end(self._stream)
        return pos

    def _headers(self, flags: int, stream: int, content: bytes) -> None:
        content = _unpadded(flags, content)
        if flags & _PRIORITY:
            content = _skip_prefix(5, content)
        self._begin(flags, stream, stream, content, ends=bool(flags & _END_STREAM))

    def _push_promise(self, flags: int, stream: int, content: bytes) -> None:
        content = _unpadded(flags, content)
        promised = int.from_bytes(content[:4], "big") & _STREAM
        self._begin(flags, stream, promised, _skip_prefix(4, content), ends=False)

    def _begin(self, flags: int, stream: int, about: int, part: bytes, *, ends: bool) -> None:
        if not stream:
            raise FramingError("headers without a stream")
        self._block_on, self._block_of, self._block_ends = stream, about, ends
        self._add(flags, part)

    def _continuation(self, flags: int, stream: int, content: bytes) -> None:
        if self._only != _CONTINUATION or stream != self._block_on:
            raise FramingError("a CONTINUATION frame without HEADERS")
        self._add(flags, content)

    def _add(self, flags: int, part: bytes) -> None:
        self._block_bytes += len(part)
        if self._block_bytes > self._max_header_bytes:
            raise FramingError(f"a head is longer than {self._max_header_bytes} bytes")
        if not flags & _END_HEADERS:
            self._block += part
            self._block_bytes += _HEAD_BYTES  # so that a flood of empty frames is bounded, too
            self._only = _CONTINUATION
            self._account()
            return
        if self._block:
            part = bytes(self._block) + part
            self._block.clear()
            self._account()
        self._block_bytes = 0
        self._only = _ANY
        self._on_block(self._block_of, part, self._block_ends)

    def _rst_stream(self, flags: int, stream: int, content: bytes) -> None:
        if not stream or len(content) != 4:
            raise FramingError("a RST_STREAM frame without stream or error code")
        self._on_reset(stream)

    def _goaway(self, flags: int, stream: int, content: bytes) -> None:
        if stream or len(content) < 8:
            raise FramingError("a malformed GOAWAY frame")
        self._on_goaway(int.from_bytes(content[:4], "big") & _STREAM)

    def _settings(self, flags: int, stream: int, content: bytes) -> None:
        if stream or len(content) % _SETTING.size or (flags & _ACK and content):
            raise FramingError("a malformed SETTINGS frame")
        self._only = _ANY
        for setting, value in _SETTING.iter_unpack(content):
            if setting == _MAX_FRAME_SIZE:
                self._on_frame_bytes(value)

    _READERS: ClassVar[Mapping[int, Callable[["Frames", int, int, bytes], None]]] = {
        _HEADERS: _headers,
        _RST_STREAM: _rst_stream,
        _SETTINGS: _settings,
        _PUSH_PROMISE: _push_promise,
        _GOAWAY: _goaway,
        _CONTINUATION: _continuation,
    }


def _unpadded(flags: int, content: bytes) -> bytes:
    if not flags & _PADDED:
        return content
    if not content or 1 + content[0] > len(content):
        raise FramingError(_PADDING)
    return content[1 : len(content) - content[0]]


def _skip_prefix(n_bytes: int, content: bytes) -> bytes:
    if len(content) < n_bytes:
        raise FramingError("a HEADERS frame is cut short")
    return content[n_bytes:]
