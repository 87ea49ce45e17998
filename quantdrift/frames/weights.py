"""Weighted means and quantiles of sampled items.

A sampled item stands for 1 / (its sampling probability) items of the traffic. The column `weight` of `Tables.items` says so.
An unweighted mean describes the sample, not the traffic.
"""

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from quantdrift.facts.interval import HIGHEST, LOWEST, N_BINS


def weighted_mean(values: ArrayLike, weights: ArrayLike) -> float:
    """Return sum(w x) / sum(w) over the items that have a value (the ratio estimator of Hajek, 1971).

    Parameters
    ----------
    values, weights
        (n,) each; a column of any frame. Missing values (NaN or None) are left out, with their weights.

    Returns
    -------
    NaN if no item has a value.

    Raises
    ------
    ValueError
        The lengths differ, or a weight is negative or missing.
    """
    x, w = _known(values, weights)
    return float((w * x).sum() / w.sum()) if w.sum() > 0 else float("nan")


def weighted_quantile(values: ArrayLike, weights: ArrayLike, p: float) -> float:
    """Return the smallest value that at least a share `p` of the weight does not exceed (the inverse of Hajek's cdf).

    Parameters and errors are those of `weighted_mean`.

    Parameters
    ----------
    p
        In [0, 1].

    Returns
    -------
    One of the values, infinity included; NaN if no item has a value.
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"p is {p}, and must be in [0, 1]")
    x, w = _known(values, weights)
    x, w = x[w > 0], w[w > 0]
    if not len(x):
        return float("nan")
    order = np.argsort(x, kind="stable")
    cumulated = np.cumsum(w[order])
    index = np.searchsorted(cumulated, p * cumulated[-1] * (1.0 - 1e-12), side="left")
    return float(x[order][min(int(index), len(x) - 1)])


def divergence_edges() -> NDArray[np.float64]:
    """Return the edges of the bins in `divergence_bins` of the views, (65,): log-spaced from 1e-6 to 10, the first 0, the last infinite.

    `numpy.histogram(items["divergence"], divergence_edges(), weights=items["weight"])` counts in the same bins.
    """
    edges = np.geomspace(LOWEST, HIGHEST, N_BINS + 1)
    edges[0], edges[-1] = 0.0, np.inf
    return edges


def _known(values: ArrayLike, weights: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return values and weights of the items that have a value."""
    x, w = floats(values), floats(weights)
    if x.shape != w.shape or x.ndim != 1:
        raise ValueError(
            f"values have the shape {x.shape} and weights {w.shape}: one weight for each value is needed"
        )
    if np.isnan(w).any() or (w < 0).any():
        raise ValueError("a weight is missing or negative")
    has_value = ~np.isnan(x)
    return x[has_value], w[has_value]


def floats(column: Any) -> NDArray[np.float64]:
    """Return a column of any frame as numbers, with NaN for what is missing: pandas and Arrow have objects where a truth value is missing."""
    if isinstance(column, pa.Array | pa.ChunkedArray):
        column = column.to_numpy(zero_copy_only=False)
    elif type(column).__module__.startswith("pandas"):
        column = column.to_numpy(dtype=np.float64, na_value=np.nan)
    elif hasattr(column, "to_numpy"):
        column = column.to_numpy()
    numbers: NDArray[np.float64] = np.asarray(column, dtype=np.float64)
    return numbers
