"""A test for sessions that nobody declared: requests of one user that come in bursts and have alike outcomes.

Every bound of the detectors rests on exchanges that say something new each. Twenty requests of one user that all flip are one
observation, and count as twenty unless `sampling.sticky_header` names the user. This test looks for an attribute whose
neighbouring exchanges are alike.

Assumption (H0)
    The outcomes of a slice within one look, some 1,000 exchanges, are exchangeable, whatever the attribute says. Then the
    sequential ranks u_t, the share of the outcomes so far that are below the t-th, with ties broken at random, are
    independent and uniform.
Evidence
    Where exchange b follows exchange a with the same value of the attribute, the test bets that their ranks are alike: the
    factor is the density of a Gaussian copula with correlation r at (u_a, u_b). Given the past its mean is 1, so the product,
    averaged over `CORRELATIONS`, and multiplied over looks, is a non-negative martingale.
Bound
    Ville's inequality: under H0 it ever reaches 1 / a with a probability of at most a, however often one looks.
Source
    Vovk, Gammerman, Shafer (2005), "Algorithmic Learning in a Random World", chapter 7, for the ranks; Ville (1939), "Etude
    critique de la notion de collectif", for the bound.

Sources
    Stores, cameras and tenants come in bursts, too, and differ from each other without any session. What tells them apart is
    that they come back: their bursts are like their other bursts. So for an attribute whose values come back the assumption is
    weaker. H0: the outcomes of *each value* in a slice are exchangeable within a block of `BLOCK` looks, however much values
    differ. The ranks are then among the earlier outcomes of the same value, and are independent and uniform again; bets are made
    in bursts of a value that had a burst before. The bound is the same. Whether values come back is judged by the values
    alone, before any outcome is looked at (`come_back`).
    Until values come back a source cannot be told from a session, so nothing is found by fewer than `LEAST_SEEN` exchanges. Of
    more than some 1,500 sources in bursts of 7 these show too few of them twice. What was found is taken back as soon as more
    of them come back.
Depth
    Where fifty users send at the same time, two requests of one are fifty exchanges apart, and a visit is longer than a look. So what is
    near is a matter of the attribute: a burst of a value is over after many times the gap that is usual for its values (`burst_gap`),
    and whether values come in bursts is judged within a look and, by a longer reach, in all of the block so far. Sources of so many take
    longer to come back, and nothing is found before they could have (`least_seen`).
Not counted
    When the outcomes of all users change at the same time, neighbours are alike; when a source becomes worse, its exchanges are
    alike. The same bets are therefore made with the nearest earlier exchange of *another* value, and with the last exchange of
    the value's burst before, and the larger of what they win is taken from the evidence, which only lowers it.

An attribute with few values, or one whose values do not come in bursts, is no session: a scanner that is worse than others is a
slice. Such attributes are left out before any outcome is looked at.
"""

import bisect
import math
from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np
from scipy.special import logsumexp, ndtri

from quantdrift.drift.evidence.observations import FloatArray

LOOK: Final = 1000
"""Exchanges of a version in one look."""
BLOCK: Final = 10
"""Looks in which values that come back are compared with themselves; then it begins again."""
LEAST_SEEN: Final = 2 * LOOK
"""Exchanges that show whether values come back."""
LEAST_EXCHANGES: Final = 200
"""Fewest exchanges of a slice in a look that are tested."""
FALSE_SHARE: Final = 0.01
"""Largest share of versions with independent exchanges of which any slice is ever said to have sessions."""
MOST_KEYS: Final = 16
"""Most attributes of a version that are tested."""
MOST_SLICES: Final = 1000
APART: Final = 250
"""Exchanges without a value, after which it begins another burst; more where many values come at the same time (`burst_gap`)."""
CORRELATIONS: Final = (0.1, 0.2, 0.4, 0.6, 0.8, 0.95)

_LEAST_VALUES: Final = 20  # of an attribute in one look: with fewer it names groups of users, not users
_LARGEST_SHARE: Final = 0.1  # of one value in a look
_BURSTS: Final = 1.5  # times as many close exchanges with the same value as in a random order
_REACH: Final = 8  # exchanges back that count as close
_DEEP_REACH: Final = 64  # the same in a whole block
_GAPS: Final = 30  # times the lower quartile of the gaps; of one burst in a thousand a gap is longer
_BACK: Final = 0.04  # of the bursts that are of a value that came before: with more it is one of a source


def log_threshold(*, everything: bool) -> float:
    """Return the log evidence from which on a slice is said to have sessions.

    Half of `FALSE_SHARE` is for the slice `all`, where every exchange counts, and half for all other slices together.
    """
    n_tests = MOST_KEYS if everything else MOST_KEYS * MOST_SLICES
    return math.log(2 * n_tests / FALSE_SHARE)


def could_be_session(values: Sequence[str], begin: int = 0) -> bool:
    """Return whether an attribute has many values that come in bursts.

    Parameters
    ----------
    values
        Its value in each exchange of a block so far, in the order of capture; empty: it has none.
    begin
        Where the look begins that must have many values.
    """
    look = Counter(value for value in values[begin:] if value)
    n_look = len(values) - begin
    if len(look) < _LEAST_VALUES or max(look.values()) > _LARGEST_SHARE * n_look:
        return False
    # Of few users at the same time a look is enough; visits of many are longer than a look.
    return come_near(values[begin:], _REACH, least=_LEAST_VALUES) or come_near(
        values, _DEEP_REACH, least=_LEAST_VALUES
    )


