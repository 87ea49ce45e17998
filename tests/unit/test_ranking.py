"""The comparator of rankings, against closed forms, SciPy, scikit-learn and Webber's own rank-biased overlap."""

import string

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from quantdrift.core.config.tasks import Ranking
from quantdrift.core.errors import QuarantineError
from quantdrift.models.comparators.ranking import RankingComparator, tau

pytestmark = pytest.mark.unit

ALL = RankingComparator(Ranking(), top_k=0)
FEW = RankingComparator(Ranking(), top_k=2)
PAIR = arrays(
    np.float64,
    st.tuples(st.just(2), st.integers(1, 4), st.integers(2, 9)),
    elements=st.integers(-3, 3).map(float) | st.floats(-1e8, 1.7e308),
)


@pytest.mark.parametrize("k", [0, 1, 5])
def test_the_loss_is_that_of_scikit_learns_ndcg(k: int) -> None:
    """Of the candidate's order under the reference's scores, scaled to gains from 0 to 1."""
    from sklearn.metrics import ndcg_score

    candidate, reference = np.random.default_rng(6).normal(size=(2, 30, 12))
    found = RankingComparator(Ranking(), top_k=k).compare(candidate, reference)
    low, high = reference.min(axis=1, keepdims=True), reference.max(axis=1, keepdims=True)
    gains = (reference - low) / (high - low)
    for item in range(30):
        expected = 1 - ndcg_score(gains[item : item + 1], candidate[item : item + 1], k=k or None)
        assert found.divergence[item] == pytest.approx(expected, abs=1e-12)
    np.testing.assert_array_equal(found.flip, candidate.argmax(axis=1) != reference.argmax(axis=1))


@pytest.mark.parametrize("n", [2, 3, 17, 64, 130])
def test_tau_is_scipys(n: int) -> None:
    """With ties and things left out."""
    from scipy.stats import kendalltau

    rng = np.random.default_rng(n)
    first, second = rng.integers(0, 6, size=(2, 40, n)).astype(float)
    kept = rng.random((40, n)) < 0.8
    kept[:, :2] = True
    expected = [
        kendalltau(x[some], y[some]).statistic for x, y, some in zip(first, second, kept, strict=True)
    ]
    np.testing.assert_allclose(tau(first, second, kept), expected, atol=1e-12)


@pytest.mark.parametrize(
    ("order", "persistence", "expected"),
    [
        ("jtnxyzovchmfldbksguqewari", 0.9, 0.256365),
        ("zscendjrkobhmitlugywxvafq", 0.1, 0.003266),
        ("agmtrsyhfidnjobwzkxvucqel", 0.5, 0.696746),
        ("agmtrsyhfidnjobwzkxvucqel", 0.9, 0.548749),
        ("achudyxfktsrzwbgqjenolivm", 0.9, 0.640332),
        ("achudyxfktsrzwbgqjenolivm", 0.99, 0.919628),
    ],
)
def test_rank_biased_overlap_is_webbers(order: str, persistence: float, expected: float) -> None:
    """Figures of his own program, of the alphabet without a `p` against a permutation (published with mpetri/rbo)."""
    letters = [letter for letter in string.ascii_lowercase if letter != "p"]
    reference = -np.arange(25.0)
    candidate = np.array([-float(order.index(letter)) for letter in letters])
    found = RankingComparator(Ranking(), persistence=persistence).compare(
        candidate[np.newaxis], reference[np.newaxis]
    )
    assert found.detail["rbo"][0] == pytest.approx(expected, abs=1e-6)


def test_a_swap_has_its_closed_forms() -> None:
    """The first two of three change places: gains 1, 0.5 and 0."""
    found = ALL.compare(np.array([[4.0, 9.0, -7.0]]), np.array([[3.0, 2.0, 1.0]]))
    ideal = 1 + 0.5 / np.log2(3)
    assert found.divergence[0] == pytest.approx(1 - (0.5 + 1 / np.log2(3)) / ideal)
    assert found.flip[0] == 1
    assert found.detail["kendall_distance"][0] == pytest.approx(1 / 3)
    assert found.detail["rbo"][0] == pytest.approx(0.9)  # only at depth 1 nothing is common
    assert FEW.compare(np.array([[1.0, 9, 4]]), np.array([[3.0, 2, 1]])).detail["topk_overlap"][0] == 0.5


def test_of_what_the_reference_holds_equal_any_order_is_right() -> None:
    """No flip and no loss; equal scores of the candidate rank by their place."""
    found = ALL.compare(np.array([[1.0, 2, 0], [5, 5, 0]]), np.array([[7.0, 7, 0], [1, 2, 0]]))
    assert found.flip.tolist() == [0, 1]
    assert found.divergence[0] == 0
    assert found.divergence[1] > 0
    level = ALL.compare(np.array([[1.0, 2.0]]), np.array([[4.0, 4.0]]))
    assert (level.flip.tolist(), level.divergence.tolist()) == ([0], [0])
    assert np.isnan(level.detail["kendall_distance"]).all()


