"""Whether a breach is over: the mirror image of the alarm, on the same clipped signal.

H0 "mean >= m". `D_k <- (D_k + 1) * (1 + lambda_k (v m - vx))`, lambda_k = c_k / (1 - m); resolved at mean D >= 1e4.

Assumption: x in [0, 1], v <= 1. Bound: while the mean stays at m or above, P(resolved within n groups) <= n / 1e4 at
a mean of exactly m, and falls exponentially with the distance above it. An e-Shiryaev-Roberts
procedure on the sample clock (Shin, Ramdas, Rinaldo, arXiv 2203.03532). Delay: with m = 1 % and no flips at all
some 620 groups; weaker thresholds flap.
"""

import numpy as np

from quantdrift.drift.block import BoolArray, FloatArray, Steps

BETS = np.array((0.15, 0.3, 0.5, 0.7, 0.9))
RESOLVED = 1e4
CEILING = 1e30  # one signal may be sure for months while another of its slice is not


def mirror(
    steps: Steps, start: FloatArray, m: FloatArray, z: FloatArray, running: BoolArray
) -> tuple[FloatArray, FloatArray]:
    """Return mean D after each group, (groups,), and D after each signal's last, (N, 5).

    Parameters
    ----------
    steps
        Who has how many groups.
    start
        (N, 5) before the first group.
    m
        (N,) the mean that must not be passed, in (0, 1).
    z
        (groups,) `vx - v m`.
    running
        (groups,) where there is an observation of a signal that is alerting.
    """
    if not running.any():
        return (start.sum(axis=1) / len(BETS))[steps.row], start
    rate = BETS / (1.0 - m)[:, None]
    factor = 1.0 - np.where(running, z, 0.0)[:, None] * rate[steps.row]
    grown = np.minimum(steps.grow(start, factor, factor * running[:, None]), CEILING)
    return grown.sum(axis=1) / len(BETS), grown[steps.last]
