"""Figures: what is measured of a model, each with its name, its window and its subject. Every surface takes them from here.

Two surfaces that show a figure of one name, window and subject show one number. A surface chooses figures and never computes one:
here is each division, each window and the rounding.

"A day" is a rate: a count, divided by the time in which there is data, times a day. Never by whole hours that have only begun: of an
installation that is seven minutes old that would be a ninth of the truth. Below `LEAST_RATE_S` and `LEAST_ANSWERS` nothing is said
of a day, and the count of what came so far is the figure.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import pairwise
from typing import Final, Self

import msgspec

from quantdrift.core.notation import decimals, duration, estimated, fixed
from quantdrift.facts.estimate import LEVEL, ClusterSums, Estimate, ratio

DAY: Final = timedelta(days=1)
HOUR: Final = timedelta(hours=1)
LEAST: Final = timedelta(seconds=1)
"""Shortest time that counts, so that a single exchange has a rate."""
LEAST_ANSWERS: Final = 100
"""Answers that the window `now` has, and from which on a rate of a day is said of less than `LEAST_RATE_S`."""
LEAST_RATE_S: Final = 600.0
_LEAST_BURST_S: Final = 60.0  # a burst of seconds says nothing of a day, however many answers it has
_MOST_DIGITS: Final = 6
_Z: Final = 1.959963984540054


class FigureName(StrEnum):
    """What a figure is."""

    CHANGED_SHARE = "changed_share"
    """Weighted share of answers whose decision changed."""
    DIVERGENCE = "divergence"
    """Weighted mean of the task's graded divergence, capped per answer."""
    REQUESTS = "requests"
    """Requests in the window: a count, estimated from the sampled ones."""
    CHANGED = "changed"
    """Requests in the window whose answer changed: a count, estimated from the sampled ones."""
    REQUESTS_PER_DAY = "requests_per_day"
    """Requests in the window, over the time in it during which the version served, as a rate of a day."""
    CHANGED_PER_DAY = "changed_per_day"
    """Requests a day of the slice, times its share of changed answers."""
    PEOPLE_AFFECTED = "people_affected"
    """People with at least one changed answer in the window: at least so many, since only a sample is compared."""
    LATENCY = "latency"
    """Quantile of the candidate's latency, seconds."""
    COST = "cost"
    """What changed answers or replays cost, where `[cost]` gives a price."""


