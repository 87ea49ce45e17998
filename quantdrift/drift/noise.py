"""The noise floor: how far a reference, or a candidate, differs from itself, and the allowance for it in a budget.

An item that is replayed twice, in batches that are composed differently, has a divergence of its own, x' in [0, 1] after
clipping. Where the first outputs r differ from the second r', what is measured of the candidate c contains it: of flips

    flip(c, r) <= flip(c, r') + flip(r', r)

item by item, so that a mean of flips within the budget m against one replay is at most m plus the mean of the noise
against another. A graded divergence obeys no such inequality in general; there the sum is what is accepted, by
definition. The same holds on the candidate's side.

Bounds: of groups with weights s = v in [0, 1] and values y = vx the mean E[y] / E[s] lies in [low, high] at all times of
its window at once, each end with probability at least 1 - DELTA (`quantdrift.drift.evidence.bound`). Assumption: given the past a
group's noise has the bounded mean, throughout the window. A new window begins after a weight of `window_of` the budget,
so that a change of a reference's noise is seen; the displayed noise is that of the last one to two windows, and each
window may be wrong with probability DELTA at either end.

The allowance added to a budget m (`added`) is 0 until the noise is shown to matter, low >= 0.1 m, and its upper bound
from then on. It changes rarely, each time as a function of noise that was folded before:

- up to `high`, where low has passed what is added;
- down to `high`, where that has fallen to 2/3 of what is added; to 0, where high < 0.1 m.

Why not from the first group on: nothing that takes values in [0, 1] can be bounded below 12 / n from n groups at
DELTA = 1e-5, however exact they were. A bound that is added before it means something would double a budget of 1 % for
the first 1,300 replays of a reference that never differs.

Width at DELTA = 1e-5: no noise in 5,000 groups gives 0.3 %, in 20,000 0.075 %; 50 flips in 5,000 give [0.42 %, 1.93 %].

Each slice of a version has a figure of its own. The two ends of its interval have different costs. An upper bound that is too
low makes a sound slice page: up to MOST_SLICES slices share one more DELTA, each has SLICE_DELTA = DELTA / MOST_SLICES, so that
by the union bound any of them is wrong in its window with probability at most DELTA in all, however the slices overlap. That
costs a factor of 1.6 in groups: no noise in 5,000 groups gives 0.47 %. A lower bound that is too high makes an allowance larger
than it need be, or a slice unknown, for a time: each slice has SLICE_LOW_DELTA, and of 4,000 slices 0.4 are expected to be wrong
at most. So noise is shown with half of the groups, mostly before it pages.

A slice uses the figure of its version until its own one differs from that (`of_slice`):

- the slice is noisier: low has passed max(allowance of the version, 0.1 m), and the allowance of the slice is high;
- the slice is quieter: high has fallen to 2/3 of the allowance of the version, and the allowance of the slice is high, or 0
  where high < 0.1 m.

From then on `added` decides as it does for a version. So the allowance of a slice, where it is not 0, is at least its mean
noise as long as that is at most the allowance of the version, and it is larger than that allowance only where the slice is
shown to be noisier. A slice that is noisier than the allowance of the version can page until that is shown.
"""

import math
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from quantdrift.drift.evidence.bound import lower_bound, lower_bounds, upper_bound, upper_bounds
from quantdrift.drift.evidence.observations import FloatArray

DELTA: Final = 1e-5
MOST_SLICES: Final = 4_000
"""Slices of a version that have a figure of their own; the others use that of the version."""
SLICE_DELTA: Final = DELTA / MOST_SLICES
SLICE_LOW_DELTA: Final = 1e-4
WINDOW: Final = 10_000.0
WINDOW_BUDGETS: Final = 40.0  # accepted events that a window must have room for
MATERIAL: Final = 0.1  # of the budget: less is not worth a change
_LOOSE: Final = 1.5
_LOOKS: Final = 50.0  # at the bounds of a slice, while its groups grow by a factor of e


