"""Coverage of the confidence intervals in the report."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from quantdrift.facts.interval import HIGHEST, LOWEST, N_BINS, shortfall

pytestmark = pytest.mark.statistical


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
