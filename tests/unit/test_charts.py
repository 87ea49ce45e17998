"""Plots: what a person must be able to read in them, at every width."""

import itertools
import re
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantdrift.show.charts import (
    HEIGHT,
    LEFT,
    LETTER,
    NARROW,
    RIGHT,
    WIDE,
    Point,
    VerticalLine,
    bars,
    line,
    margin_bars,
)

pytestmark = pytest.mark.unit

BEGIN = datetime(2026, 11, 16, tzinfo=UTC)
END = BEGIN + timedelta(days=7)
HOUR = timedelta(hours=1)
_FRAME = 1000.0
_SPANS = st.timedeltas(timedelta(minutes=5), timedelta(days=400))
_STARTS = st.timedeltas(timedelta(), timedelta(days=4000)).map(
    lambda since: datetime(2020, 1, 1, tzinfo=UTC) + since
)
_WIDTHS = st.integers(320, 1600)  # of the screen


class Text(NamedTuple):
    """A label on the screen: its row, and where it begins and ends."""

    row: str
    begin: float
    end: float
    text: str


def _plot_width(screen: int) -> int:
    """Return the pixels between the axes where a card is as wide as a screen: 34 are its margins and borders on a phone."""
    return screen - 34 - LEFT - RIGHT


def _texts(chart: str, width: int) -> list[Text]:
    """Return the labels along a plot so many pixels wide, those that the style sheet hides left out."""
    drawn = []
    for kind, x, y, anchor, text in re.findall(
        r'<text class="((?:tick|mark-text)[^"]*)" x="([\d.]+)%" y="([\d.]+)" text-anchor="(\w+)">([^<]*)<',
        chart,
    ):
        if "wide" in kind and width < WIDE:
            continue
        size = LETTER * len(text)
        begin = width * float(x) / 100 - {"start": 0, "middle": size / 2, "end": size}[anchor]
        drawn.append(Text(y, begin, begin + size, text))
    return drawn


def _check_labels(chart: str, width: int) -> None:
    texts = _texts(chart, width)
    assert all(text.begin >= -LEFT - 1 and text.end <= width + RIGHT + 1 for text in texts)
    for _, row in itertools.groupby(sorted(texts), key=lambda text: text.row):
        for before, after in itertools.pairwise(row):
            assert before.end <= after.begin, (before, after)


@st.composite
def _plots(draw: st.DrawFn) -> tuple[str, datetime, datetime]:
    begin = draw(_STARTS)
    end = begin + draw(_SPANS)
    at = st.floats(0, 1).map(lambda part: begin + part * (end - begin))
    texts = st.text("abcdefg .:-0123456789", min_size=1, max_size=40)
    kinds = st.sampled_from(["release", "onset", "alert", "decision"])
    marks = draw(
        st.lists(
            st.builds(lambda at, kind, text: VerticalLine(at=at, kind=kind, text=text), at, kinds, texts),
            max_size=12,
        )
    )
    shares = st.floats(0, 1)
    points = sorted(
        draw(st.lists(st.builds(Point, at, shares, st.none() | shares, st.none() | shares), max_size=20)),
        key=lambda point: point.at,
    )
    chart = line(
        points,
        begin,
        end,
        title="flips",
        width=(end - begin) / 20,
        others=points[::2],
        budget=draw(st.none() | shares),
        baseline=draw(st.none() | shares),
        marks=marks,
        alerts=[(begin, end)],
    )
    return str(chart), begin, end


@pytest.mark.slow
@given(plot=_plots(), screen=_WIDTHS)
def test_labels_never_run_together_and_stay_in_the_card(
    plot: tuple[str, datetime, datetime], screen: int
) -> None:
    """From five minutes to four hundred days, on a phone and on a wide screen, whatever the marks say."""
    _check_labels(plot[0], _plot_width(screen))


@pytest.mark.slow
@given(plot=_plots())
def test_everything_that_is_drawn_lies_within_the_axes(plot: tuple[str, datetime, datetime]) -> None:
    """Lines, bands, dots and levels: none left of the axis, above the top or below zero."""
    chart, _, _ = plot
    floor = HEIGHT - 40
    for path in re.findall(r' points="([^"]*)"', chart):
        for pair in path.split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= _FRAME
            assert 20 <= y <= floor
    for x, y in re.findall(r'cx="([\d.]+)%" cy="([\d.]+)"', chart):
        assert 0 <= float(x) <= 100
        assert 20 <= float(y) <= floor
    for y in re.findall(r'<line class="(?:grid|budget|baseline)"[^>]* y1="([\d.]+)"', chart):
        assert 20 <= float(y) <= floor


@given(begin=_STARTS, span=_SPANS)
def test_a_time_axis_says_when_it_is(begin: datetime, span: timedelta) -> None:
    """On the narrowest phone there are at least two labels, of which one is a day or a year, and the time zone."""
    chart = str(line([], begin, begin + span, title="flips", width=span))
    texts = [text.text for text in _texts(chart, NARROW)]
    assert "UTC" in texts
    assert any(str(begin.year) in text for text in texts)
    assert len(texts) >= 3


