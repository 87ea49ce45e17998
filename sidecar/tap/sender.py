"""The tap's own thread: connects, sends, hears which rates hold, and adds the counts of all threads up."""

import contextlib
import queue
import select
import socket
import threading
import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence

import msgspec

from quantdrift.core.records import Loss
from sidecar.tap.wire import LENGTH_BYTES, Counts, Kind, Rates, exchange_head, message

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
    offered: Counter[int] = msgspec.field(default_factory=Counter)
    lost: Counter[tuple[int, Loss]] = msgspec.field(default_factory=Counter)
    early: int = 0
    errors: int = 0

    def add(self, other: "Totals") -> None:
        """Add another's."""
        self.offered.update(other.offered)
        self.lost.update(other.lost)
        self.early += other.early
        self.errors += other.errors


class Cells:
    """What one thread has counted: no other one writes here, so that no lock is needed.

    Parameters
    ----------
    retire
        Takes the counts when the thread has ended.
    """

    __slots__ = ("__weakref__", "_retire", "early", "errors", "lost", "offered")

    def __init__(self, retire: Callable[[Totals], None]) -> None:
        self._retire = retire
        self.offered: defaultdict[int, int] = defaultdict(int)
        self.lost: defaultdict[tuple[int, Loss], int] = defaultdict(int)
        self.early = 0
        self.errors = 0

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be ending
            self._retire(self.totals())

    def totals(self) -> Totals:
        """Return the counts so far."""
        # Copies are made in one step of the interpreter: the thread may go on counting meanwhile.
        return Totals(
            offered=Counter(self.offered.copy()),
            lost=Counter(self.lost.copy()),
            early=self.early,
            errors=self.errors,
        )


class Sender:
    """Sends for one process; a child of it makes another.

    Parameters
    ----------
    path
        Unix socket of the intake; empty: nothing is ever sent.
    limit_bytes
        Most that waits.
    heard
        Called on the sender's thread with the rates that hold.

    Attributes
    ----------
    local : threading.local
        `cells` of it are the calling thread's counts, once it is enrolled.
    """

    def __init__(self, path: str, limit_bytes: int, heard: Callable[[Rates], None]) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self._heard = heard
        self.local = threading.local()
        self._living: weakref.WeakSet[Cells] = weakref.WeakSet()
        self._retired: queue.SimpleQueue[Totals] = queue.SimpleQueue()
        self._ended = Totals()
        self._acknowledged = Totals()
        self._told: tuple[int, Totals] | None = None  # under way
        self._waiting: deque[tuple[int, int, Buffers]] = deque()
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self._socket: socket.socket | None = None
        self._heard_bytes = bytearray()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def enrol(self) -> Cells:
        """Return the calling thread's counts, new ones if it has none: `local.cells` from then on."""
        cells: Cells | None = getattr(self.local, "cells", None)
        if cells is None:
            cells = self.local.cells = Cells(self._retired.put)
            with self._lock:
                self._living.add(cells)
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
        if self._socket is None:
            return Loss.CAPTURE_DOWN
        return Loss.CAPTURE_BEHIND if self._waiting_bytes >= self._limit_bytes else None

    def send(self, stratum: int, buffers: Buffers) -> None:
        """Have an exchange sent, or count it as lost.

        Parameters
        ----------
        stratum
            Index of its header stratum.
        buffers
            Its frame; not copied.
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
            self._waiting.append((stratum, n_bytes, buffers))

    def lose(self, stratum: int, loss: Loss) -> None:
        """Count a call that was chosen and is lost."""
        self.enrol().lost[stratum, loss] += 1

    def close(self, timeout_s: float) -> None:
        """Send what waits and the last counts, at most for `timeout_s`, and end the thread."""
        self._closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def abandon(self) -> None:
        """Let go of the connection, which belongs to the parent of this process."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._closing.is_set():
            try:
                self._connect()
                pause_s = _FIRST_PAUSE_S
                self._serve()
            except Exception:  # noqa: BLE001 - the sidecar is away, or says what is not understood: try again
                self._disconnect()
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

    def _disconnect(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(Exception):
                self._listen(
                    0.0
                )  # an acknowledgement may lie there: what it is for must not be counted twice
            made, self._socket = self._socket, None
            made.close()
        self._told = None
        while self._waiting:
            stratum, n_bytes, _ = self._waiting.popleft()
            self._sent(n_bytes)
            self.lose(stratum, Loss.CAPTURE_DOWN)

    def _serve(self) -> None:
        """Send until the end is asked for, or raise where the other end is gone."""
        next_s = time.monotonic()
        while True:
            is_closing = self._closing.is_set()  # asked before the last look: nothing is sent after it
            for _ in range(len(self._waiting)):
                stratum, n_bytes, buffers = self._waiting.popleft()
                try:
                    self._write([exchange_head(n_bytes), *buffers])
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
        lost: defaultdict[int, dict[Loss, int]] = defaultdict(dict)
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
        with self._lock:
            living = list(self._living)  # from here on none of them can end unseen
        while True:
            try:
                self._ended.add(self._retired.get_nowait())
            except queue.Empty:
                break
        totals = Totals(number=self._acknowledged.number + 1)
        for one in (self._ended, *(cells.totals() for cells in living)):
            totals.add(one)
        return totals

    def _listen(self, wait_s: float) -> None:
        """Take what the intake has said so far."""
        assert self._socket is not None
        while select.select([self._socket], [], [], wait_s)[0]:
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
            self._heard(_RATES.decode(body))
        elif kind == Kind.ACK and self._told is not None and _NUMBER.decode(body) == self._told[0]:
            self._acknowledged, self._told = self._told[1], None
