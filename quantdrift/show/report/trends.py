"""The points of the report's plots: sums of a slice over time, joined until each has enough, and divided by the onset."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from statistics import median

import msgspec

from quantdrift.core.records import Metric
from quantdrift.show.charts import Point
from quantdrift.storage.estimates import Sums
from quantdrift.storage.report.facts import SliceSums

_TRUSTED = 20  # effective exchanges that a point needs to count for the height of the axis
_ENOUGH = 60  # effective exchanges wanted in each point
_FACTORS = (1, 2, 3, 4, 6, 10, 15)
_LEAST_BUCKETS = 7


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """The buckets of a plot: `n` of `width`, the first at `begin`."""

    begin: datetime
    width: timedelta
    n: int

    @property
    def end(self) -> datetime:
        """The end of the last bucket."""
        return self.begin + self.n * self.width


class Trend(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over time.

    Parameters
    ----------
    points
        Each in the middle of its time; none where nothing was compared.
    width
        Time of one point: more than that of the plot's buckets where there is little data.
    top
        The largest mean with enough data to count for the height of the axis; 0 where there is none.
    """

    points: tuple[Point, ...]
    width: timedelta
    top: float


def trend(
    metric: Metric,
    buckets: Sequence[SliceSums],
    grid: Grid,
    *,
    onsets: Sequence[datetime] = (),
) -> Trend:
    """Return a slice's means with their intervals.

    Parameters
    ----------
    metric
        Flip or divergence.
    buckets
        The slice's, those without data left out.
    grid
        All buckets; they are joined until each has enough exchanges of the slice, or few buckets are left.
    onsets
        No point is from before and after one of them.
    """
    width = _factor(buckets, grid) * grid.width
    merged: dict[tuple[int, datetime], Sums] = {}
    for bucket in buckets:
        if grid.begin <= bucket.at < grid.end:
            since = max((at for at in onsets if at <= bucket.at), default=grid.begin)
            key = int((bucket.at - grid.begin) / width), since
            merged[key] = merged.get(key, Sums()) + bucket.sums
    # The last bucket may have only begun: its mean would add a jump to the end of a calm line.
    least = _TRUSTED if merged and median(sums.n_effective for sums in merged.values()) >= _TRUSTED else 0
    points, top = [], 0.0
    for (index, since), sums in sorted(merged.items()):
        n = sums.n_effective_of(metric)
        estimate = sums.estimate(metric) if n >= least else None
        if estimate is None:
            continue
        begin = max(grid.begin + index * width, since)
        end = min([grid.begin + (index + 1) * width, grid.end, *(at for at in onsets if at > begin)])
        points.append(Point(begin + (end - begin) / 2, estimate.mean, estimate.low, estimate.high))
        if n >= _TRUSTED:
            top = max(top, estimate.mean)
    return Trend(points=tuple(points), width=width, top=top)


def _factor(buckets: Sequence[SliceSums], grid: Grid) -> int:
    usual = median([bucket.sums.n_effective for bucket in buckets]) if buckets else 0.0
    allowed = [factor for factor in _FACTORS if grid.n >= _LEAST_BUCKETS * factor] or [1]
    return next((factor for factor in allowed if usual * factor >= _ENOUGH), allowed[-1])
