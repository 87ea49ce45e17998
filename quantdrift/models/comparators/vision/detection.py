r"""The comparator for detectors: the objects of both sides, matched one to one, per item, in float64.

Which objects match is defined below. With TP the number of pairs of one class, and FP and FN the numbers of the
candidate's and the reference's objects that count and have no partner of their class:

- `divergence` = 1 - PQ, PQ = (sum of IoU over the pairs) / (TP + FP / 2 + FN / 2): panoptic quality (Kirillov et al.,
  2019) of the candidate's boxes against the reference's, all classes together. In [0, 1], 0 if the boxes are equal or
  neither side has an object.
- `flip` = 1 if an object was missed or invented, or has another class.

In `detail`:

- `missed`, `invented`, `class_changed`: numbers of objects. `n_candidate`, `n_reference`: numbers of objects that count.
  `borderline`: number of pairs with an object just below the threshold.
- `box_shift` = mean of 1 - IoU over the pairs, in [0, 1]; `centre_shift` = mean distance of the centres, in units of the
  size of the reference's box, the root of its area, >= 0.
- `score_shift` = mean of the candidate's score minus the reference's over the pairs, in [-1, 1] for probabilities;
  `score_change` = mean of its absolute value. Like the other shifts undefined if there is no pair.

All measures are symmetric, except for the signs and the scale of `centre_shift`. A side is *finite* if no box, padding
aside, has a NaN or infinite number. Where only the candidate is not finite, `flip` is 1 and all else is undefined; where the
reference is not finite, everything is undefined. An item without objects is a valid output.

The intersection over union of two boxes, IoU = |A and B| / |A or B|, in [0, 1], measures how far they agree; two equal boxes
without area have 1.

An object *counts* if its score reaches the threshold. It may be paired with an object that has at least half that score: if
rounding takes a score across the threshold, the object is neither missed nor invented. Two objects of which neither counts
are not paired.

Pairs are one to one and have at least the configured IoU. Of all matchings the one is used (an optimal assignment: Kuhn,
1955; solved as by Crouse, 2016, in SciPy) that has

1. the most counting objects in pairs of one class,
2. among those, the fewest of these pairs with an object that does not count,
3. among those, the largest sum of IoU over these pairs,
4. among those, the most pairs of two classes in which both objects count: the class has changed,
5. among those, the nearest scores, so that of equal boxes those with equal scores are paired.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

from quantdrift.core.config.vision import Detection
from quantdrift.models.comparators.protocol import Divergences, Flags, Values
from quantdrift.models.comparators.vision.objects import THRESHOLD, ObjectReader, Objects
from quantdrift.models.tensors.arrays import Outputs, output_error

# An assignment of more takes seconds, and so many objects are hardly a detector's final output.
MOST_OBJECTS = 1_000
_COUNTS = ("missed", "invented", "class_changed", "n_candidate", "n_reference", "borderline")
_SHIFTS = ("box_shift", "centre_shift", "score_shift", "score_change")

IOU = 0.5
"""The usual limit, of PASCAL VOC and of panoptic quality: above it no box has two partners."""
# Far below a meaningful difference of IoU, far above rounding errors.
TIE = 1e-9


class DetectionComparator:
    """Compares detections.

    Parameters
    ----------
    options
        `models.detection`.
    threshold
        Least score of an object.
    background
        The class that means no object; -1: none.
    iou
        Two boxes can be the same object from this intersection over union on.
    """

    def __init__(
        self, options: Detection, *, threshold: float = THRESHOLD, background: int = -1, iou: float = IOU
    ) -> None:
        self._threshold, self._iou = threshold, iou
        self._reader = ObjectReader(options, threshold=threshold, background=background)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs to compare; empty: the one that `models.output` selects."""
        return self._reader.outputs

    def compare(self, candidate: Outputs, reference: Outputs) -> Divergences:
        """Return the divergence of each item.

        Parameters
        ----------
        candidate, reference
            As `models.detection` names them : (items, ...) each. The sides may have room for different numbers of
            boxes.

        Raises
        ------
        QuarantineError
            Reason `output`: they are not objects, have different numbers of items, or an item has more than 1000 objects.
        """
        q_objects, p_objects = (
            self._reader.read(outputs, side)
            for outputs, side in ((candidate, "candidate"), (reference, "reference"))
        )
        _check_numbers(q_objects, p_objects)
        q_finite, p_finite = (
            np.array([objects is not None for objects in side]) for side in (q_objects, p_objects)
        )
        divergence = np.full(len(q_objects), np.nan)
        flip = np.where(p_finite, 1.0, np.nan)
        counts = np.full((len(_COUNTS), len(q_objects)), None, dtype=object)
        shifts = np.full((len(_SHIFTS), len(q_objects)), np.nan)
        for item, (candidate_objects, reference_objects) in enumerate(zip(q_objects, p_objects, strict=True)):
            if candidate_objects is None or reference_objects is None:
                continue
            matching = match(
                candidate_objects,
                reference_objects,
                iou=self._iou,
                score_threshold=self._threshold,
            )
            divergence[item] = max(1.0 - matching.quality, 0.0)
            flip[item] = matching.missed + matching.invented + matching.class_changed > 0
            counts[:, item] = [getattr(matching, name) for name in _COUNTS]
            shifts[:, item] = _shifts(candidate_objects, reference_objects, matching)
        return Divergences(
            flip=flip,
            divergence=divergence,
            candidate_finite=q_finite,
            reference_finite=p_finite,
            detail=dict(zip((*_COUNTS, *_SHIFTS), (*counts, *shifts), strict=True)),
        )


