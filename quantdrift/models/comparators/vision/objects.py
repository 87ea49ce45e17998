"""The reader of a detector's outputs: objects with boxes, scores and classes, from the supported layouts."""

import msgspec
import numpy as np
import numpy.typing as npt

from quantdrift.core.config.vision import Activation, BoxFormat, Column, Detection
from quantdrift.models.comparators.numbers import is_empty
from quantdrift.models.comparators.protocol import Flags, Values
from quantdrift.models.tensors.arrays import Array, Outputs, output_error

_MOST_CLASSES = 2**53  # the largest range of exact integers in float64


class Objects(msgspec.Struct, frozen=True, kw_only=True):
    """The objects of one item.

    Parameters
    ----------
    boxes
        Corners, the smaller coordinates first : (objects, 4), float64, in the unit of the output.
    scores
        (objects,), float64.
    classes
        (objects,), int64; 0 if the detector has one class.
    """

    boxes: Values
    scores: Values
    classes: npt.NDArray[np.int64]


class _Padded(msgspec.Struct, frozen=True, kw_only=True):
    """The outputs with padding: boxes (items, boxes, 4), scores and classes (items, boxes)."""

    boxes: Values
    scores: Values
    classes: Values


THRESHOLD = 0.3
"""Least score of an object where `models.threshold` is not given."""


