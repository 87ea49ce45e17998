"""The bets of change detection: what one group multiplies the evidence of each by.

A group is, per testing stratum h, the share s_h of its items in it and the part y_h of its mean of x that these
contribute; 0 <= y_h <= s_h, and the shares sum to 1. A bet is a ratio r, on all strata or on one:

    e_r = 1 + sum over its strata of (r - 1) (y_h - s_h pi_h) / (1 + (r - 1) pi_h)

the average of the strata's `(1 + (r - 1) x_h) / (1 + (r - 1) pi_h)`, x_h = y_h / s_h, weighted by the shares, with 1
for strata that the bet is not on. (Their product would have mean above 1: items of one group are no independent
looks.) It is nonnegative, needs no clipping, and takes fractional x. There are two halves, which differ in pi_h:

Learned: `pi_h = min(1, (1 + tau) (S_h + 1) / (n_h + 1))`, S_h and n_h the sums of y_h and s_h over the past. Let the
groups so far and this one be a bag from which each is equally likely to be this one, with sums T_h and M_h. As
y <= s <= 1, `(T - y + 1) / (M - s + 1) >= T / M`, so e is at most what it is at pi = T / M, and the mean of that over
the bag is exactly 1. That holds for every tau >= 0, and where pi is cut at 1 no bet on h can gain at all.

Frozen: `pi_h = min(1, (1 + tau) U_h)`, U_h the upper bound that was fixed when the baseline was ready. e is linear in
y and s, so its mean is at most 1 while the stratum's mean is at most pi_h: a budget (`quantdrift.drift.budget`) with
rates (r - 1) / (1 + (r - 1) pi_h).

Sources: the e-value of a likelihood ratio with a plug-in null, made valid by the one added event; Shin, Ramdas,
Rinaldo, arXiv 2203.03532 for the procedure it feeds.
"""

import functools

import msgspec
import numpy as np

from quantdrift.drift import memory
from quantdrift.drift.baseline import N_STRATA
from quantdrift.drift.block import BoolArray, FloatArray, IntArray, Trail
from quantdrift.drift.group import ROUNDING
from quantdrift.drift.margin import N_BINS

COMMON = np.array((1.5, 2.0, 3.0, 5.0, 8.0))
COMMON_WEIGHTS = np.array((0.2, 0.3, 0.25, 0.15, 0.1))  # most to what takes longest and can still be found
SINGLE_SHARE = 0.1  # of a half's capital, for each stratum, to the bets on it alone
LEARNED_SHARE = 2 / 3  # of all capital, to the learned half
SINGLE = np.array((3.0, 10.0, 40.0, 150.0))
HALF = len(COMMON) + N_STRATA * len(SINGLE)
N_BETS = 2 * HALF  # learned before frozen; in each the common ones, then stratum by stratum
_GAINS = np.concatenate((COMMON, SINGLE)) - 1.0


class Entries(msgspec.Struct, frozen=True, kw_only=True):
    """What is not zero in a trail: one entry per group and margin bin; arrays are (entries,), in order of the groups.

    Parameters
    ----------
    group, column
        Place of the group in the trail, and margin bin.
    share, total
        The group's share of items in the bin, and what these add to its mean of x.
    """

    group: IntArray
    column: IntArray
    share: FloatArray
    total: FloatArray


class Strata(msgspec.Struct, frozen=True, kw_only=True):
    """Groups by testing stratum: one cell per group and stratum with items in it; arrays are (cells,), groups rising.

    Parameters
    ----------
    group, stratum
        Which.
    share, total
        Of the group in the stratum.
    learned, frozen
        pi of either half before the group.
    """

    group: IntArray
    stratum: IntArray
    share: FloatArray
    total: FloatArray
    learned: FloatArray
    frozen: FloatArray


def entries_of(trail: Trail) -> Entries:
    """Return what was observed in a trail of groups.

    Raises
    ------
    ValueError
        A group is no group: shares above 1 in sum, or values above 1. Both would break the false-alarm bound.
    """
    # Flat, and told apart by arithmetic: several times faster than two indices from numpy.
    place = np.flatnonzero((trail.x[:, :N_BINS] != 0) & trail.seen[:, None])
    group, column = np.divmod(place, N_BINS)
    share, total = trail.x[group, column], trail.x[group, column + N_BINS]
    whole = np.bincount(group, share)
    if (
        not ((share > 0).all() and (total >= 0).all() and (total <= share + ROUNDING).all())
        or whole.max(initial=0.0) > 1.0 + ROUNDING
    ):
        raise ValueError(
            "a group's shares sum to 1 and its values lie in [0, 1]: anything else breaks the bound"
        )
    return Entries(group=group, column=column, share=share, total=np.minimum(total, share))


