"""Quantiles, shortfall and bounds from a histogram."""

import numpy as np
import pytest

from quantdrift.drift.detectors.tail.quantile import (
    EDGES,
    LARGEST,
    N_BINS,
    bin_of,
    ceilings,
    point,
    quantile,
    shortfall,
    survival,
    tail_bin,
)
from quantdrift.drift.evidence.bound import upper_bound
from quantdrift.drift.evidence.observations import FloatArray

pytestmark = pytest.mark.unit

P99 = 0.1023923  # of a log-normal around 0.01 with sigma 1
SHORTFALL = 0.1523  # and the mean of what lies above it


def histogram(n: int, seed: int = 1) -> FloatArray:
    """Return n groups of one item each."""
    x = 0.01 * np.exp(np.random.default_rng(seed).standard_normal(n))
    return np.bincount(tail_bin(x), minlength=N_BINS).astype(np.float64)


@pytest.mark.parametrize(("q", "n"), [(0.95, 100), (0.99, 500), (0.999, 5000)])
def test_a_quantile_is_shown_from_some_five_groups_above_it_on(q: float, n: int) -> None:
    """With fewer there is no band from above, and so nothing."""
    assert quantile(histogram(n), n, q) is not None
    assert quantile(histogram(int(0.9 * n)), int(0.9 * n), q) is None
    assert shortfall(histogram(int(0.9 * n)), int(0.9 * n), q) is None


def test_bands_narrow_around_the_truth() -> None:
    """At a million groups within 3 % for p99; shortfall within 15 %, and never below the quantile."""
    n = 1_000_000
    found, beyond = quantile(histogram(n), n, 0.99), shortfall(histogram(n), n, 0.99)
    assert found is not None
    assert beyond is not None
    # The band ends on edges of the grid, a fifth apart.
    assert found.low <= P99 <= found.high <= 1.5 * found.low
    assert found.mean == pytest.approx(P99, rel=0.03)
    assert beyond.low <= SHORTFALL <= beyond.high
    assert beyond.mean == pytest.approx(SHORTFALL, rel=0.15)
    assert beyond.mean > found.mean
    assert found.n == n


def test_a_point_needs_three_groups_above_it() -> None:
    """None with fewer; inside its bin with more; below and above the grid it stays within its ends."""
    assert point(histogram(299), 299, 0.99) is None
    assert point(histogram(3000), 3000, 0.99) == pytest.approx(P99, rel=0.3)
    low, high = np.zeros(N_BINS), np.zeros(N_BINS)
    low[0] = high[-1] = 1000.0
    assert 0 < (point(low, 1000, 0.99) or 0) <= EDGES[0]
    assert point(high, 1000, 0.99) == LARGEST


def test_infinite_divergences_have_a_finite_shortfall() -> None:
    """They count as the top of the grid."""
    counts = histogram(10_000)
    counts[-1] += 1000
    found = shortfall(counts, 11_000, 0.95)
    assert found is not None
    assert found.mean == pytest.approx(LARGEST, rel=0.1)


def test_upper_bounds_lie_above_the_shares_and_do_not_rise() -> None:
    """Over every bin, an empty one too; tighter with more groups."""
    for n in (100, 10_000):
        counts = histogram(n)
        bounds = ceilings(counts, n, 1e-5)
        assert bounds.shape == (N_BINS,)
        assert (bounds >= survival(counts)[:-1] / n).all()
        assert (np.diff(bounds) <= 0).all()
        assert bounds[0] == 1.0
        assert bounds[-1] == pytest.approx(upper_bound(0.0, n, 1e-5 / N_BINS), rel=1e-6)


def test_one_value_has_the_bin_that_it_has_among_many() -> None:
    """At the edges, between them and beyond them."""
    values = [0.0, *EDGES, *np.nextafter(EDGES, 0.0), 0.5, 1e9, np.inf]
    assert [bin_of(float(value)) for value in values] == tail_bin(values).tolist()
