"""What holds of maps of classes for every pair."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from quantdrift.core.config.schema import OutputKind
from quantdrift.core.config.vision import Segmentation
from quantdrift.models.comparators.protocol import Divergences
from quantdrift.models.comparators.vision.segmentation import SegmentationComparator

pytestmark = pytest.mark.property

COMPARATOR = SegmentationComparator(Segmentation(boundary=1), OutputKind.LOGITS, background=3)
Pair = npt.NDArray[np.int64]
PAIR = arrays(
    np.int64,
    st.tuples(st.just(2), st.integers(1, 3), st.integers(1, 5), st.integers(1, 5)),
    elements=st.integers(-1, 4),
)
SYMMETRIC = ("changed", "boundary_loss", "worst_iou", "worst_class")


def _same(one: Divergences, other: Divergences) -> None:
    np.testing.assert_array_equal(one.flip, other.flip)
    np.testing.assert_allclose(one.divergence, other.divergence, atol=1e-12)
    for name in SYMMETRIC:
        assert one.detail[name].tolist() == pytest.approx(other.detail[name].tolist(), abs=1e-12)


@given(PAIR)
def test_every_figure_stays_in_its_range(pair: Pair) -> None:
    """Shares and losses from 0 to 1, and none of them without a changed pixel."""
    found = COMPARATOR.compare(pair[0], pair[1])
    for column in (found.divergence, found.detail["changed"], found.detail["boundary_loss"]):
        assert all(0 <= value <= 1 for value in column)
    nothing = [not changed for changed in found.detail["changed"]]
    assert nothing == [not value for value in found.divergence]
    assert found.flip.tolist() == [float(changed > 0.02) for changed in found.detail["changed"]]


@given(PAIR)
def test_what_one_side_gained_the_other_lost(pair: Pair) -> None:
    """Exchanging the sides changes nothing else."""
    there, back = COMPARATOR.compare(pair[0], pair[1]), COMPARATOR.compare(pair[1], pair[0])
    _same(there, back)
    assert there.detail["gained"].tolist() == back.detail["lost"].tolist()


@given(PAIR, st.sampled_from([np.s_[..., ::-1, :], np.s_[..., ::-1]]))
def test_turning_the_image_says_nothing(pair: Pair, turned: Any) -> None:
    """Both sides alike."""
    _same(COMPARATOR.compare(pair[0], pair[1]), COMPARATOR.compare(pair[0][turned], pair[1][turned]))
