"""Bets of a tail on a change at one of some moments, against every mean that the groups before it allow.

The pool of the learned null takes a change in before there is evidence enough, and a bound that is frozen must be right but for 1e-5
before anything is bet against it. Here what is known of the past is itself evidence. Let `f` be a value of an item from 0 to 1 that grows
with its bin, `m` a number, and B the wealth of bets, from the first group on, that the mean of f was at least m, had it been tolerated in
full; N the wealth of bets that the mean since a moment is at most m:

    B = prod over groups before it of (1 + kappa (m - T f) / (most - m)),   N = prod over groups since of (1 + (r - 1) f) / (1 + (r - 1) m)

If the law since the moment is within the tolerance of the one before, then for m the tolerated mean both have a mean of at most 1, and so has
B N. Nobody knows m, but the least of B N over all m is not more than at that m. The evidence of f is therefore

    sum over moments of (allowance up to the moment) * min over m of B(m) N(m)

T is the tolerance: of shares, `T f = (1 + tau) f` with `most = 1 + tau`, or of values, `T f` the f of a value `1 + tau` times as large with `most
= 1`; the lesser B counts. Each f grows by a step at each of four levels, from the first, second, third or fourth one on: with the logarithm of the value, as
the best one for a Pareto law does. The levels are 1.75 times apart, and begin where the first `FIRST` groups have 0.5 %; these groups count for nothing else.

A moment comes every 512 to 4,096 groups, and the `N_MOMENTS` with the most evidence stay: as in a sum over all of them the best one decides,
and evidence that is dropped was only less. Evidence is computed from counts, every 512 groups.

Assumption: before the change, and after it, the conditional mean of each f given what came before does not change.
Bound: the mean of the evidence is at most the allowance, at alarm times too, with no error for the baseline: `sum of (allowance at a moment) B N + (allowance
left) B` is a martingale that begins with all of the allowance. An alert that goes back to an earlier baseline has chosen the past by its values: from then on
the past begins there.
Seasons: what is known of a past of less than whole weeks is tolerated as the frozen bounds are (`quantdrift.drift.evidence.clock.beyond_weeks`).
Source: betting on means, Waudby-Smith and Ramdas, JRSS B 2024; the infimum over what is not known, Ramdas, Gruenwald, Vovk and Shafer,
Game-theoretic statistics and safe anytime-valid inference, Statistical Science 2023.
Delay: at the defaults and 1,000 groups a day, 32,000 of them before, two thirds of the Pareto laws whose largest 5 % change their index from
2.6 to 1.6 page within 30,000, half of all within 20,500 (`benchmarks.defaults`); without these bets one in four does.
"""

import math

import numpy as np

from quantdrift.drift.detectors.tail import rank
from quantdrift.drift.detectors.tail.quantile import N_BINS
from quantdrift.drift.evidence.clock import WEEK_US
from quantdrift.drift.evidence.numba_cache import compiled
from quantdrift.drift.evidence.observations import FloatArray

SHARE = 0.2  # of the capital
FIRST = 2_000  # groups that choose the levels
EVERY = 512  # groups from one look to the next
N_LEVELS = 4
N_MOMENTS = 3
_WIDTH = 3  # bins from level to level
_TOP = 0.005  # share at or above the first level
_SPACING, _MOST_SPACING = 1.0 / 8.0, 4_096.0  # of moments: a part of the groups so far, and at most so many

# Fields, from the begin of this part of a state on.
(
    LEVEL,  # bin of the first level; 0 before there is one
    EVIDENCE,
    PENDING,  # allowance since the last moment
) = range(3)
# Of counts: groups, event time, weight at or above each level of values that are tolerated, and then of those that came.
N, AT, VALUES = range(3)
SHARES = VALUES + N_LEVELS
_COUNTS = SHARES + N_LEVELS
BEGIN = 3  # counts that the past begins after
MOMENTS = BEGIN + _COUNTS  # each its allowance, then its counts
_MOMENT = 1 + _COUNTS
SIZE = MOMENTS + N_MOMENTS * _MOMENT
N_BEGIN = 1 + _COUNTS  # numbers in a stored begin


