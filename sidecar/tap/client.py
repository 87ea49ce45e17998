"""The client thread of a tap.

It connects to the intake, sends exchanges and counts, and receives the rates.
"""

import contextlib
import logging
import math
import queue
import select
import socket
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence

import msgspec

from quantdrift.core.process.backoff import Backoff
from quantdrift.core.records import Loss
from quantdrift.sidecar.tap.wire import LENGTH_BYTES, Counts, MessageKind, Rates, exchange_head, message

_TICK_S = 0.5
_POLL_S = 0.05
_MIN_RETRY_S = 0.1
_MAX_RETRY_S = 5.0
_STALL_S = 5.0  # a sidecar that accepts nothing for so long is considered down
_MAX_MESSAGE_BYTES = 1 << 20
_WARN_S = 5.0
_SEND_BUFFERS = 64
_RATES = msgspec.msgpack.Decoder(Rates)
_NUMBER = msgspec.msgpack.Decoder(int)
_LOG = logging.getLogger(__name__)

Buffers = Sequence[bytes | memoryview]


class Totals(msgspec.Struct, kw_only=True):
    """Totals over threads: calls by stratum, losses by stratum and reason, early calls, and errors."""

    number: int = 0
    offered: Counter[str] = msgspec.field(default_factory=Counter)
    lost: Counter[tuple[str, Loss]] = msgspec.field(default_factory=Counter)
    early: int = 0
    errors: int = 0

    def add(self, other: "Totals") -> None:
        """Add other totals."""
        self.offered.update(other.offered)
        self.lost.update(other.lost)
        self.early += other.early
        self.errors += other.errors


class ThreadCounts:
    """The counts of one thread. Only that thread writes them, so no lock is needed."""

    __slots__ = ("early", "errors", "lost", "offered")

    def __init__(self) -> None:
        self.offered: defaultdict[str, int] = defaultdict(int)
        self.lost: defaultdict[tuple[str, Loss], int] = defaultdict(int)
        self.early = 0
        self.errors = 0

    def totals(self) -> Totals:
        """Return the counts so far."""
        # Each copy is one step of the interpreter, since the thread may count at the same time.
        return Totals(
            offered=Counter(self.offered.copy()),
            lost=Counter(self.lost.copy()),
            early=self.early,
            errors=self.errors,
        )


class _ThreadExit:
    """An object in thread-local storage.

    When the thread ends it is deleted, and reports that the counts are final.
    """

    __slots__ = ("_counts", "_end")

    def __init__(self, counts: ThreadCounts, end: Callable[[ThreadCounts], None]) -> None:
        self._counts = counts
        self._end = end

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be ending
            self._end(self._counts)


