r"""The comparator for detectors: the objects of both sides, matched one to one, per item, in float64.

`vision.matching` defines which objects match. With TP the number of pairs of one class, and FP and FN the numbers of the
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
"""

from collections.abc import Sequence

import numpy as np

from quantdrift.core.config.vision import Detection
from quantdrift.models.comparators.protocol import Divergences, Values
from quantdrift.models.comparators.vision.matching import Matching, match
from quantdrift.models.comparators.vision.objects import THRESHOLD, ObjectReader, Objects
from quantdrift.models.tensors.arrays import Outputs, output_error

# An assignment of more takes seconds, and so many objects are hardly a detector's final output.
MOST_OBJECTS = 1_000
_COUNTS = ("missed", "invented", "class_changed", "n_candidate", "n_reference", "borderline")
_SHIFTS = ("box_shift", "centre_shift", "score_shift", "score_change")

IOU = 0.5
"""The usual limit, of PASCAL VOC and of panoptic quality: above it no box has two partners."""


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
