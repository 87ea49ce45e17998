"""Bets on ranks in the tail: what one item is worth, given how many lie at or above it.

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

from quantdrift.drift.block import FloatArray

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
_LEVELS = np.array(LEVELS)[:, None]
_TOPS = 1.0 + np.log(_LEVELS / LEAST)
_STAKES = np.array(STAKES)[:, :, None]
_POWERS = np.array(POWERS)[:, None]
_NARROW = 1e-12  # below it the average over (lo, hi] is lost in rounding; the density at hi is less


def _stretched() -> FloatArray:
    """Return what defines each stretch bet, (6, bets, 1): level, r b, eta, a, the mass of its density and its height."""
    found = []
    for level, part, rest, least in STRETCHES:
        a = max(part * level * least, LEAST)
        top = 1.0 + math.log(part * level / a)
        found.append((level, part * level, rest, a, top, (1.0 - rest) * level / top))
    return np.ascontiguousarray(np.array(found).T[:, :, None])


_STRETCHED = _stretched()


def e_values(hi: FloatArray, lo: FloatArray) -> FloatArray:
    """Return what each item is worth to each bet, (N_BETS, n): at least 1 - eps or kappa, at most c / a or 1 / hi.

    Parameters
    ----------
    hi, lo
        (n,) shares at or above, and above, the item's bin; 0 <= lo <= hi <= 1, hi > 0. Where they are equal the
        density at that share counts.
    """
    width = hi - lo
    narrow = width <= _NARROW
    any_narrow = bool(narrow.any())
    if any_narrow:
        width = np.where(narrow, 1.0, width)
    log_hi, log_lo = np.log(hi), np.log(np.where(lo > 0.0, lo, 1.0))
    area_hi, area_lo = _area(hi, log_hi, LEAST), _area(lo, log_lo, LEAST)
    worth = np.empty((N_BETS, len(hi)))
    average = (np.minimum(area_hi, _TOPS) - np.minimum(area_lo, _TOPS)) / width
    if any_narrow:
        average = np.where(narrow, np.where(hi <= _LEVELS, 1.0 / np.maximum(hi, LEAST), 0.0), average)
    surplus = average / _TOPS - 1.0
    n_tail = 2 * len(LEVELS)
    tail = worth[:n_tail].reshape(len(LEVELS), 2, -1)
    np.multiply(surplus[:, None], _STAKES, out=tail)
    tail += 1.0
    upper = np.exp(_POWERS * log_hi)
    lower = np.where(lo > 0.0, np.exp(_POWERS * log_lo), 0.0)
    body = worth[n_tail:]
    np.divide(upper - lower, width, out=body)
    if any_narrow:
        np.copyto(body, _POWERS * upper / hi, where=narrow)
    return worth


def stretch_values(hi: FloatArray, lo: FloatArray, tau: FloatArray) -> FloatArray:
    """Return what each item is worth to each stretch bet, (len(STRETCHES), n), between eta and 100.

    Parameters
    ----------
    hi, lo
        (n,) as for `e_values`, but not exaggerated.
    tau
        (n,) tolerance.
    """
    width = hi - lo
    narrow = width <= _NARROW
    any_narrow = bool(narrow.any())
    if any_narrow:
        width = np.where(narrow, 1.0, width)
    log_hi, log_lo = np.log(hi), np.log(np.where(lo > 0.0, lo, 1.0))
    level, inner, rest, a, top, moved = _STRETCHED
    moved = moved / np.square(1.0 + tau)
    area = np.minimum(_area(hi, log_hi, a), top) - np.minimum(_area(lo, log_lo, a), top)
    within = rest * (np.minimum(hi, level) - lo) + moved * area + np.maximum(hi - level, 0.0)
    inside = within / width
    if any_narrow:
        density = rest + np.where(hi <= inner, moved / np.maximum(hi, a), 0.0)
        inside = np.where(narrow, density, inside)
    return np.asarray(np.where(lo >= level, 1.0, inside))


def _area(share: FloatArray, log_share: FloatArray, a: float | FloatArray) -> FloatArray:
    """Return the integral of 1 / max(p, a) up to `share`, by its logarithm where that is above a."""
    return np.where(share < a, share / a, (1.0 - np.log(a)) + log_share)
