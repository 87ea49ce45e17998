"""The array type, and the specification of a reference's inputs and outputs."""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from quantdrift.core.errors import QuarantineError, QuarantineReason

Array = npt.NDArray[Any]


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The specification of one input or output of a reference.

    Parameters
    ----------
    dtype
        Element type; `object` holds text.
    shape
        Dimensions; None where any length will do.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]

    def __str__(self) -> str:
        dims = ", ".join("?" if dim is None else str(dim) for dim in self.shape)
        kind = "text" if self.dtype == np.dtype(object) else self.dtype.name
        return f"{self.name}: {kind}[{dims}]"


Outputs = Mapping[str, Array]


def output_error(detail: str) -> QuarantineError:
    """Return the error for outputs that cannot be compared."""
    return QuarantineError(QuarantineReason.OUTPUT, detail)