@pytest.mark.parametrize(
    ("span", "some"),
    [
        (timedelta(minutes=5), {"00:01", "00:03", "16 Nov 2026"}),
        (timedelta(hours=3), {"00:30", "01:30"}),
        (timedelta(days=2), {"00:00", "12:00", "17 Nov 2026"}),
        (timedelta(days=7), {"16 Nov", "18 Nov", "2026"}),
        (timedelta(days=180), {"Dec", "Jan", "Feb", "2027"}),
        (timedelta(days=400), {"Jan", "May", "2027"}),
    ],
)
def test_ticks_are_round_times(span: timedelta, some: set[str]) -> None:
    """Minutes, hours, days, months: what changes from tick to tick, and below it the day or year that they are of."""
    chart = str(line([], BEGIN, BEGIN + span, title="flips", width=span))
    assert some <= {text.text for text in _texts(chart, 1000)}


def test_every_mark_has_its_line_and_its_text_in_a_title() -> None:
    """A text that has no room beside the others is read by pointing at its line."""
    marks = [
        VerticalLine(at=BEGIN + timedelta(hours=at), kind="decision", text=f"baseline accepted: flips {at}")
        for at in (0, 3, 40, 41, 60, 80, 120, 150, 160, 167)
    ]
    chart = str(line([Point(BEGIN, 0.1, 0.0, 0.2)], BEGIN, END, title="flips", width=HOUR, marks=marks))
    assert all(f"<title>{mark.text}</title>" in chart for mark in marks)
    assert 1 <= sum(text.text.startswith("baseline") for text in _texts(chart, 800)) < len(marks)


def test_the_alert_has_the_right_of_way() -> None:
    """Where two texts have no room beside each other, the alert's is shown."""
    marks = [
        VerticalLine(at=BEGIN + timedelta(hours=at), kind=kind, text=f"what {kind} says in many words")
        for at, kind in ((60, "decision"), (61, "alert"))
    ]
    chart = str(line([], BEGIN, END, title="flips", width=HOUR, marks=marks))
    assert [text.text for text in _texts(chart, 500) if "says" in text.text] == [
        "what alert says in many words"
    ]


def test_a_time_without_data_breaks_the_line_and_a_lonely_point_is_seen() -> None:
    """Nothing compared is no zero, and no straight line either."""
    at = (0, 1, 2, 6, 7, 20)
    points = [Point(BEGIN + n * HOUR, 0.01, None, None) for n in at]
    chart = str(line(points, BEGIN, END, title="flips", width=HOUR))
    assert [len(path.split()) for path in re.findall(r'<polyline class="mean" points="([^"]*)"', chart)] == [
        3,
        2,
    ]
    assert chart.count('class="mean dot"') == 1


def test_a_baseline_is_drawn_at_its_level_between_zero_and_the_budget() -> None:
    """Its line is lower than that of a larger budget, whatever the points are."""
    points = [Point(BEGIN, 0.01, 0.0, 0.02)]
    chart = str(line(points, BEGIN, END, title="flips", width=HOUR, budget=0.02, baseline=0.005))
    height = {
        kind: float(y) for kind, y in re.findall(r'<line class="(budget|baseline)"[^>]* y1="([\d.]+)"', chart)
    }
    floor = HEIGHT - 40
    assert (floor - height["baseline"]) / (floor - height["budget"]) == pytest.approx(0.25, abs=0.02)


def test_a_plot_takes_colours_and_width_from_the_page_and_nothing_from_elsewhere() -> None:
    """No colour, font, style, script, image or address of its own; what comes from outside is escaped."""
    marks = [VerticalLine(at=BEGIN, kind="release", text="<script>")]
    chart = str(line([Point(BEGIN, 0.1, 0.0, 0.2)], BEGIN, END, title='"><script>', width=HOUR, marks=marks))
    for absent in ("<script", "style", "<image", "font-", "stroke=", "fill=", "http", "id="):
        assert absent not in chart


@given(
    sums=st.lists(st.floats(0, 1e6), min_size=64, max_size=64),
    screen=_WIDTHS,
)
def test_histograms_lie_within_their_axes(sums: list[float], screen: int) -> None:
    """Bars of divergence and of margins, with labels that do not run together."""
    for chart in (
        bars(sums, sums[::-1], title="divergence"),
        margin_bars(sums[:20], sums[20:40], title="margins"),
    ):
        _check_labels(str(chart), _plot_width(screen))
        for x, y, width, height in re.findall(
            r'<rect class="\w+" x="([\d.]+)%" y="([\d.]+)" width="([\d.]+)%" height="([\d.]+)"', str(chart)
        ):
            assert float(x) + float(width) <= 100.01
            assert 7.9 <= float(y) <= float(y) + float(height) <= 130.11
