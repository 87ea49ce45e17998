"""The budget detector against its theorems. Every simulation is seeded and states its failure probability.

`P(false failure)` of a Monte Carlo bound is that of exceeding the bound plus the stated slack if it were attained
with equality; the seeds are fixed, so that a failure is a change of the code.
"""

import itertools

import numpy as np
import pytest
from scipy.stats import binom

from quantdrift.drift.detectors import budget as fields
from quantdrift.drift.detectors.protocol import BUDGET
from quantdrift.drift.evidence import header
from quantdrift.drift.evidence.group import group_value
from quantdrift.drift.evidence.observations import STEPS, FloatArray, ObservationBlock
from quantdrift.drift.evidence.recovery import RESOLVED

pytestmark = pytest.mark.statistical

STREAMS = 256
OPERATING_POINT = 4e6


def fresh(n: int, *, m: float = 0.01, weighted: bool = False) -> FloatArray:
    """Return the states of n signals on the sample clock: mass 1 per group."""
    one = BUDGET.fresh(budget=m, scale=1.0, weighted=weighted, mass=0.0, at_us=0)
    return np.tile(one, (n, 1))


def block(
    vx: FloatArray, v: FloatArray | None = None, *, first: int = 0, gamma: float = 1.0
) -> ObservationBlock:
    """Return (steps, streams) values as a block; step t has mass (first + t + 1) * gamma."""
    steps = np.arange(first + 1, first + 1 + len(vx), dtype=np.float64)[:, None]
    return ObservationBlock(
        x=np.stack((vx, np.ones_like(vx) if v is None else v), axis=-1),
        seen=np.ones(vx.shape, dtype=bool),
        mass=np.broadcast_to(steps * gamma, vx.shape),
        at_us=np.broadcast_to(steps, vx.shape),
    )


def first_passage(draw: object, n: int, threshold: float, states: FloatArray) -> FloatArray:
    """Return per stream the group at which page evidence first passes `threshold`; infinite if not within n."""
    found = np.full(len(states), np.inf)
    for first in range(0, n, STEPS):
        path = BUDGET.run(states, draw(first))  # type: ignore[operator]
        hit = path.page >= threshold
        step = np.where(hit.any(axis=0), first + hit.argmax(axis=0) + 1.0, np.inf)
        found = np.minimum(found, step)
        states = path.stopped(np.full(len(states), STEPS - 1))
    return found


@pytest.mark.parametrize("m", [0.0005, 0.01, 0.3, 0.9])
@pytest.mark.parametrize("weighted", [False, True])
def test_no_bet_gains_on_average_under_the_null(m: float, *, weighted: bool) -> None:
    """By enumeration: every two-point law with mean m, and every sampling pair, gives e-values of mean at most 1."""
    rates = fresh(1, m=m, weighted=weighted)[0][fields.RATES]
    for low, high in itertools.product(np.linspace(0, m, 7)[:-1], np.linspace(m, 1, 7)[1:]):
        share = (m - low) / (high - low)  # P(x = high)
        for pi_low, pi_high in itertools.product((0.2, 0.5, 1.0), repeat=2):
            c = min(pi_low, pi_high)
            # Given that it was taken: probability in proportion to pi, weight c / pi.
            taken = (1 - share) * pi_low + share * pi_high
            mean = sum(
                p * pi / taken * (1 + rates * (c / pi) * (x - m))
                for p, pi, x in ((1 - share, pi_low, low), (share, pi_high, high))
            )
            assert (mean <= 1 + 1e-12).all()


@pytest.mark.parametrize("m", [1e-5, 0.01, 0.95])
def test_every_e_value_is_finite_and_nonnegative_at_the_edges(m: float) -> None:
    """At x in {0, m, 1 (an infinite divergence, clipped)}, pi = 1 and v = 1, resolve included, for a whole block."""
    for x in (0.0, m, 1.0):
        states = fresh(1, m=m)
        BUDGET.alarmed(states[0], page=False)
        for first in range(0, 10 * STEPS, STEPS):
            path = BUDGET.run(states, block(np.full((STEPS, 1), x), first=first, gamma=1e-9))
            stop = int((path.page[:, 0] >= 10).argmax()) if (path.page >= 10).any() else STEPS - 1
            states = path.stopped(np.array([stop]))
            assert np.isfinite(states).all()
            assert (states[:, fields.PAGE] >= 0).all()
            assert (states[:, fields.MIRROR] >= 0).all()
            if stop < STEPS - 1:
                break


def test_a_weight_above_one_is_refused() -> None:
    """A weight v > 1 breaks the bound: the group refuses it by name, and so does the detector."""
    with pytest.raises(ValueError, match="above 1"):
        group_value([0.0], [0.2], 0.3, 1)
    with pytest.raises(ValueError, match="above 1"):
        BUDGET.run(fresh(1), block(np.zeros((1, 1)), np.full((1, 1), 1.5)))


