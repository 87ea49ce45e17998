"""The classes of interest, such as `fraud`, whose gains and losses are reported separately."""

from collections.abc import Sequence

import numpy as np

from quantdrift.models.comparators.protocol import Flags
from quantdrift.models.tensors.arrays import output_error


def numbers_of(interest: Sequence[str | int], labels: Sequence[str]) -> tuple[int, ...]:
    """Return the class numbers of interest; the configuration names them by number or by label."""
    return tuple(labels.index(label) if isinstance(label, str) else label for label in interest)


def among(numbers: Sequence[int], n_classes: int) -> Flags:
    """Return whether each class is of interest : (n_classes,).

    Raises
    ------
    QuarantineError
        Reason `output`: the model does not have such a class.
    """
    if max(numbers, default=0) >= n_classes:
        raise output_error(
            f"the configuration's `interest` names class {max(numbers)}, but the output has {n_classes} classes"
        )
    flags = np.zeros(n_classes, dtype=np.bool_)
    flags[list(numbers)] = True
    return flags
