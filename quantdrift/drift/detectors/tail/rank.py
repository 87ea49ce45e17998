"""Bets on ranks in the tail: the payoff of one item, given how many items lie at or above it.

With S the share of items at or above a value and p = S at an item drawn from that same law, p is uniform on [0, 1]
(on a grid: after spreading each bin over its share). A density f on [0, 1] that gives small p more than their due is
then a bet of mean 1, and an item in a bin between the shares `lo` (above it) and `hi` (at or above it) is worth the
average of f over (lo, hi]. Two families:

- tail: `f(p) = c / max(p, a)` up to b and 0 beyond, c = 1 / (1 + ln(b / a)), staked with a fraction eps of the
  capital, `e = 1 - eps + eps f`. Whatever the factor by which the top b moved, some bet is near the best one.
- body: `f(p) = kappa p^(kappa - 1)`, for shifts of everything.

Both fall in p. Shares may therefore be exaggerated, multiplied by 1 + tau and cut at 1 or replaced by upper bounds:
the mean of e only falls. Source: calibrators of ranks, Vovk and Wang, E-values: calibration, combination and
applications, Annals of Statistics 2021.

A tail that is only stretched has the same share in the top b as before; a bet that pays for b wins from it only what
it loses on everything else. A third family bets within the top alone:

- stretch: 1 beyond b; up to b `f(p) = eta + (1 - eta) h(p)`, h a density `c / max(p, a)` on [0, r b] of mass b: "of
  the top b, all but eta of them moved into the top r b". Its mean is 1 for p uniform. It does not fall in p, so its
  tolerance is of another kind: h is divided by (1 + tau)^2, and the mean is at most 1 while every share is between
  1 / (1 + tau) and 1 + tau times what it was.
"""

import math

import numpy as np

from quantdrift.drift.evidence.numba_cache import compiled
from quantdrift.drift.evidence.observations import FloatArray

LEAST = 1e-5  # a: smaller ranks count as it, so that no tail bet exceeds c / a
LEVELS = (0.001, 0.003, 0.01, 0.03, 0.1)  # b
STAKES = ((0.002, 0.01), (0.003, 0.015), (0.01, 0.04), (0.03, 0.1), (0.08, 0.25))  # two eps for each b
POWERS = (0.3, 0.5, 0.7, 0.85)  # kappa
N_BETS = 2 * len(LEVELS) + len(POWERS)
STRETCHES = (  # b, r, eta, a as a part of r b
    (0.003, 0.04, 0.02, 0.3),
    (0.01, 0.08, 0.02, 0.03),
    (0.01, 0.02, 0.02, 0.3),
    (0.01, 0.3, 0.02, 0.1),
    (0.03, 0.15, 0.2, 0.1),
    (0.03, 1.0, 0.5, 0.01),
    (0.1, 0.3, 0.02, 0.1),
    (0.1, 1.0, 0.5, 0.01),
)
RAREST = slice(2)  # the bets with the smallest b: they need the longest baseline
_LEVELS = np.array(LEVELS)
_TOPS = 1.0 + np.log(_LEVELS / LEAST)
_STAKES = np.array(STAKES).ravel()
_WIDEST = LEVELS[-1]
_POWERS = np.array(POWERS)
_BASE = 1.0 - math.log(LEAST)
_N_TAIL = 2 * len(LEVELS)
_NARROW = 1e-12  # below it the average over (lo, hi] is lost in rounding; the density at hi is less


def _stretched() -> FloatArray:
    """Return the parameters of each stretch bet, (bets, 7): level, r b, eta, a, 1 - ln a, mass of its density, its height."""
    found = []
    for level, part, rest, least in STRETCHES:
        a = max(part * level * least, LEAST)
        top = 1.0 + math.log(part * level / a)
        found.append((level, part * level, rest, a, 1.0 - math.log(a), top, (1.0 - rest) * level / top))
    return np.array(found)


_STRETCHED = _stretched()


@compiled
def e_values(worth: FloatArray, weight: float, hi: float, lo: float) -> None:
    """Add the payoff of an item, times its weight, to each bet, (N_BETS,): at least 1 - eps or kappa, at most c / a or 1 / hi.

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
    log_hi, log_lo = math.log(hi), math.log(lo) if lo > 0.0 else -math.inf
    if lo >= _WIDEST:  # as most items are: nothing of it is in any top
        for bet in range(_N_TAIL):
            worth[bet] += weight * (1.0 - _STAKES[bet])
    else:
        area_hi, area_lo = _area(hi, log_hi, LEAST, _BASE), _area(lo, log_lo, LEAST, _BASE)
        for bet in range(_N_TAIL):
            level, top = _LEVELS[bet // 2], _TOPS[bet // 2]
            average = (min(area_hi, top) - min(area_lo, top)) * per_share
            if narrow:
                average = 1.0 / max(hi, LEAST) if hi <= level else 0.0
            worth[bet] += weight * (1.0 + (average / top - 1.0) * _STAKES[bet])
    for power in range(len(POWERS)):
        kappa = _POWERS[power]
        upper = math.exp(kappa * log_hi)
        density = kappa * upper / hi if narrow else (upper - math.exp(kappa * log_lo)) * per_share
        worth[_N_TAIL + power] += weight * density


@compiled
def stretch_values(worth: FloatArray, weight: float, hi: float, lo: float, tau: float) -> None:
    """Add the payoff of an item, times its weight, to each stretch bet, (len(STRETCHES),): between eta and 100.

    Parameters
    ----------
    worth
        (len(STRETCHES),) added to.
    weight, hi, lo
        As for `e_values`, but shares are not exaggerated.
    tau
        Tolerance.
    """
    if lo >= _WIDEST:  # as most items are: there every stretch bet pays what it was staked
        for bet in range(len(STRETCHES)):
            worth[bet] += weight
        return
    narrow = hi - lo <= _NARROW
    per_share = 0.0 if narrow else 1.0 / (hi - lo)
    log_hi, log_lo = math.log(hi), math.log(lo) if lo > 0.0 else -math.inf
    for bet in range(len(STRETCHES)):
        level, inner, rest = _STRETCHED[bet, 0], _STRETCHED[bet, 1], _STRETCHED[bet, 2]
        a, base, top = _STRETCHED[bet, 3], _STRETCHED[bet, 4], _STRETCHED[bet, 5]
        moved = _STRETCHED[bet, 6] / ((1.0 + tau) * (1.0 + tau))
        if lo >= level:
            inside = 1.0
        elif narrow:
            inside = rest + (moved / max(hi, a) if hi <= inner else 0.0)
        else:
            area = min(_area(hi, log_hi, a, base), top) - min(_area(lo, log_lo, a, base), top)
            inside = (rest * (min(hi, level) - lo) + moved * area + max(hi - level, 0.0)) * per_share
        worth[bet] += weight * inside


@compiled
def _area(share: float, log_share: float, a: float, base: float) -> float:
    """Return the integral of 1 / max(p, a) up to `share`, by its logarithm where that is above a; `base` is 1 - ln a."""
    return share / a if share < a else base + log_share
