"""Options of object detection and segmentation: how to read an output, and what counts as another decision."""

from enum import StrEnum
from typing import Annotated

from quantdrift.core.config.section import Section, about


class BoxFormat(StrEnum):
    """Meaning of the four numbers of a box."""

    XYXY = "xyxy"  # two opposite corners, the smaller coordinates first
    XYWH = "xywh"  # the corner with the smallest coordinates, width, height
    CXCYWH = "cxcywh"  # the centre, width, height


class Activation(StrEnum):
    """Function that turns scores into probabilities."""

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
    """For an object detector (`task = "detection"`): where its outputs are, and which objects are the same."""

    columns: Annotated[
        tuple[Column, ...],
        about(
            "Columns of the output with one row for each object, if there are no `boxes`: four `box`, one `score`, and optionally one `class` and one "
            "`item`, the item's number in the batch if one table holds the rows of all items; `-` "
            "is ignored."
        ),
    ] = (Column.BOX,) * 4 + (Column.SCORE, Column.CLASS)
    boxes: Annotated[
        str,
        about("Output with the boxes, (items, boxes, 4), if boxes, scores and classes are separate outputs."),
    ] = ""
    scores: Annotated[
        str,
        about(
            "Output with the scores: (items, boxes), or (items, boxes, classes), of which the largest counts."
        ),
    ] = ""
    classes: Annotated[
        str, about("Output with the classes, (items, boxes). Empty: from the scores, or there is one class.")
    ] = ""
    count: Annotated[
        str, about("Output with the number of objects of each item; further boxes are padding. Empty: none.")
    ] = ""
    box_format: Annotated[
        BoxFormat,
        about("`xyxy`, `xywh` or `cxcywh`. The order of the two coordinates of a point does not matter."),
    ] = BoxFormat.XYXY
    activation: Annotated[
        Activation, about("What turns scores into probabilities: `none`, `sigmoid` or `softmax`.")
    ] = Activation.NONE

    @property
    def item_column(self) -> int | None:
        """Which column tells the item of a row, None where the items are the first dimension."""
        return self.columns.index(Column.ITEM) if Column.ITEM in self.columns and not self.boxes else None


class Segmentation(Section, frozen=True, kw_only=True):
    """For a model that gives a class for each pixel (`task = "segmentation"`)."""

    classes_axis: Annotated[
        int,
        about(
            "Dimension of the scores that counts classes; -1 is the last. 0: the output holds class numbers, as integers of shape (items, rows, columns) always do.",
            ge=-1,
            le=3,
        ),
    ] = 1
    boundary: Annotated[
        int, about("Distance up to which a boundary counts as found.", "pixels", ge=0, le=20)
    ] = 2
