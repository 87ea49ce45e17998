"""The rate of a day."""

from datetime import UTC, datetime, timedelta

import pytest

from quantdrift.facts.rates import DAY, Served

pytestmark = pytest.mark.unit
NOON = datetime(2031, 6, 15, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("minutes", "basis"),
    [
        (7, "at the rate of the last 7 minutes"),
        (150, "at the rate of the last 2 hours"),
        (1440, ""),
        (9999, ""),
    ],
)
def test_a_rate_is_over_the_time_with_data_and_names_it_below_a_day(minutes: int, basis: str) -> None:
    """Sixty requests a minute are 86,400 a day, however young the installation is and however its hours lie."""
    begin = NOON - timedelta(minutes=minutes)
    served = Served.within(NOON - 10 * DAY, NOON + timedelta(minutes=30), begin, NOON)
    assert served.a_day(60 * minutes) == pytest.approx(86_400)
    assert served.basis == basis


def test_what_is_not_known_is_the_window_and_one_exchange_has_a_rate() -> None:
    """Without first and last exchange the whole window counts; no time is none."""
    assert Served.within(NOON - DAY, NOON, None, None).a_day(5) == 5
    assert Served.within(NOON, NOON, NOON, NOON).a_day(1) == 86_400
