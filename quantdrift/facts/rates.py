"""The rate of a day: what every surface means by "a day".

A count of requests, divided by the time in which there is data, times a day. Never by whole hours that have only begun: of an
installation that is seven minutes old that would be a ninth of the truth.
"""

from datetime import datetime, timedelta
from typing import Final, Self

import msgspec

from quantdrift.core.notation import duration

DAY: Final = timedelta(days=1)
LEAST: Final = timedelta(seconds=1)
"""Shortest time that counts, so that a single exchange has a rate."""


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

    @property
    def basis(self) -> str:
        """Return what the rate rests on, while that is less than a day; else empty."""
        return "" if self.span >= DAY else f"at the rate of the last {duration(self.span)}"
