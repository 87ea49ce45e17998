"""The life of a change signal: learning, going live, alerts, going back, handing on, and its binary form."""

import numpy as np
import pytest

from quantdrift.core.errors import OperatorError
from quantdrift.drift.detectors.change import baseline_state, bets, run
from quantdrift.drift.detectors.change.baseline import READY_EVENTS, READY_GROUPS, Baseline
from quantdrift.drift.evidence.clock import DAY_US
from quantdrift.drift.evidence.header import ALERTING, LAST_AT, N_TOTAL, PAGE_MASS, PAGING, TICKET_MASS, M
from quantdrift.drift.evidence.margin import N_BINS
from quantdrift.drift.evidence.observations import STEPS, FloatArray
from quantdrift.drift.evidence.state import dump_state, load_state
from quantdrift.drift.watch import Groups, Phase, Series, SignalKey, SliceWatch, Thresholds, advance
from tests.support.monitor.change_streams import CHANGE, SURE, baseline, baseline_of, block, observed

pytestmark = pytest.mark.unit

EACH_US = 60_000_000


def live(n: int = 6000, events: float = 60.0, *, tau: float = 0.25) -> FloatArray:
    """Return a signal whose baseline is ready."""
    return CHANGE.from_content(baseline(n, events, tau=tau), scale=2.0, mass=0.0, at_us=0)


def feed(state: FloatArray, x: list[float], *, first: int = 0, bins: list[int] | None = None) -> FloatArray:
    """Return the state after groups of one item each, a minute apart and of mass 1e-6, tended after each block."""
    for begin in range(0, len(x), STEPS):
        part = slice(begin, begin + STEPS)
        given = observed(np.array(x[part])[:, None], np.array(bins[part])[:, None] if bins else SURE)
        path = CHANGE.run(state[None], block(given, first=first + begin, gamma=1e-6, second_us=EACH_US))
        state = path.stopped(np.array([len(given) - 1]))[0]
        CHANGE.tend(state, mass=(first + begin + len(given)) * 1e-6, at_us=int(state[LAST_AT]))
    return state


def sums(state: FloatArray, row: int = baseline_state.LIVE) -> tuple[float, float]:
    """Return number and events of the groups in a row of its memory."""
    found = baseline_state.rows_of(state)[row]
    return float(found[baseline_state.GROUPS]), float(found[baseline_state.TOTAL].sum())


def weights_of(n_strata: int, stage: float) -> FloatArray:
    """Return the weights of a signal with so many testing strata at a stage."""
    state = live()
    state[baseline_state.CUTS] = N_BINS
    state[baseline_state.CUTS.start : baseline_state.CUTS.start + n_strata - 1] = range(1, n_strata)
    state[baseline_state.STAGE] = stage
    found: FloatArray = bets.weights(state[None])[0]
    return found


@pytest.mark.parametrize("n_strata", range(1, 6))
def test_the_capital_is_one_and_a_stratum_costs_the_same_whatever_their_number(n_strata: int) -> None:
    """More than one would break the bound. Half for single strata where there is but one would double the common bets."""
    n_common = len(bets.COMMON)
    living = weights_of(n_strata, baseline_state.LIVING).reshape(2, bets.HALF)
    assert living.sum() == pytest.approx(1.0, abs=1e-12)
    assert living.sum(axis=1) == pytest.approx([2 / 3, 1 / 3])
    single = living[:, n_common:].reshape(2, -1, len(bets.SINGLE)).sum(axis=2) / living.sum(axis=1)[:, None]
    assert single[:, :n_strata] == pytest.approx(0.1)
    assert not single[:, n_strata:].any()
    fixed = weights_of(n_strata, baseline_state.FIXED).reshape(2, bets.HALF)
    assert fixed.sum(axis=1) == pytest.approx([0.0, 1.0])
    assert not weights_of(n_strata, baseline_state.LEARNING).any()


def test_it_is_silent_until_it_has_5000_groups_and_50_events() -> None:
    """No evidence and no allowance while it learns; `missing` says what is lacking at the rate so far."""
    state = CHANGE.fresh(scale=1.0, mass=0.0, at_us=0)
    assert not CHANGE.live(state)
    assert CHANGE.missing(state) >= READY_GROUPS
    x = [float(step % 50 == 0) for step in range(4992)]
    state = feed(state, x)
    assert CHANGE.evidence(state) == CHANGE.page_mass(state) == 0.0
    assert 0 < CHANGE.missing(state) <= 8
    state = feed(state, [0.0] * STEPS, first=4992)
    assert CHANGE.live(state)
    assert CHANGE.missing(state) == 0
    assert CHANGE.learned(state) == 5024
    assert state[PAGING] == 1.0
    assert state[M] == pytest.approx(1.25 * 100 / 5024)


