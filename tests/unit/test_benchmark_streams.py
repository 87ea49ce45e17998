"""The streams and the oracle of the detection benchmark, and its text passages."""

import math

import numpy as np
import pytest

from benchmarks.contest import Standing, best
from benchmarks.oracle import Oracle, run_length, tuned
from benchmarks.peers.outcome import Streams, chunks, outcome
from benchmarks.race import Passages, compare
from benchmarks.streams import (
    FLIPS,
    HARD,
    TAIL,
    Case,
    Divergences,
    Exceedances,
    Flips,
    Hard,
    Law,
    Stream,
)
from quantdrift.drift.evidence.observations import STEPS

pytestmark = pytest.mark.unit

SMALL = Case(name="small", before=Flips(rate=0.1), after=Flips(rate=0.5), change=80)


def test_the_same_seed_gives_the_same_values_however_they_are_fetched() -> None:
    """Blocks of one stream are the columns of the other's values, and another seed gives others."""
    whole = Stream(SMALL, 5, 1).values(6 * STEPS)
    stream = Stream(SMALL, 5, 1)
    assert (whole == np.concatenate([stream.block() for _ in range(6)]).T).all()
    assert (Stream(SMALL, 5, 2).values(6 * STEPS) != whole).any()


def test_the_change_is_at_its_exact_place() -> None:
    """Never a flip before group 80 and always one after it, though 80 is inside a block."""
    case = Case(name="sure", before=Flips(rate=0.0), after=Flips(rate=1.0), change=80)
    values = Stream(case, 3, 1).values(4 * STEPS)
    assert not values[:, :80].any()
    assert values[:, 80:].all()


@pytest.mark.parametrize(("case", "before", "after"), [(TAIL, 0.0165, 0.0195), (HARD, 0.0175, 0.0198)])
def test_a_tail_three_times_as_large_leaves_the_mean_as_it_is_to_two_decimals(
    case: Case, before: float, after: float
) -> None:
    """Means over 400,000 values are within 0.0004 of the stated ones (10 standard errors), and both are 0.02."""
    for law, mean in ((case.before, before), (case.after, after)):
        found = law.draw(np.random.default_rng(3), (400_000,)).mean()
        assert abs(found - mean) < 4e-4
        assert round(found, 2) == 0.02


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Flips(rate=0.01), Flips(rate=0.03)),
        (Divergences(), Divergences(factor=3.0)),
        (Exceedances(), Exceedances(factor=3.0)),
        (Hard(), Hard(factor=3.0)),
    ],
)
def test_densities_belong_to_what_is_drawn(before: Law, after: Law) -> None:
    """E0[f1 / f0] = 1 and E1[f0 / f1] = P0(possible under f1): a density that is not the draws' own fails.

    400,000 values. The ratio f0 / f1 is bounded by some 10 under f1 and the mean of it is within 0.02; f1 / f0 is at
    most some 100 in the rare part and within 0.05; both fail with P < 1e-6.
    """
    rng = np.random.default_rng(4)
    x, y = before.draw(rng, (400_000,)), after.draw(rng, (400_000,))
    possible = np.isfinite(after.log_density(x)).mean()
    assert abs(np.exp(after.log_density(x) - before.log_density(x)).mean() - 1) < 0.05
    assert abs(np.exp(before.log_density(y) - after.log_density(y)).mean() - possible) < 0.02


