"""The shadow's lag lowers the rates before the stream is full."""

import itertools
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quantdrift.core.stream.backlog import Backlog
from quantdrift.monitor.sampling.lag import FEW, LOOK_S, LOW, MOST_STEPS, Lag, LagLimits, advance, lag_of

pytestmark = pytest.mark.property

Rule = Callable[[Lag, Backlog, LagLimits, float], Lag]


class Run(msgspec.Struct):
    """What became of a simulated stream."""

    fullest: float = 0.0  # of max_bytes
    longest_wait: float = 0.0  # of max_age_s
    factors: list[float] = []


class Shadow(msgspec.Struct, frozen=True, kw_only=True):
    """Speeds, in exchanges per second; the full rate is 1."""

    pace: float
    max_age_s: float
    fill_s: float  # how long the full rate takes to fill the stream


def simulate(shadow: Shadow, rule: Rule, *, hours: float = 3.0, fast_after_s: float = float("inf")) -> Run:
    """Run a stream of fluid exchanges, first in, first out, against a shadow that keeps its pace.

    Sidecars follow a new factor a third of a look after it was made.
    """
    found, lag = Run(), Lag()
    limits = LagLimits(max_bytes=shadow.fill_s, max_age_s=shadow.max_age_s)
    waiting, ever, factor, at_s = 0.0, 0.0, 1.0, 0.0
    arrivals = [(0.0, 0.0)]  # time, and how many had come by then
    head = 0
    while at_s < hours * 3600:
        pace = shadow.pace if at_s < fast_after_s else 10.0
        for part_s, rate in ((LOOK_S / 3, factor), (LOOK_S * 2 / 3, lag.factor)):
            waiting = max(0.0, waiting + part_s * (rate - pace))
            ever += part_s * rate
            at_s += part_s
            found.fullest = max(found.fullest, waiting / limits.max_bytes)
            arrivals.append((at_s, ever))
        factor = lag.factor
        while head + 1 < len(arrivals) and arrivals[head + 1][1] <= ever - waiting:
            head += 1
        oldest_s = at_s - arrivals[head][0] if waiting >= 1 else 0.0
        found.longest_wait = max(found.longest_wait, oldest_s / limits.max_age_s)
        seen = Backlog(n_messages=int(waiting), n_bytes=int(waiting), n_ever=int(ever), oldest_s=oldest_s)
        lag = rule(lag, seen, limits, at_s)
        found.factors.append(lag.factor)
    return found


@st.composite
def slow_shadows(draw: st.DrawFn) -> Shadow:
    """Draw a shadow that the assumptions of the rule allow, from very slow to fast enough."""
    max_age_s = draw(st.floats(900, 14_400))
    pace = draw(st.floats(10 * LOOK_S / max_age_s, 1.5))
    return Shadow(pace=pace, max_age_s=max_age_s, fill_s=draw(st.floats(300, 20_000)))


@given(slow_shadows())
@example(Shadow(pace=0.042, max_age_s=3600.0, fill_s=300.0))
@example(Shadow(pace=0.99, max_age_s=900.0, fill_s=20_000.0))
def test_a_slow_shadow_never_fills_the_stream(shadow: Shadow) -> None:
    """Neither by bytes nor by age is anything lost, at any pace."""
    run = simulate(shadow, advance)
    assert run.fullest < 0.95
    assert run.longest_wait < 0.95


@pytest.mark.slow
@given(st.floats(300, 20_000), st.floats(900, 14_400))
def test_without_a_shadow_the_bytes_still_suffice(fill_s: float, max_age_s: float) -> None:
    """Nothing is ever done: what waits grows old, but the stream is not full within three hours."""
    assert simulate(Shadow(pace=0.0, max_age_s=max_age_s, fill_s=fill_s), advance).fullest < 0.95


@pytest.mark.parametrize("wrong", ["never", "late", "one step ever"])
def test_rules_that_are_wrong_fill_it(wrong: str) -> None:
    """The simulation tells a rule that works from ones that do not."""

    def mutant(lag: Lag, backlog: Backlog, limits: LagLimits, at_s: float) -> Lag:
        if wrong == "late":
            limits = msgspec.structs.replace(
                limits, max_bytes=3 * limits.max_bytes, max_age_s=3 * limits.max_age_s
            )
        after = advance(lag, backlog, limits, at_s)
        most = {"never": 0, "late": MOST_STEPS, "one step ever": 1}[wrong]
        return msgspec.structs.replace(after, steps=min(after.steps, most))

    run = simulate(Shadow(pace=0.1, max_age_s=1800.0, fill_s=600.0), mutant)
    assert max(run.fullest, run.longest_wait) > 1.0


@given(slow_shadows())
def test_the_full_rate_comes_back_slowly(shadow: Shadow) -> None:
    """Once the shadow is fast the factor only rises, one step in five minutes at most, up to 1."""
    run = simulate(shadow, advance, hours=6.0, fast_after_s=3600.0)
    late = run.factors[int(3700 / LOOK_S) :]
    assert late[-1] == 1.0
    rises = [place for place in range(1, len(late)) if late[place] != late[place - 1]]
    assert all(late[place] == 2 * late[place - 1] for place in rises)
    assert all(second - first >= 300 / LOOK_S for first, second in itertools.pairwise(rises))