class WindowName(StrEnum):
    """The windows that figures are of. No surface invents another one."""

    WHEN_PAGED = "when_paged"
    """From the onset to the page, frozen with the alert. Its shares are biased upwards, because they paged."""
    NOW = "now"
    """The newest hours of the clock with data that hold 100 answers, at most a day."""
    DAY = "day"
    """The last 24 hours with data: a whole round of the clock, for rates of a day and people."""
    VERSION = "version"
    """All that the version served."""
    PERIOD = "period"
    """Of a report, or of `--from` and `--to`."""
    INCIDENT = "incident"
    """From the beginning of an incident to its end, or so far."""
    BUCKET = "bucket"
    """Of a plot: cut by the onset, a release and the beginning of data."""


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """A time by name, [begin, end), aware."""

    name: WindowName
    begin: datetime
    end: datetime


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """What a figure is of; an empty version is every version of the model, `slice` is its name."""

    model: str
    version: str
    slice: str


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One measured number with all that is needed to read it.

    Parameters
    ----------
    value, low, high, level
        The number and its interval; None where there is too little data for the interval.
    unit
        Empty for shares and counts; `nat`, `s`, or a currency.
    n, n_people
        Answers compared, and the people who got them; None: people are not known.
    weight
        Estimated answers of the traffic that the compared ones stand for.
    as_of
        When it was computed.
    basis
        What a rate of a day rests on, while that is less than a day; else empty.
    """

    name: FigureName
    value: float
    low: float | None = None
    high: float | None = None
    level: float = LEVEL
    unit: str = ""
    n: int
    n_people: int | None = None
    weight: float | None = None
    window: Window
    of: Subject
    as_of: datetime
    basis: str = ""

    @property
    def estimate(self) -> Estimate:
        """The number and its interval alone."""
        return Estimate(mean=self.value, low=self.low, high=self.high)

    @property
    def key(self) -> tuple[str, str, str, str, str, str, str]:
        """What makes two figures the same: name, window and subject."""
        window = self.window
        at = window.begin.isoformat(), window.end.isoformat()
        return self.name.value, window.name.value, *at, self.of.model, self.of.version, self.of.slice


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """What figures are of, and when they were computed: the same for all that are read together."""

    window: Window
    of: Subject
    as_of: datetime


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """How much was compared in a window.

    Parameters
    ----------
    n, n_people
        Answers, and the people who got them; None: people are not known.
    requests
        Estimated requests that they stand for, the sum of 1 / pi over exchanges; those of a slice have the part that its answers are.
    served
        The time in the window during which the version served; None: not known.
    """

    n: int
    n_people: int | None = None
    requests: float = 0.0
    served: "Served | None" = None


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """The time in which there is data of something, at least `LEAST`.

    Parameters
    ----------
    begin, end
        Aware. Capture times of the first and of the last exchange.
    """

    begin: datetime
    end: datetime

    @classmethod
    def within(cls, begin: datetime, end: datetime, first: datetime | None, last: datetime | None) -> Self:
        """Return the part of a window between the first and the last exchange, where these are known."""
        return cls(begin=max(begin, first or begin), end=min(end, last or end))

    @property
    def span(self) -> timedelta:
        """Return how long it is."""
        return max(self.end - self.begin, LEAST)

    def a_day(self, n: float) -> float:
        """Return `n` of this time as a rate of a day."""
        return n * (DAY / self.span)

    def is_enough(self, n: int) -> bool:
        """Return whether `n` answers of this time say something of a day: ten minutes, or a minute with 100 answers."""
        span_s = self.span.total_seconds()
        return span_s >= LEAST_RATE_S or (span_s >= _LEAST_BURST_S and n >= LEAST_ANSWERS)

    @property
    def basis(self) -> str:
        """Return what the rate rests on, while that is less than a day; else empty."""
        return "" if self.span >= DAY else f"at the rate of the last {duration(self.span).removeprefix('1 ')}"


def when_paged(onset_at: datetime, opened_at: datetime) -> Window:
    """Return the window of an alert: from its onset to the page. It is frozen with the alert."""
    return Window(name=WindowName.WHEN_PAGED, begin=onset_at, end=opened_at)


def now(hours: Iterable[tuple[datetime, int]], last_at: datetime) -> Window:
    """Return the newest hours of the clock that hold `LEAST_ANSWERS`, at most a day of them.

    They are whole hours, so that roll-ups have them exactly.

    Parameters
    ----------
    hours
        Begin of each hour with data, with its answers; in any order.
    last_at
        The newest answer: the end.
    """
    newest = sorted(hours, reverse=True)
    begin, n = last_at.replace(minute=0, second=0, microsecond=0), 0
    for at, more in newest:
        if n >= LEAST_ANSWERS or at <= last_at - DAY:
            break
        begin, n = at, n + more
    return Window(name=WindowName.NOW, begin=begin, end=last_at)


def last_day(last_at: datetime) -> Window:
    """Return the hours of the clock within a day before the newest answer, with the hour that this is in: 23 to 24 hours."""
    hour = last_at.replace(minute=0, second=0, microsecond=0)
    return Window(name=WindowName.DAY, begin=hour - DAY + HOUR, end=last_at)


def of_version(first_at: datetime, last_at: datetime) -> Window:
    """Return all that a version served."""
    return Window(name=WindowName.VERSION, begin=first_at, end=last_at)


def period(begin: datetime, end: datetime) -> Window:
    """Return the time that somebody has asked about."""
    return Window(name=WindowName.PERIOD, begin=begin, end=end)


def buckets(begin: datetime, end: datetime, width: timedelta, cuts: Iterable[datetime] = ()) -> list[Window]:
    """Return the buckets of a plot, in order: of one width, aligned to the clock, and cut.

    Parameters
    ----------
    cuts
        Times that no bucket may span: the onset, a release, the beginning of data.
    """
    edges = {begin, end, *(at for at in cuts if begin < at < end)}
    midnight = begin.replace(hour=0, minute=0, second=0, microsecond=0)
    at = midnight + ((begin - midnight) // width + 1) * width
    while at < end:
        edges.add(at)
        at += width
    ordered = sorted(edges)
    return [Window(name=WindowName.BUCKET, begin=edge, end=after) for edge, after in pairwise(ordered)]


def changed_share(scope: Scope, counted: Counted, sums: ClusterSums) -> Figure | None:
    """Return the share of changed answers; None where no answer can be compared.

    Parameters
    ----------
    sums
        Of the flips, over people and exchanges.
    """
    return _mean(FigureName.CHANGED_SHARE, scope, counted, ratio(sums))


def divergence(scope: Scope, counted: Counted, sums: ClusterSums, *, cap: float, unit: str) -> Figure | None:
    """Return the mean divergence.

    Parameters
    ----------
    cap
        Of a single value, `budget.cap`; `sums` are of capped values.
    unit
        Of the task's divergence; empty where it has none.
    """
    return _mean(FigureName.DIVERGENCE, scope, counted, ratio(sums, cap), unit)


def estimate_figure(
    name: FigureName, scope: Scope, counted: Counted, estimate: Estimate | None, unit: str = ""
) -> Figure | None:
    """Return an estimate that was made elsewhere, such as an alert's frozen one, as a figure; None where it is None."""
    return _mean(name, scope, counted, estimate, unit)


