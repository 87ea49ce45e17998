"""Anytime-valid bounds of a mean of values that are among a few known numbers, such as -1, 0 and 1 of a paired comparison.

With values y_1 ... y_k, a group has the weights a_1 ... a_k >= 0 of its items that have them, sum of a = v <= 1 (an item's
c / pi over the number of items of the group, see `quantdrift.drift.evidence.group`), and the mean is E[sum of a_j y_j] / E[v]. H0
"mean >= m" is tested by bets

    prod(1 + lambda (v m - sum of a_j y_j)),    lambda = rate / (largest y - min(m, 0)),  0 < rate < 1,

and H0 "mean <= m" by

    prod(1 + lambda (sum of a_j y_j - v m)),    lambda = stake / (m - smallest y),  0 < stake < 1.

Under its H0 each has a mean of at most 1 given the past, because each factor is positive and has one. A group is a convex
combination of the points "all of its weight on y_j" and "no weight", and the logarithm is concave, so that

    log prod >= sum over j of A_j log(1 + lambda (m - y_j)),    A_j = sum of a_j over the groups

and likewise on the other side. It is exact for groups of one item without weights, and errs upwards for all others. So the sums A
are enough. For the values 0 and 1 the form is that of `quantdrift.drift.evidence.bound`, and so are the stakes. The rates are others:
those of that module are for delta = 1e-5, where they are best after 50 to 100 events. These are for delta = 0.05 and few events: the
largest rate, which is best while there are none, has a third of the weight. So 370 groups without any event bound their mean by
1 % (with the others it takes 540), and groups with 0.3, 0.5 and 0.7 % take 650, 1,900 and 6,500 on the median.

Assumption: given the past every group's mean is within H0, however its items depend on each other. Bound: by Ville's inequality
the mixture ever reaches 1 / delta with a probability of at most delta, so it may be looked at after each group. Source:
Waudby-Smith and Ramdas, Estimating means of bounded random variables by betting, JRSS B 2024.
"""

import math
from collections.abc import Callable

import numpy as np

from quantdrift.drift.evidence.bound import STAKES
from quantdrift.drift.evidence.observations import FloatArray

RATES = np.array((0.1, 0.2, 0.35, 0.5, 0.7, 0.86, 0.98))
_LOG_WEIGHTS = np.log((0.05, 0.07, 0.09, 0.12, 0.15, 0.18, 0.34))
_LOG_STAKES = np.full(len(STAKES), -math.log(len(STAKES)))
Wealth = Callable[[FloatArray, FloatArray, float], FloatArray]
_STEPS = 60  # bisection: far below the rounding of what is compared with it
_LEAST = 1e-12  # above the smallest value: the mean itself can be bounded no closer


def against_more(sums: FloatArray, values: FloatArray, m: float) -> FloatArray:
    """Return the logarithm of the wealth against means of at least m, (N,); it rises with m.

    Parameters
    ----------
    sums
        (N, k) sums of the weights of each value, in each of N samples.
    values
        (k,) the values; at least two differ.
    m
        Below the largest value.
    """
    reach = values.max() - min(m, 0.0)
    return _mixture(sums, np.log1p(np.outer((m - values) / reach, RATES)), _LOG_WEIGHTS)


def against_less(sums: FloatArray, values: FloatArray, m: float) -> FloatArray:
    """Return the logarithm of the wealth against means of at most m, (N,); it falls with m, which is above the smallest value."""
    reach = m - values.min()
    return _mixture(sums, np.log1p(np.outer((values - m) / reach, STAKES)), _LOG_STAKES)


def upper_bound(sums: FloatArray, values: FloatArray, delta: float) -> float:
    """Return the upper bound of the mean, at most the largest value; parameters as of `against_more`, with sums : (k,)."""
    return _bound(sums, values, delta, against_more, float(values.max()))


def lower_bound(sums: FloatArray, values: FloatArray, delta: float) -> float:
    """Return the lower bound of the mean, at least the smallest value; parameters as of `upper_bound`."""
    return _bound(sums, values, delta, against_less, float(values.min()))


def _bound(
    sums: FloatArray,
    values: FloatArray,
    delta: float,
    wealth: Wealth,
    end: float,
) -> float:
    """Return the mean nearest to the estimate that the wealth refuses; `end` where it refuses none."""
    total, needed = float(sums.sum()), -math.log(delta)
    if total <= 0.0:
        return end
    centre = float((sums * values).sum()) / total
    outermost = end + math.copysign(_LEAST, centre - end)
    if (centre - end) * (centre - outermost) <= 0 or wealth(sums[None], values, outermost).item() < needed:
        return end
    inside, outside = centre, outermost
    for _ in range(_STEPS):
        middle = (inside + outside) / 2
        if middle in {inside, outside}:
            break
        if wealth(sums[None], values, middle).item() >= needed:
            outside = middle
        else:
            inside = middle
    return outside


def _mixture(sums: FloatArray, gains: FloatArray, log_weights: FloatArray) -> FloatArray:
    """Return the logarithm of the mixture of bets; gains : (k, bets) of a group with all of its weight on one value."""
    won = np.zeros((len(sums), len(log_weights)))
    # Value by value, not as a product of matrices: the bits must not depend on how many samples there are.
    for value, gain in enumerate(gains):
        won += sums[:, value, None] * gain
    won += log_weights
    top = won.max(axis=1)
    return np.asarray(top + np.log(np.exp(won - top[:, None]).sum(axis=1)))
