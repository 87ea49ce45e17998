"""The payoff of each bet of a tail detector for a group, and its share of the capital.

The learned null is the pool including the group; the frozen one is a set of bounds. See `quantdrift.drift.detectors.tail.detector`
for why both keep the mean at most 1, and `quantdrift.drift.detectors.tail.rank` for the bets.
"""

from quantdrift.drift.detectors.tail import past, pooled_histogram, rank
from quantdrift.drift.detectors.tail.pooled_histogram import BOUND_N, FROZEN, N_LEARNED, TAU
from quantdrift.drift.detectors.tail.quantile import N_BINS
from quantdrift.drift.evidence.numba_cache import compiled
from quantdrift.drift.evidence.observations import FloatArray

READY_RAREST = 30_000  # groups from which on the bets on the top 0.03 % are used
FROZEN_SHARE = 0.1  # of the capital
_BASE, _ASIDE, _BOUND = (
    pooled_histogram.BASE.start,
    pooled_histogram.ASIDE.start,
    pooled_histogram.BOUND.start,
)
_LEVEL = pooled_histogram.PAST.start + past.LEVEL
_N_RAREST = rank.RAREST.stop


@compiled
def capital(state: FloatArray, shares: FloatArray) -> None:
    """Write the part of each unit of mass that every bet gets, (N_BETS,); the sum is 1 with that of `quantdrift.drift.detectors.tail.past`.

    All of it bets against the frozen null where the baseline was frozen by hand. Bets against the past have a part once their levels are chosen.
    """
    frozen = 1.0 if state[FROZEN] > 0 else FROZEN_SHARE
    others = 1.0 if state[FROZEN] > 0 or state[_LEVEL] == 0.0 else 1.0 - past.SHARE
    for bet in range(rank.N_BETS):
        shares[bet] = others * (1.0 - frozen) * rank.WEIGHTS[bet]
        shares[N_LEARNED + bet] = others * frozen * rank.WEIGHTS[bet]


@compiled
def factors(state: FloatArray, group: FloatArray, pool: FloatArray, factor: FloatArray) -> None:
    """Write the factor by which a group multiplies the evidence of each bet, (N_BETS,).

    Parameters
    ----------
    state
        The state after the group was added to its pool.
    group
        (N_BINS,) weight of its items in each bin.
    pool
        (N_BINS,) overwritten.
    factor
        (N_BETS,) written to.
    """
    factor[:] = 0.0
    aside, tau = 1.0 * pooled_histogram.sets_aside(state), state[TAU]
    bins = rank.shift(tau)
    n = state[_BASE + pooled_histogram.GROUPS] + aside * state[_ASIDE + pooled_histogram.GROUPS]
    bound = state[_BOUND : _BOUND + N_BINS]
    above = 0.0
    for bin_ in range(N_BINS - 1, -1, -1):
        above += (
            state[_BASE + pooled_histogram.BINS + bin_] + aside * state[_ASIDE + pooled_histogram.BINS + bin_]
        )
        pool[bin_] = above
    for bin_ in range(N_BINS):
        weight = group[bin_]
        if weight != 0.0:
            hi = rank.tolerated(pool, n, bin_, tau, bins)
            lo = rank.tolerated(pool, n, bin_ + 1, tau, bins)
            rank.e_values(factor[:N_LEARNED], weight, hi, lo)
            hi = rank.tolerated(bound, 1.0, bin_, tau, bins)
            lo = rank.tolerated(bound, 1.0, bin_ + 1, tau, bins)
            rank.e_values(factor[N_LEARNED:], weight, hi, lo)
    if n < READY_RAREST:
        factor[:_N_RAREST] = 1.0
    if state[BOUND_N] < READY_RAREST:
        factor[N_LEARNED : N_LEARNED + _N_RAREST] = 1.0
