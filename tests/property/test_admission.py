"""The admission of values by share: the bounds of the sketch, and who gets a place, for any traffic."""

from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantdrift.core.admission import (
    COUNTERS_PER_PLACE,
    HALF_LIFE,
    IDLE_AFTER,
    Place,
    PlaceChanges,
    ShareSketch,
    decide,
)

pytestmark = pytest.mark.property

NOW = datetime(2026, 11, 22, tzinfo=UTC)
VALUES = st.integers(0, 60).map(str)
STREAMS = st.lists(st.tuples(VALUES, st.floats(0.1, 50)), max_size=400)


def close(bound: float) -> float:
    """Return a bound with room for rounding."""
    return bound * (1 + 1e-9) + 1e-9


@given(streams=st.lists(STREAMS, min_size=1, max_size=4), n_counters=st.integers(1, 12), days=st.floats(0, 3))
def test_every_count_is_low_by_at_most_the_weight_divided_by_the_counters(
    streams: list[list[tuple[str, float]]], n_counters: int, days: float
) -> None:
    """Misra-Gries, also after merges and decay; a value above 1 / (k + 1) of the weight is never left out."""
    merged, truth = ShareSketch(n_counters), Counter[str]()
    for stream in streams:
        part = ShareSketch(n_counters)
        for value, weight in stream:
            part.add(value, weight)
            truth[value] += weight  # type: ignore[assignment]  # weights are no integers
            assert len(part.counts) <= 2 * n_counters
        merged.merge(part)
        merged.decay(timedelta(days=days))
        for value in truth:
            truth[value] *= 0.5**days
        total = sum(truth.values())
        assert len(merged.counts) <= n_counters
        assert merged.total == pytest.approx(total)
        assert merged.error <= close(total / (n_counters + 1))
        for value, weight in truth.items():
            assert merged.at_least(value) <= close(weight)
            assert weight <= close(merged.at_most(value))
            if weight > close(total / (n_counters + 1)):
                assert value in merged.counts


def places_of(*values: str, protected: tuple[str, ...] = ()) -> list[Place]:
    """Return the places of these values, all of them seen just now."""
    return [Place(value=value, seen_at=NOW, protected=value in protected) for value in values]


def after(places: list[Place], decision: PlaceChanges) -> list[Place]:
    """Return the places after a decision."""
    return [place for place in places if place.value not in decision.lapsed] + places_of(*decision.admitted)


@given(stream=STREAMS, most=st.integers(1, 8), first=st.sets(VALUES, max_size=8), swaps=st.integers(0, 3))
def test_a_value_with_more_than_one_and_a_half_even_shares_always_gets_a_place(
    stream: list[tuple[str, float]], most: int, first: set[str], swaps: int
) -> None:
    """Whoever had the places before, and however many other values there are."""
    shares = ShareSketch(COUNTERS_PER_PLACE * most)
    truth: dict[str, float] = {}
    for value, weight in stream:
        shares.add(value, weight)
        truth[value] = truth.get(value, 0.0) + weight
    places = places_of(*sorted(first)[:most])
    decision = decide(shares, places, most, NOW, most_swaps=swaps)
    placed = {place.value for place in after(places, decision)}
    assert len(placed) <= most
    total = sum(truth.values())
    for value, weight in truth.items():
        if weight > close(total * (1 / most + 2 / (COUNTERS_PER_PLACE * most + 1))):
            assert value in placed


@given(stream=STREAMS, most=st.integers(1, 8), first=st.sets(VALUES, max_size=8))
def test_the_same_traffic_moves_nothing_twice(
    stream: list[tuple[str, float]], most: int, first: set[str]
) -> None:
    """What was decided stays decided until shares change, so no slice flaps."""
    shares = ShareSketch(COUNTERS_PER_PLACE * most)
    for value, weight in stream:
        shares.add(value, weight)
    places = places_of(*sorted(first)[:most])
    places = after(places, decide(shares, places, most, NOW, most_swaps=100))
    again = decide(shares, places, most, NOW, most_swaps=100)
    assert (again.lapsed, again.admitted) == ({}, {})


def test_forty_invented_values_displace_no_real_one() -> None:
    """They come first and take every place; a minute later the real ones have them, and keep them."""
    shares = ShareSketch(COUNTERS_PER_PLACE * 32)
    for number in range(40):
        shares.add(f"invented-{number}")
    places = places_of(*(f"invented-{number}" for number in range(32)))
    for number in range(600):
        shares.add(f"real-{number % 10}")
    places = after(places, decide(shares, places, 32, NOW, most_swaps=32))
    real = {f"real-{number}" for number in range(10)}
    assert real <= {place.value for place in places}
    for number in range(5_000):
        shares.add(f"invented-{number}")
    places = after(places, decide(shares, places, 32, NOW, most_swaps=32))
    assert real <= {place.value for place in places}


def test_a_value_with_an_open_alert_keeps_its_place() -> None:
    """However small its share, and however long it was not seen."""
    shares = ShareSketch(8)
    for value, weight in (("b", 100.0), ("a", 1.0)):
        shares.add(value, weight)
    old = NOW - 2 * IDLE_AFTER
    kept = [Place(value="a", seen_at=old, protected=True), Place(value="c", seen_at=NOW, protected=True)]
    assert decide(shares, kept, 2, NOW, most_swaps=5) == PlaceChanges(lapsed={}, admitted={})
    free = [Place(value="a", seen_at=old), Place(value="c", seen_at=NOW, protected=True)]
    decision = decide(shares, free, 2, NOW, most_swaps=5)
    assert decision.lapsed == {"a": "not seen for 30 days"}
    assert list(decision.admitted) == ["b"]


def test_values_below_an_even_share_displace_a_bounded_number_of_others_in_a_day() -> None:
    """Each one leaves a row behind; values above an even share are not bound by that."""
    shares = ShareSketch(80)
    for number in range(40):
        shares.add(f"v{number}", 10.0 + number / 100)
    places = places_of(*(f"p{number}" for number in range(20)))
    assert len(decide(shares, places, 20, NOW, most_swaps=3).admitted) == 3
    shares.add("large", 100.0)
    decision = decide(shares, places, 20, NOW, most_swaps=0)
    assert list(decision.admitted) == ["large"]


def test_weights_halve_in_a_day() -> None:
    """A value that ended gives its place to one that goes on."""
    shares = ShareSketch(8)
    shares.add("a", 8.0)
    shares.decay(3 * HALF_LIFE)
    assert (shares.at_least("a"), shares.total) == (1.0, 1.0)
