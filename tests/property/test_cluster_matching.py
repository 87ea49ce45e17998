"""Ids of clusters follow the clusters, not the order in which a fit returns them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from quantdrift.drift.clusters.fit import Array, match_centroids

pytestmark = pytest.mark.property


@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 12), st.integers(1, 8))
def test_the_order_of_either_side_does_not_matter(seed: int, n_old: int, n_new: int, width: int) -> None:
    """Whatever the order, the same pairs are found."""
    generator = np.random.default_rng(seed)
    old, new = generator.normal(size=(n_old, width)), generator.normal(size=(n_new, width))
    old_spreads, new_spreads = generator.uniform(0.2, 3, n_old), generator.uniform(0.2, 3, n_new)
    found = match_centroids(old, old_spreads, new, new_spreads)
    by_old, by_new = generator.permutation(n_old), generator.permutation(n_new)
    again = match_centroids(old[by_old], old_spreads[by_old], new[by_new], new_spreads[by_new])
    assert {
        (None if which is None else int(by_old[which]), int(by_new[place]))
        for place, which in enumerate(again)
    } == {(which, place) for place, which in enumerate(found)}


@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 8))
def test_clusters_that_moved_a_little_are_all_found_again(seed: int, n_clusters: int, width: int) -> None:
    """Each is nearest to where it was, by less than half the distance between any two."""
    generator = np.random.default_rng(seed)
    old = generator.permutation(np.arange(n_clusters * 10.0, step=10))[:, np.newaxis] + np.zeros((1, width))
    moved = generator.normal(size=(n_clusters, width))
    moved *= 0.9 / np.maximum(np.linalg.norm(moved, axis=1, keepdims=True), 1e-9)
    order = generator.permutation(n_clusters)
    ones = np.ones(n_clusters)
    assert match_centroids(old, ones, (old + moved)[order], ones) == order.tolist()


@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 9), st.floats(0.1, 3))
def test_no_pair_is_further_apart_than_the_limit_and_no_old_one_is_taken_twice(
    seed: int, n_old: int, n_new: int, limit: float
) -> None:
    """A cluster that went further is another cluster."""
    generator = np.random.default_rng(seed)
    old, new = generator.normal(size=(n_old, 3)), generator.normal(size=(n_new, 3))
    found = match_centroids(old, np.ones(n_old), new, np.ones(n_new), limit=limit)
    taken = [which for which in found if which is not None]
    assert len(set(taken)) == len(taken)
    for place, which in enumerate(found):
        assert which is None or np.linalg.norm(old[which] - new[place]) < limit


def _as_many_pairs_as_possible(old: Array, new: Array, limit: float) -> list[int]:
    """Return the mutant's pairs: what is too far apart is forbidden instead of cut."""
    distances = np.linalg.norm(old[:, np.newaxis] - new[np.newaxis], axis=2)
    rows, columns = linear_sum_assignment(np.where(distances < limit, distances, 1e6))
    return [int(rows[columns == place][0]) for place in range(len(new))]


def test_a_cluster_that_has_not_moved_keeps_its_id_whatever_its_neighbours_do() -> None:
    """The second stays; the first is gone, and a new one came beside it. Mutant: both would hand their ids on."""
    old, new = np.array([[0.0], [1.0]]), np.array([[1.0], [1.9]])
    assert match_centroids(old, np.ones(2), new, np.ones(2), limit=1.1) == [1, None]
    assert _as_many_pairs_as_possible(old, new, 1.1) == [0, 1]
