"""Change detection: averages over any bag of groups, strata of any baseline, and bits that stay."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantdrift.drift.detectors.change import bets, run
from quantdrift.drift.detectors.change.baseline import LEAST_GROUPS, N_STRATA, cuts_of
from quantdrift.drift.evidence.bound import upper_bound
from quantdrift.drift.evidence.header import ALERTING, PAGING
from quantdrift.drift.evidence.margin import N_BINS
from quantdrift.drift.evidence.observations import STEPS, FloatArray
from quantdrift.drift.evidence.run import SIDE_BY_SIDE
from tests.support.monitor.change_streams import CHANGE, SURE, baseline, block

pytestmark = pytest.mark.property

LOW = 3
SPREAD = np.array([0, LOW, 7, 11, SURE])


def mixed(rng: np.random.Generator, steps: int, n: int, rate: float) -> FloatArray:
    """Return groups of one to four items in any margin bins with fractional values."""
    found = np.zeros((steps, n, CHANGE.width))
    for step in range(steps):
        for row in range(n):
            n_items = int(rng.integers(1, 5))
            for bin_ in rng.choice(SPREAD, n_items):
                found[step, row, bin_] += 1 / n_items
                found[step, row, bin_ + N_BINS] += float(rng.random() < rate) * rng.random() / n_items
    return found


def starts(seed: int, n: int) -> FloatArray:
    """Return states of every stage: learning, live, frozen, and some of them alerting."""
    rng = np.random.default_rng(seed)
    states = []
    for row in range(n):
        if row % 4 == 0:
            state = CHANGE.fresh(scale=1.0, mass=0.0, at_us=0)
        else:
            known = baseline(6000, float(rng.integers(60, 200)), tau=0.25, bins=SPREAD)
            state = CHANGE.from_content(known, scale=1.0, mass=0.0, at_us=0)
        if row % 4 == 2:
            CHANGE.freeze(state)
        if row % 4 == 3 or row % 8 == 0:
            CHANGE.alarmed(state, page=row % 3 == 0)
        states.append(state)
    return np.stack(states)


@given(data=st.data(), tau=st.sampled_from([0.0, 0.1, 0.25, 1.0]))
def test_no_bet_gains_on_average_over_any_bag_of_groups_that_span_strata(
    data: st.DataObject, tau: float
) -> None:
    """For any shares of two strata and any values in them, each group being the current one equally often."""
    n = data.draw(st.integers(1, 8))
    share = np.array(data.draw(st.lists(st.floats(0, 1), min_size=n, max_size=n)))
    shares = np.stack((share, 1 - share), axis=1)
    x = data.draw(st.lists(st.floats(0, 1), min_size=2 * n, max_size=2 * n))
    totals = shares * np.array(x).reshape(n, 2)
    others = shares.sum(axis=0) - shares, totals.sum(axis=0) - totals
    factor = np.ones((n, bets.HALF))
    for group, stratum in np.argwhere(shares):
        past_share, past_total = (max(one[group, stratum], 0.0) for one in others)
        pi = bets.null(past_total, past_share, tau)
        bets.gain(factor[group], bets.COMMON, stratum, (shares[group, stratum], totals[group, stratum]), pi)
    assert (factor >= 0).all()
    assert factor.mean(axis=0).max() <= 1 + 1e-12


@given(share=st.lists(st.floats(0, 1e4), min_size=N_BINS, max_size=N_BINS))
def test_every_testing_stratum_holds_enough_or_is_the_only_one(share: list[float]) -> None:
    """Cuts rise inside the grid; no stratum that was cut off holds less than 25 groups' items."""
    cuts = cuts_of(share)
    assert list(cuts) == sorted(set(cuts))
    assert all(0 < cut < N_BINS for cut in cuts)
    assert len(cuts) < N_STRATA
    if cuts:
        parts = np.add.reduceat(np.array(share), [0, *cuts])
        assert parts.min() >= LEAST_GROUPS * (1 - 1e-9)


