"""What holds of detections for every pair of outputs."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantdrift.core.config.vision import Detection
from quantdrift.models.comparators.protocol import Divergences
from quantdrift.models.comparators.vision.detection import DetectionComparator

pytestmark = pytest.mark.property

THRESHOLD = 0.3
COMPARATOR = DetectionComparator(Detection(), threshold=THRESHOLD)
Table = npt.NDArray[np.float64]
Row = tuple[float, ...]


@st.composite
def _rows(draw: st.DrawFn) -> Row:
    x, y = draw(st.integers(0, 8)), draw(st.integers(0, 8))
    width, height = draw(st.integers(0, 12)), draw(st.integers(1, 12))
    score = draw(st.sampled_from((0.0, 0.1, 0.2, 0.29, 0.31, 0.6, 0.9)))
    return (x, y, x + width, y + height, score, draw(st.integers(-1, 1)))


SIDE = st.lists(_rows(), max_size=5)


def _compared(candidate: list[Row], reference: list[Row]) -> Divergences:
    sides = [
        {"out": np.array(side, dtype=np.float64).reshape(1, len(side), 6)} for side in (candidate, reference)
    ]
    return COMPARATOR.compare(*sides)


def _iou(a: Row, b: Row) -> float:
    if a[:4] == b[:4]:
        return 1.0
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(width, 0) * max(height, 0)
    area = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared
    return shared / area if area else 0.0


def _best(candidate: list[Row], reference: list[Row]) -> tuple[int, int, float, int]:
    """Return the best of all ways to make pairs of one class.

    Objects in pairs that count, pairs of two of them, sum of IoU, and pairs.
    """
    if not candidate:
        return 0, 0, 0.0, 0
    first, *rest = candidate
    best = _best(rest, reference)
    for index, other in enumerate(reference):
        n_counting = (first[4] >= THRESHOLD) + (other[4] >= THRESHOLD)
        overlap = _iou(first, other)
        if first[5] == other[5] and n_counting and overlap >= 0.5:
            left = _best(rest, [*reference[:index], *reference[index + 1 :]])
            gained = (n_counting, int(n_counting == 2), overlap, 1)
            best = max(best, tuple(map(sum, zip(left, gained, strict=True))))  # type: ignore[assignment]
    return best


@given(SIDE, SIDE)
def test_matches_are_the_best_of_all(candidate: list[Row], reference: list[Row]) -> None:
    """An enumeration of every one-to-one matching finds none better, and the same panoptic quality."""
    sides = [
        [row for row in side if row[4] > THRESHOLD / 2 and row[5] >= 0] for side in (candidate, reference)
    ]
    n_counting, n_both, overlap, n_pairs = _best(sides[0], sides[1])
    n_objects = sum(row[4] >= THRESHOLD for side in sides for row in side)
    found = _compared(candidate, reference)
    alone = found.detail["missed"][0] + found.detail["invented"][0] + 2 * found.detail["class_changed"][0]
    assert n_objects - n_counting == alone
    assert found.detail["borderline"][0] == n_pairs - n_both
    assert found.flip[0] == (alone > 0)
    if n_pairs + alone:
        quality = overlap / (n_pairs + alone / 2)
        assert found.divergence[0] == pytest.approx(1 - quality, abs=1e-12)
    else:
        assert found.divergence[0] == 0


@given(SIDE, SIDE, st.randoms(use_true_random=False))
def test_the_order_of_boxes_says_nothing(candidate: list[Row], reference: list[Row], random: object) -> None:
    """Of either side."""
    shuffled = [side[:] for side in (candidate, reference)]
    for side in shuffled:
        random.shuffle(side)  # type: ignore[attr-defined]
    there, other = _compared(candidate, reference), _compared(*shuffled)
    np.testing.assert_array_equal(there.flip, other.flip)
    np.testing.assert_allclose(there.divergence, other.divergence, atol=1e-12)
    for name in ("missed", "invented", "class_changed", "n_candidate", "n_reference"):
        assert there.detail[name] == other.detail[name]


@given(SIDE, SIDE)
def test_what_one_side_missed_the_other_invented(candidate: list[Row], reference: list[Row]) -> None:
    """Exchanging the sides changes neither flip nor divergence, which stay in their range."""
    there, back = _compared(candidate, reference), _compared(reference, candidate)
    np.testing.assert_array_equal(there.flip, back.flip)
    np.testing.assert_allclose(there.divergence, back.divergence, atol=1e-12)
    assert there.detail["missed"] == back.detail["invented"]
    assert there.detail["class_changed"] == back.detail["class_changed"]
    assert 0 <= there.divergence[0] <= 1
    assert (there.divergence[0] == 0) <= (there.flip[0] == 0)


@given(SIDE)
def test_a_detector_is_what_it_is(rows: list[Row]) -> None:
    """Boxes without area and doubles included."""
    found = _compared(rows, rows)
    assert found.flip.tolist() == found.divergence.tolist() == [0.0]
    for name in ("box_shift", "centre_shift", "score_change"):
        assert found.detail[name][0] == 0 or np.isnan(found.detail[name][0])
