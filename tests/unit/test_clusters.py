"""Fitting learned slices: ids that stay, new ones, ones that come back, and how clusters are described."""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from quantdrift.core.clusters import Clustering
from quantdrift.drift.clusters.describe import traits_of
from quantdrift.drift.clusters.fit import ClusterSample, Fitted, Naming, fit_clusters

pytestmark = pytest.mark.unit

PLACES = np.random.default_rng(3).normal(size=(6, 8)) * 10
NAMING = Naming(model="m", reference_digest="d", version=1, space="pool", attributes=("header.kind",))


def _sample(kinds: Sequence[int], seed: int, n: int = 120) -> ClusterSample:
    """Return `n` vectors around the place of each kind."""
    generator = np.random.default_rng(seed)
    of_row = np.repeat(np.asarray(kinds), n)
    return ClusterSample(
        vectors=(PLACES[of_row] + generator.normal(size=(len(of_row), 8))).astype(np.float32),
        weights=np.ones(len(of_row)),
        exchanges=[f"{seed}-{place}" for place in range(len(of_row))],
        labels=[(f"kind={kind}",) for kind in of_row],
        attributes=[{"header.kind": str(kind)} for kind in of_row],
    )


def _fit(
    kinds: Sequence[int],
    seed: int,
    previous: Clustering | None = None,
    *,
    n_clusters: int = 4,
    most_ids: int = 128,
) -> Fitted:
    naming = msgspec.structs.replace(NAMING, version=seed, most_ids=most_ids)
    return fit_clusters(
        _sample(kinds, seed), naming, n_clusters=n_clusters, quantile=0.98, previous=previous, seed=seed
    )


def _id_of(clustering: Clustering, kind: int) -> int:
    ids, _ = clustering.assign(PLACES[kind : kind + 1].astype(np.float32))
    return int(ids[0])


def test_a_cluster_keeps_its_id_through_refits() -> None:
    """Other vectors, another seed, and kinds in another order."""
    clustering = _fit((0, 1, 2, 3), 1).clustering
    first = [_id_of(clustering, kind) for kind in range(4)]
    assert sorted(first) == [1, 2, 3, 4]
    for seed, kinds in ((2, (3, 1, 0, 2)), (3, (1, 0, 3, 2)), (4, (2, 3, 1, 0))):
        clustering = _fit(kinds, seed, clustering).clustering
        assert [_id_of(clustering, kind) for kind in range(4)] == first
    assert clustering.next_id == 5


def test_a_new_cluster_gets_a_new_id_and_one_that_comes_back_its_old_one() -> None:
    """An id is never used for anything else."""
    before = _fit((0, 1, 2, 3), 1).clustering
    instead = _fit((0, 1, 2, 4), 2, before).clustering
    assert _id_of(instead, 4) == 5
    assert instead.former.ids == (_id_of(before, 3),)
    again = _fit((0, 1, 2, 3), 3, instead).clustering
    assert _id_of(again, 3) == _id_of(before, 3)
    assert again.former.ids == (5,)
    assert again.next_id == 6


def test_without_ids_left_new_clusters_share_the_slice_of_all_others() -> None:
    """However often the traffic changes, the number of slices is bounded."""
    before = _fit((0, 1, 2), 1, n_clusters=3, most_ids=4).clustering
    after = _fit((0, 3, 4, 5), 2, before, most_ids=4).clustering
    assert _id_of(after, 0) == _id_of(before, 0)
    assert sorted(_id_of(after, kind) for kind in (3, 4, 5)) == [0, 0, 4]
    assert after.next_id == 5


def test_another_cluster_of_the_model_never_gets_an_id_that_was_used() -> None:
    """Two references of one model share its slices' names, so they share its ids too."""
    sample = _sample((0, 1), 1)
    naming = msgspec.structs.replace(NAMING, next_id=7)
    fitted = fit_clusters(sample, naming, n_clusters=2, quantile=0.98, previous=None, seed=1)
    assert sorted(fitted.clustering.ids) == [7, 8]


