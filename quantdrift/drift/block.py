"""Observations of many signals of one kind side by side, step by step, and sums that resume bit for bit."""

import msgspec
import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.intp]

_WIDE = 256  # columns from which whole rows are faster
STEPS = 32  # products over so many steps stay far from overflow and underflow, whatever the bets


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """Up to `STEPS` observations of each of N signals; signals of one slice share its steps.

    Where a signal has no observation at a step, `seen` is False and the values there are ignored.

    Parameters
    ----------
    x
        (steps, N, width) values of the groups; what they are is the detector's own business.
    seen
        (steps, N).
    mass
        (steps, N) calendar mass at each step, never falling.
    at_us
        (steps, N) event time, whole microseconds since 1970.
    """

    x: FloatArray
    seen: BoolArray
    mass: FloatArray
    at_us: FloatArray


def accumulate(operation: np.ufunc, steps: FloatArray) -> FloatArray:
    """Return `operation.accumulate(steps, axis=0)`, (steps, ...).

    NumPy accumulates along the first axis column by column, which is some ten times slower for wide arrays than
    joining whole rows. Both do the same operations in the same order, so the bits are the same.
    """
    if not len(steps) or steps[0].size < _WIDE:
        return np.asarray(operation.accumulate(steps, axis=0), dtype=np.float64)
    found = np.empty_like(steps)
    found[0] = steps[0]
    for step in range(1, len(steps)):
        operation(found[step - 1], steps[step], out=found[step])
    return found


def running_sum(start: FloatArray, steps: FloatArray) -> FloatArray:
    """Return the sums before the first and after each step: (1 + steps, ...).

    One addition after the other from `start` on, so that stopping and resuming gives the same bits.
    """
    return accumulate(np.add, np.concatenate((start[None], steps)))