class NoiseSums(msgspec.Struct, frozen=True):
    """The sums of a window.

    Parameters
    ----------
    n
        Groups.
    weight, total
        Sums of v and of vx.
    """

    n: int = 0
    weight: float = 0.0
    total: float = 0.0

    def seen(self, vx: float, v: float) -> "NoiseSums":
        """Return the sums with one more group."""
        return NoiseSums(self.n + 1, self.weight + v, self.total + vx)


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """The noise of one side in one metric: two windows, of which the older one is displayed.

    Parameters
    ----------
    older, newer
        The windows.
    """

    older: NoiseSums = NoiseSums()
    newer: NoiseSums = NoiseSums()

    def seen(self, vx: float, v: float, window: float) -> "Noise":
        """Return the noise with one more group, of values `vx` <= `v` in [0, 1]; `window` is the weight of a window."""
        if not 0.0 <= vx <= v <= 1.0:
            raise ValueError(f"a group has 0 <= value <= weight <= 1, not value {vx} and weight {v}")
        older, newer = self.older.seen(vx, v), self.newer.seen(vx, v)
        return (
            Noise(older=newer, newer=NoiseSums())
            if newer.weight >= window
            else Noise(older=older, newer=newer)
        )

    def bounds(self, delta: float = DELTA) -> tuple[float, float]:
        """Return the lower and the upper bound of the mean, each missed with a probability of at most `delta`."""
        weight, total = self.older.weight, self.older.total
        return lower_bound(total, weight, delta), upper_bound(total, weight, delta)

    @property
    def mean(self) -> float | None:
        """The weighted mean, or None without any group."""
        return self.older.total / self.older.weight if self.older.weight > 0 else None


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """The allowance for noise in a budget, and whether noise is too high for verdicts.

    Parameters
    ----------
    added
        Part of the mean that is accepted for noise, over the cap.
    exceeds
        Whether noise is too high.
    """

    added: float = 0.0
    exceeds: bool = False


def bounds_of(
    noises: Sequence[Noise], low_delta: float | FloatArray, high_delta: float | FloatArray
) -> list[tuple[float, float]]:
    """Return the lower and the upper bound of many means, missed with probabilities of at most `low_delta` and `high_delta`.

    Parameters
    ----------
    low_delta, high_delta
        One level for all, or one for each.
    """
    weight = np.array([noise.older.weight for noise in noises])
    total = np.array([noise.older.total for noise in noises])
    low, high = lower_bounds(total, weight, low_delta), upper_bounds(total, weight, high_delta)
    return list(zip(low.tolist(), high.tolist(), strict=True))


def is_due(before: int, now: int) -> bool:
    """Return whether the bounds of a slice are computed again, which is when its groups have grown by some 2 %, or are fewer.

    Bounds that are valid at all times are also valid at some of them, and those that are not computed again stay valid.
    """
    return now < before or not before or int(_LOOKS * math.log(before)) != int(_LOOKS * math.log(now))


def updated(before: Level, low: float, high: float, budget: float, limit: float) -> Level:
    """Return the level from now on; parameters as of `added` and `exceeds`."""
    return Level(
        added=added(before.added, low, high, budget), exceeds=exceeds(before.exceeds, low, high, limit)
    )


def of_slice(
    own: Level | None, version: Level, bounds: tuple[float, float], budget: float, limit: float
) -> Level | None:
    """Return the level of a slice by its own noise; None: that of its version applies.

    Parameters
    ----------
    own
        Its level so far; None where that of the version applied.
    bounds
        Of the mean noise of the slice, now, at SLICE_LOW_DELTA and SLICE_DELTA.
    """
    after = updated(own or version, *bounds, budget, limit)
    return None if own is None and after == version else after


def window_of(budget: float) -> float:
    """Return the weight of a window: large enough to show that the noise is below a part of the budget."""
    return max(WINDOW, WINDOW_BUDGETS / budget)


def added(before: float, low: float, high: float, budget: float) -> float:
    """Return the allowance to add to a budget from now on.

    Parameters
    ----------
    before
        The allowance so far: 0 or an earlier upper bound.
    low, high
        Bounds of the mean noise now.
    budget
        The accepted mean.
    """
    least = MATERIAL * budget
    if low > max(before, least):
        return high
    if before > 0.0 and high * _LOOSE <= before:
        return high if high >= least else 0.0
    return before


def exceeds(before: bool, low: float, high: float, limit: float) -> bool:  # noqa: FBT001 - a state, not an option
    """Return whether the mean noise counts as above `limit`: it was proved to be, and is not yet proved to be below again."""
    return low > limit or (before and high > limit)
