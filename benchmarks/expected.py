"""What detection should take: the shipped bets on independent flips of the same rate."""

import math

import numpy as np

from quantdrift.drift import budget
from quantdrift.drift.detector import BUDGET

_STREAMS = 400
_MOST = 20_000


def expected_samples(
    p: float, m: float, gamma: float, threshold: float
) -> tuple[int | None, int | None, int | None]:
    """Return the 10 %, 50 % and 90 % quantile of the samples from onset to alarm.

    The recursion of `quantdrift.drift.budget` on simulated, independent 0/1 flips with probability p and weight 1,
    seeded. None where the alarm does not come within 20,000 samples.

    Parameters
    ----------
    p
        Probability of a flip after the onset.
    m
        Budget.
    gamma
        Calendar mass per sample.
    threshold
        Evidence that pages.
    """
    rates = BUDGET.fresh(budget=m, scale=1.0, weighted=False, mass=0.0, at_us=0)[budget.RATES]
    rng = np.random.default_rng(1)
    evidence = np.zeros((_STREAMS, len(rates)))
    delay = np.full(_STREAMS, np.inf)
    for n in range(1, _MOST + 1):
        flips = (rng.random(_STREAMS) < p).astype(float)
        evidence = (evidence + gamma) * (1 + rates * (flips[:, None] - m))
        delay[(evidence.mean(axis=1) >= threshold) & np.isinf(delay)] = n
        if np.isfinite(delay).all():
            break
    found = [float(np.quantile(delay, q, method="lower")) for q in (0.1, 0.5, 0.9)]
    low, median, high = (int(x) if math.isfinite(x) else None for x in found)
    return low, median, high
