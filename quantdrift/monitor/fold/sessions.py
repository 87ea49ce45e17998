"""Sessions that are open: their items are one observation, made when their time is over.

What one user sends is correlated, so a session counts once, whatever sampling policies come meanwhile. It closes a fixed time
after its first item, whatever it shows. Its probability is that of the policy of its first item.

Of every second person in a version that is new, the budgets are shown the begin of a session instead of the whole: as much as the version
was old when the session began, at least a minute. The rest of it counts in the roll-ups alone, and the next one begins when it would have
begun anyhow. So a first verdict does not wait for the length of a session, and each person still counts once within it. The other half
is for the baselines, which would take the begin of a session for a change.
"""

import hashlib
import heapq
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

import msgspec

from quantdrift.storage.fold_rows import ComparisonRow, SessionRow

SessionKey = tuple[int, str]  # model_version_id, group_key
StoredKey = tuple[
    int, int, str
]  # of its row, with the policy of its first item: model_version_id, policy_id, group_key
LEAST_BEGIN_US = 60_000_000
"""Shortest begin of a session that is shown by itself."""
MOST_OPEN = 20_000
MOST_ITEMS = 1_000  # of one session: it closes early then, which says nothing about its divergence
MOST_HELD = 400_000  # of all of them, some 200 MB: the oldest close early then

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[ComparisonRow])


class Part(Enum):
    """The part of a session that an observation has, and what it is shown to.

    `WHOLE`: to all detectors and the roll-ups. `BEGIN`: to the detectors of budgets. `AFTER`: the whole session whose begin the budgets were
    shown; to the roll-ups.
    """

    WHOLE = "whole"
    BEGIN = "begin"
    AFTER = "after"


class SessionPart(NamedTuple):
    """What is shown of a session.

    Parameters
    ----------
    over_us
        When its time was over.
    items
        Its items until then.
    part
        What they are.
    """

    over_us: int
    items: tuple[ComparisonRow, ...]
    part: Part


def begin_us(opened_us: int, version_us: int, length_us: int, group_key: str) -> int | None:
    """Return how much of a session's begin the budgets are shown; None: they are shown the whole session.

    It depends on nothing that the session shows.

    Parameters
    ----------
    opened_us, version_us
        When the session and its version began.
    length_us
        How long a session lasts.
    group_key
        Of the person.
    """
    if hashlib.sha256(group_key.encode()).digest()[0] & 1:
        return None
    begin = max(LEAST_BEGIN_US, opened_us - version_us)
    return begin if begin < length_us else None


class _Open:
    """A session and its items; `is_shown` says whether the budgets were shown its begin."""

    def __init__(self, opened_us: int, items: list[ComparisonRow]) -> None:
        self.opened_us = opened_us
        self.items = items
        self.is_shown = any(item.is_shown for item in items)


class Sessions:
    """The open sessions, oldest first.

    Parameters
    ----------
    length_us
        How long one lasts.
    stored
        Those that were open when the fold stopped.
    version_us
        Returns when a version began. None: all sessions are shown as a whole.
    """

    def __init__(
        self,
        length_us: int,
        stored: Sequence[SessionRow] = (),
        version_us: Callable[[int], int] | None = None,
    ) -> None:
        self._length_us = length_us
        self._version_us = version_us
        # Python's dictionaries keep the order of insertion, and sessions are opened in the order of time.
        self._open: dict[SessionKey, _Open] = {}
        self._dirty: set[SessionKey] = set()
        for row in sorted(stored, key=lambda row: (row.opened_us, row.key)):
            key = row.model_version_id, row.group_key
            items = _DECODER.decode(row.items)
            self._open[key] = _Open(row.opened_us, items)
        self._n_held = sum(len(session.items) for session in self._open.values())
        self._stored = {row.key for row in stored}
        # Those whose begin was not shown: new ones, and when the others' begin is over.
        self._new = [key for key, session in self._open.items() if not session.is_shown]
        self._begins: list[tuple[int, int, SessionKey]] = []

    def policies(self) -> set[int]:
        """Return the policies of the items of open sessions."""
        return {item.policy_id for session in self._open.values() for item in session.items}

    def add(self, items: Sequence[ComparisonRow], now_us: int) -> None:
        """Add the items of one exchange to its session."""
        first = items[0]
        key = (first.model_version_id, first.group_key)
        session = self._open.get(key)
        if session is None:
            session = self._open[key] = _Open(now_us, [])
            self._new.append(key)
        session.items += items
        self._n_held += len(items)
        self._dirty.add(key)

    def due(self, now_us: int) -> list[SessionPart]:
        """Return what is over in the order of time: begins of sessions, and sessions, which close; the oldest or longest also where there are too many."""
        due = [key for key in self._dirty if len(self._open[key].items) >= MOST_ITEMS]
        excess, n_held = len(self._open) - MOST_OPEN, self._n_held
        for position, (key, session) in enumerate(self._open.items()):
            if position >= excess and n_held <= MOST_HELD and session.opened_us + self._length_us > now_us:
                break
            n_held -= len(session.items)
            due.append(key)
        parts = []
        for key in sorted(set(due), key=lambda key: (self._open[key].opened_us, key)):
            over = self._open.pop(key)
            self._n_held -= len(over.items)
            part = Part.AFTER if over.is_shown else Part.WHOLE
            parts.append(SessionPart(min(over.opened_us + self._length_us, now_us), tuple(over.items), part))
            self._dirty.discard(key)
        return sorted([*self._begins_over(now_us), *parts], key=lambda part: part.over_us)

    def _begins_over(self, now_us: int) -> list[SessionPart]:
        """Return the begins that are over of sessions that are open."""
        new, self._new = self._new, []
        for key in new:
            session = self._open.get(key)
            if session is None or self._version_us is None:
                continue
            begin = begin_us(session.opened_us, self._version_us(key[0]), self._length_us, key[1])
            if begin is not None:
                heapq.heappush(self._begins, (session.opened_us + begin, session.opened_us, key))
        parts = []
        while self._begins and self._begins[0][0] <= now_us:
            over_us, opened_us, key = heapq.heappop(self._begins)
            session = self._open.get(key)
            if session is None or session.opened_us != opened_us:
                continue  # it closed early
            parts.append(SessionPart(over_us, tuple(session.items), Part.BEGIN))
            session.items = [msgspec.structs.replace(item, is_shown=True) for item in session.items]
            session.is_shown = True
            self._dirty.add(key)
        return parts

    def take(self, fold_seq: int) -> tuple[tuple[SessionRow, ...], tuple[StoredKey, ...]]:
        """Return what is to be written and what is to be deleted since the last call."""
        rows = tuple(
            SessionRow(
                model_version_id=key[0],
                policy_id=self._open[key].items[0].policy_id,
                group_key=key[1],
                opened_us=self._open[key].opened_us,
                items=_ENCODER.encode(self._open[key].items),
                fold_seq=fold_seq,
            )
            for key in sorted(self._dirty)
        )
        lasting = {(key[0], session.items[0].policy_id, key[1]) for key, session in self._open.items()}
        closed = tuple(sorted(self._stored - lasting))
        self._stored = (self._stored & lasting) | {row.key for row in rows}
        self._dirty = set()
        return rows, closed