def test_values_must_be_clipped_by_the_caller() -> None:
    """An infinite divergence must have become 1 before it is a group's value."""
    with pytest.raises(ValueError, match="clipped"):
        group_value([float("inf")], [1.0], 1.0, 1)


@pytest.mark.parametrize(("m", "spread"), [(0.01, False), (0.1, True)])
def test_false_alarms_stay_inside_the_bound(m: float, *, spread: bool) -> None:
    """P(alarm within n) <= n / A at A = 4 n on the sample clock, at the edge of the null.

    1,024 streams: the estimate's standard error is at most 0.0136, and 0.055 of slack fails with P < 1e-4.
    """
    n, streams = 800, 1024
    rng = np.random.default_rng(11)

    def draw(first: int) -> ObservationBlock:
        shape = (STEPS, streams)
        x = rng.beta(4 * m, 4 * (1 - m), shape) if spread else (rng.random(shape) < m).astype(float)
        return block(x, first=first)

    found = first_passage(draw, n, 4.0 * n, fresh(streams, m=m))
    assert (found <= n).mean() <= 0.25 + 0.055


def test_weighted_groups_stay_inside_the_bound_and_unweighted_ones_do_not() -> None:
    """Groups of two items with pi (1, 0.3), flip rates (0.02, 0), m = 0.01: the mean is at the budget exactly.

    Each item is thinned by its own probability and counts over the two offered. 256 streams, n = 3,200, A = 4 n:
    standard error 0.027; slack 0.11 fails with P < 1e-4. The unweighted mean of what was taken is 1.5 %: a detector
    without weights would fire in nearly every stream, which proves that the test can fail.
    """
    n, streams, m, c = 3200, 256, 0.01, 0.3
    rng = np.random.default_rng(12)

    def draw(first: int, *, weighted: bool) -> ObservationBlock:
        shape = (STEPS, streams)
        flip = (rng.random(shape) < 0.02).astype(float)
        second = rng.random(shape) < 0.3
        if weighted:
            one, both = group_value([0.0], [1.0], c, 2), group_value([0.0, 0.0], [1.0, 0.3], c, 2)
            flipped = group_value([1.0], [1.0], c, 2)
            return block(flip * flipped.vx, np.where(second, both.v, one.v), first=first)
        return block(flip / np.where(second, 2.0, 1.0), first=first)

    bound = 0.25 + 0.11
    found = first_passage(
        lambda first: draw(first, weighted=True), n, 4.0 * n, fresh(streams, m=m, weighted=True)
    )
    assert (found <= n).mean() <= bound
    careless = first_passage(lambda first: draw(first, weighted=False), n, 4.0 * n, fresh(streams, m=m))
    assert (careless <= n).mean() > 0.9


def test_detection_delay_is_what_the_docstring_says() -> None:
    """1 % -> 3 % flips at A = 4e6: some 820 groups on average (oracle CUSUM: 710).

    256 streams, standard error 26: within 100 of it with P > 0.9998. And 1 % -> 5 % some 290 (oracle: 250).
    """
    for rate, expected, slack, seed in ((0.03, 820, 100, 13), (0.05, 290, 40, 14)):
        rng = np.random.default_rng(seed)
        states = fresh(STREAMS)
        for first in range(0, 2048, STEPS):
            x = (rng.random((STEPS, STREAMS)) < 0.01).astype(float)
            path = BUDGET.run(states, block(x, first=first))
            states = path.stopped(np.full(STREAMS, STEPS - 1))

        def draw(first: int, rate: float = rate, rng: np.random.Generator = rng) -> ObservationBlock:
            x = (rng.random((STEPS, STREAMS)) < rate).astype(float)
            return block(x, first=2048 + first)

        found = first_passage(draw, 4096, OPERATING_POINT, states)
        assert abs(found.mean() - expected) < slack


def test_groups_without_an_allowance_are_no_evidence() -> None:
    """Twelve wrong answers in the batch that creates a detector leave it at 0; each later one multiplies by up to 96."""
    wrong = np.ones((12, 1))
    (evidence,) = BUDGET.run(fresh(1), block(wrong, gamma=0.0)).page[-1]
    assert evidence == 0.0
    (evidence,) = BUDGET.run(fresh(1), block(wrong, gamma=1e-7)).page[-1]
    assert evidence > 1e12


