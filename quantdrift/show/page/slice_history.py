"""A slice over a time: the buckets of its plots, that in which an alert began in two parts, and the query of their points."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial
from math import ceil
from typing import Final

import msgspec

from quantdrift.core.signals import Signal
from quantdrift.show.trends import Grid, Trend
from quantdrift.storage import queries, snapshot
from quantdrift.storage.figures.divergence import Divergence
from quantdrift.storage.figures.periods import Grain, SliceSums, SumWindow
from quantdrift.storage.signals import value_of
from quantdrift.storage.snapshot import Connection, in_time

_HOUR: Final = timedelta(hours=1)
_DAY: Final = timedelta(days=1)
_MOST_POINTS: Final = 60
_FINE: Final = tuple(timedelta(seconds=seconds) for seconds in (10, 30, 60, 120, 300, 600, 900, 1800))
"""Widths of the buckets of less than a day."""


class ShownPeriod(msgspec.Struct, frozen=True, kw_only=True):
    """The time that is shown of a slice: its name in the address, and the width of its buckets."""

    span: str = ""
    begin: datetime
    end: datetime
    width: timedelta

    @classmethod
    def fine(cls, first: datetime, last: datetime) -> "ShownPeriod | None":
        """Return the time from the first exchange to the last one, in buckets of seconds or minutes; None: it is a day or more."""
        if not timedelta() <= last - first < _DAY:
            return None
        width = next((width for width in _FINE if (last - first) / width <= _MOST_POINTS), _FINE[-1])
        return cls(span="1d", begin=first - width, end=last + width, width=width)

    @classmethod
    def rolled_up(cls, begin: datetime, end: datetime, width: timedelta, span: str = "") -> "ShownPeriod":
        """Return a time in buckets of hours or days; it begins with a whole one."""
        begin = begin.replace(minute=0, second=0, microsecond=0)
        return cls(span=span, begin=begin.replace(hour=0) if width >= _DAY else begin, end=end, width=width)

    @property
    def window(self) -> SumWindow:
        """What is summed."""
        grain = Grain.ITEM if self.width < _HOUR else Grain.HOUR if self.width < _DAY else Grain.DAY
        return SumWindow(begin=self.begin, end=self.end, grain=grain)

    def grid(self, buckets: Sequence[SliceSums], first: datetime, last: datetime | None) -> Grid:
        """Return the buckets of a plot.

        Parameters
        ----------
        buckets
            Those with data, in order.
        first, last
            Times of the first and the last exchange; of data that was loaded later `first` is the time of loading, and does not count.
        """
        begin = buckets[0].at if buckets else self.begin
        return Grid(
            begin=self.begin,
            width=self.width,
            n=ceil((self.end - self.begin) / self.width),
            first=first if begin <= first < begin + self.width else begin,
            last=last,
        )


async def history(
    connection: Connection,
    version_id: int,
    slice_id: int,
    period: ShownPeriod,
    *,
    cap: float,
    onset: datetime | None = None,
) -> list[SliceSums]:
    """Return the buckets of a slice, that of an onset in two parts; nothing of single exchanges that are too many to read."""
    read, window = Divergence(connection), period.window
    sums = partial(read.sums, window, period.width, {version_id: cap}, [slice_id])
    is_fine = window.grain is Grain.ITEM
    buckets = await in_time(connection, sums, snapshot.PATIENCE_S) or [] if is_fine else await sums()
    if onset is None:
        return buckets
    divided = partial(read.divided, buckets, window, period.width, onset, cap)
    return await in_time(connection, divided, snapshot.PATIENCE_S) or buckets


async def named_history(
    connection: Connection, ids: tuple[int, int], period: ShownPeriod, signals: Sequence[Signal]
) -> list[SliceSums] | None:
    """Return the buckets of a slice, of a version and with a number, with the signals of plug-ins; None: that takes too long."""
    read = partial(Divergence(connection).named, period.window, period.width, ids, signals)
    return await in_time(connection, read, snapshot.PATIENCE_S)


def history_sql(
    signal: Signal, period: ShownPeriod, trend: Trend, onset: datetime | None, cap: float, **ids: int
) -> str:
    """Return the query that gives a row for each point of a plot: when it begins, its answers, and its mean as it is drawn.

    Parameters
    ----------
    trend
        The points.
    onset
        As of `history`.
    """
    grain, measure, width = period.window.grain, signal.metric.value, period.width
    value, total = value_of(signal).replace("side.cap", ":cap"), measure
    if signal.is_share:
        total = "least(flip, flip_weight)"
    around = period.begin if onset is None else period.begin + (onset - period.begin) // width * width
    # The hour or day in which the alert began is divided by its exchanges.
    is_divided = onset in trend.cuts and onset != around
    if grain is Grain.ITEM or not signal.has_sums:
        parts = queries.ITEMS.format(value=value, begin="begin", end="end")
    else:
        time = grain.value.removeprefix("rollup_")
        but = f" and not ({time} >= :around and {time} < :stop)" if is_divided else ""
        parts = queries.ROLLED_UP.format(time=time, measure=measure, total=total, but=but)
        if is_divided:
            parts += "  union all" + queries.ITEMS.format(value=value, begin="around", end="stop")
    point = "date_bin(make_interval(secs => :width), at, :begin)"
    if trend.cuts:
        cut = "(select max(cut) from unnest(array[:cuts]::timestamptz[]) as cut where cut <= at)"
        point = f"greatest({point}, {cut})"
    but = "\nwhere at not in (:few) -- too few answers to draw" if trend.left_out else ""
    return queries.filled(
        queries.POINTS.format(parts=parts, point=point, measure=measure, but=but),
        **ids,
        begin=period.begin,
        end=period.end,
        around=around,
        stop=around + width,
        width=trend.width.total_seconds(),
        cap=cap,
        cuts=trend.cuts,
        few=trend.left_out,
    )
