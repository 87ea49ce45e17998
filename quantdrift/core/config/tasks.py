"""The options of a model's kind of output: one table for each task, `[models.<task>]`."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Final

from quantdrift.core.config.section import Section, about
from quantdrift.core.task import Task

Interest = tuple[str | int, ...]


class Classification(Section, frozen=True, kw_only=True):
    """Of a classifier (`task = "classification"`)."""

    interest: Annotated[
        Interest,
        about(
            "Classes of interest, by name in `labels` or by number from 0: flips into and out of them are told apart, as "
            "`gained` and `lost` in the detail of a comparison."
        ),
    ] = ()


class Multilabel(Section, frozen=True, kw_only=True):
    """Of a multi-label classifier (`task = "multilabel"`)."""

    threshold: Annotated[
        float | tuple[float, ...],
        about(
            "Probability above which a label is given, between 0 and 1: one for all labels, or a list with one for each."
        ),
    ] = 0.5
    interest: Annotated[
        Interest,
        about(
            "Labels of interest, by name in `labels` or by number from 0: their coming and going is told as `gained` and "
            "`lost` in the detail of a comparison."
        ),
    ] = ()

    @property
    def thresholds(self) -> tuple[float, ...]:
        """The thresholds as a list: of one entry, which is for all labels, or of one for each."""
        return self.threshold if isinstance(self.threshold, tuple) else (self.threshold,)


SECTIONS: Final[Mapping[str, tuple[Task, type[Section]]]] = MappingProxyType(
    {
        "classification": (Task.CLASSIFICATION, Classification),
        "multilabel": (Task.MULTILABEL, Multilabel),
    }
)
"""The tables by their key in `[[models]]`."""
