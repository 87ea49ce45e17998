"""The test for recovery from a breach: the mirror image of the alarm, on the same clipped signal.

H0 "mean >= m". `D_k <- (D_k + 1) * (1 + lambda_k (v m - vx))`, lambda_k = c_k / (1 - m); resolved at mean D >= 1e4.

Assumption: x in [0, 1], v <= 1. Bound: while the mean stays at m or above, P(resolved within n groups) <= n / 1e4 at
a mean of exactly m, and falls exponentially with the distance above it. An e-Shiryaev-Roberts
procedure on the sample clock (Shin, Ramdas, Rinaldo, arXiv 2203.03532). Delay: with m = 1 % and no flips at all
some 620 groups; weaker thresholds flap.
"""

import numpy as np

from quantdrift.drift.evidence.numba_cache import compiled
from quantdrift.drift.evidence.observations import FloatArray

BETS = np.array((0.15, 0.3, 0.5, 0.7, 0.9))
RESOLVED = 1e4
CEILING = 1e30  # one signal may have recovered for months while another of its slice has not


@compiled
def reflect(mirror: FloatArray, m: float, z: float) -> None:
    """Add one observation of an alerting signal to D, (5,), in place.

    Parameters
    ----------
    mirror
        D before it.
    m
        The mean that must not be passed, in [0, 1).
    z
        `vx - v m`.
    """
    for k in range(len(BETS)):
        mirror[k] = min((mirror[k] + 1.0) * (1.0 - BETS[k] / (1.0 - m) * z), CEILING)


@compiled
def recovered(mirror: FloatArray) -> float:
    """Return mean D, from (5,)."""
    total = 0.0
    for k in range(len(BETS)):
        total += mirror[k]
    return total / len(BETS)
