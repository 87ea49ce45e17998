"""The noise of slices: bounds that cover in all slices at once, and allowances that follow the noise of the slice.

Simulated on the sample clock at the threshold of production, e^24; every exchange of a slice is replayed again until 500 are, then one in four. Seeds
are fixed: each test states with which probability another seed would fail.
"""

from functools import partial

import numpy as np
import pytest

from quantdrift.drift import noise
from quantdrift.drift.detectors.protocol import BUDGET
from quantdrift.drift.evidence.observations import FloatArray
from quantdrift.drift.noise import (
    SLICE_DELTA,
    SLICE_LOW_DELTA,
    Level,
    Noise,
    NoiseSums,
    bounds_of,
    of_slice,
)
from tests.statistical.test_budget import block

pytestmark = pytest.mark.statistical

DELTA = 0.05
PRODUCTION = float(np.exp(24.0))
BUDGET_M = 0.01
TURN = 50  # groups between two looks at the noise
ALL_UNTIL, SHARE = 500, 4


def missed(slices: int, level: float) -> float:
    """Return the share of versions in which the bound of any of so many slices is ever wrong, at either end.

    100 versions; slices that overlap in half of their groups; 1,000 replays of each, looked at 10 times.
    """
    rng = np.random.default_rng(23)
    versions, steps, rate = 100, 1000, 0.05
    looks = np.unique(np.geomspace(5, steps, 10).astype(int)) - 1
    wrong = np.zeros(versions, dtype=bool)
    shared = rng.random((versions, steps)) < rate
    for _ in range(slices):
        own = rng.random((versions, steps)) < rate
        hits = np.where(rng.random((versions, steps)) < 0.5, shared, own)
        total = np.cumsum(hits, axis=1)[:, looks].astype(float)
        noises = [
            Noise(older=NoiseSums(int(at) + 1, float(at + 1), count))
            for counts in total.tolist()
            for at, count in zip(looks.tolist(), counts, strict=True)
        ]
        bounds = np.array(bounds_of(noises, level, level)).reshape(versions, len(looks), 2)
        wrong |= ((bounds[..., 0] > rate) | (bounds[..., 1] < rate)).any(axis=1)
    return float(wrong.mean())


def test_the_bounds_of_all_slices_cover_at_once() -> None:
    """40 slices at a level of 5 % / 40: at most 5 % of the versions miss in any of them, at either end 5 %.

    The share exceeds 10 % plus four standard errors with probability below 1e-4 if the bound were attained. A mutant that
    gives each slice the whole level misses in more than a fifth of the versions.
    """
    assert missed(40, DELTA / 40) <= 2 * DELTA + 4 * np.sqrt(2 * DELTA / 100)
    assert missed(40, DELTA) > 0.22


def passages(
    *,
    noise: float,
    of_version: Level,
    means: tuple[float, float],
    n: int,
    own: bool = True,
    threshold: float = PRODUCTION,
) -> tuple[FloatArray, FloatArray]:
    """Return per stream of a slice the group at which it pages, or infinity, and the allowance in the end.

    Parameters
    ----------
    noise
        Mean noise of the slice.
    of_version
        Allowance and limit of its version, which do not change.
    means
        Mean of the flips without noise, in the first and in the second half.
    n
        Groups.
    own
        Whether the slice has a figure of its own. False: the allowance of the version alone, as before there were any.
    """
    rng, streams = np.random.default_rng(5), 40
    page, counts = np.full(streams, np.inf), np.zeros((streams, 2))
    levels: list[Level | None] = [None] * streams
    states = np.stack([_fresh(of_version.added, 0)] * streams)
    for first in range(0, n, TURN):
        mean = means[first >= n // 2]
        path = BUDGET.run(
            states, block((rng.random((TURN, streams)) < mean + noise).astype(float), first=first)
        )
        hit = path.page >= threshold
        step = np.where(hit.any(axis=0), first + hit.argmax(axis=0) + 1.0, np.inf)
        page = np.minimum(page, step)
        states = path.stopped(np.full(streams, TURN - 1))
        replays = TURN if counts[0, 0] < ALL_UNTIL else TURN // SHARE
        counts += np.stack([np.full(streams, replays), rng.binomial(replays, noise, streams)], axis=1)
        if not own:
            continue
        noises = [Noise(older=NoiseSums(int(k), k, hits)) for k, hits in counts.tolist()]
        bounds = bounds_of(noises, SLICE_LOW_DELTA, SLICE_DELTA)
        for stream, of_stream in enumerate(bounds):
            before = levels[stream]
            level = levels[stream] = of_slice(before, of_version, of_stream, BUDGET_M, 0.5 * BUDGET_M)
            old, new = (before or of_version).added, (level or of_version).added
            if new > old:
                states[stream] = _fresh(new, first + TURN)
            elif new < old:
                BUDGET.lower(states[stream], BUDGET_M + new)
    return page, np.array([(level or of_version).added for level in levels])


def _fresh(allowance: float, at: int) -> FloatArray:
    return BUDGET.fresh(budget=BUDGET_M + allowance, scale=1.0, weighted=False, mass=float(at), at_us=0)


def test_a_slice_with_ten_times_the_noise_of_its_version_does_not_page_for_it() -> None:
    """Noise of 5 % where that of the version is 0.5 %, known to be below 0.65 %; the candidate is at half of its budget of 1 %.

    Some pages stay: a slice can page before its noise is known. Of 40 slices at most 8 do, by another seed more with
    probability below 1e-3 (1 in 20 does). With the figure of the version, as before, all of them page.
    """
    run = partial(passages, noise=0.05, of_version=Level(added=0.0065), means=(0.005, 0.005), n=4000)
    page, allowance = run()
    assert np.isfinite(page).sum() <= 8
    assert (allowance >= 0.05).all()
    assert np.isfinite(run(own=False)[0]).sum() >= 39


@pytest.mark.release
@pytest.mark.parametrize("of_version", [pytest.param(0.01, marks=pytest.mark.release), 0.03])
def test_the_noise_of_other_slices_does_not_hide_the_drift_of_a_quiet_one(of_version: float) -> None:
    """No noise in the slice, whose version has 1 or 3 % for noise on a budget of 1 %; flips go from 0.5 to 3 %.

    All of 40 slices are found within 10,000 groups, in half of the time at most; a slice is not found with probability
    below 1e-4. With the figure of the version they take 8,400 groups in the median, or are never found.
    """
    run = partial(passages, noise=0.0, of_version=Level(added=of_version), means=(0.005, 0.03), n=40_000)
    own, allowance = run()
    delay, before = own - 20_000, run(own=False)[0] - 20_000
    assert (delay <= 10_000).all()
    assert np.median(delay) <= 0.5 * np.median(before)
    assert (allowance < 0.004).all()


@pytest.mark.release
def test_an_allowance_that_falls_raises_no_false_alarms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise of 1.5 % in a slice of a version that has 5 % for noise; the flips are at the budget, so that all but noise is spent.

    At 50 times the length of a stream at most 2 % may page: more than 5 of 40 with probability below 1e-3. A mutant that
    takes the mean for the bound pages in two of five.
    """
    run = partial(passages, noise=0.015, of_version=Level(added=0.05), means=(0.01, 0.01), n=20_000)
    page, allowance = run(threshold=50 * 20_000)
    assert np.isfinite(page).sum() <= 5
    assert ((allowance >= 0.015) & (allowance < 0.034)).all()
    monkeypatch.setattr(noise, "upper_bounds", lambda total, n, _delta: total / n)
    assert np.isfinite(run(threshold=50 * 20_000)[0]).sum() > 12
