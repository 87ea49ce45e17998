"""Bounds what a relay worker's observers hold to follow their connections, all of them together."""

from quantdrift.sidecar.relay.observing.errors import FramingError

FOR_EACH_BYTES = 16 * 1024
"""Room for each connection that may be observed. It is shared: mostly an HTTP/1.1 connection needs none of it."""


class ObserverMemory:
    """What is held of heads that came in parts, of HTTP/2's header tables and of its open streams.

    Parameters
    ----------
    limit_bytes
        Most of it.

    Attributes
    ----------
    n_bytes : int
        Held now.
    """

    __slots__ = ("limit_bytes", "n_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.n_bytes = 0

    def hold(self, n_bytes: int) -> None:
        """Account for `n_bytes` more, or fewer.

        Raises
        ------
        FramingError
            It is too much. It is accounted for all the same, until it is let go.
        """
        self.n_bytes += n_bytes
        if n_bytes > 0 and self.n_bytes > self.limit_bytes:
            raise FramingError("too much is held of what came in parts")


class MemoryShare:
    """What one holder has of it.

    Parameters
    ----------
    parts
        Of all.
    """

    __slots__ = ("_n_bytes", "_parts")

    def __init__(self, parts: ObserverMemory) -> None:
        self._parts = parts
        self._n_bytes = 0

    def hold(self, n_bytes: int) -> None:
        """Hold exactly so much from now on; errors as for all together."""
        more = n_bytes - self._n_bytes
        if more:
            self._n_bytes = n_bytes
            self._parts.hold(more)
