"""The comparator of embeddings, against closed forms, SciPy and scikit-learn."""

import tracemalloc

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.spatial.distance import cosine

from quantdrift.core.errors import QuarantineError
from quantdrift.models.comparators.vectors.embedding import EmbeddingComparator

pytestmark = pytest.mark.unit

PAIR = arrays(
    np.float64,
    st.tuples(st.just(2), st.integers(1, 4), st.integers(1, 6)),
    elements=st.floats(-1e300, 1e300),
)


def _vectors(seed: int, n: int, noise: float = 0.0) -> npt.NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    clean = rng.normal(size=(n, 8))
    return (clean + noise * np.random.default_rng(seed + 1).normal(size=clean.shape)).astype(np.float32)


def test_the_distance_is_scipys() -> None:
    """Of every item, and the ratio of lengths is numpy's."""
    candidate, reference = _vectors(1, 40, 0.3), _vectors(1, 40)
    found = EmbeddingComparator().compare(candidate, reference)
    expected = [cosine(q, p) for q, p in zip(candidate.astype(float), reference.astype(float), strict=True)]
    np.testing.assert_allclose(found.divergence, expected, rtol=1e-9, atol=1e-15)
    lengths = [np.linalg.norm(side.astype(float), axis=1) for side in (candidate, reference)]
    np.testing.assert_allclose(found.detail["norm_ratio"], lengths[0] / lengths[1], rtol=1e-12)
    np.testing.assert_array_equal(found.flip, found.divergence > 0.05)


@pytest.mark.parametrize(("angle", "distance"), [(0, 0), (60, 0.5), (90, 1), (180, 2)])
def test_a_turn_has_its_closed_form(angle: float, distance: float) -> None:
    """1 - cos of the angle, whatever the lengths."""
    turned = 3 * np.array([[np.cos(np.radians(angle)), np.sin(np.radians(angle))]])
    found = EmbeddingComparator().compare(turned, np.array([[1.0, 0.0]]))
    assert found.divergence[0] == pytest.approx(distance, abs=1e-15)
    assert found.detail["norm_ratio"][0] == pytest.approx(3)


def test_neighbours_are_those_of_an_exact_search() -> None:
    """The overlap is what scikit-learn finds among the vectors that came before; first it is undefined."""
    from sklearn.neighbors import NearestNeighbors

    comparator = EmbeddingComparator(neighbours=5, reservoir=60)
    early = comparator.compare(_vectors(3, 49), _vectors(3, 49))
    assert np.isnan(early.detail["neighbour_overlap"]).all()
    known = _vectors(5, 60)
    comparator.compare(known, known)  # all before it make room
    candidate, reference = _vectors(7, 30, 0.4), _vectors(7, 30)
    found = comparator.compare(candidate, reference).detail["neighbour_overlap"]
    search = NearestNeighbors(n_neighbors=5, metric="cosine", algorithm="brute").fit(known.astype(float))
    sets = [search.kneighbors(side.astype(float), return_distance=False) for side in (candidate, reference)]
    expected = [len(set(q) & set(p)) / 5 for q, p in zip(*sets, strict=True)]
    np.testing.assert_array_equal(found, expected)
    assert 0 < np.mean(expected) < 1


def test_the_ring_keeps_the_last_vectors() -> None:
    """Batches that wrap around it leave what a fresh one holds of the last so many."""
    whole = _vectors(11, 173)
    candidate, reference = _vectors(12, 20, 0.5), _vectors(12, 20)
    found = []
    for begin, step in ((0, 37), (73, 100), (0, 173)):
        comparator = EmbeddingComparator(neighbours=4, reservoir=100)
        for at in range(begin, 173, step):
            part = whole[at : at + step]
            comparator.compare(part, part)
        found.append(comparator.compare(candidate, reference).detail["neighbour_overlap"])
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_what_many_people_send_is_one_neighbour() -> None:
    """In one batch, in the next, and as nearly equal as another batch size makes it: else rounding chose among copies."""
    comparator = EmbeddingComparator(neighbours=2, reservoir=30)
    popular, known = _vectors(31, 1), _vectors(32, 18)
    again = (popular * np.float32(1 + 1e-6)).repeat(40, axis=0)
    for batch in (again, popular, np.concatenate([known, again])):
        comparator.compare(batch, batch)
    assert np.isnan(comparator.compare(popular, popular).detail["neighbour_overlap"]).all()  # 19 of 20
    comparator.compare(_vectors(33, 1), _vectors(33, 1))
    near = popular + np.float32(1e-3)
    assert comparator.compare(near, popular).detail["neighbour_overlap"].tolist() == [1]


