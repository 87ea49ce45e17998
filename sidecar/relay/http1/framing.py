"""Message framing of one direction of an HTTP/1.1 connection. It does no I/O and copies no body.

A parser that returns every header and every body byte costs more than the relay itself. Here one search finds
the head, cached lines give its meaning, and integer arithmetic finds the end of the body, so that a large
body costs nothing per byte.
"""

import re
from collections.abc import Callable
from enum import IntEnum

from quantdrift.sidecar.relay.observing.heads import CHUNKED, UNTIL_CLOSE, FramingError
from quantdrift.sidecar.relay.observing.memory import MemoryShare, ObserverMemory

TUNNEL = -3  # a length of a body: the bytes that follow are not HTTP/1

_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?")
_EMPTY_LINE = b"\r\n"

OnHead = Callable[[bytes, int, int], int]
OnPiece = Callable[[bytes, int, int], None]
OnEnd = Callable[[], None]


class _State(IntEnum):
    HEAD = 0
    COUNTED = 1  # a body of known length
    UNTIL_CLOSE = 2
    CHUNK_LINE = 3
    CHUNK_DATA = 4
    CHUNK_END = 5  # the CR LF after a chunk's data
    TRAILER = 6
    TUNNEL = 7


# Looking up an enum member costs as much as the comparison that needs it.
_HEAD, _COUNTED, _UNTIL_CLOSE, _CHUNK_LINE_, _CHUNK_DATA, _CHUNK_END, _TRAILER, _TUNNEL = _State


