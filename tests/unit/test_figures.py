"""Figures: rates of a day, windows, and the rounding that people see."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantdrift.facts import figures
from quantdrift.facts.estimate import ClusterSums, Estimate
from quantdrift.facts.figures import DAY, Counted, Figure, FigureName, Scope, Served, Subject, WindowName

pytestmark = pytest.mark.unit
NOON = datetime(2031, 6, 15, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
SCOPE = Scope(
    window=figures.period(NOON - HOUR, NOON),
    of=Subject(model="digits", version="int8-1", slice="scanner=archive"),
    as_of=NOON,
)
SUMS = ClusterSums(n=200, weight=2000.0, weight_sq=2e4, total=160.0, total_sq=1600.0, cross=1600.0)


@pytest.mark.parametrize(
    ("minutes", "basis"),
    [
        (7, "at the rate of the last 7 minutes"),
        (60, "at the rate of the last hour"),
        (150, "at the rate of the last 2 hours"),
        (1440, ""),
        (9999, ""),
    ],
)
def test_a_rate_is_over_the_time_with_data_and_names_it_below_a_day(minutes: int, basis: str) -> None:
    """Sixty requests a minute are 86,400 a day, however young the installation is and however its hours lie."""
    begin = NOON - timedelta(minutes=minutes)
    served = Served.within(NOON - 10 * DAY, NOON + timedelta(minutes=30), begin, NOON)
    figure = figures.requests_per_day(SCOPE, Counted(n=400, requests=60.0 * minutes, served=served))
    assert figure is not None
    assert figure.value == pytest.approx(86_400)
    assert figure.basis == basis


def test_what_is_not_known_is_the_window_and_one_exchange_has_a_rate() -> None:
    """Without first and last exchange the whole window counts; no time is none."""
    assert Served.within(NOON - DAY, NOON, None, None).a_day(5) == 5
    assert Served.within(NOON, NOON, NOON, NOON).a_day(1) == 86_400


@pytest.mark.parametrize(
    ("seconds", "n", "is_said"),
    [(1, 1, False), (30, 5000, False), (60, 100, True), (60, 99, False), (599, 99, False), (600, 3, True)],
)
def test_a_little_traffic_has_a_count_and_no_rate(seconds: int, n: int, *, is_said: bool) -> None:
    """One request is one request and not 86,400 a day; nor is a burst of half a minute a day."""
    served = Served(begin=NOON - timedelta(seconds=seconds), end=NOON)
    counted = Counted(n=n, requests=2.0 * n, served=served)
    rate = figures.requests_per_day(SCOPE, counted)
    assert (rate is not None) is is_said
    assert (figures.changed_per_day(rate, figures.changed_share(SCOPE, counted, SUMS)) is not None) is is_said
    assert figures.requests(SCOPE, counted).value == 2.0 * n


def test_changed_answers_are_requests_times_their_share_with_its_interval() -> None:
    """The counts of a window and of a day, and the interval, are all the same product."""
    counted = Counted(n=200, requests=2000.0, served=Served(begin=NOON - HOUR, end=NOON))
    share = figures.changed_share(SCOPE, counted, SUMS)
    daily = figures.changed_per_day(figures.requests_per_day(SCOPE, counted), share)
    so_far = figures.changed(SCOPE, counted, share)
    assert share is not None
    assert daily is not None
    assert so_far is not None
    assert share.low is not None
    assert (share.value, so_far.value, daily.value) == pytest.approx((0.08, 160.0, 24 * 160.0))
    assert daily.low == pytest.approx(24 * 2000.0 * share.low)
    assert {share.key[1:], daily.key[1:], so_far.key[1:]} == {share.key[1:]}
    assert figures.changed_share(SCOPE, counted, ClusterSums()) is None


def test_now_is_as_many_hours_of_the_clock_as_hold_a_hundred_answers() -> None:
    """A busy hour is enough; a rare slice goes back, at most a day; an old one stays at its last day."""
    last = NOON + timedelta(minutes=20)

    def begin(*hours: tuple[int, int]) -> datetime:
        window = figures.now([(NOON - back * HOUR, n) for back, n in hours], last)
        assert (window.name, window.end) == (WindowName.NOW, last)
        return window.begin

    assert begin((0, 100), (1, 500)) == NOON
    assert begin((0, 40), (1, 59), (3, 1), (4, 8)) == NOON - 3 * HOUR
    assert begin((0, 1), (23, 1), (24, 1), (25, 1)) == NOON - 23 * HOUR
    assert figures.last_day(last).begin == NOON - 23 * HOUR


def test_buckets_are_cut_and_cover_the_time() -> None:
    """The onset and a release end buckets, so that no point mixes before and after; the others are aligned to the clock."""
    onset, release = NOON + timedelta(minutes=7), NOON - timedelta(minutes=1)
    windows = figures.buckets(
        NOON - timedelta(minutes=10), NOON + HOUR, timedelta(minutes=15), (onset, release, NOON + 5 * HOUR)
    )
    edges = [window.begin for window in windows] + [windows[-1].end]
    minutes = [round((at - NOON).total_seconds() / 60) for at in edges]
    assert minutes == [-10, -1, 0, 7, 15, 30, 45, 60]
    assert all(one.end == after.begin for one, after in pairwise(windows))


@given(
    mean=st.floats(0.0, 1.0),
    down=st.floats(0.0, 1.0),
    up=st.floats(0.0, 1.0),
    limit=st.sampled_from([0.001, 0.01, 0.02, 0.5]),
)
def test_a_rounded_number_stays_on_its_side_of_every_limit(
    mean: float, down: float, up: float, limit: float
) -> None:
    """What differs from a limit by more than a millionth does not read as the limit, and the order of the ends stays."""
    ends = Estimate(mean=mean, low=mean * down, high=mean + up * (1 - mean))
    text = figures.rounded(ends, (limit,), scale=100.0, unit="%")
    low, value, high = (float(one.replace(",", "")) / 100 for one in (text.low, text.value, text.high))
    assert low <= value <= high
    for number, read in ((ends.low, low), (mean, value), (ends.high, high)):
        assert number is not None
        for edge in (0.0, limit):
            if abs(number - edge) > 1e-6:
                assert (read > edge and not isclose(read, edge, rel_tol=1e-12)) == (number > edge)


def test_limits_as_people_read_them() -> None:
    """The cases that were found: a bound that became its limit, zero in an interval by rounding."""
    gate = figures.rounded(Estimate(mean=0.004, low=0.00155, high=0.00997), (0.01,), scale=100.0, unit="%")
    assert gate.interval == "0.155 to 0.997 %"
    loss = figures.rounded(Estimate(mean=0.006, low=0.00003, high=0.012), scale=100.0, unit="%")
    assert loss.interval == "0.003 to 1.2 %"
    assert str(figures.rounded(Estimate(mean=0.021, low=None, high=None), unit="nat")) == "0.021 nat"


def test_figures_are_shown_by_their_name() -> None:
    """Shares in percent, rates with two digits, people as they were counted."""
    counted = Counted(n=200, n_people=90, requests=2000.0, served=Served(begin=NOON - HOUR, end=NOON))
    share = figures.changed_share(SCOPE, counted, SUMS)
    assert share is not None
    assert str(figures.shown(share)) == "8 %"
    assert share.n_people == 90
    daily = figures.changed_per_day(figures.requests_per_day(SCOPE, counted), share)
    assert daily is not None
    assert figures.shown(daily).value == "3,800"
    people = figures.people_affected(SCOPE, counted, 1042)
    assert (people.low, people.high, str(figures.shown(people))) == (1042.0, None, "1,042")
    frozen = figures.estimate_figure(
        FigureName.DIVERGENCE, SCOPE, counted, Estimate(mean=0.02, low=None, high=None), "nat"
    )
    assert isinstance(frozen, Figure)
    assert str(figures.shown(frozen)) == "0.02 nat"
