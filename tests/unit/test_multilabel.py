"""The comparator of multi-label classifiers, against closed forms, SciPy and scikit-learn."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import expit, rel_entr

from quantdrift.core.config.schema import OutputKind
from quantdrift.core.errors import QuarantineError
from quantdrift.models.comparators.classes.multilabel import MultilabelComparator

pytestmark = pytest.mark.unit

LOGITS = MultilabelComparator(OutputKind.LOGITS)
PROBABILITIES = MultilabelComparator(OutputKind.PROBABILITIES, (0.5,), (0,))
GOOD, OTHER = [0.9, 0.2, 0.6], [0.4, 0.7, 0.6]
PAIR = arrays(
    np.float64,
    st.tuples(st.just(2), st.integers(1, 5), st.integers(1, 6)),
    elements=st.floats(-800, 800, width=32) | st.just(-np.inf),
)


def test_figures_are_those_of_scipy_and_scikit_learn() -> None:
    """KL of each label, Hamming loss, and Jaccard by sample, on logits that leave some sets empty."""
    from sklearn.metrics import hamming_loss, jaccard_score

    candidate, reference = np.random.default_rng(3).normal(loc=-1, scale=2, size=(2, 60, 5))
    found = LOGITS.compare(candidate.astype(np.float32), reference.astype(np.float32))
    q, p = (expit(side.astype(np.float32).astype(np.float64)) for side in (candidate, reference))
    np.testing.assert_allclose(
        found.divergence, (rel_entr(p, q) + rel_entr(1 - p, 1 - q)).sum(axis=1), rtol=1e-9
    )
    np.testing.assert_array_equal(found.flip, ((p > 0.5) != (q > 0.5)).any(axis=1))
    assert found.detail["hamming"].mean() == pytest.approx(hamming_loss(p > 0.5, q > 0.5))
    assert not (p > 0.5).any(axis=1).all()
    jaccard = jaccard_score(p > 0.5, q > 0.5, average="samples", zero_division=1.0)
    assert 1 - found.detail["jaccard_distance"].mean() == pytest.approx(jaccard)


def test_a_known_change_has_its_closed_forms() -> None:
    """One label gained, one lost, one kept."""
    found = PROBABILITIES.compare(np.array([OTHER]), np.array([GOOD]))
    expected = sum(
        p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q)) for p, q in zip(GOOD, OTHER, strict=True)
    )
    assert found.divergence[0] == pytest.approx(expected)
    detail = {name: values[0] for name, values in found.detail.items()}
    assert detail["hamming"] == pytest.approx(2 / 3)
    assert detail["jaccard_distance"] == pytest.approx(2 / 3)
    assert (detail["labels_gained"], detail["labels_lost"]) == (1, 1)
    assert (detail["gained"], detail["lost"]) == (False, True)


def test_labels_that_come_and_go_are_counted_by_their_direction() -> None:
    """Two gained and none lost, and the other way round."""
    few, many = [0.9, 0.2, 0.1], [0.9, 0.7, 0.8]
    detail = PROBABILITIES.compare(np.array([many, few]), np.array([few, many])).detail
    assert detail["labels_gained"].tolist() == [2, 0]
    assert detail["labels_lost"].tolist() == [0, 2]


def test_thresholds_are_of_each_label_and_not_met_by_equality() -> None:
    """A label is given above its threshold."""
    comparator = MultilabelComparator(OutputKind.PROBABILITIES, (0.5, 0.9))
    found = comparator.compare(np.array([[0.5, 0.95], [0.6, 0.85]]), np.array([[0.5, 0.95]] * 2))
    assert found.detail["labels_gained"].tolist() == [0, 1]
    assert found.detail["labels_lost"].tolist() == [0, 1]
    with pytest.raises(QuarantineError, match="threshold has 2 entries"):
        comparator.compare(np.zeros((1, 3)), np.zeros((1, 3)))


def test_logits_that_round_to_certainty_keep_their_divergence() -> None:
    """KL of logits 50 and 60 is about exp(-50): neither zero nor infinite; a label ruled out is infinitely far."""
    found = LOGITS.compare(np.array([[60.0], [-np.inf]]), np.array([[50.0], [50.0]]))
    assert found.divergence[0] == pytest.approx(np.exp(-50.0) * (10 - 1), rel=1e-3)
    assert found.divergence[1] == np.inf
    assert LOGITS.compare(np.array([[-np.inf]]), np.array([[-np.inf]])).divergence.tolist() == [0.0]


def test_probabilities_that_round_to_certainty_are_rounded_ones() -> None:
    """Saturated in FP16 as the logits say, and not infinitely far; a lost label costs what 8 bits can say of it."""
    logits = np.array([[12.0, -20.0, 0.5]])
    found = PROBABILITIES.compare(expit(logits + 0.01).astype(np.float16), expit(logits))
    exact = LOGITS.compare(logits + 0.01, logits)
    assert found.divergence[0] == pytest.approx(exact.divergence[0], abs=1e-5)
    lost = PROBABILITIES.compare(np.array([[0.0], [1.0]]), np.array([[0.5], [0.5]])).divergence
    np.testing.assert_allclose(lost, 0.5 * np.log(256) + 0.5 * np.log(0.5))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_an_outcome(bad: float) -> None:
    """Of the candidate a flip that lost all, of the reference nothing at all."""
    spoilt = [bad, 0.1, 0.1]
    found = PROBABILITIES.compare(np.array([spoilt, GOOD, GOOD]), np.array([GOOD, spoilt, GOOD]))
    np.testing.assert_array_equal(found.flip, [1, np.nan, 0])
    np.testing.assert_array_equal(found.divergence, [np.nan, np.nan, 0])
    assert found.candidate_finite.tolist() == [False, True, True]
    assert found.reference_finite.tolist() == [True, False, True]
    assert found.detail["lost"].tolist() == [True, None, False]
    assert np.isnan(found.detail["hamming"]).tolist() == [True, True, False]


def test_an_empty_answer_is_an_outcome() -> None:
    """No scores at all where the reference has some: a flip."""
    found = LOGITS.compare(np.empty((2, 0)), np.zeros((2, 3)))
    assert (found.flip.tolist(), found.candidate_finite.tolist()) == ([1, 1], [False, False])


def test_one_score_for_each_item_is_one_label() -> None:
    """A binary classifier with a logistic output."""
    found = LOGITS.compare(np.array([1.0, -1.0]), np.array([1.0, 1.0]))
    assert found.flip.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("candidate", "hint"),
    [
        (np.array([[b"x"]], dtype=object), "text"),
        (np.zeros((1, 2)), "one shape"),
        (np.zeros((1, 2, 2)), "labels"),
        (np.full((1, 3), 4.0), "output_kind"),
    ],
)
def test_what_cannot_be_compared_is_refused(candidate: npt.NDArray[np.float64], hint: str) -> None:
    """With what to do."""
    with pytest.raises(QuarantineError, match=hint):
        PROBABILITIES.compare(candidate, np.array([GOOD]))


@pytest.mark.slow
@given(PAIR)
def test_every_figure_stays_in_its_range(pair: npt.NDArray[np.float64]) -> None:
    """KL >= 0; shares in [0, 1]; sets, and what is counted of them, are symmetric."""
    there, back = LOGITS.compare(pair[0], pair[1]), LOGITS.compare(pair[1], pair[0])
    assert np.all(there.divergence >= 0)
    for name in ("hamming", "jaccard_distance"):
        assert np.all((there.detail[name] >= 0) & (there.detail[name] <= 1))
        np.testing.assert_array_equal(there.detail[name], back.detail[name])
    np.testing.assert_array_equal(there.detail["labels_gained"], back.detail["labels_lost"])
    np.testing.assert_array_equal(there.flip, back.flip)
    np.testing.assert_array_equal(LOGITS.compare(pair[0], pair[0]).divergence, 0)
