"""The bound on the memory that all observers of a relay worker use to follow their connections."""

from quantdrift.sidecar.relay.observing.errors import FramingError

BYTES_PER_CONNECTION = 16 * 1024
"""Memory for each connection that may be observed. It is shared: an HTTP/1.1 connection mostly needs none."""


class ObserverMemory:
    """The memory used for partly received heads, and for HTTP/2 header tables and open streams.

    Parameters
    ----------
    limit_bytes
        The most memory that may be used.

    Attributes
    ----------
    n_bytes : int
        In use now.
    """

    __slots__ = ("limit_bytes", "n_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.n_bytes = 0

    def add(self, n_bytes: int) -> None:
        """Account for `n_bytes` more, or fewer.

        Raises
        ------
        FramingError
            The limit is exceeded. The bytes are counted all the same, until they are released.
        """
        self.n_bytes += n_bytes
        if n_bytes > 0 and self.n_bytes > self.limit_bytes:
            raise FramingError(
                "the observers of this worker use too much memory for partly received messages"
            )


class MemoryShare:
    """The part of it that one user has.

    Parameters
    ----------
    memory
        Shared by all.
    """

    __slots__ = ("_memory", "_n_bytes")

    def __init__(self, memory: ObserverMemory) -> None:
        self._memory = memory
        self._n_bytes = 0

    def resize(self, n_bytes: int) -> None:
        """Use exactly `n_bytes` from now on; errors as for `ObserverMemory.add`."""
        more = n_bytes - self._n_bytes
        if more:
            self._n_bytes = n_bytes
            self._memory.add(more)
