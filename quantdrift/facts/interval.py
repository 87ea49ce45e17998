"""Intervals of what only roll-ups know: histograms and Kish's effective number. For display: alerts never come from them."""

from collections.abc import Sequence
from math import exp, inf, log, sqrt

import msgspec

from quantdrift.facts.estimate import Estimate

Z = 1.959963984540054  # the 97.5 % quantile of the normal distribution
LOWEST, HIGHEST, N_BINS = 1e-6, 10.0, 64
_STEP = log(HIGHEST / LOWEST) / N_BINS
_LEAST_FOR_MEAN = 30  # below it no normal approximation of a mean is shown
_LEAST_BEYOND = 10  # a quantile is shown where at least this many observations are expected beyond it


class Quantile(msgspec.Struct, frozen=True, kw_only=True):
    """A quantile, or the mean of what lies above one, with its 95 % interval.

    `high` is None where the histogram has no upper bound: in its open last bin. `above` says that `value` itself is only a
    lower bound, since what it depends on lies there.
    """

    probability: float
    value: float
    low: float
    high: float | None
    above: bool = False


def quantile(bins: Sequence[float], probability: float, n_effective: float) -> Quantile | None:
    """Return a quantile of a divergence from its histogram; None where fewer than 10 values are expected beyond it.

    The interval is that of the rank, n p +- z sqrt(n p (1 - p)), widened to the edges of its bins: a bin is a
    factor of 1.29 wide, and nothing finer is known.

    Parameters
    ----------
    bins
        (64,): weights per log-spaced bin from 1e-6 to 10.
    probability
        Between 0 and 1.
    n_effective
        Effective number of exchanges.
    """
    if n_effective * (1 - probability) < _LEAST_BEYOND or sum(bins) <= 0:
        return None
    half = Z * sqrt(probability * (1 - probability) / n_effective)
    low, _ = _bin_of(bins, max(probability - half, 0.0))
    index, within = _bin_of(bins, probability)
    high, _ = _bin_of(bins, min(probability + half, 1.0))
    return Quantile(
        probability=probability,
        value=_edge(index if index == N_BINS - 1 else index + within),
        low=_edge(low) if low else 0.0,
        high=None if high == N_BINS - 1 else _edge(high + 1),
        above=index == N_BINS - 1,
    )


def shortfall(bins: Sequence[float], probability: float, n_effective: float) -> Quantile | None:
    """Return the mean of a divergence above a quantile; None where `quantile` gives None.

    Values of the open last bin, which begins at 7.8, count as its lower edge: the mean is then a lower bound.

    The interval is normal in the logarithm, with the variance of max(x - q, 0) over (1 - p)^2 n, q the quantile: a mean
    above an estimated quantile varies no more than one above a known one. It is widened to the edges of the bins. With
    ten exchanges beyond the quantile and a heavy tail it covers the true value in nine of ten periods, with more
    exchanges in all but a few.

    Parameters
    ----------
    bins, probability, n_effective
        As for `quantile`.

    References
    ----------
    Chen (2008), Nonparametric estimation of expected shortfall, Journal of Financial Econometrics 6.
    """
    total, beyond = sum(bins), 1 - probability
    if n_effective * beyond < _LEAST_BEYOND or total <= 0:
        return None
    first, within = _bin_of(bins, probability)
    shares = [weight / total for weight in bins[first:]]
    shares[0] *= 1 - within
    edge = _edge(first + within)
    begins = [_edge(index) if index else 0.0 for index in range(first, N_BINS)]
    ends = [_edge(index + 1) for index in range(first, N_BINS)]
    means = [_middle(max(begin, edge), end) for begin, end in zip(begins, ends, strict=True)]
    # The last bin holds all larger values: nothing but its lower edge is known.
    above_all = shares[-1] > 0
    means[-1] = begins[-1]

    def mean(values: Sequence[float]) -> float:
        return sum(share * value for share, value in zip(shares, values, strict=True)) / beyond

    value = mean(means)
    over = [max(value - edge, 0.0) for value in means]
    variance = max(beyond * mean([value * value for value in over]) - (beyond * mean(over)) ** 2, 0.0)
    spread = min(Z * sqrt(variance / n_effective) / (beyond * value), 20.0)
    return Quantile(
        probability=probability,
        value=value,
        low=min(mean(begins) * exp(-spread), value),
        high=None if above_all else max(min(mean(ends) * exp(spread), HIGHEST), value),
        above=above_all,
    )


def excess(estimate: Estimate | None, budget: float | None) -> float:
    """Return the lower bound divided by the budget: above 1 the budget is exceeded beyond chance. -inf if unknown."""
    if estimate is None or not budget:
        return -inf
    return (estimate.mean if estimate.low is None else estimate.low) / budget


def _middle(begin: float, end: float) -> float:
    """Return the mean of an interval over which the logarithm is uniform."""
    return (end - begin) / log(end / begin) if end > begin * (1 + 1e-9) else begin


def _edge(position: float) -> float:
    return LOWEST * exp(position * _STEP)


def _bin_of(bins: Sequence[float], probability: float) -> tuple[int, float]:
    """Return the bin that holds the quantile, and where in it: from 0 to 1 of its logarithmic width."""
    wanted, below, last = probability * sum(bins), 0.0, 0
    for index, weight in enumerate(bins):
        if weight > 0:
            if below + weight >= wanted:
                return index, max(0.0, (wanted - below) / weight)
            last = index
        below += weight
    return last, 1.0
