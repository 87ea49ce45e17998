"""Sessions that nobody declared: how often they are found, and how often something else is taken for them."""

import numpy as np
import pytest
from scipy.stats import binom

from benchmarks.bursts import bursts
from quantdrift.drift.dependence import LOOK, could_be_session, log_evidence, log_threshold
from quantdrift.drift.evidence.observations import FloatArray

pytestmark = pytest.mark.statistical


def found(rng: np.random.Generator, users: list[str], divergence: FloatArray) -> bool:
    """Return whether the slice `all` is ever said to have sessions, one look after another."""
    evidence = 0.0
    for begin in range(0, len(users), LOOK):
        values, outcome = users[begin : begin + LOOK], divergence[begin : begin + LOOK]
        if could_be_session(values):
            evidence += log_evidence(values, outcome, rng.random(len(values)))
        if evidence >= log_threshold(everything=True):
            return True
    return False


@pytest.mark.parametrize("at_once", [1, 3, 10])
def test_bursts_of_alike_requests_are_found_within_2000(at_once: int) -> None:
    """0.3 is the correlation of two requests of one user, one or ten users at once."""
    rng = np.random.default_rng(at_once)
    n_found = sum(found(rng, *bursts(rng, 2000, alike=0.3, at_once=at_once)) for _ in range(60))
    assert n_found >= 57


def test_independent_requests_in_bursts_are_hardly_ever_called_sessions() -> None:
    """The share of versions is at most 1 % over all attributes and slices, so for one of them far below that."""
    rng = np.random.default_rng(1)
    n = 300
    n_found = sum(found(rng, *bursts(rng, 3000, alike=0.0, at_once=1 + run % 3)) for run in range(n))
    assert n_found <= binom.ppf(0.999, n, 0.01 / 32)


def test_the_evidence_of_a_look_has_mean_one_at_most() -> None:
    """Also with ties: most outcomes are the same. Values above 1 / a come with a probability of at most a."""
    rng = np.random.default_rng(2)
    n = 2000
    evidence = []
    for _ in range(n):
        users, divergence = bursts(rng, 200, alike=0.0)
        outcome = (divergence > np.quantile(divergence, 0.9)).astype(float)
        evidence.append(log_evidence(users, rng.permutation(outcome), rng.random(200)))
    for a in (0.5, 0.1, 0.01):
        n_above = int((np.array(evidence) >= -np.log(a)).sum())
        assert n_above <= binom.ppf(0.9999, n, a)


def test_a_drift_of_all_users_is_not_called_sessions() -> None:
    """After an onset neighbours are alike because of the time: what other users show is taken from the evidence."""
    rng = np.random.default_rng(3)
    n_found = sum(found(rng, *bursts(rng, 2000, alike=0.0, shift=2.0)) for _ in range(60))
    assert n_found == 0


@pytest.mark.parametrize(
    "values",
    [
        ["a", "b", "c"] * 333,
        [f"request-{number}" for number in range(1000)],
        ["x"] * 1000,
        [""] * 1000,
        [f"nightly-{number // 200}" for number in range(1000)],
    ],
    ids=["few values", "one each", "constant", "absent", "long runs"],
)
def test_what_is_no_session_is_never_tested(values: list[str]) -> None:
    """A scanner that is worse than the others is a slice."""
    assert not could_be_session(values)


def test_sites_that_come_in_any_order_are_no_sessions() -> None:
    """Fifty sites, some of them worse: without bursts each exchange is an observation of its own."""
    rng = np.random.default_rng(4)
    assert not any(could_be_session([f"s{site}" for site in rng.integers(50, size=1000)]) for _ in range(100))
