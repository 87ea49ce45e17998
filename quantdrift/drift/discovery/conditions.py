"""The single conditions that a search combines: an attribute's values, and a feature's quantile bins and their ends.

Edges are rounded to some three places of the feature's spread and then to what their text says, so that the slice a
person reads is the slice that is tested, and tomorrow's search finds it under the same text more often than not.
"""

import itertools
import math
from collections.abc import Iterator

import numpy as np

from quantdrift.core.records import Predicate
from quantdrift.drift.discovery.items import SearchItems
from quantdrift.drift.evidence.observations import BoolArray, FloatArray

_STEPS = 50.0  # of the middle nine tenths of a feature
_LEAST_SPREAD = 1e-300  # below it there is no float to round to


def conditions_of(
    items: SearchItems, least_share: float, n_bins: int
) -> Iterator[tuple[Predicate, BoolArray]]:
    """Yield every condition that holds for a share of at least `least_share` of the weight, and not for all.

    Parameters
    ----------
    items
        The items that the conditions are made from.
    least_share
        In (0, 1).
    n_bins
        Quantile bins of a feature, at least 2.

    Yields
    ------
    A condition, and which items, (N,), meet it.
    """
    least = least_share * float(items.weight.sum())
    for condition in _wanted(items, least, n_bins):
        holds = items.members((condition,))
        if float(items.weight[holds].sum()) >= least and not holds.all():
            yield condition, holds


def edges_of(values: FloatArray, n_bins: int) -> list[float]:
    """Return up to `n_bins` - 1 rounded, rising quantiles of the values that are numbers.

    None where they hardly differ, or further than a float can say: one odd input must not end a search.
    """
    finite = values[np.isfinite(values)]
    if len(finite) < n_bins:
        return []
    with np.errstate(over="ignore", invalid="ignore"):
        low, high = np.quantile(finite, (0.05, 0.95)).tolist()
    spread = (high - low) or float(finite.max()) - float(finite.min())
    if not _LEAST_SPREAD <= spread < math.inf:
        return []
    step = 10.0 ** math.floor(math.log10(spread / _STEPS))
    quantiles = np.quantile(finite, np.arange(1, n_bins) / n_bins)
    return sorted({float(f"{round(float(q) / step) * step:g}") for q in quantiles})


def _wanted(items: SearchItems, least: float, n_bins: int) -> Iterator[Predicate]:
    for key, levels in sorted(items.levels.items()):
        weight = np.bincount(items.codes[key] + 1, weights=items.weight, minlength=len(levels) + 1)[1:]
        for code in np.flatnonzero(weight >= least):
            yield Predicate(key=key, equals=levels[code])
    for key, values in sorted(items.numbers.items()):
        edges = edges_of(values, n_bins)
        for edge in edges:
            yield Predicate(key=key, high=edge)
            yield Predicate(key=key, low=edge)
        for low, high in itertools.pairwise(edges):
            yield Predicate(key=key, low=low, high=high)
