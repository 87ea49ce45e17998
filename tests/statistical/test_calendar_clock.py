"""The calendar clock: the budget of false alarms of a whole fleet, whose detectors come and go."""

import random

import pytest

from quantdrift.drift.evidence.clock import DAY_US, MICROSECONDS, MONTH_US, CalendarClock

pytestmark = pytest.mark.statistical


def test_thirty_days_give_at_most_one_unit_to_all_detectors_together() -> None:
    """Random arrivals, creations, deletions and out-of-order times: the sum of all masses is at most 1 (exact)."""
    for seed in range(20):
        rng = random.Random(seed)
        clock = CalendarClock().seen(0)
        last: dict[int, float] = {}
        given = 0.0
        for number in range(3000):
            now = int(number * MONTH_US / 3000 + rng.uniform(-2, 2) * DAY_US)
            clock = clock.seen(min(max(now, 0), MONTH_US))
            draw = rng.random()
            if draw < 0.05 and len(last) < 500:
                last[number] = clock.mass
                clock = clock.with_detectors(len(last))
            elif draw < 0.07 and last:
                given += clock.mass - last.pop(rng.choice(list(last)))
                clock = clock.with_detectors(len(last))
            elif last:
                one = rng.choice(list(last))
                given += clock.mass - last[one]
                last[one] = clock.mass
        given += sum(clock.mass - mass for mass in last.values())
        assert given <= 1 + 1e-9


def test_a_fleet_of_detectors_that_learn_nothing_alarms_at_most_q_times_a_month() -> None:
    """With e = 1 evidence is mass alone: alarms by T never exceed q T, also while the fleet shrinks from 1,000 to 10."""
    q = 0.1
    clock = CalendarClock(at_us=0, mass=0.0, n_detectors=1000)
    reset = [0.0] * 1000
    alarms = 0
    for hour in range(24 * 30 * 36):
        if hour == 24 * 30 * 6:
            clock = clock.with_detectors(10)
            reset = reset[:10]
        clock = clock.seen(hour * 3600 * MICROSECONDS)
        for one, mass in enumerate(reset[:10]):
            if clock.mass - mass >= 1 / q:
                alarms += 1
                reset[one] = clock.mass
        assert alarms <= q * hour / (24 * 30) + 1e-9


def test_time_never_runs_backwards_and_a_pause_counts_a_day() -> None:
    """Earlier events move nothing; four months of silence are worth one day of allowance."""
    clock = CalendarClock(n_detectors=1).seen(0)
    assert clock.seen(-5) == clock
    paused = clock.seen(4 * MONTH_US)
    assert paused.mass == pytest.approx(1 / 30)
    assert paused.at_us == 4 * MONTH_US
    assert CalendarClock().seen(0).seen(DAY_US).mass == 0.0
    with pytest.raises(ValueError, match="not negative"):
        clock.with_detectors(-1)