def requests(scope: Scope, counted: Counted) -> Figure:
    """Return how many requests came in the window: a count, and no rate."""
    return _count(FigureName.REQUESTS, scope, counted, counted.requests)


def changed(scope: Scope, counted: Counted, share: Figure | None) -> Figure | None:
    """Return how many answers changed in the window; None where `share`, of the same window, is None."""
    return None if share is None else _times(FigureName.CHANGED, requests(scope, counted), share)


def requests_per_day(scope: Scope, counted: Counted) -> Figure | None:
    """Return requests as a rate of a day over the time that the version served; None: there is too little to say so."""
    served = counted.served
    if served is None or not served.is_enough(counted.n):
        return None
    rate = _count(FigureName.REQUESTS_PER_DAY, scope, counted, served.a_day(counted.requests))
    return msgspec.structs.replace(rate, basis=served.basis)


def changed_per_day(requests_a_day: Figure | None, share: Figure | None) -> Figure | None:
    """Return changed answers as a rate of a day; None where one of the two is missing.

    Parameters
    ----------
    requests_a_day, share
        Of the same subject and window.
    """
    if requests_a_day is None or share is None:
        return None
    return _times(FigureName.CHANGED_PER_DAY, requests_a_day, share)


def people_affected(scope: Scope, counted: Counted, n_affected: int) -> Figure:
    """Return how many people were seen to get a changed answer: at least so many, since only a sample is compared."""
    figure = _count(FigureName.PEOPLE_AFFECTED, scope, counted, float(n_affected))
    return msgspec.structs.replace(figure, low=float(n_affected))


class Rounded(msgspec.Struct, frozen=True, kw_only=True):
    """A number with its interval as people read it; shares in percent.

    Parameters
    ----------
    value, low, high
        Without the unit; low and high are empty where there is no interval.
    unit
        `%`, `nat`, `s`; empty for counts.
    """

    value: str
    low: str = ""
    high: str = ""
    unit: str = ""

    def __str__(self) -> str:
        """Return the number with its unit: `5.2 %`."""
        return f"{self.value} {self.unit}".rstrip()

    @property
    def interval(self) -> str:
        """The interval with its unit: `3.9 to 6.8 %`; empty where there is none."""
        return f"{self.low} to {self.high} {self.unit}".rstrip() if self.low and self.high else ""


