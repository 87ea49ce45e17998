"""The displayed figures of a tail: p95, p99, p99.9 and expected shortfall of a log-spaced histogram, with bands.

The histogram counts groups: an item weighs one over the items of its group, so that counts add up to the number of
groups, histograms of shards add up to that of the whole, and every share is a mean of values in [0, 1].

Bands are time-uniform: with probability at least 0.95 they hold at all sizes of the window at once, while the law
stays the same through it. For x in [0, 1] of mean p and any q in (0, 1), `(q / p)^x ((1 - q) / (1 - p))^(1 - x)` has
mean at most 1 (it is convex in x and linear interpolation has mean 1), so that with S the sum of n of them

    M = B(S + a, n - S + b) / B(a, b) / (p^S (1 - p)^(n - S))

the mixture over q ~ Beta(a, b), is a supermartingale beginning at 1, and passes 1 / alpha with probability at most
alpha. A quantile needs it at one p only, the share above it; the counts at the edges enclose it (Howard and Ramdas,
Sequential estimation of quantiles, Bernoulli 2022). Shortfall integrates a band of all shares, alpha split over edges.
"""

import math
from bisect import bisect_right

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quantdrift.drift.evidence.bound import upper_bounds
from quantdrift.drift.evidence.group import N_TAIL_BINS
from quantdrift.drift.evidence.interval import ALPHA, WeightedEstimate
from quantdrift.drift.evidence.observations import FloatArray

N_BINS = N_TAIL_BINS
SMALLEST, LARGEST = 1e-4, 10.0  # of the metric's unit
EDGES: FloatArray = np.geomspace(SMALLEST, LARGEST, N_BINS - 1)
_EDGES = EDGES.tolist()
_HALVINGS = 60
_TINY = 1e-300  # its logarithm is finite, and as good as that of 0


def tail_bin(x: ArrayLike) -> NDArray[np.intp]:
    """Return the bin of each value: 0 below `SMALLEST`, 63 from `LARGEST` to infinity, geometric between.

    Raises
    ------
    ValueError
        A value is not a number: it has no place, and must not be lost silently.
    """
    values = np.asarray(x, dtype=np.float64)
    if np.isnan(values).any():
        raise ValueError("a divergence that is not a number has no bin: count it separately")
    return np.searchsorted(EDGES, values, side="right")


def bin_of(value: float) -> int:
    """Return the bin of one value that is a number, as `tail_bin` does."""
    return bisect_right(_EDGES, value)


def survival(counts: FloatArray) -> FloatArray:
    """Return the weight at or above each bin, (..., N_BINS + 1), the last being 0."""
    above: FloatArray = np.zeros((*counts.shape[:-1], N_BINS + 1))
    np.cumsum(counts[..., ::-1], axis=-1, out=above[..., -2::-1])
    return above


def point(counts: FloatArray, n: float, q: float) -> float | None:
    """Return the q-quantile alone, or None where fewer than three groups lie above it.

    Parameters
    ----------
    counts
        (N_BINS,) weight per bin, adding up to `n`.
    n
        Number of groups.
    q
        In (0, 1).

    Returns
    -------
    In the metric's unit, log-linear within a bin; `LARGEST` stands for anything above it.
    """
    p = 1.0 - q
    if n * p < 3.0:
        return None
    shares = survival(counts)[1:-1] / n  # at or above each edge
    beyond = int(np.count_nonzero(shares >= p))
    if beyond == N_BINS - 1:
        return LARGEST
    upper, upper_share = float(EDGES[beyond]), float(shares[beyond])
    if beyond == 0:
        return upper * min(q / (1.0 - upper_share), 1.0)
    lower, lower_share = float(EDGES[beyond - 1]), float(shares[beyond - 1])
    part = (lower_share - p) / (lower_share - upper_share)
    return lower * math.exp(part * math.log(upper / lower))


