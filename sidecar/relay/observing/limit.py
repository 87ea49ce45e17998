"""The limit on the connections of a relay worker that are observed at a time."""

from collections.abc import Callable
from typing import Protocol

QUIET_S = 10.0  # a client that leaves a request unfinished for so long gives way
_SEARCH_S = 0.1  # between two searches that found nobody, since a search looks at every observed connection


class Observed(Protocol):
    """The operations of an observed connection that the limit uses.

    Attributes
    ----------
    spoke_s
        When bytes last passed, to about a second, as the event loop counts time.
    """

    spoke_s: float

    @property
    def can_resume(self) -> bool:
        """Whether nothing is lost if its observer is dropped now: it is observed again when it speaks."""

    @property
    def waits_for_client(self) -> bool:
        """Whether the client, not the backend, must speak next."""

    def give_way(self) -> None:
        """Drop the observer, because another connection needs one."""


class ObserverLimit:
    """The observed connections, at most a number of them: idle ones give way to those that speak.

    Of the connections between two exchanges the one that has been idle longest gives way; it is observed again with its
    next request. If there is none, a connection gives way whose client has left a request unfinished for `QUIET_S`, or
    whose protocol has a state that cannot be made again (HTTP/2); it is not observed again. A connection whose backend
    has yet to answer never gives way.

    Parameters
    ----------
    now_s
        Returns the time of the event loop.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._observed: set[Observed] = set()
        self._idle: list[Observed] = []  # found by the last search, the longest idle last
        self._search_from_s = 0.0

    def __len__(self) -> int:
        """Return how many connections are observed."""
        return len(self._observed)

    def enter(self, connection: Observed, limit: int) -> bool:
        """Let a connection that speaks be observed; return whether there is an observer for it.

        Parameters
        ----------
        limit
            Most connections that may be observed.
        """
        if connection not in self._observed:
            while len(self._observed) >= limit:
                if not self._make_way():
                    return False
            self._observed.add(connection)
        return True

    def leave(self, connection: Observed) -> None:
        """Remove a connection."""
        self._observed.discard(connection)

    def _make_way(self) -> bool:
        """Drop one observer; return whether one was dropped."""
        if self._drop_idle():
            return True
        now_s = self._now_s()
        if now_s < self._search_from_s:
            return False
        self._idle = sorted(
            (one for one in self._observed if one.can_resume), key=lambda one: one.spoke_s, reverse=True
        )
        if self._drop_idle():
            return True
        quiet = [one for one in self._observed if one.spoke_s <= now_s - QUIET_S and one.waits_for_client]
        if quiet:
            self._drop(min(quiet, key=lambda one: one.spoke_s))
            return True
        self._search_from_s = now_s + _SEARCH_S
        return False

    def _drop_idle(self) -> bool:
        while self._idle:
            connection = self._idle.pop()
            if connection in self._observed and connection.can_resume:
                self._drop(connection)
                return True
        return False

    def _drop(self, connection: Observed) -> None:
        self._observed.discard(connection)
        connection.give_way()
