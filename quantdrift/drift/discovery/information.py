"""The information of attributes and features: if there are too many of them, a search uses the most informative ones.

The information of a key is the entropy, in nats, of the slices that a search could make with it:

    H = - sum over classes of p log p,    p a class's share of the weight

The classes of an attribute are its values that have at least the smallest share of a slice, and one class for all else:
items without the attribute, and values too rare to be a slice. The classes of a feature are its quantile bins, and one
for items without it. So a key with one value for all items has no information, and neither has a request id; four values
with equal shares have ln 4. The divergence plays no part: a few thousand items have too few flips to choose by them.

Source: Shannon, A mathematical theory of communication, 1948.
"""

from collections.abc import Collection, Mapping

import numpy as np

from quantdrift.core.records import Metric
from quantdrift.drift.discovery.conditions import edges_of
from quantdrift.drift.discovery.items import MOST_KEYS, Gathering, SearchItems
from quantdrift.drift.evidence.observations import FloatArray

GLIMPSED = 2_000  # items from which the keys are chosen
_MOST_GLIMPSED = 1_024  # largest number of keys among them


class KeyChoice:
    """The choice of the keys that a search uses, by the first `GLIMPSED` items; it takes items as `Gathering` does.

    Parameters
    ----------
    least_share
        Smallest share of a slice, in (0, 1).
    n_bins
        Quantile bins of a feature, at least 2.
    first
        See `informative_keys`.
    """

    def __init__(self, least_share: float, n_bins: int, first: Collection[str] = ()) -> None:
        self._least_share, self._n_bins, self._first = least_share, n_bins, first
        self._first_items: list[_Item] = []
        self._gathering: Gathering | None = None

    def add(
        self,
        exchange: str,
        pi: float,
        attributes: Mapping[str, str],
        features: Mapping[str, float],
        signals: Mapping[Metric, float | None],
    ) -> None:
        """Add one item; parameters as in `Gathering.add`."""
        if self._gathering is not None:
            self._gathering.add(exchange, pi, attributes, features, signals)
            return
        self._first_items.append((exchange, pi, attributes, features, signals))
        if len(self._first_items) == GLIMPSED:
            self._gathering = self._chosen()

    def items(self) -> SearchItems:
        """Return the added items."""
        return (self._gathering or self._chosen()).items()

    def _chosen(self) -> Gathering:
        sample = Gathering(most_keys=_MOST_GLIMPSED)
        for item in self._first_items:
            sample.add(*item)
        keys = informative_keys(sample.items(), self._least_share, self._n_bins, first=self._first)
        gathering = Gathering(keys)
        for item in self._first_items:
            gathering.add(*item)
        self._first_items = []
        return gathering


_Item = tuple[str, float, Mapping[str, str], Mapping[str, float], Mapping[Metric, float | None]]


def informative_keys(
    items: SearchItems, least_share: float, n_bins: int, *, first: Collection[str] = (), most: int = MOST_KEYS
) -> tuple[str, ...]:
    """Return the attributes and features with the most information, the best first; equal ones by name.

    Parameters
    ----------
    items
        A part of the traffic.
    least_share
        Smallest share of a slice, in (0, 1).
    n_bins
        Quantile bins of a feature, at least 2.
    first
        Keys that come before all others: what is watched or tested already must be recognised.
    most
        How many.
    """
    information = {key: attribute_information(items, key, least_share) for key in items.levels}
    information |= {key: feature_information(items, key, n_bins) for key in items.numbers}
    best = sorted(information, key=lambda key: (key not in first, -information[key], key))
    return tuple(best[:most])


def attribute_information(items: SearchItems, key: str, least_share: float) -> float:
    """Return the information of an attribute, nats."""
    n_values = len(items.levels[key])
    weight = np.bincount(items.codes[key] + 1, weights=items.weight, minlength=n_values + 1)
    own = weight[1:][weight[1:] >= least_share * weight.sum()]
    return _entropy(np.append(own, weight.sum() - own.sum()))


def feature_information(items: SearchItems, key: str, n_bins: int) -> float:
    """Return the information of a feature, nats."""
    values = items.numbers[key]
    edges = edges_of(values, n_bins)
    bin_of = np.searchsorted(np.array(edges), values, side="right")
    bin_of[np.isnan(values)] = len(edges) + 1
    return _entropy(np.bincount(bin_of, weights=items.weight).astype(np.float64))


def _entropy(weight: FloatArray) -> float:
    # A rounding remainder of a difference of sums is not a class.
    kept = weight[weight > 1e-9 * weight.sum()]
    share = kept / kept.sum()
    return float(-(share * np.log(share)).sum()) if len(kept) else 0.0
