"""Measures as people read them."""

import pytest

from quantdrift.core.notation import number, percent
from quantdrift.core.records import Metric
from quantdrift.facts.estimate import Estimate
from quantdrift.facts.words.amount import detail, interval, measured

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("ratio", "text"),
    [(0.0523, "5.2 %"), (0.01, "1 %"), (0.0043, "0.43 %"), (0.38, "38 %"), (1.0, "100 %"), (0.0, "0 %")],
)
def test_shares_read_as_percent_with_two_digits(ratio: float, text: str) -> None:
    """A share keeps two significant digits and no idle zeros."""
    assert percent(ratio) == text


def test_bounds_have_the_digits_of_their_mean() -> None:
    """An interval is not more exact than what it belongs to."""
    assert measured(Metric.FLIP, Estimate(mean=0.0523, low=0.0391, high=0.0682), "") == "5.2 % [3.9, 6.8]"
    assert (
        measured(Metric.DIVERGENCE, Estimate(mean=0.0214, low=0.0178, high=0.0263), "nat")
        == "0.021 nat [0.018, 0.026]"
    )
    assert interval(Metric.DIVERGENCE, Estimate(mean=0.02, low=None, high=None)) == ""
    assert measured(Metric.DIVERGENCE, None, "nat") == "no data"


def test_infinite_divergence_is_said_in_words() -> None:
    """A quantised zero is no number."""
    assert number(float("inf")) == "infinite"
    assert number(None) == "?"


def test_measures_of_an_item_are_named() -> None:
    """Numbers with two digits, flags by their name alone; nothing of what is not so, empty, or no figure."""
    assert detail(
        {
            "candidate_top": 0,
            "tv": 0.41234,
            "lost": True,
            "gained": False,
            "classes": [],
            "changed": [4, 7],
            "finish_reason": "stop",
            "by_output": {"latent": 0.25, "aside": 1e-7},
            "clustering": 3,
        }
    ) == (
        "candidate top 0, tv 0.41, lost, changed 4/7, finish reason stop, by output (latent 0.25, aside 0.0000001)"
    )
    assert detail({"candidate_not_finite": True}) == "candidate not finite"
