"""Sessions that are open: their items are one observation, made when their time is over.

What one user sends is correlated, so a session counts once, whatever sampling policies come meanwhile. It closes a fixed time
after its first item, whatever it shows. Its probability is that of the policy of its first item.
"""

from collections.abc import Sequence

import msgspec

from quantdrift.storage.fold_rows import ComparisonRow, SessionRow

SessionKey = tuple[int, str]  # model_version_id, group_key
StoredKey = tuple[
    int, int, str
]  # of its row, with the policy of its first item: model_version_id, policy_id, group_key
MOST_OPEN = 20_000
MOST_ITEMS = 1_000  # of one session: it closes early then, which says nothing about its divergence
MOST_HELD = 400_000  # of all of them, some 200 MB: the oldest close early then

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[ComparisonRow])


class _Open:
    """A session and its items."""

    def __init__(self, opened_us: int, items: list[ComparisonRow]) -> None:
        self.opened_us = opened_us
        self.items = items


class Sessions:
    """The open sessions, oldest first.

    Parameters
    ----------
    length_us
        How long one lasts.
    stored
        Those that were open when the fold stopped.
    """

    def __init__(self, length_us: int, stored: Sequence[SessionRow] = ()) -> None:
        self._length_us = length_us
        # Python's dictionaries keep the order of insertion, and sessions are opened in the order of time.
        self._open: dict[SessionKey, _Open] = {}
        self._dirty: set[SessionKey] = set()
        for row in sorted(stored, key=lambda row: (row.opened_us, row.key)):
            key = row.model_version_id, row.group_key
            items = _DECODER.decode(row.items)
            self._open[key] = _Open(row.opened_us, items)
        self._n_held = sum(len(session.items) for session in self._open.values())
        self._stored = {row.key for row in stored}

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
        session.items += items
        self._n_held += len(items)
        self._dirty.add(key)

    def due(self, now_us: int) -> list[tuple[int, tuple[ComparisonRow, ...]]]:
        """Close and return the sessions whose time is over, and the oldest or longest where there are too many; with when it was over."""
        due = [key for key in self._dirty if len(self._open[key].items) >= MOST_ITEMS]
        excess, n_held = len(self._open) - MOST_OPEN, self._n_held
        for position, (key, session) in enumerate(self._open.items()):
            if position >= excess and n_held <= MOST_HELD and session.opened_us + self._length_us > now_us:
                break
            n_held -= len(session.items)
            due.append(key)
        closed = []
        for key in sorted(set(due), key=lambda key: (self._open[key].opened_us, key)):
            over = self._open.pop(key)
            self._n_held -= len(over.items)
            closed.append((min(over.opened_us + self._length_us, now_us), tuple(over.items)))
            self._dirty.discard(key)
        return closed

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
