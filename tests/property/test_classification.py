"""What holds of divergences for every pair of outputs."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from quantdrift.core.config.schema import OutputKind
from quantdrift.models.comparators.classes.classification import LN2, ClassificationComparator

pytestmark = pytest.mark.property

COMPARATOR = ClassificationComparator(OutputKind.LOGITS, 3)
PAIR = arrays(
    np.float64,
    st.tuples(st.just(2), st.integers(1, 5), st.integers(2, 8)),
    elements=st.floats(-700, 700, width=32),
)


@given(PAIR)
def test_every_metric_stays_in_its_range(pair: npt.NDArray[np.float64]) -> None:
    """KL >= 0, JS in [0, ln 2], margins in [0, 1], flags 0 or 1; nothing is undefined for finite outputs."""
    found = COMPARATOR.compare(pair[0], pair[1])
    assert np.all(found.divergence >= 0)
    assert np.all((found.js >= 0) & (found.js <= LN2))
    for gap in (found.margin, found.candidate_margin, found.reference_margin):
        assert np.all((gap >= 0) & (gap <= 1))
    assert set(found.flip.tolist()) | set(found.topk.tolist()) <= {0.0, 1.0}


@given(PAIR)
def test_all_but_kl_are_symmetric(pair: npt.NDArray[np.float64]) -> None:
    """Exchanging the sides changes neither flip, top-k set, JS nor margin change."""
    there, back = COMPARATOR.compare(pair[0], pair[1]), COMPARATOR.compare(pair[1], pair[0])
    for name in ("flip", "topk", "margin"):
        np.testing.assert_array_equal(getattr(there, name), getattr(back, name))
    np.testing.assert_allclose(there.js, back.js, rtol=1e-12, atol=1e-15)


@given(PAIR, st.integers(-50, 50))
def test_logits_are_relative(pair: npt.NDArray[np.float64], shift: int) -> None:
    """Adding a constant to all logits of a side changes no divergence beyond rounding."""
    plain, shifted = COMPARATOR.compare(pair[0], pair[1]), COMPARATOR.compare(pair[0] + shift, pair[1])
    np.testing.assert_allclose(plain.divergence, shifted.divergence, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(plain.js, shifted.js, rtol=1e-9, atol=1e-9)
