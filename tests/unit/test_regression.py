"""The comparator of numbers, against closed forms and scikit-learn."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from quantdrift.core.config.tasks import Regression
from quantdrift.core.errors import QuarantineError
from quantdrift.models.comparators.regression import RegressionComparator

pytestmark = pytest.mark.unit

PLAIN = RegressionComparator(Regression())
QUANTILES = RegressionComparator(Regression(quantiles=(0.1, 0.5, 0.9)))
PAIR = arrays(
    np.float64,
    st.tuples(st.just(2), st.integers(1, 4), st.integers(1, 5)),
    elements=st.floats(allow_nan=False, allow_infinity=False),
)


def test_errors_are_those_of_scikit_learn() -> None:
    """Mean absolute percentage error, mean absolute error and the largest, item by item."""
    from sklearn.metrics import max_error, mean_absolute_error, mean_absolute_percentage_error

    reference = np.random.default_rng(4).uniform(1, 9, size=(20, 6))
    candidate = reference + np.random.default_rng(5).normal(scale=0.3, size=reference.shape)
    found = PLAIN.compare(candidate.astype(np.float32), reference.astype(np.float32))
    for item, (q, p) in enumerate(
        zip(candidate.astype(np.float32), reference.astype(np.float32), strict=True)
    ):
        assert found.divergence[item] == pytest.approx(mean_absolute_percentage_error(p, q), rel=1e-5)
        assert found.detail["absolute_error"][item] == pytest.approx(mean_absolute_error(p, q), rel=1e-5)
        assert found.detail["absolute_error_max"][item] == pytest.approx(max_error(p, q), rel=1e-5)


def test_a_known_change_has_its_closed_forms() -> None:
    """A tenth more of one, a fifth less of the other."""
    found = PLAIN.compare(np.array([[11.0, -4.0]]), np.array([[10.0, -5.0]]))
    detail = {name: values[0] for name, values in found.detail.items()}
    assert found.divergence[0] == pytest.approx(0.15)
    assert detail["bias"] == pytest.approx(0.15)
    assert detail["relative_error_max"] == pytest.approx(0.2)
    assert (detail["absolute_error"], detail["absolute_error_max"], detail["sign_changes"]) == (1, 1, 0)
    assert found.flip[0] == 1
    less = PLAIN.compare(np.array([[9.0, 5.0]]), np.array([[10.0, 5.0]])).detail
    assert less["bias"][0] == pytest.approx(-0.05)


@pytest.mark.parametrize(("candidate", "flips"), [(1.04, 0), (0.96, 0), (1.06, 1), (0.94, 1)])
def test_an_item_flips_above_the_tolerance(candidate: float, flips: int) -> None:
    """Of any of its outputs."""
    assert PLAIN.compare(np.array([[5.0, candidate]]), np.array([[5.0, 1.0]])).flip.tolist() == [flips]


def test_a_change_of_sign_flips_unless_the_value_is_below_the_floor() -> None:
    """Even within the tolerance; near zero a sign says nothing."""
    lenient = RegressionComparator(Regression(floor=0.1), tolerance=5.0)
    # It is the reference's value that says whether its sign means something; zero has none.
    candidate, reference = [-0.2, -0.05, 0.2, -0.01, -0.2, 0.0], [0.2, 0.05, 0.2, 0.2, 0.05, 0.2]
    found = lenient.compare(np.array(candidate), np.array(reference))
    assert found.flip.tolist() == [1, 0, 0, 1, 0, 0]
    assert found.detail["sign_changes"].tolist() == [1, 0, 0, 1, 0, 0]


def test_below_the_floor_errors_are_in_units_of_it() -> None:
    """A reference of zero is no division by zero."""
    found = RegressionComparator(Regression(floor=0.5)).compare(np.array([0.25, 2.0]), np.array([0.0, 1.0]))
    assert found.divergence.tolist() == [0.5, 1.0]


def test_crossing_quantiles_are_reported_for_the_candidate_only() -> None:
    """Beside them the width of the interval; what crosses in the reference too is no news."""
    reference = np.array([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [2.0, 1.0, 3.0], [3.0, 3.0, 3.0]])
    candidate = np.array([[1.5, 2.0, 2.5], [2.5, 2.0, 3.0], [2.0, 1.0, 0.5], [2.0, 3.0, 4.0]])
    detail = QUANTILES.compare(candidate, reference).detail
    assert detail["crossings"].tolist() == [0, 1, 1, 0]
    np.testing.assert_allclose(detail["width_ratio"], [0.5, 0.25, -1.5, np.nan])
    forecast = QUANTILES.compare(candidate[np.newaxis], reference[np.newaxis]).detail
    assert forecast["crossings"].tolist() == [2]
    assert forecast["width_ratio"].tolist() == [pytest.approx((1 + 0.5 - 1.5 + 2) / 5)]
    for few in (candidate[:, :2], candidate[:3, 0]):  # three items of one output each are no three quantiles
        with pytest.raises(QuarantineError, match="3 quantiles"):
            QUANTILES.compare(few, few)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_an_outcome(bad: float) -> None:
    """Of the candidate a flip, of the reference nothing; neighbours are untouched."""
    found = QUANTILES.compare(
        np.array([[bad, 2, 3], [1, 2, 3], [1, 2, 3]]), np.array([[1.0, 2, 3], [1, bad, 3], [1, 2, 3]])
    )
    np.testing.assert_array_equal(found.flip, [1, np.nan, 0])
    np.testing.assert_array_equal(found.divergence, [np.nan, np.nan, 0])
    for name, values in found.detail.items():
        assert np.isnan(values).tolist() == [True, True, False], name


def test_an_empty_answer_is_an_outcome() -> None:
    """Of either side."""
    assert QUANTILES.compare(np.empty((1, 0)), np.ones((1, 3))).flip.tolist() == [1]
    assert not QUANTILES.compare(np.ones((1, 3)), np.empty((1, 0))).reference_finite.any()
    assert not PLAIN.compare(np.empty((1, 0)), np.empty((1, 0))).candidate_finite.any()


def test_integers_are_numbers() -> None:
    """A counting model, against floating point."""
    assert PLAIN.compare(np.array([[3]]), np.array([[4.0]])).divergence.tolist() == [0.25]


@given(PAIR)
def test_every_figure_stays_in_its_range(pair: npt.NDArray[np.float64]) -> None:
    """Errors are not negative however large the values; absolute ones are symmetric, equal sides have none."""
    there, back = PLAIN.compare(pair[0], pair[1]), PLAIN.compare(pair[1], pair[0])
    assert np.all(there.divergence >= 0)
    assert np.all(there.detail["relative_error_max"] >= there.divergence * (1 - 1e-12))
    np.testing.assert_array_equal(there.detail["absolute_error"], back.detail["absolute_error"])
    bias = np.nan_to_num(
        np.abs(there.detail["bias"]), nan=0.0, posinf=np.inf
    )  # infinite both ways: undefined
    assert np.all(bias <= there.divergence * (1 + 1e-12))
    np.testing.assert_array_equal(PLAIN.compare(pair[0], pair[0]).divergence, 0)
