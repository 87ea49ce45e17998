"""The matching of new centroids to old ones, which keeps a cluster's id over refits."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

LIMIT: Final = 1.0

Array = npt.NDArray[Any]


def match_centroids(
    old: Array, old_spreads: Array, new: Array, new_spreads: Array, *, limit: float = LIMIT
) -> list[int | None]:
    """Return for each new centroid the old one that it continues, or None.

    Old i and new j cost min(1, ||o_i - n_j|| / (limit * (s_i + s_j) / 2)), and the Hungarian method finds the
    pairs with the smallest sum, each centroid in at most one (Kuhn 1955). Only pairs that cost less than 1 count: centroids
    further from each other than `limit` spreads are two clusters. Costs are cut at 1 and not infinite beyond it. Otherwise
    clusters that have not moved would pass their ids to their neighbours, only to make one more pair.

    The result does not depend on the order of either side, except if two sums are equal.

    Parameters
    ----------
    old : (m, width)
        Centroids, scaled like `new`.
    old_spreads : (m,)
        Root mean square distances of the vectors from their centroid; above 0.
    new : (k, width)
        Centroids.
    new_spreads : (k,)
        Root mean square distances of their vectors; above 0.
    limit
        Farthest that a cluster may have moved, in spreads.
    """
    matches: list[int | None] = [None] * len(new)
    if len(old) == 0 or len(new) == 0:
        return matches
    from scipy.optimize import linear_sum_assignment  # noqa: PLC0415 -- 0.1 s, which every monitor would spend at its start

    distances = np.linalg.norm(
        old[:, np.newaxis].astype(np.float64) - new[np.newaxis].astype(np.float64), axis=2
    )
    allowed = limit * (old_spreads[:, np.newaxis] + new_spreads[np.newaxis]) / 2
    costs = np.minimum(distances / allowed, 1.0)
    for i, j in zip(*linear_sum_assignment(costs), strict=True):
        if costs[i, j] < 1.0:
            matches[int(j)] = int(i)
    return matches
