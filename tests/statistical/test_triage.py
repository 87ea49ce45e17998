"""The list of slices to look at: its bound, where that is attained and on the shipped detector, and wrong rules that break it."""

from collections.abc import Callable

import numpy as np
import pytest

from quantdrift.drift.detectors.protocol import BUDGET
from quantdrift.drift.evidence.observations import STEPS, FloatArray, IntArray, ObservationBlock
from quantdrift.drift.triage import ALPHA, triage

pytestmark = pytest.mark.statistical

Rule = Callable[[FloatArray, float], IntArray]


def shipped(evidence: FloatArray, months: float) -> IntArray:
    """Return the list at the default alpha."""
    return triage(evidence, months=months)


def without_age(evidence: FloatArray, months: float) -> IntArray:
    """Return a wrong list: evidence of three months counted as if of one."""
    return triage(evidence, months=min(months, 1.0))


def without_fleet(evidence: FloatArray, months: float) -> IntArray:
    """Return a wrong list: every slice by itself at 1 / alpha, as if it were alone."""
    return np.flatnonzero(evidence * len(evidence) >= max(1.0, months) / ALPHA)


def false_share(rule: Rule, *, months: float, hit: float, seed: int) -> float:
    """Return the mean false share of the list in 20,000 fleets of 50 healthy and 5 drifted slices.

    A healthy slice's evidence is `hit * months / alpha` in so many fleets that its mean is its part of the allowance,
    months / 55, and else 0; one common throw hits one slice at most. The drifted ones have just what a list of five
    needs.
    """
    n, drifted, fleets = 55, 5, 20_000
    rng = np.random.default_rng(seed)
    share = 0.0
    for place in np.floor(rng.random(fleets) * n * hit / ALPHA):
        evidence = np.zeros(n)
        evidence[-drifted:] = 1.001 * months / (ALPHA * drifted)
        if place < n - drifted:
            evidence[int(place)] = hit * months / ALPHA
        listed = rule(evidence, months)
        share += (listed < n - drifted).sum() / max(len(listed), 1)
    return share / fleets


@pytest.mark.parametrize("months", [1.0, 3.0])
@pytest.mark.parametrize(
    "hit",
    [pytest.param(0.1, marks=pytest.mark.release), 0.167, pytest.param(0.5, marks=pytest.mark.release), 1.0],
)
def test_the_false_share_stays_at_alpha_where_the_allowance_is_spent_as_badly_as_can_be(
    months: float, hit: float
) -> None:
    """A hit of 1 / 6 joins the drifted ones' list in 27 % of fleets and is a sixth of it: 0.0455, near the bound.

    The standard error is at most 0.0006; 0.005 of slack fails with P < 1e-12.
    """
    assert false_share(shipped, months=months, hit=hit, seed=21) <= ALPHA + 0.005


def test_the_bound_is_attained_and_wrong_rules_break_it() -> None:
    """The shipped rule comes near alpha; no age at three months, and every slice by itself, go far over."""
    assert false_share(shipped, months=3.0, hit=0.167, seed=22) > 0.8 * ALPHA
    assert false_share(without_age, months=3.0, hit=0.06, seed=23) > 2 * ALPHA
    assert false_share(without_fleet, months=1.0, hit=0.06, seed=24) > 2 * ALPHA


def test_on_the_shipped_detector_it_finds_all_that_drifted_and_names_nothing_else() -> None:
    """40 slices for one month, 10 of them at 4 % instead of 1 % from the half on: at the end the list is these ten.

    Every one's median evidence is far above the 2 that a list of ten needs: all of them are listed with P > 0.99, and
    a false entry has P < alpha. Of 30 looks none before the change lists anything (P < 30 alpha by the bound, in truth
    far less).
    """
    n, drifted, steps = 40, 10, 1920
    rng = np.random.default_rng(25)
    states = np.tile(BUDGET.fresh(budget=0.01, scale=1.0, weighted=False, mass=0.0, at_us=0), (n, 1))
    listed = np.zeros(0, dtype=np.intp)
    for first in range(0, steps, STEPS):
        rate = np.full(n, 0.01)
        rate[:drifted] = 0.04 if first >= steps // 2 else 0.01
        flips = (rng.random((STEPS, n)) < rate).astype(float)
        at = np.broadcast_to(np.arange(first + 1.0, first + 1 + STEPS)[:, None], flips.shape)
        x = np.stack((flips, np.ones_like(flips)), axis=-1)
        block = ObservationBlock(x=x, seen=np.ones(flips.shape, dtype=bool), mass=at / (steps * n), at_us=at)
        states = BUDGET.run(states, block).stopped(np.full(n, STEPS - 1))
        listed = triage(np.array([BUDGET.evidence(state) for state in states]), months=first / steps)
        if first < steps // 2 - STEPS:
            assert not len(listed)
    assert sorted(listed) == list(range(drifted))


def test_the_list_is_the_longest_that_the_rule_allows_most_evidence_first() -> None:
    """Against the definition, k by k, on 300 random fleets with ties and infinite evidence."""
    rng = np.random.default_rng(26)
    for _ in range(300):
        n, months, alpha = int(rng.integers(0, 30)), 4 * rng.random(), float(rng.choice([0.05, 0.2, 1.0]))
        evidence = rng.choice([0.0, 0.5, 1.0, 5.0, 20.0, 100.0, np.inf], n)
        age = max(1.0, months)
        down = np.sort(n * evidence / age)[::-1]
        longest = max((k for k in range(1, n + 1) if down[k - 1] >= n / (alpha * k)), default=0)
        listed = triage(evidence, months=months, alpha=alpha)
        assert len(listed) == len(set(listed)) == longest
        assert (np.diff(evidence[listed][np.isfinite(evidence[listed])]) <= 0).all()
        assert (evidence[listed] >= np.delete(evidence, listed).max(initial=0.0)).all()


@pytest.mark.parametrize(
    ("evidence", "months", "alpha", "said"),
    [
        ([-1.0], 1.0, 0.05, "not negative"),
        ([np.nan], 1.0, 0.05, "not negative"),
        ([1.0], -1.0, 0.05, "since the start"),
        ([1.0], 1.0, 0.0, "alpha"),
        ([1.0], 1.0, 1.5, "alpha"),
    ],
)
def test_numbers_that_cannot_be_are_refused(
    evidence: list[float], months: float, alpha: float, said: str
) -> None:
    """A wrong number is refused by name instead of giving a wrong list."""
    with pytest.raises(ValueError, match=said):
        triage(np.array(evidence), months=months, alpha=alpha)
