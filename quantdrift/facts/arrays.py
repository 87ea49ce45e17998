"""Sums over clusters of values in memory: the same as `quantdrift.storage.figures.estimates` takes from the tables."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quantdrift.facts.estimate import ClusterSums, SharedSums

Floats = NDArray[np.float64]
Codes = NDArray[np.int64]


class Sample(NamedTuple):
    """Items with a value; all (n,).

    Parameters
    ----------
    value
        At least 0.
    weight
        So many items of the traffic each stands for; the items of an exchange share its weight.
    cluster, exchange
        Numbers from 0 of its cluster and of its exchange.
    """

    value: Floats
    weight: Floats
    cluster: Codes
    exchange: Codes


def cluster_sums(sample: Sample) -> ClusterSums:
    """Return the sums over the clusters of a sample."""
    if not len(sample.value):
        return ClusterSums()
    present = np.bincount(sample.cluster) > 0
    w, y = (sums[present] for sums in _of_clusters(sample, int(sample.cluster.max()) + 1))
    return ClusterSums(
        n=len(w),
        weight=float(w.sum()),
        weight_sq=float((w * w).sum()),
        total=float(y.sum()),
        total_sq=float((y * y).sum()),
        cross=float((w * y).sum()),
        heaviest=float(np.bincount(sample.exchange, sample.weight).max()),
        largest=float(w.max()),
    )


def shared_sums(old: Sample, new: Sample) -> SharedSums:
    """Return the sums over the clusters that two samples share; both number their clusters alike."""
    if not (len(old.value) and len(new.value)):
        return SharedSums()
    n = int(max(old.cluster.max(), new.cluster.max())) + 1
    (w_old, y_old), (w_new, y_new) = _of_clusters(old, n), _of_clusters(new, n)
    return SharedSums(
        weights=float(w_old @ w_new),
        old_total=float(y_old @ w_new),
        new_total=float(w_old @ y_new),
        totals=float(y_old @ y_new),
    )


def _of_clusters(sample: Sample, n: int) -> tuple[Floats, Floats]:
    """Return weight and weighted total of each cluster, (n,)."""
    w: Floats = np.bincount(sample.cluster, sample.weight, minlength=n).astype(np.float64)
    y: Floats = np.bincount(sample.cluster, sample.weight * sample.value, minlength=n).astype(np.float64)
    return w, y
