"""Numeric damage or input shift: more divergence on inputs that are as hard as before, or more hard inputs.

The margin is the gap between the two top probabilities of the *reference*. Quantisation cannot change it, so it depends
only on the input. (The candidate's own margin changes with the damage and would hide it.) With strata of the margin as
cells of `quantdrift.drift.explain.mix`, a move has three parts:

- within the bins, at equal margins: the outputs differ more on inputs that are as hard as before. Range or resolution
  was lost: numeric damage;
- by the mix of bins: there are more inputs near the decision boundary, and the model behaves on them as before: input
  shift;
- in bins that were empty before: there is nothing to compare with. This part is neither, and is reported separately.

Limit: it is not known whether the damaged inputs are new. A clipped activation is damage even if only a new kind of
input reaches it.
"""

import msgspec
import numpy as np

from quantdrift.drift.evidence.margin import EDGES, N_BINS
from quantdrift.drift.evidence.observations import FloatArray, IntArray
from quantdrift.drift.explain.mix import LEAST, MixItems, MixSplit, MoveCause, MovePart, split, summed
from quantdrift.facts.explanation import DamageCause

_MANY = 0.05  # share of the later window at margins that are rare in the earlier one
_ALMOST_NONE = 5  # items
_NEAR = 2  # bins: a factor of 2.5 in the margin
LOW_MARGIN = 0.1  # inputs below it are near the decision boundary; it is an edge of the margin bins


class DamageWindow(msgspec.Struct, frozen=True, kw_only=True):
    """The items of a slice in one window, every array (n,).

    Parameters
    ----------
    x
        Divergence; NaN if the item has none.
    margin
        Margin of the reference, in [0, 1]; NaN if the item has none.
    weight, cluster
        As in `mix.MixItems`.
    """

    x: FloatArray
    margin: FloatArray
    weight: FloatArray
    cluster: IntArray


_CAUSES = {
    MoveCause.WITHIN: DamageCause.DAMAGE,
    MoveCause.MIX: DamageCause.INPUT_SHIFT,
    MoveCause.UNSEEN: DamageCause.UNSEEN,
    MoveCause.BOTH: DamageCause.BOTH,
    MoveCause.UNDECIDED: DamageCause.UNDECIDED,
    MoveCause.TOO_FEW: DamageCause.TOO_FEW,
}


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """A move by its causes.

    Parameters
    ----------
    split
        `within` is at equal margins, `mix` by changed margins, `unseen` at margins that did not occur before.
    low_margin_before, low_margin_after
        Share of the traffic with a margin below 0.1.
    """

    split: MixSplit
    low_margin_before: float
    low_margin_after: float

    @property
    def cause(self) -> DamageCause:
        """The cause of the move."""
        return _CAUSES[self.split.cause]

    @property
    def at_equal_margins(self) -> MovePart:
        """The part by numeric damage."""
        return self.split.within

    @property
    def by_margins(self) -> MovePart:
        """The part by input shift."""
        return self.split.mix

    @property
    def unseen(self) -> MovePart:
        """The part that is neither: at margins that did not occur before."""
        return self.split.unseen


def damage(before: DamageWindow, after: DamageWindow) -> Damage | None:
    """Return the split of a slice's move by margin, or None where a window has no item with margin and divergence."""
    windows = [_known(window) for window in (before, after)]
    bins = [np.searchsorted(np.array(EDGES), window.margin, side="right") for window in windows]
    stratum = strata(np.bincount(bins[0], minlength=N_BINS), summed(bins[1], windows[1].weight, N_BINS))
    samples = [
        MixItems(x=window.x, weight=window.weight, cell=stratum[bin_], cluster=window.cluster)
        for window, bin_ in zip(windows, bins, strict=True)
    ]
    parts = split(samples[0], samples[1], N_BINS)
    if parts is None:
        return None
    low = [float(window.weight[window.margin < LOW_MARGIN].sum() / window.weight.sum()) for window in windows]
    return Damage(split=parts, low_margin_before=low[0], low_margin_after=low[1])


def strata(before: IntArray, after: FloatArray) -> IntArray:
    """Return the stratum of each margin bin, (bins,): neighbours are merged until the earlier window has enough items.

    If the earlier window has almost no items in a bin and the later one has many, the bin stays separate. Otherwise inputs
    near the decision boundary that did not occur before would be merged with clear ones and counted as damage. A few items
    near the stratum below are merged with it.

    Parameters
    ----------
    before
        (bins,) items of the earlier window.
    after
        (bins,) weight of the later one.
    """
    total = float(after.sum()) or 1.0
    stratum_of = np.zeros(len(before), dtype=np.int64)
    number, n_items, share = 0, 0, 0.0
    last, below = -len(before), -len(before)  # bin with items: the last one, and that of the stratum below
    first = len(before)
    for bin_, (n, weight) in enumerate(zip(before, after, strict=True)):
        no_history = n_items < LEAST and share >= _MANY
        far = n_items < _ALMOST_NONE or bin_ - last > _NEAR
        if n_items >= LEAST or (no_history and far and n >= LEAST):
            if n_items < LEAST and number and first - below <= _NEAR:
                stratum_of[stratum_of == number] = number - 1
            else:
                number += 1
            n_items, share, first, below = 0, 0.0, len(before), last
        stratum_of[bin_] = number
        n_items, share = n_items + int(n), share + float(weight) / total
        if n:
            first, last = min(first, bin_), bin_
    if n_items < LEAST and share < _MANY and number:
        stratum_of[stratum_of == number] = number - 1
    return stratum_of


def _known(window: DamageWindow) -> DamageWindow:
    complete = np.isfinite(window.x) & np.isfinite(window.margin)
    return DamageWindow(
        x=window.x[complete],
        margin=window.margin[complete],
        weight=window.weight[complete],
        cluster=window.cluster[complete],
    )
