"""The trends in the report."""

from datetime import timedelta

import numpy as np
import pytest

from quantdrift.core.records import Metric
from quantdrift.show.report.trend import Grid, Panel, Trend, axis_top, draw, trend
from quantdrift.storage.report.facts import SliceSums, Sums
from tests.support.monitor.report_figures import NOW, make_episode

pytestmark = pytest.mark.unit

GRID = Grid(begin=NOW - timedelta(hours=4), width=timedelta(minutes=5), n=48)


def _point(index: int, n: int, flips: float = 0.0) -> SliceSums:
    weight = float(n)
    sums = Sums(n_items=n, n_groups=n, weight=weight, weight_sq=weight, flip=flips, flip_weight=weight)
    return SliceSums(version_id=1, slice_id=2, at=GRID.begin + index * GRID.width, sums=sums)


def _trend(points: list[SliceSums]) -> Trend:
    return trend(Metric.FLIP, points, GRID, (), 2.0)


def test_a_busy_slice_keeps_every_bucket() -> None:
    """With enough exchanges in each, points are as fine as the plot."""
    found = _trend([_point(index, 100, 1.0) for index in range(48)])
    assert found.grid == GRID
    assert found.mean == pytest.approx(np.full(48, 0.01))
    assert found.top == pytest.approx(0.01)


def test_a_rare_slice_joins_buckets_and_loses_nothing() -> None:
    """Ten exchanges in each bucket: six are joined, and the mean over all stays what it was."""
    found = _trend([_point(index, 10, float(index % 2)) for index in range(48)])
    assert found.grid.width == timedelta(minutes=30)
    assert found.mean == pytest.approx(np.full(8, 0.05))


def test_buckets_without_data_break_the_line() -> None:
    """Nothing compared is no zero."""
    found = _trend([_point(index, 100) for index in range(48) if index != 7])
    assert np.isnan(found.mean[7])
    assert np.isfinite(found.mean).sum() == 47


def test_a_bucket_that_has_only_begun_is_left_out() -> None:
    """Three exchanges at the end of a busy slice would make the line jump."""
    found = _trend([*(_point(index, 100) for index in range(47)), _point(47, 3, 3.0)])
    assert np.isnan(found.mean[47])


def test_an_axis_shows_the_budget_and_does_not_flatten_a_sound_slice() -> None:
    """The budget lies just below the top, and a quiet week has an axis too."""
    quiet = _trend([_point(0, 100)])
    assert axis_top([quiet], 0.01) == pytest.approx(0.0125)
    assert axis_top([], None) == 1.0


def test_a_drawing_takes_colours_from_the_page_and_nothing_from_elsewhere() -> None:
    """No colour, font, style sheet, script, image or address of its own."""
    one = _trend([_point(index, 100, 1.0) for index in range(48)])
    panels = [
        Panel(metric=metric, title=metric.value, slice=one, aggregate=one, budget=0.01, top=0.05)
        for metric in (Metric.FLIP, Metric.DIVERGENCE)
    ]
    svg = draw(panels, GRID, [make_episode()], salt="1-2")
    assert svg.startswith("<svg ")
    assert svg.endswith("</svg>")
    for variable in ("--slice", "--aggregate", "--budget", "--firing", "--muted"):
        assert f"var({variable})" in svg
    for absent in ("<script", "<style", "<image", "<metadata", "font-family", "stroke: #", "fill: #"):
        assert absent not in svg
    assert svg.count("http") == 2  # the names of two XML name spaces
    assert svg == draw(panels, GRID, [make_episode()], salt="1-2")


def test_drawings_of_one_page_share_no_identifier() -> None:
    """Two drawings on one page do not clip each other."""
    one = _trend([_point(index, 100, 1.0) for index in range(48)])
    panel = [Panel(metric=Metric.FLIP, title="flips, %", slice=one, aggregate=None, budget=None, top=0.05)]
    first, second = (draw(panel, GRID, [], salt=salt).split('id="')[1:] for salt in ("1-2", "1-3"))
    assert first
    assert not {part.split('"')[0] for part in first} & {part.split('"')[0] for part in second}


def test_a_single_point_is_seen() -> None:
    """One bucket makes no line, so it gets a mark."""
    found = trend(Metric.FLIP, [_point(3, 100, 1.0)], GRID, (), 2.0)
    svg = draw(
        [Panel(metric=Metric.FLIP, title="flips, %", slice=found, aggregate=None, budget=None, top=0.05)],
        GRID,
        [],
        salt="x",
    )
    assert "<use " in svg
