"""One end of a relay's connection, on a transport of the loop."""

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from sidecar.relay.waiting import READ_BYTES

if TYPE_CHECKING:
    from sidecar.relay.connection import Connection

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


def ignore(_: bytes) -> None:
    """Do nothing with received bytes."""


class Side(asyncio.Protocol):
    """One end of a connection: what it reads, the other writes.

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
        "is_full",
        "is_lost",
        "n_bytes",
        "observe",
        "transport",
    )

    def __init__(self, connection: "Connection") -> None:
        self.connection = connection
        self.transport: asyncio.Transport | None = None
        self.forward: Callable[[bytes], None] = connection.wait
        self.observe: Callable[[bytes], None] = ignore
        self.n_bytes = 0
        self.has_ended = False  # it sends no more
        self.is_full = False
        self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take note that it is connected."""
        self.transport = cast("asyncio.Transport", transport)
        self.connection.made(self)
        self.connection.waiting.settle(self)

    def data_received(self, data: bytes) -> None:
        """Forward, then observe."""
        self.forward(data)
        self.n_bytes += len(data)
        try:
            self.observe(data)
        except Exception:  # noqa: BLE001 - an observer on the serving path
            self.connection.let_go()

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
        if exc is not None and self is self.connection.backend:
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

    def read_by(self, reader: asyncio.BaseProtocol) -> None:
        """Have another protocol read from it: this one, or one that passes everything on to it."""
        if self.transport is None or self.transport.is_closing():
            return
        is_reading = self.transport.is_reading()
        if is_reading:
            self.transport.pause_reading()
        self.transport.set_protocol(reader)
        if is_reading:
            self.transport.resume_reading()

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
