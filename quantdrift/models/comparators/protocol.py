"""The protocol of comparators: outputs of both sides in, one divergence per item out."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from quantdrift.core.config.models import Model
from quantdrift.core.tasks import TaskRecord
from quantdrift.models.tensors.arrays import Array, Outputs

Values = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

_NONE: Values = np.empty(0)
_NONE.flags.writeable = False


class Divergences(msgspec.Struct, frozen=True, kw_only=True):
    """The divergences of many items. All arrays : (items,); an undefined value is NaN.

    Parameters
    ----------
    flip
        1 where the decision differs, 0 where not, float64.
    divergence
        The graded divergence of the task, >= 0 and possibly infinite, float64.
    candidate_finite, reference_finite
        Whether that side's output can be compared. NaN or infinity in an output is an outcome of its own, and no undefined
        value enters an average.
    tie
        1 where the decision differs only because several entries share a side's largest value, else 0, float64; empty for
        tasks that choose no entry. Whether `flip` counts such items is an option.
    topk, js, margin, candidate_margin, reference_margin
        Only for distributions over classes, float64; empty for other tasks.
    detail
        Further measures by name: numbers (undefined ones are not stored), flags, or objects that JSON can represent, such as
        lists.
    """

    flip: Values
    divergence: Values
    candidate_finite: Flags
    reference_finite: Flags
    tie: Values = _NONE
    topk: Values = _NONE
    js: Values = _NONE
    margin: Values = _NONE
    candidate_margin: Values = _NONE
    reference_margin: Values = _NONE
    detail: Mapping[str, npt.NDArray[Any]] = {}

    def part(self, begin: int, end: int) -> "Divergences":
        """Return the divergences of the items [begin, end)."""
        columns = {name: getattr(self, name) for name in self.__struct_fields__ if name != "detail"}
        return Divergences(
            **{name: column[begin:end] for name, column in columns.items()},
            detail={name: column[begin:end] for name, column in self.detail.items()},
        )


class Comparator(Protocol):
    """Compares outputs. Items of a batch do not influence each other, and their order does not matter."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs to compare; empty: the one that `models.output` selects."""
        ...

    def compare(self, candidate: Outputs, reference: Outputs) -> Divergences:
        """Return the divergence of each item.

        Parameters
        ----------
        candidate, reference
            The compared outputs of both sides by name : (items, ...) each. Texts come as objects of `bytes`.

        Raises
        ------
        QuarantineError
            Reason `output`: the outputs of at least one item cannot be compared. The caller then tries smaller parts of the
            batch.
        """
        ...


class ArrayComparator(Protocol):
    """Compares a single output; otherwise like `Comparator`."""

    def compare(self, candidate: Array, reference: Array) -> Divergences:
        """Return the divergence of each item of two arrays : (items, ...)."""
        ...


class TaskPlugin(TaskRecord, frozen=True, kw_only=True):
    """A task that a package adds, as its entry point in `quantdrift.tasks` names it; the name of the entry point is the task's.

    Parameters
    ----------
    measure, options
        As of `TaskRecord`: what a flip and the graded divergence are in words, and the type of `[models.options]`.
    comparator
        Returns a comparator from a model's configuration and its options. What takes long to import is imported in it: monitor
        and live page read the words of a task, and compare nothing.
    types
        Kinds of NumPy types that it compares, as `numpy.dtype.kind` has them, of the reference; empty: any.
    """

    comparator: Callable[[Model, Any], Comparator]
    types: str = ""


class SingleOutput:
    """A comparator of the one output that `models.output` selects."""

    outputs: tuple[str, ...] = ()

    def __init__(self, comparator: ArrayComparator) -> None:
        self._comparator = comparator

    def compare(self, candidate: Outputs, reference: Outputs) -> Divergences:
        """Return the divergence of each item."""
        (name,) = candidate
        return self._comparator.compare(candidate[name], reference[name])


def flags_where_known(flags: Flags, known: Flags) -> npt.NDArray[Any]:
    """Return flags for `Divergences.detail`; None, which is not stored, where they are unknown."""
    detail: npt.NDArray[Any] = flags.astype(object)
    detail[~known] = None
    return detail