_SHARES: Final = frozenset({FigureName.CHANGED_SHARE})
RATES: Final = frozenset({FigureName.REQUESTS_PER_DAY, FigureName.CHANGED_PER_DAY})
"""Rates of a day."""
_COUNTS: Final = RATES | {FigureName.REQUESTS, FigureName.CHANGED}


def shown(figure: Figure, limits: Iterable[float] = (), *, digits: int = 2) -> Rounded:
    """Return a figure as people read it.

    Parameters
    ----------
    limits
        What it is compared with on the same surface, such as its budget, in the figure's own unit.
    digits
        Significant digits of the number, more where `rounded` needs them.
    """
    if figure.name is FigureName.PEOPLE_AFFECTED:
        return Rounded(value=f"{figure.value:,.0f}")
    if figure.name in _COUNTS:
        ends = (None if end is None else f"{estimated(end):,}" for end in (figure.low, figure.high))
        low, high = ends
        return Rounded(value=f"{estimated(figure.value):,}", low=low or "", high=high or "")
    if figure.name in _SHARES:
        return rounded(figure.estimate, limits, scale=100.0, unit="%", digits=digits)
    return rounded(figure.estimate, limits, unit=figure.unit, digits=digits)


def rounded(
    estimate: Estimate, limits: Iterable[float] = (), *, scale: float = 1.0, unit: str = "", digits: int = 2
) -> Rounded:
    """Return a number with its interval, all with as many decimals, enough to keep them on their side of every limit.

    No end touches 0 or a limit that it does not touch, and the number is not at an end where it is not: 0.97 % does not become "1 %"
    beside a limit of 1 %.
    """
    numbers = [scale * value for value in (estimate.mean, estimate.low, estimate.high) if value is not None]
    fixed_limits = [0.0, *(scale * limit for limit in limits)]
    size = next((number for number in numbers if number), 0.0)
    n_decimals = decimals(size, digits)
    for _ in range(_MOST_DIGITS):
        if all(_same_side(number, limit, n_decimals) for number in numbers for limit in fixed_limits) and all(
            _same_side(number, numbers[0], n_decimals) for number in numbers[1:]
        ):
            break
        n_decimals += 1
    texts = iter([fixed(number, n_decimals) for number in numbers])
    return Rounded(
        value=next(texts),
        low="" if estimate.low is None else next(texts),
        high="" if estimate.high is None else next(texts),
        unit=unit,
    )


def part_and_whole(part: float, whole: float) -> tuple[int, int]:
    """Return two estimated counts with two digits, the part never larger than the whole."""
    rounded_whole = estimated(whole)
    return min(estimated(part), rounded_whole), rounded_whole


def _same_side(value: float, limit: float, n_decimals: int) -> bool:
    a, b = round(value, n_decimals), round(limit, n_decimals)
    return (a > b) - (a < b) == (value > limit) - (value < limit)


def _mean(
    name: FigureName, scope: Scope, counted: Counted, estimate: Estimate | None, unit: str = ""
) -> Figure | None:
    if estimate is None:
        return None
    return Figure(
        name=name,
        value=estimate.mean,
        low=estimate.low,
        high=estimate.high,
        unit=unit,
        n=counted.n,
        n_people=counted.n_people,
        weight=counted.requests,
        window=scope.window,
        of=scope.of,
        as_of=scope.as_of,
    )


def _count(name: FigureName, scope: Scope, counted: Counted, value: float) -> Figure:
    return Figure(
        name=name,
        value=value,
        n=counted.n,
        n_people=counted.n_people,
        weight=counted.requests,
        window=scope.window,
        of=scope.of,
        as_of=scope.as_of,
    )


def _times(name: FigureName, count: Figure, share: Figure) -> Figure:
    """Return a count times a share of it, with the interval of the share: that of the count is narrow beside it."""
    ends = {
        "low": None if share.low is None else count.value * share.low,
        "high": None if share.high is None else count.value * share.high,
    }
    return msgspec.structs.replace(count, name=name, value=count.value * share.value, **ends)
