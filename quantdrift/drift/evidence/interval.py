"""A time-uniform 95 % interval of the mean, shown with every estimate.

Assumption: the sampling probabilities are known, and the mean is the same through the window. Bound: with
probability at least 0.95 the interval holds the mean at all times of its window at once, so it may be looked at as
often as one likes.

With `U_t(m) = vx_t - v_t m`, in [-1, 1] and of mean zero at the true mean m, and a predictable lambda_t in (0, 1/2],
`prod(1 + lambda_t U_t(m))` is a nonnegative martingale of mean 1 there (Waudby-Smith and Ramdas, Estimating means
of bounded random variables by betting, JRSS B 2024; the rate lambda_t is their predictable plug-in). It falls in m,
and by Fan, Grama and Liu (2015) `log(1 + lambda U) >= lambda U - psi(lambda) U^2`, psi(l) = -log(1 - l) - l. The
right-hand side is a parabola in m with five sums for coefficients: its outer root is the lower bound, its mirror
image gives the upper one, and the state never grows. Weights enter exactly; no variance of weights is approximated.
"""

import math

import msgspec
import numpy as np

from quantdrift.drift.evidence.numba_cache import compiled
from quantdrift.drift.evidence.observations import BoolArray, FloatArray

ALPHA = 0.05
SUMS = 9
RATE_CAP = 0.5
_N, _W, _X, _S, _A, _B, _P0, _P1, _P2 = range(SUMS)
_LOG = math.log(2 / ALPHA)


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A weighted mean with its interval.

    Parameters
    ----------
    mean
        Weighted mean over groups.
    low, high
        Time-uniform 95 % interval, within [0, 1] before `scaled`.
    n
        Groups in it, at least 1.
    """

    mean: float
    low: float
    high: float
    n: int

    def scaled(self, scale: float) -> "Estimate":
        """Return the same in the metric's own unit: everything times `scale`."""
        return Estimate(mean=self.mean * scale, low=self.low * scale, high=self.high * scale, n=self.n)


@compiled
def advance(sums: FloatArray, v: float, vx: float) -> None:
    """Add one observation to the sums of a window, (SUMS,), in place; a new window is all zeros."""
    deviation = vx - v * ((sums[_X] + 0.5) / (sums[_W] + 1.0))
    rate = min(math.sqrt(2.0 * _LOG / ((sums[_S] + 0.25) * math.log(sums[_N] + 2.0))), RATE_CAP)
    psi = -math.log(1.0 - rate) - rate
    sums[_N] += 1.0
    sums[_W] += v
    sums[_X] += vx
    sums[_S] += deviation * deviation
    sums[_A] += rate * v
    sums[_B] += rate * vx
    sums[_P0] += psi * v * v
    sums[_P1] += psi * v * vx
    sums[_P2] += psi * vx * vx


@compiled
def _add_groups(sums: FloatArray, vx: FloatArray, v: FloatArray, seen: BoolArray) -> None:
    for group in range(len(v)):
        if seen[group]:
            advance(sums, v[group], vx[group])


def estimate_of_groups(vx: FloatArray, v: FloatArray, seen: BoolArray) -> Estimate | None:
    """Return the mean and interval of one series of groups, all (groups,), or None where nothing was observed."""
    sums = np.zeros(SUMS)
    _add_groups(sums, vx, v, seen)
    return estimate(sums)


def estimate(sums: FloatArray, scale: float = 1.0) -> Estimate | None:
    """Return the mean and interval of one window, (SUMS,), times `scale`, or None where nothing was observed."""
    n = sums.item(_N)
    if n == 0.0:
        return None
    mean, low, high = _bounds(sums)
    return Estimate(mean=mean * scale, low=low * scale, high=high * scale, n=int(n))


def estimates(sums: FloatArray, scale: FloatArray) -> FloatArray:
    """Return mean, low, high and n of `estimate` of many windows, (N, 4), to the bit; n is 0 where nothing was observed."""
    found = np.zeros((len(sums), 4))
    _estimates(sums, scale, found)
    return found


@compiled
def _estimates(sums: FloatArray, scale: FloatArray, found: FloatArray) -> None:
    for row in range(len(sums)):
        if sums[row, _N] > 0.0:
            mean, low, high = _bounds(sums[row])
            found[row, 0], found[row, 1], found[row, 2] = (
                mean * scale[row],
                low * scale[row],
                high * scale[row],
            )
            found[row, 3] = sums[row, _N]


@compiled
def _bounds(sums: FloatArray) -> tuple[float, float, float]:
    """Return mean, lower and upper bound of a window that is not empty."""
    a, b, p0, p1, p2 = sums[_A], sums[_B], sums[_P0], sums[_P1], sums[_P2]
    # Reject m where p + q m - p0 m^2 >= 0: below the larger root (too small a mean), above the smaller one.
    mean = sums[_X] / sums[_W]
    low, high = 0.0, 1.0
    q, p = 2.0 * p1 - a, b - p2 - _LOG
    inside = q * q + 4.0 * p0 * p
    if inside >= 0.0:
        low = min(max((q + math.sqrt(inside)) / (2.0 * p0), 0.0), mean)
    q, p = 2.0 * p1 + a, -b - p2 - _LOG
    inside = q * q + 4.0 * p0 * p
    if inside >= 0.0:
        high = max(min((q - math.sqrt(inside)) / (2.0 * p0), 1.0), mean)
    return mean, low, high
