"""A fault on weekends alone, with a slice by the time of week and without one, while all traffic has a weekly season.

    python -m benchmarks.seasons [--quick]

A model answers 1,000 exchanges a day. 1 % of its answers differ, 25 % more or fewer by the day of the week (a sine). After
eight healthy weeks the rate is three times as high on Saturdays and Sundays. The learned detector with its default tolerance
follows the slice `all` and the slice `time.week = "weekend"`, at the allowance of 4,000 signals and 0.1 pages in 30 days.
"""

import argparse
import math

import numpy as np

from benchmarks.race import unstratified
from benchmarks.result import Goal, finish
from quantdrift.drift.detectors.protocol import CHANGE
from quantdrift.drift.evidence.clock import DAY_US, CalendarClock
from quantdrift.drift.evidence.observations import BoolArray, FloatArray
from quantdrift.drift.watch import Groups, Phase, Series, SignalKey, SliceWatch, Thresholds, advance

PER_DAY = 1000
HEALTHY_WEEKS = 8
N_SIGNALS = 4000
RATE, SEASON, FAULT = 0.01, 0.25, 3.0
THRESHOLDS = Thresholds(page=10.0, ticket=math.inf)
_FLIP = SignalKey("flip", "change")
_WEEK, _FIRST_DAY_OF_WEEKEND = 7, 5


def alarms(runs: int, weeks: int, *, weekend: bool, seed: int) -> FloatArray:
    """Return per run the bad week, from 1, in which a slice first paged; infinite if it did not, 0 if it paged before.

    Parameters
    ----------
    weeks
        After the onset.
    weekend
        Follow Saturdays and Sundays alone in place of all traffic.
    """
    rng = np.random.default_rng(seed)
    watches = [SliceWatch() for _ in range(runs)]
    for watch in watches:
        watch.add(_FLIP, CHANGE.fresh(scale=1.0, mass=0.0, at_us=0))
    clock = CalendarClock(at_us=0, n_detectors=N_SIGNALS)
    first = np.full(runs, np.inf)
    for day in range((HEALTHY_WEEKS + weeks) * _WEEK):
        of_week = day % _WEEK
        at_us: FloatArray = np.asarray(day * DAY_US + (np.arange(PER_DAY) + 1.0) * (DAY_US / PER_DAY))
        mass = np.zeros(PER_DAY)
        for place, moment in enumerate(at_us):
            clock = clock.seen(int(moment))
            mass[place] = clock.mass
        is_weekend = of_week >= _FIRST_DAY_OF_WEEKEND
        if weekend and not is_weekend:
            continue
        rate = RATE * (1 + SEASON * math.sin(2 * math.pi * of_week / _WEEK))
        if is_weekend and day >= HEALTHY_WEEKS * _WEEK:
            rate *= FAULT
        x = unstratified((rng.random((PER_DAY, runs)) < rate).astype(np.float64))
        seen: BoolArray = np.ones(PER_DAY, dtype=np.bool_)
        groups = [
            Groups(
                order=np.arange(PER_DAY, dtype=np.float64),
                mass=mass,
                at_us=at_us,
                series={_FLIP: Series(x=x[:, run], seen=seen)},
            )
            for run in range(runs)
        ]
        for change in advance(watches, groups, THRESHOLDS):
            if change.after is Phase.FIRING and np.isinf(first[change.watch]):
                first[change.watch] = max(day // _WEEK - HEALTHY_WEEKS + 1, 0)
        for watch in watches:
            CHANGE.tend(watch.states[_FLIP], mass=clock.mass, at_us=(day + 1) * DAY_US)
    return first


def main(runs: int) -> None:
    """Measure, print, and end with one line of JSON."""
    figures: dict[str, float | int | str | None] = {"runs": runs}
    for name, weekend in (("all", False), ("weekend", True)):
        first = alarms(runs, 6, weekend=weekend, seed=1)
        figures[f"{name}_paged_before"] = float((first == 0).mean())
        figures[f"{name}_found_by_third"] = float(((first >= 1) & (first <= 3)).mean())
        figures[f"{name}_found_by_sixth"] = float(((first >= 1) & (first <= 6)).mean())
    for name, value in figures.items():
        print(f"{name:26} {value:.4g}" if isinstance(value, float) else f"{name:26} {value}")
    found = float(figures["weekend_found_by_third"] or 0.0)
    finish(
        "seasons",
        figures,
        [Goal(name="weekend_found_by_third", value=found, bound=0.9, unit="1", at_most=False)],
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer runs")
    main(50 if parser.parse_args().quick else 400)
