"""The split of a move of a mean: within the cells, by the mix of traffic over the cells, or by new cells.

Blinder's decomposition with the earlier window as reference (Blinder, Wage discrimination, Journal of Human Resources
8, 1973; Oaxaca, International Economic Review 14, 1973; for rates Kitagawa, JASA 50, 1955). With shares s_h and means
m_h of the cells h of a partition, and the whole earlier mean m,

    after - before = sum_h s_h after * (m_h after - m_h before)  +  sum_h (s_h after - s_h before) * (m_h before - m)
                     within the cells                               by the mix of traffic

exactly. The first sum is the observed mean minus the earlier means, standardised directly to the later mix. Kitagawa's
symmetric form would need the later mean of each cell. At an alarm the later window may contain only a dozen exchanges,
and this form needs only their cells and their sum.

A cell with almost no items before has no mean to compare with. Whether its items are worse than before is not known, so
they count neither as mix nor as a change within. Both sums leave such cells out, and a third sum over them,

    sum_h s_h after * (m_h after - m) - s_h before * (m_h before - m),

is the contribution of traffic that did not occur before (`unmatched` is its share).

Standard errors are linearised and clustered: each item contributes its influence on the part, the influences of one
exchange are added up, and the variance is the sum of the squares (Binder, International Statistical Review 51, 1983). If
all earlier items of a cell have the same 0 or 1, the cell gets the variance of half an observation more of the other
kind: twenty items without a flip do not prove that none flips. The errors are valid for weights 1 / pi. They do not
account for the choice of the windows: an onset is chosen from the same data, which makes the whole move look larger than
it is.
"""

import math
from enum import StrEnum

import msgspec
import numpy as np

from quantdrift.drift.evidence.observations import BoolArray, FloatArray, IntArray
from quantdrift.facts.explanation import FEWEST_AFTER, FEWEST_BEFORE, Z

LEAST = 20  # items of a cell in the earlier window: below it the cell has no mean to compare with
_DOMINANT = 0.8


class MoveCause(StrEnum):
    """The cause of a move: its dominant part."""

    WITHIN = "within"
    MIX = "mix"
    UNSEEN = "unseen"  # cells that did not occur before
    BOTH = "both"  # more than one of them
    UNDECIDED = "undecided"  # no part is above zero beyond chance, or the largest one is not
    TOO_FEW = "too_few"  # exchanges in one of the windows


class MixItems(msgspec.Struct, frozen=True, kw_only=True):
    """The items of one window, every array (n,).

    Parameters
    ----------
    x
        The value of each.
    weight
        1 / pi, over the items of its exchange; positive.
    cell
        Its cell of the partition, from 0.
    cluster
        Its exchange or session, from 0: items of one are not independent.
    """

    x: FloatArray
    weight: FloatArray
    cell: IntArray
    cluster: IntArray

    @property
    def n(self) -> int:
        """Exchanges or sessions."""
        return len(np.unique(self.cluster))


