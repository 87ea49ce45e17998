"""Backpressure of a relay worker: a bound on the bytes buffered for peers that do not read.

The bound is for all connections together. No connection is closed and no byte is dropped. With many
connections or many stalled peers, each peer may have less unsent data before the relay stops reading from the
other end, and each read is shorter.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from quantdrift.sidecar.state.counters import Gauge, Slot

HIGH_WATER_BYTES = 256 * 1024
# The longest single read: while every peer reads (MAX), while some peers are stalled (READ), and while too
# many are (MIN). A long read of a large body is cheap because it wakes the receiver once.
MAX_READ_BYTES = 1024 * 1024
READ_BYTES = 256 * 1024
MIN_READ_BYTES = 16 * 1024
LONG_READ_BYTES = 128 * 1024  # an end that received a read this long uses the shared buffer from then on
FULL_LIMIT_CONNECTIONS = 32  # connections, of two ends each, that may all have HIGH_WATER_BYTES
MAX_STALLED = 60
# The most unsent data in a worker: all ends just below their limits, and one read for each end above its
# limit. Beyond that, each end adds at most MIN_READ_BYTES.
MAX_UNSENT_BYTES = 2 * FULL_LIMIT_CONNECTIONS * HIGH_WATER_BYTES + MAX_READ_BYTES + MAX_STALLED * READ_BYTES

SHARED_BUFFER = memoryview(bytearray(MAX_READ_BYTES))
"""The buffer that all ends of a worker read into, one after the other. No data stays in it between reads."""


class EndOperations(Protocol):
    """The operations of a connection's end that backpressure uses."""

    def limit(self, n_bytes: int) -> None:
        """Stop reading from the other end while more than `n_bytes` are unsent to this one."""

    def read_shared(self) -> None:
        """Read into the buffer that all ends of the worker share."""

    def read_private(self) -> None:
        """Read into buffers of the event loop."""


class Backpressure:
    """The limits on unsent data, shared by all connections of a relay worker.

    Parameters
    ----------
    ends
        Returns the ends that are open now.
    slot
        The worker's counts.

    Attributes
    ----------
    high_bytes : int
        Unsent data for one peer above which the relay stops reading from the other end.
    read_buffer : memoryview
        The part of the shared buffer that the next read of any end goes to; its length limits the read.
    """

    def __init__(self, ends: Callable[[], Iterable[EndOperations]], slot: Slot) -> None:
        self.high_bytes = HIGH_WATER_BYTES
        self.read_buffer = SHARED_BUFFER
        self._ends = ends
        self._slot = slot
        self._n_at_limit = FULL_LIMIT_CONNECTIONS  # connections that the present limits are for
        self._n_stalled = 0
        self._is_constrained = False

    def opened(self, n_connections: int) -> None:
        """Lower the limit of each connection if there are more connections than the present limit allows."""
        if n_connections > self._n_at_limit:
            self._set_limits(n_connections)

    def limit_new(self, end: EndOperations) -> None:
        """Apply the present limits to an end that has just connected."""
        end.limit(self.high_bytes)
        if self._is_constrained:
            end.read_shared()

    def peer_stalled(self) -> None:
        """Count a peer that has stopped reading, and read less at once."""
        self._n_stalled += 1
        self._slot.adjust(Gauge.SLOW)
        if self._n_stalled > MAX_STALLED and not self._is_constrained:
            self._is_constrained = True
            for end in self._ends():
                end.read_shared()
        self._fit_read_buffer()

    def peer_resumed(self) -> None:
        """Count a stalled peer that reads again or has disconnected."""
        self._n_stalled -= 1
        self._slot.adjust(Gauge.SLOW, -1)
        self._fit_read_buffer()

    def rebalance(self, n_connections: int) -> None:
        """Raise the limits again when there are fewer connections.

        Called about once a second, so that limits do not oscillate.
        """
        if self._n_at_limit > FULL_LIMIT_CONNECTIONS and 2 * n_connections <= self._n_at_limit:
            self._set_limits(n_connections)
        if self._is_constrained and 2 * self._n_stalled <= MAX_STALLED:
            self._is_constrained = False
            for end in self._ends():
                end.read_private()
            self._fit_read_buffer()

    def _set_limits(self, n_connections: int) -> None:
        self._n_at_limit = FULL_LIMIT_CONNECTIONS
        while self._n_at_limit < n_connections:
            self._n_at_limit *= 2
        self.high_bytes = HIGH_WATER_BYTES * FULL_LIMIT_CONNECTIONS // self._n_at_limit
        for end in self._ends():
            end.limit(self.high_bytes)

    def _fit_read_buffer(self) -> None:
        """Set the longest read for the present number of stalled peers."""
        if self._is_constrained:
            self.read_buffer = SHARED_BUFFER[:MIN_READ_BYTES]
        else:
            self.read_buffer = SHARED_BUFFER[:READ_BYTES] if self._n_stalled else SHARED_BUFFER
