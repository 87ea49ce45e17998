"""Confidence intervals in the report, for any data."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantdrift.facts.interval import N_BINS, quantile

pytestmark = pytest.mark.property

_BINS = st.lists(st.floats(0, 1e6), min_size=N_BINS, max_size=N_BINS)


@given(bins=_BINS, n=st.floats(0.1, 1e9))
def test_quantiles_rise_with_their_probability(bins: list[float], n: float) -> None:
    """p50 <= p95 <= p99, each inside its interval."""
    found = [one for p in (0.5, 0.95, 0.99) if (one := quantile(bins, p, n)) is not None]
    values = [one.value for one in found]
    assert values == sorted(values)
    assert all(one.low <= one.value * (1 + 1e-9) for one in found)
    assert all(one.high is None or one.value <= one.high * (1 + 1e-9) for one in found)
