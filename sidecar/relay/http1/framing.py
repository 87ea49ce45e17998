"""Tells the messages of one direction of an HTTP/1.1 connection apart. Does no I/O and copies no body.

A parser that hands out every header and every body byte costs more than the relay itself. Here a head is found with
one search, what matters in it with one regular expression, and a body's end with integer arithmetic, so that a
large body costs nothing per byte.
"""

import re
from collections.abc import Callable
from enum import IntEnum

from quantdrift.sidecar.relay.observing.heads import CHUNKED, UNTIL_CLOSE, FramingError
from quantdrift.sidecar.relay.observing.memory import MemoryShare, ObserverMemory

TUNNEL = -3  # as a body's length: from here on this is no HTTP/1 any more

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


# Looking a member up costs as much as the comparison it is for.
_HEAD, _COUNTED, _UNTIL_CLOSE, _CHUNK_LINE_, _CHUNK_DATA, _CHUNK_END, _TRAILER, _TUNNEL = _State


class MessageFramer:
    """Follows the messages of one direction.

    Parameters
    ----------
    on_head
        Called with `data, start, stop` of a complete head, its empty line included; returns the length of the body:
        bytes, `CHUNKED`, `UNTIL_CLOSE` or `TUNNEL`.
    on_piece
        Called with `data, start, stop` of a part of a body as it is on the wire, chunked framing included, while
        `keep` is set.
    on_end
        Called when a message is complete.
    max_head_bytes
        Longest head, chunk line and trailer section that is followed.
    parts
        Bounds what all directions hold of what came in parts.

    Attributes
    ----------
    keep : bool
        Whether the parts of the present body are asked for; cleared at the message's end.
    """

    __slots__ = (
        "_backlog",
        "_left",
        "_max_head_bytes",
        "_on_end",
        "_on_head",
        "_on_piece",
        "_partial",
        "_parts",
        "_share",
        "_state",
        "_trailer_bytes",
        "keep",
    )

    def __init__(
        self, on_head: OnHead, on_piece: OnPiece, on_end: OnEnd, max_head_bytes: int, parts: ObserverMemory
    ) -> None:
        self._on_head = on_head
        self._on_piece = on_piece
        self._on_end = on_end
        self._max_head_bytes = max_head_bytes
        self._state = _HEAD
        self._left = 0  # of the body or chunk
        self._partial = bytearray()  # a head or line that came in parts
        self._share: MemoryShare | None = None  # of a direction in which something did
        self._parts = parts
        self._trailer_bytes = 0
        self._backlog: bytearray | None = None  # while it is open what the next bytes are
        self.keep = False

    @property
    def at_rest(self) -> bool:
        """Whether the last message is complete and nothing of another has come."""
        return self._state is _HEAD and not self._partial and not self._backlog

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the direction.

        Raises
        ------
        FramingError
            Framing is lost; the delimiter must not be fed again.
        """
        pos, size = 0, len(chunk)
        if self._state is _HEAD and not self._partial and self._backlog is None:
            pos = self._whole(chunk, size)
        if pos < size:
            self._follow(chunk, pos, size)
            if self._share is not None or self._partial or self._backlog:
                self._account()

    def skip(self, n_bytes: int) -> int:
        """Take note of the next bytes of the direction by their number alone.

        Parameters
        ----------
        n_bytes
            How many there are.

        Returns
        -------
        int
            How many of them, from the first one on, are those of a body that nobody asked for; the others are to be fed.
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
        """Let go of what came in parts: it must not be fed again."""
        self._partial.clear()
        self._backlog = None
        self._account()

    def _account(self) -> None:
        if self._share is None:
            self._share = MemoryShare(self._parts)
        self._share.hold(len(self._partial) + len(self._backlog or b""))

    def _follow(self, chunk: bytes, pos: int, size: int) -> None:
        """Take what comes in any other way than whole."""
        while pos < size:
            if self._backlog is not None:
                self._wait(chunk[pos:])
                return
            state = self._state
            if state is _HEAD:
                pos = self._head(chunk, pos)
                continue
            start = pos
            if state is _COUNTED:
                left = size - pos
                if left < self._left:
                    self._left -= left
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
        """Say that the direction has ended: that completes a body delimited by it."""
        if self._state is _UNTIL_CLOSE:
            self._state = _HEAD
            self._end()

    def pause(self) -> None:
        """Hold what follows the present message back until `resume` or `tunnel`: its meaning is still open."""
        self._backlog = bytearray()

    def resume(self) -> None:
        """Go on with what was held back, if it was."""
        backlog, self._backlog = self._backlog, None
        if backlog:
            self.feed(bytes(backlog))
            self._account()

    def tunnel(self) -> None:
        """Follow no more: another protocol has taken over."""
        self._state = _TUNNEL
        self._backlog = None
        self.keep = False

    def _wait(self, chunk: bytes) -> None:
        assert self._backlog is not None
        self._backlog += chunk
        if len(self._backlog) > self._max_head_bytes:
            raise FramingError("too much follows a request whose answer decides on the protocol")

    def _end(self) -> None:
        self.keep = False
        self._on_end()

    def _whole(self, chunk: bytes, size: int) -> int:
        """Take the head that a chunk begins with, and its body where nothing else follows; return how far.

        Most messages come like this: for the others there is the long way.
        """
        stop = chunk.find(b"\r\n\r\n") + 4
        if not 4 < stop <= self._max_head_bytes:
            return 0
        try:
            body = self._on_head(chunk, 0, stop)
        except FramingError:
            if chunk.startswith(_EMPTY_LINE):  # the long way passes over it
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
        """Take bytes of a head; return how far."""
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
                self._bound(len(partial))
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
                self._bound(rest)
                if not chunk[pos : pos + 1].isalpha() and chunk[pos:] != b"\r":
                    raise FramingError("no message begins like this")
                partial += chunk[pos:]
                return len(chunk)
            data, start, stop = chunk, pos, end + 4
            pos = stop
        self._bound(stop - start)
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
        """Walk a chunked body; return where it ends, or the end of `chunk`."""
        size = len(chunk)
        while pos < size:
            if self._state is _CHUNK_DATA:
                left = size - pos
                if left < self._left:
                    self._left -= left
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
                    raise FramingError("a chunk is longer than it says")
                self._state = _CHUNK_LINE_
            elif line:
                self._trailer_bytes += len(line) + 2
                self._bound(self._trailer_bytes)
            else:
                self._state = _HEAD
                return pos
        return size

    def _line(self, chunk: bytes, pos: int) -> tuple[bytes | None, int]:
        """Return a line without its end and where the next begins, or None where it is not complete."""
        end = chunk.find(b"\n", pos)
        stop = len(chunk) if end < 0 else end + 1
        self._bound(len(self._partial) + stop - pos)
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

    def _bound(self, n_bytes: int) -> None:
        if n_bytes > self._max_head_bytes:
            raise FramingError(f"a head is longer than {self._max_head_bytes} bytes")