# f of an item below the first level, and from each level to the next: one step at each level from the first, second, third or fourth on.
_F = np.array(
    [[max(cell - level, 0) / (N_LEVELS - level) for cell in range(N_LEVELS + 1)] for level in range(N_LEVELS)]
)
_F_WEIGHTS = np.array((0.35, 0.35, 0.2, 0.1))
_N_CELLS = N_LEVELS + 1
_KAPPA, _KAPPA_WEIGHTS = np.array((0.0, 0.35, 0.87)), np.array((0.06, 0.27, 0.67))
_RATIO, _RATIO_WEIGHTS = np.array((1.0, 2.0, 3.7, 20.0)), np.array((0.04, 0.57, 0.29, 0.1))
_COARSE, _FINE = 20, 6
_NEVER = -1e300


@compiled
def tolerance(tau: float, span_us: float) -> float:
    """Return the tolerance of a past of this length: a trough of the season that `tau` allows is raised to its middle."""
    beyond = span_us % WEEK_US / span_us if span_us > 0 else 1.0
    swing = tau * beyond
    return (1.0 + tau) / (1.0 - swing) - 1.0 if swing < 1.0 else math.inf


@compiled
def count(above: FloatArray, at: tuple[float, float], tau: float, level: int, counts: FloatArray) -> None:
    """Write counts, (_COUNTS,), of a pool with these weights at or above each bin, (N_BINS + 1,), and groups and time `at`."""
    bins = rank.shift(tau)
    whole = int(bins)
    part = bins - whole
    counts[N], counts[AT] = at
    for step in range(N_LEVELS):
        bin_ = min(level + step * _WIDTH, N_BINS - 1)
        near, far = max(bin_ - whole, 0), max(bin_ - whole - 1, 0)
        counts[VALUES + step] = (1.0 - part) * above[near] + part * above[far]
        counts[SHARES + step] = above[bin_]


@compiled
def first_level(above: FloatArray, n: float) -> int:
    """Return the bin of the first level: the lowest with at most 0.5 % of the groups at or above it."""
    for bin_ in range(1, N_BINS):
        if above[bin_] <= _TOP * n:
            return bin_
    return N_BINS - 1


@compiled
def _cells(later: FloatArray, earlier: FloatArray, first: int, cells: FloatArray) -> float:
    """Write the weight in each cell, (N_CELLS,), of counts without earlier ones; return the groups."""
    n = max(later[N] - earlier[N], 0.0)
    upper = n
    for step in range(N_LEVELS):
        weight = min(max(later[first + step] - earlier[first + step], 0.0), upper)
        cells[step] = upper - weight
        upper = weight
    cells[N_LEVELS] = upper
    return float(n)


@compiled
def _log_mean(logs: FloatArray, weights: FloatArray) -> float:
    n = len(weights)
    top, total = logs[:n].max(), 0.0
    for bet in range(n):
        total += weights[bet] * math.exp(logs[bet] - top)
    return float(top + math.log(total))


@compiled
def _log_before(cells: FloatArray, f: FloatArray, m: float, factor: float, logs: FloatArray) -> float:
    """Return the logarithm of B at the mean m, where the tolerance raises f by a factor."""
    for bet in range(len(_KAPPA)):
        stake, log = _KAPPA[bet] / (factor - m), 0.0
        for cell in range(_N_CELLS):
            if cells[cell] > 0.0:
                log += cells[cell] * math.log(1.0 + stake * (m - factor * f[cell]))
        logs[bet] = log
    return _log_mean(logs, _KAPPA_WEIGHTS)


