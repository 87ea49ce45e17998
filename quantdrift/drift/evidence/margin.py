"""Margin bins: a fixed grid over the gap between the two top probabilities, where flips are to be found.

It is fixed so that what was counted on it stays comparable: baselines are kept per bin, and whoever needs strata of
equal weight merges neighbours.
"""

import math
from bisect import bisect_right

N_BINS = 16
EDGES: tuple[float, ...] = tuple(round(0.001 * 10 ** (step / 5), 12) for step in range(N_BINS - 1))


def margin_bin(margin: float | None) -> int:
    """Return the bin of a margin in [0, 1], half-open; what has none is in the last, with the surest."""
    return N_BINS - 1 if margin is None or math.isnan(margin) else bisect_right(EDGES, margin)
