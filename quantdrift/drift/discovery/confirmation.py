"""The confirmation of a slice that a search found: a betting e-process on later traffic only.

H0 "the mean divergence of the slice's exchanges is at most m at every moment", m = `null_mean(...)`: the ratio times
the upper bound of the aggregate at the search, or the budget where that is larger. Bet k multiplies its wealth by

    1 + rate_k (vx - v m),    v = c / pi,    rate_k log-spaced from 0.5 to 0.95 / m,    E = mean over k of the wealth

(group values as in `quantdrift.drift.evidence.group`: the sampling weights are exact). Each factor is positive and has mean at
most 1 under H0, so E is a nonnegative supermartingale that begins at 1, and by Ville's inequality
P(E ever reaches 1 / a) <= a, however often one looks and whenever one stops.

Assumption: the slice was frozen before the first exchange that is counted, the inclusion probabilities are known, and
arrival and loss say nothing about the divergence, given the past. Exchanges that were searched must never be counted:
there the slice is bad because it was chosen to be.

Many candidates: those of one search share its allowance a evenly, and each is confirmed when E has ever reached
`threshold(n, a)` = n / a. By the union bound the expected number of false confirmations of one search is at most a, under
any dependence and at all times: a candidate that is confirmed stays confirmed. (e-BH, Wang and Ramdas 2022, would confirm
more at one look. But it is valid for one stopping time of all candidates together, not for the largest value that each E
ever had: Tavyrikov, Goeman, de Heide, arXiv 2501.19360.)
The allowance of a search is `allowance(q, elapsed)` = q times the part of 30 days since the search before it, so that
false confirmations stay below q per 30 days, over all models, however often one searches.

Source: Ville 1939; Waudby-Smith, Ramdas, Estimating means of bounded random variables by betting, JRSS B 2024;
Vovk, Wang, E-values: calibration, combination and applications, Annals of Statistics 2021.
Delay: ten candidates of a daily search at q = 0.1 need E = 3,000: flips at 3 % against m = 1 % are confirmed after
some 800 exchanges of the slice on average, at 5 % after some 240.
"""

import math

import msgspec
import numpy as np

from quantdrift.drift.evidence.group import ROUNDING
from quantdrift.drift.evidence.observations import FloatArray

N_BETS = 12
SMALLEST_RATE = 0.5
LARGEST_BET = 0.95  # share of the bet that would lose everything at vx = 0, v = 1
LARGEST_NULL = 0.5  # above this a slice needs no statistics
MONTH_S = 30 * 86_400.0


class ConfirmationTrial(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the test of one candidate.

    Parameters
    ----------
    m
        The null mean, over the metric's cap.
    log_wealth
        Natural logarithm of each bet's wealth.
    highest
        Natural logarithm of the largest E so far.
    n_groups
        Exchanges counted.
    """

    m: float
    log_wealth: tuple[float, ...] = (0.0,) * N_BETS
    highest: float = 0.0
    n_groups: int = 0

    def after(self, vx: FloatArray, v: FloatArray) -> "ConfirmationTrial":
        """Return the trial after more exchanges, in their order.

        Parameters
        ----------
        vx, v
            (n,) group values: weighted value and weight, 0 <= vx <= v <= 1.

        Raises
        ------
        ValueError
            A weight above 1, which would break the bound, or a value that is not inside [0, v].
        """
        if not len(v):
            return self
        if not ((vx >= 0) & (vx <= v * (1 + ROUNDING)) & (v <= 1 + ROUNDING)).all():
            raise ValueError("group values must satisfy 0 <= vx <= v <= 1")
        # Add one after the other, starting from the wealth: bitwise the same however the exchanges are split.
        steps = np.log1p(rates_of(self.m) * (vx - v * self.m)[:, None])
        path = np.cumsum(np.concatenate((np.array([self.log_wealth]), steps)), axis=0)[1:]
        top = path.max(axis=1)
        evidence = top + np.log(np.exp(path - top[:, None]).mean(axis=1))
        return ConfirmationTrial(
            m=self.m,
            log_wealth=tuple(float(value) for value in path[-1]),
            highest=max(self.highest, float(evidence.max())),
            n_groups=self.n_groups + len(v),
        )

    def confirms(self, threshold: float) -> bool:
        """Return whether E has ever reached `threshold`."""
        return self.highest >= math.log(threshold)


def rates_of(m: float) -> FloatArray:
    """Return the bets' rates, (N_BETS,), against the null mean m in (0, 0.5]."""
    rates: FloatArray = np.geomspace(SMALLEST_RATE, LARGEST_BET / m, N_BETS)
    return rates


def null_mean(budget: float, aggregate_high: float, ratio: float) -> float:
    """Return m: the level that the mean of a candidate must exceed to count, over the metric's cap.

    Parameters
    ----------
    budget
        The mean that the owner of the model accepts.
    aggregate_high
        Upper bound of the mean over all traffic at the time of the search.
    ratio
        Factor by which a slice must exceed that bound, at least 1.
    """
    return min(max(budget, ratio * aggregate_high), LARGEST_NULL)


def allowance(false_per_30_days: float, elapsed_s: float) -> float:
    """Return a: the allowed expected number of false confirmations of a search.

    Parameters
    ----------
    false_per_30_days
        q, for all searches of all models together.
    elapsed_s
        Since the search before it. More than 30 days count as 30.
    """
    return false_per_30_days * min(max(elapsed_s, 0.0), MONTH_S) / MONTH_S


def threshold(n_candidates: int, allowed: float) -> float:
    """Return the E at which each of `n_candidates` candidates of one search is confirmed.

    Parameters
    ----------
    n_candidates
        At least 1.
    allowed
        The search's allowance, above 0.
    """
    return max(n_candidates / allowed, 1.0)
