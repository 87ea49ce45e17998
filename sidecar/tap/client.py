"""The tap's own thread: connects, sends, hears which rates hold, and adds the counts of all threads up."""

import contextlib
import queue
import select
import socket
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence

import msgspec

from quantdrift.core.records import Loss
from quantdrift.sidecar.tap.wire import LENGTH_BYTES, Counts, Kind, Rates, exchange_head, message

_TICK_S = 0.5
_LOOK_S = 0.05
_FIRST_PAUSE_S = 0.1
_LAST_PAUSE_S = 5.0
_STALL_S = 5.0  # a sidecar that takes nothing for so long is as good as gone
_MOST_HEARD_BYTES = 1 << 20
_SEND_BUFFERS = 64
_RATES = msgspec.msgpack.Decoder(Rates)
_NUMBER = msgspec.msgpack.Decoder(int)

Buffers = Sequence[bytes | memoryview]


class Totals(msgspec.Struct, kw_only=True):
    """Counts, added up: calls by stratum, losses by stratum and reason, calls without rates, and faults."""

    number: int = 0
    offered: Counter[str] = msgspec.field(default_factory=Counter)
    lost: Counter[tuple[str, Loss]] = msgspec.field(default_factory=Counter)
    early: int = 0
    errors: int = 0

    def add(self, other: "Totals") -> None:
        """Add another's."""
        self.offered.update(other.offered)
        self.lost.update(other.lost)
        self.early += other.early
        self.errors += other.errors


class ThreadCounts:
    """What one thread has counted: no other one writes here, so that no lock is needed."""

    __slots__ = ("early", "errors", "lost", "offered")

    def __init__(self) -> None:
        self.offered: defaultdict[str, int] = defaultdict(int)
        self.lost: defaultdict[tuple[str, Loss], int] = defaultdict(int)
        self.early = 0
        self.errors = 0

    def totals(self) -> Totals:
        """Return the counts so far."""
        # Copies are made in one step of the interpreter: the thread may go on counting meanwhile.
        return Totals(
            offered=Counter(self.offered.copy()),
            lost=Counter(self.lost.copy()),
            early=self.early,
            errors=self.errors,
        )


class _Lease:
    """Lies in a thread's own storage and goes away with it, which tells that its counts are final."""

    __slots__ = ("_cells", "_end")

    def __init__(self, cells: ThreadCounts, end: Callable[[ThreadCounts], None]) -> None:
        self._cells = cells
        self._end = end

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be ending
            self._end(self._cells)


