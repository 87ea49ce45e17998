"""Whether a breach is over: the mirror image of the alarm, on the same clipped signal.

H0 "mean >= m". `D_k <- (D_k + 1) * (1 + lambda_k (v m - vx))`, lambda_k = c_k / (1 - m); resolved at mean D >= 1e4.

Assumption: x in [0, 1], v <= 1. Bound: while the mean stays at m or above, P(resolved within n groups) <= n / 1e4 at
a mean of exactly m, and falls exponentially with the distance above it. Source: STATISTICS 7, an e-Shiryaev-Roberts
procedure on the sample clock (Shin, Ramdas, Rinaldo, arXiv 2203.03532). Delay: with m = 1 % and no flips at all some
some 620 groups; weaker thresholds flap.
"""

import numpy as np

from quantdrift.drift.block import FloatArray, accumulate

BETS = np.array((0.15, 0.3, 0.5, 0.7, 0.9))
RESOLVED = 1e4
CEILING = 1e30  # one signal may be sure for months while another of its slice is not


def mirror(start: FloatArray, m: FloatArray, z: FloatArray, running: FloatArray) -> FloatArray:
    """Return D after each step, (steps, N, 5).

    Parameters
    ----------
    start
        (N, 5) before the first step.
    m
        (N,) the mean that must not be passed, in (0, 1).
    z
        (steps, N) `vx - v m`; 0 where there is no observation.
    running
        (steps, N) 1.0 where there is an observation of a signal that is alerting, else 0.0.
    """
    rate = BETS / (1.0 - m)[:, None]
    factor = 1.0 - z[:, :, None] * rate
    product = accumulate(np.multiply, factor)
    before = np.concatenate((np.ones((1, *start.shape)), product[:-1]))
    grown = product * (start + accumulate(np.add, running[:, :, None] / before))
    return np.asarray(np.minimum(grown, CEILING))