@given(st.floats(0.05, 0.8))
def test_a_shadow_that_keeps_up_is_left_alone(load: float) -> None:
    """A short queue, however it comes and goes, lowers nothing."""
    run = simulate(Shadow(pace=1.0 / load, max_age_s=3600.0, fill_s=600.0), advance, hours=1.0)
    assert set(run.factors) == {1.0}


def test_a_single_exchange_after_an_idle_hour_is_no_lag() -> None:
    """Without work a shadow has no pace: nobody takes its silence for slowness."""
    limits = LagLimits(max_bytes=1e9, max_age_s=3600.0)
    busy = Backlog(n_messages=0, n_bytes=0, n_ever=1000, oldest_s=0.0)
    lag = advance(Lag(), Backlog(n_messages=0, n_bytes=0, n_ever=0, oldest_s=0.0), limits, 0.0)
    lag = advance(lag, busy, limits, LOOK_S)
    for look in range(2, 240):
        lag = advance(lag, busy, limits, look * LOOK_S)
    one = Backlog(n_messages=1, n_bytes=1000, n_ever=1001, oldest_s=1.0)
    assert advance(lag, one, limits, 240 * LOOK_S).steps == 0


LIMITS = LagLimits(max_bytes=1e9, max_age_s=3600.0)


def look_on(per_s: float, *, stuck: int, done: bool = True) -> list[Lag]:
    """Return the lag at each look of two hours, `per_s` exchanges coming, of which the shadow gets all but `stuck` done."""
    lag, found = Lag(), []
    for place in range(int(7200 / LOOK_S)):
        at_s = place * LOOK_S
        n_ever = 1000 + int(per_s * at_s)
        n_messages = stuck if done else stuck + int(per_s * min(at_s, LIMITS.max_age_s))
        oldest_s = min(at_s, LIMITS.max_age_s)
        seen = Backlog(n_messages=n_messages, n_bytes=1000 * n_messages, n_ever=n_ever, oldest_s=oldest_s)
        lag = advance(lag, seen, LIMITS, at_s)
        found.append(lag)
    return found


@pytest.mark.parametrize("per_s", [0.0, 0.0005, 0.01, 1.0, 100.0])
@pytest.mark.parametrize("stuck", [1, FEW])
def test_a_few_exchanges_that_are_stuck_halve_nothing(per_s: float, stuck: int) -> None:
    """However old they grow, and however little comes beside them: the rates of the fleet have nothing to do with it."""
    found = look_on(per_s, stuck=stuck)
    assert {lag.factor for lag in found} == {1.0}
    assert max(lag.load for lag in found) < LOW


@pytest.mark.parametrize("per_s", [0.02, 1.0, 100.0])
def test_a_shadow_that_gets_nothing_done_lowers_the_rates_before_anything_is_forgotten(per_s: float) -> None:
    """Its backlog grows old as a whole: by half of what the stream allows the rates fall, a look or so late."""
    found = look_on(per_s, stuck=1, done=False)
    begun_s = next(place * LOOK_S for place, lag in enumerate(found) if lag.steps)
    # The eleventh comes ten exchanges later than the first.
    assert 1800 <= begun_s <= 1800 + 10 / per_s + 4 * LOOK_S
    assert found[-1].steps > 1


def test_a_new_leader_takes_what_waits_to_be_as_old_as_the_oldest() -> None:
    """It has not seen it come, and losing some is worse than taking too few for a while."""
    old = Backlog(n_messages=500, n_bytes=1000, n_ever=9000, oldest_s=2000.0)
    lag = advance(advance(Lag(), old, LIMITS, 0.0), old, LIMITS, LOOK_S)
    assert lag.steps == 1
    assert lag.load == pytest.approx(2000 / 3600)
    few = msgspec.structs.replace(old, n_messages=FEW)
    assert advance(advance(Lag(), few, LIMITS, 0.0), few, LIMITS, LOOK_S).steps == 0


def test_what_is_remembered_of_the_looks_is_bounded() -> None:
    """No further back than what waits has come, whether the shadow works or not."""
    for done in (True, False):
        most = max(len(lag.grown) for lag in look_on(1.0, stuck=1, done=done))
        assert most <= LIMITS.max_age_s / LOOK_S + 3
    assert max(len(lag.grown) for lag in look_on(1.0, stuck=40)) <= 4


def test_a_new_leader_goes_on_where_the_last_one_was() -> None:
    """The factor is in the directive: a change of leader is no reason to flood the shadow."""
    assert [lag_of(factor).factor for factor in (1.0, 0.5, 2.0**-12, 2.0**-40, 0.0, 3.0)] == [
        1.0,
        0.5,
        2.0**-12,
        2.0**-12,
        2.0**-12,
        1.0,
    ]


def test_a_recreated_stream_gives_no_pace_and_no_growth() -> None:
    """Counts that run backwards are no pace and no growth; halvings stay in force."""
    limits = LagLimits(max_bytes=1e6, max_age_s=3600.0)
    lag = msgspec.structs.replace(
        lag_of(0.25), last=Backlog(n_messages=5, n_bytes=5, n_ever=500, oldest_s=0.0), at_s=0.0
    )
    after = advance(lag, Backlog(n_messages=0, n_bytes=0, n_ever=3, oldest_s=0.0), limits, LOOK_S)
    assert (after.factor, after.load) == (0.25, 0.0)