def test_rare_events_are_waited_for_and_fractions_count_as_fractions() -> None:
    """6,000 groups with values that sum to 30 are not ready; another 4,000 of the like would be."""
    state = feed(CHANGE.fresh(scale=1.0, mass=0.0, at_us=0), [0.005] * 6016)
    assert not CHANGE.live(state)
    assert CHANGE.content(state).n_events == pytest.approx(30.08)
    assert 3000 < CHANGE.missing(state) < 4500
    assert Baseline(share=(0.0,) * N_BINS, total=(0.0,) * N_BINS, n_groups=10**4).missing > 10**5
    assert READY_EVENTS == 50


def test_margins_are_merged_at_their_quantiles_when_it_goes_live() -> None:
    """Bins with 1, 2, 7, 20 and 70 % of the items become five strata; with all items in one bin there is one."""
    rng = np.random.default_rng(51)
    bins = list(rng.choice([0, 2, 5, 9, SURE], 5120, p=[0.012, 0.025, 0.08, 0.22, 0.663]))
    x = [float(step % 40 == 0) for step in range(5120)]
    state = feed(CHANGE.fresh(scale=1.0, mass=0.0, at_us=0), x, bins=[int(one) for one in bins])
    found = CHANGE.content(state)
    assert found.cuts == (1, 3, 6, 10)
    assert len(found.bounds) == 5
    assert (found.strata[:, 1] / found.strata[:, 0] < found.bounds).all()
    assert CHANGE.content(live()).cuts == ()


def test_learning_goes_on_while_live_and_pauses_while_alerting() -> None:
    """What comes while an alert lasts is set aside, not learned."""
    state = feed(live(), [0.0] * 64)
    assert sums(state) == (6064, 60)
    CHANGE.alarmed(state, page=True)
    assert state[PAGING] == state[PAGE_MASS] == state[TICKET_MASS] == 0.0
    state = feed(state, [1.0] * 64, first=64)
    assert sums(state) == (6064, 60)
    assert sums(state, baseline_state.ASIDE) == (64, 64)
    assert state[N_TOTAL] == 128


def drifted() -> tuple[FloatArray, float]:
    """Return a signal that was calm for five days, then drifted for some hours; and the events it had before."""
    day = DAY_US // EACH_US
    state = feed(live(), [float(step % 100 == 0) for step in range(5 * day)])
    before = sums(state)[1]
    return feed(state, [float(step % 5 == 0) for step in range(320)], first=5 * day), before


def test_after_an_alert_it_goes_back_to_the_day_before_the_onset() -> None:
    """What was learned between the onset and the alarm is taken out, and set aside with what came later."""
    state, before = drifted()
    found = CHANGE.moved(state)
    onset_day = DAY_US // EACH_US * 5
    assert abs(found.onset_us / EACH_US - onset_day) < 120
    assert found.before == pytest.approx(2.0 * 0.01, rel=0.1)
    assert found.after == pytest.approx(2.0 * 0.2, rel=0.3)
    whole = sums(state)
    CHANGE.alarmed(state, page=True)
    state = feed(state, [1.0] * STEPS, first=onset_day + 320)
    CHANGE.arm(state, mass=1.0, at_us=int(state[LAST_AT]))
    assert before - 20 < sums(state)[1] <= before
    assert sums(state)[0] + sums(state, baseline_state.ASIDE)[0] == whole[0] + STEPS
    assert state[ALERTING] == 0.0
    assert state[PAGING] == 1.0
    assert CHANGE.evidence(state) == 0.0


@pytest.mark.parametrize("while_alerting", [True, False])
def test_an_alarm_judged_false_takes_everything_back_in(*, while_alerting: bool) -> None:
    """Nothing is lost, whether it is judged while the alert lasts or when it is over."""
    state, _ = drifted()
    whole = sums(state)
    CHANGE.alarmed(state, page=True)
    first = DAY_US // EACH_US * 5 + 320
    state = feed(state, [1.0] * STEPS, first=first)
    if while_alerting:
        CHANGE.keep(state)
        state = feed(state, [1.0] * STEPS, first=first + STEPS)
    CHANGE.arm(state, mass=1.0, at_us=int(state[LAST_AT]))
    if not while_alerting:
        CHANGE.keep(state)
    more = 2 * STEPS if while_alerting else STEPS
    assert sums(state) == pytest.approx((whole[0] + more, whole[1] + more))
    assert sums(state, baseline_state.ASIDE) == (0, 0)
    assert state[baseline_state.ONSET_AT] == baseline_state.NO_ONSET


