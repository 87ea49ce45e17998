"""The reader of segmentation outputs: the class of each pixel, from scores or class numbers."""

import numpy as np
import numpy.typing as npt

from quantdrift.core.config.models import OutputKind
from quantdrift.core.config.vision import Segmentation
from quantdrift.models.comparators.numbers import TOLERANCE
from quantdrift.models.tensors.arrays import Array, output_error

ClassMap = npt.NDArray[np.int32]

IGNORED = -1
MOST_CLASSES = 65_536


class MapReader:
    """Reads maps of classes, one item at a time.

    Parameters
    ----------
    options
        `models.segmentation`.
    output_kind
        Whether a score for one class is a logit or a probability.
    background
        Class that is ignored where both sides have it; -1: none.
    """

    def __init__(self, options: Segmentation, output_kind: OutputKind, background: int = -1) -> None:
        self._options = options
        self._background = background
        self._kind = output_kind
        self._threshold = 0.0 if output_kind is OutputKind.LOGITS else 0.5

    def layout(self, output: Array, side: str) -> tuple[int, tuple[int, ...]]:
        """Return the number of classes with scores, 0 if the output holds class numbers, and (rows, columns).

        Parameters
        ----------
        output
            (items, ...).
        side
            `candidate` or `reference`, for messages.

        Raises
        ------
        QuarantineError
            Reason `output`: it is not a map of classes.
        """
        if output.dtype.kind not in "fiub":
            raise output_error(
                f"the {side}'s output is {output.dtype.name}, not numbers: check `models.output`"
            )
        shape = output.shape[1:]
        if output.ndim == 4 and self._options.classes_axis:
            axis = self._axis()
            shape = (*shape[:axis], *shape[axis + 1 :])
            n_classes = output.shape[axis + 1]
        elif output.ndim == 4 and 1 in {shape[0], shape[-1]}:
            shape = shape[1:] if shape[0] == 1 else shape[:-1]
            n_classes = 1
        elif output.ndim == 3:
            n_classes = 1
        else:
            raise output_error(
                f"the {side}'s output is {list(output.shape)}: neither scores [items, classes, rows, columns] nor classes "
                "[items, rows, columns]; set `models.segmentation.classes_axis`"
            )
        if n_classes == 1 and (output.dtype.kind in "iub" or not self._options.classes_axis):
            n_classes = 0
        return n_classes, shape

    def read(self, item: Array, n_classes: int, shape: tuple[int, ...], side: str) -> ClassMap | None:
        """Return the class of each pixel : (rows, columns), -1 where it is ignored; None if the item is not finite.

        Of equal scores the first class wins the pixel. A score of minus infinity excludes a class.

        Parameters
        ----------
        item
            One item of the output.
        n_classes, shape
            Its layout.
        side
            `candidate` or `reference`, for messages.

        Raises
        ------
        QuarantineError
            Reason `output`: a class number above 65535, or values configured as probabilities are not.
        """
        if n_classes > 1:
            axis = self._axis()
            labels = _last(item) if axis == 2 else _first(np.moveaxis(item, axis, 0))
        elif not np.isfinite(item).all():
            return None
        elif n_classes == 1:
            self._check(item, side)
            labels = (item.reshape(shape) > self._threshold).astype(np.int32)
        else:
            labels = _numbers(item.reshape(shape), side)
        if labels is None:
            return None
        if self._background >= 0:
            labels[labels == self._background] = IGNORED
        return labels

    def _check(self, scores: Array, side: str) -> None:
        """Refuse scores that are configured as probabilities and are not."""
        low, high = float(scores.min()), float(scores.max())
        if self._kind is OutputKind.PROBABILITIES and (low < -TOLERANCE or high > 1 + TOLERANCE):
            raise output_error(
                f"the {side}'s output has values from {low:.3g} to {high:.3g}, which are not probabilities: if they are "
                "logits, set `models.output_kind`; if they are class numbers, set `models.segmentation.classes_axis = 0`"
            )

    def _axis(self) -> int:
        """Return the dimension of an item that counts the classes."""
        axis = self._options.classes_axis
        return 2 if axis < 0 else axis - 1


def _first(scores: Array) -> ClassMap | None:
    """Return the class with the largest score : (rows, columns), of scores (classes, rows, columns).

    Plane by plane: `argmax` would copy all scores to make the classes contiguous.
    """
    labels = np.zeros(scores.shape[1:], dtype=np.uint8 if len(scores) <= 256 else np.int32)
    best = _exact(scores[0]).copy()
    for number in range(1, len(scores)):
        plane = _exact(scores[number])
        np.putmask(labels, plane > best, number)
        np.maximum(best, plane, out=best)  # NaN stays
    return labels.astype(np.int32) if np.isfinite(best).all() else None


def _last(scores: Array) -> ClassMap | None:
    """Return the class with the largest score : (rows, columns), of scores (rows, columns, classes)."""
    labels = scores.argmax(axis=2)
    best = np.take_along_axis(scores, labels[:, :, np.newaxis], axis=2)
    return labels.astype(np.int32) if np.isfinite(best).all() else None


def _exact(plane: Array) -> Array:
    """Return the numbers in a type that compares fast: float32 for float16."""
    return plane.astype(np.float32) if plane.dtype == np.float16 else plane


def _numbers(numbers: Array, side: str) -> ClassMap:
    if numbers.max(initial=0).item() >= MOST_CLASSES:  # FP16 does not hold the bound
        raise output_error(
            f"the {side}'s output has the class number {numbers.max()}, the largest allowed is {MOST_CLASSES - 1}: check "
            "`models.output` and `models.segmentation.classes_axis`"
        )
    rounded = np.rint(numbers) if numbers.dtype.kind == "f" else numbers
    return (
        np.maximum(rounded, IGNORED).astype(np.int32)
        if rounded.dtype.kind in "fi"
        else rounded.astype(np.int32)
    )