class TapClient:
    """Sends for one process; a child of it makes another.

    Parameters
    ----------
    path
        Unix socket of the intake; empty: nothing is ever sent.
    limit_bytes
        Most that waits.
    heard
        Called on the sender's thread with the rates that hold, and the number of the connection that told them.

    Attributes
    ----------
    local : threading.local
        `cells` of it are the calling thread's counts, once it is enrolled.
    is_released : bool
        Set by who lets go of it without closing it: the thread ends by itself, with what waits sent.
    """

    def __init__(self, path: str, limit_bytes: int, heard: Callable[[Rates, int], None]) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self._heard = heard
        self.local = threading.local()
        self._cells: set[ThreadCounts] = set()
        self._final: queue.SimpleQueue[ThreadCounts] = (
            queue.SimpleQueue()
        )  # of them, those of threads that have ended
        self._ended = Totals()
        self._acknowledged = Totals()
        self._told: tuple[int, Totals] | None = None  # under way
        self._waiting: deque[tuple[int, str, int, Buffers]] = deque()
        self._lock = threading.RLock()  # a signal's handler, or a finalizer, may record within a call
        self._waiting_bytes = 0
        self._socket: socket.socket | None = None
        self._link = 0  # number of the connection
        self._is_told = False  # it has said which rates hold: what another one said is void
        self._heard_bytes = bytearray()
        self._closing = threading.Event()
        self.is_released = False  # no event: a finalizer sets it, perhaps within a call of the event's own
        self._thread: threading.Thread | None = None

    def enrol(self) -> ThreadCounts:
        """Return the calling thread's counts, new ones if it has none: `local.cells` from then on."""
        cells: ThreadCounts | None = getattr(self.local, "cells", None)
        if cells is None:
            cells = self.local.cells = ThreadCounts()
            self.local.lease = _Lease(cells, self._final.put)
            with self._lock:
                self._fold()  # here, since the sender's own thread may be waiting for a sidecar, or have ended
                self._cells.add(cells)
        return cells

    def start(self) -> None:
        """Start the thread, if it is to run and does not."""
        with self._lock:
            if self._thread is not None or not self._path or self._closing.is_set():
                return
            self._thread = threading.Thread(target=self._run, name="quantdrift-tap", daemon=True)
        self._thread.start()

    def refusal(self) -> Loss | None:
        """Return why nothing can be sent now, or None."""
        if not self._is_told:
            return Loss.CAPTURE_DOWN
        return Loss.CAPTURE_BEHIND if self._waiting_bytes >= self._limit_bytes else None

    def send(self, stratum: str, buffers: Buffers, link: int) -> None:
        """Have an exchange sent, or count it as lost.

        Parameters
        ----------
        stratum
            Name of its header stratum.
        buffers
            Its frame; not copied.
        link
            Connection whose rates it was drawn by: on another one its row may be another stratum's.
        """
        n_bytes = sum(map(len, buffers))
        with self._lock:
            is_behind = self._waiting_bytes + n_bytes > self._limit_bytes
            if not is_behind:
                self._waiting_bytes += n_bytes
        if is_behind:
            self.lose(stratum, Loss.CAPTURE_BEHIND)
        else:
            # The thread looks by itself: to wake it would cost the caller as much as a copy of the tensors.
            self._waiting.append((link, stratum, n_bytes, buffers))

    def lose(self, stratum: str, loss: Loss) -> None:
        """Count a call that was chosen and is lost."""
        self.enrol().lost[stratum, loss] += 1

    def close(self, timeout_s: float) -> None:
        """Send what waits and the last counts, at most for `timeout_s`, and end the thread."""
        self._closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    @property
    def is_ending(self) -> bool:
        """Whether it was closed or let go of."""
        return self.is_released or self._closing.is_set()

    def abandon(self) -> None:
        """Let go of the connection, which belongs to the parent of this process."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self.is_ending:
            began_s = time.monotonic()
            try:
                self._connect()
                self._serve()
            except Exception:  # noqa: BLE001 - the sidecar is away, or says what is not understood: try again
                self._disconnect()
                if time.monotonic() - began_s > _LAST_PAUSE_S:
                    pause_s = _FIRST_PAUSE_S
                self._closing.wait(pause_s)
                pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        self._disconnect()

    def _connect(self) -> None:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            made.settimeout(_STALL_S)
            made.connect(self._path)
        except OSError:
            made.close()
            raise
        self._heard_bytes.clear()
        self._socket = made
        self._link += 1
        until_s = time.monotonic() + _STALL_S
        while not self._is_told:
            if self.is_ending or time.monotonic() > until_s:
                raise ConnectionError("the intake does not say which rates hold")
            self._listen(_LOOK_S)

    def _disconnect(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(Exception):
                self._listen(
                    0.0
                )  # an acknowledgement may lie there: what it is for must not be counted twice
            made, self._socket = self._socket, None
            made.close()
        self._is_told = False
        self._told = None
        while self._waiting:
            _, stratum, n_bytes, _ = self._waiting.popleft()
            self._sent(n_bytes)
            self.lose(stratum, Loss.CAPTURE_DOWN)

    def _serve(self) -> None:
        """Send until the end is asked for, or raise where the other end is gone."""
        next_s = time.monotonic()
        while True:
            is_closing = self.is_ending  # asked before the last look: nothing is sent after it
            for _ in range(len(self._waiting)):
                link, stratum, n_bytes, buffers = self._waiting.popleft()
                try:
                    if link == self._link:
                        self._write([exchange_head(n_bytes), *buffers])
                    else:
                        self.lose(stratum, Loss.CAPTURE_DOWN)
                except OSError:
                    self.lose(stratum, Loss.CAPTURE_DOWN)
                    raise
                finally:
                    self._sent(n_bytes)
            if is_closing:
                for _ in range(2):  # counts may be under way: the last ones come after them
                    self._tell()
                    if self._told is not None:
                        self._listen(_TICK_S)
                return
            if time.monotonic() >= next_s:
                next_s = time.monotonic() + _TICK_S
                self._listen(0.0)
                self._tell()
            if not self._waiting:
                self._closing.wait(_LOOK_S)

    def _sent(self, n_bytes: int) -> None:
        with self._lock:
            self._waiting_bytes -= n_bytes

    def _write(self, buffers: list[bytes | memoryview]) -> None:
        assert self._socket is not None
        left = list(buffers)
        while left:
            n_bytes = self._socket.sendmsg(left[:_SEND_BUFFERS])
            while left and n_bytes >= len(left[0]):
                n_bytes -= len(left.pop(0))
            if n_bytes:
                left[0] = memoryview(left[0])[n_bytes:]

    def _tell(self) -> None:
        """Send what was counted since the last acknowledgement, unless counts are still under way."""
        if self._told is not None:
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
        self._write([message(Kind.COUNTS, counts)])
        self._told = (counts.number, totals)

    def _totals(self) -> "Totals":
        totals = Totals(number=self._acknowledged.number + 1)
        with self._lock:
            self._fold()
            totals.add(self._ended)
            living = list(self._cells)  # one that is folded from here on is in this list, and not in the sum
        for cells in living:
            totals.add(cells.totals())
        return totals

    def _fold(self) -> None:
        """Add the counts of threads that have ended up; the lock is held."""
        while True:
            try:
                cells = self._final.get_nowait()
            except queue.Empty:
                return
            self._cells.discard(cells)
            self._ended.add(cells.totals())

    def _listen(self, wait_s: float) -> None:
        """Take what the intake has said so far."""
        assert self._socket is not None
        looking = select.poll()  # `select` knows no file above 1023, and a server may have more
        looking.register(self._socket, select.POLLIN)
        while looking.poll(wait_s * 1000):
            heard = self._socket.recv(1 << 16)
            if not heard:
                raise ConnectionError("the intake has closed")
            self._heard_bytes += heard
            wait_s = 0.0
            while (content := self._next()) is not None:
                self._understand(content)

    def _next(self) -> bytes | None:
        if len(self._heard_bytes) < LENGTH_BYTES:
            return None
        length = int.from_bytes(self._heard_bytes[:LENGTH_BYTES], "big")
        if not 1 <= length <= _MOST_HEARD_BYTES:
            raise ValueError(f"a message of {length} bytes")
        end = LENGTH_BYTES + length
        if len(self._heard_bytes) < end:
            return None
        content = bytes(self._heard_bytes[LENGTH_BYTES:end])
        del self._heard_bytes[:end]
        return content

    def _understand(self, content: bytes) -> None:
        kind, body = content[0], content[1:]
        if kind == Kind.RATES:
            self._heard(_RATES.decode(body), self._link)
            self._is_told = True
        elif kind == Kind.ACK and self._told is not None and _NUMBER.decode(body) == self._told[0]:
            self._acknowledged, self._told = self._told[1], None
