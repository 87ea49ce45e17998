"""The comparator for detectors, by hand and beside others' figures."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from pycocotools.mask import iou

from quantdrift.core.config.vision import Activation, BoxFormat, Column, Detection
from quantdrift.core.errors import QuarantineError
from quantdrift.models.comparators.protocol import Divergences
from quantdrift.models.comparators.vision.detection import MOST_OBJECTS, DetectionComparator, overlaps

Row = tuple[float, ...]
SEPARATE = Detection(boxes="boxes", scores="scores", classes="labels")
NONE = (0.0, 0.0, 0.0, 0.0, 0.0, -1.0)


def _table(*items: Sequence[Row]) -> dict[str, npt.NDArray[np.float32]]:
    """Return rows of x1, y1, x2, y2, score, class, filled up with padding."""
    most = max(len(rows) for rows in items)
    filled = [[*rows, *[NONE] * (most - len(rows))] for rows in items]
    return {"out": np.array(filled, dtype=np.float32).reshape(len(items), most, 6)}


def _compared(candidate: Sequence[Row], reference: Sequence[Row], **options: Any) -> dict[str, Any]:
    limits = {name: options.pop(name) for name in ("iou", "threshold", "background") if name in options}
    comparator = DetectionComparator(Detection(**options), **limits)
    found = comparator.compare(_table(candidate), _table(reference))
    return _told(found)


def _told(found: Divergences, item: int = 0) -> dict[str, Any]:
    detail = {name: column[item] for name, column in found.detail.items()}
    return {"flip": found.flip[item], "divergence": found.divergence[item], **detail}


@pytest.mark.unit
def test_a_shifted_box_loses_its_overlap() -> None:
    """A box of 10 by 10 moved by 2: IoU 80/120, so that much less quality, and no flip."""
    found = _compared([(2, 0, 12, 10, 0.75, 1)], [(0, 0, 10, 10, 0.5, 1)])
    assert found["flip"] == 0
    assert found["divergence"] == pytest.approx(1 / 3)
    assert found["box_shift"] == pytest.approx(1 / 3)
    assert found["centre_shift"] == pytest.approx(0.2)
    assert (found["score_shift"], found["score_change"]) == (0.25, 0.25)
    assert (found["n_candidate"], found["n_reference"]) == (1, 1)


@pytest.mark.unit
def test_missed_invented_and_changed_objects_are_counted_separately() -> None:
    """Two equal, one missed, one invented, one of another class: PQ = 2 / (2 + 2 / 2 + 2 / 2)."""
    same = [(0, 0, 10, 10, 0.9, 1), (20, 0, 30, 10, 0.8, 2)]
    reference = [*same, (40, 0, 50, 10, 0.7, 1), (60, 0, 70, 10, 0.6, 1)]
    candidate = [*same, (80, 0, 90, 10, 0.7, 1), (60, 0, 70, 10, 0.6, 3)]
    found = _compared(candidate, reference)
    assert (found["missed"], found["invented"], found["class_changed"]) == (1, 1, 1)
    assert found["divergence"] == pytest.approx(0.5)
    assert found["flip"] == 1
    assert _compared(candidate[3:], reference[3:])["flip"] == 1  # another class alone, too
    # Of the pairs of one class nothing moved.
    assert (found["box_shift"], found["score_shift"]) == (0, 0)


@pytest.mark.unit
@pytest.mark.parametrize(("score", "missed"), [(0.31, 0), (0.29, 0), (0.16, 0), (0.14, 1)])
def test_a_score_just_below_the_threshold_is_no_missed_object(score: float, missed: int) -> None:
    """A partner needs half the threshold; what is below on both sides is no object."""
    faint = (50.0, 50.0, 60.0, 60.0, 0.29, 1.0)
    there, back = (
        _compared(one, other)
        for one, other in (
            ([(0, 0, 10, 10, score, 1), faint], [(0, 0, 10, 10, 0.31, 1), faint]),
            ([(0, 0, 10, 10, 0.31, 1), faint], [(0, 0, 10, 10, score, 1), faint]),
        )
    )
    assert (there["missed"], back["invented"]) == (missed, missed)
    assert there["flip"] == back["flip"] == missed
    assert there["divergence"] == back["divergence"] == missed
    assert there["borderline"] == int(not missed and score < 0.3)


@pytest.mark.unit
def test_a_faint_double_does_not_take_the_place_of_an_object() -> None:
    """However well it fits: an object that counts comes first."""
    faint = (0, 0, 10, 10, 0.2, 1)
    found = _compared([(0, 0, 10, 10, 0.9, 1)], [faint, (2, 0, 12, 10, 0.9, 1)])
    assert (found["flip"], found["missed"], found["borderline"]) == (0, 0, 0)
    assert found["box_shift"] == pytest.approx(1 / 3)


@pytest.mark.unit
def test_the_best_pairs_are_found_where_the_nearest_are_not() -> None:
    """The nearest pair first would leave two objects alone."""
    reference = [(0, 0, 10, 10, 0.9, 1), (3, 0, 13, 10, 0.9, 1)]
    candidate = [(2, 0, 12, 10, 0.9, 1), (6, 0, 16, 10, 0.9, 1)]
    found = _compared(candidate, reference)
    assert (found["missed"], found["invented"]) == (0, 0)
    assert found["divergence"] == pytest.approx(1 - (8 / 12 + 7 / 13) / 2)


@pytest.mark.unit
def test_a_faint_object_of_another_class_does_not_count() -> None:
    """Nothing changed its class where one side says nothing."""
    found = _compared([(0, 0, 10, 10, 0.2, 2)], [(0, 0, 10, 10, 0.9, 1)])
    assert (found["missed"], found["class_changed"]) == (1, 0)


@pytest.mark.unit
def test_faint_doubles_do_not_part_what_is_equal() -> None:
    """Two pairs across the threshold would cover as many objects as one pair of those that count."""
    rows = [(0, 0, 1, 2, 0.31, 0), (0, 0, 1, 1, 0.2, 0)]
    found = _compared(rows, rows)
    assert (found["divergence"], found["borderline"], found["box_shift"]) == (0, 0, 0)


@pytest.mark.unit
@pytest.mark.parametrize("order", [1, -1])
def test_of_equal_partners_that_one_is_taken_whose_other_one_is_of_another_class(order: int) -> None:
    """Whichever comes first: nothing is called missed and invented that may have changed its class."""
    candidate = [(0, 0, 10, 10, 0.9, 0), (4, 0, 14, 10, 0.9, 0)]
    reference = [(2, 0, 12, 10, 0.9, 0), (-2, 0, 8, 10, 0.9, 1)]
    found = _compared(candidate[::order], reference)
    assert (found["missed"], found["invented"], found["class_changed"]) == (0, 0, 1)


@pytest.mark.unit
def test_of_equal_boxes_the_nearest_scores_are_one() -> None:
    """Two on one place, in another order: nothing changed."""
    rows = [(0, 0, 10, 10, 0.9, 1), (0, 0, 10, 10, 0.6, 1)]
    assert _compared(rows[::-1], rows)["score_change"] == 0


@pytest.mark.unit
def test_no_object_on_both_sides_is_no_divergence() -> None:
    """Nor is padding an object: score 0, a negative class, the background, or beyond the count."""
    reference = [
        (0.0, 0.0, 10.0, 10.0, 0.9, -1.0),
        (0.0, 0.0, 10.0, 10.0, 0.0, 1.0),
        (5.0, 5.0, 9.0, 9.0, 0.9, 7.0),
    ]
    found = _compared([], reference, background=7)
    assert (found["flip"], found["divergence"], found["n_reference"]) == (0, 0, 0)
    assert math.isnan(found["box_shift"])
    assert _compared([], reference)["missed"] == 1


@pytest.mark.unit
@pytest.mark.parametrize("shape", [(1, 0), (1, 0, 6)])
def test_an_empty_list_holds_no_objects(shape: tuple[int, ...]) -> None:
    """However it is written, alone or with scores and classes of its own: it is an answer, and all else is missed."""
    reference = _table([(0, 0, 10, 10, 0.9, 1)])
    found = DetectionComparator(Detection()).compare({"out": np.empty(shape, np.float32)}, reference)
    assert found.candidate_finite.all()
    assert (_told(found)["missed"], _told(found)["divergence"]) == (1, 1)
    one = np.ones((1, 1), np.float32)
    sides = {"boxes": reference["out"][:, :, :4], "scores": one, "labels": one}
    nothing = {name: np.empty((1, 0), np.float32) for name in sides}
    found = DetectionComparator(SEPARATE).compare(nothing, sides)
    assert (_told(found)["missed"], _told(found)["n_candidate"]) == (1, 0)


@pytest.mark.unit
def test_what_lies_beyond_the_count_is_not_looked_at() -> None:
    """Not even where it is no number."""
    outputs = {
        "boxes": np.array([[[0, 0, 4, 4], [np.nan] * 4]]),
        "scores": np.array([[0.5, np.inf]]),
        "labels": np.array([[3, 3]]),
        "n": np.array([[1]], dtype=np.int32),
    }
    comparator = DetectionComparator(Detection(boxes="boxes", scores="scores", classes="labels", count="n"))
    assert comparator.outputs == ("boxes", "scores", "labels", "n")
    found = comparator.compare(outputs, outputs)
    assert found.candidate_finite.all()
    assert _told(found)["n_candidate"] == 1
    more = {**outputs, "n": np.array([[2]], dtype=np.int32)}
    found = comparator.compare(more, outputs)
    assert (found.candidate_finite.tolist(), found.flip.tolist()) == ([False], [1.0])
    assert math.isnan(found.divergence[0])
    with pytest.raises(QuarantineError, match="counts more"):
        comparator.compare({**outputs, "n": np.array([[3]], dtype=np.int32)}, outputs)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("column", "value"),
    [(0, np.nan), (3, np.inf), (1, -np.inf), (4, np.nan), (4, np.inf), (5, np.nan), (5, np.inf)],
)
def test_what_is_not_finite_is_an_outcome(column: int, value: float) -> None:
    """Of the candidate a flip without a divergence, of the reference nothing at all."""
    good = _table([(0, 0, 10, 10, 0.9, 1)], [(0, 0, 10, 10, 0.9, 1)])
    bad = {"out": good["out"].copy()}
    bad["out"][1, 0, column] = value
    comparator = DetectionComparator(Detection())
    found = comparator.compare(bad, good)
    assert found.flip.tolist() == [0, 1]
    assert found.candidate_finite.tolist() == [True, False]
    assert found.detail["missed"].tolist() == [0, None]
    np.testing.assert_array_equal(found.divergence, [0, np.nan])
    found = comparator.compare(good, bad)
    np.testing.assert_array_equal(found.flip, [0, np.nan])
    assert found.reference_finite.tolist() == [True, False]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("box_format", "box"),
    [(BoxFormat.XYXY, (2, 4, 8, 6)), (BoxFormat.XYWH, (2, 4, 6, 2)), (BoxFormat.CXCYWH, (5, 5, 6, 2))],
)
def test_every_way_of_writing_a_box_is_the_same_box(box_format: BoxFormat, box: Row) -> None:
    """Moved by 3 of its width of 6: IoU 6/18."""
    moved = (box[0] + 3, box[1], box[2] + 3 * (box_format is BoxFormat.XYXY), box[3])
    found = _compared([(*moved, 0.9, 0)], [(*box, 0.9, 0)], box_format=box_format, iou=0.3)
    assert found["divergence"] == pytest.approx(2 / 3)
    assert found["centre_shift"] == pytest.approx(3 / math.sqrt(12))
    twice = {BoxFormat.XYXY: (-1, 3, 11, 7), BoxFormat.XYWH: (-1, 3, 12, 4), BoxFormat.CXCYWH: (5, 5, 12, 4)}
    found = _compared([(*twice[box_format], 0.9, 0)], [(*box, 0.9, 0)], box_format=box_format, iou=0.2)
    assert (found["divergence"], found["centre_shift"]) == (pytest.approx(3 / 4), 0)  # around the same centre


@pytest.mark.unit
def test_the_class_is_the_one_with_the_highest_score() -> None:
    """As probabilities, and as logits with a background."""
    boxes = np.array([[[0, 0, 4, 4], [6, 6, 9, 9]]], dtype=np.float32)
    probabilities = np.array([[[0.1, 0.7, 0.2], [0.05, 0.15, 0.8]]])
    options = Detection(boxes="b", scores="s")
    plain = DetectionComparator(options).compare(
        {"b": boxes, "s": probabilities}, {"b": boxes, "s": probabilities[:, :, ::-1]}
    )
    assert _told(plain)["class_changed"] == 1  # class 1 stays, class 2 was class 0
    softmax = DetectionComparator(
        Detection(boxes="b", scores="s", activation=Activation.SOFTMAX), background=2
    )
    logarithms = {"b": boxes, "s": np.log(probabilities)}
    told = _told(softmax.compare(logarithms, logarithms))
    assert (told["n_candidate"], told["flip"]) == (1, 0)  # 0.15 without the background
    # Behind a background that comes first the classes keep their numbers, and are none of it.
    first = DetectionComparator(Detection(boxes="b", scores="s"), background=0)
    sides = {"b": boxes, "s": probabilities}
    assert _told(first.compare(sides, sides))["n_candidate"] == 2
    sigmoid = DetectionComparator(Detection(boxes="b", scores="s", activation=Activation.SIGMOID))
    logits = np.log(probabilities / (1 - probabilities))
    found = sigmoid.compare({"b": boxes, "s": logits}, {"b": boxes, "s": logits[:, :, ::-1]})
    assert _told(found)["class_changed"] == 1
    logits[0, 0, 1] = np.inf
    assert not sigmoid.compare({"b": boxes, "s": logits}, logarithms).candidate_finite.any()


@pytest.mark.unit
def test_columns_may_come_in_any_order() -> None:
    """As some detectors end: item, class, score, box."""
    columns = (Column.ITEM, Column.CLASS, Column.SCORE, *(Column.BOX,) * 4, Column.OTHER)
    comparator = DetectionComparator(Detection(columns=columns))
    rows = np.array([[[0, 3, 0.9, 0, 0, 10, 10, 5]]], dtype=np.float32)
    other = rows.copy()
    other[0, 0, 1] = 4
    told = _told(comparator.compare({"out": rows}, {"out": other}))
    assert (told["class_changed"], told["divergence"]) == (1, 1)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({"boxes": np.zeros((2, 3, 5))}, r"no \[items, boxes, 4\]"),
        ({"scores": np.zeros((2, 4))}, "its boxes ask for"),
        ({"labels": np.zeros((2, 3), dtype=object)}, "not numbers"),
        (
            {"scores": np.full((2, 3), 0.9), "boxes": np.zeros((2, 3, 4)), "labels": np.zeros((2, 2))},
            "ask for",
        ),
    ],
)
def test_what_holds_no_objects_is_refused(outputs: dict[str, Any], message: str) -> None:
    """With the side and the output by name."""
    good = {"boxes": np.zeros((2, 3, 4)), "scores": np.zeros((2, 3)), "labels": np.zeros((2, 3))}
    with pytest.raises(QuarantineError, match=message):
        DetectionComparator(SEPARATE).compare({**good, **outputs}, good)


@pytest.mark.unit
def test_what_was_not_suppressed_is_refused() -> None:
    """Thousands of objects are none."""
    many = {"out": np.tile(np.array([0, 0, 1, 1, 0.9, 1.0]), (1, MOST_OBJECTS + 1, 1))}
    with pytest.raises(QuarantineError, match="threshold"):
        DetectionComparator(Detection()).compare(many, many)


def _scene(seed: int) -> tuple[list[Row], list[Row]]:
    """Return objects of a candidate and a reference, none of which can be taken for a neighbour; pixel coordinates."""
    rng = np.random.default_rng(seed)
    sides: tuple[list[Row], list[Row]] = ([], [])
    for place in range(36):
        corner = np.array(divmod(place, 6)) * 40.0
        size = rng.integers(10, 21, size=2)
        label = float(rng.integers(1, 4))
        for side in sides:
            if rng.random() < 0.8:
                begin = corner + rng.integers(0, 7, size=2)
                side.append((*begin, *(begin + size), float(rng.uniform(0.65, 1)), label))
    return sides


@pytest.mark.unit
def test_overlaps_are_those_of_the_coco_tools() -> None:
    """Of any boxes with an area."""
    rng = np.random.default_rng(4)
    first, second = (rng.uniform(0, 50, size=(n, 2)) for n in (30, 40))
    sides = [
        np.concatenate([side, side + rng.uniform(1, 30, side.shape)], axis=1) for side in (first, second)
    ]
    theirs = iou(
        *(np.concatenate([side[:, :2], side[:, 2:] - side[:, :2]], axis=1) for side in sides), [0] * 40
    )
    assert 0.1 < (theirs > 0).mean() < 0.9
    np.testing.assert_allclose(overlaps(*sides), theirs, atol=1e-12)


@pytest.mark.unit
@pytest.mark.parametrize("seed", range(5))
def test_matches_are_those_of_the_coco_tools(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Of objects that are far apart, where the order in which pairs are made says nothing."""
    candidate, reference = _scene(seed)
    found = _compared(candidate, reference)

    def entry(number: int, row: Row) -> dict[str, Any]:
        x1, y1, x2, y2, score, label = row
        box = [x1, y1, x2 - x1, y2 - y1]
        return {
            "id": number,
            "image_id": 1,
            "category_id": int(label),
            "bbox": box,
            "area": box[2] * box[3],
            "iscrowd": 0,
            "score": score,
        }

    truth = COCO()
    truth.dataset = {
        "images": [{"id": 1}],
        "categories": [{"id": number} for number in (1, 2, 3)],
        "annotations": [entry(number, row) for number, row in enumerate(reference, 1)],
    }
    truth.createIndex()
    evaluation = COCOeval(truth, truth.loadRes([entry(0, row) for row in candidate]), "bbox")
    evaluation.params.iouThrs = np.array([0.5])
    evaluation.params.areaRng, evaluation.params.areaRngLbl = [[0, 1e10]], ["all"]
    evaluation.evaluate()
    capsys.readouterr()
    matched = sum(int((one["dtMatches"] > 0).sum()) for one in evaluation.evalImgs if one)
    assert 0 < matched < min(len(candidate), len(reference))
    assert found["n_reference"] - found["missed"] - found["class_changed"] == matched
    assert found["n_candidate"] - found["invented"] - found["class_changed"] == matched


@pytest.mark.integration
@pytest.mark.parametrize("seed", range(5))
def test_the_quality_is_that_of_torchmetrics(seed: int) -> None:
    """Panoptic quality of the boxes drawn as segments, of one class on a background."""
    import torch
    from torchmetrics.functional.detection import panoptic_quality

    sides = [[(*row[:5], 1.0) for row in side] for side in _scene(seed)]
    drawn = []
    for side in sides:
        pixels = torch.zeros((1, 256, 256, 2), dtype=torch.long)
        for number, (x1, y1, x2, y2, *_) in enumerate(side, 1):
            pixels[0, int(x1) : int(x2), int(y1) : int(y2)] = torch.tensor([1, number])
        drawn.append(pixels)
    theirs = panoptic_quality(drawn[0], drawn[1], things={1}, stuffs={0}, return_per_class=True)
    found = _compared(*sides, iou=0.5 + 1e-9)  # theirs must be above 0.5
    assert 0.05 < found["divergence"] < 0.95
    assert found["divergence"] == pytest.approx(1 - float(theirs[0, 0]), abs=1e-6)
