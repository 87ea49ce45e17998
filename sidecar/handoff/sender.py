"""The sending end of the hand-off: it never waits, never raises, and counts the exchanges that it drops."""

import asyncio
import contextlib
import itertools
import logging
import socket
from collections import deque
from collections.abc import Sequence

from quantdrift.core.process.backoff import Backoff
from quantdrift.core.records import Loss
from quantdrift.sidecar.handoff.frame import PIECE_BYTES, introduction
from quantdrift.sidecar.state.counters import Count, Gauge, Slot

_LOG = logging.getLogger(__name__)

_MIN_RETRY_S = 0.05
_MAX_RETRY_S = 2.0
_SEND_BUFFERS = 64  # in one call, far below the system's limit
_SOCKET_BUFFER_BYTES = 1 << 20  # asked for; the system may give less


class FrameSender:
    """Sends frames to the capture process.

    The frames of one turn of the loop are written together at its end, without waiting. What does not fit
    into the socket's buffer is queued here, up to a limit, until the socket is writable again.

    Parameters
    ----------
    path
        Unix socket of the capture process.
    limit_bytes
        Most bytes in the queue; may be changed later.
    slot
        Counters of this process.
    loop
        The loop on which every method is called.
    number
        Number of the slot, with which it introduces itself. None: it does not, and frames that are in the socket when
        the capture process ends are counted nowhere.
    n_rows
        Rows of the table of counts in use; may be changed later.
    """

    def __init__(
        self,
        path: str,
        limit_bytes: int,
        slot: Slot,
        loop: asyncio.AbstractEventLoop,
        *,
        number: int | None = None,
        n_rows: int = 0,
    ) -> None:
        self._path = path
        self.limit_bytes = limit_bytes
        self.n_rows = n_rows
        self._number = number
        self._slot = slot
        self._loop = loop
        self._socket: socket.socket | None = None
        self._is_closed = False
        self._is_writing = False  # the loop calls `_write` when the socket is writable
        self._is_write_scheduled = False  # it writes at the end of this turn
        self._drained: asyncio.Event | None = None
        self._backoff = Backoff(_MIN_RETRY_S, _MAX_RETRY_S)
        self._buffers: deque[bytes | memoryview] = deque()
        self._frames: deque[tuple[int, int]] = deque()  # stratum, and the end of the frame in the byte stream
        self._n_queued = 0  # bytes queued since the start
        self._n_sent = 0

    def connect(self) -> None:
        """Connect, or try again later. After a lost connection it is called automatically."""
        if self._is_closed:
            return
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
            connection.connect(self._path)
            if self._number is not None:
                connection.send(introduction(self._number))
        except OSError as error:
            connection.close()
            _LOG.debug("cannot connect to the capture process at %s: %s", self._path, error)
            self._loop.call_later(self._backoff.next_s(), self.connect)
            return
        self._socket = connection
        self._backoff.reset()
        self._loop.add_reader(connection.fileno(), self._detect_close)

    def send(self, stratum: int, buffers: Sequence[bytes | memoryview]) -> None:
        """Queue a frame, or count it as lost.

        Parameters
        ----------
        stratum
            Its row in the table of counts.
        buffers
            The bytes of the frame; they are not copied.
        """
        if self._socket is None:
            self._slot.lose(stratum, Loss.CAPTURE_DOWN)
            return
        n_bytes = sum(map(len, buffers))
        if self._n_queued - self._n_sent + n_bytes > self.limit_bytes:
            self._slot.lose(stratum, Loss.CAPTURE_BEHIND)
            return
        if len(buffers) * PIECE_BYTES > n_bytes:
            buffers = [b"".join(buffers)]  # many small buffers would use far more memory than is counted
        self._buffers.extend(buffers)
        self._n_queued += n_bytes
        self._frames.append((stratum, self._n_queued))
        if not self._is_writing and not self._is_write_scheduled:
            self._is_write_scheduled = True
            self._loop.call_soon(self._write_scheduled)

    async def finish(self, timeout_s: float) -> None:
        """Send what is queued, for at most `timeout_s`, count the rest as lost, and close."""
        self._is_closed = True
        if self._frames:
            self._drained = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._drained.wait()
        self._disconnect(Loss.CAPTURE_BEHIND)

    def _write_scheduled(self) -> None:
        self._is_write_scheduled = False
        if self._buffers and not self._is_writing:
            self._write()

    def _write(self) -> None:
        assert self._socket is not None
        try:
            n_bytes = self._socket.sendmsg(list(itertools.islice(self._buffers, _SEND_BUFFERS)))
        except (BlockingIOError, InterruptedError):
            n_bytes = 0
        except OSError as error:
            _LOG.info("the connection to the capture process is lost: %s", error)
            self._connect_again()
            return
        self._count_sent(n_bytes)
        if self._is_writing != bool(self._buffers):
            self._is_writing = not self._is_writing
            if self._is_writing:
                self._loop.add_writer(self._socket.fileno(), self._write)
            else:
                self._loop.remove_writer(self._socket.fileno())
        self._slot.set(Gauge.QUEUE_BYTES, self._n_queued - self._n_sent)

    def _count_sent(self, n_bytes: int) -> None:
        self._n_sent += n_bytes
        while self._frames and self._frames[0][1] <= self._n_sent:
            stratum, _ = self._frames.popleft()
            self._slot.add(stratum, Count.HANDED)
        if self._drained is not None and not self._frames:
            self._drained.set()
        while n_bytes:
            first = self._buffers[0]
            if len(first) > n_bytes:
                self._buffers[0] = memoryview(first)[n_bytes:]
                return
            n_bytes -= len(first)
            self._buffers.popleft()

    def _detect_close(self) -> None:
        """Reconnect if the other end has closed; it never sends data."""
        assert self._socket is not None
        try:
            received = self._socket.recv(64)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            received = b""
        if not received:
            self._connect_again()

    def _connect_again(self) -> None:
        """Count what the ended capture process has not received, and connect to the next one.

        Its end of the socket is closed, so what was in the socket is gone, and the count of what it received is final.
        """
        self._disconnect(Loss.CAPTURE_DOWN)
        if self._number is not None:
            self._slot.lose_unreceived(self.n_rows)
        self.connect()

    def _disconnect(self, loss: Loss) -> None:
        if self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
            self._socket = None
        for stratum, _ in self._frames:
            self._slot.lose(stratum, loss)
        self._frames.clear()
        self._buffers.clear()
        if self._drained is not None:
            self._drained.set()
        self._is_writing = False
        self._n_sent = self._n_queued
        self._slot.set(Gauge.QUEUE_BYTES, 0)