def quantile(counts: FloatArray, n: float, q: float) -> WeightedEstimate | None:
    """Return the q-quantile with its band, or None where n is too small to bound it from above.

    That takes some 4.8 / (1 - q) groups: 95 for p95, 475 for p99, 4,750 for p99.9.

    Parameters
    ----------
    counts, n, q
        As for `point`.
    """
    p = 1.0 - q
    above = survival(counts)[1:-1]
    prior = (1.0, (1.0 - p) / p)  # of mean p, worth 1 / p groups
    if _log_mixture(0.0, n, prior) - n * math.log1p(-p) < math.log(1.0 / ALPHA):
        return None
    mean = point(counts, n, q)
    if mean is None:
        return None
    low, high = 0.0, LARGEST
    for edge, weight in zip(EDGES.tolist(), above.tolist(), strict=True):
        tested = min(weight, n)
        against = tested * math.log(p) + (n - tested) * math.log1p(-p)
        if _log_mixture(tested, n, prior) - against >= math.log(1.0 / ALPHA):
            if tested > n * p:
                low = edge
            else:
                high = edge
                break
    return WeightedEstimate(mean=mean, low=min(low, mean), high=max(high, mean), n=int(n))


def shortfall(counts: FloatArray, n: float, q: float) -> WeightedEstimate | None:
    """Return the mean above the q-quantile with its band; None where `quantile` gives None.

    Values from `LARGEST` on count as `LARGEST`: an infinite divergence has no mean.

    Parameters
    ----------
    counts, n, q
        As for `point`.
    """
    if quantile(counts, n, q) is None:
        return None
    p = 1.0 - q
    above = np.minimum(survival(counts)[1:-1], n)
    low, high = _shares(above, n, ALPHA / len(EDGES))
    shares = above / n
    # (1 / p) * integral of min(S(x), p): S falls, so the edges of a bin enclose it.
    widths = np.diff(EDGES, prepend=0.0)
    least = float((widths * np.minimum(low, p)).sum()) / p
    most = float((widths * np.minimum(np.concatenate(((1.0,), high[:-1])), p)).sum()) / p
    ends = np.stack((np.concatenate(((1.0,), shares[:-1])), shares))
    mean = float((widths * np.minimum(ends, p).mean(axis=0)).sum()) / p
    return WeightedEstimate(mean=mean, low=min(least, mean), high=max(most, mean), n=int(n))


def ceilings(counts: FloatArray, n: float, delta: float) -> FloatArray:
    """Return upper bounds of the shares at or above each bin, (N_BINS,), falling from 1.

    All are valid at once and at all n, except with probability `delta`: see `quantdrift.drift.evidence.bound`.
    """
    above = survival(counts)[:-1]
    bounds = upper_bounds(above, np.full(N_BINS, n), delta / N_BINS)
    bounds[0] = 1.0
    # Sharing a bisection does not keep the last bits in order; the bounds must not rise.
    return np.maximum.accumulate(bounds[::-1])[::-1].copy()


def divergence(mean: FloatArray, p: FloatArray) -> FloatArray:
    """Return kl of two coins with these chances, both (...,), nats; 0 ln 0 is 0."""
    other, rest = 1.0 - mean, np.maximum(1.0 - p, _TINY)
    heads = np.where(mean > 0, mean * np.log(np.where(mean > 0, mean, 1.0) / np.maximum(p, _TINY)), 0.0)
    tails = np.where(other > 0, other * np.log(np.where(other > 0, other, 1.0) / rest), 0.0)
    return np.asarray(heads + tails)


def _log_mixture(weight: float, n: float, prior: tuple[float, float]) -> float:
    a, b = prior
    return _log_beta(weight + a, n - weight + b) - _log_beta(a, b)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _shares(above: FloatArray, n: float, alpha: float) -> tuple[FloatArray, FloatArray]:
    """Return the time-uniform band of each share, from the weights above each edge."""
    need = math.log(1.0 / alpha)
    log_top = np.array([_log_mixture(weight, n, (0.5, 0.5)) for weight in above.tolist()])

    def inside(p: FloatArray) -> NDArray[np.bool_]:
        against = above * np.log(np.maximum(p, _TINY)) + (n - above) * np.log(np.maximum(1.0 - p, _TINY))
        return np.asarray(log_top - against < need)

    bounds = []
    for outer in (0.0, 1.0):
        inner, out = above / n, np.full_like(above, outer)
        for _ in range(_HALVINGS):
            middle = (inner + out) / 2
            good = inside(middle)
            inner, out = np.where(good, middle, inner), np.where(good, out, middle)
        bounds.append(out)
    return bounds[0], bounds[1]