def test_an_onset_older_than_every_day_kept_goes_back_to_the_first_baseline() -> None:
    """A drift that took longer than three days to be found leaves the baseline that it went live with."""
    state, _ = drifted()
    CHANGE.alarmed(state, page=False)
    state[baseline_state.ONSET_AT] = 1.0
    CHANGE.arm(state, mass=1.0, at_us=int(state[LAST_AT]))
    assert sums(state) == (6000, 60)
    assert (
        baseline_state.rows_of(state)[baseline_state.DAYS, baseline_state.AT] == baseline_state.EMPTY
    ).all()


def test_at_most_one_snapshot_is_kept_a_day_and_none_of_silent_days() -> None:
    """Three days are kept; a week without traffic does not push them out."""
    state, _ = drifted()
    days = baseline_state.rows_of(state)[baseline_state.DAYS].copy()
    assert (np.diff(np.sort(days[:, baseline_state.AT])) >= DAY_US).all()
    for day in range(1, 8):
        CHANGE.tend(state, mass=1.0, at_us=int(state[LAST_AT]) + day * DAY_US)
    after = baseline_state.rows_of(state)[baseline_state.DAYS]
    assert sum(row.tobytes() in {one.tobytes() for one in days} for row in after) >= 2


def test_a_successor_starts_live_on_its_predecessors_baseline() -> None:
    """Same strata, bounds and sums, none of its evidence; of one that alerts, the baseline before the onset."""
    state, before = drifted()
    heir = CHANGE.inherit(state, mass=1.0, at_us=5)
    assert CHANGE.live(heir)
    assert CHANGE.content(heir).bounds == CHANGE.content(state).bounds
    assert sums(heir) == sums(state)
    assert CHANGE.evidence(heir) == heir[N_TOTAL] == 0.0
    CHANGE.alarmed(state, page=True)
    assert sums(CHANGE.inherit(state, mass=1.0, at_us=5))[1] <= before
    assert sums(state)[1] > before
    young = CHANGE.inherit(CHANGE.fresh(scale=3.0, mass=0.0, at_us=0, tau=0.1), mass=1.0, at_us=5)
    assert not CHANGE.live(young)
    assert CHANGE.content(young).tau == 0.1


def test_a_frozen_baseline_is_learned_into_no_more() -> None:
    """Only the frozen half is left, with all the weight; one that still learns cannot be frozen."""
    state = feed(live(), [1.0] * 3)
    CHANGE.freeze(state)
    assert CHANGE.evidence(state) == CHANGE.page_mass(state) == 0.0
    frozen = sums(state)
    state = feed(state, [1.0] * 64, first=3)
    assert sums(state) == frozen
    assert (state[run.PAGE][: run.FOLLOWED] > 0).any()
    assert CHANGE.evidence(state) > 1e6
    found = CHANGE.moved(state)
    assert found.before == pytest.approx(2.0 * 63 / 6003)
    assert found.after == 2.0
    CHANGE.alarmed(state, page=True)
    CHANGE.keep(state)
    CHANGE.arm(state, mass=1.0, at_us=int(state[LAST_AT]))
    assert sums(state) == frozen
    with pytest.raises(OperatorError, match="groups are missing"):
        CHANGE.freeze(CHANGE.fresh(scale=1.0, mass=0.0, at_us=0))


def test_a_recorded_baseline_comes_back_as_it_was() -> None:
    """Through its record, live, frozen or still learning; and one made from stored groups is the one that was learned."""
    frozen = live()
    CHANGE.freeze(frozen)
    learning = feed(CHANGE.fresh(scale=1.0, mass=0.0, at_us=0), [1.0] * 40)
    for state in (feed(live(), [1.0] * 40), frozen, learning):
        content = CHANGE.content(state)
        assert CHANGE.content(CHANGE.from_content(content, scale=1.0, mass=3.0, at_us=9)) == content
    x = np.array([float(step % 50 == 0) for step in range(5024)])
    learned = feed(CHANGE.fresh(scale=1.0, mass=0.0, at_us=0), list(x))
    content = CHANGE.content(learned)
    stored = baseline_of(observed(x[:, None])[:, 0], since_us=content.since_us, until_us=content.until_us)
    assert stored == content
    with pytest.raises(ValueError, match="margin bins"):
        CHANGE.from_content(Baseline(share=(1.0,), total=(0.0,), n_groups=1), scale=1.0, mass=0.0, at_us=0)


