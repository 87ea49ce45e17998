"""The overlapping slices that explain an alert: the smallest one, or few, without whose items no excess is left.

Let the mean of a slice lie above what it is measured against, `level`, by an excess. Take out the items that also lie
in a smaller slice; what is left, the rest, has its own excess, and carries a part of the whole's in proportion to its
share of the weight. The smaller slice explains the whole where

1. the rest shows no excess: it is not above the level beyond chance (one-sided, 5 %), and
2. that is not for lack of data: by the upper bound (95 %) of the rest's excess, its part is less than half of the
   whole's.

The second condition concerns a rest of a few exchanges, which never shows an excess: it counts as clean only where its
weight is too small to matter or it has enough data. Its standard error is at least that implied by the spread of the
whole slice and its own number, so that a few zeros are no certainty.

Where no single smaller slice explains the whole, several may do so together: two damaged stores explain the alert of their
city. The slice that takes the most excess out of what is left is added until the rest shows none (at most `MOST_TOGETHER`),
and members that are not needed are left out again. Together they hold at most three quarters of the whole, or of a single slice that explains it: if
everything is damaged, every slice alerts and all of them leave no rest, but then the whole is the finding. Of two slices with the same items a declared one counts as the smaller.

It says where the excess lies, not why. Under "the rest has an excess of as much as half of the whole's" a slice is
wrongly folded with a probability of about 5 %, per pair; with several slices at each number of them that is tried.
"""

import math
from collections.abc import Mapping

import msgspec
import numpy as np

from quantdrift.drift.evidence.observations import BoolArray, FloatArray, IntArray

Z = 1.645
MOST_LEFT = 0.5
MOST_TOGETHER = 8
MOST_OF_WHOLE = 0.75
Size = tuple[float, bool]  # weight of a slice's traffic, and whether it is not declared


class Items(msgspec.Struct, frozen=True, kw_only=True):
    """The items of the slice that is to be explained, every array (n,).

    Parameters
    ----------
    x
        Divergence of each.
    weight
        1 / pi, over the items of its exchange; positive.
    cluster
        Its exchange or session, from 0.
    """

    x: FloatArray
    weight: FloatArray
    cluster: IntArray


class Remainder(msgspec.Struct, frozen=True, kw_only=True):
    """What is left of a slice without the items of another.

    Parameters
    ----------
    share
        Its share of the slice's weight, in [0, 1].
    mean, se
        Its mean and standard error; 0 where nothing is left.
    excess
        The whole slice's mean over the level.
    level
        What both are measured against.
    """

    share: float
    mean: float
    se: float
    excess: float
    level: float

    @property
    def explained(self) -> bool:
        """Whether the excess vanishes with the items that were taken out."""
        if self.excess <= 0.0:
            return False
        over = self.mean - self.level
        left = self.share * (over + Z * self.se)
        return over <= Z * self.se and left < MOST_LEFT * self.excess


def rest_of(items: Items, out: BoolArray, level: float) -> Remainder:
    """Return what is left of a slice without the items where `out`, (n,), holds.

    Parameters
    ----------
    items
        At least one.
    out
        Which of them also lie in the other slice.
    level
        What the slice is measured against: its budget, or its mean before.
    """
    total = float(items.weight.sum())
    whole = float(items.weight @ items.x) / total
    left = items.weight * ~out
    weight = float(left.sum())
    if weight <= 0.0:
        return Remainder(share=0.0, mean=0.0, se=0.0, excess=whole - level, level=level)
    mean = float(left @ items.x) / weight
    clusters = np.bincount(items.cluster, weights=left * (items.x - mean)) / weight
    groups = np.bincount(items.cluster, weights=left) / weight
    spread = float(items.weight @ np.square(items.x - whole)) / total
    variance = max(float(clusters @ clusters), spread * float(groups @ groups))
    return Remainder(
        share=weight / total, mean=mean, se=math.sqrt(variance), excess=whole - level, level=level
    )


def explaining(
    items: Items, level: float, others: Mapping[int, BoolArray], sizes: Mapping[int, Size], whole: int
) -> tuple[int, ...]:
    """Return the smallest slice that explains the excess of slice `whole`, else several that do, or none.

    Of several the first takes out the most excess.

    Parameters
    ----------
    items, level
        Of `whole`, since the onset.
    others
        Per other slice that alerts, which of the items lie in it, (n,).
    sizes
        Size of each slice, `whole` among them; only a smaller one explains. Of two that are equal in both respects, the
        one with the lower number is the smaller, so that neither explains itself by the other in turn.
    whole
        Which slice is to be explained.
    """
    if not len(items.x):
        return ()
    mine = (sizes[whole], whole)
    smaller = sorted(
        (other for other in others if (sizes[other], other) < mine and others[other].any()),
        key=lambda other: (sizes[other], other),
    )
    weight = float(items.weight.sum())
    for place, other in enumerate(smaller):
        if rest_of(items, others[other], level).explained:
            # What explains the one may lie in several still smaller ones, which then explain the whole as well.
            weight = float(items.weight[others[other]].sum())
            parts = _together(
                items, level, {one: others[one] for one in smaller[:place]}, MOST_OF_WHOLE * weight
            )
            return parts or (other,)
    return _together(items, level, {one: others[one] for one in smaller}, MOST_OF_WHOLE * weight)


def _together(items: Items, level: float, others: Mapping[int, BoolArray], most: float) -> tuple[int, ...]:
    """Return the fewest slices found that explain the excess together.

    Parameters
    ----------
    others
        In the order in which ties are decided.
    most
        Weight that they hold at most.
    """
    excess = items.weight * (items.x - level)
    chosen: list[int] = []
    out = np.zeros(len(items.x), dtype=np.bool_)
    for _ in range(min(MOST_TOGETHER, len(others))):
        gains = {other: float(excess[inside & ~out].sum()) for other, inside in others.items()}
        best = max(gains, key=gains.__getitem__)
        if gains[best] <= 0.0:
            return ()
        chosen.append(best)
        out |= others[best]
        if items.weight[out].sum() > most:
            return ()
        if rest_of(items, out, level).explained:
            break
    else:
        return ()
    for other in chosen[::-1]:
        rest = [one for one in chosen if one != other]
        if rest and rest_of(items, np.any([others[one] for one in rest], axis=0), level).explained:
            chosen = rest
    return tuple(chosen)
