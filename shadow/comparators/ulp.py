"""How many steps of a floating type numbers are apart: units in the last place.

Floating-point numbers of one sign are in the order of their bits, read as integers; with the order of the negative ones
turned around, the difference of these integers is the number of representable numbers between (Goldberg, What every
computer scientist should know about floating-point arithmetic, ACM Computing Surveys, 1991). Both zeros are one.
"""

import numpy as np

from quantdrift.shadow.comparators.comparator import Values
from quantdrift.shadow.runtime import Array

_TYPES = {"FP16": (np.float16, np.int16), "FP32": (np.float32, np.int32), "FP64": (np.float64, np.int64)}
_BY_SIZE = {2: "FP16", 4: "FP32", 8: "FP64"}


def type_of(array: Array) -> str:
    """Return the name of a floating type; empty for any other."""
    return _BY_SIZE.get(array.dtype.itemsize, "") if array.dtype.kind == "f" else ""


def steps_apart(first: Array, second: Array, type_name: str) -> Values:
    """Return how many steps of a floating type numbers are apart, both rounded to it first.

    Parameters
    ----------
    first, second
        Of one shape, floating point and finite. What is too large for the type is one step above its largest number.
    type_name
        FP16, BF16, FP32 or FP64.
    """
    return apart(_ordered(first, type_name), _ordered(second, type_name))


def apart(first: Array, second: Array) -> Values:
    """Return the absolute difference of integers of one type, exactly before it becomes float64."""
    low, high = np.minimum(first, second), np.maximum(first, second)
    return (high.astype(np.uint64) - low.astype(np.uint64)).astype(
        np.float64
    )  # wraps around to the difference


def _ordered(values: Array, type_name: str) -> Array:
    """Return integers in the order of the numbers."""
    with np.errstate(over="ignore"):
        if type_name == "BF16":
            bits = _to_bfloat16(values.astype(np.float32))
        else:
            floating, integer = _TYPES[type_name]
            bits = values.astype(floating).view(integer)
    return np.where(bits < 0, np.iinfo(bits.dtype).min - bits, bits)


def _to_bfloat16(values: Array) -> Array:
    """Return the bits of bfloat16, the upper half of a float32, rounded to the nearest, ties to even."""
    bits = values.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16).view(np.int16)
