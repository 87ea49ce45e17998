"""The picture of a back-test."""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from quantdrift.show.timeline import Lane, Span, draw

pytestmark = pytest.mark.unit

HOUR = timedelta(hours=1)
BEGIN = datetime(2026, 11, 3, 9, 20, tzinfo=UTC)


@pytest.mark.parametrize("n_hours", [1, 3])
def test_the_hourly_mean_is_a_line_inside_the_picture(tmp_path: Path, n_hours: int) -> None:
    """Also of a record that lies within one hour, which began before it."""
    hours = [BEGIN.replace(minute=0) + number * HOUR for number in range(n_hours)]
    end = BEGIN + timedelta(minutes=10) + (n_hours - 1) * HOUR
    lane = Lane(title="all", at=hours, ratio=[0.5] * n_hours, recorded=[], tested=[])
    draw(tmp_path / "one.svg", [lane], BEGIN, end)
    svg = (tmp_path / "one.svg").read_text()
    ET.fromstring(svg)
    (path,) = re.findall(r'<polyline class="mean" points="([^"]+)"', svg)
    mean = [float(pair.split(",")[0]) for pair in path.split()]
    assert (min(mean), max(mean)) == (0.0, 1000.0)  # from one side to the other


def test_alerts_lie_in_the_picture_each_on_its_side(tmp_path: Path) -> None:
    """Recorded ones above, those under test below; one that has not ended reaches the end."""
    end = BEGIN + 10 * HOUR
    recorded = Span(opened=BEGIN + 2 * HOUR, paged=BEGIN + 3 * HOUR, ended=BEGIN + 4 * HOUR)
    tested = Span(opened=BEGIN + 5 * HOUR, paged=None, ended=None)
    lane = Lane(title="<all>", at=[BEGIN], ratio=[3.0], recorded=[recorded], tested=[tested])
    draw(tmp_path / "one.svg", [lane], BEGIN, end)
    svg = (tmp_path / "one.svg").read_text()
    assert "&lt;all&gt;" in svg
    places = re.findall(r'<rect class="([\w ]+)" x="([\d.]+)%" width="([\d.]+)%" y="([\d.]+)"', svg)
    assert [(kind, float(x), float(width)) for kind, x, width, _ in places] == [
        ("recorded", 20.0, 20.0),
        ("recorded paged", 30.0, 10.0),
        ("tested", 50.0, 50.0),
    ]
    assert float(places[0][3]) < float(places[2][3])
