"""The 95 % interval of the difference between two versions, clustered by session. For display: alerts never come from it."""

from enum import StrEnum
from math import exp, sqrt

from quantdrift.report.interval import Estimate, Z, share
from quantdrift.storage.report.facts import ClusterSums

_LEAST_EVENTS = 10  # of clusters of one size, below it no linearised variance is believed
_LEAST_CLUSTERS = 30  # below it no normal approximation of a mean divergence is shown


class Change(StrEnum):
    """What an interval of a difference shows; in the order worst first."""

    WORSE = "worse"
    UNCLEAR = "no clear difference"
    BETTER = "better"


def clustered_share(sums: ClusterSums) -> Estimate | None:
    """Return a share of exchanges with Wilson's interval at the effective number of independent clusters.

    Assumption: clusters (sessions, or exchanges without a session) are independent, and the sampling probabilities are
    known. Inside a cluster any dependence is allowed.

    Bound: for one look, 95 % asymptotically. The effective number is p (1 - p) / V, V the variance of the weighted mean
    linearised over clusters, n / (n - 1) sum((y - p w)^2) / weight^2, times (z / t)^2 with the quantile of Student's t at one
    degree of freedom less than there are effective events, total^2 / total_sq (of the rarer of changed and unchanged). V is known
    badly from few of them, and worse where few clusters have most of the weight: below 10 sqrt(n / n_Kish) effective events the
    number is at most Kish's, n_Kish = weight^2 / weight_sq with a cluster as one unit, which treats the exchanges of a cluster
    as all alike. Where nothing or everything flipped V is 0, and Kish's number gives an interval that is not empty.

    By simulation (`tests.statistical.test_difference`), with sessions of 1 to 200 exchanges, all correlations and weights: it covers
    in 93 to 99 % of periods, and is at most 1.2 times as wide as the normal interval of V where Kish's number does not bound it.

    References
    ----------
    Wilson (1927), JASA 22; Kish (1965), Survey Sampling; Korn and Graubard (1998), Confidence intervals for proportions
    with small expected number of positive counts estimated from survey data, Survey Methodology 24.
    """
    if not sums.weight:
        return None
    mean = min(sums.total / sums.weight, 1.0)
    n = sums.weight**2 / sums.weight_sq
    variance = _variance(sums, mean)
    if variance > 0:
        of_variance, n_events = mean * (1 - mean) / variance, _effective_events(sums)
        careful = min(n, of_variance)
        is_known = n_events >= _LEAST_EVENTS * sqrt(sums.n / n)
        n = max(careful, of_variance * (Z / _t(n_events - 1)) ** 2) if is_known else careful
    return share(mean, n) if n > 0 else Estimate(mean=mean, low=None, high=None)


def clustered_mean(sums: ClusterSums, cap: float) -> Estimate | None:
    """Return a mean divergence with an interval that is symmetric in the logarithm.

    Assumption: as for `clustered_share`; values lie in [0, cap], and the mean of the clusters is nearly normal in the
    logarithm, as that of a positive, right-skewed quantity is. Bound: for one look, 95 % asymptotically; without bounds
    below 30 effective clusters, weight^2 / weight_sq. The standard error is that of the mean linearised over clusters.

    References
    ----------
    Saerndal, Swensson and Wretman (1992), Model Assisted Survey Sampling, section 5.5 (the linearised variance).
    """
    if not sums.weight:
        return None
    mean = sums.total / sums.weight
    if sums.weight**2 / sums.weight_sq < _LEAST_CLUSTERS or mean <= 0:
        return Estimate(mean=mean, low=None, high=None)
    spread = min(Z * sqrt(_variance(sums, mean)) / mean, 20.0)
    return Estimate(mean=mean, low=mean * exp(-spread), high=min(mean * exp(spread), max(cap, mean)))


def _effective_events(sums: ClusterSums) -> float:
    """Return the effective number of clusters with changed exchanges, or with unchanged ones, whichever is smaller."""
    rest, rest_sq = sums.weight - sums.total, sums.weight_sq - 2 * sums.cross + sums.total_sq
    return min(
        sums.total**2 / sums.total_sq if sums.total_sq > 0 else 0.0, rest**2 / rest_sq if rest_sq > 0 else 0.0
    )


def _t(df: float) -> float:
    """Return the 97.5 % quantile of Student's t: the expansion of Abramowitz and Stegun (1964), 26.7.5, exact to 1e-3 from 9 on."""
    return (
        Z
        + (Z**3 + Z) / (4 * df)
        + (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * df**2)
        + (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / (384 * df**3)
    )


def _variance(sums: ClusterSums, mean: float) -> float:
    """Return the variance of the weighted mean, linearised over clusters; 0 where there is one cluster only."""
    if sums.n < 2:
        return 0.0
    # Rounding may leave a tiny negative number where all clusters agree.
    residual = max(sums.total_sq - 2 * mean * sums.cross + mean * mean * sums.weight_sq, 0.0)
    return sums.n / (sums.n - 1) * residual / sums.weight**2


def difference(old: Estimate | None, new: Estimate | None) -> Estimate | None:
    """Return new minus old with the interval that the two intervals give; None where one of the two is missing.

    Assumption: the two estimates are independent, or rise and fall together: a session that meets both versions makes the
    interval wider than needed. The traffic of the slice is of the same kind in both windows; a difference in the traffic
    counts as one of the versions.

    Bound: 95 % for one look at one slice, as far as the two intervals keep theirs. Each end of the interval takes the ends
    of the two intervals that lie on that side of the difference, (d - sqrt((new - low)^2 + (high - old)^2),
    d + sqrt((high - new)^2 + (old - low)^2)), so skewed intervals stay skewed, and the interval is not empty where
    nothing flipped.

    References
    ----------
    Newcombe (1998), Interval estimation for the difference between independent proportions, Statistics in Medicine 17,
    method 10; Zou and Donner (2008), Construction of confidence limits about effect measures, Statistics in Medicine 27.
    """
    if old is None or new is None:
        return None
    mean = new.mean - old.mean
    if old.low is None or old.high is None or new.low is None or new.high is None:
        return Estimate(mean=mean, low=None, high=None)
    low = mean - sqrt((new.mean - new.low) ** 2 + (old.high - old.mean) ** 2)
    high = mean + sqrt((new.high - new.mean) ** 2 + (old.mean - old.low) ** 2)
    return Estimate(mean=mean, low=low, high=high)


def change_of(estimate: Estimate | None) -> Change:
    """Return what the interval of a difference shows: worse above 0, better below 0, else nothing clear."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return Change.UNCLEAR
    if estimate.low > 0:
        return Change.WORSE
    return Change.BETTER if estimate.high < 0 else Change.UNCLEAR
