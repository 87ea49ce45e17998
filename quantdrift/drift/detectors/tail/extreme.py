"""p99.9 of a small slice, from the shape of its tail: shown as an estimate without a band, never a reason to alarm.

Above a high threshold u excesses follow a generalised Pareto law, `P(Y > y) = (1 - k y / s)^(1 / k)` (k = 0:
exponential; k < 0: heavy). Its two parameters come from probability-weighted moments, which behave well in small
samples: with `a0 = E[Y]` and `a1 = E[Y (1 - F(Y))]`,

    k = a0 / (a0 - 2 a1) - 2,   s = 2 a0 a1 / (a0 - 2 a1)

(Hosking and Wallis, Parameter and quantile estimation for the generalized Pareto distribution, Technometrics 1987).
They need k > -1/2: with a heavier tail, or few groups, nothing is returned rather than an arbitrary number.
"""

import math

import numpy as np

from quantdrift.drift.detectors.tail.quantile import EDGES, LARGEST, N_BINS, survival
from quantdrift.drift.evidence.observations import FloatArray

TOP = 0.05  # of the groups are taken for the tail
LEAST_GROUPS = 1000  # 50 in the tail
_HEAVIEST = -0.5
_FLAT = 1e-6  # |k| below it: the exponential limit


def extreme_quantile(counts: FloatArray, n: float, q: float) -> float | None:
    """Return the q-quantile extrapolated from the top 5 %, or None where the tail does not support it.

    Parameters
    ----------
    counts
        (N_BINS,) weight per bin of the grid of `quantdrift.drift.detectors.tail.quantile`, adding up to `n`.
    n
        Number of groups; at least 1,000.
    q
        In (0.95, 1).

    Returns
    -------
    In the metric's unit, at most `LARGEST`.
    """
    if n < LEAST_GROUPS or not 1.0 - TOP < q < 1.0:
        return None
    shares = survival(counts) / n
    first = int(np.count_nonzero(shares[:-1] >= TOP))  # first bin with less than the top 5 % at or above it
    if first >= N_BINS - 1 or counts[-1] > 0 or shares[first] * n < LEAST_GROUPS * TOP / 2:
        return None
    threshold = float(EDGES[first - 1])
    weight = counts[first:-1] / n / shares[first]
    excess = np.sqrt(EDGES[first - 1 : -1] * EDGES[first:]) - threshold
    above = np.append(np.cumsum(weight[::-1])[::-1], 0.0)
    mean = float((weight * excess).sum())
    moment = float((weight * excess * (above[:-1] + above[1:]) / 2).sum())
    if mean <= 2 * moment:
        return None
    k = mean / (mean - 2 * moment) - 2
    if k <= _HEAVIEST:
        return None
    scale = 2 * mean * moment / (mean - 2 * moment)
    logarithm = math.log((1.0 - q) / float(shares[first]))
    if logarithm >= 0:
        return None
    rise = -logarithm * scale if abs(k) < _FLAT else scale * -math.expm1(k * logarithm) / k
    return min(threshold + rise, LARGEST)
