"""The mapping of captured tensors to the reference's inputs where names or types differ (`models.references.inputs`)."""

from collections.abc import Mapping

import numpy as np

from quantdrift.core.config.schema import ReferenceInput
from quantdrift.models.tensors.arrays import Array, TensorSpec

_INTEGERS = "iu"


def sources(
    entries: tuple[ReferenceInput, ...], specs: Mapping[str, TensorSpec]
) -> dict[str, ReferenceInput]:
    """Return the reference's input for each captured tensor."""
    by_name = {entry.name: entry for entry in entries}
    entries_of_inputs = [by_name.get(name) or ReferenceInput(name=name) for name in specs]
    return {entry.captured or entry.name: entry for entry in entries_of_inputs}


def converted(array: Array, entry: ReferenceInput, spec: TensorSpec) -> Array | None:
    """Return an array in the reference's type, None if it must not be cast.

    Without `cast`, floating point becomes only wider floating point, and integers only wider integers.

    Parameters
    ----------
    array
        As captured, any shape.
    """
    if entry.scale:
        if array.dtype.kind not in _INTEGERS:
            return None
        return dequantised(array, entry.scale, entry.zero_point).astype(spec.dtype)
    if array.dtype == spec.dtype:
        return array
    if spec.dtype == np.dtype(object):
        return None
    floats = array.dtype.kind == spec.dtype.kind == "f"
    integers = {array.dtype.kind, spec.dtype.kind} <= set(_INTEGERS)
    if (floats or integers) and np.can_cast(array.dtype, spec.dtype, "safe"):
        return array.astype(spec.dtype)
    return _cast(array, spec) if entry.cast else None


def dequantised(array: Array, scale: float, zero_point: int) -> Array:
    """Return the numbers that quantised integers represent : float64, (array - zero_point) * scale."""
    return (array.astype(np.float64) - zero_point) * scale


def _cast(array: Array, spec: TensorSpec) -> Array | None:
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(spec.dtype)
        back = cast.astype(array.dtype)
    if array.dtype.kind == spec.dtype.kind == "f":
        # A finite number that becomes infinite would be another input.
        overflown = np.isinf(cast) & np.isfinite(array.astype(np.float64))
        return None if overflown.any() else cast
    # The sign too: -1 cast to an unsigned integer and back is -1 again, but the reference would get another number.
    return cast if np.array_equal(back, array) and np.array_equal(cast < 0, array < 0) else None
