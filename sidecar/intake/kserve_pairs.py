"""Pairing of requests with responses that arrive as separate events, in any order, within a time window.

No I/O.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from enum import Enum, auto

import msgspec

from quantdrift.sidecar.intake.gateway import SampledRequest

_ENTRY_BYTES = 500  # memory of an entry in addition to its content


class PendingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A sampled request that waits for its response.

    Parameters
    ----------
    sampled
        To hand the exchange over with.
    kind
        Its content type, or empty.
    body
        Its content.
    """

    sampled: SampledRequest
    kind: str
    body: bytes


class EventPair(msgspec.Struct, frozen=True, kw_only=True):
    """A request with the content of its response."""

    request: PendingRequest
    response: bytes


class _State(Enum):
    WAITING = auto()  # one half has arrived
    UNWANTED = auto()  # the request was not sampled: its response is to be dropped
    AMBIGUOUS = auto()  # the key arrived twice: everything with it is to be dropped


class _Entry(msgspec.Struct):
    since_s: float
    n_bytes: int
    state: _State = _State.WAITING
    request: PendingRequest | None = None
    response: bytes | None = None


class EventPairs:
    """The halves that wait for their other half, by key.

    A key that arrives again before its pair is complete is ambiguous. Which response belongs to which request
    is never guessed: both are dropped, and so is everything with that key until the window has passed.

    Parameters
    ----------
    window_s
        How long a half waits for the other.
    limit_bytes
        Most bytes that may wait; the oldest entries are dropped first.

    Attributes
    ----------
    held_bytes : int
        Bytes in use, including the memory of the entries themselves.
    """

    def __init__(self, window_s: float, limit_bytes: int) -> None:
        self.window_s = window_s
        self.limit_bytes = limit_bytes
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self.held_bytes = 0

    def add_request(
        self, key: Hashable, request: PendingRequest | None, now_s: float
    ) -> tuple[EventPair | None, list[PendingRequest]]:
        """Add a request.

        Parameters
        ----------
        key
            The key of its response.
        request
            The request, or None if it was not sampled.
        now_s
            Seconds on a monotonic clock.

        Returns
        -------
        tuple
            The pair, if the response has arrived before; and the requests that are dropped.
        """
        entry = self._entries.get(key)
        if entry is None:
            state = _State.UNWANTED if request is None else _State.WAITING
            n_bytes = 0 if request is None else len(request.body) + len(request.sampled.head)
            self._put(key, _Entry(now_s, n_bytes, state, request))
            return None, []
        if entry.response is None:
            return None, [*self._mark_ambiguous(entry), *([] if request is None else [request])]
        self._drop(key)
        return None if request is None else EventPair(request=request, response=entry.response), []

    def add_response(
        self, key: Hashable, response: bytes, now_s: float
    ) -> tuple[EventPair | None, list[PendingRequest]]:
        """Add the content of a response; otherwise as for a request."""
        entry = self._entries.get(key)
        if entry is None:
            self._put(key, _Entry(now_s, len(response), response=response))
            return None, []
        if entry.response is not None:
            return None, self._mark_ambiguous(entry)
        if entry.state is not _State.AMBIGUOUS:
            self._drop(key)
        return None if entry.request is None else EventPair(request=entry.request, response=response), []

    def expire(self, now_s: float, other_bytes: int = 0) -> Iterator[PendingRequest]:
        """Drop entries that have waited too long or exceed the limit; yield the requests among them.

        Parameters
        ----------
        now_s
            Seconds on a monotonic clock.
        other_bytes
            Bytes of others that count towards the same limit.
        """
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if now_s - entry.since_s < self.window_s and self.held_bytes + other_bytes <= self.limit_bytes:
                return
            self._drop(key)
            if entry.request is not None:
                yield entry.request

    def _put(self, key: Hashable, entry: _Entry) -> None:
        self._entries[key] = entry
        self.held_bytes += entry.n_bytes + _entry_bytes(key)

    def _drop(self, key: Hashable) -> None:
        self.held_bytes -= self._entries.pop(key).n_bytes + _entry_bytes(key)

    def _mark_ambiguous(self, entry: _Entry) -> list[PendingRequest]:
        dropped = [] if entry.request is None else [entry.request]
        self.held_bytes -= entry.n_bytes
        entry.state, entry.n_bytes, entry.request, entry.response = _State.AMBIGUOUS, 0, None, None
        return dropped


def _entry_bytes(key: Hashable) -> int:
    return _ENTRY_BYTES + len(repr(key))  # a client chooses the id and so its length
