"""Figures: what is measured of a model, each with its name, its window and its subject. Every surface takes them from here.

Two surfaces that show a figure of one name, window and subject show one number. A surface chooses figures and never computes one.
"""

from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

import msgspec

from quantdrift.core.notation import duration
from quantdrift.facts.estimate import LEVEL, Estimate

DAY: Final = timedelta(days=1)


class FigureName(StrEnum):
    """What a figure is."""

    CHANGED_SHARE = "changed_share"
    """Weighted share of answers whose decision changed."""
    DIVERGENCE = "divergence"
    """Weighted mean of the task's graded divergence, capped per answer."""
    SLOW_SHARE = "slow_share"
    """Weighted share of exchanges that took longer than the latency budget."""
    REQUESTS_PER_DAY = "requests_per_day"
    """Requests in the window, over the time in it during which the version served, as a rate of a day."""
    CHANGED_PER_DAY = "changed_per_day"
    """Requests a day of the slice, times its share of changed answers."""
    PEOPLE_AFFECTED = "people_affected"
    """People with at least one changed answer in the window: at least so many, since only a sample is compared."""
    ACCURACY_LOST = "accuracy_lost"
    """Share of right answers of the reference minus that of the candidate, from labels."""
    LATENCY = "latency"
    """Quantile of the candidate's latency, seconds."""
    COST = "cost"
    """What changed answers or replays cost, where `[cost]` gives a price."""


class WindowName(StrEnum):
    """The windows that figures are of. No surface invents another one."""

    WHEN_PAGED = "when_paged"
    """From the onset to the page, frozen with the alert. Its shares are biased upwards, because they paged."""
    NOW = "now"
    """The last hour with data, or as many as hold 100 answers, at most a day."""
    VERSION = "version"
    """All that the version served."""
    PERIOD = "period"
    """Of a report, or of `--from` and `--to`."""
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


def basis(window: Window) -> str:
    """Return what a rate of a day rests on, while the window is shorter than a day; else empty."""
    span = window.end - window.begin
    return "" if span >= DAY else f"at the rate of the last {duration(span)}"
