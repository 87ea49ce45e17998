"""The lower bound by which a back-test says that a slice was above its budget."""

import numpy as np
import pytest

from quantdrift.drift.delay import divergence
from quantdrift.monitor.planning.backtest import lower_bound

pytestmark = pytest.mark.statistical

DELTA = 0.05


@pytest.mark.parametrize(("rate", "n"), [(0.01, 300), (0.01, 5000), (0.2, 100), (0.5, 40)])
def test_the_bound_is_above_the_truth_with_at_most_the_stated_probability(rate: float, n: int) -> None:
    """2,000 means of n flips: at most 5 % of the bounds lie above the truth.

    The count exceeds 5 % plus four standard errors with probability below 1e-4. A mutant that takes the mean itself
    for the bound is above the truth half the time.
    """
    means = np.random.default_rng(3).binomial(n, rate, size=2000) / n
    wrong = np.mean([lower_bound(float(mean), n, DELTA) > rate for mean in means])
    assert wrong <= DELTA + 4 * np.sqrt(DELTA * (1 - DELTA) / 2000)
    assert np.mean(means > rate) > DELTA + 4 * np.sqrt(DELTA * (1 - DELTA) / 2000)


def test_it_solves_its_equation_and_closes_in() -> None:
    """By `n KL(mean || low) = log(1 / delta)`; 0 where nothing was seen."""
    low = lower_bound(0.03, 1000, DELTA)
    assert 1000 * divergence(0.03, low) == pytest.approx(np.log(1 / DELTA))
    assert low < lower_bound(0.03, 100_000, DELTA) < 0.03
    assert lower_bound(0.0, 1000, DELTA) == 0.0
    assert lower_bound(1.0, 10, DELTA) == pytest.approx(DELTA ** (1 / 10))
