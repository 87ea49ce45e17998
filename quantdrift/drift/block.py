"""Observations of many signals of one kind side by side, step by step, and recurrences along them."""

import msgspec
import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.intp]

STEPS = 32  # what one call is commonly given


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


class Steps:
    """Which of many signals have a group at each step: series of any lengths side by side, without padding.

    The longest series come first, so at every step a prefix of the signals goes on. Groups lie step after step and in
    each step signal after signal; arrays of groups are (groups, ...) in that order. Every recurrence is followed step
    by step, so that its bits do not depend on the company, nor on how a series is cut.

    Parameters
    ----------
    lengths
        (N,) groups of each signal, at least 1, never rising.

    Attributes
    ----------
    step, row
        (groups,) step and signal of each group.
    last
        (N,) place of each signal's last group.
    """

    def __init__(self, lengths: IntArray) -> None:
        self.lengths = lengths
        sizes = np.bincount(lengths - 1)[::-1].cumsum()[::-1]
        ends = sizes.cumsum()
        begins = ends - sizes
        self.step = np.repeat(np.arange(len(sizes)), sizes)
        self.row = np.arange(ends[-1]) - begins[self.step]
        self.last = begins[lengths - 1] + np.arange(len(lengths))
        self._begins = begins
        self._now = [slice(*span) for span in zip(begins.tolist(), ends.tolist(), strict=True)]
        nexts = zip(begins.tolist(), sizes[1:].tolist(), strict=False)
        self._before = [slice(begin, begin + size) for begin, size in nexts]

    def times(self, n: int) -> "Steps":
        """Return the same with n signals in the place of each."""
        return Steps(np.repeat(self.lengths, n)) if n > 1 else self

    def combine(self, operation: np.ufunc, found: FloatArray) -> FloatArray:
        """Turn (groups, ...) into each signal's running sums, or what else the operation makes, in place."""
        if len(self.lengths) == 1:  # the same operations in the same order, in one call
            found[:] = operation.accumulate(found, axis=0)
            return found
        for before, now in zip(self._before, self._now[1:], strict=True):
            here = found[now]
            operation(found[before], here, out=here)
        return found

    def grow(self, start: FloatArray, factor: FloatArray, given: FloatArray) -> FloatArray:
        """Return `R <- R * factor + given` after each group, (groups, K), in the place of `given`.

        Parameters
        ----------
        start
            (N, K) before the first group.
        factor, given
            (groups, K).
        """
        spare = np.empty_like(start)
        before = start
        for now in self._now:
            here = given[now]
            n = len(here)
            np.multiply(before[:n], factor[now], out=spare[:n])
            np.add(here, spare[:n], out=here)
            before = here
        return given

    def fall(self, start: FloatArray, factor: FloatArray) -> FloatArray:
        """Return `C <- max(1, C * factor)` after each group, (groups, K), from `start`, (N, K)."""
        found = np.empty_like(factor)
        before = start
        for now in self._now:
            here = found[now]
            np.multiply(before[: len(here)], factor[now], out=here)
            np.maximum(here, 1.0, out=here)
            before = here
        return found

    def latest(self, mask: BoolArray) -> IntArray:
        """Return the last step of each signal at which a mask, (groups, K), was set, (N, K); -1 where at none."""
        found = np.full((len(self.lengths), mask.shape[1]), -1)
        for step, now in enumerate(self._now):
            here = mask[now]
            np.copyto(found[: len(here)], step, where=here)
        return found

    def prior(self, start: FloatArray, after: FloatArray) -> FloatArray:
        """Return what was before each group, (groups, ...): `start`, (N, ...), or that after the one before it."""
        found = np.empty_like(after)
        found[: len(start)] = start
        place = self._begins[self.step[len(start) :] - 1] + self.row[len(start) :]
        found[len(start) :] = after[place]
        return found

    def places(self, step: IntArray) -> IntArray:
        """Return the places of the groups at these steps, (N, ...), of each signal."""
        row = np.arange(len(self.lengths)).reshape(-1, *(1,) * (step.ndim - 1))
        return np.asarray(self._begins[step] + row, dtype=np.intp)


class Trail(msgspec.Struct, frozen=True, kw_only=True):
    """Groups of many signals of one kind, in the order of `steps`; neither mass nor time falls along a signal.

    Parameters
    ----------
    steps
        Who has how many.
    x
        (groups, width) values.
    seen
        (groups,); where it is False the values are ignored.
    mass
        (groups,) calendar mass.
    at_us
        (groups,) event time, whole microseconds since 1970.
    """

    steps: Steps
    x: FloatArray
    seen: BoolArray
    mass: FloatArray
    at_us: FloatArray

    def sums(self, values: FloatArray) -> FloatArray:
        """Return the running sums of values, (groups, ...), which it overwrites."""
        return self.steps.combine(np.add, values)