def test_the_oracle_has_the_chance_of_false_alarm_it_was_tuned_to() -> None:
    """Tuned to 20 % within 2,000: of 2,000 runs 20 % +- 4.5 % alarm (5 standard errors, P < 1e-5 of failing).

    A threshold lower by 0.5, a mistake of a factor 1.6 in the run length, is told apart.
    """
    before, after = FLIPS[1].before, FLIPS[1].after
    threshold = tuned(before, after, within=2000, chance=0.2)
    rng = np.random.default_rng(5)
    oracle, top = Oracle(before, after, 2000), np.zeros(2000)
    for _ in range(2000 // STEPS):
        top = np.maximum(top, oracle.follow(before.draw(rng, (STEPS, 2000))).max(axis=0))
    assert abs((top >= threshold).mean() - 0.2) < 0.045
    assert abs((top >= threshold - 0.5).mean() - 0.2) > 0.045


def test_the_run_length_is_that_of_the_recursion() -> None:
    """At a low threshold the average run length equals a direct simulation's to 5 %.

    The direct one has a standard error of 1.6 % (4,000 runs), the renewal one of some 1 %.
    """
    before, after, h = Flips(rate=0.1), Flips(rate=0.3), 3.0
    rng = np.random.default_rng(6)
    w, length = np.zeros(4000), np.zeros(4000)
    running = np.ones(4000, dtype=bool)
    up, down = math.log(3), math.log(0.7 / 0.9)
    while running.any():
        length += running
        w = np.maximum(w + np.where(rng.random(4000) < 0.1, up, down), 0.0)
        running &= w < h
    assert abs(run_length(before, after, h) / length.mean() - 1) < 0.05


def test_the_oracle_follows_the_recursion_over_blocks() -> None:
    """W <- max(0, W + log ratio), one value after the other, to 1e-9, and across blocks."""
    x = Stream(SMALL, 3, 7).values(4 * STEPS).T
    oracle = Oracle(SMALL.before, SMALL.after, 3)
    path = np.concatenate([oracle.follow(x[first : first + STEPS]) for first in range(0, len(x), STEPS)])
    w = np.zeros(3)
    for row, values in zip(path, x, strict=True):
        w = np.maximum(0.0, w + np.where(values > 0, math.log(5), math.log(0.5 / 0.9)))
        assert np.allclose(row, w, atol=1e-9)


def passages(first: list[float]) -> Passages:
    """Return passages of one threshold with the change after 100 groups."""
    return Passages(thresholds=np.array([1.0]), change=100, first=np.array([first]), ready=20)


def test_a_delay_counts_from_the_change_and_false_alarms_are_apart() -> None:
    """Alarms up to the change are false ones; the groups they could have come in end with them and begin when ready."""
    found = passages([60.0, 100.0, 101.0, math.inf])
    assert np.array_equal(found.delays(0), [math.nan, math.nan, 1.0, math.inf], equal_nan=True)
    assert found.false_rate(0) == (2, 40.0 + 80.0 + 80.0 + 80.0)


def test_two_are_compared_in_the_runs_that_both_reached_healthy() -> None:
    """Run 1 is left out for its false alarm; a miss counts with the horizon."""
    ours, theirs = passages([140.0, 50.0, math.inf, 120.0]), passages([120.0, 110.0, 150.0, 110.0])
    found = compare(ours, 0, theirs, 0, horizon=100)
    assert (found.n, found.n_false, found.n_missed) == (3, 1, 1)
    assert found.delay == pytest.approx((40 + 100 + 20) / 3)
    assert found.ratio == pytest.approx((40 + 100 + 20) / (20 + 50 + 10))


def test_what_a_peer_did_is_counted_by_the_same_rules() -> None:
    """Alarms in the baseline do not count, one at the change is false, and the first one after it is the delay."""
    streams = Streams(name="x", values=np.zeros((2, 200)), baseline=20, change=100, binary=True)
    found = outcome(streams, "m", "default", [[10, 30, 100, 130, 150], []])
    assert (found.n_false, found.n_groups, found.delays) == (2, 160, [30, None])


def test_the_change_falls_into_the_middle_of_a_chunk() -> None:
    """A chunk that begins at the change would be the best case, one that ends there too."""
    streams = Streams(name="x", values=np.zeros((1, 400)), baseline=20, change=200, binary=True)
    inside = [begin for begin, end in chunks(streams, 50) if begin < 200 < end]
    assert inside == [175]


def test_the_best_setting_is_the_quickest_of_those_with_few_false_alarms() -> None:
    """A quicker one with more false alarms, and one that misses, do not count; a method without any is left out."""

    def one(setting: str, delay: float, rate: float, missed: float = 0.0, method: str = "a") -> Standing:
        return Standing(
            case="c",
            method=method,
            setting=setting,
            delay=delay,
            delay_se=1.0,
            missed=missed,
            rate=rate,
            n_runs=10,
            n_groups=200_000,
            us_per_group=1.0,
        )

    found = best(
        [
            one("loud", 10, 100.0),
            one("good", 50, 2.0),
            one("slow", 90, 0.0),
            one("blind", 20, 0.0, 0.5),
            one("loud", 5, 99.0, method="b"),
        ]
    )
    assert [(standing.method, standing.setting) for standing in found] == [("a", "good")]
