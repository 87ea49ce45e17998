"""Offered, taken, lost, expired and unaccounted per header stratum and model over the recent hour.

The first three come from the sidecars' cumulative tallies, the fourth from what was found missing in the stream. What a
sidecar had in memory at a tally is unaccounted if no other tally follows and this one is not the last: it ended with its
machine, or its counts were lost.

A loss counts for its model. One that names no model counts for each model that its sidecar captures, and for no other; for
all models only where the sidecar names none at all. What a sidecar lost because its configuration
does not have the model counts for that model once the model is known, and not before.
"""

import heapq
from collections.abc import Iterable

import msgspec

from quantdrift.storage.fold_rows import ExpiryRow, TallyRow

LEAST_LOST = 5  # a lost request or two among a handful taken is no pattern
RECENT_US = 3_600_000_000
KEPT_US = 30 * 24 * RECENT_US  # a sidecar that was silent for longer is counted as if it had just started

SILENT_US = 300_000_000
"""A sidecar that sent no tally for so long has ended."""

_Models = tuple[str, ...]  # those that counts are for; the empty name: for all
_Grown = tuple[int, int, int, int]  # offered, taken, lost, expired
_Unknown = tuple[int, int, int]  # time, time of the tally before, number


class RecentCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of some strata over the recent hour.

    `expired` are those that left the stream before they were replayed, `unaccounted` those that a sidecar had when it ended
    without its last counts, `quarantined` those that could not be compared, most of them for `quarantined_for`.
    """

    offered: int
    taken: int
    lost: int
    expired: int = 0
    unaccounted: int = 0
    quarantined: int = 0
    quarantined_for: str = ""

    @property
    def missing(self) -> int:
        """Of the taken, those that were not compared, for whatever reason."""
        return self.lost + self.expired + self.unaccounted + self.quarantined


class LossCounts:
    """Follows the tallies. Times come with them; nothing here looks at a clock.

    Parameters
    ----------
    baselines
        Newest tallies before the recent hour: what the next ones are subtracted from.
    tallies, expiries
        Those inside it, in the order of the fold.
    """

    def __init__(
        self,
        baselines: Iterable[TallyRow] = (),
        tallies: Iterable[TallyRow] = (),
        expiries: Iterable[ExpiryRow] = (),
    ) -> None:
        self._newest: dict[tuple[str, str, str], TallyRow] = {}
        self._expected: list[
            tuple[int, tuple[str, str, str], int]
        ] = []  # a heap: when a tally has no successor
        self._silent: dict[tuple[str, str, str], TallyRow] = {}
        for tally in baselines:
            self._follow(tally)
        self._entries: list[tuple[int, str, _Models, _Grown]] = []  # a heap by time
        self._captured: dict[_Models, _Models] = {}  # each once, however many entries have it
        self._unknown: dict[tuple[str, str], list[_Unknown]] = {}  # heaps by time
        self._sums: dict[tuple[str, str], list[int]] = {}
        for tally in tallies:
            self.add(tally)
        for expiry in expiries:
            self.expire(expiry)

    def add(self, tally: TallyRow) -> None:
        """Count what is new in `tally`; one that is older than the newest of its start says nothing new."""
        last = self._newest.get(_key(tally))
        if last is not None and tally.sequence <= last.sequence:
            return
        self._follow(tally)
        before = last or _NOTHING
        for model, (taken, lost) in tally.models.items():
            first = before.models.get(model, (0, 0))
            self._enter(tally.at_us, tally.stratum, (model,), (0, taken - first[0], lost - first[1], 0))
        captured = tuple(tally.models) or ("",)
        captured = self._captured.setdefault(captured, captured)
        taken, lost = _nameless(tally)
        first = _nameless(before)
        grown = (tally.offered - before.offered, taken - first[0], lost - first[1], 0)
        self._enter(tally.at_us, tally.stratum, captured, grown)
        if last is not None:
            self._add_unknown(tally, last)

    def expire(self, expiry: ExpiryRow) -> None:
        """Count what was found to have expired."""
        self._enter(expiry.at_us, expiry.stratum, (expiry.model,), (0, 0, 0, expiry.n))

    def forget(self, now_us: int) -> None:
        """Forget what is older than an hour before `now_us`."""
        while self._entries and self._entries[0][0] <= now_us - RECENT_US:
            _, stratum, models, grown = heapq.heappop(self._entries)
            self._count(stratum, models, grown, -1)
        for name, entries in list(self._unknown.items()):
            while entries and entries[0][0] <= now_us - RECENT_US:
                heapq.heappop(entries)
            if not entries:
                del self._unknown[name]
        while self._expected and self._expected[0][0] <= now_us:
            _, key, sequence = heapq.heappop(self._expected)
            if (newest := self._newest.get(key)) is not None and newest.sequence == sequence:
                self._silent[key] = newest
        over_us = now_us - RECENT_US - SILENT_US
        for key in [key for key, tally in self._silent.items() if tally.at_us <= over_us]:
            del self._silent[key]

    def trim(self, now_us: int) -> None:
        """Forget the starts of sidecars that have said nothing for 30 days."""
        self._newest = {key: tally for key, tally in self._newest.items() if tally.at_us > now_us - KEPT_US}

    def recent(
        self,
        strata: Iterable[str],
        model: str,
        known_us: int | None = None,
        n_quarantined: int = 0,
        quarantined_for: str = "",
    ) -> RecentCounts:
        """Return the counts of a model in `strata` together.

        Parameters
        ----------
        known_us
            When the model was first compared: what named it before that, where it was not configured, does not count. None:
            it never was.
        n_quarantined, quarantined_for
            What was quarantined of the model in the last hour, in all strata, and the most frequent reason. The strata have the
            part of it that they have of the model's samples.
        """
        strata = set(strata)
        if n_quarantined:
            taken = {
                stratum: sums[1]
                for (stratum, counted_model), sums in self._sums.items()
                if counted_model == model
            }
            of_all = sum(taken.values())
            here = sum(taken.get(stratum, 0) for stratum in strata)
            n_quarantined = round(n_quarantined * here / of_all) if of_all > 0 else n_quarantined
        sums = [
            self._sums.get((name, counted_model), (0, 0, 0, 0))
            for name in strata
            for counted_model in {model, ""}
        ]
        named = [entry for stratum in strata for entry in self._unknown.get((stratum, model), ())]
        n_unknown = sum(n for _, begin_us, n in named if known_us is not None and begin_us >= known_us)
        return RecentCounts(
            offered=sum(entry[0] for entry in sums),
            taken=sum(entry[1] for entry in sums) + n_unknown,
            lost=sum(entry[2] for entry in sums) + n_unknown,
            expired=max(sum(entry[3] for entry in sums), 0),
            unaccounted=self._unaccounted(strata, model),
            quarantined=n_quarantined,
            quarantined_for=quarantined_for,
        )

    def _add_unknown(self, tally: TallyRow, last: TallyRow) -> None:
        for model, n in tally.unknown.items():
            before = last.unknown.get(model, 0)
            # It is counted from zero where the capture process has started again.
            if grown := n - before if n >= before else n:
                entries = self._unknown.setdefault((tally.stratum, model), [])
                heapq.heappush(entries, (tally.at_us, last.at_us, grown))

    def _unaccounted(self, strata: set[str], model: str) -> int:
        silent = [tally for tally in self._silent.values() if tally.stratum in strata]
        of_model = sum(tally.open.get(model, 0) for tally in silent)
        rest = sum(tally.open.get("", 0) for tally in silent if model in tally.models or not tally.models)
        return max(of_model + rest, 0)

    def _follow(self, tally: TallyRow) -> None:
        """Take a tally as the newest of its start, and expect another one unless it is the last."""
        key = _key(tally)
        self._newest[key] = tally
        self._silent.pop(key, None)
        if tally.open and not tally.final:
            heapq.heappush(self._expected, (tally.at_us + SILENT_US, key, tally.sequence))

    def _enter(self, at_us: int, stratum: str, models: _Models, grown: _Grown) -> None:
        if any(grown):
            heapq.heappush(self._entries, (at_us, stratum, models, grown))
            self._count(stratum, models, grown, 1)

    def _count(self, stratum: str, models: _Models, grown: _Grown, sign: int) -> None:
        for model in models:
            sums = self._sums.setdefault((stratum, model), [0, 0, 0, 0])
            for index, value in enumerate(grown):
                sums[index] += sign * value


def _key(tally: TallyRow) -> tuple[str, str, str]:
    return tally.source, tally.boot, tally.stratum


_NOTHING = TallyRow(source="", boot="", stratum="", sequence=0, at_us=0, offered=0, taken=0, lost=0)


def _nameless(tally: TallyRow) -> tuple[int, int]:
    """Return how many requests without a model were taken and lost."""
    named = tally.models.values()
    return tally.taken - sum(taken for taken, _ in named), tally.lost - sum(lost for _, lost in named)