def strata_of(states: FloatArray, entries: Entries, learning: BoolArray, trail: Trail) -> Strata:
    """Return the groups by testing stratum; the null of signals where `learning`, (N,), is set takes in what is past.

    Also what an alert sets aside: a page copy that runs on through a warning would otherwise bet against a baseline
    that is finite and stands still, and for as long as the warning lasts.
    """
    row = trail.steps.row
    n_groups, n_signals = len(row), len(states)
    stratum = memory.strata_of(states)
    cell = entries.group * N_STRATA + stratum[row[entries.group], entries.column]
    shape = (n_groups, N_STRATA)
    both = np.empty((2, *shape))
    for one, values in zip(both, (entries.share, entries.total), strict=True):
        one[:] = sums(cell, values, n_groups * N_STRATA).reshape(shape)
    cells = np.flatnonzero(both[0])
    group, stratum_ = np.divmod(cells, N_STRATA)
    owner = row[group]
    known = memory.known(states)
    start = (np.arange(n_signals)[:, None] * N_STRATA + stratum).ravel()
    own = both.reshape(2, -1)[:, cells]
    past = np.stack(
        [sums(start, known[:, part].ravel(), n_signals * N_STRATA) for part in (memory.SHARE, memory.TOTAL)]
    )[:, owner * N_STRATA + stratum_]
    if learning.any():
        more = both.transpose(1, 0, 2) * learning[row][:, None, None]
        past += (trail.sums(more.copy()) - more)[group, :, stratum_].T
    tau = states[owner, memory.TAU]
    return Strata(
        group=group,
        stratum=stratum_,
        share=own[0],
        total=own[1],
        learned=null(past[1], past[0], tau),
        frozen=np.minimum(1.0, (1.0 + tau) * states[owner, memory.BOUNDS.start + stratum_]),
    )


def sums(place: IntArray, values: FloatArray, n_places: int) -> FloatArray:
    """Return the sum of the values at each place, (n_places,), added in their order."""
    return np.asarray(np.bincount(place, values, n_places), dtype=np.float64)


def null(total: FloatArray, share: FloatArray, tau: FloatArray) -> FloatArray:
    """Return pi of the learned half from the sums of the past."""
    return np.asarray(np.minimum(1.0, (1.0 + tau) * (total + 1.0) / (share + 1.0)))


def factors(n_groups: int, strata: Strata) -> FloatArray:
    """Return what each group multiplies the bets by, (groups, N_BETS); 1 where nothing was observed."""
    factor = np.ones((n_groups, 2, HALF))
    group, share, total = strata.group, strata.share[:, None, None], strata.total[:, None, None]
    pi = np.stack((strata.learned, strata.frozen), axis=1)[:, :, None]
    gained = _GAINS * (total - share * pi) / (1.0 + _GAINS * pi)
    common, single = factor[:, :, : len(COMMON)], factor[:, :, len(COMMON) :]
    single.reshape(n_groups, 2, N_STRATA, len(SINGLE))[group, :, strata.stratum] += gained[
        :, :, len(COMMON) :
    ]
    # Stratum after stratum of a group, so that the bits do not depend on the company.
    first = np.append(True, np.diff(group) != 0) if len(group) else np.zeros(0, dtype=bool)
    nth = np.arange(len(group)) - np.flatnonzero(first)[np.cumsum(first) - 1]
    for turn in range(1 + int(nth.max(initial=-1))):
        of = nth == turn
        common[group[of]] += gained[of][:, :, : len(COMMON)]
    return factor.reshape(n_groups, N_BETS)


def weights(states: FloatArray) -> FloatArray:
    """Return the weight of each bet in the evidence, (N, N_BETS), 1 in sum; 0 for one that still learns.

    Two thirds for the learned and a third for the frozen bets (all for these once the baseline is fixed by hand); of
    either a tenth for the bets on each stratum alone, and the rest for the common ones. Where there is but one stratum
    a bet on it is a common one, and half for a question that is not asked would cost what it costs with five.
    """
    n_strata = 1 + (states[:, memory.CUTS] < N_BINS).sum(axis=1)
    used = np.arange(N_STRATA) < n_strata[:, None]
    half = np.empty((len(states), HALF))
    half[:, : len(COMMON)] = (1.0 - SINGLE_SHARE * n_strata)[:, None] * COMMON_WEIGHTS
    half[:, len(COMMON) :] = np.repeat(used * (SINGLE_SHARE / len(SINGLE)), len(SINGLE), axis=1)
    stage = states[:, memory.STAGE, None]
    learned = np.where(stage == memory.LIVING, LEARNED_SHARE, 0.0)
    frozen = np.where(stage == memory.LEARNING, 0.0, 1.0 - learned)
    return np.concatenate((learned * half, frozen * half), axis=1)


@functools.lru_cache(maxsize=64)
def weights_of(n_strata: int, stage: float) -> FloatArray:
    """Return the weights, (N_BETS,), of one state with so many testing strata at a stage; see `weights`."""
    state = np.zeros((1, memory.CUTS.stop + 1))
    state[:, memory.CUTS] = N_BINS
    state[:, memory.CUTS.start : memory.CUTS.start + n_strata - 1] = 0
    state[:, memory.STAGE] = stage
    found: FloatArray = weights(state)[0]
    return found


def stratum_of(bet: int) -> int | None:
    """Return the stratum that a bet is on, or None where it is on all of them."""
    place = bet % HALF - len(COMMON)
    return place // len(SINGLE) if place >= 0 else None
