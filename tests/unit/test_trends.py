"""The points of the plots of a slice over time."""

from datetime import timedelta

import pytest

from quantdrift.core.records import Metric
from quantdrift.facts.estimate import ClusterSums
from quantdrift.show.trends import Grid, Trend, trend
from quantdrift.storage.figures.estimates import Sums
from quantdrift.storage.figures.periods import SliceSums
from tests.support.monitor.report_figures import NOW

pytestmark = pytest.mark.unit

MINUTE = timedelta(minutes=1)
GRID = Grid(begin=NOW - timedelta(hours=4), width=5 * MINUTE, n=48)


def _bucket(index: float, n: int, flips: float = 0.0) -> SliceSums:
    weight = float(n)
    of = {"flip": ClusterSums(n=n, weight=weight, weight_sq=weight, total=flips, total_sq=flips, cross=flips)}
    sums = Sums(n_items=n, n_groups=n, weight=weight, weight_sq=weight, items=weight, of=of)
    return SliceSums(version_id=1, slice_id=2, at=GRID.begin + index * GRID.width, sums=sums)


def _trend(buckets: list[SliceSums], *onsets: float) -> Trend:
    at = [GRID.begin + onset * GRID.width for onset in onsets]
    return trend(Metric.FLIP, buckets, GRID, onsets=at)


def test_a_busy_slice_keeps_every_bucket() -> None:
    """With enough exchanges in each, points are as fine as the plot, each in the middle of its time."""
    made = _trend([_bucket(index, 100, 1.0) for index in range(48)])
    assert made.width == GRID.width
    assert [point.mean for point in made.points] == pytest.approx([0.01] * 48)
    assert made.points[3].at == GRID.begin + 3.5 * GRID.width
    assert made.top == pytest.approx(0.01)


def test_a_rare_slice_joins_buckets_and_loses_nothing() -> None:
    """Ten exchanges in each bucket: six are joined, and the mean over all stays what it was."""
    made = _trend([_bucket(index, 10, float(index % 2)) for index in range(48)])
    assert made.width == 30 * MINUTE
    assert [point.mean for point in made.points] == pytest.approx([0.05] * 8)


def test_a_bucket_without_data_has_no_point() -> None:
    """Nothing compared is no zero."""
    made = _trend([_bucket(index, 100) for index in range(48) if index != 7])
    assert len(made.points) == 47
    assert GRID.begin + 7.5 * GRID.width not in {point.at for point in made.points}


def test_a_bucket_that_has_only_begun_is_left_out() -> None:
    """Three exchanges at the end of a busy slice would make the line jump."""
    made = _trend([*(_bucket(index, 100) for index in range(47)), _bucket(47, 3, 3.0)])
    assert len(made.points) == 47


@pytest.mark.parametrize("n", [100, 10])
def test_no_point_is_from_before_and_since_an_onset(n: int) -> None:
    """Before it nothing changed, since then everything: each point is 0 or 1, and on its side, joined buckets included."""
    onset = 20.4
    buckets = [_bucket(index, n, n * float(index > onset)) for index in range(48) if index != 20]
    parts = [_bucket(20, n // 2, 0.0), _bucket(onset, n // 2, float(n // 2))]
    made = _trend(sorted([*buckets, *parts], key=lambda bucket: bucket.at), onset)
    assert {point.mean for point in made.points} == {0.0, 1.0}
    at = GRID.begin + onset * GRID.width
    assert all((point.at > at) == (point.mean == 1.0) for point in made.points)
    assert [point.at for point in made.points] == sorted(point.at for point in made.points)
