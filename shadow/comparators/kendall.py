"""Kendall's rank correlation of many pairs of short lists at once."""

import numpy as np
import numpy.typing as npt

from quantdrift.shadow.comparators.comparator import Flags, Values

Ranks = npt.NDArray[np.int64]


def tau(first: Values, second: Values, kept: Flags) -> Values:
    """Return tau-b of each item : (items,), in [-1, 1]; NaN where a side holds nothing but equal values.

    With c concordant and d discordant pairs of all n0, n1 and n2 of which are tied on one side or the other,
    `tau-b = (c - d) / sqrt((n0 - n1) (n0 - n2))` (Kendall, The treatment of ties in ranking problems, Biometrika, 1945).
    Discordant pairs are the inversions of one side in the order of the other (Knight, A computer method for calculating
    Kendall's tau with ungrouped data, Journal of the American Statistical Association, 1966), counted in
    O(n log n) for all items at once.

    Parameters
    ----------
    first, second
        (items, things), none of the kept ones NaN.
    kept
        (items, things): the others are left out.
    """
    # What is left out is tied with nothing: it comes last, in the same order on both sides.
    x, y = _dense(first, kept), _dense(second, kept)
    order = np.lexsort((y, x), axis=1)
    n_discordant = _inversions(np.take_along_axis(y, order, axis=1))
    n = kept.sum(axis=1).astype(np.float64)
    pairs = n * (n - 1) / 2
    tied_x, tied_y = _ties(x), _ties(y)
    tied_both = _ties(_dense((x * (x.shape[1] + 1) + y).astype(np.float64), kept))
    score = pairs - tied_x - tied_y + tied_both - 2 * n_discordant
    untied = np.sqrt((pairs - tied_x) * (pairs - tied_y))
    return np.where(untied > 0, score / np.where(untied > 0, untied, 1.0), np.nan)


def _dense(values: Values, kept: Flags) -> Ranks:
    """Return ranks from 0 in which equal values are equal; what is not kept has the highest, each its own."""
    order = np.lexsort((np.where(kept, values, 0.0), ~kept), axis=1)
    ranked = np.take_along_axis(values, order, axis=1)
    new = (ranked[:, 1:] != ranked[:, :-1]) | ~np.take_along_axis(kept, order, axis=1)[:, 1:]
    ranks = np.zeros(values.shape, dtype=np.int64)
    np.put_along_axis(ranks, order[:, 1:], np.cumsum(new, axis=1), axis=1)
    return ranks


def _ties(ranks: Ranks) -> Values:
    """Return how many pairs of each item are equal."""
    n_items, n = ranks.shape
    rows = np.arange(n_items)[:, np.newaxis] * n
    sizes = np.bincount((ranks + rows).ravel(), minlength=n_items * n).reshape(n_items, n).astype(np.float64)
    ties: Values = (sizes * (sizes - 1) / 2).sum(axis=1)
    return ties


def _inversions(ranks: Ranks) -> Values:
    """Return how many pairs of each item stand in falling order.

    Such a pair differs first in some bit, the larger one standing before: for each bit, highest first, those are counted
    that are equal in all above it.
    """
    found = np.zeros(len(ranks))
    for bit in reversed(range(int(ranks.shape[1]).bit_length())):
        above, ones = ranks >> (bit + 1), (ranks >> bit) & 1
        before = np.cumsum(ones, axis=1) - ones
        begins = np.diff(above, axis=1, prepend=-1) > 0
        of_group = before - np.maximum.accumulate(np.where(begins, before, 0), axis=1)
        found += np.where(ones == 0, of_group, 0).sum(axis=1)
        ranks = np.take_along_axis(ranks, np.argsort(ranks >> bit, axis=1, kind="stable"), axis=1)
    return found
