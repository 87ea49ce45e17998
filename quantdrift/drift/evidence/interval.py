"""A time-uniform 95 % interval of the mean, shown with every estimate.

Assumption: the sampling probabilities are known, and the mean is the same through the window. Bound: with
probability at least 0.95 the interval holds the mean at all times of its window at once, so it may be looked at as
often as one likes. It is a promise for each window: of many windows one after the other, 5 % may miss.

With `U_t(m) = vx_t - v_t m`, of mean zero at the true mean m, and `lambda < 1 / m`, `prod(1 + lambda U_t(m))` is a
nonnegative martingale of mean 1 there, and so is a mixture over fixed lambda (Waudby-Smith and Ramdas, Estimating means
of bounded random variables by betting, JRSS B 2024). The lower end is the smallest m whose mixture is below 2 / 0.05.
`prod(1 - lambda U_t(m))`, lambda < 1, gives the upper end. The product cannot be kept for every m. What is kept are sums for
each lambda, and two lower bounds of its logarithm follow from them, of which the larger counts:

- with `g = 1 + lambda vx` and `r = v / g`, `1 + lambda U = g (1 - lambda m r)`, r <= 1, and
  `log(1 - y) >= -y - k(y_max) y^2` for y <= y_max, `k(y) = (-log(1 - y) - y) / y^2`: three sums, of log g, r and r^2;
- over all (v, vx) with 0 <= vx <= v <= 1 the logarithm is concave and so lies above the plane through its corners:
  `(W - X) log(1 - lambda m) + X log(1 + lambda (1 - m))`, W = sum of v, X = sum of vx. It is exact for values 0 and 1
  without weights.

For the upper end `g = 1 - lambda vx`, `1 - lambda U = g (1 + lambda m r)` and `log(1 + y) >= y - y^2 / 2`.

Which lambda gives the narrowest interval of n groups is known where only m is: `sqrt(2 log(2 / 0.05) / (n m (1 - m)))`. Each
m is tested by a mixture of its own, whose weights fall with the distance from the best lambda for `USUAL_GROUPS`. So no
variance has to be learned, which would cost a window its first hundreds of groups.

Weights enter exactly; no variance of weights is approximated. The displayed mean weighs groups by 1 / pi: its sums are
apart from those of the tests, which use v = c / pi, c constant in a policy and different between policies.
"""

import functools
import math

import msgspec
import numpy as np

from quantdrift.drift.evidence.numba_cache import compiled
from quantdrift.drift.evidence.observations import FloatArray

ALPHA = 0.05
USUAL_GROUPS = 1200  # of a window that is shown, `quantdrift.drift.evidence.window`
# Against means that are too small, and too large.
RISES = np.geomspace(0.03, 60.0, 16)
FALLS = np.array([0.03, 0.05, 0.08, 0.13, 0.2, 0.3, 0.43, 0.58, 0.75, 0.88, 0.96])
_N_RISES, _N_FALLS = len(RISES), len(FALLS)
_N, _WEIGHT, _TOTAL, _W, _X = range(5)
_RISES = 5
_FALLS = _RISES + 3 * _N_RISES
PLAIN = _RISES
SUMS = _FALLS + 3 * _N_FALLS
_LOG = math.log(2 / ALPHA)
_STEEP = 2.0  # how fast the weights of a mixture fall with the distance from the best lambda, by logarithm
_LOG_RISES, _LOG_FALLS = np.log(RISES), np.log(FALLS)
_MOST_STAKE = 0.95  # of lambda m
_TELLS_LITTLE = 0.01  # a lower end below it says nothing where the upper one is 1
_LEAST = 1e-9  # a lower end below it is 0
_STEPS = 24  # bisection: far below what is shown


class WeightedEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """A weighted mean with its interval.

    Parameters
    ----------
    mean
        Mean over groups, each weighted by 1 / pi.
    low, high
        Time-uniform 95 % interval, within [0, 1] before `scaled`.
    n
        Groups in it, at least 1.
    missing
        Groups, at most, that are missing before the interval excludes more than a hundredth of all
        means; 0 where it does.
    """

    mean: float
    low: float
    high: float
    n: int
    missing: int = 0

    def scaled(self, scale: float) -> "WeightedEstimate":
        """Return the same in the metric's own unit: everything times `scale`."""
        return msgspec.structs.replace(
            self, mean=self.mean * scale, low=self.low * scale, high=self.high * scale
        )


