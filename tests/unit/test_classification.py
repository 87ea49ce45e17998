"""The classification comparator, against closed forms and SciPy."""

import numpy as np
import pytest
from scipy.spatial.distance import jensenshannon
from scipy.special import rel_entr, softmax

from quantdrift.core.config.schema import OutputKind
from quantdrift.core.errors import QuarantineError
from quantdrift.models.comparators.classes.classification import LN2, ClassificationComparator

pytestmark = pytest.mark.unit

LOGITS = ClassificationComparator(OutputKind.LOGITS, 2)
PROBABILITIES = ClassificationComparator(OutputKind.PROBABILITIES, 2)


def test_divergences_agree_with_scipy() -> None:
    """KL and JS of logits are SciPy's, in nats, KL taken of the candidate from the reference."""
    rng = np.random.default_rng(5)
    candidate, reference = rng.normal(scale=3, size=(2, 50, 10)).astype(np.float32)
    found = LOGITS.compare(candidate, reference)
    q, p = (softmax(side.astype(np.float64), axis=1) for side in (candidate, reference))
    np.testing.assert_allclose(found.divergence, rel_entr(p, q).sum(axis=1), rtol=1e-12)
    np.testing.assert_allclose(found.js, jensenshannon(p, q, axis=1) ** 2, rtol=1e-9)
    np.testing.assert_array_equal(found.flip, p.argmax(axis=1) != q.argmax(axis=1))


def test_two_classes_have_closed_forms() -> None:
    """Bernoulli distributions: KL = p ln(p/q) + (1-p) ln((1-p)/(1-q)), and the margin is |2p - 1|."""
    p, q = 0.8, 0.4
    found = PROBABILITIES.compare(np.array([[q, 1 - q]]), np.array([[p, 1 - p]]))
    assert found.divergence[0] == pytest.approx(p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q)))
    assert found.reference_margin[0] == pytest.approx(0.6)
    assert found.candidate_margin[0] == pytest.approx(0.2)
    assert found.margin[0] == pytest.approx(0.4)
    assert found.flip[0] == 1
    assert (found.detail["candidate_top"][0], found.detail["reference_top"][0]) == (1, 0)


def test_a_zero_where_the_reference_has_mass_is_far() -> None:
    """A zero of probabilities is one of 8 bits, JS is bounded; a zero on the reference's side costs nothing."""
    found = PROBABILITIES.compare(
        np.array([[0.0, 1.0, 0.0], [0.5, 0.25, 0.25], [0.0, 1.0, 0.0]]),
        np.array([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]),
    )
    np.testing.assert_allclose(
        found.divergence, [0.5 * np.log(256) + 0.5 * np.log(0.5), np.log(2), np.log(512)]
    )
    assert found.js[2] == pytest.approx(LN2)
    assert np.all(found.js <= LN2)


@pytest.mark.parametrize("kind", ["float16", "8 bits"])
def test_rounded_probabilities_say_what_logits_say(kind: str) -> None:
    """Nearly every item has a zero then: that is neither an infinite divergence, nor does it hide a damaged model."""
    rng = np.random.default_rng(4)
    reference = rng.normal(scale=8, size=(400, 10))

    def means(noise: float) -> list[float]:
        logits = reference + rng.normal(scale=noise, size=reference.shape)
        q, p = softmax(logits, axis=1), softmax(reference, axis=1)
        rounded = q.astype(np.float16) if kind == "float16" else np.rint(q * 256).clip(0, 255) / 256
        assert (rounded == 0).any(axis=1).mean() > 0.4
        return [float(PROBABILITIES.compare(side, p).divergence.mean()) for side in (q, rounded)]

    healthy, damaged = means(0.05), means(3.0)
    assert abs(healthy[1] - healthy[0]) < 2e-3
    assert damaged[1] == pytest.approx(damaged[0], rel=0.4)
    assert damaged[1] > 0.1


def test_many_classes_of_8_bits_are_a_distribution() -> None:
    """Of 1000 classes most round to zero, and with them more of the sum than one rounding explains; all do not."""
    logits = np.random.default_rng(5).normal(size=(200, 1000)) + 8 * np.eye(1000)[:200]
    p = softmax(logits, axis=1)
    q = np.rint(p * 256) / 256
    assert (q.sum(axis=1) < 0.8).any()
    found = PROBABILITIES.compare(q, p)
    assert not found.flip.any()
    assert found.divergence.mean() < 0.02
    damaged = PROBABILITIES.compare(np.roll(q, 1, axis=0), p)
    assert damaged.flip.all()
    assert damaged.divergence.mean() > 1
    with pytest.raises(QuarantineError, match="not a distribution"):
        PROBABILITIES.compare(np.full((1, 1000), 9e-4), p[:1])


def test_nothing_but_zeros_is_no_distribution_and_an_outcome() -> None:
    """Of probabilities: no class is left, which is a flip as a NaN is; of logits zeros are as good as any."""
    good, zeros = [0.5, 0.3, 0.2], [0.0, -0.0, 0.0]
    found = PROBABILITIES.compare(np.array([zeros, good, good]), np.array([good, zeros, good]))
    np.testing.assert_array_equal(found.flip, [1, np.nan, 0])
    np.testing.assert_array_equal(found.divergence, [np.nan, np.nan, 0])
    assert found.candidate_finite.tolist() == [False, True, True]
    assert found.reference_finite.tolist() == [True, False, True]
    assert LOGITS.compare(np.array([zeros]), np.array([zeros])).candidate_finite.tolist() == [True]


