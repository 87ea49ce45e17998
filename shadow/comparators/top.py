"""The k largest values of each item."""

import numpy as np

from quantdrift.shadow.comparators.comparator import Flags, Values


def top_set(values: Values, k: int) -> Flags:
    """Return which values are among the k largest ones : (items, values); of equal values the first ones are.

    Parameters
    ----------
    values
        (items, values), none of them NaN.
    k
        From 1 to the number of values.
    """
    threshold = np.partition(values, -k, axis=1)[:, -k, np.newaxis]
    above = values > threshold
    level = values == threshold
    room = k - above.sum(axis=1, keepdims=True)
    chosen: Flags = above | (level & (np.cumsum(level, axis=1) <= room))
    return chosen
