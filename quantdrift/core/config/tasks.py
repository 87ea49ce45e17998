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


SECTIONS: Final[Mapping[str, tuple[Task, type[Section]]]] = MappingProxyType(
    {
        "classification": (Task.CLASSIFICATION, Classification),
    }
)
"""The tables by their key in `[[models]]`."""
