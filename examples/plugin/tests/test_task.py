"""The task `forecast` passes the tests of every comparator, and its figures are those of their definition."""

from typing import Any

import numpy as np
import pytest

from quantdrift.plugins.tasks import Array, Model, OperatorError, Outputs, Task
from quantdrift.testing.comparators import N_ITEMS, ComparatorCase, ComparatorSuite
from quantdrift_forecast.pinball import PinballComparator
from quantdrift_forecast.task import FORECAST, ForecastOptions


def _outputs(seed: int) -> Outputs:
    steps = np.random.default_rng(seed).normal(size=(N_ITEMS, 5, 3))
    return {"forecast": np.cumsum(np.abs(steps), axis=-1).astype(np.float32)}


def _model(**options: Any) -> Model:
    return Model(name="demand", task=Task("forecast"), options=options)


class TestForecast(ComparatorSuite):
    """What quantdrift asks of every comparator."""

    cases = (
        ComparatorCase.of_plugin(FORECAST, _model(), _outputs),
        ComparatorCase.of_plugin(FORECAST, _model(levels=[0.05, 0.5, 0.95]), _outputs),
    )


def _compared(candidate: list[float], reference: list[float]) -> list[float]:
    sides: list[Array] = [np.array([side]) for side in (candidate, reference)]
    found = PinballComparator(ForecastOptions()).compare(*sides)
    return [found.flip[0], found.divergence[0]]


def test_a_forecast_that_is_too_low_costs_its_level() -> None:
    """One unit too low costs 0.1, 0.5 and 0.9; one too high 0.9, 0.5 and 0.1: on average 0.5, of a level of 20."""
    assert _compared([9, 19, 29], [10, 20, 30]) == pytest.approx([1.0, 0.5 / 20])
    assert _compared([10, 20, 29], [10, 20, 30]) == pytest.approx([0.0, 0.9 / 3 / 20])
    assert _compared([10, 20, 31], [10, 20, 30]) == pytest.approx([0.0, 0.1 / 3 / 20])


def test_quantiles_that_cross_are_a_flip() -> None:
    """However small the loss is."""
    assert _compared([10, 20.001, 20], [10, 20, 20])[0] == 1.0


def test_levels_that_do_not_rise_are_refused() -> None:
    """By the message that `quantdrift config check` prints."""
    with pytest.raises(OperatorError, match="quantiles that rise"):
        ComparatorCase.of_plugin(FORECAST, _model(levels=[0.9, 0.1]), _outputs)
