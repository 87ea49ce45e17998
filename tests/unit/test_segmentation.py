"""The comparator for segmentation, by hand and beside others' figures."""

import math
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from scipy.ndimage import distance_transform_edt

from quantdrift.core.config.schema import OutputKind
from quantdrift.core.config.vision import Segmentation
from quantdrift.core.errors import QuarantineError
from quantdrift.models.comparators.vision.segmentation import SegmentationComparator
from quantdrift.shadow.replay.rows import items_of

Map = npt.NDArray[Any]


def _compared(
    candidate: Map, reference: Map, kind: OutputKind = OutputKind.LOGITS, **options: Any
) -> dict[str, Any]:
    """Compare maps of one item."""
    limits = {name: options.pop(name) for name in ("tolerance", "background") if name in options}
    comparator = SegmentationComparator(Segmentation(**options), kind, **limits)
    found = comparator.compare(candidate[np.newaxis], reference[np.newaxis])
    detail = {name: column[0] for name, column in found.detail.items()}
    return {"flip": found.flip[0], "divergence": found.divergence[0], **detail}


def _halves(column: int) -> Map:
    """Return class 0 left of a column and class 1 from it on, 20 by 20."""
    found = np.zeros((20, 20), dtype=np.int64)
    found[:, column:] = 1
    return found


