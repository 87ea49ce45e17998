"""The receiving end of the hand-off. It always reads, so that data never backs up into a relay worker."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from typing import cast

from quantdrift.core.config.schema import KIB, MIB, Sidecar
from quantdrift.sidecar.handoff.frame import (
    HEAD_BYTES,
    MAX_HEADER_BYTES,
    RawMeta,
    introduced,
    lengths,
    parse,
)

_LOG = logging.getLogger(__name__)

_BUFFER_BYTES = MIB
_LONG_BYTES = 64 * KIB
_META_BYTES = 4096
_QUIET_S = 0.25

Handle = Callable[[RawMeta, memoryview, memoryview], None]


class FrameReceiver:
    """Reads the frames of any number of relay workers and calls `handle` with each.

    Parameters
    ----------
    sidecar
        Its limits bound the length of a frame.
    handle
        Called on the loop with meta, request and response. It must copy what it keeps. A ValueError from it
        means that the frames are out of step.
    arrived
        Called before `handle` with the sender's slot in the shared counters and the row of the frame, for each
        frame of a sender that introduced itself. It may raise a ValueError, as above.
    """

    def __init__(
        self, sidecar: Sidecar, handle: Handle, arrived: Callable[[int, int], None] = lambda _slot, _row: None
    ) -> None:
        self._limit = 0
        self.reconfigure(sidecar)
        self._handle = handle
        self._arrived = arrived
        self._server: asyncio.Server | None = None
        self._readers: set[_Reader] = set()
        self._n_frames = 0

    def reconfigure(self, sidecar: Sidecar) -> None:
        """Apply other limits.

        A lower limit is not enforced here, since senders still have longer exchanges.
        """
        limit = sidecar.max_exchange_bytes + 2 * MAX_HEADER_BYTES + _META_BYTES
        self._limit = max(self._limit, limit)

    async def start(self, listener: socket.socket) -> None:
        """Accept connections on `listener`, which is listening already."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._accept, sock=listener)

    async def finish(self, timeout_s: float) -> None:
        """Stop accepting, read what has been sent, and close once no more arrives, or after `timeout_s`."""
        if self._server is not None:
            self._server.close()
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        n_before = -1
        while self._readers and n_before != self._n_frames and loop.time() < until:
            n_before = self._n_frames
            ended = [reader.ended.wait() for reader in self._readers]
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.gather(*ended), _QUIET_S)
        for reader in list(self._readers):
            reader.close()

    def _accept(self) -> asyncio.BufferedProtocol:
        reader = _Reader(self._size, self._handle_frame, self._readers.discard)
        self._readers.add(reader)
        return reader

    def _size(self, head: memoryview) -> tuple[int, int]:
        n_rest, n_meta = lengths(head)
        if not 0 <= n_meta <= min(n_rest, _META_BYTES) or n_rest > self._limit:
            raise ValueError(f"a frame of {n_rest} bytes with {n_meta} of meta")
        return n_rest, n_meta

    def _handle_frame(self, sender: int | None, n_meta: int, rest: memoryview) -> None:
        meta, request, response = parse(n_meta, rest)
        if sender is not None:
            self._arrived(sender, meta.stratum)
        self._handle(meta, request, response)
        self._n_frames += 1


class _Reader(asyncio.BufferedProtocol):
    """The connection of one relay worker; frames are read in the buffer that the kernel wrote them to.

    Parameters
    ----------
    size
        Called with the first bytes of a frame; returns how many bytes follow, and how many of them are meta.
    take
        Called with the sender's slot (None: it has not introduced itself), the number of bytes of meta, and the
        bytes after the first ones of a frame.
    on_end
        Called when the connection is over.
    """

    def __init__(
        self,
        size: Callable[[memoryview], tuple[int, int]],
        take: Callable[[int | None, int, memoryview], None],
        on_end: Callable[["_Reader"], None],
    ) -> None:
        self._size = size
        self._take = take
        self._on_end = on_end
        self._sender: int | None = None
        self._transport: asyncio.Transport | None = None
        self._usual = memoryview(bytearray(_BUFFER_BYTES))
        self._buffer = self._usual
        self._start = self._stop = 0  # of the unread part of the buffer
        self._end = _BUFFER_BYTES  # where the next read must stop
        self.ended = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer[self._stop : self._end]

    def buffer_updated(self, nbytes: int) -> None:
        self._stop += nbytes
        try:
            self._fit_next_frame(self._handle_frames())
        except ValueError:
            _LOG.exception("a relay worker's frames are out of step: closing its connection")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        # The relay worker ended, perhaps in the middle of a frame; the supervisor starts another one.
        self._on_end(self)
        self.ended.set()

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.abort()

    def _handle_frames(self) -> int:
        """Handle the complete frames; return the length of the next one, as far as it is known."""
        while self._stop - self._start >= HEAD_BYTES:
            begin = self._start + HEAD_BYTES
            n_rest, n_meta = self._size(self._buffer[self._start : begin])
            if self._stop < begin + n_rest:
                return HEAD_BYTES + n_rest
            self._start = begin + n_rest
            rest = self._buffer[begin : self._start]
            if n_meta:
                self._take(self._sender, n_meta, rest)
            else:
                self._sender = introduced(rest)
        return HEAD_BYTES

    def _fit_next_frame(self, n_frame: int) -> None:
        """Make the next frame fit.

        A long one is read exactly to its end, so that no bytes after it need to be moved.
        """
        n_unread = self._stop - self._start
        if self._start + n_frame > len(self._buffer) or not n_unread:
            unread = bytes(self._buffer[self._start : self._stop])
            self._buffer = self._usual if n_frame <= _BUFFER_BYTES else memoryview(bytearray(n_frame))
            self._buffer[:n_unread] = unread
            self._start, self._stop = 0, n_unread
        self._end = self._start + n_frame if n_frame > _LONG_BYTES else len(self._buffer)
