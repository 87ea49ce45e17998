"""What is shown beside a verdict: a recent window that moves on, and one since the last change of verdict.

The part of a state that holds them is `SIZE` numbers: three windows of the sums of `quantdrift.drift.interval`.
"""

from quantdrift.drift import interval
from quantdrift.drift.block import FloatArray, Trail

N_WINDOWS = 3
OLDER, NEWER, SINCE = range(N_WINDOWS)
SIZE = N_WINDOWS * interval.SUMS
RECENT_GROUPS = 1000


def advance(part: FloatArray, trail: Trail, groups: FloatArray, counts: FloatArray) -> FloatArray:
    """Return the windows of N signals after the last group, (N, SIZE).

    Parameters
    ----------
    part
        (N, SIZE) before the first group.
    trail
        The groups.
    groups
        (groups, 3) of each 1, v and vx; 0 where there is no observation.
    counts
        (groups, 3) running sums of these.
    """
    start = part.reshape(len(part), N_WINDOWS, interval.SUMS)
    return interval.advance(start, trail.steps, groups, counts).reshape(part.shape)


def rotate(part: FloatArray) -> None:
    """Let the recent window of one signal, (SIZE,), move on in place: it holds 1,000 to 2,000 groups."""
    if part[NEWER * interval.SUMS] >= RECENT_GROUPS:
        windows = part.reshape(N_WINDOWS, interval.SUMS)
        windows[OLDER] = windows[NEWER]
        windows[NEWER] = 0.0


def verdict_changed(part: FloatArray) -> None:
    """Let the window since the last change of verdict begin anew, in place."""
    part.reshape(N_WINDOWS, interval.SUMS)[SINCE] = 0.0


def recent(part: FloatArray, scale: float) -> interval.Estimate | None:
    """Return mean and interval over the recent window, times `scale`."""
    return _estimate(part, OLDER, scale)


def since_change(part: FloatArray, scale: float) -> interval.Estimate | None:
    """Return the same since the last change of verdict."""
    return _estimate(part, SINCE, scale)


def _estimate(part: FloatArray, number: int, scale: float) -> interval.Estimate | None:
    found = interval.estimate(part.reshape(N_WINDOWS, interval.SUMS)[number])
    return found.scaled(scale) if found else None
