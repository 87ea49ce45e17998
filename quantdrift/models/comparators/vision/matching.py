r"""The matching of the objects of two sides.

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

import msgspec
import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

from quantdrift.models.comparators.protocol import Flags, Values
from quantdrift.models.comparators.vision.objects import Objects

# Far below a meaningful difference of IoU, far above rounding errors.
TIE = 1e-9


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
