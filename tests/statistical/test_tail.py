"""The tail detector against its claims. Every simulation is seeded and states its failure probability.

Each claim is put to a wrong detector as well, which the same check must reject.
"""

import itertools

import numpy as np
import pytest
from scipy.special import ndtr

from benchmarks import claims
from quantdrift.drift.detectors.tail import pooled_histogram, rank
from quantdrift.drift.detectors.tail.payoff import FROZEN_SHARE, READY_RAREST, factors
from quantdrift.drift.detectors.tail.quantile import EDGES, N_BINS, survival, tail_bin
from quantdrift.drift.evidence import header, recovery
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
from tests.support.monitor.wrong_detectors import plant

pytestmark = pytest.mark.statistical

TAUS = (0.0, 0.25, 1.0)
OPERATING_POINT = 4e6
ORACLE = 390  # groups that a CUSUM needs which knows both laws, but for the gap between them, at the same false alarms


def gains(groups: FloatArray, tau: float) -> FloatArray:
    """Return the mean of every learned bet over a bag (n, bins), each group being the newest once."""
    n = len(groups)
    others = groups.sum(axis=0) - groups
    states = np.stack(
        [TAIL.from_content(baseline(one, tau=tau, bound=1.0), scale=1.0, mass=0.0, at_us=0) for one in others]
    )
    # The bets on the top 0.05 % take part from 30,000 groups on: the same bag, so many times over.
    factor = np.empty((n, pooled_histogram.N_BETS))
    for row, state in enumerate(states):
        pooled_histogram.take(state, groups[row])
        state[pooled_histogram.BASE] *= np.ceil(READY_RAREST / n)
        factors(state, groups[row], np.empty(N_BINS), factor[row])
    return np.asarray(factor[:, : pooled_histogram.N_LEARNED].mean(axis=0))


def worth(hi: FloatArray, lo: FloatArray) -> FloatArray:
    """Return what items with shares (n,) are worth to each bet, (N_BETS, n)."""
    found = np.zeros((len(hi), rank.N_BETS))
    for values, above, below in zip(found, hi, lo, strict=True):
        rank.e_values(values, 1.0, above, below)
    return found.T


def jumping(hi: FloatArray, lo: FloatArray) -> FloatArray:
    """Return what items with shares (n,) are worth to a bet that does not fall: on the top 1 %, against the top 10 % alone.

    It has mean 1 as the others do: 1 beyond the top 10 %, 0.1 within that and 9.1 within the top 1 %.
    """

    def area(share: FloatArray) -> FloatArray:
        return (
            9.1 * np.minimum(share, 0.01) + 0.1 * np.clip(share - 0.01, 0, 0.09) + np.maximum(share - 0.1, 0)
        )

    return (area(hi) - area(lo)) / np.maximum(hi - lo, 1e-300)


def forgetful_gains(places: list[int], tau: float) -> float:
    """Return the largest such mean of a detector whose bag, of single items, lacks the newest."""
    bins, grown = np.array(places), 1 + tau
    others = len(bins) - 1
    hi = ((bins[None, :] >= bins[:, None]).sum(axis=1) - 1.0) / others
    lo = (bins[None, :] > bins[:, None]).sum(axis=1) / others
    shares = (np.clip(grown * share, least, 1.0) for share, least in ((hi, 1e-9), (lo, 0.0)))
    return float(worth(*shares).mean(axis=1).max())


@pytest.mark.parametrize("tau", TAUS)
def test_no_learned_bet_gains_on_average_over_any_bag(tau: float) -> None:
    """By enumeration of every bag of up to six single items in four bins: with ties, whatever the tolerance.

    Without the newest in the bag, bets gain.
    """
    worst = wrong = 0.0
    for n in range(1, 7):
        for bins in itertools.combinations_with_replacement((10, 30, 31, 63), n):
            worst = max(worst, float(gains(np.eye(N_BINS)[list(bins)], tau).max()))
            if n > 1:
                wrong = max(wrong, forgetful_gains(list(bins), tau))
    assert worst <= 1 + 1e-12
    assert wrong > 1 + 1e-3


