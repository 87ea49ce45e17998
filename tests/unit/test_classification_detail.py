"""What is kept of a classifier beside its columns: closed forms, SciPy and scikit-learn."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy.special import softmax

from quantdrift.core.config.schema import Model, OutputKind
from quantdrift.core.errors import QuarantineError
from quantdrift.models.comparators.classes.classification import ClassificationComparator, top_set
from quantdrift.models.comparators.protocol import Divergences
from quantdrift.models.comparators.registry import comparator_of

pytestmark = pytest.mark.unit

PROBABILITIES = ClassificationComparator(OutputKind.PROBABILITIES, 2, (1,))


def _compared(candidate: list[list[float]], reference: list[list[float]]) -> dict[str, list[Any]]:
    found = PROBABILITIES.compare(np.array(candidate), np.array(reference))
    return {name: values.tolist() for name, values in found.detail.items()}


def test_a_known_change_has_its_closed_forms() -> None:
    """From (0.7, 0.2, 0.1) to (0.3, 0.6, 0.1): every figure by hand."""
    detail = _compared([[0.3, 0.6, 0.1]], [[0.7, 0.2, 0.1]])
    assert detail["tv"] == [pytest.approx(0.4)]
    assert detail["weighted_flip"] == [pytest.approx(0.5)]
    assert detail["topk_overlap"] == [1.0]
    assert detail["confidence_shift"] == [pytest.approx(-0.1)]
    assert detail["calibration_shift"] == [pytest.approx(0.4)]
    assert (detail["gained"], detail["lost"]) == ([True], [False])


def test_the_top_scores_of_both_sides_are_kept_where_a_person_sees_a_difference() -> None:
    """The k top classes with their probabilities: of a flip, of a shift of one point and more, and of nothing less."""
    before = [[0.7, 0.2, 0.1]] * 3
    detail = _compared([[0.3, 0.6, 0.1], [0.68, 0.22, 0.1], [0.695, 0.205, 0.1]], before)
    assert detail["candidate_scores"] == [[(1, 0.6), (0, 0.3)], [(0, 0.68), (1, 0.22)], None]
    assert detail["reference_scores"] == [[(0, 0.7), (1, 0.2)], [(0, 0.7), (1, 0.2)], None]


def test_a_list_of_some_classes_has_no_scores() -> None:
    """The scores of the classes that it leaves out are not known."""
    texts = np.array([[b"0.9:1"]], dtype=object)
    found = PROBABILITIES.compare(texts, np.array([[0.7, 0.2, 0.1]]))
    assert (found.detail["candidate_scores"][0], found.detail["reference_scores"][0]) == (None, None)


def test_equal_outputs_shift_nothing() -> None:
    """All are exactly zero, and the sets overlap wholly."""
    same = softmax(np.random.default_rng(1).normal(size=(20, 5)), axis=1).tolist()
    detail = _compared(same, same)
    for name in ("tv", "weighted_flip", "confidence_shift", "calibration_shift"):
        assert detail[name] == [0.0] * 20
    assert detail["topk_overlap"] == [1.0] * 20
    assert not any(detail["gained"] + detail["lost"])


def test_total_variation_and_overlap_are_those_of_others() -> None:
    """TV is the largest difference over sets of classes; the overlap o of k agrees with Jaccard's o / (2 - o)."""
    from sklearn.metrics import jaccard_score

    rng = np.random.default_rng(2)
    candidate, reference = rng.normal(scale=2, size=(2, 30, 6))
    found = ClassificationComparator(OutputKind.LOGITS, 3).compare(candidate, reference)
    q, p = softmax(candidate, axis=1), softmax(reference, axis=1)
    sets = np.array([[int(bit) for bit in f"{number:06b}"] for number in range(64)])
    np.testing.assert_allclose(found.detail["tv"], np.abs(sets @ (q - p).T).max(axis=0), rtol=1e-12)
    overlap = found.detail["topk_overlap"]
    per_item = jaccard_score(top_set(reference, 3), top_set(candidate, 3), average="samples")
    assert np.mean(overlap / (2 - overlap)) == pytest.approx(per_item)
    np.testing.assert_array_equal(found.topk, overlap < 1)


