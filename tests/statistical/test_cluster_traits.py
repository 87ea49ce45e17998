"""The description of clusters: labels that have nothing to do with them are hardly ever named."""

import numpy as np
import pytest

from quantdrift.drift.clusters.describe import LEVEL, features_apart, traits_of
from quantdrift.drift.evidence.observations import FloatArray

pytestmark = pytest.mark.statistical

N_FITS = 400


def test_a_label_of_chance_is_named_in_few_fits() -> None:
    """At most `LEVEL` of the fits name any; at most 4 are expected of 400, and 13 or more then have a probability of 3e-4.

    Each exchange has four items with the same labels in one cluster, so that a test of items would name some in most fits.
    """
    rng = np.random.default_rng(20)
    named = 0
    for _ in range(N_FITS):
        n = int(rng.integers(75, 250))
        of_exchange = rng.integers(-1, 6, size=n)
        camera, site = rng.integers(0, 4, size=n), rng.choice(12, size=n, p=np.arange(1, 13) / 78)
        labels = [(f"camera={camera[row]}", f"site={site[row]}") for row in range(n)]
        traits = traits_of(
            np.repeat(of_exchange, 4),
            np.repeat(rng.uniform(1, 20, size=n), 4),
            [label for label in labels for _ in range(4)],
            [str(row) for row in range(n) for _ in range(4)],
            6,
        )
        named += any(traits)
    assert named <= 12, f"{named} of {N_FITS}, {LEVEL:.0%} allowed"


def test_a_label_that_sets_a_cluster_apart_is_named_with_300_vectors() -> None:
    """A site with three times its share in a cluster of 60, in at least 9 of 10 fits (expected: nearly all)."""
    rng = np.random.default_rng(21)
    named = 0
    for _ in range(100):
        positions = np.repeat(np.arange(5), 60)
        is_faint = rng.random(300) < np.where(positions == 0, 0.6, 0.15)
        labels = [("site=faint",) if faint else ("site=clear",) for faint in is_faint.tolist()]
        (first, *_) = traits_of(positions, np.ones(300), labels, [str(row) for row in range(300)], 5)
        named += [trait.label for trait in first] == ["site=faint"]
    assert named >= 90


def _features(values: FloatArray) -> list[dict[str, float]]:
    return [dict(zip(("mean", "length", "zeros"), row, strict=True)) for row in values.tolist()]


def test_a_feature_of_chance_is_named_in_few_fits() -> None:
    """Of small clusters too, with ties and heavy tails; the size of the difference counts beside the test, so that it is far below `LEVEL`.

    Each exchange has four alike items in one cluster. With `LEVEL` at most 4 of 400 fits are expected to name any; 13 or more have a
    probability of 3e-4.
    """
    rng = np.random.default_rng(22)
    named = 0
    for _ in range(N_FITS):
        n = int(rng.integers(75, 250))
        positions = np.repeat(rng.integers(-1, 6, size=n), 4)
        values = np.column_stack(
            (rng.standard_cauchy(n), rng.integers(0, 5, size=n), rng.lognormal(sigma=2.0, size=n))
        )
        found = features_apart(
            positions,
            np.repeat(rng.uniform(1, 20, size=n), 4),
            _features(np.repeat(values, 4, axis=0)),
            [str(row) for row in range(n) for _ in range(4)],
            6,
        )
        named += any(found)
    assert named <= 12, f"{named} of {N_FITS}, {LEVEL:.0%} allowed"


def test_alike_items_of_an_exchange_count_once() -> None:
    """Nine exchanges with forty alike items each say nothing, where 360 exchanges would."""
    positions = np.repeat([0, 1], 360)
    features = _features(np.repeat([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]], 360, axis=0))
    alike = [str(row // 40) for row in range(720)]
    assert features_apart(positions, np.ones(720), features, alike, 2) == [(), ()]
    (first, _) = features_apart(positions, np.ones(720), features, [str(row) for row in range(720)], 2)
    assert {mean.feature for mean in first} == {"mean", "length", "zeros"}


def test_a_feature_that_sets_a_cluster_apart_is_named_with_300_vectors() -> None:
    """Texts twice as long in a cluster of 60, in all of 100 fits, with their means."""
    rng = np.random.default_rng(23)
    for _ in range(100):
        positions = np.repeat(np.arange(5), 60)
        values = rng.normal(size=(300, 3))
        values[:, 1] = rng.normal(100.0, 20.0, size=300) * np.where(positions == 0, 2, 1)
        first, *others = features_apart(
            positions, np.ones(300), _features(values), [str(row) for row in range(300)], 5
        )
        assert [mean.feature for mean in first] == ["length"]
        assert first[0].inside / first[0].elsewhere == pytest.approx(2.0, rel=0.15)
        assert not any(others)