def test_of_neighbours_that_are_equally_near_the_same_are_taken() -> None:
    """Equal to five decimals: what rounding says of two that are 1e-7 apart is not told of the candidate."""
    comparator = EmbeddingComparator(neighbours=1, reservoir=10)
    turns = np.radians([60, -60, *range(100, 260, 20)])
    known = np.stack([np.cos(turns), np.sin(turns)], axis=1)
    comparator.compare(known, known)
    ahead = np.array([[1.0, 1e-7], [1.0, -1e-7]])
    assert comparator.compare(ahead, ahead[::-1]).detail["neighbour_overlap"].tolist() == [1, 1]


def test_neither_order_nor_company_matters_to_neighbours() -> None:
    """Items of a batch are looked up among what was there before it; the same vectors have the same neighbours."""
    known, candidate, reference = _vectors(13, 200), _vectors(14, 16, 0.4), _vectors(14, 16)

    def overlap(items: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        comparator = EmbeddingComparator()
        comparator.compare(known, known)
        return comparator.compare(candidate[items], reference[items]).detail["neighbour_overlap"]

    order = np.random.default_rng(15).permutation(16)
    whole = overlap(np.arange(16))
    np.testing.assert_array_equal(overlap(order), whole[order])
    np.testing.assert_array_equal(overlap(np.arange(3, 4)), whole[3:4])
    comparator = EmbeddingComparator()
    comparator.compare(known, known)
    assert np.all(comparator.compare(reference, reference).detail["neighbour_overlap"] == 1)


@pytest.mark.slow
def test_many_items_at_once_take_little_memory() -> None:
    """An exchange of many vectors is looked up in blocks, with the same result."""
    comparator, other = (EmbeddingComparator(reservoir=8192) for _ in range(2))
    known, candidate, reference = _vectors(21, 8192), _vectors(22, 1000, 0.4), _vectors(22, 1000)
    comparator.compare(known, known)
    other.compare(known, known)
    tracemalloc.start()
    found = comparator.compare(candidate, reference).detail["neighbour_overlap"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * 2**20  # at once it would be 350
    last = other.compare(candidate[-5:], reference[-5:]).detail["neighbour_overlap"]
    np.testing.assert_array_equal(found[-5:], last)


def test_what_has_no_direction_is_an_outcome() -> None:
    """Zero, not a number, infinite, or nothing: of the candidate a flip, of the reference nothing."""
    good = [3.0, 4.0]
    for bad in ([0.0, 0.0], [np.nan, 1.0], [np.inf, 1.0]):
        found = EmbeddingComparator().compare(np.array([bad, good, good]), np.array([good, bad, good]))
        np.testing.assert_array_equal(found.flip, [1, np.nan, 0])
        np.testing.assert_array_equal(found.divergence, [np.nan, np.nan, 0])
        assert found.candidate_finite.tolist() == [False, True, True]
        assert found.reference_finite.tolist() == [True, False, True]
    assert EmbeddingComparator().compare(np.empty((1, 0)), np.ones((1, 2))).flip.tolist() == [1]


def test_what_is_broken_does_not_become_a_neighbour() -> None:
    """Only directions of the reference enter the ring; another number of dimensions begins anew."""
    comparator = EmbeddingComparator(neighbours=1, reservoir=10)
    known = _vectors(17, 10)
    spoilt = known.copy()
    spoilt[4] = np.nan
    comparator.compare(known, spoilt)
    assert np.isnan(comparator.compare(known, known).detail["neighbour_overlap"]).all()
    assert comparator.compare(known[:1], known[:1]).detail["neighbour_overlap"].tolist() == [1]
    comparator.compare(np.empty((1, 0)), np.empty((1, 0)))  # of which nobody knows how many there should be
    assert comparator.compare(known[:1], known[:1]).detail["neighbour_overlap"].tolist() == [1]
    wider = np.ones((1, 9))
    assert np.isnan(comparator.compare(wider, wider).detail["neighbour_overlap"]).all()


def test_tokens_are_no_embedding() -> None:
    """One vector for each item is asked for."""
    with pytest.raises(QuarantineError, match="pool"):
        EmbeddingComparator().compare(np.ones((1, 3, 4)), np.ones((1, 3, 4)))


@pytest.mark.slow
@given(PAIR)
def test_the_distance_stays_in_its_range(pair: npt.NDArray[np.float64]) -> None:
    """From 0 to 2 and symmetric, however long the vectors; a vector is at no distance from itself."""
    comparator = EmbeddingComparator()
    there, back = comparator.compare(pair[0], pair[1]), comparator.compare(pair[1], pair[0])
    known = ~np.isnan(there.divergence)
    assert np.all((there.divergence[known] >= 0) & (there.divergence[known] <= 2))
    np.testing.assert_array_equal(there.divergence, back.divergence)
    same = comparator.compare(pair[0], pair[0]).divergence
    assert np.all((same == 0) | np.isnan(same))