class MovePart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a move, in the unit of x, with its standard error."""

    value: float
    se: float

    @property
    def risen(self) -> bool:
        """Whether it is above zero beyond chance, at 2.5 %; a standard error of 0 means that it is unknown."""
        return self.se > 0 and self.value > Z * self.se


class MixSplit(msgspec.Struct, frozen=True, kw_only=True):
    """A move and its parts.

    Parameters
    ----------
    before, after
        The means; `after - before = within + mix + unseen` up to rounding.
    move, within, mix, unseen
        All of it, and its parts.
    unmatched
        Share of the later window's traffic in cells without a mean to compare with, in [0, 1].
    n_before, n_after
        Exchanges or sessions of the windows.
    """

    before: float
    after: float
    move: MovePart
    within: MovePart
    mix: MovePart
    unseen: MovePart
    unmatched: float
    n_before: int
    n_after: int

    @property
    def cause(self) -> MoveCause:
        """The cause of a rise: the largest part, if it is above zero beyond chance and four fifths of all such parts."""
        if self.n_before < FEWEST_BEFORE or self.n_after < FEWEST_AFTER:
            return MoveCause.TOO_FEW
        parts = {MoveCause.WITHIN: self.within, MoveCause.MIX: self.mix, MoveCause.UNSEEN: self.unseen}
        risen = [part.value for part in parts.values() if part.risen]
        cause, largest = max(parts.items(), key=lambda part: part[1].value)
        if not largest.risen:
            return MoveCause.UNDECIDED
        return cause if largest.value >= _DOMINANT * sum(risen) else MoveCause.BOTH


def split(before: MixItems, after: MixItems, n_cells: int) -> MixSplit | None:
    """Return how the mean moved between two windows, or None where one of them is empty.

    Parameters
    ----------
    before, after
        The windows.
    n_cells
        Cells of the partition.
    """
    if not len(before.x) or not len(after.x):
        return None
    old, new = _shares(before, n_cells), _shares(after, n_cells)
    cell_weight = summed(before.cell, before.weight, n_cells)
    sums = summed(before.cell, before.weight * before.x, n_cells)
    mean = np.divide(sums, cell_weight, out=np.zeros(n_cells), where=cell_weight > 0)
    matched = np.bincount(before.cell, minlength=n_cells) >= LEAST

    whole_old, whole_new = _mean(before, before.x), _mean(after, after.x)
    known_old, known_new = matched[before.cell], matched[after.cell]
    # Deviation from the mean: of the earlier mean of an item's cell, and of the value of an item in an unmatched cell.
    mixed_old = np.where(known_old, mean[before.cell] - whole_old, 0.0)
    mixed_new = np.where(known_new, mean[after.cell] - whole_old, 0.0)
    strange_old = np.where(known_old, 0.0, before.x - whole_old)
    strange_new = np.where(known_new, 0.0, after.x - whole_old)
    excess = np.where(known_new, after.x - mean[after.cell], 0.0)
    mix = _mean(after, mixed_new) - _mean(before, mixed_old)
    unseen = _mean(after, strange_new) - _mean(before, strange_old)

    # By how much an item moves the mean of its cell, which the later mix and the change of mix multiply.
    inner = np.divide(matched, cell_weight, out=np.zeros(n_cells), where=cell_weight > 0)[before.cell]
    inner *= before.x - mean[before.cell]
    surprise = _surprise(before, mean, matched)
    within_variance = (
        _variance(after, _influence(after, excess))
        + _variance(before, new[before.cell] * inner)
        + float(np.square(new) @ surprise)
    )
    more = new - old
    # The earlier mean is an estimate too: as new cells grow, the mix and they are compared with it.
    shifted = float(more[~matched].sum()) * _influence(before, before.x)
    mix_variance = (
        _variance(after, _influence(after, mixed_new))
        + _variance(before, more[before.cell] * inner - _influence(before, mixed_old) + shifted)
        + float(np.square(more) @ surprise)
    )
    unseen_variance = _variance(after, _influence(after, strange_new)) + _variance(
        before, _influence(before, strange_old) + shifted
    )
    move_variance = sum(_variance(window, _influence(window, window.x)) for window in (before, after))
    return MixSplit(
        before=whole_old,
        after=whole_new,
        move=MovePart(value=whole_new - whole_old, se=math.sqrt(move_variance)),
        within=MovePart(value=_mean(after, excess), se=math.sqrt(within_variance)),
        mix=MovePart(value=mix, se=math.sqrt(mix_variance)),
        unseen=MovePart(value=unseen, se=math.sqrt(unseen_variance)),
        unmatched=float(new[~matched].sum()),
        n_before=before.n,
        n_after=after.n,
    )


def summed(cell: IntArray, values: FloatArray, n_cells: int) -> FloatArray:
    """Return the sum of `values`, (n,), in each cell, (cells,)."""
    return np.bincount(cell, weights=values, minlength=n_cells).astype(np.float64)


def _shares(sample: MixItems, n_cells: int) -> FloatArray:
    shares: FloatArray = summed(sample.cell, sample.weight, n_cells) / sample.weight.sum()
    return shares


def _mean(sample: MixItems, values: FloatArray) -> float:
    return float(sample.weight @ values / sample.weight.sum())


def _influence(sample: MixItems, values: FloatArray) -> FloatArray:
    """Return by how much each item, per unit of weight, moves the weighted mean of `values`, (n,)."""
    moved: FloatArray = (values - _mean(sample, values)) / sample.weight.sum()
    return moved


def _variance(sample: MixItems, influence: FloatArray) -> float:
    """Return the variance of an estimate from its `influence`, (n,), per unit of weight of each item."""
    clusters = np.bincount(sample.cluster, weights=sample.weight * influence)
    n = sample.n
    return float(clusters @ clusters) * n / (n - 1) if n > 1 else math.inf


def _surprise(sample: MixItems, mean: FloatArray, matched: BoolArray) -> FloatArray:
    """Return the variance of cell means that are 0 or 1, (cells,), which the observed squares put at 0."""
    if not np.isin(sample.x, (0.0, 1.0)).all():
        return np.zeros(len(mean))
    n = np.bincount(sample.cell, minlength=len(mean)) + 1.0
    half = 0.5 / n
    return np.where(matched & np.isin(mean, (0.0, 1.0)), half * (1.0 - half) / n, 0.0)
