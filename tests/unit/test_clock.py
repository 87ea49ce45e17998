"""The clocks, and when something is due that is done again and again."""

from datetime import UTC, datetime, timedelta

import pytest

from quantdrift.core.clock import is_due

pytestmark = pytest.mark.unit

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
DAY = timedelta(days=1)


@pytest.mark.parametrize(
    ("last", "due"),
    [
        (None, True),
        (NOW - DAY, True),
        (NOW - timedelta(hours=23), False),
        (NOW, False),
        (NOW + timedelta(hours=2), True),
    ],
    ids=["never", "a day ago", "23 hours ago", "now", "the clock was set back"],
)
def test_a_clock_that_was_set_back_does_not_put_off_what_is_done_once_a_day(
    last: datetime | None, *, due: bool
) -> None:
    """It is done now, not when the time comes again at which it was done."""
    assert is_due(last, DAY, NOW) is due