@compiled
def _log_since(cells: FloatArray, n: float, f: FloatArray, m: float, logs: FloatArray) -> float:
    """Return the logarithm of N at the mean m."""
    for bet in range(len(_RATIO)):
        log = -n * math.log(1.0 + (_RATIO[bet] - 1.0) * m)
        for cell in range(_N_CELLS):
            if cells[cell] > 0.0 and f[cell] > 0.0:
                log += cells[cell] * math.log(1.0 + (_RATIO[bet] - 1.0) * f[cell])
        logs[bet] = log
    return _log_mean(logs, _RATIO_WEIGHTS)


@compiled
def _log_least(
    before: FloatArray, since: FloatArray, n: tuple[float, float, float], f: FloatArray, logs: FloatArray
) -> float:
    """Return the logarithm of the least B N over all means. Only above 0 is it of interest: the first below ends the search.

    Parameters
    ----------
    before, since
        (2, N_CELLS) weight before the moment, of tolerated values and of those that came; (N_CELLS,) since.
    n
        Groups before and since, and the factor by which shares are tolerated.
    f
        (N_CELLS,) value of an item in each cell.
    logs
        Overwritten.
    """
    n_before, n_since, factor = n
    of_values = of_shares = 0.0
    for cell in range(_N_CELLS):
        of_values += before[0, cell] * f[cell]
        of_shares += factor * before[1, cell] * f[cell]
    most = max(of_values, of_shares, 0.3)
    low = 0.7 * most / n_before
    high = min((3.0 * most + 40.0) / n_before, 0.98)
    if low >= high:
        return _NEVER
    least, at = math.inf, low
    step = (high / low) ** (1.0 / (_COARSE - 1))
    for turn in range(2):
        begin = low if turn == 0 else max(at / step, low)
        end = high if turn == 0 else min(at * step, high)
        points = _COARSE if turn == 0 else _FINE
        grow = (end / begin) ** (1.0 / (points - 1))
        m = begin
        for _ in range(points):
            log = _log_since(since, n_since, f, m, logs)
            log += min(_log_before(before[0], f, m, 1.0, logs), _log_before(before[1], f, m, factor, logs))
            if log < least:
                least, at = log, m
                if least <= 0.0:
                    return _NEVER
            m *= grow
    return least


@compiled
def weigh(part: FloatArray, now: FloatArray, tau: float, worth: FloatArray) -> float:
    """Write the evidence of each moment, (N_MOMENTS,), and return the sum.

    Parameters
    ----------
    part
        (SIZE,) this part of a state.
    now
        (_COUNTS,) counts of the pool.
    tau
        Tolerance.
    worth
        Written to.
    """
    before, since = np.empty((2, _N_CELLS)), np.empty(_N_CELLS)
    logs = np.empty(len(_RATIO))
    begin = part[BEGIN : BEGIN + _COUNTS]
    total = 0.0
    for moment in range(N_MOMENTS):
        first = MOMENTS + moment * _MOMENT
        mass, counts = part[first], part[first + 1 : first + _MOMENT]
        worth[moment] = 0.0
        if mass <= 0.0:
            continue
        n_before = _cells(counts, begin, VALUES, before[0])
        _cells(counts, begin, SHARES, before[1])
        n_since = _cells(now, counts, SHARES, since)
        if n_before < 1.0 or n_since < 1.0:
            continue
        factor = 1.0 + tolerance(tau, counts[AT] - begin[AT])
        if not factor < math.inf:
            continue
        for function in range(len(_F)):
            log = _log_least(before, since, (n_before, n_since, factor), _F[function], logs)
            if log > 0.0:
                worth[moment] += mass * _F_WEIGHTS[function] * math.exp(min(log, 600.0))
        total += worth[moment]
    return total


