"""Confidence intervals in the report, for any data."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantdrift.facts.interval import N_BINS, mean_of_bins, quantile, share

pytestmark = pytest.mark.property

_BINS = st.lists(st.floats(0, 1e6), min_size=N_BINS, max_size=N_BINS)


@given(mean=st.floats(0, 1), n=st.floats(1e-3, 1e12), top=st.floats(0.01, 10))
def test_share_holds_its_mean_and_keeps_its_range(mean: float, n: float, top: float) -> None:
    """The bounds lie around the mean and inside what is possible."""
    found = share(mean * top, n, top)
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    assert 0 <= found.low <= found.mean * (1 + 1e-12) + 1e-15
    assert found.mean <= found.high <= top * (1 + 1e-12)


@given(bins=_BINS, mean=st.floats(1e-9, 2), n=st.floats(0.1, 1e9))
def test_mean_of_bins_holds_its_mean(bins: list[float], mean: float, n: float) -> None:
    """Whatever the histogram, bounds are positive and lie around the mean."""
    found = mean_of_bins(mean, bins, n, 2.0)
    assert found is not None
    if found.low is not None and found.high is not None:
        assert 0 < found.low <= mean <= found.high <= 2.0


@given(bins=_BINS, n=st.floats(0.1, 1e9))
def test_quantiles_rise_with_their_probability(bins: list[float], n: float) -> None:
    """p50 <= p95 <= p99, each inside its interval."""
    found = [one for p in (0.5, 0.95, 0.99) if (one := quantile(bins, p, n)) is not None]
    values = [one.value for one in found]
    assert values == sorted(values)
    assert all(one.low <= one.value * (1 + 1e-9) for one in found)
    assert all(one.high is None or one.value <= one.high * (1 + 1e-9) for one in found)
