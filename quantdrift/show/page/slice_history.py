"""A slice over a time: the points of its plots, which its onset divides."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from itertools import zip_longest
from typing import Final

import msgspec

from quantdrift.show import charts
from quantdrift.storage.page import history as past
from quantdrift.storage.page import now as present
from quantdrift.storage.page import queries

_DAY: Final = timedelta(days=1)
_MOST_POINTS: Final = 60
_FINE: Final = tuple(timedelta(seconds=seconds) for seconds in (10, 30, 60, 120, 300, 600, 900, 1800))
"""Widths of the points of less than a day."""


class Period(msgspec.Struct, frozen=True, kw_only=True):
    """The time that the page of a slice shows: its name in the address, and the width of the points of its plots."""

    span: str
    begin: datetime
    end: datetime
    width: timedelta


async def young_history(
    connection: present.Connection,
    ids: tuple[int, int],
    times: tuple[datetime, datetime | None, datetime],
    cap: float,
) -> tuple[Period, list[past.Sums]] | None:
    """Return less than a day in points of minutes or seconds, which the onset divides; None: too many exchanges, or deleted ones.

    Parameters
    ----------
    ids
        Version and slice.
    times
        First exchange, onset if there is one, and last exchange.
    """
    first, onset, last = times
    width = next((width for width in _FINE if (last - first) / width <= _MOST_POINTS), _FINE[-1])
    period = Period(span="1d", begin=first - width, end=last + width, width=width)
    base = onset or period.begin
    history = await past.minutes(connection, *ids, (period.begin, base, period.end), width=width, cap=cap)
    return (period, history) if history else None


async def history_of(
    connection: present.Connection,
    ids: tuple[int, int],
    period: Period,
    onset: datetime | None,
    cap: float,
) -> list[past.Sums]:
    """Return a slice over a period, in points of its width, of which the onset divides one."""
    begin, width, end = period.begin, period.width, period.end
    if width < timedelta(hours=1):
        return await past.minutes(connection, *ids, (begin, onset or begin, end), width=width, cap=cap) or []
    history = await past.history(connection, *ids, begin, end, width=width)
    around = next((sums for sums in history if onset and sums.at < onset < sums.at + width), None)
    if around is None or onset is None:
        return history
    times = around.at, onset, around.at + width
    # Of exchanges that were deleted only the roll-up is left, which nothing divides.
    parts = await past.minutes(connection, *ids, times, width=width, cap=cap) or []
    if not parts or sum(part.weight for part in parts) < 0.99 * around.weight:
        return history
    parts = [msgspec.structs.replace(part, at=max(part.at, around.at)) for part in parts]
    return sorted([*(sums for sums in history if sums is not around), *parts], key=lambda sums: sums.at)


def points(
    history: Sequence[past.Sums], metric: str, width: timedelta, ends: tuple[datetime, datetime | None]
) -> list[charts.Point]:
    """Return the means with their intervals, each in the middle of the part of its time in which there is data.

    Parameters
    ----------
    ends
        Times of the first and last exchange.
    """
    points = []
    for sums, after in zip_longest(history, history[1:]):
        estimate = sums.estimate(metric)
        if estimate is None:
            continue
        until = min(sums.at + width, after.at if after else sums.at + width, ends[1] or sums.at + width)
        begin = ends[0] if sums.at < ends[0] < until else sums.at
        at = begin + max(until - begin, timedelta()) / 2
        points.append(charts.Point(at, estimate.mean, estimate.low, estimate.high))
    return points


def history_sql(period: Period, cap: float, base: datetime | None, **ids: int) -> str:
    """Return the query of a slice over a period, in points of its width."""
    values: dict[str, float | datetime] = {**ids, "begin": period.begin, "end": period.end}
    width = period.width
    if width >= _DAY:
        return queries.filled(queries.DAYS, **values)
    if width < timedelta(hours=1):
        values |= {"cap": cap, "base": base or period.begin, "width": width.total_seconds()}
        return queries.filled(queries.MINUTES, **values)
    return queries.filled(queries.HOURS, width=int(width / timedelta(hours=1)), **values)