@pytest.mark.parametrize("tau", TAUS)
def test_no_learned_bet_gains_over_bags_of_groups_that_span_bins(tau: float) -> None:
    """Of 300 random bags of up to forty groups of fractional weights; betting at the near end of a bin gains."""
    rng, wrong = np.random.default_rng(1), 0.0
    for _ in range(300):
        n, spread = int(rng.integers(1, 41)), rng.choice((0.02, 0.2, 2.0))
        groups = rng.dirichlet(np.full(12, spread), n) @ np.eye(N_BINS)[rng.choice(N_BINS, 12, replace=False)]
        groups = np.where(groups < 1e-6, 0.0, groups)
        groups /= groups.sum(axis=1, keepdims=True)
        assert gains(groups, tau).max() <= 1 + 1e-12
        above = np.minimum(survival(groups.sum(axis=0)) / n, 1.0)
        mass = groups.sum(axis=0) / n
        held = mass > 0
        lo = np.maximum(above[1:][held], 1e-9)
        wrong = max(wrong, float((worth(lo, lo) * mass[held]).sum(axis=1).max()))
    assert wrong > 1 + 1e-3


def laws(rng: np.random.Generator, share: FloatArray, least: float, most: float) -> FloatArray:
    """Return a random law whose shares at or above each bin are `least` to `most` times `share`, and all of it at 0."""
    drawn = np.minimum(share * rng.choice((least, 1.0, most, rng.uniform(least, most)), N_BINS), 1.0)
    drawn[0] = 1.0
    drawn = np.minimum.accumulate(np.maximum(drawn, np.minimum(share * least, 1.0)))
    return np.asarray(-np.diff(drawn, append=0.0))


def tolerant(share: FloatArray, tau: float) -> FloatArray:
    """Return the shares at or above each bin, and 0 beyond, that are no drift from `share`, (N_BINS + 1,)."""
    return np.array([rank.tolerated(share, 1.0, place, tau, rank.shift(tau)) for place in range(N_BINS + 1)])


@pytest.mark.parametrize("tau", TAUS)
def test_no_bet_gains_on_what_is_better_or_within_the_tolerance(tau: float) -> None:
    """Of 2,000 random laws none with shares from nothing up to (1 + tau) times the null's, whichever of them fell.

    With shares far beyond that, 10 (1 + tau)^2 times, bets gain on some law. A bet that does not fall gains on laws
    that are better than the null in every share.
    """
    rng, wrong, jump = np.random.default_rng(2), 0.0, 0.0
    for _ in range(2000):
        share = np.sort(np.concatenate(((1.0,), 10 ** rng.uniform(-5, 0, N_BINS - 1))))[::-1]
        grown = tolerant(share, tau)
        tail = worth(grown[:-1], grown[1:])
        assert (tail @ laws(rng, share, 0.0, 1 + tau)).max() <= 1 + 1e-9
        better = laws(rng, share, 0.2, 1.0)
        jump = max(jump, float(jumping(share, np.append(share[1:], 0.0)) @ better))
        wrong = max(wrong, float((tail @ laws(rng, share, 1.0, 10 * (1 + tau) ** 2)).max()))
    assert wrong > 1.001
    assert jump > 1.001


@pytest.mark.parametrize("spread", [0.5, 1.0, 1.5])
def test_no_bet_gains_on_values_that_grew_within_the_tolerance(spread: float) -> None:
    """All values 25 % larger, log-normal of any spread, at tau = 0.25; with a tolerance of shares alone bets gain.

    The straight line within a bin leaves at most 0.2 %.
    """
    z = np.log(EDGES / 0.01) / spread
    share, swung = (np.append(1.0, ndtr(-(z - moved / spread))) for moved in (0.0, np.log(1.25)))
    law = -np.diff(swung, append=0.0)
    grown = tolerant(share, 0.25)
    assert (worth(grown[:-1], grown[1:]) @ law).max() <= 1.002
    if spread < 1.5:
        alone = np.append(np.minimum(1.25 * share, 1.0), 0.0)
        assert (worth(alone[:-1], alone[1:]) @ law).max() > 1.01


@pytest.mark.release
def test_an_improvement_below_the_top_does_not_alarm() -> None:
    """Divergences between the 80th and 99th percentile halve: of 24 streams at each tolerance none alarms in 20,000.

    At A = 4e6 one that does has P < 0.25 by the bound of 20,000 / A; bets that do not fall alarmed in nearly all.
    """
    assert claims.improvement_pages(24, 8, history=10_000) == 0.0


