"""The picture of a back-test."""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from quantdrift.show.timeline import Lane, draw

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
    lines = [
        [float(x) for x in re.findall(r"[ML] ([\d.]+) ", path)]
        for path in re.findall(r'<path d="([^"]+)" clip-path[^>]+stroke: #1d4ed8', svg)
    ]
    ((*mean,),) = [line for line in lines if line]
    budget = next(
        [float(x) for x in re.findall(r"[ML] ([\d.]+) ", path)]
        for path in re.findall(r'<path d="([^"]+)" clip-path[^>]+stroke: #3f3f46', svg)
    )
    # From one side to the other, as the line of the budget.
    assert (min(mean), max(mean)) == pytest.approx((min(budget), max(budget)))