def test_the_onset_is_near_the_change() -> None:
    """The reported onset lies near the change: half of 256 streams within 100 groups, nine in ten within 400."""
    change, rng = 1024, np.random.default_rng(15)
    states = fresh(STREAMS)
    onsets: dict[int, int] = {}
    for first in range(0, 6 * change, STEPS):
        x = (rng.random((STEPS, STREAMS)) < (0.01 if first < change else 0.05)).astype(float)
        path = BUDGET.run(states, block(x, first=first))
        hit = (path.page >= OPERATING_POINT).any(axis=0)
        stops = np.where(hit, (path.page >= OPERATING_POINT).argmax(axis=0), STEPS - 1)
        states = path.stopped(stops)
        for stream in np.flatnonzero(hit):
            onsets.setdefault(int(stream), BUDGET.moved(states[stream]).onset_us)
        if len(onsets) == STREAMS:
            break
    error = np.abs(np.array(list(onsets.values())) - change)
    assert len(onsets) == STREAMS
    assert np.median(error) <= 100
    assert np.quantile(error, 0.9) <= 400


def test_a_breach_is_not_resolved_while_it_lasts_and_is_when_it_ends() -> None:
    """At three times the budget no stream of 256 resolves within 4,096 groups; without flips all do within 800.

    The mirror image's mean there is below 1 / (0.02 c); reaching 1e4 has P < 1e-4 for all streams together.
    """
    rng = np.random.default_rng(16)
    states = fresh(STREAMS)
    for state in states:
        BUDGET.alarmed(state, page=True)
    for first in range(0, 4096, STEPS):
        x = (rng.random((STEPS, STREAMS)) < 0.03).astype(float)
        path = BUDGET.run(states, block(x, first=first))
        assert (path.recovery < RESOLVED).all()
        states = path.stopped(np.full(STREAMS, STEPS - 1))
    for first in range(0, 800, STEPS):
        path = BUDGET.run(states, block(np.zeros((STEPS, STREAMS)), first=4096 + first))
        states = path.stopped(np.full(STREAMS, STEPS - 1))
    assert (path.recovery >= RESOLVED).all()


def test_evidence_that_is_carried_over_versions_keeps_the_bound() -> None:
    """At the budget, with a new version every 64 groups: in all versions together E[evidence] stays below the mass given.

    The evidence of 512 streams after 1,024 groups. It goes on eight groups after the new version began, which has evidence of
    its own by then.
    """
    rng = np.random.default_rng(7)
    n, every = 512, 64
    states, left = fresh(n), np.zeros(n)
    n_alarms, threshold = 0, 4000.0
    alarmed = np.zeros(n, dtype=bool)
    for version in range(16):
        before, x = states, (rng.random((every, n)) < 0.01).astype(np.float64)
        if version:
            states = fresh(n)
            states[:, header.MASS] = before[:, header.MASS]
        for begin, end in ((0, 8), (8, every)):
            if begin and version:
                for state, ended in zip(states, before, strict=True):
                    evidence = BUDGET.evidence(state) + BUDGET.evidence(ended)
                    assert BUDGET.carry(state, ended)
                    assert BUDGET.evidence(state) + BUDGET.evidence(ended) == pytest.approx(evidence)
                    assert BUDGET.page_mass(ended) == 0.0
                left += BUDGET.evidences(before)
            path = BUDGET.run(states, block(x[begin:end], first=version * every + begin))
            alarmed |= (path.page >= threshold).any(axis=0)
            states = path.stopped(np.full(n, end - begin - 1))
    n_alarms = int(alarmed.sum())
    assert n_alarms <= binom.ppf(0.9999, n, 1024 / threshold)
    # Heavy tailed: a clipped mean is below the mean, which is at most the mass.
    assert np.minimum(BUDGET.evidences(states) + left, threshold).mean() <= 1024


def test_a_drift_goes_on_under_a_new_version_and_an_alert_does_not() -> None:
    """The evidence, its mass and the onset are those of before, also where noise was added or weights begin to differ."""
    path = BUDGET.run(fresh(1), block(np.ones((20, 1))))
    (before,) = path.stopped(np.array([19]))
    evidence = BUDGET.evidence(before)
    moved = BUDGET.moved(before)
    for other in (fresh(1, m=0.02)[0], fresh(1, weighted=True)[0]):
        ended = before.copy()
        assert BUDGET.carry(other, ended)
        assert BUDGET.evidence(other) == pytest.approx(0.99 * evidence)
        assert BUDGET.evidence(ended) == pytest.approx(0.01 * evidence), "for its last sessions"
    alerting = before.copy()
    BUDGET.alarmed(alerting, page=True)
    assert not BUDGET.carry(fresh(1)[0], alerting)
    assert not BUDGET.carry(alerting, before)
    state = fresh(1)[0]
    assert BUDGET.carry(state, before)
    assert BUDGET.evidence(state) == pytest.approx(0.99 * evidence)
    assert BUDGET.page_mass(state) == pytest.approx(20)
    assert BUDGET.moved(state) == moved
    assert state[header.N_TOTAL] == 0, "the new version needs exchanges of its own before it can be ok"
