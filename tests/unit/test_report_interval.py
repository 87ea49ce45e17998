"""Confidence intervals in the report."""

import math

import pytest

from quantdrift.facts.estimate import Estimate
from quantdrift.facts.interval import (
    HIGHEST,
    LOWEST,
    N_BINS,
    excess,
    quantile,
    shortfall,
)

pytestmark = pytest.mark.unit

LAST_EDGE = 10.0 * 10 ** (-7 / 64)

_STEP = math.log(HIGHEST / LOWEST) / N_BINS


def _bins_of(values: list[float]) -> list[float]:
    bins = [0.0] * N_BINS
    for value in values:
        bins[min(N_BINS - 1, max(0, int(math.log(value / LOWEST) / _STEP)))] += 1.0
    return bins


def test_quantile_lies_within_a_bin_of_the_true_one() -> None:
    """The histogram's quantile is off by no more than the width of a bin, a factor of 1.29."""
    values = [10 ** (-4 + 3 * index / 5000) for index in range(5000)]
    for probability in (0.5, 0.95, 0.99):
        found = quantile(_bins_of(values), probability, 5000)
        assert found is not None
        true = values[int(probability * 5000)]
        assert true / 1.29 <= found.value <= true * 1.29
        assert found.low <= true <= (found.high or math.inf)


@pytest.mark.parametrize(("probability", "n"), [(0.99, 999), (0.95, 199), (0.5, 19)])
def test_there_is_no_quantile_where_n_is_too_small(probability: float, n: int) -> None:
    """Below ten exchanges expected beyond it, a quantile is no number."""
    bins = _bins_of([0.01] * n)
    assert quantile(bins, probability, n) is None
    assert quantile(bins, probability, n + 1) is not None


def test_quantile_in_the_open_last_bin_has_no_upper_bound() -> None:
    """What lies in the last bin is known only to lie above its lower edge, 7.8: that is what is said of the point, too."""
    found = quantile([0.0] * 63 + [5000.0], 0.5, 5000)
    assert found is not None
    assert (found.high, found.above) == (None, True)
    assert found.value == found.low == pytest.approx(LAST_EDGE)


def test_the_mean_above_a_quantile_is_that_of_the_values_above_it() -> None:
    """Off by no more than the width of a bin; its interval holds it, and lies above the quantile's lower end."""
    values = [10 ** (-4 + 3 * index / 5000) for index in range(5000)]
    for probability in (0.5, 0.95, 0.99):
        found, place = (one(_bins_of(values), probability, 5000) for one in (shortfall, quantile))
        assert found is not None
        assert place is not None
        above = values[int(probability * 5000) :]
        true = sum(above) / len(above)
        assert true / 1.15 <= found.value <= true * 1.15
        assert found.low <= true <= (found.high or math.inf)
        assert found.value > place.value


def test_the_mean_above_a_quantile_is_a_lower_bound_where_some_of_it_lies_in_the_open_bin() -> None:
    """Values of 50 nats, or infinite ones, are known to lie above 7.8: their mean is said to be above that, and no more."""
    found = shortfall([4900.0] + [0.0] * 62 + [100.0], 0.99, 5000)
    assert found is not None
    assert (found.high, found.above) == (None, True)
    assert found.value == pytest.approx(LAST_EDGE)
    few = shortfall([4900.0] + [0.0] * 50 + [99.0] + [0.0] * 11 + [1.0], 0.99, 5000)
    assert few is not None
    assert few.above
    assert few.value < LAST_EDGE


def test_there_is_a_mean_above_a_quantile_where_there_is_the_quantile() -> None:
    """Ten exchanges are expected beyond it, in the slice's effective number."""
    bins = _bins_of([0.01] * 2000)
    assert shortfall(bins, 0.99, 999) is None
    assert shortfall([0.0] * N_BINS, 0.99, 1000) is None
    all_alike = shortfall(bins, 0.99, 1000)
    assert all_alike is not None
    assert all_alike.low <= 0.01 <= (all_alike.high or 0.0)


def test_excess_ranks_by_what_is_sure() -> None:
    """A small slice with a wild mean ranks behind a large one that is surely above its budget."""
    small, large = Estimate(mean=0.05, low=0.009, high=0.24), Estimate(mean=0.03, low=0.026, high=0.035)
    assert excess(large, 0.01) > 1 > excess(small, 0.01) > excess(None, 0.01)
