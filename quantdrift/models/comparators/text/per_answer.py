"""Aggregates per answer of values per position; `owner` : (positions,) is the answer of each position, in order."""

import numpy as np
import numpy.typing as npt

from quantdrift.models.comparators.protocol import Flags, Values

Codes = npt.NDArray[np.int64]


def mean_of_items(values: Values, owner: Codes, n_items: int, where: Flags | None = None) -> Values:
    """Return the mean over each item's positions, added up in their order; NaN if it has none."""
    if where is not None:
        values, owner = values[where], owner[where]
    counts = np.bincount(owner, minlength=n_items)
    with np.errstate(invalid="ignore"):
        total = np.bincount(owner, values, n_items)
        mean: Values = np.divide(total, counts, out=np.full(n_items, np.nan), where=counts > 0)
    return mean


def first_of_items(flags: Flags, owner: Codes, n_items: int) -> Values:
    """Return the first flagged position of each item, from 0; NaN if none is flagged."""
    starts = np.searchsorted(owner, np.arange(n_items))
    positions = np.flatnonzero(flags)
    first = np.full(n_items, np.nan)
    items, index = np.unique(owner[positions], return_index=True)
    first[items] = positions[index] - starts[items]
    return first


def largest_of_items(values: Values, owner: Codes, n_items: int) -> Values:
    """Return the largest of each item's values; NaN if all are NaN."""
    largest = np.full(n_items, -np.inf)
    present = ~np.isnan(values)
    np.maximum.at(largest, owner[present], values[present])
    return np.where(np.isinf(largest), np.nan, largest)
