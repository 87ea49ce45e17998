"""Lengths and directions of vectors, so scaled that nothing overflows on the way."""

import numpy as np

from quantdrift.shadow.comparators.comparator import Values


def length(vectors: Values) -> Values:
    """Return the Euclidean length of each vector of (items, dimensions); infinite where float64 does not hold it."""
    largest = np.abs(vectors).max(axis=1, initial=0.0)
    scale = np.where(largest > 0, largest, 1.0)
    with np.errstate(over="ignore"):
        found: Values = scale * np.sqrt(((vectors / scale[:, np.newaxis]) ** 2).sum(axis=1))
    return found


def direction(vectors: Values) -> Values:
    """Return vectors of (items, dimensions) at length 1; those without a direction stay zero."""
    largest = np.abs(vectors).max(axis=1, initial=0.0, keepdims=True)
    scaled = vectors / np.where(largest > 0, largest, 1.0)
    size = np.sqrt((scaled**2).sum(axis=1, keepdims=True))
    found: Values = scaled / np.where(size > 0, size, 1.0)
    return found


def distance(candidate: Values, reference: Values) -> Values:
    """Return 1 - cos of the angle between directions : (items,), in [0, 2].

    It is taken as |u - v|^2 / 2, which is the same for vectors of length 1, exactly 0 for equal ones, and does not lose
    small angles to rounding.
    """
    found: Values = np.minimum(((candidate - reference) ** 2).sum(axis=1) / 2, 2.0)
    return found
