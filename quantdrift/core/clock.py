"""Clocks that are passed as arguments: aware UTC timestamps for records, monotonic seconds for deadlines."""

import time
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """The protocol of a clock. Code that needs time gets one as an argument."""

    def now(self) -> datetime:
        """Return the current time, aware and in UTC."""
        ...

    def monotonic_s(self) -> float:
        """Return seconds that never run backwards, for deadlines and durations."""
        ...


def is_due(last: datetime | None, every: timedelta, now: datetime) -> bool:
    """Return whether something is to be done again that was last done at `last`; None: never.

    Where that time is in the future, the clock was set back: then it is due now, and not only when that time comes again.
    """
    return last is None or not timedelta(0) <= now - last < every


class SystemClock:
    """The machine's own clock."""

    def now(self) -> datetime:
        """Return the current time, aware and in UTC."""
        return datetime.now(UTC)

    def monotonic_s(self) -> float:
        """Return seconds that never run backwards, for deadlines and durations."""
        return time.monotonic()


class ManualClock:
    """A clock that moves only by `advance`, for tests and replays.

    Parameters
    ----------
    start
        The first reading of `now`; aware.
    """

    def __init__(self, start: datetime) -> None:
        self._start = start
        self._elapsed_s = 0.0

    def advance(self, seconds: float) -> None:
        """Move both readings forward by `seconds` (>= 0)."""
        if seconds < 0:
            raise ValueError("time does not run backwards")
        self._elapsed_s += seconds

    def now(self) -> datetime:
        """Return the start plus everything advanced so far."""
        return datetime.fromtimestamp(self._start.timestamp() + self._elapsed_s, UTC)

    def monotonic_s(self) -> float:
        """Return the seconds advanced so far."""
        return self._elapsed_s
