"""The period of a report, and how finely it can be drawn."""

from datetime import UTC, datetime, timedelta
from enum import StrEnum

import msgspec

from quantdrift.core.errors import OperatorError
from quantdrift.storage.figures.periods import Extent, Grain, SumWindow

MOST_ITEMS = 300_000  # above it, even a short period is summed from the roll-ups
MOST_BUCKETS = 60

_HOUR = timedelta(hours=1)
_DAY = timedelta(days=1)
_WIDTHS = (
    *(timedelta(seconds=seconds) for seconds in (10, 30)),
    *(timedelta(minutes=minutes) for minutes in (1, 2, 5, 10, 15, 30)),
    *(timedelta(hours=hours) for hours in (1, 2, 3, 6, 12)),
    *(timedelta(days=days) for days in (1, 2, 7, 28)),
)


class PeriodKind(StrEnum):
    """The way a period is given."""

    WEEK = "week"
    DAY = "day"
    RANGE = "range"


class Period(msgspec.Struct, frozen=True, kw_only=True):
    """A half-open range of capture time; both ends are aware."""

    kind: PeriodKind
    begin: datetime
    end: datetime

    @staticmethod
    def of(*, kind: str, end: datetime, start: datetime | None = None) -> "Period":
        """Return the week or day that ends at `end`, or the range from `start` to it.

        Parameters
        ----------
        kind
            week, day or range.
        end, start
            Aware; only a range needs `start`.

        Raises
        ------
        OperatorError
            The period does not begin before it ends.
        """
        length = {PeriodKind.WEEK: 7 * _DAY, PeriodKind.DAY: _DAY}.get(PeriodKind(kind))
        begin = start if length is None or start is not None else end - length
        if begin is None or begin >= end:
            begin_text = "no start" if begin is None else f"{begin:%Y-%m-%d %H:%M} UTC"
            raise OperatorError(
                f"the period must begin before it ends: {begin_text} is not before {end:%Y-%m-%d %H:%M} UTC"
            )
        return Period(kind=PeriodKind(kind), begin=begin.astimezone(UTC), end=end.astimezone(UTC))


class Resolution(msgspec.Struct, frozen=True, kw_only=True):
    """The table and window that a period's sums are read from, and the width of one point of its plots."""

    window: SumWindow
    width: timedelta


def resolution(period: Period, extent: Extent) -> Resolution | None:
    """Return the finest resolution that needs at most `MOST_BUCKETS` points; None where there is no data.

    Widths below an hour are read from `comparison`, up to half a day from `rollup_hour`, above from
    `rollup_day`. A period with more than `MOST_ITEMS` comparisons is never read from `comparison`.
    """
    if extent.first is None or extent.last is None:
        return None
    span = extent.last - extent.first
    width = next((width for width in _WIDTHS if span <= width * MOST_BUCKETS), _WIDTHS[-1])
    if width < _HOUR:
        if extent.n_items <= MOST_ITEMS:
            begin = max(period.begin, floor(extent.first, width))
            return Resolution(window=SumWindow(begin=begin, end=period.end, grain=Grain.ITEM), width=width)
        width = _HOUR
    grain, unit = (Grain.HOUR, _HOUR) if width < _DAY else (Grain.DAY, _DAY)
    window = SumWindow(begin=floor(extent.first, unit), end=ceiling(period.end, unit), grain=grain)
    return Resolution(window=window, width=width)


def floor(at: datetime, unit: timedelta) -> datetime:
    """Return the last whole multiple of `unit`, counted from the epoch in UTC, that is not after `at`."""
    seconds = unit.total_seconds()
    return datetime.fromtimestamp(at.timestamp() // seconds * seconds, UTC)


def ceiling(at: datetime, unit: timedelta) -> datetime:
    """Return the first whole multiple of `unit`, counted from the epoch in UTC, that is not before `at`."""
    begin = floor(at, unit)
    return begin if begin == at else begin + unit