def test_scale_and_offset_of_scores_do_not_matter() -> None:
    """Of either side: only the order and the reference's proportions do."""
    candidate, reference = np.random.default_rng(8).normal(size=(2, 10, 6))
    plain, other = ALL.compare(candidate, reference), ALL.compare(candidate * 5 - 2, reference * 0.1 + 40)
    np.testing.assert_allclose(plain.divergence, other.divergence, atol=1e-12)
    for name, values in plain.detail.items():
        np.testing.assert_allclose(values, other.detail[name], atol=1e-12)


@pytest.mark.parametrize("fill", [-np.inf, -1e9, -3.4e38])
def test_padding_is_no_thing(fill: float) -> None:
    """An item that is filled up has the figures that it has alone, whatever the candidate says of the filling."""
    candidate, reference = np.random.default_rng(9).normal(size=(2, 8, 5))
    alone = ALL.compare(candidate, reference)
    nonsense = np.where(np.arange(3) == 0, np.nan, 100.0) * np.ones((8, 3))
    padded = ALL.compare(
        np.concatenate([nonsense, candidate], axis=1),
        np.concatenate([np.full((8, 3), fill), reference], axis=1),
    )
    np.testing.assert_array_equal(padded.flip, alone.flip)
    np.testing.assert_allclose(padded.divergence, alone.divergence, atol=1e-14)
    for name, values in alone.detail.items():
        np.testing.assert_allclose(padded.detail[name], values, atol=1e-14)


@pytest.mark.parametrize("bad", [[np.nan, 1.0, 2.0], [np.inf, 1.0, 2.0], [-np.inf] * 3])
def test_what_is_not_finite_is_an_outcome(bad: list[float]) -> None:
    """Of the candidate a flip, of the reference nothing; neighbours are untouched."""
    good = [3.0, 1.0, 2.0]
    found = ALL.compare(np.array([bad, good, good]), np.array([good, bad, good]))
    np.testing.assert_array_equal(found.flip, [1, np.nan, 0])
    np.testing.assert_array_equal(found.divergence, [np.nan, np.nan, 0])
    assert (
        found.candidate_finite.tolist() == [False, False, True] or found.candidate_finite.tolist()[0] is False
    )
    assert found.reference_finite.tolist() == [True, False, True]
    for values in found.detail.values():
        assert np.isnan(values).tolist() == [True, True, False]


def test_a_thing_that_the_candidate_masks_comes_last() -> None:
    """Minus infinity beside numbers is a score."""
    found = ALL.compare(np.array([[-np.inf, 1.0, 2.0]]), np.array([[3.0, 1.0, 2.0]]))
    assert found.candidate_finite.tolist() == [True]
    assert found.flip.tolist() == [1]


def test_one_thing_is_always_in_order() -> None:
    """There is nothing to lose, and no pair; an empty answer of the candidate is a flip."""
    found = ALL.compare(np.array([[4.0]]), np.array([[2.0]]))
    assert (found.flip.tolist(), found.divergence.tolist()) == ([0], [0])
    assert found.detail["rbo"].tolist() == [1]
    assert ALL.compare(np.empty((1, 0)), np.array([[2.0]])).flip.tolist() == [1]


def test_an_item_of_fewer_things_than_places_has_all_of_them() -> None:
    """Its k is the number of its things: equal orders overlap wholly, whatever fills the item up."""
    scores = np.array([[3.0, 1.0, -np.inf, -np.inf], [4.0, 3.0, 2.0, 1.0]])
    found = RankingComparator(Ranking(), top_k=3).compare(scores, scores)
    assert found.detail["topk_overlap"].tolist() == [1, 1]


def test_other_shapes_are_refused() -> None:
    """A list of things for each item is asked for."""
    with pytest.raises(QuarantineError, match="entries"):
        ALL.compare(np.ones(3), np.ones(3))


@pytest.mark.slow
@given(PAIR)
def test_every_figure_stays_in_its_range(pair: npt.NDArray[np.float64]) -> None:
    """From 0 to 1; distance of orders, RBO and overlap are symmetric; a side equals itself exactly."""
    there, back = ALL.compare(pair[0], pair[1]), ALL.compare(pair[1], pair[0])
    assert np.all((there.divergence >= 0) & (there.divergence <= 1))
    for name, values in there.detail.items():
        np.testing.assert_allclose(values, back.detail[name], atol=1e-12)
        assert np.all(np.isnan(values) | ((values >= -1e-12) & (values <= 1 + 1e-12)))
    same = ALL.compare(pair[0], pair[0])
    assert not same.divergence.any()
    assert np.all(same.detail["rbo"] == 1)
