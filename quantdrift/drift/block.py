"""Observations of many signals of one kind side by side, step by step, and sums that resume bit for bit."""

import msgspec
import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.intp]

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


def running_sum(start: FloatArray, steps: FloatArray) -> FloatArray:
    """Return the sums before the first and after each step: (1 + steps, ...).

    One addition after the other from `start` on, so that stopping and resuming gives the same bits.
    """
    sums: FloatArray = np.cumsum(np.concatenate((start[None], steps)), axis=0)
    return sums
