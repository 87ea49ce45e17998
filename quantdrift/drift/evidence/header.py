"""The header that begins the state of every detector, whatever its kind, and the record of an onset."""

import msgspec

from quantdrift.drift.evidence.numba_cache import compiled
from quantdrift.drift.evidence.observations import FloatArray

(
    M,  # mean that is tested against, in units of `SCALE`
    SCALE,  # what one unit of x is in the metric's own unit
    MASS,  # calendar mass at the last group
    PAGING,  # 1.0 while the page copy runs
    TICKETING,  # 1.0 while the ticket copy runs
    ALERTING,  # 1.0 while recovery is watched for
    PAGE_MASS,  # mass given to the page copy since its reset
    TICKET_MASS,  # the same of the ticket copy
    N_TOTAL,  # groups ever
    N,  # groups since it was last armed
    W,  # sum of v over these
    X,  # sum of vx over these
    LAST_AT,  # event time of the last group, microseconds
    CREATED_AT,  # event time of the first group, microseconds
    POLICY,  # the keeper's number of the policy of the last group; carried, never read by a detector
) = range(15)
HEADER = 15


class Onset(msgspec.Struct, frozen=True, kw_only=True):
    """The estimated onset of a drift, and the means around it, in the metric's own unit.

    Parameters
    ----------
    onset_us
        Estimated onset, microseconds since 1970.
    before
        What was observed before it, or None where nothing lies before it.
    after
        What has been since (biased upwards: the onset was chosen by looking), or None.
    n_after
        Groups since the onset.
    n_before
        Groups that `before` is the mean of.
    """

    onset_us: int
    before: float | None
    after: float | None
    n_after: int
    n_before: int = 0


def opened(state: FloatArray, *, mass: float, at_us: int) -> None:
    """Write the header of a signal that starts at this mass and time, in place."""
    state[MASS] = mass
    state[CREATED_AT] = state[LAST_AT] = at_us


@compiled
def spend(state: FloatArray, mass: float, at_us: float, live: float) -> float:
    """Advance the calendar clock of a signal to an observed group, in place; return the mass given to the page copy.

    Groups that were not observed leave their mass to the next one. One that does not take part, `live` 0, is given
    nothing.
    """
    now = max(mass, state[MASS])
    given: float = (now - state[MASS]) * state[PAGING] * live
    state[MASS] = now
    state[PAGE_MASS] += given
    state[TICKET_MASS] = state[PAGE_MASS] * state[TICKETING]
    state[LAST_AT] = max(state[LAST_AT], at_us)
    return given


def armed(state: FloatArray, *, mass: float) -> None:
    """Reset the header of both copies at this mass, in place."""
    state[PAGING] = state[TICKETING] = 1.0
    state[[ALERTING, PAGE_MASS, TICKET_MASS, N, W, X]] = 0.0
    state[MASS] = mass


def paused(state: FloatArray, *, page: bool) -> None:
    """Pause the copy that alarmed (both for a page) in the header, in place, and watch for recovery."""
    state[[TICKETING, TICKET_MASS]] = 0.0
    if page:
        state[[PAGING, PAGE_MASS]] = 0.0
    state[ALERTING] = 1.0
