"""The test of discovered slices against its theorem. Every simulation is seeded and states its failure probability."""

import math

import numpy as np
import pytest

from quantdrift.core.records import Metric, Predicate
from quantdrift.drift.discovery.confirmation import MONTH_S, ConfirmationTrial, allowance, rates_of, threshold
from quantdrift.drift.discovery.items import Gathering, SearchItems
from quantdrift.drift.discovery.search import SearchLimits, search
from quantdrift.drift.evidence.group import group_value
from quantdrift.drift.evidence.observations import FloatArray

pytestmark = pytest.mark.statistical

ALLOWED = 0.2
RATE = 0.1
N_ITEMS = 2000
SEARCHES = 60


@pytest.mark.parametrize("m", [0.0005, 0.01, 0.5])
def test_no_bet_gains_on_average_under_the_null(m: float) -> None:
    """By enumeration: every two-point law with mean m and every pair of probabilities has factors of mean at most 1."""
    rates = rates_of(m)
    for low in np.linspace(0, m, 6)[:-1]:
        for high in np.linspace(m, 1, 6)[1:]:
            share = (m - low) / (high - low)
            for pi_low, pi_high in ((1.0, 1.0), (0.2, 1.0), (1.0, 0.2)):
                c = min(pi_low, pi_high)
                taken = (1 - share) * pi_low + share * pi_high
                mean = sum(
                    p * pi / taken * (1 + rates * (c / pi) * (x - m))
                    for p, pi, x in ((1 - share, pi_low, low), (share, pi_high, high))
                )
                assert (mean <= 1 + 1e-12).all()


def test_a_slice_at_the_edge_of_the_null_is_hardly_ever_confirmed() -> None:
    """P(E ever reaches 20 within 600 exchanges) <= 5 %, looked at after every one of them.

    2,000 streams: the standard error is at most 0.005; 0.02 of slack fails with P < 1e-4. A test whose null mean is
    a fifth too small confirms more: it fails this.
    """
    n, streams = 600, 2000
    x = (np.random.default_rng(31).random((streams, n)) < 0.2).astype(np.float64)

    def confirmed(m: float) -> float:
        return float(np.mean([ConfirmationTrial(m=m).after(one, np.ones(n)).confirms(20.0) for one in x]))

    assert confirmed(0.2) <= 0.05 + 0.02
    assert confirmed(0.16) > 0.05 + 0.02


def test_sampling_weights_are_exact() -> None:
    """Half of a slice never flips and is taken at 0.2, the rest flips at 20 % and is always taken: the mean is 10 %.

    P(E ever reaches 20 within some 600 taken) <= 5 %; 400 streams, standard error 0.011, slack 0.045 fails with
    P < 1e-4. Without weights 17 % of what was taken flips, and nearly every stream confirms.
    """
    rng, c = np.random.default_rng(32), 0.2
    flipped, clean, rare = (
        group_value([1.0], [1.0], c, 1),
        group_value([0.0], [1.0], c, 1),
        group_value([0.0], [0.2], c, 1),
    )
    weighted, careless = 0, 0
    for _ in range(400):
        often = rng.random(1000) < 0.5
        flip = often & (rng.random(1000) < 0.2)
        taken = often | (rng.random(1000) < 0.2)
        vx = np.where(flip, flipped.vx, 0.0)[taken]
        v = np.where(often, clean.v, rare.v)[taken]
        weighted += ConfirmationTrial(m=0.1).after(vx, v).confirms(20.0)
        careless += (
            ConfirmationTrial(m=0.1).after(flip[taken].astype(np.float64), np.ones(len(v))).confirms(20.0)
        )
    assert weighted / 400 <= 0.05 + 0.045
    assert careless / 400 > 0.9


@pytest.mark.release
def test_what_a_search_finds_in_noise_is_not_confirmed_on_later_traffic() -> None:
    """Expected false confirmations per search <= 0.2, the best of some 2,500 slices chosen in each of 60 searches.

    At the bound the mean of 60 counts has a standard error of some 0.06; 0.2 of slack fails with P < 1e-3. The
    mutant that tests on the very traffic that was searched confirms nearly everything that it found.
    """
    rng = np.random.default_rng(33)
    honest = mutant = n_found = 0
    for _ in range(SEARCHES):
        seen, later = _noise(rng), _noise(rng)
        limits = SearchLimits(most_found=5, least_items=30, least_share=0.01)
        found = search(seen, {Metric.FLIP: RATE}, limits).found
        n_found += len(found)
        if not found:
            continue
        needed = threshold(len(found), ALLOWED)
        honest += sum(_trial(later, one.where).confirms(needed) for one in found)
        mutant += sum(_trial(seen, one.where).confirms(needed) for one in found)
    assert n_found > SEARCHES / 2, "the searches found too little for the test to mean anything"
    assert honest / SEARCHES <= ALLOWED + 0.2
    assert mutant / SEARCHES > ALLOWED + 0.2


@pytest.mark.release
def test_a_slice_that_is_worse_is_confirmed_as_fast_as_the_docstring_says() -> None:
    """Flips at 3 % against 1 % need some 800 exchanges until E = 3,000, at 5 % some 240.

    200 streams: standard errors 28 and 6; within 120 and 25 with P > 0.9999.
    """
    rng = np.random.default_rng(34)
    for rate, expected, slack in ((0.03, 800, 120), (0.05, 239, 25)):
        delays = []
        for _ in range(200):
            trial = ConfirmationTrial(m=0.01)
            while not trial.confirms(3000.0):
                trial = trial.after((rng.random(10) < rate).astype(np.float64), np.ones(10))
            delays.append(trial.n_groups)
        assert abs(float(np.mean(delays)) - expected) < slack


def test_searching_more_often_spends_no_more() -> None:
    """The allowances of 30 days sum to q, whether one searches daily, hourly or at odd times."""
    rng = np.random.default_rng(35)
    for gaps in (
        np.full(30, MONTH_S / 30),
        np.full(720, MONTH_S / 720),
        rng.dirichlet(np.ones(50)) * MONTH_S,
    ):
        assert math.isclose(sum(allowance(0.1, float(gap)) for gap in gaps), 0.1, rel_tol=1e-9)
    assert allowance(0.1, 100 * MONTH_S) == 0.1
    assert threshold(10, allowance(0.1, MONTH_S / 30)) == pytest.approx(3000)


def _noise(rng: np.random.Generator) -> SearchItems:
    """Return traffic on which nothing depends on anything."""
    values = rng.integers(0, 5, (N_ITEMS, 10))
    numbers = rng.random(N_ITEMS)
    flips = rng.random(N_ITEMS) < RATE
    gathering = Gathering()
    for index in range(N_ITEMS):
        attributes = {f"header.a{key}": str(value) for key, value in enumerate(values[index])}
        features = {"feature.length": float(numbers[index])}
        gathering.add(str(index), 1.0, attributes, features, {Metric.FLIP: float(flips[index])})
    return gathering.items()


def _trial(items: SearchItems, where: tuple[Predicate, ...]) -> ConfirmationTrial:
    inside: FloatArray = items.signals[Metric.FLIP][items.members(where)]
    return ConfirmationTrial(m=RATE).after(inside, np.ones(len(inside)))
