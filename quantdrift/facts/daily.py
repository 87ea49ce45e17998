"""What "a day" is: a rate over the time in which there is data, and never a count of what came so far."""

from math import floor, log10
from typing import Final

import msgspec

from quantdrift.core.notation import count_of

DAY_S: Final = 86_400.0
_FEWEST: Final = 30  # exchanges: fewer in a short time say nothing of a day
_SHORT_S: Final = 60.0
_UNITS: Final = ((3600.0, "hour"), (60.0, "minute"), (1.0, "second"))


class DailyTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """What came to a slice in a time, estimated from the exchanges that were compared.

    Parameters
    ----------
    requests
        Sum of 1 / pi over these exchanges: an estimate of how many came.
    n_exchanges, n_answers
        Exchanges compared, and their items: each item is one answer.
    seconds
        The part of the time in which there was data: of a version, in which it served.
    changed_share
        Weighted share of the answers that changed; None: answers are not compared.
    """

    requests: float
    n_exchanges: int
    n_answers: int
    seconds: float
    changed_share: float | None = None

    @property
    def requests_per_day(self) -> float | None:
        """Requests a day; None where less than a minute and 30 exchanges are too little to say so."""
        if self.seconds <= 0 or (self.seconds < _SHORT_S and self.n_exchanges < _FEWEST):
            return None
        return self.requests * DAY_S / self.seconds

    @property
    def answers_per_day(self) -> float | None:
        """Answers a day: a request has as many as its items, so a slice never has more of them than all traffic."""
        requests = self.requests_per_day
        return (
            None if requests is None or not self.n_exchanges else requests * self.n_answers / self.n_exchanges
        )

    @property
    def changed_per_day(self) -> float | None:
        """Changed answers a day; None: not known."""
        answers = self.answers_per_day
        return None if answers is None or self.changed_share is None else answers * self.changed_share

    def share_of(self, whole: "DailyTraffic | None") -> float:
        """Return the share of these requests in all traffic of the same time; 0 where that is not known."""
        return min(self.requests / whole.requests, 1.0) if whole is not None and whole.requests > 0 else 0.0

    @property
    def sampled(self) -> float | None:
        """The share of the requests that was compared; None where none was."""
        return min(self.n_exchanges / self.requests, 1.0) if self.requests > 0 else None

    @property
    def basis(self) -> str:
        """What a figure of a day is from, while that is less than a day: `at the rate of the last 7 minutes`; else empty."""
        return basis(self.seconds)


def basis(seconds: float | None) -> str:
    """Return the same for a time in seconds; empty where it is not known."""
    if seconds is None or not 0 < seconds < DAY_S:
        return ""
    size, unit = next(((size, unit) for size, unit in _UNITS if seconds >= size), _UNITS[-1])
    return f"at the rate of the last {count_of(max(1, int(seconds // size)), unit).removeprefix('1 ')}"


def rounded(per_day: float) -> int:
    """Return a number of a day with two digits, as everywhere where people read it: 31,872 is 32,000."""
    if per_day < 10:
        return round(per_day)
    size = 10 ** (floor(log10(per_day)) - 1)
    return round(per_day / size) * size
