"""The period of a report."""

from datetime import UTC, datetime, timedelta

import pytest

from quantdrift.core.errors import OperatorError
from quantdrift.report.period import MOST_BUCKETS, MOST_ITEMS, Period, resolution
from quantdrift.storage.figures.periods import Extent, Grain

pytestmark = pytest.mark.unit

NOW = datetime(2026, 11, 16, 10, 35, 12, tzinfo=UTC)


def _extent(span: timedelta, n_items: int = 1000) -> Extent:
    return Extent(first=NOW - span, last=NOW, n_items=n_items)


@pytest.mark.parametrize(
    ("span", "grain", "width"),
    [
        (timedelta(minutes=3), Grain.ITEM, timedelta(seconds=10)),
        (timedelta(minutes=50), Grain.ITEM, timedelta(minutes=1)),
        (timedelta(minutes=90), Grain.ITEM, timedelta(minutes=2)),
        (timedelta(hours=24), Grain.ITEM, timedelta(minutes=30)),
        (timedelta(days=7), Grain.HOUR, timedelta(hours=3)),
        (timedelta(days=30), Grain.HOUR, timedelta(hours=12)),
        (timedelta(days=60), Grain.DAY, timedelta(days=1)),
        (timedelta(days=700), Grain.DAY, timedelta(days=28)),
    ],
)
def test_resolution_follows_the_span_of_the_data(span: timedelta, grain: Grain, width: timedelta) -> None:
    """Seconds and minutes for short spans, hours for a week, days for long ones; never more than sixty points of it."""
    period = Period(kind=Period.of(kind="week", end=NOW).kind, begin=NOW - 2 * span, end=NOW)
    found = resolution(period, _extent(span))
    assert found is not None
    assert (found.window.grain, found.width) == (grain, width)
    assert span <= MOST_BUCKETS * found.width
    assert found.window.begin <= NOW - span
    assert found.window.end >= NOW


def test_a_busy_hour_is_not_read_item_by_item() -> None:
    """Above 300,000 comparisons the roll-ups are read, however short the period."""
    found = resolution(Period.of(kind="day", end=NOW), _extent(timedelta(hours=1), MOST_ITEMS + 1))
    assert found is not None
    assert found.window.grain is Grain.HOUR
    assert found.width == timedelta(hours=1)


def test_rollups_are_read_on_whole_hours() -> None:
    """A window on roll-ups begins and ends where their rows do, and covers the period."""
    found = resolution(Period.of(kind="week", end=NOW), _extent(timedelta(days=6)))
    assert found is not None
    assert (found.window.begin.minute, found.window.end.minute) == (0, 0)
    assert found.window.end == NOW.replace(hour=11, minute=0, second=0)


def test_a_short_window_never_leaves_the_period() -> None:
    """Read item by item, nothing from before the period counts."""
    period = Period.of(kind="range", end=NOW, start=NOW - timedelta(minutes=10, seconds=7))
    found = resolution(period, _extent(timedelta(minutes=10)))
    assert found is not None
    assert found.window.begin >= period.begin
    assert found.window.end == period.end


def test_nothing_compared_has_no_resolution() -> None:
    """Without data there is nothing to sum."""
    assert resolution(Period.of(kind="week", end=NOW), Extent(first=None, last=None, n_items=0)) is None


def test_a_week_is_seven_days_and_a_day_24_hours() -> None:
    """Both end at the given time."""
    assert Period.of(kind="week", end=NOW).begin == NOW - timedelta(days=7)
    assert Period.of(kind="day", end=NOW).begin == NOW - timedelta(days=1)


def test_a_period_must_begin_before_it_ends() -> None:
    """A range with its ends exchanged is refused in words, to the minute."""
    told = f"{NOW:%Y-%m-%d %H:%M} UTC is not before {NOW:%Y-%m-%d %H:%M} UTC$"
    with pytest.raises(OperatorError, match=f"begin before it ends: {told}"):
        Period.of(kind="range", end=NOW, start=NOW)
