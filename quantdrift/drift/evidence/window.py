"""The windows of displayed means: a recent one that advances, and one since the last change of verdict.

Their part of a state is `SIZE` numbers: three windows of the sums of `quantdrift.drift.evidence.interval`; `PLAIN_SIZE`
where groups have no weights.
"""

import numpy as np

from quantdrift.drift.evidence import interval
from quantdrift.drift.evidence.numba_cache import compiled
from quantdrift.drift.evidence.observations import BoolArray, FloatArray

N_WINDOWS = 3
OLDER, NEWER, SINCE = range(N_WINDOWS)
SIZE = N_WINDOWS * interval.SUMS
PLAIN_SIZE = N_WINDOWS * interval.PLAIN
RECENT_GROUPS = 1000


@compiled
def advance(part: FloatArray, v: float, vx: float, c: float = 1.0) -> None:
    """Add one observation to the windows of one signal, in place; v, vx and c as in `interval.advance`."""
    interval.advance(part, v, vx, c, N_WINDOWS)


def rotate(state: FloatArray, part: slice) -> bool:
    """Keep the recent window of one signal, in place, at 1,000 to 2,000 groups; return whether it was full.

    `part` of the state is its windows.
    """
    # Called for every signal after every batch: nearly always there is nothing to do.
    if state.item(_newer(part)) < RECENT_GROUPS:
        return False
    windows = state[part].reshape(N_WINDOWS, -1)
    windows[OLDER] = windows[NEWER]
    windows[NEWER] = 0.0
    return True


def full(states: FloatArray, part: slice) -> BoolArray:
    """Return whether `rotate` moves the window of each of many signals on, (N,)."""
    return np.asarray(states[:, _newer(part)] >= RECENT_GROUPS)


def verdict_changed(part: FloatArray) -> None:
    """Reset the window since the last change of verdict, in place."""
    part.reshape(N_WINDOWS, -1)[SINCE] = 0.0


def recent(part: FloatArray, scale: float) -> interval.WeightedEstimate | None:
    """Return mean and interval over the recent window, times `scale`."""
    return interval.estimate(part.reshape(N_WINDOWS, -1)[OLDER], scale)


def since_change(part: FloatArray, scale: float) -> interval.WeightedEstimate | None:
    """Return mean and interval since the last change of verdict, times `scale`."""
    return interval.estimate(part.reshape(N_WINDOWS, -1)[SINCE], scale)


def recents(parts: FloatArray, scale: FloatArray) -> FloatArray:
    """Return mean, low, high, n and missing of `recent` of many signals with windows `parts`, (N, size): (N, 5), n 0 for None."""
    size = parts.shape[1] // N_WINDOWS
    older = np.ascontiguousarray(parts[:, OLDER * size : (OLDER + 1) * size])
    return interval.estimates(older, scale)


def _newer(part: slice) -> int:
    """Return where the number of groups of the newer window is."""
    return int(part.start + NEWER * ((part.stop - part.start) // N_WINDOWS))