def come_near(values: Sequence[str], reach: int, *, least: int) -> bool:
    """Return whether exchanges with one value are near each other more often than in a random order.

    Parameters
    ----------
    values
        Of each exchange; empty: it has none.
    reach
        Exchanges apart that are near.
    least
        How many more pairs there must be.
    """
    numbers: dict[str, int] = {}
    number = np.array([numbers.setdefault(value, len(numbers)) if value else -1 for value in values])
    sizes = np.bincount(number[number >= 0]).astype(np.float64)
    n_near = 0
    for lag in range(1, min(reach, len(number) - 1) + 1):
        n_near += int(((number[lag:] == number[:-lag]) & (number[lag:] >= 0)).sum())
    share = float((sizes * (sizes - 1)).sum()) / max(len(number) * (len(number) - 1), 1)
    return n_near > _BURSTS * share * reach * len(number) + least


def burst_gap(values: Sequence[str], *, least: int = APART, most: int = 2 * LOOK) -> int:
    """Return after how many exchanges without a value its burst is over.

    It is many times the gap that is usual within bursts: the lower quartile of all gaps, since longer ones may be between bursts.

    Parameters
    ----------
    values
        Of each exchange; empty: it has none.
    least, most
        Its range.
    """
    last: dict[str, int] = {}
    gaps = []
    for exchange, value in enumerate(values):
        if value and value in last:
            gaps.append(exchange - last[value])
        last[value] = exchange
    usual = float(np.quantile(gaps, 0.25)) if gaps else 0.0
    return int(min(max(_GAPS * usual, least), most))


def come_back(values: Sequence[str]) -> bool:
    """Return whether the values of an attribute come back after their bursts: those of sources do, those of visits do not.

    Parameters
    ----------
    values
        Its value in each exchange of a block, in the order of capture; empty: it has none.
    """
    last: dict[str, int] = {}
    n_bursts = n_back = 0
    gap = burst_gap(values)
    for exchange, value in enumerate(values):
        if value:
            before = last.get(value)
            n_bursts += before is None or exchange - before > gap
            n_back += before is not None and exchange - before > gap
            last[value] = exchange
    return n_back > _BACK * n_bursts


def least_seen(gap: int) -> int:
    """Return how many exchanges of a block show whether values come back whose bursts are over after `gap` exchanges."""
    return max(min(LEAST_SEEN * gap // (2 * APART), BLOCK * LOOK), LEAST_SEEN)


def log_evidence(
    values: Sequence[str],
    outcome: FloatArray,
    ties: FloatArray,
    *,
    begin: int = 0,
    gap: int = APART,
    sources: bool = False,
) -> float:
    """Return the logarithm of the evidence of one look at one slice that exchanges with one value are alike.

    Parameters
    ----------
    values
        The attribute's value of each exchange of the block so far, in the order of capture; empty: it has none.
    outcome
        (exchanges,) what is compared: the divergence, or whether the decision differs.
    ties
        (exchanges,) numbers in (0, 1) that break ties, uniform and unrelated to anything else.
    begin
        Where the look begins: what is before it in the block was looked at already.
    gap
        Exchanges without a value, after which its burst is over, as of `burst_gap`.
    sources
        Whether the values come back, so that a burst is compared with other bursts of the same value.
    """
    score = ndtri(_ranks(values if sources else [""] * len(values), outcome, ties))
    last: dict[str, int] = {}
    burst_before: dict[str, int] = {}  # the last exchange of the burst before, by value
    newest: tuple[int, int] = (-1, -1)  # the last exchange, and the last one before it with another value
    same: list[tuple[int, int]] = []
    other: list[tuple[int, int]] = []
    apart: list[tuple[int, int]] = []
    for exchange, value in enumerate(values):
        if newest[0] >= 0 and values[newest[0]] != value:
            newest = (newest[0], newest[0])
        before = last.get(value) if value else None
        if before is not None and exchange - before > gap:
            burst_before[value] = before
        is_tested = exchange >= begin and (not sources or value in burst_before)
        if before is not None and exchange - before <= gap and is_tested:
            same.append((before, exchange))
            if newest[1] >= 0:
                other.append((newest[1], exchange))
            if value in burst_before:
                apart.append((burst_before[value], exchange))
        last[value] = exchange
        newest = (exchange, newest[1])
    everywhere = max(_log_wealth(score, other), _log_wealth(score, apart) if sources else 0.0, 0.0)
    return _log_wealth(score, same) - everywhere


def _ranks(kinds: Sequence[str], outcome: FloatArray, ties: FloatArray) -> FloatArray:
    """Return per exchange, (exchanges,), the share of the outcomes of its kind up to it that are smaller, ties broken at random."""
    of_kind: dict[str, list[float]] = {}
    ranks = np.empty(len(outcome))
    for exchange, (kind, value) in enumerate(zip(kinds, outcome.tolist(), strict=True)):
        ordered = of_kind.setdefault(kind, [])
        low = bisect.bisect_left(ordered, value)
        high = bisect.bisect_right(ordered, value, lo=low)
        ranks[exchange] = (low + ties[exchange] * (high - low + 1)) / (len(ordered) + 1)
        ordered.insert(high, value)
    return ranks


def _log_wealth(score: FloatArray, pairs: Sequence[tuple[int, int]]) -> float:
    """Return the log of the mean, over `CORRELATIONS`, of the products of the copula's densities; 0 without pairs."""
    if not pairs:
        return 0.0
    x, y = score[np.array(pairs)].T
    squares, product, n = float((x * x + y * y).sum()), float((x * y).sum()), len(pairs)
    r = np.array(CORRELATIONS)
    free = 1 - r * r
    each = -n / 2 * np.log(free) - (r * r * squares - 2 * r * product) / (2 * free)
    return float(logsumexp(each)) - math.log(len(r))
