"""One end of a relay's connection, on a transport of the loop."""

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from quantdrift.sidecar.relay.backpressure import LONG_BYTES, READ_BYTES, ROOM

if TYPE_CHECKING:
    from quantdrift.sidecar.relay.connection import Connection

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_GLANCE_BYTES = 4096  # of a long read: what begins in it mostly says how long it is
_SHORT_BYTES = 4 * _GLANCE_BYTES  # it costs less to copy these than to ask


def ignore(_: bytes) -> None:
    """Do nothing with received bytes."""


def skip(n_bytes: int) -> int:
    """Look at none of the next bytes."""
    return n_bytes


class ConnectionEnd(asyncio.Protocol):
    """One end of a connection: what it reads, the other writes.

    An end that has brought a long read reads into a room that all share (`waiting.Reader`). From there a long read goes
    straight to the other end's socket where nothing waits for it; only what it does not take, and what an observer needs
    to see, is copied. Short reads cost less without.

    Parameters
    ----------
    connection
        Whose end it is.

    Attributes
    ----------
    transport : asyncio.Transport or None
        None until it is connected.
    forward, observe : callable
        What is done with received bytes: first this, then that.
    skip : callable
        Told how many bytes come next, returns how many of them `observe` need not see.
    n_bytes : int
        Received so far.
    has_ended : bool
        Whether it sends no more.
    is_full : bool
        Whether more waits for it than may: the other end is not read.
    is_lost : bool
        Whether it is gone.
    """

    __slots__ = (
        "connection",
        "forward",
        "has_ended",
        "has_reader",
        "is_full",
        "is_lost",
        "n_bytes",
        "observe",
        "skip",
        "target",
        "target_fd",
        "transport",
    )

    def __init__(self, connection: "Connection") -> None:
        self.connection = connection
        self.transport: asyncio.Transport | None = None
        self.target: asyncio.Transport | None = None
        self.target_fd = -1
        self.forward: Callable[[bytes], None] = connection.wait
        self.observe: Callable[[bytes], None] = ignore
        self.skip: Callable[[int], int] = skip
        self.n_bytes = 0
        self.has_ended = False  # it sends no more
        self.has_reader = False
        self.is_full = False
        self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take note that it is connected."""
        self.transport = cast("asyncio.Transport", transport)
        self.connection.made(self)
        self.connection.waiting.settle(self)

    def updated(self, nbytes: int) -> None:
        """Forward so many bytes that lie in the room, then observe."""
        if nbytes <= _SHORT_BYTES:
            self.data_received(bytes(ROOM[:nbytes]))
            return
        data, n_sent = ROOM[:nbytes], 0
        target = self.target
        if target is not None and not target.get_write_buffer_size() and not target.is_closing():
            try:  # noqa: SIM105 - what it would call costs more than all else here
                n_sent = os.write(self.target_fd, data)
            except OSError:
                pass  # its transport meets the same, and waits or ends
        if n_sent < nbytes:
            self.forward(bytes(data[n_sent:]))
        self.n_bytes += nbytes
        self._show(data, nbytes)

    def data_received(self, data: bytes) -> None:
        """Forward, then observe."""
        self.forward(data)
        n_bytes = len(data)
        self.n_bytes += n_bytes
        self._show(data, n_bytes)
        if n_bytes >= LONG_BYTES and not self.has_reader:
            self.connection.waiting.widen(self)

    def read_by(self, reader: asyncio.BaseProtocol) -> None:
        """Have another protocol read from it: this one, or one that passes everything on to it."""
        if self.transport is None or self.transport.is_closing():
            return
        self.has_reader = reader is not self
        is_reading = self.transport.is_reading()
        if is_reading:
            self.transport.pause_reading()
        self.transport.set_protocol(reader)
        if is_reading:
            self.transport.resume_reading()

    def send_to(self, target: asyncio.Transport) -> None:
        """Forward to another end's transport from now on."""
        self.forward = target.write
        end = target.get_extra_info("socket")
        if end is not None:
            self.target, self.target_fd = target, end.fileno()

    def send_nowhere(self) -> None:
        """Forward no more."""
        self.forward, self.target = ignore, None

    def eof_received(self) -> bool:
        """Take note that it sends no more."""
        self.connection.ended(self)
        return True  # the other direction goes on

    def pause_writing(self) -> None:
        """Let the other end send no more: this one does not read."""
        self.fill()
        self.connection.other(self).pause()

    def resume_writing(self) -> None:
        """Let the other end go on."""
        self.empty()
        self.connection.other(self).resume()

    def connection_lost(self, exc: Exception | None) -> None:
        """Take note that it is gone."""
        if exc is not None and self is self.connection.backend and not self.connection.client.is_lost:
            self.read_rest()
        self.is_lost = True
        self.empty()
        self.connection.lost(self, exc)

    def fill(self) -> None:
        """Take note that more waits for it than may."""
        if not self.is_full and not self.is_lost:
            self.is_full = True
            self.connection.waiting.filled()

    def empty(self) -> None:
        """Take note that it has taken enough, or is gone."""
        if self.is_full:
            self.is_full = False
            self.connection.waiting.emptied()

    def limit(self, high_bytes: int) -> None:
        """Let so much wait for it before the other end is read no more."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.set_write_buffer_limits(high=high_bytes)

    @property
    def waiting_bytes(self) -> int:
        """What it has not taken yet."""
        return 0 if self.transport is None else self.transport.get_write_buffer_size()

    def pause(self) -> None:
        """Read no more from it."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()

    def resume(self) -> None:
        """Read from it again."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    def read_rest(self) -> None:
        """Take what has arrived: a failed write ends the transport, and an early answer (413, say) may lie unread."""
        if self.transport is None:
            return
        end = self.transport.get_extra_info("socket")
        with contextlib.suppress(OSError):  # there is nothing more, or it was reset
            while data := os.read(end.fileno(), READ_BYTES):
                self.data_received(data)

    def end(self) -> None:
        """Send what waits, then say that no more comes."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write_eof()

    def close(self, *, reset: bool = False) -> None:
        """Send what waits, then close; `reset` tells the peer that it was no orderly end."""
        if self.transport is None:
            return
        if reset and not self.is_lost:
            end = self.transport.get_extra_info("socket")
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.transport.close()

    def abort(self) -> None:
        """Close without sending what waits."""
        if self.transport is not None:
            self.transport.abort()

    def _show(self, data: bytes | memoryview, n_bytes: int) -> None:
        """Let the observer see what it needs to, in as many parts as is cheapest: it counts on none."""
        try:
            if n_bytes > _SHORT_BYTES:
                start = self.skip(n_bytes)
                if n_bytes - start > _SHORT_BYTES:
                    stop = start + _GLANCE_BYTES
                    self.observe(bytes(data[start:stop]))
                    start = stop + self.skip(n_bytes - stop)
                if start == n_bytes:
                    return
                data = data[start:]
            self.observe(bytes(data))
        except Exception:  # noqa: BLE001 - an observer on the serving path
            self.connection.let_go()

    # What of it calls an observer, and catches whatever that raises.
    showing = _show.__code__
