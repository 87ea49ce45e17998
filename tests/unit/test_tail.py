"""The tail detector's life: learning, going live, alerting, going back, keeping, freezing, handing on."""

import numpy as np
import pytest

from quantdrift.core.errors import OperatorError
from quantdrift.drift.detectors.tail import pooled_histogram
from quantdrift.drift.detectors.tail.payoff import READY_RAREST
from quantdrift.drift.detectors.tail.quantile import EDGES, N_BINS, tail_bin
from quantdrift.drift.evidence import header
from quantdrift.drift.evidence.clock import DAY_US
from quantdrift.drift.evidence.observations import STEPS, FloatArray
from quantdrift.drift.evidence.recovery import RESOLVED
from tests.support.monitor.change_streams import block
from tests.support.monitor.tail_streams import (
    HEALTHY,
    STRETCHED,
    TAIL,
    baseline,
    given,
    last,
    learned,
    observed,
)

pytestmark = pytest.mark.unit


def one(seed: int = 1, n_groups: int = READY_RAREST, tau: float = 0.0) -> FloatArray:
    """Return one live state, (1, size)."""
    return learned(np.random.default_rng(seed), 1, n_groups, tau=tau)


def fired(seed: int = 2) -> FloatArray:
    """Return a state, (1, size), a while after its tail was stretched, not yet told that it alarmed."""
    rng = np.random.default_rng(seed)
    states = one()
    for first in range(0, 48 * STEPS, STEPS):
        states = last(TAIL.run(states, given(rng, HEALTHY if first < 512 else STRETCHED, 1, first)))
    return states


def test_the_grid_holds_every_divergence() -> None:
    """Below the grid is the first bin, from its top to infinity the last, edges belong to the bin above them."""
    assert tail_bin([0.0, 9.9e-5, 1e-4, 9.99, 10.0, np.inf]).tolist() == [
        0,
        0,
        1,
        N_BINS - 2,
        N_BINS - 1,
        N_BINS - 1,
    ]
    assert (np.diff(tail_bin(EDGES)) == 1).all()
    with pytest.raises(ValueError, match="not a number"):
        tail_bin([0.1, np.nan])


def test_a_state_fits_the_store() -> None:
    """At most 4,096 bytes."""
    assert TAIL.size <= 512


def test_it_says_what_is_missing_and_goes_live_between_batches() -> None:
    """While it learns its evidence is 0 and it asks for groups; with 10,000 it is live and has bounds of its own."""
    rng = np.random.default_rng(3)
    state = TAIL.fresh(tau=0.25, scale=1.0, mass=0.0, at_us=0)
    assert not TAIL.live(state)
    assert TAIL.missing(state) == pooled_histogram.READY
    for first in range(0, pooled_histogram.READY, STEPS):
        path = TAIL.run(state[None], given(rng, HEALTHY, 1, first))
        assert (path.page == 0).all()
        state = last(path)[0]
        TAIL.tend(state, mass=float(first + STEPS), at_us=first + STEPS)
    assert TAIL.live(state)
    assert TAIL.missing(state) == 0
    assert TAIL.learned(state) >= pooled_histogram.READY
    shares = np.cumsum(state[pooled_histogram.BASE][:1:-1])[::-1] / state[pooled_histogram.BASE][0]
    assert (state[pooled_histogram.BOUND] >= shares).all()
    assert state[header.MASS] == first + STEPS


def test_weights_that_are_no_shares_of_a_group_are_refused() -> None:
    """They would break the bound."""
    weights = observed(np.zeros((1, 1), dtype=np.intp))
    for wrong in (2 * weights, -weights):
        with pytest.raises(ValueError, match="add up to 1"):
            TAIL.run(one(), block(wrong))


def test_moved_and_exceedance_describe_the_change() -> None:
    """The onset is near group 512; p99 went up; at the level where that is clearest the share rose tenfold or more."""
    state = fired()[0]
    moved = TAIL.moved(state)
    assert abs(moved.onset_us - 512) < 200
    assert moved.before == pytest.approx(0.1, rel=0.2)
    assert moved.after is not None
    assert moved.after > 1.5 * 0.1
    told = pooled_histogram.exceedance(state)
    assert told is not None
    assert told.after > 10 * told.before
    assert told.level > 0.2
    assert pooled_histogram.exceedance(one()[0]) is None


