"""What a fleet of detectors is given on the calendar clock, and what it may alarm of that; with clocks that are wrong."""

import random
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from quantdrift.drift.detectors.protocol import BUDGET
from quantdrift.drift.evidence.clock import DAY_US, MONTH_US, CalendarClock
from quantdrift.drift.watch import Groups, Series, SignalKey, SliceWatch, Thresholds, advance

pytestmark = pytest.mark.statistical

KEY = SignalKey("flip", "budget")
SLOW = 1e-9  # a budget so small that x = v m moves no evidence: e = 1
Tick = Callable[[CalendarClock, int], CalendarClock]


def shipped(clock: CalendarClock, at_us: int) -> CalendarClock:
    """Return the clock of the product after an event."""
    return clock.seen(at_us)


def each_step(clock: CalendarClock, at_us: int) -> CalendarClock:
    """Return a clock that every event moves, also one that comes late."""
    before = clock.at_us if clock.at_us is not None else at_us
    mass = clock.mass + abs(at_us - before) / (MONTH_US * max(clock.n_detectors, 1))
    return msgspec.structs.replace(clock, at_us=at_us, mass=mass)


def uncapped(clock: CalendarClock, at_us: int) -> CalendarClock:
    """Return a clock on which a pause counts as long as it was."""
    if clock.at_us is None or at_us <= clock.at_us:
        return clock.seen(at_us)
    mass = clock.mass + (at_us - clock.at_us) / (MONTH_US * max(clock.n_detectors, 1))
    return msgspec.structs.replace(clock, at_us=at_us, mass=mass)


def given(tick: Tick, seed: int, *, share: bool = True) -> float:
    """Return all mass given in 30 days of random arrivals, creations, deletions and times out of order.

    Without `share` every detector is given the allowance of the whole fleet.
    """
    rng = random.Random(seed)
    clock, last, total = tick(CalendarClock(), 0), dict[int, float](), 0.0
    for number in range(2000):
        now = int(number * MONTH_US / 2000 + rng.uniform(-2, 2) * DAY_US)
        clock = tick(clock, min(max(now, 0), MONTH_US))
        turn = rng.random()
        if turn < 0.05:
            last[number] = clock.mass
        elif last:
            one = rng.choice(list(last))
            total += clock.mass - last[one]
            last[one] = clock.mass
            if turn < 0.07:
                del last[one]
        clock = clock.with_detectors(len(last) if share else min(len(last), 1))
    return total + sum(clock.mass - mass for mass in last.values())


def test_a_fleet_gets_at_most_one_unit_in_a_month() -> None:
    """Exact, over 10 histories; late events that count, or an allowance that is not shared out, exceed it."""
    assert max(given(shipped, seed) for seed in range(10)) <= 1 + 1e-9
    assert max(given(each_step, seed) for seed in range(10)) > 1
    assert max(given(shipped, seed, share=False) for seed in range(10)) > 1


def fleet(n: int) -> list[SliceWatch]:
    """Return watches whose evidence is the mass that they were given."""
    one = BUDGET.fresh(budget=SLOW, scale=1.0, weighted=False, mass=0.0, at_us=0)
    return [SliceWatch(states={KEY: one.copy()}) for _ in range(n)]


def look(watches: list[SliceWatch], clock: CalendarClock, thresholds: Thresholds, *, x: float = SLOW) -> int:
    """Give every watch one group and return how many page; these are watched again at once."""
    groups = Groups(
        order=np.zeros(1),
        mass=np.array([clock.mass]),
        at_us=np.array([float(clock.at_us or 0)]),
        series={KEY: Series(x=np.array([[x, 1.0]]), seen=np.ones(1, dtype=bool))},
    )
    changes = advance(watches, [groups] * len(watches), thresholds)
    for change in changes:
        watches[change.watch].stand_down(mass=clock.mass, at_us=clock.at_us or 0)
    return len(changes)


@pytest.mark.parametrize("tick", [shipped, uncapped], ids=["shipped", "a pause counts whole"])
def test_a_fleet_that_sees_nothing_wrong_pages_at_most_q_times_a_month(tick: Tick) -> None:
    """Evidence is mass alone, e = 1: pages by T never exceed q T, for 100 detectors of which 90 are deleted.

    q = 4, so that there are pages to count, and without the rule on mass, which would forbid them all. Events come
    once a day, so that only a pause tells the clocks apart: for four months nothing is seen, which is no time to
    page in; the mutant pages in all of it at once.
    """
    thresholds = Thresholds(page=1 / 4.0, ticket=1e300, mass_ratio=0.0)
    watches, clock = fleet(100), tick(CalendarClock(n_detectors=100), 0)
    pages, day = 0, 0
    for step in range(240):
        day += 120 if step == 180 else 1
        clock = tick(clock, day * DAY_US)
        found = look(watches, clock, thresholds)
        pages += found
        if step == 180:
            assert (found == 0) == (tick is shipped)
        if step == 60:
            watches, clock = watches[:10], clock.with_detectors(10)
        assert pages <= 4.0 * (step + 1) / 30 + 1e-9 or tick is not shipped
    assert pages > 0


def test_after_four_months_of_silence_one_clean_group_is_no_page() -> None:
    """Not even where the mass is beyond the threshold; without the rule on mass it is."""
    for ratio, expected in ((1000.0, 0), (0.0, 10)):
        thresholds = Thresholds(page=10.0, ticket=1e300, mass_ratio=ratio)
        pages = look(
            fleet(10), CalendarClock(at_us=4 * MONTH_US, mass=40.0, n_detectors=1), thresholds, x=0.0
        )
        assert pages == expected
