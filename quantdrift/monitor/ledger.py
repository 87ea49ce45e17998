"""Offered, taken and lost per header stratum over the recent hour, from the sidecars' cumulative tallies."""

import heapq
from collections.abc import Iterable

import msgspec

from storage.fold_rows import TallyRow

RECENT_US = 3_600_000_000
KEPT_US = 30 * 24 * RECENT_US  # a sidecar that was silent for longer is counted as if it had just started


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of some strata over the recent hour."""

    offered: int
    taken: int
    lost: int


class Ledger:
    """Follows the tallies. Times come with them; nothing here looks at a clock.

    Parameters
    ----------
    baselines
        Newest tallies before the recent hour: what the next ones are subtracted from.
    tallies
        Those inside it, in the order of the fold.
    """

    def __init__(self, baselines: Iterable[TallyRow] = (), tallies: Iterable[TallyRow] = ()) -> None:
        self._newest = {_key(tally): tally for tally in baselines}
        self._entries: list[tuple[int, str, int, int, int]] = []  # a heap by time
        self._sums: dict[str, list[int]] = {}
        for tally in tallies:
            self.add(tally)

    def add(self, tally: TallyRow) -> None:
        """Count what is new in `tally`; one that is older than the newest of its start says nothing new."""
        last = self._newest.get(_key(tally))
        if last is not None and tally.sequence <= last.sequence:
            return
        self._newest[_key(tally)] = tally
        grown = (
            tally.offered - (last.offered if last else 0),
            tally.taken - (last.taken if last else 0),
            tally.lost - (last.lost if last else 0),
        )
        heapq.heappush(self._entries, (tally.at_us, tally.stratum, *grown))
        self._count(tally.stratum, grown, 1)

    def forget(self, now_us: int) -> None:
        """Let go of what is older than an hour before `now_us`."""
        while self._entries and self._entries[0][0] <= now_us - RECENT_US:
            _, stratum, *grown = heapq.heappop(self._entries)
            self._count(stratum, (grown[0], grown[1], grown[2]), -1)

    def trim(self, now_us: int) -> None:
        """Let go of the starts of sidecars that have said nothing for 30 days."""
        self._newest = {key: tally for key, tally in self._newest.items() if tally.at_us > now_us - KEPT_US}

    def recent(self, strata: Iterable[str]) -> Counts:
        """Return the counts of `strata` together."""
        sums = [self._sums.get(name, (0, 0, 0)) for name in strata]
        return Counts(
            offered=sum(entry[0] for entry in sums),
            taken=sum(entry[1] for entry in sums),
            lost=sum(entry[2] for entry in sums),
        )

    def _count(self, stratum: str, grown: tuple[int, int, int], sign: int) -> None:
        sums = self._sums.setdefault(stratum, [0, 0, 0])
        for index, value in enumerate(grown):
            sums[index] += sign * value


def _key(tally: TallyRow) -> tuple[str, str, str]:
    return tally.source, tally.boot, tally.stratum