def test_the_top_set_ignores_order_and_small_classes() -> None:
    """Swapping the two top classes is a flip but no change of the set; a new member is one."""
    reference = np.array([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    found = LOGITS.compare(np.array([[2.0, 3.0, 1.0], [3.0, 1.0, 2.0]]), reference)
    assert found.flip.tolist() == [1, 0]
    assert found.topk.tolist() == [0, 1]


def test_more_top_classes_than_there_are_never_differ() -> None:
    """With k at or above the number of classes the sets are equal."""
    found = ClassificationComparator(OutputKind.LOGITS, 5).compare(
        np.array([[1.0, 2.0]]), np.array([[2.0, 1.0]])
    )
    assert found.topk.tolist() == [0]


def test_ties_are_broken_by_class_number_on_both_sides() -> None:
    """Equal values never differ from themselves, and rank by class number."""
    tied = np.array([[1.0, 1.0, 1.0]])
    assert LOGITS.compare(tied, tied).flip.tolist() == [0]
    found = LOGITS.compare(np.array([[1.0, 1.0, 2.0]]), np.array([[1.0, 0.0, 2.0]]))
    assert found.topk.tolist() == [0]
    assert found.candidate_margin[0] == pytest.approx(softmax([1, 1, 2])[2] - softmax([1, 1, 2])[0])


@pytest.mark.parametrize("bad", [[np.nan, 0.0, 1.0], [np.inf, 0.0, 1.0], [-np.inf, -np.inf, -np.inf]])
def test_a_candidate_that_is_not_finite_is_a_flip_and_nothing_else(bad: list[float]) -> None:
    """It has no top class where the reference has one; divergences stay undefined, neighbours untouched."""
    good = [3.0, 0.0, 1.0]
    found = LOGITS.compare(np.array([bad, good]), np.array([good, good]))
    assert found.flip.tolist() == [1, 0]
    assert found.topk.tolist() == [1, 0]
    assert found.candidate_finite.tolist() == [False, True]
    assert found.detail["candidate_top"].tolist() == [-1, 0]
    for values in (found.divergence, found.js, found.margin, found.candidate_margin):
        assert np.isnan(values).tolist() == [True, False]
    assert not np.isnan(found.reference_margin).any()


def test_a_reference_that_is_not_finite_says_nothing() -> None:
    """Everything is undefined, also where both sides are broken."""
    good, bad = [3.0, 0.0, 1.0], [np.nan, 0.0, 1.0]
    found = LOGITS.compare(np.array([good, bad]), np.array([bad, bad]))
    assert np.isnan(found.flip).all()
    assert np.isnan(found.divergence).all()
    assert found.reference_finite.tolist() == [False, False]


def test_a_masked_class_is_finite() -> None:
    """Minus infinity is probability zero: equal masks do not diverge, a mask of the candidate's own is infinite."""
    reference = np.array([[1.0, 0.0, -np.inf], [1.0, 0.0, 0.0]])
    candidate = np.array([[1.0, 0.0, -np.inf], [1.0, 0.0, -np.inf]])
    found = LOGITS.compare(candidate, reference)
    assert found.divergence.tolist() == [0.0, np.inf]


def test_logits_far_apart_do_not_overflow() -> None:
    """The softmax is stable, and its logarithm exact where the probability itself is zero in float64."""
    found = LOGITS.compare(np.array([[-5000.0, 0.0]]), np.array([[0.0, -5000.0]]))
    assert found.divergence[0] == pytest.approx(5000.0)
    ends = np.array([[1.7e308, -1.7e308]])
    assert LOGITS.compare(ends, -ends).divergence[0] == np.inf
    assert LOGITS.compare(ends, ends).divergence[0] == 0.0


def test_probabilities_are_checked_and_normalised() -> None:
    """Rounding of a quantised softmax is taken up; logits that were declared as probabilities are refused."""
    found = PROBABILITIES.compare(np.array([[0.49, 0.49]]), np.array([[0.5, 0.5]]))
    assert found.divergence[0] == pytest.approx(0, abs=1e-15)
    with pytest.raises(QuarantineError, match="output_kind"):
        PROBABILITIES.compare(np.array([[2.0, -1.0]]), np.array([[0.5, 0.5]]))
    with pytest.raises(QuarantineError, match="the reference's output is not a distribution"):
        PROBABILITIES.compare(np.array([[0.5, 0.5]]), np.array([[0.5, 0.9]]))
    broken = PROBABILITIES.compare(np.array([[np.nan, 0.5]]), np.array([[0.5, 0.5]]))
    assert broken.flip.tolist() == [1]


@pytest.mark.parametrize(
    ("candidate", "hint"),
    [
        (np.array([[1, 2]]), "labels.*output_scale"),
        (np.array([[b"cat", b"dog"]], dtype=object), "labels"),
        (np.array([[1.0]]), "classes.*multilabel"),
        (np.ones((1, 2, 2)), "classes"),
    ],
)
def test_what_holds_no_distribution_is_refused(
    candidate: "np.ndarray[tuple[int], np.dtype[np.float64]]", hint: str
) -> None:
    """Labels, single values and higher dimensions are quarantined with what to do."""
    reference = np.ones(candidate.shape)
    with pytest.raises(QuarantineError, match=hint):
        LOGITS.compare(candidate, reference)
