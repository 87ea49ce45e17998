"""The bets of change detection: the factor by which one group multiplies the evidence of each bet.

A group is, per testing stratum h, the share s_h of its items in it and the part y_h of its mean of x that these
contribute; 0 <= y_h <= s_h, and the shares sum to 1. A bet is a ratio r, on all strata or on one:

    e_r = 1 + sum over its strata of (r - 1) (y_h - s_h pi_h) / (1 + (r - 1) pi_h)

the average of the strata's `(1 + (r - 1) x_h) / (1 + (r - 1) pi_h)`, x_h = y_h / s_h, weighted by the shares, with 1
for strata that the bet is not on. (Their product would have mean above 1: items of one group are not
independent.) It is nonnegative, needs no clipping, and takes fractional x. There are two halves, which differ in pi_h:

Learned: `pi_h = min(1, (1 + tau) (S_h + 1) / (n_h + 1))`, S_h and n_h the sums of y_h and s_h over the past. Let the
groups so far and this one be a pool in which each is equally likely to be this one, with sums T_h and M_h. As
y <= s <= 1, `(T - y + 1) / (M - s + 1) >= T / M`, so e is at most what it is at pi = T / M, and the mean of that over
the pool is exactly 1. That holds for every tau >= 0, and where pi is cut at 1 no bet on h can gain at all.

Frozen: `pi_h = min(1, (1 + tau) U_h)`, U_h the upper bound that was fixed when the baseline was ready. e is linear in
y and s, so its mean is at most 1 while the stratum's mean is at most pi_h: a budget (`quantdrift.drift.detectors.budget`) with
rates (r - 1) / (1 + (r - 1) pi_h).

A change that comes and goes, on two days of each week or at night, is lost on these: what they win while it is there they lose
in between. So a part of the capital bets r = 2 on all strata at recurring hours alone, and nothing outside of them: a factor
of 1 at times that are fixed beforehand keeps the mean at most 1. What was allowed in between is staked when they begin. The
hours overlap, so that some fit what returns in any time zone (`within`).

Sources: the e-value of a likelihood ratio with a plug-in null, made valid by the one added event; Shin, Ramdas,
Rinaldo, arXiv 2203.03532 for the procedure it feeds.
"""

import numpy as np

from quantdrift.drift.detectors.change import baseline_state
from quantdrift.drift.detectors.change.baseline import N_STRATA
from quantdrift.drift.evidence.clock import DAY_US, WEEK_US
from quantdrift.drift.evidence.margin import N_BINS
from quantdrift.drift.evidence.numba_cache import compiled
from quantdrift.drift.evidence.observations import FloatArray, IntArray

COMMON = np.array((1.5, 2.0, 3.0, 5.0, 8.0))
COMMON_WEIGHTS = np.array(
    (0.2, 0.3, 0.25, 0.15, 0.1)
)  # most weight for the changes that take longest and can still be found
# Of the frozen half: its null lies above the mean by the width of the bound, so what it bets on is nearer to it.
COMMON_FROZEN = np.array((1.25, 1.5, 2.0, 3.5, 8.0))
COMMON_FROZEN_WEIGHTS = np.array((0.25, 0.35, 0.25, 0.1, 0.05))
SINGLE_SHARE = 0.1  # of a half's capital, for each stratum, to the bets on it alone
LEARNED_SHARE = 2 / 3  # of all capital, to the learned half
SINGLE = np.array((3.0, 10.0, 40.0, 150.0))
HALF = len(COMMON) + N_STRATA * len(SINGLE)
N_BETS = 2 * HALF  # learned before frozen; in each the common ones, then stratum by stratum
# Recurring hours, in UTC: two days of the week from each half day on, and nine hours of the day from each third hour on.
_HALF_DAYS, _PARTS = 14, 8  # of a week, of a day
_HALF_DAY_US, _PART_US = DAY_US / 2, DAY_US / _PARTS
_TWO_DAYS, _NIGHT = 4, 3  # half days, parts
N_RECURRING = _HALF_DAYS + _PARTS
RECURRING_SHARE = 0.15  # of all capital, to all of them alike: it costs the other bets ln 1.18
_LEARNED_BET = int(np.flatnonzero(COMMON == 2.0)[0])  # the bet that is made at these hours
_FROZEN_BET = HALF + int(np.flatnonzero(COMMON_FROZEN == 2.0)[0])
_N_COMMON, _N_SINGLE = len(COMMON), len(SINGLE)
_CUTS, _BOUNDS = baseline_state.CUTS.start, baseline_state.BOUNDS.start


@compiled
def null(total: float, share: float, tau: float) -> float:
    """Return pi of the learned half from the sums of the past."""
    return min(1.0, (1.0 + tau) * (total + 1.0) / (share + 1.0))