def test_an_alert_goes_back_to_the_baseline_before_its_onset_and_sets_the_rest_aside() -> None:
    """The contaminated groups leave the baseline; judged false, they come back; nothing is lost on the way."""
    state = fired()[0]
    seen, onset = state[pooled_histogram.BASE].copy(), TAIL.moved(state).onset_us
    TAIL.alarmed(state, page=True)
    assert TAIL.content(state).n_groups <= READY_RAREST + onset
    after = last(TAIL.run(state[None], given(np.random.default_rng(4), STRETCHED, 1, 2000)))[0]
    np.testing.assert_array_equal(after[pooled_histogram.BASE], state[pooled_histogram.BASE])
    assert after[pooled_histogram.ASIDE][0] == STEPS
    TAIL.arm(after, mass=3000.0, at_us=3000)
    assert TAIL.learned(after) <= READY_RAREST + onset
    assert after[pooled_histogram.BASE][0] + after[pooled_histogram.ASIDE][0] == seen[0] + STEPS
    TAIL.keep(after)
    assert TAIL.learned(after) == seen[0] + STEPS
    TAIL.keep(after)
    assert TAIL.learned(after) == seen[0] + STEPS


def test_kept_while_it_lasts_an_alert_takes_nothing_out_of_the_baseline() -> None:
    """`keep`, then the end of the alert: everything was learned."""
    state = fired()[0]
    TAIL.alarmed(state, page=True)
    state = last(TAIL.run(state[None], given(np.random.default_rng(4), STRETCHED, 1, 2000)))[0]
    n = state[header.N_TOTAL] + READY_RAREST
    TAIL.keep(state)
    TAIL.arm(state, mass=3000.0, at_us=3000)
    assert TAIL.learned(state) == n


def test_a_daily_snapshot_from_before_the_onset_is_preferred() -> None:
    """Two snapshots a day apart are kept; the newest that is older than the onset is what is gone back to."""
    state = one()[0]
    for day in (1, 2, 3):
        state[pooled_histogram.BASE][0] += 1
        state[pooled_histogram.BASE][5] += 1
        TAIL.tend(state, mass=0.0, at_us=day * DAY_US)
        TAIL.tend(state, mass=0.0, at_us=day * DAY_US + 1)
    assert [state[part][1] for part in (pooled_histogram.OLDER, pooled_histogram.NEWER)] == [
        2 * DAY_US,
        3 * DAY_US,
    ]
    state[pooled_histogram.FLOOR] = state[pooled_histogram.BASE]
    state[pooled_histogram.FLOOR][1] = 2.5 * DAY_US
    TAIL.alarmed(state, page=False)
    assert TAIL.content(state).n_groups == READY_RAREST + 2


def test_a_signal_whose_tail_has_not_moved_does_not_block_a_recovery() -> None:
    """When another signal of its slice alarms, recovery is not asked for here."""
    state = one()[0]
    state = last(TAIL.run(state[None], given(np.random.default_rng(5), HEALTHY, 1, 0)))[0]
    TAIL.alarmed(state, page=True)
    path = TAIL.run(state[None], given(np.random.default_rng(6), HEALTHY, 1, STEPS))
    assert np.isinf(path.recovery).all()
    assert (path.page == 0).all()


def test_a_successor_starts_from_the_baseline_of_its_predecessor() -> None:
    """Live at once, with the same bounds, that from before the onset while the other alerts; a learner hands on nothing."""
    state = fired()[0]
    TAIL.alarmed(state, page=True)
    heir = TAIL.inherit(state, mass=7.0, at_us=9)
    assert TAIL.live(heir)
    assert TAIL.content(heir) == TAIL.content(state)
    assert TAIL.evidence(heir) == 0.0
    assert heir[header.MASS] == 7.0
    blank = TAIL.fresh(tau=0.1, scale=1.0, mass=0.0, at_us=0)
    assert not TAIL.live(TAIL.inherit(blank, mass=0.0, at_us=0))


