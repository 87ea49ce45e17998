"""p99.9 of small slices: an estimate where the tail carries one, otherwise nothing."""

import numpy as np
import pytest

from quantdrift.drift.detectors.tail.extreme import extreme_quantile
from quantdrift.drift.detectors.tail.quantile import N_BINS, tail_bin
from quantdrift.drift.evidence.observations import FloatArray

pytestmark = pytest.mark.unit


def histogram(x: FloatArray) -> FloatArray:
    """Return groups of one item each."""
    return np.bincount(tail_bin(x), minlength=N_BINS).astype(np.float64)


@pytest.mark.parametrize("family", ["exponential", "lognormal"])
def test_p999_is_found_from_three_thousand_groups(family: str) -> None:
    """Of 100 seeded samples at least 95 are within 30 %, where the sample's own p99.9 has three groups above it."""
    rng, n = np.random.default_rng(1), 3000
    near = 0
    for _ in range(100):
        exponential = family == "exponential"
        x = rng.exponential(0.02, n) if exponential else 0.01 * np.exp(0.8 * rng.standard_normal(n))
        truth = 0.02 * np.log(1000) if exponential else 0.01 * np.exp(0.8 * 3.0902)
        found = extreme_quantile(histogram(x), n, 0.999)
        near += found is not None and abs(found / truth - 1) < 0.3
    assert near >= 95


def test_nothing_is_said_where_the_tail_does_not_carry_it() -> None:
    """Too few groups, infinite values, a quantile outside the tail, one bin with everything."""
    x = np.random.default_rng(2).exponential(0.02, 3000)
    assert extreme_quantile(histogram(x[:999]), 999, 0.999) is None
    assert extreme_quantile(histogram(np.append(x, np.inf)), 3001, 0.999) is None
    assert extreme_quantile(histogram(x), 3000, 0.9) is None
    assert extreme_quantile(histogram(np.full(3000, 0.02)), 3000, 0.999) is None
