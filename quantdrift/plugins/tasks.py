"""What the task of a plug-in and its comparator are made of; see docs/how-to/plugins.md."""

from quantdrift.core.config.models import Model
from quantdrift.core.errors import OperatorError, QuarantineError
from quantdrift.core.tasks import Measure, Task
from quantdrift.models.comparators.numbers import NumberPair, pair_of
from quantdrift.models.comparators.protocol import (
    ArrayComparator,
    Comparator,
    Divergences,
    SingleOutput,
    TaskPlugin,
)
from quantdrift.models.tensors.arrays import Array, Outputs, output_error

__all__ = [
    "Array",
    "ArrayComparator",
    "Comparator",
    "Divergences",
    "Measure",
    "Model",
    "NumberPair",
    "OperatorError",
    "Outputs",
    "QuarantineError",
    "SingleOutput",
    "Task",
    "TaskPlugin",
    "output_error",
    "pair_of",
]
