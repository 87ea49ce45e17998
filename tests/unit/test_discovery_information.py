"""Which attributes and features a search for slices reads when there are too many."""

import math

import pytest

from quantdrift.core.records import Metric, Predicate
from quantdrift.drift.discovery.information import (
    GLIMPSED,
    KeyChoice,
    attribute_information,
    feature_information,
    informative_keys,
)
from quantdrift.drift.discovery.items import MOST_KEYS, Gathering, SearchItems
from quantdrift.drift.discovery.search import SearchLimits, search

pytestmark = pytest.mark.unit

N = 2_000


def glimpse() -> SearchItems:
    """Return items with four sites, one region, a request id, a rare flag, and a feature that says much."""
    gathering = Gathering()
    for index in range(N):
        attributes = {"header.site": f"s{index % 4}", "header.region": "eu", "header.request": str(index)}
        if index % 100 == 0:
            attributes["header.rare"] = "yes"
        gathering.add(str(index), 1.0, attributes, {"feature.contrast": index / N}, {Metric.FLIP: 0.0})
    return gathering.items()


def test_what_divides_the_traffic_comes_first_and_what_names_each_request_last() -> None:
    """Four equal values say ln 4, a tenth in each bin ln 10, one in a hundred little; ids and constants nothing."""
    items = glimpse()
    told = {key: attribute_information(items, key, 0.005) for key in items.levels}
    assert told["header.site"] == pytest.approx(math.log(4))
    assert told["header.rare"] == pytest.approx(-(0.01 * math.log(0.01) + 0.99 * math.log(0.99)))
    assert told["header.region"] == told["header.request"] == 0.0
    assert feature_information(items, "feature.contrast", 10) == pytest.approx(math.log(10), rel=0.01)
    best = informative_keys(items, 0.005, 10, most=3)
    assert best == ("feature.contrast", "header.site", "header.rare")
    # Too rare for a slice is too rare to be told.
    assert attribute_information(items, "header.rare", 0.02) == 0.0


def test_weights_count_and_what_an_item_lacks_is_a_class() -> None:
    """One item in four that stands for three others: half of the traffic; a feature that half have says ln 2 and more."""
    gathering = Gathering()
    for index in range(400):
        first = index % 4 == 0
        gathering.add(
            str(index), 1 / 3 if first else 1.0, {"a": "x" if first else "y"}, {"f": 1.0} if first else {}, {}
        )
    items = gathering.items()
    assert attribute_information(items, "a", 0.005) == pytest.approx(math.log(2))
    assert feature_information(items, "f", 10) == pytest.approx(math.log(2)), "all of one value, or none"


def test_a_key_that_is_in_use_has_a_place_whatever_it_says() -> None:
    """A slice that is watched must be recognised when it is found again."""
    best = informative_keys(glimpse(), 0.005, 10, first={"header.region"}, most=2)
    assert best == ("header.region", "feature.contrast")


@pytest.mark.slow
def test_the_fault_is_found_behind_a_hundred_attributes_that_say_nothing() -> None:
    """Its attribute is the last one recorded: by order it had no place."""
    choice = KeyChoice(0.005, 10)
    plain = Gathering()
    for index in range(GLIMPSED + 1_000):
        bad = index % 10 == 0
        attributes = {f"header.a{place:03}": "same" for place in range(100)}
        attributes["header.z"] = "bad" if bad else "good"
        flip = float(bad and index % 3 == 0)
        for taking in (choice, plain):
            taking.add(str(index), 1.0, attributes, {}, {Metric.FLIP: flip})
    found = search(choice.items(), {Metric.FLIP: 0.1}, SearchLimits()).found
    assert [one.where for one in found] == [(Predicate(key="header.z", equals="bad"),)]
    assert search(plain.items(), {Metric.FLIP: 0.1}, SearchLimits()).found == ()
    items = choice.items()
    assert (len(items), len(items.codes), items.n_left_out) == (GLIMPSED + 1_000, MOST_KEYS, 101 - MOST_KEYS)


def test_what_is_met_later_takes_the_places_that_are_left() -> None:
    """Also when the first items had it not; few items are all there are."""
    choice = KeyChoice(0.005, 10)
    for index in range(GLIMPSED):
        choice.add(str(index), 1.0, {"header.site": "s"}, {}, {})
    choice.add("late", 1.0, {"header.late": "x"}, {"feature.late": 1.0}, {})
    items = choice.items()
    assert set(items.levels) == {"header.site", "header.late"}
    assert set(items.numbers) == {"feature.late"}
    assert items.n_left_out == 0
    few = KeyChoice(0.005, 10)
    few.add("one", 1.0, {"header.site": "s"}, {}, {})
    assert (len(few.items()), len(KeyChoice(0.005, 10).items())) == (1, 0)
