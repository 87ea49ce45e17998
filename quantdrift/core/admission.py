"""The admission of values that clients choose: which of them become slices or versions, by their share of the traffic.

A client can send any value of a header, a parameter or a JSON path, and often any version. Each value that is watched
costs rows, detectors and a part of the allowance for false alarms, so their number is limited. Whoever comes first must
not keep the places: the values with the largest shares have them. Everything here depends on attributes and weights
alone and never on outcomes, so a detector of an admitted value is as valid as one of a value that was declared.

No I/O.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final

import msgspec

HALF_LIFE: Final = timedelta(days=1)
"""After this time an item counts half: values of the night are still counted in the day."""
IDLE_AFTER: Final = timedelta(days=30)
"""A value that was not seen for this long loses its place; its detectors retire after the same time."""
COUNTERS_PER_PLACE: Final = 4
"""Counters of a sketch for each place. More make the bound of `decide` tighter: 1 + 2 / 4 of a place's even share."""
MOST_VERSIONS: Final = 32
"""Most versions of a model that are watched one by one; a release a day for a month."""
_DOUBLE: Final = 2.0


class ShareSketch:
    """A bounded sketch of weighted counts: the Misra-Gries summary, mergeable and with decay.

    With k counters and a total weight W, each stored count is at most the true one, and below it by at most `error`
    <= W / (k + 1). So every value with more than 1 / (k + 1) of the weight is in the sketch, whatever the others are.
    The same holds after a merge of two sketches and after decay, which multiplies all figures by one factor.
    The result depends on the sequence of calls alone.

    Source: J. Misra, D. Gries, "Finding repeated elements", 1982; P. Agarwal et al., "Mergeable summaries", 2012,
    theorem 2.2.

    Parameters
    ----------
    n_counters
        k. Up to twice as many values are in memory between two reductions.
    counts, total, error
        Of an earlier sketch.

    Attributes
    ----------
    counts
        Stored weight of each value, a lower bound.
    total
        Weight of everything that was added.
    error
        What a count can be too low by; that of a value without a counter too.
    """

    def __init__(
        self,
        n_counters: int,
        counts: Mapping[str, float] | None = None,
        total: float = 0.0,
        error: float = 0.0,
    ) -> None:
        self.n_counters = n_counters
        self.counts = dict(counts or {})
        self.total = total
        self.error = error

    def add(self, value: str, weight: float = 1.0) -> None:
        """Count an item with its weight, which is positive and finite."""
        self.counts[value] = self.counts.get(value, 0.0) + weight
        self.total += weight
        if len(self.counts) > 2 * self.n_counters:
            self.reduce()

    def merge(self, other: "ShareSketch") -> None:
        """Add what another sketch with the same number of counters has counted."""
        for value, count in other.counts.items():
            self.counts[value] = self.counts.get(value, 0.0) + count
        self.total += other.total
        self.error += other.error
        self.reduce()

    def decay(self, elapsed: timedelta) -> None:
        """Let everything that was counted fall by half for each `HALF_LIFE` of `elapsed`."""
        factor = 0.5 ** (max(elapsed, timedelta()) / HALF_LIFE)
        self.counts = {value: count * factor for value, count in self.counts.items()}
        self.total *= factor
        self.error *= factor

    def reduce(self) -> None:
        """Keep at most `n_counters` values."""
        if len(self.counts) <= self.n_counters:
            return
        # At least k + 1 counters lose this much each, so the sum of all reductions is at most total / (k + 1).
        least = sorted(self.counts.values(), reverse=True)[self.n_counters]
        self.counts = {value: count - least for value, count in self.counts.items() if count > least}
        self.error += least

    def at_least(self, value: str) -> float:
        """Return a lower bound of a value's weight."""
        return self.counts.get(value, 0.0)

    def at_most(self, value: str) -> float:
        """Return an upper bound of a value's weight."""
        return self.counts.get(value, 0.0) + self.error


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A value that has a place.

    Parameters
    ----------
    value
        The value, as in the sketch.
    seen_at
        When it was last compared, or when it was admitted if that is later; aware.
    protected
        Whether an alert of it is open: it keeps its place.
    """

    value: str
    seen_at: datetime
    protected: bool = False


class PlaceChanges(msgspec.Struct, frozen=True, kw_only=True):
    """The changes of places.

    Parameters
    ----------
    lapsed
        Values that lose their place, with the reason as text.
    admitted
        Values that get one, with the reason.
    """

    lapsed: dict[str, str]
    admitted: dict[str, str]


def decide(
    shares: ShareSketch, places: Sequence[Place], most: int, now: datetime, *, most_swaps: int
) -> PlaceChanges:
    """Return which values lose and get a place.

    A value lapses when it was not seen for `IDLE_AFTER`, or when all places are taken and a value without one has
    certainly more weight: at least an even share (1 / `most` of the total), or twice as much. With `most` places, f of
    them protected, a value with more than 1 / (most - f) + 2 / (4 `most` + 1) of the weight always gets a place, however
    many other values there are: the smallest of the others' places has at most an even share of the rest.

    Parameters
    ----------
    shares
        Counts of all values, those with a place too.
    places
        The values that have one.
    most
        Number of places.
    most_swaps
        How many more values below an even share may displace others today: each one leaves a row behind.
    """
    lapsed: dict[str, str] = {}
    admitted: dict[str, str] = {}
    kept = {}
    for holder in places:
        if holder.protected or now - holder.seen_at <= IDLE_AFTER:
            kept[holder.value] = holder
        else:
            lapsed[holder.value] = f"not seen for {IDLE_AFTER.days} days"
    weakest = _weakest(shares, kept.values())
    smallest = next(weakest, None)
    n_taken = len(kept)
    for value, weight in sorted(shares.counts.items(), key=lambda item: (-item[1], item[0])):
        if value in kept or weight <= 0:
            continue
        share = f"{weight / shares.total:.2%} of the recent traffic"
        if n_taken < most:
            n_taken += 1
            admitted[value] = f"{share}, and a place is free"
            continue
        if smallest is None or weight <= shares.at_most(smallest):
            break
        is_large = weight * most >= shares.total
        if not is_large and (most_swaps <= 0 or weight < _DOUBLE * shares.at_most(smallest)):
            break
        most_swaps -= not is_large
        lapsed[smallest] = (
            f"{shares.at_most(smallest) / shares.total:.2%} of the recent traffic at most; another value has more"
        )
        admitted[value] = share
        smallest = next(weakest, None)
    return PlaceChanges(lapsed=lapsed, admitted=admitted)


def _weakest(shares: ShareSketch, places: Iterable[Place]) -> Iterator[str]:
    """Yield the values that may lose their place, the smallest weight first."""
    free = [holder.value for holder in places if not holder.protected]
    yield from sorted(free, key=lambda value: (shares.at_most(value), value))
