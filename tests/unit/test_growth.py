"""The learned baseline of the latency: when it is complete, what it allows, and what a change of that does."""

import numpy as np
import pytest

from quantdrift.core.errors import OperatorError
from quantdrift.core.signals import SLOW_SHARE
from quantdrift.drift.detectors.growth import EDGES, READY, WEEK_US, LatencyBaseline
from quantdrift.drift.detectors.protocol import GROWTH
from quantdrift.drift.evidence.clock import DAY_US
from quantdrift.drift.evidence.group import N_TIME_BINS, Items, Members, group_means, group_times
from quantdrift.drift.evidence.header import ALERTING, PAGING, TICKETING
from quantdrift.drift.evidence.observations import FloatArray, GroupSequence
from tests.support.monitor.detectors import times

pytestmark = pytest.mark.unit

N = 5000


def blank(growth: float = 2.0) -> FloatArray:
    """Return a signal that has learned nothing."""
    return GROWTH.fresh(tau=growth - 1.0, scale=1.0, mass=0.0, at_us=0)


def given(
    state: FloatArray, latency_s: FloatArray, *, first_us: int, last_us: int, weight: float = 1.0
) -> float:
    """Let a signal see exchanges, evenly in time, in place; return its evidence."""
    n = len(latency_s)
    x = times(latency_s[:, None])[:, 0]
    x[:, 1:] *= weight
    at_us = np.floor(np.linspace(first_us, last_us, n))
    groups = GroupSequence(
        ends=np.array([n]),
        x=x,
        seen=np.ones(n, dtype=np.bool_),
        mass=at_us * 1e-15,
        at_us=at_us,
        captured_us=at_us,
    )
    course = GROWTH.follow(state[None], groups).course
    GROWTH.tend(state, mass=float(at_us[-1] * 1e-15), at_us=int(at_us[-1]))
    return float(course[0, -1])


def learned(growth: float = 2.0) -> FloatArray:
    """Return a signal that has learned a week of times: 0.8 % took 0.3 s, and all others 0.1 s."""
    state = blank(growth)
    given(state, np.where(np.arange(N) % 125, 0.1, 0.3), first_us=1, last_us=WEEK_US + 1)
    assert GROWTH.live(state)
    return state


def test_it_learns_for_a_week_from_exchanges_enough_for_the_bound() -> None:
    """Neither many exchanges of a day are enough, nor few of a week; what lacks is told at the rate so far."""
    rng = np.random.default_rng(1)
    many, few = blank(), blank()
    given(many, rng.exponential(0.05, N), first_us=1, last_us=DAY_US + 1)
    assert not GROWTH.live(many)
    assert GROWTH.missing(many) == pytest.approx(6 * N, rel=0.01)
    given(few, rng.exponential(0.05, 500), first_us=1, last_us=2 * WEEK_US)
    assert not GROWTH.live(few)
    assert GROWTH.missing(few) == READY - 500
    given(many, rng.exponential(0.05, N), first_us=2 * DAY_US, last_us=WEEK_US + 2)
    assert GROWTH.live(many)
    assert GROWTH.missing(many) == 0
    assert GROWTH.learned(many) == 2 * N


def test_bins_of_exchanges_and_sessions_say_the_same_as_their_share_above_an_edge() -> None:
    """Of groups of up to five items, some without a time: the weight in all bins is v, and that from one bin on is vx."""
    rng = np.random.default_rng(3)
    n = 4000
    pi1, u1, u2 = rng.choice([0.2, 0.5], n), rng.random(n), 0.5 * rng.random(n)
    nothing = np.zeros(n)
    items = Items(nothing, nothing, 0.5 * pi1, pi1, u1, u2, nothing.astype(np.intp), nothing.astype(np.intp))
    ends = np.unique(np.append(np.cumsum(rng.integers(1, 6, n)).clip(max=n), n))
    groups = len(ends)
    members = Members(
        np.arange(n),
        ends,
        np.full(groups, 0.1),
        rng.random(groups) < 0.5,
        np.full(groups, 0.5),
        np.full(groups, 0.1),
        np.zeros(n, dtype=np.bool_),
    )
    bins = np.where(rng.random(n) < 0.1, -1, rng.integers(0, N_TIME_BINS, n))
    found = group_times(bins, items, members)
    shares = group_means(np.where(bins < 0, np.nan, bins >= 40), items, members)
    assert (found.seen == shares.seen).all()
    assert not (found.refused | shares.refused).any()
    assert 0.8 < found.seen.mean() < 1
    np.testing.assert_allclose(found.x[:, 1:].sum(axis=1), shares.x[:, 1], atol=1e-12)
    np.testing.assert_allclose(found.x[:, 41:].sum(axis=1), shares.x[:, 0], atol=1e-12)
    np.testing.assert_array_equal(found.x[:, 0], shares.x[:, 2])
    heavy = members._replace(smallest=np.full(groups, 0.3), least=np.full(groups, 0.3))
    assert (
        group_times(bins, items, heavy).refused
        == group_means(np.where(bins < 0, np.nan, 0.0), items, heavy).refused
    ).all()