@pytest.mark.parametrize("far", [1e6, 1e15, 1e30])
def test_one_vector_far_out_does_not_take_the_clusters_with_it(far: float) -> None:
    """It is in the half that places centroids: ids stay as without it, and ordinary vectors keep their clusters."""
    before = _fit((0, 1, 2, 3), 1).clustering
    sample = _sample((0, 1, 2, 3), 2)
    vectors = sample.vectors.copy()
    vectors[: len(vectors) // 50] = far
    odd = msgspec.structs.replace(sample, vectors=vectors)
    fitted = fit_clusters(
        odd, msgspec.structs.replace(NAMING, version=2), n_clusters=4, quantile=0.9, previous=before, seed=2
    ).clustering
    assert [_id_of(fitted, kind) for kind in range(4)] == [_id_of(before, kind) for kind in range(4)]
    assert bool(np.isfinite(fitted.radii).all())


def test_the_same_sample_and_seed_give_the_same_clustering() -> None:
    """Whoever asks."""
    one, other = _fit((0, 1, 2), 1).clustering, _fit((0, 1, 2), 1).clustering
    np.testing.assert_array_equal(one.centroids, other.centroids)
    np.testing.assert_array_equal(one.radii, other.radii)


def test_a_cluster_says_what_it_holds() -> None:
    """Its share, the declared slices that are more frequent in it, and exchanges that lie at its heart."""
    fitted = _fit((0, 1, 2, 3), 1)
    assert sum(cluster.n for cluster in fitted.clusters) >= 0.97 * 480
    for kind in range(4):
        cluster = next(one for one in fitted.clusters if one.id == _id_of(fitted.clustering, kind))
        assert cluster.share == pytest.approx(0.25, abs=0.01)
        assert [trait.label for trait in cluster.traits] == [f"kind={kind}"]
        assert cluster.traits[0].lift == pytest.approx(4, rel=0.01)
        assert cluster.traits[0].count == cluster.n
        assert len(cluster.medoids) == 3
        assert {int(medoid.split("-")[1]) // 120 for medoid in cluster.medoids} == {kind}
    assert fitted.clustering.vocabulary == {"header.kind": frozenset("0123")}


def test_what_was_never_seen_is_novel_and_what_was_is_not() -> None:
    """A kind far from all others, against a fresh sample of the known ones."""
    clustering = _fit((0, 1, 2, 3), 1).clustering
    assert clustering.assign(_sample((5,), 9).vectors)[1].all()
    assert clustering.assign(_sample((0, 1, 2, 3), 9).vectors)[1].mean() < 0.06


@pytest.mark.parametrize(
    "vectors",
    [
        np.zeros((300, 4), np.float32),
        np.full((1, 4), 3.0, np.float32),
        np.vstack((np.zeros((299, 4)), np.full((1, 4), np.nan))).astype(np.float32),
        np.vstack((np.zeros((299, 4)), np.full((1, 4), 3e38))).astype(np.float32),
        np.arange(1200, dtype=np.float32).reshape(300, 4),
    ],
    ids=["equal", "single", "gap", "huge", "line"],
)
def test_odd_samples_give_a_clustering_that_can_be_used(vectors: npt.NDArray[np.float32]) -> None:
    """Equal vectors, a single one, one without a value, one at the end of float32, and a line."""
    n = len(vectors)
    sample = ClusterSample(
        vectors=vectors,
        weights=np.ones(n),
        exchanges=[str(place) for place in range(n)],
        labels=[()] * n,
        attributes=[{}] * n,
    )
    for columns in ((), ("a", "b", "c", "d")):
        naming = msgspec.structs.replace(NAMING, columns=columns)
        clustering = fit_clusters(
            sample, naming, n_clusters=3, quantile=0.95, previous=None, seed=1
        ).clustering
        assert np.isfinite(clustering.centroids).all()
        assert (clustering.radii > 0).all()
        ids, novel = clustering.assign(vectors)
        assert novel.mean() <= 0.06
        assert ((ids > 0) | novel | ~np.isfinite(vectors).all(axis=1)).all()


def test_vectors_without_a_number_cannot_be_fitted() -> None:
    """It is said."""
    sample = msgspec.structs.replace(_sample((0,), 1), vectors=np.full((120, 8), np.nan, np.float32))
    with pytest.raises(ValueError, match="finite"):
        fit_clusters(sample, NAMING, n_clusters=3, quantile=0.95, previous=None, seed=1)


def test_a_label_describes_a_cluster_where_it_is_frequent_and_more_so_than_elsewhere() -> None:
    """Weighted; a label of all, and one of a handful, tell nothing; a thousand others are left out."""
    positions = np.array([0] * 50 + [1] * 50 + [-1] * 20)
    labels = [
        ("everywhere", "left" if place < 40 else "right", f"id={place}", *(("few",) if place < 5 else ()))
        for place in range(120)
    ]
    left, right, nothing = traits_of(
        positions, np.full(120, 2.0), labels, [str(place) for place in range(120)], 3
    )
    assert [trait.label for trait in left] == ["left"]
    assert left[0].share == pytest.approx(0.8)
    assert left[0].lift == pytest.approx(0.8 / (40 / 120))
    assert left[0].count == 40
    assert [trait.label for trait in right] == ["right"]
    assert nothing == ()
    of_two = [
        str(place // 60) for place in range(120)
    ]  # two exchanges show nothing, however many items they have
    assert traits_of(positions, np.full(120, 2.0), labels, of_two, 3) == [(), (), ()]


def test_features_that_formed_a_cluster_say_where_it_lies() -> None:
    """By name, with both means; a feature that is the same everywhere is none of them."""
    generator = np.random.default_rng(5)
    norm = np.concatenate([generator.normal(9, 0.1, 100), generator.normal(1, 0.1, 300)])
    sample = _sample((0, 1), 1, n=200)
    fitted = fit_clusters(
        msgspec.structs.replace(
            sample, vectors=np.stack([norm, generator.normal(size=400)], axis=1).astype(np.float32)
        ),
        msgspec.structs.replace(NAMING, space="features", columns=("norm", "mean"), attributes=()),
        n_clusters=2,
        quantile=0.98,
        previous=None,
        seed=1,
    )
    (far,) = [cluster for cluster in fitted.clusters if cluster.apart and cluster.apart[0].inside > 5]
    assert [mean.feature for mean in far.apart] == ["norm"]
    assert far.apart[0].inside == pytest.approx(9, abs=0.1)
    assert far.apart[0].elsewhere == pytest.approx(1, abs=0.1)
    assert "header.kind=0" in {trait.label for trait in far.traits}  # an attribute without a slice of its own
