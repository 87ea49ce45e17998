"""Observations of many signals of one kind, step by step or signal after signal."""

from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.intp]

STEPS = 32  # usual number of steps in one call


class ObservationBlock(msgspec.Struct, frozen=True, kw_only=True):
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


class GroupSequence(NamedTuple):
    """Groups of many signals of one kind, signal after signal. Mass and time never fall within a signal.

    Parameters
    ----------
    ends
        (N,) where the groups of each signal end, and those of the next begin.
    x
        (groups, width) values.
    seen
        (groups,); where it is False the values are ignored.
    mass
        (groups,) calendar mass.
    at_us
        (groups,) event time, whole microseconds since 1970.
    captured_us
        (groups,) when they were captured: before `at_us` where newer ones came first.
    """

    ends: IntArray
    x: FloatArray
    seen: BoolArray
    mass: FloatArray
    at_us: FloatArray
    captured_us: FloatArray
