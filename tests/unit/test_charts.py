"""Charts of the live page: what a person must be able to read in them."""

import itertools
import re
from datetime import UTC, datetime, timedelta

import pytest

from quantdrift.show.charts import Mark, Point, line

pytestmark = pytest.mark.unit

BEGIN = datetime(2026, 11, 16, tzinfo=UTC)
END = BEGIN + timedelta(days=7)


def test_the_texts_of_marks_do_not_cover_each_other_and_every_mark_has_its_line() -> None:
    """Letters are at most 11 units wide, on a phone; a text that has no place is in the title of its line alone."""
    hours = (0, 3, 40, 41, 60, 80, 120, 150, 160, 167)
    marks = [
        Mark(at=BEGIN + timedelta(hours=at), kind="decision", text="baseline accepted: flips"[: 6 + at % 19])
        for at in hours
    ]
    chart = str(line([Point(BEGIN, 0.1, 0.0, 0.2)], BEGIN, END, title="flips", marks=marks))
    found = re.findall(r'<text class="mark-text" x="([\d.]+)" y="11" text-anchor="(\w+)">([^<]+)<', chart)
    places = [
        (float(x) - 11 * len(text), float(x)) if anchor == "end" else (float(x), float(x) + 11 * len(text))
        for x, anchor, text in found
    ]
    assert len(places) > 3
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(places))
    assert all(begin >= 0 and end <= 720 for begin, end in places)
    assert chart.count("<title>") == len(hours)


def test_a_baseline_is_drawn_at_its_level_between_zero_and_the_budget() -> None:
    """Its line is lower than that of a larger budget, whatever the points are."""
    chart = str(line([Point(BEGIN, 0.01, 0.0, 0.02)], BEGIN, END, title="flips", budget=0.02, baseline=0.005))
    height = {
        kind: float(y) for kind, y in re.findall(r'<line class="(budget|baseline)"[^>]* y1="([\d.]+)"', chart)
    }
    floor = 230 - 24
    assert (floor - height["baseline"]) / (floor - height["budget"]) == pytest.approx(0.25, abs=0.02)