def test_only_signals_that_alert_block_a_recovery() -> None:
    """A signal that learns, or went live during the alert, does not keep its slice from resolving."""
    quiet, learning, alerting = live(), CHANGE.fresh(scale=1.0, mass=0.0, at_us=0), live()
    CHANGE.alarmed(learning, page=True)
    CHANGE.alarmed(alerting, page=True)
    path = CHANGE.run(np.stack((quiet, learning, alerting)), block(observed(np.zeros((4, 3)))))
    assert np.isinf(path.recovery[:, :2]).all()
    assert np.isfinite(path.recovery[:, 2]).all()
    assert (path.page[:, 1] == 0).all()


def test_what_is_not_seen_is_not_looked_at() -> None:
    """Where `seen` is False the values may be anything."""
    one = block(observed(np.zeros((3, 1))))
    one.x[1], one.seen[1] = np.nan, False
    state = CHANGE.run(live()[None], one).stopped(np.array([2]))[0]
    assert np.isfinite(state).all()
    assert sums(state) == (6002, 60)


@pytest.mark.parametrize("value", [1.5, -0.1, float("nan")])
def test_what_is_no_group_is_refused(value: float) -> None:
    """A value outside [0, 1] would break the bound, and so would shares above 1 in sum."""
    with pytest.raises(ValueError, match="breaks the bound"):
        CHANGE.run(live()[None], block(observed(np.full((1, 1), value))))
    twice = observed(np.zeros((1, 1)))
    twice[0, 0, 0] = 1.0
    with pytest.raises(ValueError, match="breaks the bound"):
        CHANGE.run(live()[None], block(twice))


@pytest.mark.parametrize(("tau", "delta"), [(-0.1, 1e-5), (0.25, 0.0), (0.25, 1.0)])
def test_a_tolerance_or_level_that_means_nothing_is_refused(tau: float, delta: float) -> None:
    """By name, when the signal is made."""
    with pytest.raises(ValueError, match="level"):
        CHANGE.fresh(scale=1.0, mass=0.0, at_us=0, tau=tau, delta=delta)


def test_the_windows_show_the_mean_in_the_metrics_unit() -> None:
    """The recent window and the one since the last change of verdict."""
    state = feed(live(), [float(step % 4 == 0) for step in range(1024)])
    since = CHANGE.since_change(state)
    assert since is not None
    assert since.mean == pytest.approx(0.5)
    state = feed(state, [0.0] * 1024, first=1024)
    recent = CHANGE.recent(state)
    assert recent is not None
    assert recent.low <= recent.mean <= recent.high
    CHANGE.alarmed(state, page=False)
    assert CHANGE.since_change(state) is None


def test_a_slice_fires_resolves_and_is_watched_again_on_the_old_baseline() -> None:
    """Through a watch: one alarm while flips last, an end when they stop, and no trace of them in the baseline."""
    key = SignalKey("flip", CHANGE.kind)
    watch = SliceWatch()
    watch.add(key, live())
    thresholds = Thresholds(page=10.0, ticket=1.0)
    phases = []
    first = 0
    for n, every in ((4000, 100), (2000, 5), (3000, 10**6)):
        for begin in range(0, n, 200):
            x = [float(step % every == every - 1) for step in range(begin, begin + 200)]
            steps = np.arange(first + 1, first + 201, dtype=np.float64)
            series = Series(x=observed(np.array(x)[:, None])[:, 0], seen=np.ones(200, dtype=bool))
            groups = Groups(order=steps, mass=steps * 1e-8, at_us=steps * EACH_US, series={key: series})
            phases += [change.after for change in advance([watch], [groups], thresholds)]
            first += 200
            CHANGE.tend(watch.states[key], mass=first * 1e-8, at_us=first * EACH_US)
    assert phases == [Phase.WARNING, Phase.FIRING, Phase.WATCHING]
    n_groups, events = sums(watch.states[key])
    assert 60 < events <= 60 + 40
    assert n_groups > 6000


def test_a_stored_state_goes_on_bit_for_bit() -> None:
    """Dumped and loaded at a block boundary it gives the same bits, and it fits into 4 kB."""
    kept, stored = live(), live()
    rng = np.random.default_rng(52)
    for first in range(0, 320, 16):
        x = list((rng.random(16) < 0.05).astype(float))
        kept, stored = feed(kept, x, first=first), feed(stored, x, first=first)
        blob = dump_state(CHANGE.kind, stored)
        assert len(blob) <= 4096
        stored = load_state(CHANGE.kind, blob, CHANGE.size)
    assert kept.tobytes() == stored.tobytes()
