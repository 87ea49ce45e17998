"""The calendar clock: the false-alarm allowance given to each detector of a model so far.

`Lambda(t) = integral ds / (30 days * M(s) * N(s))`, M the number of models that are watched, N the number of live detectors of this
one. A detector that lives from a to b receives `Lambda(b) - Lambda(a)`. Over the whole fleet that is at most one unit in 30 days,
however the numbers change and under any dependence (an e-Bonferroni procedure over the fleet).

Each model has a clock of its own, which its own exchanges advance, so that a model gets the same allowance wherever and whenever it is
folded: no clock waits for another, and none is ahead of what it may know. The proof has two steps.

1. M is one step function of time for all models, and only those that M(s) counts are given anything for a time s (`WatchedModels`). A
   clock counts each s at most once, since earlier events move nothing. So all models together count at most
   `sum over M(s) models of 1 / M(s) = 1` of each s, in whatever order they are folded.
2. Of a time that its model counts, each of N(s) live detectors gets 1 / N(s).

It matters that M is known at s itself. If each model were given one part of the number of models that had begun when its exchange was
folded, a model whose exchanges come late would count a time of which earlier ones had counted all: M models could then
count 1 + 1/2 + ... + 1/M of it.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final

import msgspec

MICROSECONDS = 1_000_000
DAY_US = 86_400 * MICROSECONDS
WEEK_US = 7 * DAY_US
MONTH_US = 30 * DAY_US
DAY_MASS = DAY_US / MONTH_US  # what the whole fleet is given in a day


def beyond_weeks(span_us: float) -> float:
    """Return which part of a stretch of time, in [0, 1], is left over beside whole weeks; 1 of one that has no length."""
    return span_us % WEEK_US / span_us if span_us > 0 else 1.0


class WatchedModels:
    """How many models share the allowance of the fleet, at each time, for one of them.

    Parameters
    ----------
    spans
        Of each model from when until when it is one of them, in microseconds since 1970. A span begins where no clock of another model
        has come yet: then one that is added later changes nothing that was given before.
    own
        Spans of the model itself; None: it has been one of them at all times.
    """

    def __init__(
        self, spans: Iterable[tuple[int, int]] = (), own: Sequence[tuple[int, int]] | None = None
    ) -> None:
        changes: Counter[int] = Counter()
        for begin_us, end_us in spans:
            changes[begin_us] += 1
            changes[end_us] -= 1
        self._times_us = sorted(changes)
        self._numbers = [0, *accumulate(changes[at_us] for at_us in self._times_us)]
        self._own = own

    def of(self, own: Sequence[tuple[int, int]]) -> "WatchedModels":
        """Return the same for another model."""
        other = WatchedModels(own=own)
        other._times_us, other._numbers = self._times_us, self._numbers
        return other

    def parts(self, begin_us: int, end_us: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of a time in which the model is one of them, as their length in microseconds and the number of models."""
        place = bisect_right(self._times_us, begin_us)
        while begin_us < end_us:
            until_us = self._times_us[place] if place < len(self._times_us) else end_us
            until_us = min(until_us, end_us)
            if self._own is None or any(begin <= begin_us < end for begin, end in self._own):
                yield until_us - begin_us, max(self._numbers[place], 1)
            begin_us, place = until_us, place + 1


ALONE: Final = WatchedModels()
"""One model has all of the allowance."""


class CalendarClock(msgspec.Struct, frozen=True, kw_only=True):
    """The time of a model, which only stored event times advance.

    Parameters
    ----------
    at_us
        Running maximum of event times, microseconds since 1970, or None before the first.
    mass
        Lambda at that time, in months per live detector.
    n_detectors
        Live detectors from here on.
    """

    at_us: int | None = None
    mass: float = 0.0
    n_detectors: int = 0

    def seen(self, event_us: int, models: WatchedModels = ALONE) -> "CalendarClock":
        """Return the clock after an event at `event_us`.

        An earlier event moves nothing. One step counts at most a day: a pause is not allowance to spend on the
        first observation after it. While nothing is live no allowance is given.
        """
        if self.at_us is None:
            return msgspec.structs.replace(self, at_us=event_us)
        if event_us <= self.at_us:
            return self
        mass = self.mass
        if self.n_detectors:
            for length_us, n_models in models.parts(max(self.at_us, event_us - DAY_US), event_us):
                mass += length_us / (MONTH_US * self.n_detectors * n_models)
        return CalendarClock(at_us=event_us, mass=mass, n_detectors=self.n_detectors)

    def with_detectors(self, n_detectors: int) -> "CalendarClock":
        """Return the clock with `n_detectors` live from here on."""
        if n_detectors < 0:
            raise ValueError("the number of detectors is not negative")
        return msgspec.structs.replace(self, n_detectors=n_detectors)