@pytest.mark.release
def test_a_tail_that_thickens_smoothly_is_found() -> None:
    """Index 3 to 2.15 above the 97th percentile: all but two of 24 streams within 40,000, at A = 4e6 and no tolerance.

    One in a hundred is missed (200 streams): three of 24 have P < 2e-3. Bets that do not fall missed half of them.
    """
    assert claims.smooth_tail(24, 9)["smooth_tail_missed"] <= 2 / 24


@pytest.mark.parametrize("days", [pytest.param(1, marks=pytest.mark.release), 7])
def test_a_season_of_the_scale_within_the_tolerance_raises_no_false_alarms(
    days: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-normal of spread 0.5, all values up and down by 25 %: P(alarm within n) <= 1/4 at A = 4 n, n = 4,000.

    32 streams: more than 0.6 of them has P < 1e-4 were it attained. With a tolerance of shares alone, most alarm.
    """
    assert claims.season_alarms(32, 10, spread=0.5, days=days) <= 0.6
    if days == 1:
        plant(monkeypatch, rank, "shift", lambda _tau: 0.0)
        assert claims.season_alarms(32, 10, spread=0.5, days=days) > 0.6


def passages(
    n0: int, tau: float, n: int, streams: int, *, still: bool = False, warned: bool = False
) -> FloatArray:
    """Return when page evidence first reaches 4 n on streams that do not drift, infinity if not within n groups.

    `still`: the bag stands still, a finite baseline taken for the truth. `warned`: a warning lasts all the time.
    """
    rng = np.random.default_rng(n0)
    states = learned(rng, streams, n0, tau=tau, bound=1.0)
    if warned:
        for state in states:
            TAIL.alarmed(state, page=False)
    found = np.full(streams, np.inf)
    keep = states[:, pooled_histogram.BASE].copy()
    for first in range(0, n, STEPS):
        path = TAIL.run(states, given(rng, HEALTHY, streams, first))
        hit = path.page >= 4 * n
        found = np.minimum(found, np.where(hit.any(axis=0), first + hit.argmax(axis=0) + 1.0, np.inf))
        states = last(path)
        if still:
            states[:, pooled_histogram.BASE], states[:, pooled_histogram.ASIDE] = keep, 0.0
    return found


def inside(found: FloatArray, n: int, slack: float) -> bool:
    """Return whether P(alarm by each group) is within its bound, group / (4 n), and `slack`."""
    by = np.arange(1, len(found) + 1) / len(found)
    return bool((by <= np.sort(found) / (4 * n) + slack).all())


@pytest.mark.parametrize(("n0", "warned"), [(20, False), (50, True), (500, False), (5000, True)])
@pytest.mark.parametrize("tau", [0.0, 0.25])
def test_false_alarms_stay_inside_the_bound_however_short_the_baseline(
    n0: int, tau: float, *, warned: bool
) -> None:
    """P(alarm by n) <= n / A at every n up to 768, A = 4 * 768, also through a warning.

    256 streams: at equality the share at the last n has a standard error of 0.027; 0.11 of slack, P < 1e-4 each.
    """
    assert inside(passages(n0, tau, 768, 256, warned=warned), 768, 0.11)


@pytest.mark.parametrize("warned", [False, True])
def test_a_fixed_mixture_breaks_the_bound(*, warned: bool) -> None:
    """The mutant of the test before: a baseline of 20 groups taken for the truth, with the slack of 128 streams."""
    assert not inside(passages(20, 0.0, 2048, 128, still=True, warned=warned), 2048, 0.16)


def test_a_stretched_tail_fires_and_its_onset_is_near() -> None:
    """The top 1 % times three after a history of 30,000, at A = 4e6 and no tolerance: some 570 groups on average.

    96 streams: standard error 27; within 100 with P > 0.9998. Half of the onsets are within 200 groups.
    """
    rng, streams, change = np.random.default_rng(3), 96, 512
    states = learned(rng, streams, READY_RAREST, tau=0.0)
    delay, error = np.full(streams, np.inf), np.full(streams, np.inf)
    for first in range(0, 4096, STEPS):
        path = TAIL.run(states, given(rng, HEALTHY if first < change else STRETCHED, streams, first))
        hit = path.page >= OPERATING_POINT
        stop = np.where(hit.any(axis=0), hit.argmax(axis=0), STEPS - 1)
        ended = path.stopped(stop)
        for row in np.flatnonzero(hit.any(axis=0) & np.isinf(delay)):
            delay[row] = first + stop[row] + 1 - change
            error[row] = abs(TAIL.moved(ended[row]).onset_us - change)
        states = last(path)
        if np.isfinite(delay).all():
            break
    assert abs(delay.mean() - 570) < 100
    assert delay.mean() <= 1.5 * ORACLE + 75
    assert np.median(error) < 200


def test_a_drift_that_creeps_in_is_seen_by_the_frozen_bets_alone() -> None:
    """All divergences grow to twice as much over 100,000 groups after a baseline of 10,000, tau = 0.25, 8 streams.

    At A = 4e6 all are found; with the learned bets alone, whose bag takes the drift in, none is.
    """
    rng, streams, n = np.random.default_rng(6), 8, 100_000
    states = learned(rng, streams, pooled_histogram.READY, tau=0.25)
    whole, alone = np.zeros(streams), np.zeros(streams)
    for first in range(0, n, STEPS):
        x = (1 + first / n) * HEALTHY.draw(rng, (STEPS, streams))
        path = TAIL.run(states, block(observed(tail_bin(x)), first=first))
        whole = np.maximum(whole, path.page.max(axis=0))
        states = last(path)
        only = states[:, pooled_histogram.PAGE][:, : pooled_histogram.N_LEARNED].sum(axis=1) / (
            1 - FROZEN_SHARE
        )
        alone = np.maximum(alone, only)
        if (whole >= OPERATING_POINT).all():
            break
    assert (whole >= OPERATING_POINT).all()
    assert (alone < OPERATING_POINT).all()


def alerting(streams: int, tau: float) -> FloatArray:
    """Return states that alarmed on a stretched tail and fire."""
    rng = np.random.default_rng(4)
    states = learned(rng, streams, READY_RAREST, tau=tau)
    done = np.zeros_like(states)
    for first in range(0, 8192, STEPS):
        path = TAIL.run(states, given(rng, HEALTHY if first < 256 else STRETCHED, streams, first))
        hit = path.page >= OPERATING_POINT
        ended = path.stopped(np.where(hit.any(axis=0), hit.argmax(axis=0), STEPS - 1))
        fresh = hit.any(axis=0) & (done[:, header.SCALE] == 0)
        done[fresh] = ended[fresh]
        states = last(path)
        if done[:, header.SCALE].all():
            break
    for state in done:
        TAIL.alarmed(state, page=True)
    return done


@pytest.mark.parametrize("tau", [pytest.param(0.0, marks=pytest.mark.release), 0.25])
def test_a_stretched_tail_never_resolves_while_it_lasts_and_does_when_it_is_over(tau: float) -> None:
    """Of 24 streams none resolves within 8,192 groups of a tail three times as large; then all do within 40,000.

    Wrong ways to ask are put to the same groups. The mean is within its tolerance all the time, and the share above
    p99, the level of a bet that may win, has not moved at all: both resolve while the drift lasts.
    """
    rng, streams = np.random.default_rng(5), 24
    states = alerting(streams, tau)
    levelled = states.copy()
    for state in levelled:
        shares = survival(state[pooled_histogram.NEWER][2:])[:-1] / state[pooled_histogram.NEWER][0]
        state[pooled_histogram.BAR] = np.count_nonzero(shares > 0.01) - 1
        state[header.M] = (1 + tau) * shares[int(state[pooled_histogram.BAR])]
    mean = (1 + tau) * HEALTHY.draw(rng, (10**6,)).mean()
    mirror = np.zeros((streams, len(recovery.BETS)))
    flaps = by_mean = False
    for first in range(0, 8192, STEPS):
        x = STRETCHED.draw(rng, (STEPS, streams))
        groups = block(observed(tail_bin(x)), first=first)
        path = TAIL.run(states, groups)
        assert (path.recovery < RESOLVED).all()
        states = last(path)
        path = TAIL.run(levelled, groups)
        flaps = flaps or bool((path.recovery >= RESOLVED).any())
        levelled = last(path)
        for stream, one in enumerate(mirror):
            for value in np.minimum(x[:, stream], 1.0):
                recovery.reflect(one, mean, value - mean)
                by_mean = by_mean or recovery.recovered(one) >= RESOLVED
    assert tau == 0 or (flaps and by_mean)
    over = np.zeros(streams, dtype=bool)
    for first in range(8192, 48_192, STEPS):
        path = TAIL.run(states, given(rng, HEALTHY, streams, first))
        over |= (path.recovery >= RESOLVED).any(axis=0)
        states = last(path)
        if over.all():
            break
    assert over.all()
