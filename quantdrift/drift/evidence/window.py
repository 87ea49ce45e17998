"""The windows of displayed means: a recent one that advances, and one since the last change of verdict.

Their part of a state is `SIZE` numbers: three windows of the sums of `quantdrift.drift.evidence.interval`.
"""

import numpy as np

from quantdrift.drift.evidence import interval
from quantdrift.drift.evidence.numba_cache import compiled
from quantdrift.drift.evidence.observations import BoolArray, FloatArray

N_WINDOWS = 3
OLDER, NEWER, SINCE = range(N_WINDOWS)
SIZE = N_WINDOWS * interval.SUMS
RECENT_GROUPS = 1000


@compiled
def advance(part: FloatArray, v: float, vx: float) -> None:
    """Add one observation to the windows of one signal, (SIZE,), in place."""
    for number in range(N_WINDOWS):
        interval.advance(part[number * interval.SUMS : (number + 1) * interval.SUMS], v, vx)


def rotate(state: FloatArray, begin: int) -> bool:
    """Keep the recent window of one signal, in place, at 1,000 to 2,000 groups; return whether it was full.

    Its windows start at `begin` of the state.
    """
    # Called for every signal after every batch; nearly always there is nothing to do.
    if state.item(begin + NEWER * interval.SUMS) < RECENT_GROUPS:
        return False
    windows = state[begin : begin + SIZE].reshape(N_WINDOWS, interval.SUMS)
    windows[OLDER] = windows[NEWER]
    windows[NEWER] = 0.0
    return True


def full(states: FloatArray, begin: int) -> BoolArray:
    """Return for each of many signals whether `rotate` would advance its window, (N,)."""
    return np.asarray(states[:, begin + NEWER * interval.SUMS] >= RECENT_GROUPS)


def verdict_changed(part: FloatArray) -> None:
    """Reset the window since the last change of verdict, in place."""
    part.reshape(N_WINDOWS, interval.SUMS)[SINCE] = 0.0


def recent(part: FloatArray, scale: float) -> interval.Estimate | None:
    """Return mean and interval over the recent window, times `scale`."""
    return _estimate(part, OLDER, scale)


def since_change(part: FloatArray, scale: float) -> interval.Estimate | None:
    """Return mean and interval since the last change of verdict, times `scale`."""
    return _estimate(part, SINCE, scale)


def recents(parts: FloatArray, scale: FloatArray) -> FloatArray:
    """Return mean, low, high and n of `recent` of many signals with windows `parts`, (N, SIZE): (N, 4), n 0 for None."""
    older = np.ascontiguousarray(parts[:, OLDER * interval.SUMS : (OLDER + 1) * interval.SUMS])
    return interval.estimates(older, scale)


def _estimate(part: FloatArray, number: int, scale: float) -> interval.Estimate | None:
    return interval.estimate(part[number * interval.SUMS : (number + 1) * interval.SUMS], scale)
