"""Sessions that nobody declared: how often they are found, and how often something else is taken for them."""

import numpy as np
import pytest
from scipy.stats import binom

from benchmarks.bursts import bursts, sources
from benchmarks.sessions import SOURCES, found_after
from quantdrift.drift.dependence import (
    LEAST_SEEN,
    LOOK,
    come_back,
    could_be_session,
    log_evidence,
    log_threshold,
)
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


@pytest.mark.parametrize(
    "at_once", [1, pytest.param(3, marks=pytest.mark.release), pytest.param(10, marks=pytest.mark.release)]
)
def test_bursts_of_alike_requests_are_found_within_2000(at_once: int) -> None:
    """0.3 is the correlation of two requests of one user, one or ten users at once."""
    rng = np.random.default_rng(at_once)
    n_found = sum(found(rng, *bursts(rng, 2000, alike=0.3, at_once=at_once)) for _ in range(60))
    assert n_found >= 57


@pytest.mark.parametrize("at_once", [50, 100])
def test_bursts_of_many_users_at_the_same_time_are_found(at_once: int) -> None:
    """Two requests of one are so far apart as there are users, correlation 0.3: all of 6 versions are found within 8,000, by an attribute.

    If 95 % were found, any is missed with probability 0.26, and two with 0.03; none of 24 was. A reach of 8 exchanges finds none.
    """
    rng = np.random.default_rng(at_once)
    streams = [bursts(rng, 8000, alike=0.3, at_once=at_once) for _ in range(6)]
    assert all(found_after(*stream, seed=number) is not None for number, stream in enumerate(streams))


def test_independent_requests_of_many_users_at_the_same_time_are_no_sessions() -> None:
    """The share of versions that are flagged is at most 1 %: any of 6 with probability 0.06 if it were so; none of 24 was."""
    rng = np.random.default_rng(10)
    for number in range(6):
        stream = bursts(rng, 8000, alike=0.0, at_once=50 + 10 * number)
        assert could_be_session(stream[0], 7000)
        assert found_after(*stream, seed=number) is None


@pytest.mark.release
def test_many_sources_at_the_same_time_are_no_sessions() -> None:
    """A hundred bursts of 1,000 stores that differ: none of 6 versions is flagged within 10,000; with sessions in them all are."""
    rng = np.random.default_rng(11)
    for alike in (0.0, 0.3):
        for number in range(6):
            stream = sources(rng, 10_000, n_sources=1000, at_once=100, most=12, between=0.5, alike=alike)
            assert (found_after(*stream, seed=number) is not None) is (alike > 0)


@pytest.mark.release
def test_independent_requests_in_bursts_are_hardly_ever_called_sessions() -> None:
    """The share of versions is at most 1 % over all attributes and slices, so for one of them far below that."""
    rng = np.random.default_rng(1)
    n = 300
    n_found = sum(found(rng, *bursts(rng, 3000, alike=0.0, at_once=1 + run % 3)) for run in range(n))
    assert n_found <= binom.ppf(0.999, n, 0.01 / 32)


@pytest.mark.release
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


@pytest.mark.release
def test_healthy_sources_that_differ_are_no_sessions() -> None:
    """Stores in bursts, no fault, within 4,000 exchanges: the share of versions that are flagged is at most 1 %.

    So at most 1 of 28, with a probability of 0.03 that more are if it were 1 %. Compared with all other stores instead of
    themselves, stores that differ are taken for sessions: the test can fail.
    """
    rng = np.random.default_rng(5)
    streams = [
        sources(rng, 4000, n_sources=n, at_once=at_once, most=most, between=between)
        for n, at_once, most, between in SOURCES * 4
    ]
    flagged = [found_after(*stream, seed=number) is not None for number, stream in enumerate(streams)]
    assert sum(flagged) <= 1
    among_all = [
        log_evidence(names[:LOOK], divergence[:LOOK], rng.random(LOOK)) >= log_threshold(everything=True)
        for names, divergence in streams
    ]
    assert np.mean(among_all) > 0.5


@pytest.mark.release
def test_sessions_of_users_who_come_back_are_found() -> None:
    """Users who differ, and whose visits differ, too: correlation 0.3 within a visit. Found in 95 % within 8,000."""
    rng = np.random.default_rng(6)
    n_found = 0
    for number, (n, at_once, most, between) in enumerate(SOURCES * 3):
        stream = sources(rng, 8000, n_sources=n, at_once=at_once, most=most, between=between, alike=0.3)
        n_found += found_after(*stream, seed=number) is not None
    assert n_found >= 20


@pytest.mark.release
def test_sources_that_become_worse_are_no_sessions() -> None:
    """Four of sixty stores flip at 20 % from the 3,000th exchange on, and their divergence is three times as large."""
    rng = np.random.default_rng(7)
    for number in range(10):
        names, divergence = sources(rng, 7000, n_sources=60, at_once=1 + number % 6, most=12, between=0.5)
        worse = np.isin(names, ["s0", "s1", "s2", "s3"]) & (np.arange(7000) >= 3000)
        outcome = np.where(worse, 3.0 * divergence, divergence)
        outcome[rng.random(7000) < np.where(worse, 0.2, 0.005)] = 2.0
        assert found_after(names, outcome, seed=number) is None


@pytest.mark.release
def test_the_evidence_against_sources_that_differ_has_mean_one_at_most() -> None:
    """Over a block, ties included: values above 1 / a come with a probability of at most a."""
    rng = np.random.default_rng(8)
    n, evidence = 1000, []
    for _ in range(n):
        names, divergence = sources(rng, 500, n_sources=8, at_once=1, most=12, between=1.0)
        outcome = np.where(divergence > np.quantile(divergence, 0.7), divergence, 0.0)
        evidence.append(log_evidence(names, outcome, rng.random(500), sources=True))
    assert max(evidence) > 0.0, "bets were made"
    for a in (0.5, 0.1, 0.01):
        n_above = int((np.array(evidence) >= -np.log(a)).sum())
        assert n_above <= binom.ppf(0.9999, n, a)


def test_values_that_come_back_are_those_of_sources() -> None:
    """Users that never come back are no sources, ten at a time; a thousand stores are, before anything is found."""
    rng = np.random.default_rng(9)
    assert not any(come_back(bursts(rng, LEAST_SEEN, alike=0.0, at_once=10)[0]) for _ in range(50))
    stores = (
        sources(rng, LEAST_SEEN, n_sources=1000, at_once=20, most=12, between=0.0)[0] for _ in range(50)
    )
    assert all(map(come_back, stores))
