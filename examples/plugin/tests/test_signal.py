"""The signal `missed-intervals` passes the tests of every signal, and its values are those of their definition."""

import numpy as np
import pytest

from quantdrift.plugins.tasks import Model, Outputs, Task
from quantdrift.testing.comparators import N_ITEMS, ComparatorCase
from quantdrift.testing.signals import SignalCase, SignalSuite
from quantdrift_forecast.missed import MISSED_INTERVALS
from quantdrift_forecast.pinball import PinballComparator
from quantdrift_forecast.task import FORECAST, ForecastOptions


def _outputs(seed: int) -> Outputs:
    steps = np.random.default_rng(seed).normal(size=(N_ITEMS, 5, 3))
    return {"forecast": np.cumsum(np.abs(steps), axis=-1).astype(np.float32)}


_CASE = ComparatorCase.of_plugin(FORECAST, Model(name="demand", task=Task("forecast")), _outputs)


class TestMissedIntervals(SignalSuite):
    """What quantdrift asks of every signal."""

    cases = (SignalCase("missed-intervals", MISSED_INTERVALS, _CASE),)


@pytest.mark.parametrize(
    ("candidate", "missed"),
    [([10, 20, 30], 0.0), ([30, 40, 50], 0.0), ([31, 40, 50], 1.0), ([1, 2, 9], 1.0), ([50, 20, 40], 0.0)],
)
def test_an_interval_misses_the_reference_where_they_do_not_overlap(
    candidate: list[float], missed: float
) -> None:
    """Beyond either end of [10, 30]; an end in common is an overlap, and crossing quantiles have the interval that they span."""
    sides = [np.array([[side]], dtype=np.float64) for side in (candidate, [10, 20, 30])]
    compared = PinballComparator(ForecastOptions()).compare(*sides)
    assert compared.detail["missed"][0] == missed
