r"""The comparator for segmentation: the class of each pixel on both sides, per item, in float64.

With A the candidate's pixels of a class and B the reference's, IoU = |A and B| / |A or B|, over the classes that at least one
side has:

- `divergence` = 1 - mean of IoU: the loss of mIoU (Jaccard, 1901; as `jaccard_score` of scikit-learn with `macro`), in
  [0, 1], 0 if the maps are equal or both sides ignore every pixel.
- `flip` = 1 if the share of changed pixels is above the tolerance.

In `detail`:

- `changed`: share of the pixels whose class differs, in [0, 1], of those that at least one side does not ignore.
- `worst_iou`, `worst_class`: the class with the smallest IoU; of equal ones the first.
- `boundary_loss` = 1 - mean of F over the same classes, in [0, 1], with F as below.
- `gained`, `lost`: the classes that only the candidate, or only the reference has, at most 16 of them.

All measures are symmetric, except that `gained` and `lost` change places. A pixel that only one side ignores is changed, and
enlarges the union of the other side's class, so ignoring pixels cannot hide differences.

A side is *finite* if it has pixels and the largest score of every pixel is finite. Where only the candidate is not finite,
`flip` is 1 and all else is undefined; where the reference is not finite, everything is undefined.

The boundary of a class is its pixels with a pixel of another class among their four neighbours; the border of the image is
not a boundary. With P the share of the candidate's boundary of a class that is at most r pixels (Euclidean) from the
reference's boundary of that class, and R the share of the reference's at most r from the candidate's:

    F = 2 P R / (P + R)

(the BF score: Csurka, Larlus, Perronnin, 2013), in [0, 1]. If a class has a boundary on one side only, F is 0; if it has none
on either, F is 1 if both have the class (which then fills the image) and 0 otherwise.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from quantdrift.core.config.models import OutputKind
from quantdrift.core.config.vision import Segmentation
from quantdrift.models.comparators.numbers import is_empty
from quantdrift.models.comparators.protocol import Divergences, Flags, Values
from quantdrift.models.comparators.vision.class_map import IGNORED, ClassMap, MapReader
from quantdrift.models.tensors.arrays import Array, output_error

MOST_LISTED = 16
Counts = npt.NDArray[np.int64]


class _ItemMeasures(msgspec.Struct, frozen=True, kw_only=True):
    """The measures of one item; None where undefined."""

    divergence: float
    changed: float
    boundary_loss: float
    worst_iou: float | None
    worst_class: int | None
    gained: list[int]
    lost: list[int]


TOLERANCE = 0.02
"""Share of the pixels of a flip where `models.tolerance` is not given."""


class SegmentationComparator:
    """Compares maps of classes.

    Parameters
    ----------
    options
        `models.segmentation`.
    output_kind
        Whether a score for one class is a logit (a pixel has the class above 0) or a probability (above 0.5).
    tolerance
        An item flips when more than this share of its pixels has another class.
    background
        Class that is ignored where both sides have it; -1: none.
    """

    def __init__(
        self,
        options: Segmentation,
        output_kind: OutputKind,
        *,
        tolerance: float = TOLERANCE,
        background: int = -1,
    ) -> None:
        self._options = options
        self._tolerance = tolerance
        self._reader = MapReader(options, output_kind, background)

    def compare(self, candidate: Array, reference: Array) -> Divergences:
        """Return the divergence of each item. Items are compared one by one, because maps are large.

        Parameters
        ----------
        candidate, reference
            Scores (items, classes, rows, columns), the classes where `classes_axis` says; or scores of one class (items,
            rows, columns), floating point; or class numbers (items, rows, columns), integers. The sides may differ.

        Raises
        ------
        QuarantineError
            Reason `output`: an output has no known layout, or the numbers of items, rows, columns or classes differ.
        """
        read = [
            self._readable(array, side)
            for array, side in ((candidate, "candidate"), (reference, "reference"))
        ]
        (n_q, shape), (n_p, other_shape) = (own or other or (0, ()) for own, other in (read, read[::-1]))
        differ = n_q > 1 and n_p > 1 and n_q != n_p
        if len(candidate) != len(reference) or shape != other_shape or differ:
            raise output_error(
                f"the candidate's output is {list(candidate.shape)}, the reference's {list(reference.shape)}: they are not "
                "maps of the same pixels and classes"
            )
        n_items = len(candidate)
        q_finite, p_finite = np.ones(n_items, dtype=np.bool_), np.ones(n_items, dtype=np.bool_)
        figures: list[_ItemMeasures | None] = []
        for item in range(n_items):
            q_map = self._reader.read(candidate[item], n_q, shape, "candidate") if read[0] else None
            p_map = self._reader.read(reference[item], n_p, shape, "reference") if read[1] else None
            q_finite[item], p_finite[item] = q_map is not None, p_map is not None
            figures.append(None if q_map is None or p_map is None else self._figures(q_map, p_map))
        changed = np.array([np.inf if figure is None else figure.changed for figure in figures])
        flip = (changed > self._tolerance).astype(np.float64)
        return Divergences(
            flip=np.where(p_finite, flip, np.nan),
            divergence=np.array([np.nan if figure is None else figure.divergence for figure in figures]),
            candidate_finite=q_finite,
            reference_finite=p_finite,
            detail=_detail(figures),
        )

    def _readable(self, output: Array, side: str) -> tuple[int, tuple[int, ...]] | None:
        """Return the layout of a side, None if it is empty."""
        return None if is_empty(output) else self._reader.layout(output, side)

    def _figures(self, candidate: ClassMap, reference: ClassMap) -> _ItemMeasures:
        n_classes = 1 + max(int(candidate.max()), int(reference.max()))
        equal = candidate == reference
        n_looked_at = int(np.count_nonzero((candidate >= 0) | (reference >= 0)))
        if not n_classes:
            return _ItemMeasures(
                divergence=0.0,
                changed=0.0,
                boundary_loss=0.0,
                worst_iou=None,
                worst_class=None,
                gained=[],
                lost=[],
            )
        in_q, in_p, in_both = (
            np.bincount(labels.ravel() + 1, minlength=n_classes + 1)[1:]
            for labels in (candidate, reference, candidate[equal])
        )
        classes = np.flatnonzero(in_q + in_p)
        ious = in_both[classes] / (in_q + in_p - in_both)[classes]
        scores = boundary_scores(candidate, reference, radius=self._options.boundary, n_classes=n_classes)
        worst = int(ious.argmin())
        return _ItemMeasures(
            divergence=float(1.0 - ious.mean()),
            changed=int(np.count_nonzero(~equal)) / n_looked_at,
            boundary_loss=float(1.0 - scores[classes].mean()),
            worst_iou=float(ious[worst]),
            worst_class=int(classes[worst]),
            gained=classes[in_p[classes] == 0][:MOST_LISTED].tolist(),
            lost=classes[in_q[classes] == 0][:MOST_LISTED].tolist(),
        )


def _detail(figures: list[_ItemMeasures | None]) -> Mapping[str, Any]:
    """Return the further measures by name : (items,) each, objects; None where undefined."""
    names = ("changed", "boundary_loss", "worst_iou", "worst_class", "gained", "lost")
    columns = {name: np.full(len(figures), None, dtype=object) for name in names}
    for item, figure in enumerate(figures):
        for name in names if figure is not None else ():
            columns[name][item] = getattr(figure, name)
    return columns


def boundary_scores(candidate: ClassMap, reference: ClassMap, *, radius: int, n_classes: int) -> Values:
    """Return F of each class : (classes,), float64; 0 for a class on neither side.

    Parameters
    ----------
    candidate, reference
        (rows, columns), the class of each pixel, -1 where it is ignored.
    radius
        r, in pixels.
    n_classes
        Above all class numbers.
    """
    candidate_edges, reference_edges = edges(candidate), edges(reference)
    n_candidate_matched, n_candidate = _count_matched(candidate_edges, reference_edges, radius, n_classes)
    n_reference_matched, n_reference = _count_matched(reference_edges, candidate_edges, radius, n_classes)
    precision, recall = (
        n_candidate_matched / np.maximum(n_candidate, 1),
        n_reference_matched / np.maximum(n_reference, 1),
    )
    both = precision + recall
    scores = 2 * precision * recall / np.where(both > 0, both, 1.0)
    # A class without a boundary fills the image, or is not in it.
    corner = int(candidate[0, 0])
    if corner == reference[0, 0] != IGNORED and not n_candidate[corner] and not n_reference[corner]:
        scores[corner] = 1.0
    return scores


def edges(classes: ClassMap) -> ClassMap:
    """Return the class of each pixel on the boundary of its class, -1 for all others : (rows, columns)."""
    edge: Flags = np.zeros(classes.shape, dtype=np.bool_)
    for here, there in ((np.s_[1:], np.s_[:-1]), (np.s_[:, 1:], np.s_[:, :-1])):
        differs = classes[here] != classes[there]
        edge[here] |= differs
        edge[there] |= differs
    return np.where(edge, classes, np.int32(IGNORED))


def _count_matched(these: ClassMap, those: ClassMap, radius: int, n_classes: int) -> tuple[Counts, Counts]:
    """Return, per class, the number of boundary pixels near the other boundary, and the number of boundary pixels."""
    width = those.shape[1] + 2 * radius
    padded = np.pad(those, radius, constant_values=IGNORED).ravel()
    rows, columns = np.nonzero(these >= 0)
    labels = these[rows, columns]
    total = np.bincount(labels, minlength=n_classes)
    pixels = (rows + radius) * width + columns + radius
    # The nearest first: nearly all are found there, and only the others are searched further away.
    for dy, dx in _disk(radius):
        missing = padded[pixels + (dy * width + dx)] != labels
        pixels, labels = pixels[missing], labels[missing]
    return total - np.bincount(labels, minlength=n_classes), total


def _disk(radius: int) -> list[tuple[int, int]]:
    reach = range(-radius, radius + 1)
    offsets = [(dy, dx) for dy in reach for dx in reach if dy**2 + dx**2 <= radius**2]
    return sorted(offsets, key=lambda offset: offset[0] ** 2 + offset[1] ** 2)
