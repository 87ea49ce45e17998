"""A time-uniform 95 % interval of the mean, shown beside every estimate.

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

from quantdrift.drift.block import BoolArray, FloatArray, Steps

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


def advance(start: FloatArray, steps: Steps, groups: FloatArray, counts: FloatArray) -> FloatArray:
    """Return the sums of every window after the last group, (N, windows, SUMS).

    Parameters
    ----------
    start
        (N, windows, SUMS) sums so far; zeros for a new window.
    steps
        Who has how many groups.
    groups
        (groups, 3) of each 1, v and vx; 0 where there is no observation.
    counts
        (groups, 3) running sums of these.
    """
    row, last = steps.row, steps.last
    # Windows before groups: numpy is several times faster along the longer axis.
    begin = np.ascontiguousarray(start[:, :, : _S + 1].transpose(2, 1, 0))[:, :, row]
    past = (counts - groups).T
    n, w, x = (begin[field] + past[field] for field in (_N, _W, _X))
    one, v, vx = np.ascontiguousarray(groups.T)
    own = np.square(vx - v * ((x + 0.5) / (w + 1.0))) * one
    spreads = own.copy()
    steps.combine(np.add, spreads.T)
    spread = begin[_S] + (spreads - own)
    rate = np.minimum(np.sqrt(2 * _LOG / ((spread + 0.25) * np.log1p(n + 1.0))), RATE_CAP)
    psi = -np.log1p(-rate) - rate
    more = np.empty((SUMS - _A, *rate.shape))
    for place, (factor, value) in enumerate(
        ((rate, v), (rate, vx), (psi, v * v), (psi, v * vx), (psi, vx * vx))
    ):
        np.multiply(factor, value, out=more[place])
    steps.combine(np.add, more.reshape(-1, len(row)).T)
    sums = start.copy()
    sums[:, :, : _X + 1] += counts[last][:, None]
    sums[:, :, _S] += spreads[:, last].T
    sums[:, :, _A:] += more[:, :, last].transpose(2, 1, 0)
    return sums


def along(vx: FloatArray, v: FloatArray, seen: BoolArray) -> Estimate | None:
    """Return the mean and interval of one series of groups, all (groups,), or None where nothing was observed."""
    steps = Steps(np.array([len(v)]))
    groups = np.zeros((len(v), 3))
    groups[seen] = np.stack((np.ones(len(v)), v, vx), axis=1)[seen]
    counts = steps.combine(np.add, groups.copy())
    return estimate(advance(np.zeros((1, 1, SUMS)), steps, groups, counts)[0, 0])


def estimate(sums: FloatArray) -> Estimate | None:
    """Return the mean and interval of one window, (SUMS,), or None where nothing was observed."""
    n, w, x, _, a, b, p0, p1, p2 = (float(value) for value in sums)
    if n == 0:
        return None
    # Reject m where p + q m - p0 m^2 >= 0: below the larger root (too small a mean), above the smaller one.
    low = _root(p0, 2 * p1 - a, b - p2 - _LOG, 1.0)
    high = _root(p0, 2 * p1 + a, -b - p2 - _LOG, -1.0)
    mean = x / w
    return Estimate(
        mean=mean,
        low=min(max(low, 0.0), mean) if low is not None else 0.0,
        high=max(min(high, 1.0), mean) if high is not None else 1.0,
        n=int(n),
    )


def _root(p0: float, q: float, p: float, side: float) -> float | None:
    inside = q * q + 4 * p0 * p
    return (q + side * math.sqrt(inside)) / (2 * p0) if inside >= 0 else None
