"""How captured tensors become what a reference takes where names or types differ, as `models.references` says."""

from collections.abc import Mapping

import numpy as np

from quantdrift.core.config.schema import ReferenceInput
from quantdrift.shadow.tensors.arrays import Array, TensorSpec

_INTEGERS = "iu"


def sources(
    entries: tuple[ReferenceInput, ...], specs: Mapping[str, TensorSpec]
) -> dict[str, ReferenceInput]:
    """Return, per captured tensor, the input of the reference that is made of it."""
    given = {entry.name: entry for entry in entries}
    made = [given.get(name) or ReferenceInput(name=name) for name in specs]
    return {entry.captured or entry.name: entry for entry in made}


def converted(array: Array, entry: ReferenceInput, spec: TensorSpec) -> Array | None:
    """Return numbers as the type that the reference takes, None where they must not be cast.

    Unasked, floating point becomes wider floating point, and integers become wider integers.

    Parameters
    ----------
    array
        As captured, any shape.
    entry
        What the configuration says.
    spec
        What the reference takes.
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
    """Return what quantised integers stand for : float64, (array - zero_point) * scale."""
    return (array.astype(np.float64) - zero_point) * scale


def _cast(array: Array, spec: TensorSpec) -> Array | None:
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(spec.dtype)
        back = cast.astype(array.dtype)
    if array.dtype.kind == spec.dtype.kind == "f":
        # A finite number that becomes infinite is another input.
        overflown = np.isinf(cast) & np.isfinite(array.astype(np.float64))
        return None if overflown.any() else cast
    # An unsigned integer that was made of -1 comes back as -1, and yet is another number.
    return cast if np.array_equal(back, array) and np.array_equal(cast < 0, array < 0) else None
