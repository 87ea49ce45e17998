"""The noise floor: what it adds to a budget, when, and for how long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantdrift.drift.noise import (
    MATERIAL,
    WINDOW,
    Level,
    Noise,
    added,
    exceeds,
    is_due,
    of_slice,
    window_of,
)

pytestmark = pytest.mark.unit


def noise(n: int, every: int = 0) -> Noise:
    """Return what is known after `n` groups, of which each `every`-th differs."""
    found = Noise()
    for number in range(1, n + 1):
        found = found.seen(float(bool(every) and number % every == 0), 1.0, WINDOW)
    return found


def test_a_reference_that_never_differs_adds_nothing() -> None:
    """Though its upper bound is above the budget for long: nothing was shown."""
    budget, before = 0.01, 0.0
    for n in (1, 10, 100, 1000, 5000):
        low, high = noise(n).bounds()
        assert low == 0.0
        assert high > min(10 / n, 0.99)
        before = added(before, low, high, budget)
        assert before == 0.0
        assert not exceeds(False, low, high, 0.5 * budget)


def test_noise_that_is_shown_is_added_by_its_upper_bound() -> None:
    """One in fifty against a budget of 1 %: found out within some hundreds of replays."""
    budget, before, at = 0.01, 0.0, 0
    for n in range(25, 2000, 25):
        low, high = noise(n, 50).bounds()
        before = added(before, low, high, budget)
        if before:
            at = n
            break
    assert 100 <= at <= 600
    assert before == high > 0.02
    assert exceeds(False, *noise(2000, 50).bounds(), 0.5 * budget)


def test_what_is_added_follows_knowledge_downwards_and_noise_upwards() -> None:
    """Few changes: it stands still while the bound is within a third of it."""
    assert added(0.03, 0.001, 0.021, 0.01) == 0.03
    assert added(0.03, 0.001, 0.02, 0.01) == 0.02
    assert added(0.03, 0.031, 0.05, 0.01) == 0.05
    assert added(0.03, 0.0, 0.0004, 0.01) == 0.0
    assert added(0.0, MATERIAL * 0.01, 0.02, 0.01) == 0.0


def test_an_excess_ends_when_it_is_shown_to_be_over() -> None:
    """Between the two nothing changes."""
    assert exceeds(False, 0.006, 0.02, 0.005)
    assert exceeds(True, 0.001, 0.006, 0.005)
    assert not exceeds(False, 0.001, 0.006, 0.005)
    assert not exceeds(True, 0.001, 0.005, 0.005)


def test_what_was_seen_long_ago_is_forgotten() -> None:
    """After two windows a reference that was mended is a new one."""
    found = noise(500, 2)
    window = window_of(0.001)
    for _ in range(int(2 * window) - 500 + 1):
        found = found.seen(0.0, 1.0, window)
    assert found.mean == 0.0
    assert window <= found.older.n < 2 * window
    assert found.bounds()[1] < 0.5 * 0.001


def test_a_group_that_is_none_is_refused() -> None:
    """A value above its weight would break the bounds."""
    with pytest.raises(ValueError, match="0 <= value <= weight <= 1"):
        Noise().seen(0.6, 0.5, WINDOW)


@pytest.mark.slow
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=60))
def test_bounds_hold_the_mean_and_each_other(groups: list[tuple[float, float]]) -> None:
    """Whatever the weights: 0 <= low <= mean <= high <= 1."""
    found = Noise()
    for share, v in groups:
        found = found.seen(share * v, v, WINDOW)
    low, high = found.bounds()
    mean = found.mean
    assert 0.0 <= low <= high <= 1.0
    if mean is not None and found.older.weight > 1e-9:
        assert low - 1e-9 <= mean <= high + 1e-9


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.floats(1e-6, 0.5))
def test_what_is_added_covers_what_was_shown(before: float, one: float, other: float, budget: float) -> None:
    """It is never below the lower bound where that matters, and is 0, what it was, or the upper bound."""
    low, high = sorted((one, other))
    after = added(before, low, high, budget)
    assert after in (0.0, before, high)
    assert after >= low or low <= MATERIAL * budget


def test_the_bounds_of_a_slice_are_computed_again_when_they_can_have_changed() -> None:
    """With each of the first groups, with every fiftieth part more, and when a window has moved on."""
    assert all(is_due(n, n + 1) for n in range(40))
    due = [n for n in range(1000, 2000) if is_due(n, n + 1)]
    assert 30 <= len(due) <= 40
    assert is_due(12_000, 5_000)


def test_a_slice_has_the_level_of_its_version_until_its_own_is_known() -> None:
    """Higher where its lower bound has passed that, lower where its upper bound has fallen to two thirds of it."""
    version = Level(added=0.03, exceeds=True)
    assert of_slice(None, version, (0.0, 0.5), 0.01, 0.005) is None
    assert of_slice(None, version, (0.02, 0.04), 0.01, 0.005) is None
    assert of_slice(None, version, (0.031, 0.09), 0.01, 0.005) == Level(added=0.09, exceeds=True)
    assert of_slice(None, version, (0.0, 0.02), 0.01, 0.005) == Level(added=0.02, exceeds=True)
    assert of_slice(Level(added=0.02, exceeds=True), version, (0.0, 0.005), 0.01, 0.005) == Level(added=0.005)
    assert of_slice(Level(added=0.005), version, (0.0, 0.0009), 0.01, 0.005) == Level()
    assert of_slice(None, Level(), (0.0, 0.9), 0.01, 0.005) is None
    assert of_slice(None, Level(added=0.02), (0.006, 0.03), 0.01, 0.005) == Level(added=0.02, exceeds=True)