@given(n=st.floats(1e-3, 1e6), rate=st.floats(0, 1), delta=st.floats(1e-9, 0.5))
def test_a_bound_lies_between_the_mean_and_one(n: float, rate: float, delta: float) -> None:
    """And is the tighter the less sure it must be."""
    bound = upper_bound(rate * n, n, delta)
    assert min(rate, 1.0) <= bound * (1 + 1e-9)
    assert bound <= 1.0
    assert upper_bound(rate * n, n, min(2 * delta, 0.9)) <= bound + 1e-12


@pytest.mark.parametrize("seed", range(3))
def test_company_does_not_change_the_bits(seed: int) -> None:
    """A signal alone, and among others of every stage, ends in the same bits, wherever it is stopped."""
    rng = np.random.default_rng(seed)
    n = 2 * SIDE_BY_SIDE + 5
    states, given_ = starts(seed, n), mixed(rng, STEPS, n, 0.05)
    whole = block(given_, gamma=1e-6)
    whole.seen[:] = rng.random((STEPS, n)) < 0.9
    stops = rng.integers(0, STEPS, n)
    path = CHANGE.run(states, whole)
    together = path.stopped(stops)
    for row in range(0, n, 7):
        alone = block(given_[:, row : row + 1], gamma=1e-6)
        alone.seen[:] = whole.seen[:, row : row + 1]
        single = CHANGE.run(states[row : row + 1], alone)
        assert single.stopped(stops[row : row + 1]).tobytes() == together[row].tobytes()
        for name in ("page", "page_mass", "ticket", "ticket_mass", "recovery"):
            assert getattr(single, name)[:, 0].tobytes() == getattr(path, name)[:, row].tobytes()


@given(seed=st.integers(0, 2**32 - 1), split=st.integers(1, STEPS - 1))
@settings(max_examples=15, deadline=None)
def test_another_split_gives_the_same_bits(seed: int, split: int) -> None:
    """The same groups in one block and in two, in every stage."""
    rng = np.random.default_rng(seed)
    states, given_ = starts(seed, 8), mixed(rng, STEPS, 8, 0.1)
    whole = CHANGE.run(states, block(given_, gamma=1e-6)).stopped(np.full(8, STEPS - 1))
    first = CHANGE.run(states, block(given_[:split], gamma=1e-6)).stopped(np.full(8, split - 1))
    second = block(given_[split:], first=split, gamma=1e-6)
    stepped = CHANGE.run(first, second).stopped(np.full(8, STEPS - split - 1))
    assert whole.tobytes() == stepped.tobytes()


@pytest.mark.parametrize("x", [0.0, 1.0])
def test_everything_stays_finite_at_the_edges(x: float) -> None:
    """Values all 0 or all 1 for many blocks, on an empty baseline and on one without events: finite, nothing negative."""
    states = np.stack(
        [
            CHANGE.from_content(baseline(n, k, tau=tau, bins=SURE), scale=1.0, mass=0.0, at_us=0)
            for n, k, tau in ((0, 0.0, 0.0), (20, 0.0, 0.0), (5000, 0.0, 0.25), (50, 50.0, 1.0))
        ]
    )
    for state in states:
        CHANGE.alarmed(state, page=False)
    one = np.zeros((STEPS, 4, CHANGE.width))
    one[:, :, SURE], one[:, :, SURE + N_BINS] = 1.0, x
    for first in range(0, 40 * STEPS, STEPS):
        path = CHANGE.run(states, block(one, first=first, gamma=1e-9))
        states = path.stopped(np.full(4, STEPS - 1))
        assert np.isfinite(path.page).all()
        assert np.isfinite(states).all()
        assert (states[:, run.PAGE] >= 0).all()
        assert (states[:, run.MIRROR] >= 0).all()
        for state in states:
            if state[PAGING] and CHANGE.evidence(state) > 1e6:
                CHANGE.alarmed(state, page=True)
    assert (states[:, ALERTING] == 1).all()