class TapClient:
    """The connection of one process to the intake; a forked child makes its own.

    Parameters
    ----------
    path
        Unix socket of the intake; empty: nothing is sent.
    limit_bytes
        Most bytes in the queue.
    on_rates
        Called on the client's thread with the rates in effect, and the number of the connection that sent
        them.

    Attributes
    ----------
    local : threading.local
        `counts` of it are the calling thread's counts, once `thread_counts` was called.
    is_dropped : bool
        To be set by an owner that drops it without closing it: the thread sends the queue and ends.
    """

    def __init__(self, path: str, limit_bytes: int, on_rates: Callable[[Rates, int], None]) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self._on_rates = on_rates
        self.local = threading.local()
        self._counts: set[ThreadCounts] = set()
        # The counts of threads that have ended.
        self._finished: queue.SimpleQueue[ThreadCounts] = queue.SimpleQueue()
        self._ended = Totals()
        self._acknowledged = Totals()
        self._sent_counts: tuple[int, Totals] | None = None  # sent and not acknowledged
        self._queue: deque[tuple[int, str, int, Buffers]] = deque()
        self._lock = threading.RLock()  # a signal handler or a finalizer may record during a call
        self._queued_bytes = 0
        self._socket: socket.socket | None = None
        self._connection_id = 0  # number of the present connection
        self._has_rates = False  # the present connection has sent rates; those of an earlier one are void
        self._received = bytearray()
        self._closing = threading.Event()
        # Not an Event, since a finalizer may set it during a call of the Event itself.
        self.is_dropped = False
        self._thread: threading.Thread | None = None

    def thread_counts(self) -> ThreadCounts:
        """Return the calling thread's counts, creating them if needed.

        They are `local.counts` from then on.
        """
        counts: ThreadCounts | None = getattr(self.local, "counts", None)
        if counts is None:
            counts = self.local.counts = ThreadCounts()
            self.local.exit_hook = _ThreadExit(counts, self._finished.put)
            with self._lock:
                self._collect_ended()  # here, since the client's thread may be waiting for a sidecar or have ended
                self._counts.add(counts)
        return counts

    def start(self) -> None:
        """Start the thread, unless it runs, is closed or has no path."""
        with self._lock:
            if self._thread is not None or not self._path or self._closing.is_set():
                return
            self._thread = threading.Thread(target=self._run, name="quantdrift-tap", daemon=True)
        self._thread.start()

    def refusal(self) -> Loss | None:
        """Return why nothing can be sent now, or None."""
        if not self._has_rates:
            return Loss.CAPTURE_DOWN
        return Loss.CAPTURE_BEHIND if self._queued_bytes >= self._limit_bytes else None

    def send(self, stratum: str, buffers: Buffers, connection_id: int) -> None:
        """Queue an exchange, or count it as lost.

        Parameters
        ----------
        stratum
            Name of its header stratum.
        buffers
            Its frame; not copied.
        connection_id
            Connection whose rates were used for the draw; on another one its row may belong to another
            stratum.
        """
        n_bytes = sum(map(len, buffers))
        with self._lock:
            is_behind = self._queued_bytes + n_bytes > self._limit_bytes
            if not is_behind:
                self._queued_bytes += n_bytes
        if is_behind:
            self.lose(stratum, Loss.CAPTURE_BEHIND)
        else:
            # The thread polls the queue: waking it would cost the caller as much as a copy of the tensors.
            self._queue.append((connection_id, stratum, n_bytes, buffers))

    def lose(self, stratum: str, loss: Loss) -> None:
        """Count a sampled call that is lost."""
        self.thread_counts().lost[stratum, loss] += 1

    def close(self, timeout_s: float) -> None:
        """Send the queue and the last counts, for at most `timeout_s`, and end the thread."""
        self._closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    @property
    def is_ending(self) -> bool:
        """Whether it was closed or dropped."""
        return self.is_dropped or self._closing.is_set()

    def close_after_fork(self) -> None:
        """Close the connection in a forked child; it belongs to the parent process."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()

    def _run(self) -> None:
        backoff = Backoff(_MIN_RETRY_S, _MAX_RETRY_S)
        silent_s = time.monotonic()
        while not self.is_ending:
            began_s = time.monotonic()
            try:
                self._connect()
                silent_s = 0.0
                self._serve()
            except Exception as error:  # noqa: BLE001 - the sidecar is down or sends invalid messages: try again
                silent_s = self._noted(error, silent_s or time.monotonic())
                self._disconnect()
                if time.monotonic() - began_s > _MAX_RETRY_S:
                    backoff.reset()
                self._closing.wait(backoff.next_s())
        self._disconnect()

    def _noted(self, error: Exception, silent_s: float) -> float:
        """Warn once where no sidecar has answered for some seconds; return since when none has, or infinity once that is said."""
        if time.monotonic() - silent_s < _WARN_S:
            return silent_s
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        _LOG.warning(
            "no sidecar answers at the tap's socket %s (%s): nothing is recorded until one does; see intake.tap",
            self._path,
            why,
        )
        return math.inf

    def _connect(self) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(_STALL_S)
            connection.connect(self._path)
        except OSError:
            connection.close()
            raise
        self._received.clear()
        self._socket = connection
        self._connection_id += 1
        until_s = time.monotonic() + _STALL_S
        while not self._has_rates:
            if self.is_ending or time.monotonic() > until_s:
                raise ConnectionError("the intake has sent no rates")
            self._receive(_POLL_S)

    def _disconnect(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(Exception):
                # An acknowledgement may be unread; without it the counts would be sent twice.
                self._receive(0.0)
            connection, self._socket = self._socket, None
            connection.close()
        self._has_rates = False
        self._sent_counts = None
        while self._queue:
            _, stratum, n_bytes, _ = self._queue.popleft()
            self._sent(n_bytes)
            self.lose(stratum, Loss.CAPTURE_DOWN)

    def _serve(self) -> None:
        """Send until the client is ending, or raise if the connection is lost."""
        next_s = time.monotonic()
        while True:
            is_closing = self.is_ending  # read before the queue is emptied for the last time
            for _ in range(len(self._queue)):
                connection_id, stratum, n_bytes, buffers = self._queue.popleft()
                try:
                    if connection_id == self._connection_id:
                        self._write([exchange_head(n_bytes), *buffers])
                    else:
                        self.lose(stratum, Loss.CAPTURE_DOWN)
                except OSError:
                    self.lose(stratum, Loss.CAPTURE_DOWN)
                    raise
                finally:
                    self._sent(n_bytes)
            if is_closing:
                for _ in range(
                    2
                ):  # earlier counts may still be unacknowledged, and the last ones follow them
                    self._send_counts()
                    if self._sent_counts is not None:
                        self._receive(_TICK_S)
                return
            if time.monotonic() >= next_s:
                next_s = time.monotonic() + _TICK_S
                self._receive(0.0)
                self._send_counts()
            if not self._queue:
                self._closing.wait(_POLL_S)

    def _sent(self, n_bytes: int) -> None:
        with self._lock:
            self._queued_bytes -= n_bytes

    def _write(self, buffers: list[bytes | memoryview]) -> None:
        assert self._socket is not None
        unsent = list(buffers)
        while unsent:
            n_bytes = self._socket.sendmsg(unsent[:_SEND_BUFFERS])
            while unsent and n_bytes >= len(unsent[0]):
                n_bytes -= len(unsent.pop(0))
            if n_bytes:
                unsent[0] = memoryview(unsent[0])[n_bytes:]

    def _send_counts(self) -> None:
        """Send the counts since the last acknowledgement, unless sent counts are unacknowledged."""
        if self._sent_counts is not None:
            return
        totals = self._totals()
        offered = totals.offered - self._acknowledged.offered
        lost: defaultdict[str, dict[Loss, int]] = defaultdict(dict)
        for (stratum, loss), n in (totals.lost - self._acknowledged.lost).items():
            lost[stratum][loss] = n
        counts = Counts(
            number=totals.number,
            offered=dict(offered),
            lost=dict(lost),
            errors=totals.errors - self._acknowledged.errors,
            early=totals.early - self._acknowledged.early,
        )
        if not (offered or lost or counts.errors or counts.early):
            return
        self._write([message(MessageKind.COUNTS, counts)])
        self._sent_counts = (counts.number, totals)

    def _totals(self) -> "Totals":
        totals = Totals(number=self._acknowledged.number + 1)
        with self._lock:
            self._collect_ended()
            totals.add(self._ended)
            active = list(self._counts)  # a thread that ends from here on is in this list, and not in the sum
        for counts in active:
            totals.add(counts.totals())
        return totals

    def _collect_ended(self) -> None:
        """Add the counts of ended threads to the totals; the lock is held."""
        while True:
            try:
                counts = self._finished.get_nowait()
            except queue.Empty:
                return
            self._counts.discard(counts)
            self._ended.add(counts.totals())

    def _receive(self, wait_s: float) -> None:
        """Handle the messages of the intake that have arrived."""
        assert self._socket is not None
        poller = select.poll()  # `select` fails for files above 1023, and a server may have more
        poller.register(self._socket, select.POLLIN)
        while poller.poll(wait_s * 1000):
            data = self._socket.recv(1 << 16)
            if not data:
                raise ConnectionError("the intake has closed")
            self._received += data
            wait_s = 0.0
            while (content := self._next()) is not None:
                self._handle_message(content)

    def _next(self) -> bytes | None:
        if len(self._received) < LENGTH_BYTES:
            return None
        length = int.from_bytes(self._received[:LENGTH_BYTES], "big")
        if not 1 <= length <= _MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {length} bytes")
        end = LENGTH_BYTES + length
        if len(self._received) < end:
            return None
        content = bytes(self._received[LENGTH_BYTES:end])
        del self._received[:end]
        return content

    def _handle_message(self, content: bytes) -> None:
        kind, body = content[0], content[1:]
        if kind == MessageKind.RATES:
            self._on_rates(_RATES.decode(body), self._connection_id)
            self._has_rates = True
        elif (
            kind == MessageKind.ACK
            and self._sent_counts is not None
            and _NUMBER.decode(body) == self._sent_counts[0]
        ):
            self._acknowledged, self._sent_counts = self._sent_counts[1], None
