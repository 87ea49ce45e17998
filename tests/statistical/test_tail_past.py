"""The tail's bets against what the past allows. Every simulation is seeded and states its failure probability."""

import math

import numpy as np
import pytest

from benchmarks.defaults import EFFECTS
from benchmarks.delays import PRODUCTION
from benchmarks.race import Shipped, learned
from quantdrift.drift.detectors.tail import past, pooled_histogram
from quantdrift.drift.detectors.tail.detector import TailDetector
from quantdrift.drift.evidence import header
from quantdrift.drift.evidence.clock import DAY_US
from quantdrift.drift.evidence.observations import FloatArray
from tests.support.monitor.wrong_detectors import plant

pytestmark = pytest.mark.statistical

PER_DAY, PART = 1_000, 500
SMOOTH = next(effect for effect in EFFECTS if "5 % of a Pareto" in effect.name)


def of_past(states: FloatArray) -> FloatArray:
    """Return the evidence of these bets alone, (N,), for each unit of the capital."""
    return np.asarray(states[:, pooled_histogram.PAST.start + past.EVIDENCE] / past.SHARE)


def lasting(runs: int, tau: float = 0.25) -> Shipped:
    """Return the detector on traffic of 1,000 groups a day."""
    return learned("tail", tau, runs, apart_us=DAY_US // PER_DAY)


@pytest.mark.parametrize("factor", [1.0, 1.25])
def test_no_bet_gains_on_average_at_the_mean_that_it_is_made_against(factor: float) -> None:
    """Over 500 random laws of the levels: bets on more since, at their mean, and bets on less before, at the tolerated mean.

    Against a mean that is a tenth less, bets on more gain; against one that is a tenth more, bets on less do.
    """
    rng, logs, single = np.random.default_rng(1), np.empty(8), np.eye(past.N_LEVELS + 1)
    gained = 0.0
    for _ in range(500):
        law = rng.dirichlet((20.0, *rng.uniform(0.05, 1.0, past.N_LEVELS)))
        for f in past._F:
            mean = float(law @ f)
            if not 1e-6 < factor * mean < 0.9:
                continue

            def more(m: float, f: FloatArray = f, law: FloatArray = law) -> float:
                return math.fsum(
                    chance * math.exp(past._log_since(one, 1.0, f, m, logs))
                    for chance, one in zip(law.tolist(), single, strict=True)
                )

            def less(m: float, f: FloatArray = f, law: FloatArray = law) -> float:
                return math.fsum(
                    chance * math.exp(past._log_before(one, f, m, factor, logs))
                    for chance, one in zip(law.tolist(), single, strict=True)
                )

            assert more(mean) <= 1 + 1e-12
            assert less(factor * mean) <= 1 + 1e-12
            gained += (more(0.9 * mean) > 1 + 1e-9) + (less(1.1 * factor * mean) > 1 + 1e-9)
    assert gained > 500


def alarms(runs: int, n: int, change: float) -> float:
    """Return the share of runs in which these bets alone reach 4 n within n groups of values that are `change` times as large."""
    rng, detector, best = np.random.default_rng(2), lasting(runs), np.zeros(runs)
    for first in range(0, 14_000 + n, PART):
        x = 0.01 * np.exp(0.7 * rng.standard_normal((PART, runs)))
        detector.follow(x * (change if first >= 14_000 else 1.0))
        best = np.maximum(best, of_past(detector.states))
    return float((best >= 4 * n).mean())


def test_values_that_grow_within_the_tolerance_raise_no_false_alarms(monkeypatch: pytest.MonkeyPatch) -> None:
    """All values 25 % larger from two whole weeks on: P(alarm within n) <= 1/4 at 4 n, n = 20,000.

    32 streams: more than 0.6 has P < 1e-4 were it attained. If the tolerance is left out of the past, most alarm.
    """
    assert alarms(32, 20_000, 1.25) <= 0.6
    plant(monkeypatch, past, "tolerance", lambda _tau, _span_us: 0.0)
    assert alarms(32, 20_000, 1.25) > 0.6


def paged(runs: int) -> float:
    """Return the share of smooth tails that page within 30,000 groups, at the tolerance and the threshold of production."""
    rng, detector, hit = np.random.default_rng(274), lasting(runs), np.zeros(runs, dtype=np.bool_)
    for _ in range(0, SMOOTH.n_before, PART):
        detector.follow(SMOOTH.before(rng, (PART, runs)))
    for _ in range(0, 30_000, PART):
        hit |= (detector.follow(SMOOTH.after(rng, (PART, runs))) >= PRODUCTION * PER_DAY / 86_400).any(axis=0)
    return float(hit.mean())


def test_a_tail_that_thickens_smoothly_pages_at_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 24 runs at least half page; of those in which these bets have no evidence, at most half do.

    At two in three 11 or fewer of 24 have P < 0.05, with this seed it is settled; at one in four 13 or more have P < 2e-3.
    """
    assert paged(24) >= 0.5
    plant(monkeypatch, past, "SHARE", 0.0)
    assert paged(24) <= 0.5


def test_evidence_against_the_past_moves_with_a_release_and_stays_in_sum() -> None:
    """A version that inherits the baseline and takes over the moments has 99 % of their allowance, and what is left stays."""
    rng, detector = np.random.default_rng(3), lasting(1)
    for _ in range(0, 20_000, PART):
        detector.follow(SMOOTH.before(rng, (PART, 1)))
    shipped, old = TailDetector(), detector.states[0].copy()
    new = shipped.inherit(old, mass=20_000.0, at_us=int(old[header.LAST_AT]))
    first, step = pooled_histogram.PAST.start + past.MOMENTS, past._MOMENT
    masses = slice(first, pooled_histogram.PAST.stop, step)
    before = old[masses].sum()
    assert before > 0
    assert shipped.carry(new, old)
    assert new[masses].sum() == pytest.approx(0.99 * before)
    assert old[masses].sum() == pytest.approx(0.01 * before)


def test_an_alert_lets_the_past_begin_at_the_baseline_that_it_goes_back_to() -> None:
    """What an alert takes out of the baseline was chosen by its values: it is not evidence of the past."""
    rng, detector = np.random.default_rng(4), lasting(1)
    for _ in range(0, 15_000, PART):
        detector.follow(SMOOTH.before(rng, (PART, 1)))
    shipped, state = TailDetector(), detector.states[0].copy()
    begin = pooled_histogram.PAST.start + past.BEGIN + past.N
    assert state[begin] == 2_048
    shipped.alarmed(state, page=True)
    assert of_past(state[None])[0] == 0
    shipped.arm(state, mass=15_000.0, at_us=int(state[header.LAST_AT]))
    assert state[begin] == state[pooled_histogram.BASE.start] > 2_048
