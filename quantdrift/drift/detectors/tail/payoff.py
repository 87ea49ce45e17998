"""The payoff of each bet of a tail detector for a group, and its share of the capital.

The learned null is the pool including the group; the frozen one is a set of bounds. See `quantdrift.drift.detectors.tail.detector`
for why both keep the mean at most 1, and `quantdrift.drift.detectors.tail.rank` for the bets.
"""

from quantdrift.drift.detectors.tail import pooled_histogram, rank
from quantdrift.drift.detectors.tail.pooled_histogram import BOUND_N, FROZEN, N_LEARNED, TAU
from quantdrift.drift.detectors.tail.quantile import N_BINS
from quantdrift.drift.evidence.numba_cache import compiled
from quantdrift.drift.evidence.observations import FloatArray

READY_RAREST = 30_000  # groups from which on the bets on the top 0.1 % are used
FROZEN_SHARE = 0.1  # of the capital
STRETCH_SHARE = 0.6  # of the rest
_BASE, _ASIDE, _BOUND = (
    pooled_histogram.BASE.start,
    pooled_histogram.ASIDE.start,
    pooled_histogram.BOUND.start,
)
_N_RAREST = rank.RAREST.stop


@compiled
def capital(state: FloatArray, shares: FloatArray) -> None:
    """Write the part of each unit of mass that every bet gets, (N_BETS,); the sum is 1.

    All of it bets against the frozen null where the baseline was frozen by hand.
    """
    frozen = 1.0 if state[FROZEN] > 0 else FROZEN_SHARE
    shares[: rank.N_BETS] = (1.0 - STRETCH_SHARE) * (1.0 - frozen) / rank.N_BETS
    shares[rank.N_BETS : N_LEARNED] = STRETCH_SHARE * (1.0 - frozen) / (N_LEARNED - rank.N_BETS)
    shares[N_LEARNED:] = frozen / rank.N_BETS


@compiled
def factors(state: FloatArray, group: FloatArray, factor: FloatArray) -> None:
    """Write the factor by which a group multiplies the evidence of each bet, (N_BETS,).

    Parameters
    ----------
    state
        The state after the group was added to its pool.
    group
        (N_BINS,) weight of its items in each bin.
    factor
        (N_BETS,) written to.
    """
    factor[:] = 0.0
    aside, grown = 1.0 * pooled_histogram.sets_aside(state), 1.0 + state[TAU]
    n = state[_BASE + pooled_histogram.GROUPS] + aside * state[_ASIDE + pooled_histogram.GROUPS]
    learned, stretch, frozen = factor[: rank.N_BETS], factor[rank.N_BETS : N_LEARNED], factor[N_LEARNED:]
    above = 0.0
    for place in range(N_BINS - 1, -1, -1):
        below = above
        above += (
            state[_BASE + pooled_histogram.BINS + place]
            + aside * state[_ASIDE + pooled_histogram.BINS + place]
        )
        weight = group[place]
        if weight != 0.0:
            hi, lo = min(above / n, 1.0), min(below / n, 1.0)
            rank.e_values(learned, weight, min(grown * hi, 1.0), min(grown * lo, 1.0))
            rank.stretch_values(stretch, weight, hi, lo, state[TAU])
            hi, lo = state[_BOUND + place], state[_BOUND + place + 1] if place + 1 < N_BINS else 0.0
            rank.e_values(frozen, weight, min(grown * hi, 1.0), min(grown * lo, 1.0))
    if n < READY_RAREST:
        factor[:_N_RAREST] = 1.0
    if state[BOUND_N] < READY_RAREST:
        factor[N_LEARNED : N_LEARNED + _N_RAREST] = 1.0