class MessageFramer:
    """Finds the messages of one direction.

    Parameters
    ----------
    on_head
        Called with `data, start, stop` of a complete head, its empty line included; returns the length of the
        body: bytes, `CHUNKED`, `UNTIL_CLOSE` or `TUNNEL`.
    on_piece
        Called with `data, start, stop` of a part of a body as on the wire, chunked framing included, while
        `keep` is set.
    on_end
        Called when a message is complete.
    max_head_bytes
        Longest head, chunk line and trailer section.
    memory
        Shared bound on partly received heads and lines.

    Attributes
    ----------
    keep : bool
        Whether `on_piece` gets the parts of the present body; cleared at the end of the message.
    """

    __slots__ = (
        "_backlog",
        "_left",
        "_max_head_bytes",
        "_memory",
        "_on_end",
        "_on_head",
        "_on_piece",
        "_partial",
        "_share",
        "_state",
        "_trailer_bytes",
        "keep",
    )

    def __init__(
        self, on_head: OnHead, on_piece: OnPiece, on_end: OnEnd, max_head_bytes: int, memory: ObserverMemory
    ) -> None:
        self._on_head = on_head
        self._on_piece = on_piece
        self._on_end = on_end
        self._max_head_bytes = max_head_bytes
        self._state = _HEAD
        self._left = 0  # bytes left of the body or chunk
        self._partial = bytearray()  # a head or line that is not complete
        self._share: MemoryShare | None = None  # None until something came in parts
        self._memory = memory
        self._trailer_bytes = 0
        self._backlog: bytearray | None = None  # bytes held back while their protocol is undecided
        self.keep = False

    @property
    def is_between_messages(self) -> bool:
        """Whether the last message is complete and no byte of another one has arrived."""
        return self._state is _HEAD and not self._partial and not self._backlog

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the direction.

        Raises
        ------
        FramingError
            Framing is lost; no more bytes may be fed.
        """
        pos, size = 0, len(chunk)
        if self._state is _HEAD and not self._partial and self._backlog is None:
            pos = self._take_whole_message(chunk, size)
        if pos < size:
            self._take_parts(chunk, pos, size)
            if self._share is not None or self._partial or self._backlog:
                self._account()

    def skip(self, n_bytes: int) -> int:
        """Skip the next bytes of the direction where only their number matters.

        Parameters
        ----------
        n_bytes
            How many bytes come next.

        Returns
        -------
        int
            How many of them belong to a body that is not kept; the others are to be fed.
        """
        if self.keep or self._backlog is not None:
            return 0
        state = self._state
        if state is _COUNTED and n_bytes >= self._left:
            passed = self._left
            self._state = _HEAD
            self._end()
            return passed
        if state is _COUNTED or (state is _CHUNK_DATA and n_bytes < self._left):
            self._left -= n_bytes
            return n_bytes
        return n_bytes if state is _UNTIL_CLOSE else 0

    def forget(self) -> None:
        """Discard partly received data; no more bytes may be fed."""
        self._partial.clear()
        self._backlog = None
        self._account()

    def _account(self) -> None:
        if self._share is None:
            self._share = MemoryShare(self._memory)
        self._share.resize(len(self._partial) + len(self._backlog or b""))

    def _take_parts(self, chunk: bytes, pos: int, size: int) -> None:
        """Take bytes that are not one whole message."""
        while pos < size:
            if self._backlog is not None:
                self._buffer(chunk[pos:])
                return
            state = self._state
            if state is _HEAD:
                pos = self._head(chunk, pos)
                continue
            start = pos
            if state is _COUNTED:
                bytes_left = size - pos
                if bytes_left < self._left:
                    self._left -= bytes_left
                    pos = size
                else:
                    pos += self._left
                    self._state = _HEAD
            elif state is _UNTIL_CLOSE:
                pos = size
            elif state is _TUNNEL:
                return
            else:
                pos = self._chunks(chunk, pos)
            if self.keep:
                self._on_piece(chunk, start, pos)
            if self._state is _HEAD:
                self._end()

    def eof(self) -> None:
        """Handle the end of the direction, which completes a body that lasts until then."""
        if self._state is _UNTIL_CLOSE:
            self._state = _HEAD
            self._end()

    def pause(self) -> None:
        """Hold back what follows the present message until `resume` or `tunnel` decides its protocol."""
        self._backlog = bytearray()

    def resume(self) -> None:
        """Process what was held back."""
        backlog, self._backlog = self._backlog, None
        if backlog:
            self.feed(bytes(backlog))
            self._account()

    def tunnel(self) -> None:
        """Stop framing: the connection has changed to another protocol."""
        self._state = _TUNNEL
        self._backlog = None
        self.keep = False

    def _buffer(self, chunk: bytes) -> None:
        assert self._backlog is not None
        self._backlog += chunk
        if len(self._backlog) > self._max_head_bytes:
            raise FramingError("too many bytes follow a request whose response decides on the protocol")

    def _end(self) -> None:
        self.keep = False
        self._on_end()

    def _take_whole_message(self, chunk: bytes, size: int) -> int:
        """Take the head at the beginning of a chunk, and its body if nothing else follows.

        Return the position after it.

        Most messages arrive like this; `_take_parts` handles the others.
        """
        stop = chunk.find(b"\r\n\r\n") + 4
        if not 4 < stop <= self._max_head_bytes:
            return 0
        try:
            body = self._on_head(chunk, 0, stop)
        except FramingError:
            if chunk.startswith(_EMPTY_LINE):  # `_take_parts` skips it
                return 0
            raise
        if body < 0 or stop + body != size:
            self._begin(body)
            return stop
        if body and self.keep:
            self._on_piece(chunk, stop, size)
        self._end()
        return size

    def _head(self, chunk: bytes, pos: int) -> int:
        """Take bytes of a head; return the position after them."""
        partial = self._partial
        if partial == b"\r":  # half of an empty line before the head
            partial.clear()
            if chunk[pos] != 10:
                raise FramingError("a message begins with a carriage return")
            return pos + 1
        if partial:
            before = len(partial)
            partial += chunk[pos : pos + self._max_head_bytes + 1 - before]
            end = partial.find(b"\r\n\r\n", max(0, before - 3))
            if end < 0:
                self._check_length(len(partial))
                return len(chunk)
            data, start, stop = bytes(partial[: end + 4]), 0, end + 4
            partial.clear()
            pos += stop - before
        else:
            if chunk.startswith(_EMPTY_LINE, pos):
                return pos + 2  # allowed before a request (RFC 9112, 2.2)
            end = chunk.find(b"\r\n\r\n", pos)
            if end < 0:
                rest = len(chunk) - pos
                self._check_length(rest)
                if not chunk[pos : pos + 1].isalpha() and chunk[pos:] != b"\r":
                    raise FramingError("these bytes cannot begin a message")
                partial += chunk[pos:]
                return len(chunk)
            data, start, stop = chunk, pos, end + 4
            pos = stop
        self._check_length(stop - start)
        self._begin(self._on_head(data, start, stop))
        return pos

    def _begin(self, body: int) -> None:
        if body > 0:
            self._state = _COUNTED
            self._left = body
        elif body == 0:
            self._end()
        elif body == CHUNKED:
            self._state = _CHUNK_LINE_
            self._trailer_bytes = 0
        elif body == UNTIL_CLOSE:
            self._state = _UNTIL_CLOSE
        else:
            self.tunnel()

    def _chunks(self, chunk: bytes, pos: int) -> int:
        """Walk through a chunked body; return where it ends, or the end of `chunk`."""
        size = len(chunk)
        while pos < size:
            if self._state is _CHUNK_DATA:
                bytes_left = size - pos
                if bytes_left < self._left:
                    self._left -= bytes_left
                    return size
                pos += self._left
                self._state = _CHUNK_END
                continue
            line, pos = self._line(chunk, pos)
            if line is None:
                return size
            if self._state is _CHUNK_LINE_:
                match = _CHUNK_LINE.fullmatch(line)
                if match is None:
                    raise FramingError("a chunk has no length")
                self._left = int(match[1], 16)
                self._state = _CHUNK_DATA if self._left else _TRAILER
            elif self._state is _CHUNK_END:
                if line:
                    raise FramingError("a chunk is longer than its stated length")
                self._state = _CHUNK_LINE_
            elif line:
                self._trailer_bytes += len(line) + 2
                self._check_length(self._trailer_bytes)
            else:
                self._state = _HEAD
                return pos
        return size

    def _line(self, chunk: bytes, pos: int) -> tuple[bytes | None, int]:
        """Return a line without its end, or None if it is not complete, and the position after it."""
        end = chunk.find(b"\n", pos)
        stop = len(chunk) if end < 0 else end + 1
        self._check_length(len(self._partial) + stop - pos)
        if end < 0 or self._partial:
            self._partial += chunk[pos:stop]
            if end < 0:
                return None, stop
            line = bytes(self._partial)
            self._partial.clear()
        else:
            line = chunk[pos:stop]
        if not line.endswith(b"\r\n") or line.count(b"\r") != 1:
            raise FramingError("a line of a chunked body does not end in CR LF")
        return line[:-2], stop

    def _check_length(self, n_bytes: int) -> None:
        if n_bytes > self._max_head_bytes:
            raise FramingError(f"a head is longer than {self._max_head_bytes} bytes")
