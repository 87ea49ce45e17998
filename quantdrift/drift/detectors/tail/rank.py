"""Bets on ranks in the tail: the payoff of one item, given how many items lie at or above it.

With S the share of items at or above a value and p = S at an item drawn from that same law, p is uniform on [0, 1]
(on a grid: after spreading each bin over its share). A density f on [0, 1] that gives small p more than their due is
then a bet of mean 1, and an item in a bin between the shares `lo` (above it) and `hi` (at or above it) is worth the
average of f over (lo, hi]. Two families:

- tail: `f(p) = kappa / b (p / b)^(kappa - 1)` up to b and 0 beyond, staked with a fraction eps of the capital,
  `e = 1 - eps + eps f`; kappa is 1/2, or 1 where f is flat. Whatever the factor by which the top b moved, some bet is
  near the best one.
- body: `f(p) = kappa p^(kappa - 1)`, for shifts of everything.

All fall in p. Shares may therefore be exaggerated, by any factor or replaced by upper bounds: the mean of e only falls.
And it is at most 1 for every law with fewer large values than the null's, however it differs from that: an improvement
is never evidence. A bet that pays more for the top 1 % than for the rest of the top 10 %, and nothing for what is
below, would find a tail with a gap sooner, and would take fewer items just below the top for a thicker top.

The bets and their weights are the result of a search: of some hundred bets those, and the weights, with the least
largest delay at 4e6 over fourteen changes (the top scaled, with and without a gap; a power law whose index falls; a few
outliers mixed in; all values scaled, by 1.25 to 2; a wider spread), each over that of the best falling bet for it, which
is the likelihood ratio made to fall by pooling neighbours: at most 1.55 times, and 1.2 times where the top 1 % is scaled.

Tolerance: shares and values may both swing by the factor 1 + tau. The share at or above a value t is exaggerated to
(1 + tau) times itself or to the share at or above t / (1 + tau), whichever is more (`tolerated`).

Source: calibrators of ranks, Vovk and Wang, E-values: calibration, combination and applications, Annals of Statistics
2021.
"""

import math

import numpy as np

from quantdrift.drift.detectors.tail.quantile import LARGEST, N_BINS, SMALLEST
from quantdrift.drift.evidence.numba_cache import compiled
from quantdrift.drift.evidence.observations import FloatArray

TAILS = (  # b, eps, kappa, weight
    (0.0003, 0.0015, 0.5, 0.02),
    (0.0003, 0.012, 1.0, 0.20),
    (0.0005, 0.012, 1.0, 0.04),
    (0.001, 0.002, 0.5, 0.03),
    (0.001, 0.006, 0.5, 0.02),
    (0.002, 0.009, 0.5, 0.03),
    (0.003, 0.003, 0.5, 0.03),
    (0.003, 0.006, 0.5, 0.03),
    (0.005, 0.003, 0.5, 0.09),
    (0.005, 0.0045, 0.5, 0.12),
    (0.005, 0.006, 0.5, 0.05),
    (0.01, 0.006, 0.5, 0.03),
    (0.03, 0.05, 0.5, 0.02),
    (0.03, 0.1, 0.5, 0.05),
    (0.1, 0.05, 0.5, 0.06),
)
BODIES = ((0.6, 0.05), (0.7, 0.04), (0.8, 0.09))  # kappa, weight
N_BETS = len(TAILS) + len(BODIES)
WEIGHTS = np.array([tail[3] for tail in TAILS] + [body[1] for body in BODIES])
RAREST = slice(3)  # the bets with the smallest b: they need the longest baseline
_N_TAIL, _N_BODY = len(TAILS), len(BODIES)
_ROOTS = np.sqrt([tail[0] for tail in TAILS])
_STAKES = np.array([tail[1] for tail in TAILS])
_FLAT = np.array([tail[2] == 1.0 for tail in TAILS])
_POWERS = np.array([body[0] for body in BODIES])
_WIDEST = max(tail[0] for tail in TAILS)
_NARROW = 1e-12  # below it the average over (lo, hi] is lost in rounding; the density at hi is less
_PER_BIN = math.log(LARGEST / SMALLEST) / (
    N_BINS - 2
)  # by which the logarithm of a value grows from bin to bin


@compiled
def e_values(worth: FloatArray, weight: float, hi: float, lo: float) -> None:
    """Add the payoff of an item, times its weight, to each bet, (N_BETS,): at least 1 - eps or kappa, at most 1 / hi.

    Parameters
    ----------
    worth
        (N_BETS,) added to.
    weight
        Of the item in its group.
    hi, lo
        Shares at or above, and above, the item's bin; 0 <= lo <= hi <= 1, hi > 0. Where they are equal the density
        at that share counts.
    """
    narrow = hi - lo <= _NARROW
    per_share = 0.0 if narrow else 1.0 / (hi - lo)
    if lo >= _WIDEST:  # as most items are: nothing of it is in any top
        for bet in range(_N_TAIL):
            worth[bet] += weight * (1.0 - _STAKES[bet])
    else:
        root_hi, root_lo = math.sqrt(hi), math.sqrt(lo)
        for bet in range(_N_TAIL):
            above, below = min(root_hi / _ROOTS[bet], 1.0), min(root_lo / _ROOTS[bet], 1.0)
            if _FLAT[bet]:
                above, below = above * above, below * below
            density = (above - below) * per_share
            if narrow and root_hi <= _ROOTS[bet]:
                density = above / (hi if _FLAT[bet] else 2.0 * hi)
            worth[bet] += weight * (1.0 + (density - 1.0) * _STAKES[bet])
    log_hi, log_lo = math.log(hi), math.log(lo) if lo > 0.0 else -math.inf
    for power in range(_N_BODY):
        kappa = _POWERS[power]
        upper = math.exp(kappa * log_hi)
        density = kappa * upper / hi if narrow else (upper - math.exp(kappa * log_lo)) * per_share
        worth[_N_TAIL + power] += weight * density


@compiled
def shift(tau: float) -> float:
    """Return by how many bins values move when they grow by the factor 1 + tau."""
    return math.log1p(tau) / _PER_BIN


@compiled
def tolerated(weights: FloatArray, n: float, place: int, tau: float, bins: float) -> float:
    """Return the largest share at or above bin `place` that is no drift, at most 1.

    Values that grew by 1 + tau have the share there that the null has `bins` bins below, between two edges of the grid:
    the straight line between the shares at both is above every share in between where their density falls, as in a
    tail, and misses it by less than the bin does elsewhere.

    Parameters
    ----------
    weights, n
        (N_BINS,) weight of the null at or above each bin, of `n` in all.
    place
        0 to `N_BINS`.
    tau, bins
        Tolerance, and `shift` of it.
    """
    if place == N_BINS:
        return 0.0
    whole = int(bins)
    part = bins - whole
    near, far = max(place - whole, 0), max(place - whole - 1, 0)
    grown: float = max((1.0 + tau) * weights[place], (1.0 - part) * weights[near] + part * weights[far])
    return min(grown / n, 1.0)
