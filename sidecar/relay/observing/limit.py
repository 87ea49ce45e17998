"""The limit on the connections of a relay worker that are observed at a time."""

import time
from collections.abc import Callable
from typing import Protocol

QUIET_S = 3.0  # a client that leaves the body of a request unfinished for so long gives way
FEW_BYTES = 1024  # of a client in a second: sent so slowly, it counts as silent
# A search looks at every observed connection: searches take a tenth of the time at most, and rest after one found nobody.
_SEARCH_SHARE = 0.1
_MOST_CREDIT_S = 0.05  # what they may take at once
_SEARCH_S = 0.1


class ObservedConnection(Protocol):
    """The operations of an observed connection that the limit uses.

    Attributes
    ----------
    spoke_s
        When it last came on, or passed more than a few bytes, to about a second, on the monotonic clock.
    """

    spoke_s: float

    @property
    def can_resume(self) -> bool:
        """Whether nothing is lost if its observer is dropped now: it is observed again when it speaks."""

    @property
    def waits_for_client(self) -> bool:
        """Whether the client, not the backend, must speak next."""

    @property
    def has_no_whole_head(self) -> bool:
        """Whether nothing is due but the rest of the head of a request, or the first request of an HTTP/2 connection."""

    def give_way(self) -> None:
        """Drop the observer, because another connection needs one."""


class ObserverLimit:
    """The observed connections, at most a number of them: idle ones give way to those that speak.

    Of the connections between two exchanges the one that has been idle longest gives way; it is observed again with its
    next request. If there is none, a connection gives way whose client has not finished the head of a request: most
    heads arrive at once, so whoever leaves them unfinished keeps nobody from being observed, however many they are.
    Then comes one whose client has sent next to nothing of a body for `QUIET_S`, or whose protocol has a state that
    cannot be made again (HTTP/2). These two kinds are not observed again. A connection whose backend has yet to answer
    never gives way.

    Parameters
    ----------
    now_s
        Returns the time, as `spoke_s` is counted.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._observed: set[ObservedConnection] = set()
        self._found: list[ObservedConnection] = []  # by the last search, whom to drop first at the end
        self._search_from_s = 0.0
        self._credit_s, self._credited_s = _MOST_CREDIT_S, now_s()

    def __len__(self) -> int:
        """Return how many connections are observed."""
        return len(self._observed)

    def enter(self, connection: ObservedConnection, limit: int) -> bool:
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

    def leave(self, connection: ObservedConnection) -> None:
        """Remove a connection."""
        self._observed.discard(connection)

    def _make_way(self) -> bool:
        """Drop one observer; return whether one was dropped."""
        if self._drop_one():
            return True
        began_s = self._now_s()
        self._credit_s = min(_MOST_CREDIT_S, self._credit_s + (began_s - self._credited_s) * _SEARCH_SHARE)
        self._credited_s = began_s
        if began_s < self._search_from_s or self._credit_s <= 0:
            return False
        quiet: list[ObservedConnection] = []
        heads: list[ObservedConnection] = []
        idle: list[ObservedConnection] = []
        for connection in self._observed:
            if connection.can_resume:
                idle.append(connection)
            elif connection.has_no_whole_head:
                heads.append(connection)
            elif self._is_quiet(connection):
                quiet.append(connection)
        for connections in (quiet, heads, idle):
            connections.sort(key=lambda connection: connection.spoke_s, reverse=True)
        self._found = quiet + heads + idle
        self._credit_s -= self._now_s() - began_s
        if not self._found:
            self._search_from_s = began_s + _SEARCH_S
        return self._drop_one()

    def _drop_one(self) -> bool:
        while self._found:
            connection = self._found.pop()
            if connection in self._observed and (
                connection.can_resume or connection.has_no_whole_head or self._is_quiet(connection)
            ):
                self._observed.discard(connection)
                connection.give_way()
                return True
        return False

    def _is_quiet(self, connection: ObservedConnection) -> bool:
        return connection.spoke_s <= self._now_s() - QUIET_S and connection.waits_for_client
