"""The plots of a slice over time: its sums are joined until each point has enough, and divided by the onset."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from statistics import median

import msgspec
from markupsafe import Markup

from quantdrift.core.records import Metric
from quantdrift.core.signals import signal_of
from quantdrift.facts.words.happened import ONSET
from quantdrift.show.charts import HEIGHT, Point, VerticalLine, line
from quantdrift.storage.figures.estimates import Sums
from quantdrift.storage.figures.periods import SliceSums

_TRUSTED = 20  # effective exchanges that a point needs to count for the height of the axis
_ENOUGH = 60  # effective exchanges wanted in each point
_FACTORS = (1, 2, 3, 4, 6, 10, 15)
_LEAST_BUCKETS = 7


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """The buckets of a plot: `n` of `width`, the first at `begin`.

    Parameters
    ----------
    first, last
        Times of the first and the last exchange; None: not known. The axis begins and ends a bucket from them, or a tenth of the time
        between them: of a week that has begun an hour ago there is an hour to see.
    """

    begin: datetime
    width: timedelta
    n: int
    first: datetime | None = None
    last: datetime | None = None

    @property
    def end(self) -> datetime:
        """The end of the last bucket."""
        return self.begin + self.n * self.width

    @property
    def axis(self) -> tuple[datetime, datetime]:
        """Begin and end of the axis."""
        first, last = self.first or self.begin, self.last or self.end
        margin = min(self.width, abs(last - first) / 10)
        return max(self.begin, first - margin), min(self.end, last + margin)


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
    cuts
        Times that divide points.
    left_out
        Begins of points that have too little data to be drawn.
    """

    points: tuple[Point, ...]
    width: timedelta
    top: float
    cuts: tuple[datetime, ...] = ()
    left_out: tuple[datetime, ...] = ()


class Plot(msgspec.Struct, frozen=True, kw_only=True):
    """A drawn slice, and its points."""

    drawing: Markup
    trend: Trend


def plot(
    metric: Metric,
    buckets: Sequence[SliceSums],
    grid: Grid,
    *,
    name: str,
    others: Sequence[SliceSums] = (),
    budget: float | None = None,
    baseline: float | None = None,
    marks: Sequence[VerticalLine] = (),
    alerts: Sequence[tuple[datetime, datetime | None]] = (),
    height: int = HEIGHT,
) -> Plot:
    """Draw the mean of a signal in a slice.

    Parameters
    ----------
    name
        Of the slice.
    others
        Buckets of all traffic, if that is another slice.
    alerts
        Onset and end of each; None: it lasts.
    """
    signal, onsets = signal_of(metric), [onset for onset, _ in alerts]
    own, whole = (trend(metric, sums, grid, onsets=onsets) for sums in (buckets, others))
    begin, end = grid.axis
    highs = [min(point.high, 2 * point.mean) for point in own.points if point.high and point.mean <= own.top]
    drawing = line(
        own.points,
        begin,
        end,
        title=f"{signal.title} in {name} over time",
        width=own.width,
        others=whole.points,
        budget=budget,
        baseline=baseline,
        marks=marks,
        alerts=[(onset, until or end) for onset, until in alerts],
        is_share=signal.is_share,
        top=max([1.2 * max(own.top, whole.top), *highs]),
        height=height,
    )
    return Plot(drawing=drawing, trend=own)


def alert_marks(onset: datetime, opened: datetime) -> list[VerticalLine]:
    """Return the upright lines of an alert."""
    return [
        VerticalLine(at=onset, kind="onset", text=ONSET),
        VerticalLine(at=opened, kind="alert", text="alert"),
    ]


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
        One that the sums have.
    buckets
        The slice's, those without data left out.
    grid
        All buckets; they are joined until each has enough exchanges of the slice, or few buckets are left.
    onsets
        No point is from before and after one of them that divides its bucket.
    """
    width = _factor(buckets, grid) * grid.width
    # An onset that could not divide its bucket cuts behind it.
    after = ([bucket.at for bucket in buckets if bucket.at >= onset] for onset in onsets)
    cuts = sorted({min(later) for later in after if later})
    merged: dict[datetime, Sums] = {}
    for bucket in buckets:
        if grid.begin <= bucket.at < grid.end:
            begin = grid.begin + (bucket.at - grid.begin) // width * width
            begin = max([begin, *(cut for cut in cuts if cut <= bucket.at)])
            merged[begin] = merged.get(begin, Sums()) + bucket.sums
    # The last bucket may have only begun: its mean would add a jump to the end of a calm line.
    least = _TRUSTED if merged and median(sums.n_effective for sums in merged.values()) >= _TRUSTED else 0
    points, left_out, top = [], [], 0.0
    for begin, sums in sorted(merged.items()):
        n, estimate = sums.n_effective_of(metric), sums.estimate(metric)
        if estimate is None or n < least:
            left_out.append(begin)
            continue
        end = grid.begin + ((begin - grid.begin) // width + 1) * width
        end = min([end, grid.end, *(cut for cut in cuts if cut > begin)])
        # The first and the last exchange divide a bucket, too.
        first = grid.first if grid.first and begin < grid.first < end else begin
        last = grid.last if grid.last and first < grid.last < end else end
        points.append(Point(first + (last - first) / 2, estimate.mean, estimate.low, estimate.high))
        if n >= _TRUSTED:
            top = max(top, estimate.mean)
    return Trend(
        points=tuple(points),
        width=width,
        top=top,
        cuts=tuple(cut for cut in cuts if grid.begin < cut < grid.end),
        left_out=tuple(left_out),
    )


def _factor(buckets: Sequence[SliceSums], grid: Grid) -> int:
    usual = median([bucket.sums.n_effective for bucket in buckets]) if buckets else 0.0
    allowed = [factor for factor in _FACTORS if grid.n >= _LEAST_BUCKETS * factor] or [1]
    return next((factor for factor in allowed if usual * factor >= _ENOUGH), allowed[-1])