@compiled
def advance(sums: FloatArray, v: float, vx: float, c: float = 1.0, n_windows: int = 1) -> None:
    """Take one observation into the sums of windows, in place; zeros are a new window.

    Parameters
    ----------
    sums
        (n_windows * SUMS,), or (n_windows * PLAIN,): without the sums for each lambda, for groups without weights.
    v, vx
        The two numbers of `quantdrift.drift.evidence.group`.
    c
        What v is a multiple of: v / c is 1 / pi.
    """
    size = len(sums) // n_windows
    for at in range(0, len(sums), size):
        sums[at + _N] += 1.0
        sums[at + _WEIGHT] += v / c
        sums[at + _TOTAL] += vx / c
        sums[at + _W] += v
        sums[at + _X] += vx
    if size == PLAIN:
        return
    if vx > 0.0:
        _add(sums, v, vx)
    else:
        _add_zero(sums, v)


@compiled
def _add(sums: FloatArray, v: float, vx: float) -> None:
    added = np.empty(SUMS)
    for bet in range(_N_RISES):
        growth = 1.0 + RISES[bet] * vx
        added[_RISES + bet] = math.log(growth)
        ratio = v / growth
        added[_RISES + _N_RISES + bet] = ratio
        added[_RISES + 2 * _N_RISES + bet] = ratio * ratio
    for bet in range(_N_FALLS):
        growth = 1.0 - FALLS[bet] * vx
        added[_FALLS + bet] = math.log(growth)
        ratio = v / growth
        added[_FALLS + _N_FALLS + bet] = ratio
        added[_FALLS + 2 * _N_FALLS + bet] = ratio * ratio
    for at in range(0, len(sums), SUMS):
        for index in range(_RISES, SUMS):
            sums[at + index] += added[index]


@compiled
def _add_zero(sums: FloatArray, v: float) -> None:
    """Add a group without a flip, as nearly all are: its logarithms are 0, and the rest is the same for each lambda."""
    square = v * v
    for at in range(0, len(sums), SUMS):
        for index in range(at + _RISES + _N_RISES, at + _RISES + 2 * _N_RISES):
            sums[index] += v
        for index in range(at + _RISES + 2 * _N_RISES, at + _FALLS):
            sums[index] += square
        for index in range(at + _FALLS + _N_FALLS, at + _FALLS + 2 * _N_FALLS):
            sums[index] += v
        for index in range(at + _FALLS + 2 * _N_FALLS, at + SUMS):
            sums[index] += square


def estimate(sums: FloatArray, scale: float = 1.0) -> WeightedEstimate | None:
    """Return the mean and interval of one window, (SUMS,) or (PLAIN,), times `scale`, or None where nothing was observed."""
    n = sums.item(_N)
    if n == 0.0:
        return None
    mean, low, high = _bounds(sums)
    missing = _missing(sums.item(_W) - sums.item(_X), n) if high == 1.0 and low < _TELLS_LITTLE else 0
    return WeightedEstimate(mean=mean * scale, low=low * scale, high=high * scale, n=int(n), missing=missing)


def _missing(weight: float, n: float) -> int:
    """Return how many groups like the n so far, which weigh `weight` without their values, give an upper end below 1."""
    each = weight / n if weight > 0.0 else 1.0
    return max(1, math.ceil((_least_weight() - weight) / each))


@functools.cache
def _least_weight() -> float:
    """Return the weight of groups without any value from which on the upper end is below 1."""
    chance = -_STEEP * np.abs(_LOG_FALLS - _LOG_FALLS[-1])
    below, needed = 0.0, _LOG / math.log1p(FALLS[0])
    for _ in range(2 * _STEPS):
        middle = (below + needed) / 2.0
        if _log_sum(chance + middle * np.log1p(FALLS)) - _log_sum(chance) < _LOG:
            below = middle
        else:
            needed = middle
    return needed


def estimates(sums: FloatArray, scale: FloatArray) -> FloatArray:
    """Return mean, low, high, n and missing of `estimate` of many windows, (N, 5), to the bit; n is 0 where nothing was observed."""
    estimated = np.zeros((len(sums), 5))
    _estimates(sums, scale, estimated)
    for row in np.flatnonzero(estimated[:, 4]).tolist():
        estimated[row, 4] = _missing(sums.item(row, _W) - sums.item(row, _X), estimated.item(row, 3))
    return estimated


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
            found[row, 4] = high == 1.0 and low < _TELLS_LITTLE


