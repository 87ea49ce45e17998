"""Joins requests with responses that come as events of their own: in any order, within a window and a bound. No I/O."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from enum import Enum, auto

import msgspec

from quantdrift.sidecar.intake.gateway import SampledRequest

_ENTRY_BYTES = 500  # what an entry costs beside its content


class PendingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was taken.

    Parameters
    ----------
    ticket
        To hand it over by.
    kind
        Its content type, or empty.
    body
        Its content.
    """

    ticket: SampledRequest
    kind: str
    body: bytes


class EventPair(msgspec.Struct, frozen=True, kw_only=True):
    """A request with its response's content."""

    asked: PendingRequest
    answer: bytes


class _State(Enum):
    WAITING = auto()  # one half is there
    UNWANTED = auto()  # the request was not taken: its response is to be let go of
    AMBIGUOUS = auto()  # it came twice: what comes under it is to be let go of


class _Entry(msgspec.Struct):
    since_s: float
    n_bytes: int
    state: _State = _State.WAITING
    asked: PendingRequest | None = None
    answer: bytes | None = None


class EventPairs:
    """Halves by key.

    A key that comes again before its pair is complete is ambiguous: which response belongs to which request is never
    guessed, so both are let go of, and so is what comes under that key until the window has passed.

    Parameters
    ----------
    window_s
        How long a half waits for the other.
    limit_bytes
        Most that waits; the oldest gives way.

    Attributes
    ----------
    held_bytes : int
        What waits, with what the entries themselves cost.
    """

    def __init__(self, window_s: float, limit_bytes: int) -> None:
        self.window_s = window_s
        self.limit_bytes = limit_bytes
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self.held_bytes = 0

    def ask(
        self, key: Hashable, asked: PendingRequest | None, now_s: float
    ) -> tuple[EventPair | None, list[PendingRequest]]:
        """Take a request.

        Parameters
        ----------
        key
            What its response will be found by.
        asked
            The request, or None where it was not taken.
        now_s
            Seconds on a clock that never goes back.

        Returns
        -------
        tuple
            The pair, if the response has come before; and the requests that are let go of.
        """
        entry = self._entries.get(key)
        if entry is None:
            state = _State.UNWANTED if asked is None else _State.WAITING
            n_bytes = 0 if asked is None else len(asked.body) + len(asked.ticket.head)
            self._put(key, _Entry(now_s, n_bytes, state, asked))
            return None, []
        if entry.answer is None:
            return None, [*self._spoil(entry), *([] if asked is None else [asked])]
        self._drop(key)
        return None if asked is None else EventPair(asked=asked, answer=entry.answer), []

    def answer(
        self, key: Hashable, answer: bytes, now_s: float
    ) -> tuple[EventPair | None, list[PendingRequest]]:
        """Take a response's content; otherwise as for a request."""
        entry = self._entries.get(key)
        if entry is None:
            self._put(key, _Entry(now_s, len(answer), answer=answer))
            return None, []
        if entry.answer is not None:
            return None, self._spoil(entry)
        if entry.state is not _State.AMBIGUOUS:
            self._drop(key)
        return None if entry.asked is None else EventPair(asked=entry.asked, answer=answer), []

    def expire(self, now_s: float, beside_bytes: int = 0) -> Iterator[PendingRequest]:
        """Let go of what has waited too long, or is too much; yield the requests among it.

        Parameters
        ----------
        now_s
            Seconds on a clock that never goes back.
        beside_bytes
            What others hold within the same bound.
        """
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if now_s - entry.since_s < self.window_s and self.held_bytes + beside_bytes <= self.limit_bytes:
                return
            self._drop(key)
            if entry.asked is not None:
                yield entry.asked

    def _put(self, key: Hashable, entry: _Entry) -> None:
        self._entries[key] = entry
        self.held_bytes += entry.n_bytes + _cost(key)

    def _drop(self, key: Hashable) -> None:
        self.held_bytes -= self._entries.pop(key).n_bytes + _cost(key)

    def _spoil(self, entry: _Entry) -> list[PendingRequest]:
        given = [] if entry.asked is None else [entry.asked]
        self.held_bytes -= entry.n_bytes
        entry.state, entry.n_bytes, entry.asked, entry.answer = _State.AMBIGUOUS, 0, None, None
        return given


def _cost(key: Hashable) -> int:
    return _ENTRY_BYTES + len(repr(key))  # a client chooses its id, and its length
