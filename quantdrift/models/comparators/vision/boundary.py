r"""The boundary score of classes in a segmentation.

The boundary of a class is its pixels with a pixel of another class among their four neighbours; the border of the image is
not a boundary. With P the share of the candidate's boundary of a class that is at most r pixels (Euclidean) from the
reference's boundary of that class, and R the share of the reference's at most r from the candidate's:

    F = 2 P R / (P + R)

(the BF score: Csurka, Larlus, Perronnin, 2013), in [0, 1]. If a class has a boundary on one side only, F is 0; if it has none
on either, F is 1 if both have the class (which then fills the image) and 0 otherwise.
"""

import numpy as np
import numpy.typing as npt

from quantdrift.models.comparators.protocol import Flags, Values
from quantdrift.models.comparators.vision.class_map import IGNORED, ClassMap

Counts = npt.NDArray[np.int64]


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