def _check_numbers(candidate: Sequence[Objects | None], reference: Sequence[Objects | None]) -> None:
    if len(candidate) != len(reference):
        raise output_error(
            f"the candidate's outputs have {len(candidate)} items, the reference's {len(reference)}"
        )
    most = max(
        (len(objects.scores) for objects in (*candidate, *reference) if objects is not None), default=0
    )
    if most > MOST_OBJECTS:
        raise output_error(
            f"an item has {most} objects with at least half of `models.threshold`, and at most "
            f"{MOST_OBJECTS} are matched: raise it, or name outputs after non-maximum suppression"
        )


class Matching(msgspec.Struct, frozen=True, kw_only=True):
    """The matched objects of one item.

    Parameters
    ----------
    candidate, reference
        Indices of the objects in each pair of one class : (pairs,).
    iou
        IoU of each such pair : (pairs,), float64.
    n_candidate, n_reference
        Number of objects that count.
    missed, invented, class_changed
        Number of the reference's and of the candidate's objects that count and have no partner; pairs of two classes.
    borderline
        Number of pairs of one class in which one object does not count.
    """

    candidate: npt.NDArray[np.int64]
    reference: npt.NDArray[np.int64]
    iou: Values
    n_candidate: int
    n_reference: int
    missed: int
    invented: int
    class_changed: int
    borderline: int

    @property
    def quality(self) -> float:
        """Panoptic quality, in [0, 1]; 1 if neither side has an object that counts."""
        n_pairs = len(self.iou)
        n_unmatched = self.missed + self.invented + 2 * self.class_changed
        return float(self.iou.sum()) / (n_pairs + n_unmatched / 2) if n_pairs + n_unmatched else 1.0