def test_a_frozen_baseline_learns_no_more_and_goes_on_alarming() -> None:
    """Its groups are set aside for ever, also after an alert, and evidence comes from the frozen bets alone."""
    rng, state = np.random.default_rng(7), one()[0]
    TAIL.freeze(state)
    known = TAIL.content(state)
    assert known.fixed
    states = state[None]
    for first in range(0, 32 * STEPS, STEPS):
        doubled = tail_bin(2 * HEALTHY.draw(rng, (STEPS, 1)))
        path = TAIL.run(states, block(observed(doubled), first=first))
        states = last(path)
        assert (states[:, pooled_histogram.PAGE][:, : pooled_histogram.N_LEARNED] == 0).all()
    assert path.page.max() > 1e6
    TAIL.alarmed(states[0], page=True)
    states = last(TAIL.run(states, given(rng, STRETCHED, 1, 32 * STEPS)))
    TAIL.arm(states[0], mass=1e5, at_us=10**5)
    assert TAIL.content(states[0]) == known
    with pytest.raises(OperatorError, match="frozen"):
        TAIL.freeze(TAIL.fresh(tau=0.0, scale=1.0, mass=0.0, at_us=0))


def test_an_infinite_divergence_keeps_the_state_finite_and_fires() -> None:
    """Block after block of infinities, at the largest capital a page can have: no value becomes infinite or nan."""
    rng = np.random.default_rng(8)
    infinite = observed(np.full((STEPS, 1), tail_bin(np.inf)))
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        state = one()[0]
        path = TAIL.run(state[None], block(infinite))
        assert path.page.max() > 1e9
        assert np.isfinite(last(path)).all()
        TAIL.alarmed(state, page=False)
        states = state[None]
        for first in range(STEPS, 20 * STEPS, STEPS):
            path = TAIL.run(states, block(infinite, first=first))
            states = path.stopped(np.minimum((path.page >= 1e9).argmax(axis=0), STEPS - 1))
            assert np.isfinite(states).all()
            if (path.page >= 1e9).any():
                TAIL.alarmed(states[0], page=True)
        assert np.isfinite(path.recovery).all()
        assert (path.recovery < RESOLVED).all()
        assert np.isfinite(last(TAIL.run(states, given(rng, HEALTHY, 1, 999)))).all()


def test_what_is_shown_is_p99_of_the_recent_window() -> None:
    """None while there is too little of it; then an estimate within its band; while alerting, since the alarm."""
    rng, state = np.random.default_rng(9), one()[0]
    assert TAIL.recent(state) is None
    states = state[None]
    for first in range(0, 64 * STEPS, STEPS):
        states = last(TAIL.run(states, given(rng, HEALTHY, 1, first)))
    shown = TAIL.recent(states[0])
    assert shown is not None
    assert shown.low <= 0.1024 <= shown.high
    assert shown.n == 64 * STEPS
    beyond = TAIL.shown(states[0], 0.99, shortfall=True)
    assert beyond is not None
    assert beyond.mean > shown.mean
    TAIL.alarmed(states[0], page=True)
    assert TAIL.since_change(states[0]) is None


def test_pooled_siblings_make_one_baseline() -> None:
    """Counts add up, bounds are made anew, the greater tolerance holds; nothing to pool is refused by name."""
    rng = np.random.default_rng(10)
    parts = [TAIL.content(state) for state in learned(rng, 3, pooled_histogram.READY, tau=0.1)]
    pooled = pooled_histogram.pool(parts)
    assert pooled.n_groups == 3 * pooled_histogram.READY
    assert not pooled.bound
    assert TAIL.live(TAIL.from_content(pooled, scale=1.0, mass=0.0, at_us=0))
    with pytest.raises(OperatorError, match="pool"):
        pooled_histogram.pool([])


@pytest.mark.parametrize(
    "change",
    [
        {"counts": (1.0,) * 3},
        {"n_groups": 7},
        {"tau": -0.1},
        {"delta": 0.0},
        {"bound": (0.5,)},
    ],
)
def test_a_damaged_baseline_is_refused_by_name(change: dict[str, object]) -> None:
    """It would break the bound."""
    known = baseline(np.ones(N_BINS), tau=0.0)
    fields = {name: getattr(known, name) for name in known.__struct_fields__} | change
    with pytest.raises(OperatorError, match="baseline"):
        type(known)(**fields)
