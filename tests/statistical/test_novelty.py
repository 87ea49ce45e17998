"""The share of ordinary traffic that is called novel."""

import msgspec
import numpy as np
import pytest

from quantdrift.core.clusters import Clustering
from quantdrift.drift.clusters.fit import (
    ClusterSample,
    Naming,
    _half,
    fit_clusters,
    known_values,
    novelty_threshold,
)

pytestmark = pytest.mark.statistical

QUANTILE = 0.9
N, WIDTH, RUNS, FRESH = 240, 24, 25, 1000
NAMING = Naming(model="m", reference_digest="d", version=1, space="pool")


def _sample(generator: np.random.Generator, n: int) -> ClusterSample:
    """Return two kinds of traffic; the wider one is taken with a fifth of the probability of the other."""
    kind = generator.integers(2, size=n)
    taken = generator.random(n) < np.where(kind == 0, 0.2, 1.0)
    vectors = (generator.normal(size=(n, WIDTH)) * (3 - 2 * kind[:, np.newaxis])).astype(np.float32)[taken]
    return ClusterSample(
        vectors=vectors,
        weights=np.where(kind[taken] == 0, 5.0, 1.0),
        exchanges=[f"{place:032x}" for place in range(len(vectors))],
        labels=[()] * len(vectors),
        attributes=[{}] * len(vectors),
    )


def _shares(generator: np.random.Generator, *, honest: bool) -> list[float]:
    """Return, per run, the share of fresh traffic beyond every radius; dishonest: measured on the fitted half."""
    found = []
    for run in range(RUNS):
        sample = _sample(generator, N)
        fitted = fit_clusters(sample, NAMING, n_clusters=4, quantile=QUANTILE, previous=None, seed=run)
        clustering = fitted.clustering if honest else _mutant(fitted.clustering, sample)
        kind = generator.integers(2, size=FRESH)
        fresh = (generator.normal(size=(FRESH, WIDTH)) * (3 - 2 * kind[:, np.newaxis])).astype(np.float32)
        found.append(float(clustering.assign(fresh)[1].mean()))
    return found


def _mutant(clustering: Clustering, sample: ClusterSample) -> Clustering:
    """Return the clustering with radii from the half that placed the centroids, without weights."""
    fitted = _half(sample.exchanges)
    _, scores = msgspec.structs.replace(clustering, radii=clustering.spreads).nearest(sample.vectors[fitted])
    threshold = novelty_threshold(scores, np.ones(len(scores)), QUANTILE)
    return msgspec.structs.replace(clustering, radii=clustering.spreads * np.float32(threshold))


def _inside(shares: list[float]) -> bool:
    """Return whether the mean share is at most 1 - q, five standard errors allowed: it fails by chance in 1 of 10^6."""
    return bool(np.mean(shares) <= 1 - QUANTILE + 5 * np.std(shares, ddof=1) / np.sqrt(len(shares)))


def test_at_most_the_stated_share_of_ordinary_traffic_is_novel() -> None:
    """On average over fits, with weights, few vectors and many dimensions. Fails by chance in about 1 of 10^6 seeds."""
    assert _inside(_shares(np.random.default_rng(11), honest=True))


def test_radii_from_the_vectors_that_were_fitted_are_caught() -> None:
    """Mutant: without weights, and on the half that placed the centroids, the kind that is taken rarely is not heard."""
    assert not _inside(_shares(np.random.default_rng(11), honest=False))


def test_too_few_vectors_support_no_claim() -> None:
    """With fewer than 1 / (1 - q) vectors nothing is far, instead of everything beyond the largest score."""
    scores = np.arange(8.0)
    assert novelty_threshold(scores, np.ones(8), 0.9) == np.inf
    assert novelty_threshold(np.arange(9.0), np.ones(9), 0.9) == 8.0
    assert novelty_threshold(np.empty(0), np.empty(0), 0.9) == np.inf


def test_values_are_known_only_where_few_are_new() -> None:
    """Of 200 vocabularies called known, a further value is unseen in 1 - q of cases at most.

    Fails by chance in about 1 of 10^6 seeds. Mutant: without the rule the share is above it.
    """
    generator = np.random.default_rng(5)
    with_rule: list[bool] = []
    without: list[bool] = []
    for _ in range(200):
        n_values = int(generator.choice([3, 10, 60, 400]))
        odds = generator.dirichlet(np.full(n_values, 0.5))
        drawn = [{"header.a": str(value)} for value in generator.choice(n_values, size=300, p=odds)]
        known = known_values(["header.a"], drawn, np.ones(300), most_unseen=0.05)
        fresh = [str(value) for value in generator.choice(n_values, size=200, p=odds)]
        met = {one["header.a"] for one in drawn}
        without += [value not in met for value in fresh]
        if known:
            assert known == {"header.a": met}
            with_rule += [value not in met for value in fresh]
    assert len(with_rule) > 5_000
    assert np.mean(with_rule) <= 0.05
    assert np.mean(without) > 0.05


def test_a_request_id_never_becomes_a_vocabulary() -> None:
    """However many values were met, the next is new; nor does an attribute with thousands of values."""
    n = 3000
    drawn = [
        {"header.id": str(place), "header.user": str(place % 1500), "header.a": "x"} for place in range(n)
    ]
    known = known_values(
        ["header.id", "header.user", "header.a", "header.none"], drawn, np.ones(n), most_unseen=0.05
    )
    assert known == {"header.a": frozenset({"x"})}