def test_weights_count_for_what_they_are() -> None:
    """Of exchanges that weigh a fifth, five times as many are needed."""
    state = blank()
    given(state, np.full(N, 0.1), first_us=1, last_us=2 * WEEK_US, weight=0.2)
    assert GROWTH.missing(state) == 5 * READY - N


def test_what_is_learned_lies_above_the_quantile_by_the_bound_and_not_by_more() -> None:
    """Of 5,000 exchanges 0.71 % may lie above it: an edge with 0.8 % is not shown to have less than 1 %, and the next one is."""
    state = learned()
    content = GROWTH.content(state)
    assert content.learned_s == EDGES[np.searchsorted(EDGES, 0.3, side="right")]
    assert GROWTH.limit_s(state) == pytest.approx(2.0 * content.learned_s)
    assert GROWTH.limit_s(learned(1.0)) == content.learned_s
    assert GROWTH.limit_s(learned(1.5)) == pytest.approx(
        2**0.75 * content.learned_s
    )  # whole steps, rounded up


def test_evidence_grows_only_above_growth_times_what_was_learned() -> None:
    """Exchanges that take 1.9 times as long are none, and a fiftieth that take three times as long are."""
    state = learned()
    limit_s = GROWTH.limit_s(state)
    assert limit_s is not None
    week = 2 * WEEK_US
    near = np.where(np.arange(N) % 50, 0.1, 0.95 * limit_s)
    assert given(state, near, first_us=WEEK_US + 2, last_us=week) < 1.0
    recent = GROWTH.recent(state)
    assert recent is not None
    assert recent.mean == 0.0
    assert (
        given(state, np.where(near > 0.1, 1.5 * limit_s, 0.1), first_us=week + 1, last_us=week + DAY_US)
        > 100.0
    )
    moved = GROWTH.moved(state)
    assert moved.after == pytest.approx(2 * SLOW_SHARE, rel=0.1)
    assert week <= moved.onset_us < week + DAY_US


def test_nothing_goes_live_while_another_signal_of_its_slice_alerts() -> None:
    """It would have to recover from a breach that it never saw; it goes on learning, and goes live afterwards."""
    state = blank()
    GROWTH.alarmed(state, page=False)
    given(state, np.full(N, 0.1), first_us=1, last_us=2 * WEEK_US)
    assert not GROWTH.live(state)
    GROWTH.arm(state, mass=1.0, at_us=2 * WEEK_US)
    GROWTH.tend(state, mass=1.0, at_us=2 * WEEK_US)
    assert GROWTH.live(state)


@pytest.mark.parametrize("page", [False, True])
def test_another_growth_is_another_null_and_an_open_alert_waits_for_it(*, page: bool) -> None:
    """Its evidence begins anew, also that of the recovery; the same growth changes nothing."""
    state = learned()
    limit_s = GROWTH.limit_s(state)
    assert limit_s is not None
    given(state, np.full(100, 2.0 * limit_s), first_us=WEEK_US + 2, last_us=WEEK_US + DAY_US)
    assert not GROWTH.retune(state, 2.0)
    assert GROWTH.evidence(state) > 0
    GROWTH.alarmed(state, page=page)
    assert GROWTH.retune(state, 4.0)
    assert GROWTH.limit_s(state) == pytest.approx(2.0 * limit_s)
    assert GROWTH.evidence(state) == 0
    assert GROWTH.recent(state) is None
    assert (state[ALERTING], state[TICKETING], state[PAGING]) == (1, 0, not page)
    young = blank()
    assert GROWTH.retune(young, 3.0)
    assert not GROWTH.live(young)


def test_a_person_may_end_the_week_early_and_not_the_number_of_exchanges() -> None:
    """`quantdrift baseline accept` chooses the time; the bound needs its exchanges all the same."""
    state = blank()
    given(state, np.full(N, 0.1), first_us=1, last_us=DAY_US)
    assert GROWTH.enough(state)
    GROWTH.freeze(state)
    assert GROWTH.live(state)
    few = blank()
    given(few, np.full(500, 0.1), first_us=1, last_us=2 * WEEK_US)
    assert not GROWTH.enough(few)
    with pytest.raises(OperatorError, match="1500 groups are missing"):
        GROWTH.freeze(few)


def test_a_record_that_cannot_be_one_is_refused() -> None:
    """Too few bins, or a growth that would forbid what was learned."""
    whole = GROWTH.content(blank())
    for wrong in (
        LatencyBaseline(counts=whole.counts[1:], n_groups=0, growth=2.0),
        LatencyBaseline(counts=whole.counts, n_groups=0, growth=0.5),
    ):
        with pytest.raises(ValueError, match="growth of at least 1"):
            GROWTH.from_content(wrong, scale=1.0, mass=0.0, at_us=0)
