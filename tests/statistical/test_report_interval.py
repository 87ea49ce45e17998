"""Coverage of the confidence intervals in the report."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from quantdrift.facts.interval import HIGHEST, LOWEST, N_BINS, mean_of_bins, share, shortfall

pytestmark = pytest.mark.statistical


def test_weighted_flip_interval_holds_the_truth_in_nineteen_of_twenty_runs() -> None:
    """Two strata, one taken at a tenth of the other's rate: coverage of 2,000 seeded runs is within 93 to 98 %.

    At a true coverage of 95 % the counted one leaves that range with a probability below 1e-4.
    """
    random = np.random.default_rng(20261116)
    held, truth = 0, 0.02
    for _ in range(2000):
        pi = np.where(random.random(20_000) < 0.1, 1.0, 0.1)
        pi = pi[random.random(20_000) < pi]
        weight = 1 / pi
        flips = random.random(len(pi)) < truth
        estimate = share(
            float((weight * flips).sum() / weight.sum()), float(weight.sum() ** 2 / (weight**2).sum())
        )
        assert estimate is not None
        assert estimate.low is not None
        assert estimate.high is not None
        held += estimate.low <= truth <= estimate.high
    assert 0.93 <= held / 2000 <= 0.98


def test_kl_interval_holds_the_truth_in_most_runs() -> None:
    """Log-normal KL, 400 exchanges: coverage of 2,000 seeded runs is within 92 to 98 %, the skew costs a little.

    At a true coverage of 94 % the counted one leaves that range with a probability below 1e-3.
    """
    random = np.random.default_rng(7)
    truth = math.exp(-6 + 0.5)
    edges = np.geomspace(LOWEST, HIGHEST, N_BINS + 1)[1:-1]
    held = 0
    for _ in range(2000):
        values = random.lognormal(-6, 1.0, 400)
        bins = np.bincount(np.searchsorted(edges, values, side="right"), minlength=N_BINS)
        estimate = mean_of_bins(float(values.mean()), [float(n) for n in bins], 400, 2.0)
        assert estimate is not None
        assert estimate.low is not None
        assert estimate.high is not None
        held += estimate.low <= truth <= estimate.high
    assert 0.92 <= held / 2000 <= 0.98


@pytest.mark.parametrize(("sigma", "n", "least"), [(1.0, 1000, 0.93), (1.5, 1000, 0.87), (1.5, 5000, 0.96)])
def test_the_mean_above_p99_holds_the_truth_in_most_runs(sigma: float, n: int, least: float) -> None:
    """Log-normal KL with 10 and 50 exchanges beyond p99: the interval of 600 seeded runs holds it at least so often.

    Measured on 5,000 runs: 96.4, 91.9 and 98.8 %; each bound is above four standard errors below.
    """
    random, mu = np.random.default_rng(11), -6.0
    truth = math.exp(mu + sigma**2 / 2) * norm.cdf(sigma - norm.ppf(0.99)) / 0.01
    edges = np.geomspace(LOWEST, HIGHEST, N_BINS + 1)[1:-1]
    held = 0
    for _ in range(600):
        place = np.searchsorted(edges, random.lognormal(mu, sigma, n), side="right")
        found = shortfall(np.bincount(place, minlength=N_BINS).astype(float).tolist(), 0.99, n)
        assert found is not None
        assert found.high is not None
        held += found.low <= truth <= found.high
    assert held / 600 >= least