def test_flips_of_interest_are_counted_by_their_direction() -> None:
    """Into the class, out of it, beside it; a candidate that is not finite has lost, a broken reference says nothing."""
    a, b, c, bad = [0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8], [np.nan, 0.5, 0.5]
    none = [0.5, np.nan, 0.5]  # where the class of interest would stand
    detail = _compared([b, a, c, b, bad, bad, b, none], [a, b, a, b, b, a, bad, a])
    assert detail["gained"] == [True, False, False, False, False, False, None, False]
    assert detail["lost"] == [False, True, False, False, True, False, None, False]


def test_undefined_figures_are_left_out() -> None:
    """Only a weighted flip is defined of a candidate that is not finite: the reference was sure of what it lost."""
    detail = _compared([[np.nan, 0.5, 0.5], [0.8, 0.1, 0.1]], [[0.7, 0.2, 0.1], [np.nan, 0.0, 1.0]])
    assert detail["weighted_flip"] == [pytest.approx(0.5), pytest.approx(np.nan, nan_ok=True)]
    for name in ("tv", "topk_overlap", "confidence_shift", "calibration_shift"):
        assert np.isnan(detail[name]).all(), name


def test_classes_of_interest_are_named_or_numbered() -> None:
    """By labels, or by number; one that the output does not have is refused."""
    model = Model(name="m", labels=("ham", "fraud"), interest=("fraud",))
    ham, fraud = {"y": np.array([[1.0, 0.0]])}, {"y": np.array([[0.0, 1.0]])}
    assert comparator_of(model).compare(fraud, ham).detail["gained"].tolist() == [True]
    both = Model(name="m", labels=("ham", "fraud", "theft"), interest=(1, "theft"))
    sides = [{"y": np.eye(3)[rows]} for rows in ([1, 2, 0], [2, 0, 1])]
    detail = comparator_of(both).compare(*sides).detail
    assert detail["gained"].tolist() == [False, True, False]  # from one to the other is neither
    assert detail["lost"].tolist() == [False, False, True]
    model = Model(name="m", interest=(2,))
    with pytest.raises(QuarantineError, match="interest"):
        comparator_of(model).compare(fraud, ham)


def _listed(texts: list[bytes], reference: list[float], kind: OutputKind) -> Divergences:
    array: npt.NDArray[Any] = np.array([texts], dtype=object)
    return ClassificationComparator(kind, 2, (0,)).compare(array, np.array([reference]))


def test_a_list_of_probabilities_gives_shifts_and_flips() -> None:
    """Two of three: total variation stays unknown, what the top ones tell does not."""
    detail = _listed([b"0.6:1", b"0.3:0"], [0.7, 0.2, 0.1], OutputKind.PROBABILITIES).detail
    assert np.isnan(detail["tv"]).all()
    assert detail["confidence_shift"].tolist() == [pytest.approx(-0.1)]
    assert detail["calibration_shift"].tolist() == [pytest.approx(0.4)]
    assert detail["weighted_flip"].tolist() == [pytest.approx(0.5)]
    assert detail["topk_overlap"].tolist() == [1.0]
    assert detail["lost"].tolist() == [True]


def test_a_short_list_of_logits_gives_no_shift() -> None:
    """Its sum is not known; a stray class halves the overlap of two."""
    detail = _listed([b"6:0", b"3:2"], [5.0, 4.0, 1.0], OutputKind.LOGITS).detail
    assert np.isnan(detail["confidence_shift"]).all()
    assert np.isnan(detail["calibration_shift"]).all()
    assert detail["topk_overlap"].tolist() == [0.5]
    assert detail["lost"].tolist() == [False]


def test_of_what_the_reference_holds_equal_a_list_may_begin_with_any() -> None:
    """No flip into or out of a class of interest; two of three equal ones fit in any order."""
    detail = _listed([b"2:1", b"1:0"], [1.0, 1.0, 0.5], OutputKind.LOGITS).detail
    assert (detail["gained"].tolist(), detail["lost"].tolist()) == ([False], [False])
    assert _listed([b"2:1", b"1:2"], [3.0, 1.0, 1.0], OutputKind.LOGITS).detail["topk_overlap"].tolist() == [
        0.5
    ]