class ObjectReader:
    """Reads a detector's outputs.

    Parameters
    ----------
    options
        `models.detection`: the layout of the outputs.
    threshold
        Least score of an object.
    background
        The class that means no object; -1: none.
    """

    def __init__(self, options: Detection, *, threshold: float = THRESHOLD, background: int = -1) -> None:
        self._options = options
        self._threshold, self._background = threshold, background

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs to read; empty: the one that `models.output` selects."""
        options = self._options
        named = (options.boxes, options.scores, options.classes, options.count)
        return tuple(name for name in named if name)

    def read(self, outputs: Outputs, side: str) -> list[Objects | None]:
        """Return the objects of each item with at least half the score threshold, None if an item is not finite.

        Boxes with a score of 0 or less, a negative class or the background class, and boxes beyond the count are padding.
        Empty outputs hold no objects.

        Parameters
        ----------
        outputs
            By name : (items, ...) each.
        side
            `candidate` or `reference`, for messages.

        Raises
        ------
        QuarantineError
            Reason `output`: they do not have the configured layout.
        """
        for name, array in outputs.items():
            if array.dtype.kind not in "fiu":
                raise output_error(
                    f"the {side}'s `{name}` is {array.dtype.name}, not numbers: check `models.detection`"
                )
        options = self._options
        objects = self._separate(outputs, side) if options.boxes else self._table(outputs, side)
        present = ~(objects.scores <= 0) & ~(objects.classes < 0)  # NaN is not padding
        if self._background >= 0:
            present &= objects.classes != self._background
        finite = (
            np.isfinite(objects.boxes).all(axis=2)
            & np.isfinite(objects.scores)
            & np.isfinite(objects.classes)
        )
        all_finite: Flags = np.asarray((finite | ~present).all(axis=1))
        is_object = present & finite & (objects.scores >= self._threshold / 2)
        return [
            Objects(
                boxes=_corners(objects.boxes[item, is_object[item]], options.box_format),
                scores=objects.scores[item, is_object[item]],
                classes=np.minimum(np.rint(objects.classes[item, is_object[item]]), _MOST_CLASSES).astype(
                    np.int64
                ),
            )
            if all_finite[item]
            else None
            for item in range(len(all_finite))
        ]

    def _table(self, outputs: Outputs, side: str) -> _Padded:
        """Read one output with a row for each object."""
        ((name, table),) = outputs.items()
        columns = self._options.columns
        if is_empty(table):
            table = np.empty((len(table), 0, len(columns)))
        if table.ndim < 2 or table.shape[-1] != len(columns):
            raise output_error(
                f"the {side}'s `{name}` is {list(table.shape)}, not [items, objects, {len(columns)}] as configured in "
                "`models.detection.columns`"
            )
        rows = table.reshape(len(table), -1, len(columns)).astype(np.float64)
        kinds = np.array(columns)
        classes = rows[:, :, kinds == Column.CLASS]
        scores = _activated(rows[:, :, columns.index(Column.SCORE)], self._options.activation)
        if Column.ITEM in columns:
            scores = np.where(rows[:, :, columns.index(Column.ITEM)] < 0, 0.0, scores)
        return _Padded(
            boxes=rows[:, :, kinds == Column.BOX],
            scores=scores,
            classes=classes[:, :, 0] if classes.shape[2] else np.zeros(scores.shape),
        )

    def _separate(self, outputs: Outputs, side: str) -> _Padded:
        """Read an output for each of boxes, scores and classes."""
        options = self._options
        boxes = outputs[options.boxes]
        if is_empty(boxes):
            boxes = np.empty((len(boxes), 0, 4))
        if boxes.ndim < 2 or boxes.shape[-1] != 4:
            raise output_error(f"the {side}'s `{options.boxes}` is {list(boxes.shape)}: no [items, boxes, 4]")
        boxes = boxes.reshape(len(boxes), -1, 4).astype(np.float64)
        shape = boxes.shape[:2]
        scores, classes = self._scored(outputs[options.scores], shape, side)
        if options.classes:
            classes = _shaped(outputs[options.classes], shape, options.classes, side).astype(np.float64)
        if options.count:
            counts = _shaped(outputs[options.count], shape[:1], options.count, side)
            if np.any((counts < 0) | (counts > shape[1])):
                raise output_error(f"the {side}'s `{options.count}` counts more objects than there are boxes")
            # If the count is NaN nothing is padding, and the item is not finite.
            beyond = np.arange(shape[1]) >= counts[:, np.newaxis]
            scores = np.where(beyond, 0.0, np.where(np.isnan(counts)[:, np.newaxis], np.nan, scores))
        return _Padded(boxes=boxes, scores=scores, classes=classes)

    def _scored(self, scores: Array, shape: tuple[int, ...], side: str) -> tuple[Values, Values]:
        """Return score and class of each box : (items, boxes)."""
        options = self._options
        n_boxes = int(np.prod(shape))
        each = scores.size // n_boxes if n_boxes else 1
        if options.classes or each == 1:
            if options.activation is Activation.SOFTMAX and n_boxes:
                raise output_error(f"the {side}'s `{options.scores}` has one class: no softmax can be taken")
            single = _shaped(scores, shape, options.scores, side).astype(np.float64)
            return _activated(single, options.activation), np.zeros(shape)
        of_classes = _shaped(scores, (*shape, each), options.scores, side)
        chosen = of_classes
        if 0 <= self._background < each:
            chosen = np.delete(of_classes, self._background, axis=2)
        # numpy treats NaN as the largest, so it is not lost.
        classes = chosen.argmax(axis=2)
        best = np.take_along_axis(chosen, classes[:, :, np.newaxis], axis=2)[:, :, 0].astype(np.float64)
        if 0 <= self._background < each:
            classes += classes >= self._background
        if options.activation is Activation.SOFTMAX:
            return _share(best, of_classes.astype(np.float64)), classes.astype(np.float64)
        return _activated(best, options.activation), classes.astype(np.float64)


def _shaped(array: Array, shape: tuple[int, ...], name: str, side: str) -> Array:
    """Return an output in the shape given by the boxes; dimensions of length 1 may be missing or added."""
    if array.size != np.prod(shape) or len(array) != shape[0]:
        raise output_error(f"the {side}'s `{name}` is {list(array.shape)}, its boxes ask for {list(shape)}")
    return array.reshape(shape)


def _activated(scores: Values, activation: Activation) -> Values:
    if activation is Activation.NONE:
        return scores
    with np.errstate(over="ignore"):
        sigmoid = 1.0 / (1.0 + np.exp(-scores))
    return np.where(
        scores == np.inf, np.inf, sigmoid
    )  # an infinite score stays infinite: the item is not finite


def _share(best: Values, logits: Values) -> Values:
    """Return the softmax of the best of the logits (..., classes); NaN where they overflow, 0 for padding."""
    with np.errstate(invalid="ignore"):
        largest = logits.max(axis=-1)
        total = np.exp(logits - largest[..., np.newaxis]).sum(axis=-1)
        share: Values = np.exp(best - largest) / total
    return np.where(np.isneginf(largest), 0.0, share)


def _corners(boxes: Values, box_format: BoxFormat) -> Values:
    if box_format is BoxFormat.XYXY:
        return boxes
    begin, size = boxes[:, :2], boxes[:, 2:]
    with np.errstate(over="ignore"):  # a box without an end overlaps no other
        if box_format is BoxFormat.CXCYWH:
            begin = begin - size / 2
        return np.concatenate([begin, begin + size], axis=1)
