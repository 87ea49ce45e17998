"""The calendar clock: the false-alarm allowance given to each detector so far.

`Lambda(t) = integral ds / (30 days * N(s))`, N the number of live detectors. A detector that lives from a to b
receives `Lambda(b) - Lambda(a)`. Over the whole fleet that is at most one unit in 30 days, however the number of
detectors changes and under any dependence (an e-Bonferroni procedure over the fleet).
"""

import msgspec

MICROSECONDS = 1_000_000
DAY_US = 86_400 * MICROSECONDS
MONTH_US = 30 * DAY_US


class CalendarClock(msgspec.Struct, frozen=True, kw_only=True):
    """The time of the fold, which only stored event times advance.

    Parameters
    ----------
    at_us
        Running maximum of event times, microseconds since 1970, or None before the first.
    mass
        Lambda at that time, in months per live detector.
    n_detectors
        Live detectors from here on.
    """

    at_us: int | None = None
    mass: float = 0.0
    n_detectors: int = 0

    def seen(self, event_us: int) -> "CalendarClock":
        """Return the clock after an event at `event_us`.

        An earlier event moves nothing. One step counts at most a day: a pause is not allowance to spend on the
        first observation after it. While nothing is live no allowance is given.
        """
        if self.at_us is None:
            return msgspec.structs.replace(self, at_us=event_us)
        if event_us <= self.at_us:
            return self
        mass = self.mass
        if self.n_detectors:
            mass += min(event_us - self.at_us, DAY_US) / (MONTH_US * self.n_detectors)
        return CalendarClock(at_us=event_us, mass=mass, n_detectors=self.n_detectors)

    def with_detectors(self, n_detectors: int) -> "CalendarClock":
        """Return the clock with `n_detectors` live from here on."""
        if n_detectors < 0:
            raise ValueError("the number of detectors is not negative")
        return msgspec.structs.replace(self, n_detectors=n_detectors)