def match(candidate: Objects, reference: Objects, *, iou: float, score_threshold: float) -> Matching:
    """Return the matching of an item's objects.

    Parameters
    ----------
    candidate, reference
        Objects with at least half the threshold's score.
    iou
        Smallest IoU of a pair.
    score_threshold
        Smallest score of an object that counts.
    """
    q_counts, p_counts = candidate.scores >= score_threshold, reference.scores >= score_threshold
    ious = overlaps(candidate.boxes, reference.boxes)
    n_candidate, n_reference = int(q_counts.sum()), int(p_counts.sum())
    n_counting = np.add.outer(q_counts.astype(np.int64), p_counts.astype(np.int64))
    same = np.equal.outer(candidate.classes, reference.classes)
    allowed = (ious >= iou) & (n_counting > np.where(same, 0, 1))
    # One unit of each criterion outweighs the maximum of all later ones.
    most = 2.0 + min(ious.shape)
    of_class = n_counting * most**2 + (n_counting == 2) * most + ious
    score_difference = np.minimum(np.abs(np.subtract.outer(candidate.scores, reference.scores)), 1.0)
    values = np.where(same, of_class + TIE * (1.0 - score_difference), TIE * (2.0 + ious))
    rows, columns = _assigned(values, allowed)
    equal = same[rows, columns]
    q_counts[rows] = p_counts[columns] = False
    return Matching(
        candidate=rows[equal],
        reference=columns[equal],
        iou=ious[rows[equal], columns[equal]],
        n_candidate=n_candidate,
        n_reference=n_reference,
        missed=int(p_counts.sum()),
        invented=int(q_counts.sum()),
        class_changed=int((~equal).sum()),
        borderline=int((n_counting[rows, columns] == 1).sum()),
    )


def overlaps(first: Values, second: Values) -> Values:
    """Return the intersection over union of every box of `first` (n, 4) with every one of `second` (m, 4) : (n, m)."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        areas = [np.maximum(side[:, 2:] - side[:, :2], 0.0).prod(axis=1) for side in (first, second)]
        intersection = _shared(first, second, 0) * _shared(first, second, 1)
        union = np.add.outer(*areas) - intersection
        iou: Values = intersection / union
    without_area = ~(union > 0)
    if without_area.any():
        rows, columns = np.nonzero(without_area)
        iou[rows, columns] = (first[rows] == second[columns]).all(axis=1)
    return iou


def _shared(first: Values, second: Values, axis: int) -> Values:
    """Return the length of the overlap of every pair along an axis : (n, m)."""
    begin = np.maximum.outer(first[:, axis], second[:, axis])
    shared: Values = np.maximum(np.minimum.outer(first[:, 2 + axis], second[:, 2 + axis]) - begin, 0.0)
    return shared


def _assigned(values: Values, allowed: Flags) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the rows and columns of the allowed pairs with the largest sum of values."""
    rows, columns = np.flatnonzero(allowed.any(axis=1)), np.flatnonzero(allowed.any(axis=0))
    part = np.ix_(rows, columns)
    at_rows, at_columns = linear_sum_assignment(np.where(allowed[part], values[part], 0.0), maximize=True)
    rows, columns = rows[at_rows], columns[at_columns]
    real = allowed[rows, columns]
    return rows[real], columns[real]


def _shifts(candidate: Objects, reference: Objects, matching: Matching) -> tuple[float, ...]:
    """Return the means over the pairs, in the order of their names."""
    if not len(matching.iou):
        return (float("nan"),) * len(_SHIFTS)
    scores = candidate.scores[matching.candidate] - reference.scores[matching.reference]
    centres = _centre_shifts(candidate, reference, matching)
    return (
        float(np.mean(1.0 - matching.iou)),
        float(centres.mean()),
        float(scores.mean()),
        float(np.abs(scores).mean()),
    )


def _centre_shifts(candidate: Objects, reference: Objects, matching: Matching) -> Values:
    """Return the distance of the centres of each pair : (pairs,), in units of the size of the reference's box."""
    q_boxes, p_boxes = candidate.boxes[matching.candidate], reference.boxes[matching.reference]
    with np.errstate(over="ignore", invalid="ignore"):  # of boxes larger than float64 holds: undefined
        centre_distance = np.hypot(
            *((q_boxes[:, :2] + q_boxes[:, 2:] - p_boxes[:, :2] - p_boxes[:, 2:]) / 2).T
        )
        sizes = np.sqrt(np.abs((p_boxes[:, 2:] - p_boxes[:, :2]).prod(axis=1)))
        # A box without a size is only paired with an equal box.
        return np.where(centre_distance > 0, centre_distance / np.where(sizes > 0, sizes, 1.0), 0.0)