@compiled
def factors(state: FloatArray, strata: IntArray, cells: FloatArray, factor: FloatArray) -> None:
    """Write the factors by which a group multiplies the bets, (N_BETS,); 1 where it carries no information.

    Parameters
    ----------
    state
        Before the group.
    strata
        (N_BINS,) testing stratum of each margin bin.
    cells
        (2, N_STRATA) the group's shares, and what the items in them add to its mean of x.
    factor
        (N_BETS,) written to.
    """
    factor[:] = 1.0
    tau = state[baseline_state.TAU]
    for stratum in range(N_STRATA):
        cell = cells[0, stratum], cells[1, stratum]
        if cell[0] > 0:
            share, total = baseline_state.known(state, strata, stratum)
            learned = null(total, share, tau)
            frozen = min(1.0, (1.0 + tau) * state[_BOUNDS + stratum])
            gain(factor[:HALF], COMMON, stratum, cell, learned)
            gain(factor[HALF:], COMMON_FROZEN, stratum, cell, frozen)


@compiled
def gain(half: FloatArray, common: FloatArray, stratum: int, cell: tuple[float, float], pi: float) -> None:
    """Add the contribution of one stratum of a group to the factors of one half, (HALF,), in place.

    Parameters
    ----------
    half
        Added to.
    common
        Ratios of its bets on all strata.
    stratum
        Its number.
    cell
        The group's share in it, and what the items in it add to its mean of x.
    pi
        The mean that is tested against.
    """
    share, total = cell
    apart = total - share * pi
    for bet in range(_N_COMMON):
        r = common[bet] - 1.0
        half[bet] += r * apart / (1.0 + r * pi)
    first = _N_COMMON + stratum * _N_SINGLE
    for bet in range(_N_SINGLE):
        r = SINGLE[bet] - 1.0
        half[first + bet] += r * apart / (1.0 + r * pi)


@compiled
def moment(at_us: float) -> tuple[int, int]:
    """Return the half day of the week and the part of the day of a time, microseconds since 1970."""
    return int(at_us % WEEK_US // _HALF_DAY_US), int(at_us % DAY_US // _PART_US)


@compiled
def within(hours: int, half_day: int, part: int) -> bool:
    """Return whether a `moment` is in one of the recurring hours, 0 to `N_RECURRING`."""
    if hours < _HALF_DAYS:
        return (half_day - hours) % _HALF_DAYS < _TWO_DAYS
    return (part - hours + _HALF_DAYS) % _PARTS < _NIGHT


@compiled
def recurring_factor(state: FloatArray, factor: FloatArray) -> float:
    """Return the factor of the bets on recurring hours for a group in them; against the frozen null where the baseline is fixed."""
    bet: float = factor[_FROZEN_BET if state[baseline_state.STAGE] == baseline_state.FIXED else _LEARNED_BET]
    return bet


@compiled
def weigh(state: FloatArray, weight: FloatArray) -> None:
    """Write the weight of each bet at all times in their evidence, (N_BETS,), 1 in sum; 0 for one that still learns.

    Two thirds for the learned and a third for the frozen bets (all for these once the baseline is fixed by hand); of
    either a tenth for the bets on each stratum alone, and the rest for the common ones. Where there is but one stratum
    a bet on it is a common one, and half for a question that is not asked would cost what it costs with five.
    """
    n_strata = 1
    for cut in range(_CUTS, _CUTS + N_STRATA - 1):
        n_strata += state[cut] < N_BINS
    learned = LEARNED_SHARE if state[baseline_state.STAGE] == baseline_state.LIVING else 0.0
    frozen = 0.0 if state[baseline_state.STAGE] == baseline_state.LEARNING else 1.0 - learned
    weight[:] = 0.0
    for half, capital, common in ((0, learned, COMMON_WEIGHTS), (HALF, frozen, COMMON_FROZEN_WEIGHTS)):
        for bet in range(_N_COMMON):
            weight[half + bet] = capital * (1.0 - SINGLE_SHARE * n_strata) * common[bet]
        for bet in range(n_strata * _N_SINGLE):
            weight[half + _N_COMMON + bet] = capital * SINGLE_SHARE / _N_SINGLE


def weights(states: FloatArray) -> FloatArray:
    """Return the weight of each bet in the evidence, (N, N_BETS); see `weigh`."""
    bet_weights: FloatArray = np.empty((len(states), N_BETS))
    for state, weight in zip(states, bet_weights, strict=True):
        weigh(state, weight)
    return bet_weights


def stratum_of(bet: int) -> int | None:
    """Return the stratum that a bet is on, or None where it is on all of them."""
    index = bet % HALF - len(COMMON)
    return index // len(SINGLE) if index >= 0 else None
