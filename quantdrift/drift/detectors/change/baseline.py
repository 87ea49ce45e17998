"""The baseline of a slice: how it behaved before, as it is learned, stored, inherited and accepted.

It is two sums per margin bin: over groups, the share of their items that lie in the bin, and the part of their mean
that these contribute. Once there is enough, bins are merged to at most five testing strata, at the 1, 3, 10 and 30 %
quantiles of the margins, and for each there is an upper bound of its mean. It is lowered as more is learned, until the
first alert, and never raised.
"""

import math
from collections.abc import Sequence
from typing import Self

import msgspec
import numpy as np

from quantdrift.drift.evidence.bound import at_most, upper_bounds
from quantdrift.drift.evidence.clock import beyond_weeks
from quantdrift.drift.evidence.margin import N_BINS
from quantdrift.drift.evidence.observations import FloatArray

N_STRATA = 5
QUANTILES = (0.01, 0.03, 0.1, 0.3)
LEAST_GROUPS = 25.0  # a stratum that holds less than so many groups' items is merged with the next
READY_GROUPS = 5000
READY_EVENTS = 50.0
DEFAULT_TAU = 0.25
DEFAULT_DELTA = 1e-5
_LOWER = 0.98  # a bound is lowered when it has fallen below this part of itself


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """A baseline on record.

    Parameters
    ----------
    share
        Per margin bin, sum over groups of the share of their items in it: `N_BINS` numbers.
    total
        Per margin bin, sum over groups of x over these items, divided by the group's items: `N_BINS` numbers.
    n_groups
        Groups in it.
    cuts
        First bins of the second and later testing strata, rising; what has learned too little has no strata yet.
    bounds
        Per testing stratum, the upper bound of its mean, without tolerance; empty where there are no strata yet.
    tau
        Tolerance: means up to (1 + tau) times the baseline are no change.
    delta
        Probability that any of the bounds lies below its mean.
    since_us, until_us
        Event times of its first and last group, microseconds since 1970.
    fixed
        Frozen by hand: nothing is learned any more, and the bounds alone are tested.
    selected
        An alert has chosen what was learned: the bounds are lowered no more.
    """

    share: tuple[float, ...]
    total: tuple[float, ...]
    n_groups: int
    cuts: tuple[int, ...] = ()
    bounds: tuple[float, ...] = ()
    tau: float = DEFAULT_TAU
    delta: float = DEFAULT_DELTA
    since_us: int = 0
    until_us: int = 0
    fixed: bool = False
    selected: bool = False

    @property
    def n_events(self) -> float:
        """Events in it: the sum of the groups' means of x, each at most 1, so for flips of single items their number.

        A value of 0.2 is a fifth of an event: what counts is how far the sum stands above the one event that a
        single further group could add, which is the unit of every bound here.
        """
        return sum(self.total)

    @property
    def missing(self) -> int:
        """Groups that it lacks until it is ready, 5,000 and 50 events, at the rate of events so far; 0 when ready."""
        return missing(self.n_groups, self.n_events)

    @property
    def strata(self) -> FloatArray:
        """Sums per testing stratum, (strata, 2): share, total."""
        begins = [0, *self.cuts]
        sums = np.stack((np.array(self.share), np.array(self.total)), axis=1)
        merged: FloatArray = np.add.reduceat(sums, begins, axis=0)
        return merged

    def settled(self) -> Self:
        """Return it with testing strata and their bounds, fixed from what it holds now."""
        return msgspec.structs.replace(self, cuts=cuts_of(self.share)).bounded()

    def bounded(self) -> Self:
        """Return it with the bounds of its testing strata fixed from what it holds now."""
        return msgspec.structs.replace(self, bounds=tuple(self._now().tolist()))

    def lowered(self) -> Self:
        """Return it with the bounds of what it holds now, where these are less than those it has.

        A baseline of less than whole weeks may come from a trough of the season that its tolerance allows for. No
        bound is therefore lowered below the mean that the stratum would have with that part of its time raised to the
        middle of such a season.
        """
        trough = 1.0 - self.tau * beyond_weeks(self.until_us - self.since_us)
        share, total = self.strata.T
        bounds = np.array(self.bounds)
        # Asked every thousand groups of every signal, with a clear answer mostly: that nothing is worth computing.
        if trough <= 0.0 or not at_most(_LOWER * bounds, total, share, self.delta / len(share)).any():
            return self
        middles = total / np.maximum(share, 1.0) / trough
        lowered = np.minimum(bounds, np.maximum(self._now(), middles))
        return msgspec.structs.replace(self, bounds=tuple(lowered.tolist()))

    def _now(self) -> FloatArray:
        """Return the bounds of its testing strata from what it holds now, (strata,)."""
        share, total = self.strata.T
        return upper_bounds(total, share, self.delta / len(share))


def missing(n_groups: int, n_events: float) -> int:
    """Return how many groups more it takes until a baseline is ready, at the rate of events so far; 0 when ready."""
    lacking = max(READY_GROUPS - n_groups, 0)
    if n_events < READY_EVENTS:
        rate = (n_events + 1.0) / (n_groups + 1.0)
        lacking = max(lacking, math.ceil((READY_EVENTS - n_events) / rate))
    return lacking


def cuts_of(share: Sequence[float]) -> tuple[int, ...]:
    """Return the first bins of the second and later testing strata, from the share of items in each margin bin.

    A stratum ends with the first bin at which the quantile is reached and both it and what is left hold enough.
    They depend on margins alone, never on x.
    """
    cumulative = np.cumsum(np.asarray(share, dtype=np.float64))
    whole = float(cumulative[-1])
    cuts: list[int] = []
    below = 0.0
    for quantile in QUANTILES:
        enough = max(quantile * whole, below + LEAST_GROUPS)
        cut = int(np.searchsorted(cumulative, enough * (1 - 1e-12))) + 1
        if cut < N_BINS and whole - cumulative[cut - 1] >= LEAST_GROUPS:
            cuts.append(cut)
            below = float(cumulative[cut - 1])
    return tuple(cuts)
