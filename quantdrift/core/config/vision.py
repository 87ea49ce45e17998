"""The options of tasks on images: how an output is read, and what counts as another decision."""

from enum import StrEnum
from typing import Annotated

from quantdrift.core.config.section import Section, about


class BoxFormat(StrEnum):
    """What the four numbers of a box are."""

    XYXY = "xyxy"  # two opposite corners, the smaller coordinates first
    XYWH = "xywh"  # the corner with the smallest coordinates, width, height
    CXCYWH = "cxcywh"  # the centre, width, height


class Activation(StrEnum):
    """What makes probabilities of the scores."""

    NONE = "none"  # they are some already
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"  # over the classes


class Column(StrEnum):
    """What a column of a table of objects holds."""

    BOX = "box"
    SCORE = "score"
    CLASS = "class"
    ITEM = "item"  # the number of the item in its batch
    OTHER = "-"


class Detection(Section, frozen=True, kw_only=True):
    """Of a detector of objects (`task = "detection"`): where they are, and which are the same."""

    detections: Annotated[
        str,
        about(
            "Output with one row per object, as `columns` says. Empty, with `boxes` empty: `models.output`."
        ),
    ] = ""
    columns: Annotated[
        tuple[Column, ...],
        about(
            "Columns of that output: four `box`, one `score`, and perhaps one `class` and one `item`, the number of the "
            "item in the batch where the rows of all items stand in one table; `-` is not looked at."
        ),
    ] = (Column.BOX,) * 4 + (Column.SCORE, Column.CLASS)
    boxes: Annotated[
        str, about("Output with the boxes, (items, boxes, 4), where each thing has an output of its own.")
    ] = ""
    scores: Annotated[
        str,
        about(
            "Output with their scores: (items, boxes), or (items, boxes, classes), of which the largest counts."
        ),
    ] = ""
    classes: Annotated[
        str, about("Output with their classes, (items, boxes). Empty: the scores tell them, or there is one.")
    ] = ""
    count: Annotated[
        str, about("Output with the number of objects of each item; further boxes are padding. Empty: none.")
    ] = ""
    box_format: Annotated[
        BoxFormat,
        about("`xyxy`, `xywh` or `cxcywh`. Which coordinate of a point comes first makes no difference."),
    ] = BoxFormat.XYXY
    activation: Annotated[
        Activation, about("What makes probabilities of the scores: `none`, `sigmoid` or `softmax`.")
    ] = Activation.NONE
    background: Annotated[int, about("The class that means that there is no object. -1: none.", ge=-1)] = -1
    score_threshold: Annotated[
        float,
        about(
            "From this score on an object counts. Its partner may have half of it, so that a score that crosses the "
            "threshold by rounding is no invented object.",
            ge=0,
            le=1,
        ),
    ] = 0.3
    iou: Annotated[
        float, about("Two boxes can be one object from this intersection over union on.", gt=0, le=1)
    ] = 0.5

    @property
    def item_column(self) -> int | None:
        """Which column tells the item of a row, None where the items are the first dimension."""
        return self.columns.index(Column.ITEM) if Column.ITEM in self.columns and not self.boxes else None