@compiled
def _bounds(sums: FloatArray) -> tuple[float, float, float]:
    """Return mean, lower and upper bound of a window that holds something."""
    mean = min(sums[_TOTAL] / sums[_WEIGHT], 1.0)
    centre = min(sums[_X] / sums[_W], 1.0)
    low, high = 0.0, 1.0
    if sums[_X] > 0.0 and _against_less(sums, _LEAST) >= _LOG:
        # By logarithm: the end may be a hundredth of the mean.
        below, above = math.log(_LEAST), math.log(centre)
        for _ in range(_STEPS):
            middle = (below + above) / 2.0
            if _against_less(sums, math.exp(middle)) >= _LOG:
                below = middle
            else:
                above = middle
        low = math.exp(below)
    if _against_more(sums, 1.0) >= _LOG:
        below, high = centre, 1.0
        for _ in range(_STEPS):
            middle = (below + high) / 2.0
            if _against_more(sums, middle) >= _LOG:
                high = middle
            else:
                below = middle
    return mean, min(low, mean), max(high, mean)


@compiled
def _against_less(sums: FloatArray, m: float) -> float:
    """Return the logarithm of a lower bound of the mixture against means of at most m; it falls with m."""
    log_terms = np.empty(_N_RISES)
    best = _best(m, _LOG_RISES)
    w, x = sums[_W], sums[_X]
    chances = 0.0
    for bet in range(_N_RISES):
        chance = -_STEEP * abs(_LOG_RISES[bet] - best)
        chances += math.exp(chance)
        stake = RISES[bet] * m
        if stake > _MOST_STAKE:
            log_terms[bet] = -math.inf
            continue
        lost = math.log1p(-stake)
        # k(y) is 1 / 2 + y / 3 + ... : for small y the formula would lose its digits.
        bend = (-lost - stake) / (stake * stake) if stake > 1e-4 else 0.5 + 0.34 * stake
        won = (w - x) * lost + x * math.log1p(RISES[bet] * (1.0 - m))
        if len(sums) > PLAIN:
            line, square = sums[_RISES + _N_RISES + bet], sums[_RISES + 2 * _N_RISES + bet]
            won = max(won, sums[_RISES + bet] - stake * line - bend * stake * stake * square)
        log_terms[bet] = chance + won
    return _log_sum(log_terms) - math.log(chances)


@compiled
def _against_more(sums: FloatArray, m: float) -> float:
    """Return the same against means of at least m; it rises with m."""
    log_terms = np.empty(_N_FALLS)
    best = _best(m, _LOG_FALLS)
    w, x = sums[_W], sums[_X]
    chances = 0.0
    for bet in range(_N_FALLS):
        chance = -_STEEP * abs(_LOG_FALLS[bet] - best)
        chances += math.exp(chance)
        rate = FALLS[bet]
        won = (w - x) * math.log1p(rate * m) + x * math.log1p(-rate * (1.0 - m))
        if len(sums) > PLAIN:
            line, square = sums[_FALLS + _N_FALLS + bet], sums[_FALLS + 2 * _N_FALLS + bet]
            # The product rises with m; where its bound no longer does, that of a smaller m is one too.
            stake = min(rate * m, line / square)
            won = max(won, sums[_FALLS + bet] + stake * line - 0.5 * stake * stake * square)
        log_terms[bet] = chance + won
    return _log_sum(log_terms) - math.log(chances)


@compiled
def _best(m: float, logs: FloatArray) -> float:
    """Return the logarithm of the best lambda for a mean of m, within the grid."""
    best = 0.5 * math.log(2.0 * _LOG / (USUAL_GROUPS * m * max(1.0 - m, 1e-12)))
    return float(min(max(best, logs[0]), logs[-1]))


@compiled
def _log_sum(won: FloatArray) -> float:
    top = -math.inf
    for logarithm in won:
        top = max(top, logarithm)
    if top == -math.inf:
        return -math.inf
    total = 0.0
    for logarithm in won:
        total += math.exp(logarithm - top)
    return top + math.log(total)
