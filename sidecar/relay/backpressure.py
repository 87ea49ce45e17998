"""Bounds what waits in a relay worker for peers that do not read, however many they are.

Nobody is cut off and nothing is dropped: the sooner a peer's backlog stops the other end from being read, and the less
is read at once, the less can wait. Few connections have room for large bodies, many share the same room.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from quantdrift.sidecar.state.counters import Gauge, Slot

HIGH_WATER_BYTES = 256 * 1024
# Most that is read at once: while every peer reads, while some do not, and while too many do not. The more of a large
# body is read at once, the less it costs: its receiver is woken once.
WIDE_BYTES = 1024 * 1024
READ_BYTES = 256 * 1024
NARROW_BYTES = 16 * 1024
LONG_BYTES = 128 * 1024  # who brings so many at once reads into the room from then on
ROOMY = 64  # connections, with two ends each, that all may have the highest mark
MOST_FULL = 124
# What can wait in a worker: below the marks, and one read for each that is above. Beyond it `NARROW_BYTES` for an end.
WAITING_BYTES = 2 * ROOMY * HIGH_WATER_BYTES + WIDE_BYTES + MOST_FULL * READ_BYTES

ROOM = memoryview(bytearray(WIDE_BYTES))
"""What ends of a worker read into, one after the other: nothing stays in it."""


class End(Protocol):
    """What the backpressure asks of an end of a connection."""

    def limit(self, n_bytes: int) -> None:
        """Let no more than `n_bytes` wait for it before the other end is read no more."""

    def read_shared(self) -> None:
        """Read into the buffer that all ends of the worker share."""

    def read_alone(self) -> None:
        """Read into buffers of its own."""


class Backpressure:
    """What may wait for all peers together.

    Parameters
    ----------
    sides
        Returns the ends that are there now.
    slot
        The worker's counts.

    Attributes
    ----------
    high_bytes : int
        What may wait for one peer before the other end is read no more.
    room : memoryview
        Where the next read of any end goes.
    """

    def __init__(self, sides: Callable[[], Iterable[End]], slot: Slot) -> None:
        self.high_bytes = HIGH_WATER_BYTES
        self.room = ROOM
        self._sides = sides
        self._slot = slot
        self._most = ROOMY  # connections at these marks
        self._n_full = 0
        self._is_narrow = False

    def opened(self, n_connections: int) -> None:
        """Take note of how many connections there are: more of them have less each."""
        if n_connections > self._most:
            self._share(n_connections)

    def settle(self, side: End) -> None:
        """Bound an end that has just been connected."""
        side.limit(self.high_bytes)
        if self._is_narrow:
            self.widen(side)

    def widen(self, side: End) -> None:
        """Have an end read into the room."""
        side.read_shared()

    def filled(self) -> None:
        """Take note of a peer that does not read."""
        self._n_full += 1
        self._slot.note(Gauge.SLOW)
        if self._n_full > MOST_FULL and not self._is_narrow:
            self._is_narrow = True
            for side in self._sides():
                self.widen(side)
        self._fit()

    def emptied(self) -> None:
        """Take note of one that reads again, or is gone."""
        self._n_full -= 1
        self._slot.note(Gauge.SLOW, -1)
        self._fit()

    def relax(self, n_connections: int) -> None:
        """Give room again where there are fewer. Called about once a second, so that it cannot go to and fro."""
        if self._most > ROOMY and 2 * n_connections <= self._most:
            self._share(n_connections)
        if self._is_narrow and 2 * self._n_full <= MOST_FULL:
            self._is_narrow = False
            for side in self._sides():
                side.read_alone()
            self._fit()

    def _share(self, n_connections: int) -> None:
        self._most = ROOMY
        while self._most < n_connections:
            self._most *= 2
        self.high_bytes = HIGH_WATER_BYTES * ROOMY // self._most
        for side in self._sides():
            side.limit(self.high_bytes)

    def _fit(self) -> None:
        """Let so much be read at once as there is room for."""
        if self._is_narrow:
            self.room = ROOM[:NARROW_BYTES]
        else:
            self.room = ROOM[:READ_BYTES] if self._n_full else ROOM
