"""Weighted means and quantiles of sampled items."""

import math
from collections.abc import Callable
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from quantdrift.frames import weighted_mean, weighted_quantile

pytestmark = pytest.mark.unit

COLUMNS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "pandas": pd.Series,
    "pandas with its own missing value": lambda values: pd.Series(values, dtype="boolean"),
    "polars": pl.Series,
    "arrow": pa.array,
    "chunked arrow": lambda values: pa.chunked_array([values[:1], values[1:]]),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_a_mean_leaves_out_what_is_missing_with_its_weight(kind: str) -> None:
    """One true item of weight 1 and one false of weight 3 make 1/4, whatever kind of column holds them."""
    assert weighted_mean(COLUMNS[kind]([True, None, False]), [1.0, 2.0, 3.0]) == 0.25


def test_a_quantile_is_the_first_value_that_reaches_its_share_of_the_weight() -> None:
    """By hand: weights 1, 2, 1 of the values 1, 2, infinity reach 1/4, 3/4 and 1."""
    values, weights = [2.0, math.inf, 1.0], [2.0, 1.0, 1.0]
    found = [weighted_quantile(values, weights, p) for p in (0.0, 0.25, 0.26, 0.75, 0.76, 1.0)]
    assert found == [1.0, 1.0, 2.0, 2.0, math.inf, math.inf]


def test_an_item_without_weight_is_no_quantile() -> None:
    """It stands for no traffic."""
    assert weighted_quantile([0.0, 1.0], [0.0, 1.0], 0.0) == 1.0


def test_nothing_known_is_not_a_number() -> None:
    """Neither an empty column nor one of missing values has a mean or a quantile."""
    nothing: tuple[list[Any], ...] = ([], [None])
    for values in nothing:
        weights = [1.0] * len(values)
        assert math.isnan(weighted_mean(values, weights))
        assert math.isnan(weighted_quantile(values, weights, 0.5))


def test_equal_weights_give_the_plain_statistics() -> None:
    """The mean is the mean, and the median of nine numbers the fifth."""
    values = [5.0, 3.0, 8.0, 1.0, 9.0, 2.0, 7.0, 4.0, 6.0]
    assert weighted_mean(values, [0.1] * 9) == pytest.approx(5.0)
    assert weighted_quantile(values, [0.1] * 9, 0.5) == 5.0


@pytest.mark.parametrize(
    ("weights", "words"),
    [([1.0], "one weight for each value"), ([1.0, -1.0], "negative"), ([1.0, math.nan], "missing")],
)
def test_weights_that_cannot_be_are_refused(weights: list[float], words: str) -> None:
    """A wrong weight would give a wrong figure that looks right."""
    with pytest.raises(ValueError, match=words):
        weighted_mean([1.0, 2.0], weights)


def test_a_share_outside_0_and_1_is_refused() -> None:
    """99 is a percentage."""
    with pytest.raises(ValueError, match="p is 99"):
        weighted_quantile([1.0], [1.0], 99)
