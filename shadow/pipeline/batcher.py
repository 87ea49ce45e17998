"""Batches of exchanges that can be replayed together, with bounds on their wait and their memory."""

from collections.abc import Hashable
from typing import Generic, TypeVar

Entry = TypeVar("Entry")


class Batcher(Generic[Entry]):
    """Collects entries by key until a batch is full or has waited long enough.

    It does no I/O: the caller passes the time and takes the batches.

    Parameters
    ----------
    max_items
        Most items in a batch; an entry with more becomes a batch of its own.
    max_bytes
        Most bytes that wait here; above it all batches are returned.
    delay_s
        Longest wait of an entry.
    """

    def __init__(self, *, max_items: int, max_bytes: int, delay_s: float) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._delay_s = delay_s
        self._open: dict[Hashable, list[Entry]] = {}
        self._n_items: dict[Hashable, int] = {}
        self._due_s: dict[Hashable, float] = {}
        self._n_bytes = 0
        self._bytes: dict[Hashable, int] = {}

    def add(
        self, key: Hashable, entry: Entry, *, n_items: int, n_bytes: int, now_s: float
    ) -> list[list[Entry]]:
        """Add an entry; return the batches that it completes, oldest first.

        Parameters
        ----------
        key
            Entries with equal keys can be replayed together.
        now_s
            Monotonic time.
        """
        complete: list[list[Entry]] = []
        if self._n_items.get(key, 0) + n_items > self._max_items:
            complete += self._take(key)
        self._open.setdefault(key, []).append(entry)
        self._due_s.setdefault(key, now_s + self._delay_s)
        self._n_items[key] = self._n_items.get(key, 0) + n_items
        self._bytes[key] = self._bytes.get(key, 0) + n_bytes
        self._n_bytes += n_bytes
        if self._n_items[key] >= self._max_items:
            complete += self._take(key)
        if self._n_bytes > self._max_bytes:
            complete += self.flush()
        return complete

    def due(self, now_s: float) -> list[list[Entry]]:
        """Return the batches that have waited long enough by `now_s`, oldest first."""
        due = sorted((due_s, i, key) for i, (key, due_s) in enumerate(self._due_s.items()) if due_s <= now_s)
        return [batch for _, _, key in due for batch in self._take(key)]

    def flush(self) -> list[list[Entry]]:
        """Return all waiting batches, oldest first."""
        return [batch for key in list(self._open) for batch in self._take(key)]

    def wait_s(self, now_s: float) -> float:
        """Return the time from `now_s` until a batch is due; the whole delay if none waits."""
        return max(min(self._due_s.values(), default=now_s + self._delay_s) - now_s, 0.0)

    def _take(self, key: Hashable) -> list[list[Entry]]:
        if key not in self._open:
            return []
        self._n_bytes -= self._bytes.pop(key)
        del self._n_items[key], self._due_s[key]
        return [self._open.pop(key)]
