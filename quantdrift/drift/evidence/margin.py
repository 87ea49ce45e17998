"""Margin bins: a fixed grid over the margin, the gap between the two top probabilities.

It is fixed so that counts stay comparable: baselines are kept per bin, and strata of equal weight are made by merging
neighbours.
"""

import math
from bisect import bisect_right

N_BINS = 16
EDGES: tuple[float, ...] = tuple(round(0.001 * 10 ** (step / 5), 12) for step in range(N_BINS - 1))


def margin_bin(margin: float | None) -> int:
    """Return the bin of a margin in [0, 1], half-open; an item without a margin is in the last bin, that of the largest."""
    return N_BINS - 1 if margin is None or math.isnan(margin) else bisect_right(EDGES, margin)