@compiled
def look(part: FloatArray, above: FloatArray, n: float, at_us: float, tau: float) -> None:
    """Compute the evidence, and mark a moment where one is due, in place.

    Parameters
    ----------
    part
        (SIZE,) this part of a state.
    above, n
        Weight of the pool at or above each bin, (N_BINS + 1,), and its groups.
    at_us
        Event time.
    tau
        Tolerance.
    """
    counts, worth = np.empty(_COUNTS), np.empty(N_MOMENTS)
    if part[LEVEL] == 0.0:
        restart(part, above, n, at_us, tau)
        if part[LEVEL] == 0.0:
            return
    level = int(part[LEVEL])
    count(above, (n, at_us), tau, level, counts)
    part[EVIDENCE] = weigh(part, counts, tau, worth)
    latest = part[BEGIN + N]
    for moment in range(N_MOMENTS):
        if part[MOMENTS + moment * _MOMENT] > 0.0:
            latest = max(latest, part[MOMENTS + moment * _MOMENT + 1 + N])
    if part[PENDING] <= 0.0 or n - latest < min(_SPACING * n, _MOST_SPACING):
        return
    least = -1
    for moment in range(N_MOMENTS):
        at = MOMENTS + moment * _MOMENT
        if part[at] <= 0.0:
            least = moment
            break
        if part[at + 1 + N] < latest and (
            least < 0
            or worth[moment] < worth[least]
            or (worth[moment] == worth[least] and part[at + 1 + N] < part[MOMENTS + least * _MOMENT + 1 + N])
        ):
            least = moment
    part[EVIDENCE] -= worth[least]
    first = MOMENTS + least * _MOMENT
    part[first], part[PENDING] = part[PENDING], 0.0
    tolerated = tolerance(tau, at_us - part[BEGIN + AT])
    count(above, (n, at_us), tolerated, level, part[first + 1 : first + _MOMENT])


@compiled
def clear(part: FloatArray) -> None:
    """Drop all moments and their evidence, in place."""
    part[EVIDENCE] = part[PENDING] = 0.0
    part[MOMENTS:] = 0.0


@compiled
def restart(part: FloatArray, above: FloatArray, n: float, at_us: float, tau: float) -> None:
    """Let the past begin after what is in the pool, in place; where there are no levels yet, choose them by it."""
    clear(part)
    if part[LEVEL] == 0.0:
        if n < FIRST:
            return
        part[LEVEL] = float(first_level(above, n))
    count(above, (n, at_us), tau, int(part[LEVEL]), part[BEGIN : BEGIN + _COUNTS])


def begin(part: FloatArray) -> tuple[float, ...]:
    """Return the first level and the counts that the past begins after, for storing; empty where there are none."""
    return (float(part[LEVEL]), *part[BEGIN : BEGIN + _COUNTS].tolist()) if part[LEVEL] else ()


def write_begin(part: FloatArray, stored: tuple[float, ...]) -> None:
    """Begin with what `begin` returned, in place."""
    part[LEVEL], part[BEGIN : BEGIN + _COUNTS] = stored[0], stored[1:]


def hand_over(part: FloatArray, before: FloatArray, moved: float, n: float) -> None:
    """Move a share of the moments of a version that ended to the one that serves, both in place.

    The moments are those of one past: where it does not begin at the same groups, or a moment is not in the pool of `n` groups, its evidence ends.
    """
    moments, theirs = (row[MOMENTS:].reshape(N_MOMENTS, _MOMENT) for row in (part, before))
    if begin(part) == begin(before) != ():
        own = [moment for moment in moments if moment[0] > 0.0]
        shared = [
            moment * np.r_[moved, np.ones(_COUNTS)]
            for moment in theirs
            if moment[0] > 0.0 and moment[1 + N] <= n
        ]
        # Those that came first have seen most of what both have in common.
        kept = sorted([*own, *shared], key=lambda moment: moment[1 + N])[:N_MOMENTS]
        moments[:] = 0.0
        for row, moment in enumerate(kept):
            moments[row] = moment
    theirs[:, 0] *= 1.0 - moved
    before[EVIDENCE] *= 1.0 - moved
    before[PENDING] *= 1.0 - moved
