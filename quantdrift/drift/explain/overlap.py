"""The overlapping slices that explain an alert: the smallest one, or few, without whose items no excess is left.

The excess of a slice is the difference between its mean and the `level` that it is compared with. Remove the items that
are also in a smaller slice. The remaining items, the rest, have an excess of their own; its part of the whole excess is
in proportion to the rest's share of the weight. The smaller slice explains the larger one if

1. the rest shows no excess: it is not above the level beyond chance (one-sided, 5 %), and
2. this is not for lack of data: by the upper bound (95 %) of the rest's excess, its part is less than half of the
   whole excess.

The second condition is for a rest of a few exchanges, which never shows an excess: it counts as clean only if its weight
is too small to matter or if it has enough data. Its standard error is at least the one that follows from the spread of
the whole slice and the number of its own items, because a few zeros prove nothing.

If no single smaller slice explains the larger one, several may do so together: two damaged stores explain the alert of
their city. The slice that takes the most excess out of the rest is added until the rest shows none (at most `MOST_TOGETHER`
slices), and slices that are not needed are left out again. Together they hold at most three quarters of the larger slice, or of
a single slice that explains it: if everything is damaged, every slice alerts and all of them together leave no rest, but then the
larger slice is the finding. Of two slices with the same items a declared one counts as the smaller.

The result says where the excess is, not why. If the excess of the rest is half of the whole, the probability of a wrong
explanation is about 5 % per pair; with several slices it is that at each number of them that is tried.
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


class SliceItems(msgspec.Struct, frozen=True, kw_only=True):
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
    """The rest of a slice: its items without those of another slice.

    Parameters
    ----------
    share
        Share of the slice's weight, in [0, 1].
    mean, se
        Mean and standard error; 0 if no items remain.
    excess
        The whole slice's mean over the level.
    level
        The level that both means are compared with.
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
        excess_left = self.share * (over + Z * self.se)
        return over <= Z * self.se and excess_left < MOST_LEFT * self.excess


def rest_of(items: SliceItems, out: BoolArray, level: float) -> Remainder:
    """Return the rest of a slice without the items for which `out`, (n,), is True.

    Parameters
    ----------
    items
        At least one.
    out
        Which of them also lie in the other slice.
    level
        The level that the slice is compared with: its budget, or its mean before.
    """
    total = float(items.weight.sum())
    overall_mean = float(items.weight @ items.x) / total
    rest_weight = items.weight * ~out
    weight = float(rest_weight.sum())
    if weight <= 0.0:
        return Remainder(share=0.0, mean=0.0, se=0.0, excess=overall_mean - level, level=level)
    mean = float(rest_weight @ items.x) / weight
    clusters = np.bincount(items.cluster, weights=rest_weight * (items.x - mean)) / weight
    groups = np.bincount(items.cluster, weights=rest_weight) / weight
    spread = float(items.weight @ np.square(items.x - overall_mean)) / total
    variance = max(float(clusters @ clusters), spread * float(groups @ groups))
    return Remainder(
        share=weight / total, mean=mean, se=math.sqrt(variance), excess=overall_mean - level, level=level
    )


def explaining(
    items: SliceItems, level: float, others: Mapping[int, BoolArray], sizes: Mapping[int, Size], larger: int
) -> tuple[int, ...]:
    """Return the smallest slice that explains the excess of slice `larger`, else several that do, or none.

    Of several the first takes out the most excess.

    Parameters
    ----------
    items, level
        Those of `larger`, since the onset.
    others
        Per other slice that alerts, which of the items lie in it, (n,).
    sizes
        Size of each slice, including `larger`. Only a smaller slice can explain. Of two slices that are equal in both
        respects the one with the lower id counts as smaller, so that they do not explain each other.
    larger
        Id of the slice to be explained.
    """
    if not len(items.x):
        return ()
    own_order = (sizes[larger], larger)
    smaller = sorted(
        (other for other in others if (sizes[other], other) < own_order and others[other].any()),
        key=lambda other: (sizes[other], other),
    )
    weight = float(items.weight.sum())
    for n_smaller, other in enumerate(smaller):
        if rest_of(items, others[other], level).explained:
            # What explains the one may lie in several still smaller ones, which then explain the whole as well.
            weight = float(items.weight[others[other]].sum())
            parts = _together(
                items,
                level,
                {slice_id: others[slice_id] for slice_id in smaller[:n_smaller]},
                MOST_OF_WHOLE * weight,
            )
            return parts or (other,)
    return _together(
        items, level, {slice_id: others[slice_id] for slice_id in smaller}, MOST_OF_WHOLE * weight
    )


def _together(
    items: SliceItems, level: float, others: Mapping[int, BoolArray], most: float
) -> tuple[int, ...]:
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
        rest = [slice_id for slice_id in chosen if slice_id != other]
        if rest and rest_of(items, np.any([others[slice_id] for slice_id in rest], axis=0), level).explained:
            chosen = rest
    return tuple(chosen)