def _blobs(seed: int, n_classes: int = 5, side: int = 40) -> tuple[Map, Map]:
    """Return scores of two sides, alike but not equal : (classes, rows, columns)."""
    rng = np.random.default_rng(seed)
    coarse = rng.normal(size=(n_classes, side // 8, side // 8))
    scores = np.kron(coarse, np.ones((1, 8, 8)))
    return scores + rng.normal(0, 0.3, scores.shape), scores + rng.normal(0, 0.1, scores.shape)


@pytest.mark.unit
def test_a_moved_boundary_costs_overlap() -> None:
    """10 columns of 20, moved by one: IoU 9/10 and 10/11, 20 of 400 pixels changed, the boundary still found."""
    found = _compared(_halves(9), _halves(10))
    assert found["divergence"] == pytest.approx(1 - (9 / 10 + 10 / 11) / 2)
    assert found["changed"] == 0.05
    assert found["flip"] == 1
    assert (found["worst_iou"], found["worst_class"]) == (0.9, 0)
    assert found["boundary_loss"] == 0
    assert (found["gained"], found["lost"]) == ([], [])
    assert _compared(_halves(9), _halves(10), tolerance=0.05)["flip"] == 0


@pytest.mark.unit
@pytest.mark.parametrize(("moved", "boundary", "loss"), [(1, 1, 0), (3, 2, 1), (1, 0, 1), (0, 0, 0)])
def test_a_boundary_is_found_within_its_tolerance(moved: int, boundary: int, loss: float) -> None:
    """A straight one is found whole or not at all."""
    assert _compared(_halves(10 + moved), _halves(10), boundary=boundary)["boundary_loss"] == loss


@pytest.mark.unit
def test_classes_that_appear_and_disappear_are_reported() -> None:
    """One that is on one side alone has no overlap."""
    candidate, reference = _halves(10), _halves(10)
    candidate[0, 0], reference[19, 19] = 7, 4
    found = _compared(candidate, reference)
    assert (found["gained"], found["lost"]) == ([7], [4])
    assert found["divergence"] == pytest.approx(1 - 2 * (199 / 200) / 4)
    assert (found["worst_class"], found["worst_iou"]) == (4, 0)


@pytest.mark.unit
def test_what_both_sides_ignore_is_not_looked_at() -> None:
    """What one side alone ignores is a change; a negative class is ignored always."""
    reference = _halves(10)
    candidate = reference.copy()
    candidate[:2, 10:] = 0
    found = _compared(candidate, reference, background=0)
    assert found["changed"] == 0.1  # 20 of the 200 pixels that are not background on both
    assert found["divergence"] == pytest.approx(0.1)
    negative = _compared(candidate - 1, reference - 1)
    assert (negative["changed"], negative["divergence"]) == (0.1, found["divergence"])
    nothing = np.zeros((4, 4), dtype=np.uint8)
    found = _compared(nothing, nothing, background=0)
    assert (found["flip"], found["divergence"], found["worst_iou"]) == (0, 0, None)


@pytest.mark.unit
def test_an_image_of_one_class_has_no_boundary() -> None:
    """Nor is one missed; another class that fills it is all wrong."""
    zero, one = np.zeros((5, 6), dtype=np.int64), np.ones((5, 6), dtype=np.int64)
    assert _compared(one, one)["boundary_loss"] == 0
    found = _compared(one, zero)
    assert (found["boundary_loss"], found["divergence"], found["changed"]) == (1, 1, 1)
    assert _compared(_halves(3), np.zeros((20, 20), dtype=np.int64))["boundary_loss"] == 1


@pytest.mark.unit
def test_every_layout_is_the_same_map() -> None:
    """Scores with the classes first or last, of any width, and class numbers, also as floating point."""
    candidate, reference = _blobs(0)
    expected = _compared(candidate.argmax(axis=0), reference.argmax(axis=0))
    assert 0 < expected["divergence"] < 1
    assert _compared(candidate, reference) == expected
    assert _compared(candidate.argmax(axis=0), reference) == expected
    last, other = (np.moveaxis(side, 0, -1) for side in (candidate, reference))
    for axis in (3, -1):
        assert _compared(last, other, classes_axis=axis) == expected
    numbers = [side.argmax(axis=0) for side in (candidate, reference)]
    as_floats = [side.astype(np.float32) for side in numbers]
    assert _compared(*as_floats, classes_axis=0) == expected
    assert _compared(as_floats[0][..., np.newaxis], as_floats[1][np.newaxis], classes_axis=0) == expected
    assert _compared(numbers[0].astype(np.uint8)[np.newaxis], numbers[1]) == expected
    half, other = (side.astype(np.float16) for side in (candidate, reference))
    assert _compared(half, other) == _compared(half.argmax(axis=0), other.argmax(axis=0))


@pytest.mark.unit
def test_class_numbers_may_be_half_precision() -> None:
    """Whose range ends below the largest class number that is allowed."""
    numbers = np.array([[[0, 1], [2, 2048]]], dtype=np.float16)
    options = Segmentation(classes_axis=0)
    found = SegmentationComparator(options, OutputKind.LOGITS).compare(numbers, numbers.astype(np.int64))
    assert found.flip.tolist() == [0]


@pytest.mark.unit
@pytest.mark.parametrize("axis", [1, -1])
def test_of_equal_scores_the_first_class_has_the_pixel(axis: int) -> None:
    """In either layout."""
    scores = np.moveaxis(np.array([0.0, 2.0, 1.0, 2.0]).reshape(4, 1, 1), 0, min(axis, 0))
    found = _compared(scores, np.array([[1]]), classes_axis=axis)
    assert found["divergence"] == 0


@pytest.mark.unit
def test_one_channel_is_a_mask() -> None:
    """Logits above 0, probabilities above 0.5."""
    logits = np.array([[-1.0, 0.1], [3.0, -0.2]], dtype=np.float32)
    mask = logits > 0
    for form in (logits, logits[np.newaxis]):
        found = _compared(form, mask)
        assert (found["divergence"], found["changed"]) == (0, 0)
    probabilities = 1 / (1 + np.exp(-logits))
    found = _compared(probabilities, mask, OutputKind.PROBABILITIES)
    assert found["divergence"] == 0
    assert _compared(probabilities, mask)["divergence"] > 0
    with pytest.raises(QuarantineError, match=r"-1 to 3, which are not probabilities.*output_kind"):
        _compared(logits, mask, OutputKind.PROBABILITIES)


@pytest.mark.unit
@pytest.mark.parametrize("axis", [1, -1])
def test_what_is_not_finite_is_an_outcome(axis: int) -> None:
    """Of one pixel; but minus infinity rules a class out, and is finite."""
    good = np.stack([np.moveaxis(_blobs(seed)[0], 0, min(0, axis)) for seed in range(3)])
    bad = good.copy()
    bad[1, 2, 3, 1] = np.nan
    bad[2, 2, 3, 1] = np.inf
    comparator = SegmentationComparator(Segmentation(classes_axis=axis), OutputKind.LOGITS)
    found = comparator.compare(bad, good)
    assert found.candidate_finite.tolist() == [True, False, False]
    assert found.flip.tolist() == [0, 1, 1]
    np.testing.assert_array_equal(found.divergence, [0, np.nan, np.nan])
    assert found.detail["changed"].tolist() == [0, None, None]
    found = comparator.compare(good, bad)
    np.testing.assert_array_equal(found.flip, [0, np.nan, np.nan])
    masked = np.where(
        np.arange(good.shape[axis]).reshape(-1, *(1, 1) if axis > 0 else ()) == 2, -np.inf, good
    )
    assert comparator.compare(masked, good).candidate_finite.all()
    mask = np.where(good[:, 0] > 0, np.inf, 0.0)
    assert not comparator.compare(mask, good[:, 0]).candidate_finite.any()


@pytest.mark.unit
def test_the_record_can_hold_it() -> None:
    """Lists of classes included."""
    candidate, reference = (side[np.newaxis].argmax(axis=1) for side in _blobs(3))
    candidate[0, 0, 0] = 9
    comparator = SegmentationComparator(Segmentation(), OutputKind.LOGITS)
    found = comparator.compare(candidate, reference)
    (item,) = items_of(found, slices=[()], features=[{}], clusterings=[0])
    assert item.detail is not None
    detail = msgspec.json.decode(item.detail)
    assert detail["gained"] == [9]
    assert math.isclose(detail["changed"], found.detail["changed"][0])


@pytest.mark.unit
@pytest.mark.parametrize("shape", [(2, 0), (2, 0, 0), (2, 4, 0, 5), (2, 0, 4, 5)])
def test_a_map_without_pixels_is_an_outcome(shape: tuple[int, ...]) -> None:
    """However it is written: of the candidate a flip, of the reference nothing."""
    comparator = SegmentationComparator(Segmentation(), OutputKind.LOGITS)
    good = np.zeros((2, 3, 4, 5), dtype=np.float32)
    found = comparator.compare(np.empty(shape, np.float32), good)
    assert (found.flip.tolist(), found.candidate_finite.tolist()) == ([1, 1], [False, False])
    assert np.isnan(found.divergence).all()
    found = comparator.compare(good, np.empty(shape, np.float32))
    assert np.isnan(found.flip).all()
    assert not comparator.compare(*[np.empty(shape, np.float32)] * 2).candidate_finite.any()


@pytest.mark.unit
@pytest.mark.parametrize(
    ("candidate", "reference", "message"),
    [
        (np.zeros((2, 3, 4)), np.zeros((2, 3, 5)), "not maps of the same"),
        (np.zeros((2, 3, 4, 4)), np.zeros((2, 2, 4, 4)), "not maps of the same"),
        (np.zeros((2, 3)), np.zeros((2, 3)), "neither scores"),
        (np.full((1, 2, 2), b"a", dtype=object), np.zeros((1, 2, 2)), "not numbers"),
        (np.full((1, 2, 2), 1 << 20), np.zeros((1, 2, 2), dtype=np.int64), "largest allowed is 65535"),
    ],
)
def test_what_is_no_map_is_refused(candidate: Map, reference: Map, message: str) -> None:
    """With what is wrong."""
    comparator = SegmentationComparator(Segmentation(), OutputKind.LOGITS)
    with pytest.raises(QuarantineError, match=message):
        comparator.compare(candidate, reference)


@pytest.mark.integration
@pytest.mark.parametrize("seed", range(5))
def test_the_overlap_is_that_of_scikit_learn_and_torchmetrics(seed: int) -> None:
    """On the same maps, over the classes that there are."""
    import torch
    from sklearn.metrics import jaccard_score
    from torchmetrics.functional.segmentation import mean_iou

    candidate, reference = (side.argmax(axis=0) for side in _blobs(seed))
    found = _compared(candidate, reference)
    present = np.union1d(candidate, reference)
    expected = jaccard_score(reference.ravel(), candidate.ravel(), labels=present, average="macro")
    assert 0 < found["divergence"] < 1
    assert found["divergence"] == pytest.approx(1 - expected, abs=1e-12)
    assert found["changed"] == pytest.approx(float((candidate != reference).mean()), abs=1e-15)
    each = jaccard_score(reference.ravel(), candidate.ravel(), labels=present, average=None)
    assert found["worst_iou"] == pytest.approx(each.min())
    ours, other = (torch.from_numpy(side[np.newaxis]) for side in (candidate, reference))
    theirs = mean_iou(ours, other, num_classes=5, per_class=True, input_format="index")[0].numpy()
    assert found["divergence"] == pytest.approx(1 - theirs[present].mean(), abs=1e-6)
    ignoring = _compared(candidate, reference, background=int(present[0]))
    assert ignoring["divergence"] == pytest.approx(1 - each[1:].mean(), abs=1e-12)


@pytest.mark.unit
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("radius", [0, 1, 2, 5])
def test_the_boundary_score_is_that_of_distances(seed: int, radius: int) -> None:
    """Of SciPy's exact distance transform, class by class."""
    candidate, reference = (side.argmax(axis=0) for side in _blobs(seed))
    scores = []
    for label in np.union1d(candidate, reference):
        ours, theirs = (_boundary(side == label) for side in (candidate, reference))
        if not ours.any() or not theirs.any():
            scores.append(0.0)
            continue
        precision = (distance_transform_edt(~theirs)[ours] <= radius).mean()
        recall = (distance_transform_edt(~ours)[theirs] <= radius).mean()
        scores.append(2 * precision * recall / (precision + recall) if precision + recall else 0.0)
    found = _compared(candidate, reference, boundary=radius)
    assert found["boundary_loss"] == pytest.approx(1 - np.mean(scores), abs=1e-12)


def _boundary(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return the pixels of a mask beside one that is none of it."""
    around = np.pad(mask, 1, mode="edge")
    inner = around[:-2, 1:-1] & around[2:, 1:-1] & around[1:-1, :-2] & around[1:-1, 2:]
    return np.asarray(mask & ~inner)
