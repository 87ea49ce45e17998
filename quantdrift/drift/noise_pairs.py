"""Is a rise of a slice's divergence more than the noise of its reference? A test on exchanges that were replayed twice.

Of such an exchange both are known: x(c, r), how far the candidate is from the first replay, and x(r, r'), how far the first replay
is from the second. Where the reference's own noise explains what is measured, their difference d = x(c, r) - x(r, r'), in [-1, 1],
has a mean of at most m. H0 "the conditional mean of d is at most m at every pair", m in (0, 1):

    R_k <- (R_k + 1) * (1 + lambda_k (d - v m)),    E = mean over k of R_k,    shown at E >= A

with d weighed by v in [0, 1] as a group's value is (`quantdrift.drift.evidence.group`), and `N_BETS` bets lambda_k by logarithm from
0.1 to 0.95 / (1 + m). For flips `x(c, r) - x(r, r') <= x(c, r')`, item by item, so a candidate that is within the budget against
another replay is within H0. For a graded divergence H0 is what is accepted, by definition.

A test begins when the slice becomes suspect, with E = HEAD_START * A, half of it on the largest bet, which is the best one against
2 % and more at a budget of 1 %: a rise that no noise explains is then shown about as soon as it is found, where a start from
zero would first need ln A of evidence. No test can be much faster: d = -1 must be possible, so each pair at most doubles the evidence.

Assumption: given the past, d of a pair has the bounded mean. So whether an exchange is replayed twice, and whether its pair counts,
may depend on earlier exchanges alone: those that were captured before the test began made the slice suspect, and do not count.
Bound: E - n - HEAD_START A is a supermartingale, so P(shown falsely within n pairs of a test) <= HEAD_START + n / A: 5 % within 40,000.
A large drift needs no test where the noise is known (`is_large`): the mean of d is at least the lower end of what is measured less the
upper end of the noise, which is then above m. Its assumption is another: the noise has not grown since it was measured.
A test can only hold a page back, so the bound on pages stays what it is, whatever this one is worth.
Source: Shin, Ramdas, Rinaldo, arXiv 2203.03532; a head start as of Lucas and Crosier, Technometrics 24 (1982), for CUSUM.
"""

from functools import lru_cache
from typing import Final

import msgspec

N_BETS: Final = 10
THRESHOLD: Final = 4e6
HEAD_START: Final = 0.04
EXPLAINED: Final = 1e-3
"""Share of the threshold below which noise explains what is measured: a fortieth of what a test begins with."""
LARGE: Final = 5.0
"""Budgets from which on a drift is large: noise that begins later pages only where it is as large at once."""
_SMALLEST: Final = 0.1
_LARGEST: Final = 0.95
_MOST: Final = 1e30  # evidence that grows for ever stays a number
_HALF: Final = 0.5 * HEAD_START * THRESHOLD * N_BETS
_FIRST: Final = (_HALF / (N_BETS - 1),) * (N_BETS - 1) + (_HALF,)


class PairTest(msgspec.Struct, frozen=True, kw_only=True):
    """The test of one metric of a slice, since the slice became suspect.

    Parameters
    ----------
    budget
        The mean m of H0, over the cap.
    since_us
        Pairs of exchanges that were captured later count.
    n
        Pairs so far.
    wealth
        R_k, (`N_BETS`,).
    shown
        Whether E has reached the threshold.
    explained
        Whether noise explains what is measured, as far as is known: E has fallen below EXPLAINED * A, and since then not been back at
        HEAD_START * A, which it is under H0 within n pairs with a probability of at most n / (HEAD_START A).
    """

    budget: float
    since_us: int
    n: int = 0
    wealth: tuple[float, ...] = _FIRST
    shown: bool = False
    explained: bool = False

    @property
    def share(self) -> float:
        """The evidence over its threshold."""
        return sum(self.wealth) / (N_BETS * THRESHOLD)

    def seen(self, d: float, v: float) -> "PairTest":
        """Return the test with one more pair, of the weighted difference `d` with |d| <= v <= 1."""
        if not abs(d) <= v <= 1.0:
            raise ValueError(f"a pair has |difference| <= weight <= 1, not difference {d} and weight {v}")
        z = d - v * self.budget
        wealth = tuple(
            min((of_bet + 1.0) * (1.0 + bet * z), _MOST)
            for of_bet, bet in zip(self.wealth, bets(self.budget), strict=True)
        )
        after = msgspec.structs.replace(self, n=self.n + 1, wealth=wealth)
        shown = self.shown or after.share >= 1.0
        explained = after.share < (HEAD_START if self.explained else EXPLAINED) and not shown
        return msgspec.structs.replace(after, shown=shown, explained=explained)


def is_large(low: float, noise: float, budget: float) -> bool:
    """Return whether a mean is far above the budget and the noise of the reference.

    Parameters
    ----------
    low
        The lower end of the mean.
    noise
        The upper end of the mean noise; 1 where it is not known.
    """
    return low >= LARGE * budget and low >= 2.0 * noise


@lru_cache(maxsize=256)
def bets(budget: float) -> tuple[float, ...]:
    """Return the bets against a mean, from the smallest up."""
    largest = _LARGEST / (1.0 + budget)
    step = (largest / _SMALLEST) ** (1.0 / (N_BETS - 1))
    return tuple(_SMALLEST * step**number for number in range(N_BETS))
