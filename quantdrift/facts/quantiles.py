"""Quantiles of the beta distribution and of Student's t, without SciPy: the live page and the frames are installed without it."""

from math import exp, inf, lgamma, log, log1p, sqrt
from statistics import NormalDist
from typing import Final

_ROUNDING: Final = 1e-15
_TINY: Final = 1e-300
_MOST_TERMS: Final = 20_000
_STEPS: Final = 200
_LARGE: Final = 1e5  # above it three moments say the quantile as exactly as it is shown
_NORMAL: Final = 1e5  # degrees of freedom: beyond them Student's t is normal to five digits


def beta_quantile(probability: float, a: float, b: float) -> float:
    """Return the quantile of the beta distribution with the shapes a and b, to a relative error below 1e-5.

    Where both shapes are above 1e5 it is Cornish and Fisher's expansion to the third moment, with an error below 1e-8.

    Parameters
    ----------
    probability
        In (0, 1).
    a, b
        Above 0.
    """
    if min(a, b) > _LARGE:
        return _expanded(probability, a, b)
    low, high = 0.0, 1.0
    x = a / (a + b)
    front = lgamma(a + b) - lgamma(a) - lgamma(b)
    for _ in range(_STEPS):
        error = beta_share(x, a, b) - probability
        low, high = (x, high) if error < 0 else (low, x)
        # Newton's step, and the middle of what is left where it leads outside.
        density = exp(front + (a - 1) * log(x) + (b - 1) * log1p(-x)) if 0 < x < 1 else 0.0
        step = x - error / density if density > _TINY else inf
        if not low < step < high:
            step = (low + high) / 2
        if abs(step - x) <= 1e-10 * x:
            return step
        x = step
    return x


def beta_share(x: float, a: float, b: float) -> float:
    """Return the share of the beta distribution that lies below x: the regularised incomplete beta function.

    References
    ----------
    Lentz's continued fraction: Press et al. (2007), Numerical Recipes, section 6.4.
    """
    if x <= 0.0:
        return 0.0
    if x >= 1.0:
        return 1.0
    front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log1p(-x))
    # The fraction converges fast on this side of the mean; the other side follows from the symmetry.
    if x < (a + 1) / (a + b + 2):
        return front * _fraction(x, a, b) / a
    return 1.0 - front * _fraction(1.0 - x, b, a) / b


def _fraction(x: float, a: float, b: float) -> float:
    c, d = 1.0, 1.0 / _away_from_0(1.0 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, _MOST_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1.0 / _away_from_0(1.0 + term * d)
            c = _away_from_0(1.0 + term / c)
            value *= c * d
        if abs(c * d - 1.0) < _ROUNDING:
            break
    return value


def _away_from_0(value: float) -> float:
    return value if abs(value) > _TINY else _TINY


def _expanded(probability: float, a: float, b: float) -> float:
    z, n = normal_quantile(probability), a + b
    deviation = sqrt(a * b / (n + 1)) / n
    skewness = 2 * (b - a) * sqrt(n + 1) / ((n + 2) * sqrt(a * b))
    return a / n + deviation * (z + skewness * (z * z - 1) / 6)


def t_quantile(probability: float, freedom: float) -> float:
    """Return the quantile of Student's t above its median.

    Parameters
    ----------
    probability
        In (0.5, 1).
    freedom
        Degrees of freedom, above 0; they need not be whole.
    """
    if freedom > _NORMAL:
        return normal_quantile(probability)
    x = beta_quantile(2 * (1 - probability), freedom / 2, 0.5)
    return sqrt(freedom * (1 - x) / x)


def normal_quantile(probability: float) -> float:
    """Return the quantile of the normal distribution, to an error of 1e-9."""
    return NormalDist().inv_cdf(probability)
