"""The header of a detector's state, the same for every kind of detector, and the record of an onset."""

from collections.abc import Sequence

import msgspec

from quantdrift.drift.evidence.clock import DAY_US
from quantdrift.drift.evidence.numba_cache import compiled
from quantdrift.drift.evidence.observations import FloatArray

(
    M,  # mean that is tested against, in units of `SCALE`
    SCALE,  # factor from x to the metric's own unit
    MASS,  # calendar mass at the last group
    PAGING,  # 1.0 while the page copy runs
    TICKETING,  # 1.0 while the ticket copy runs
    ALERTING,  # 1.0 during an alert, while the test for recovery runs
    PAGE_MASS,  # mass given to the page copy since its reset
    TICKET_MASS,  # the same of the ticket copy
    N_TOTAL,  # all groups so far
    N,  # groups since `armed` was called last
    W,  # sum of v over these
    X,  # sum of vx over these
    LAST_AT,  # event time of the last group, microseconds
    CREATED_AT,  # event time of the first group, microseconds
    POLICY,  # id of the policy of the last group; stored for the fold, never read by a detector
) = range(15)
HEADER = 15
MOST_EVIDENCE = 1e100
"""What each bet counts at most, where an alert waits or cannot be a page: evidence that grows for ever stays a number."""
HANDED_OVER = 0.99
"""Share of the evidence of a version that ended that goes on. The rest stays for its last sessions, which close later."""


class Onset(msgspec.Struct, frozen=True, kw_only=True):
    """The estimated onset of a drift, and the means around it, in the metric's own unit.

    Parameters
    ----------
    onset_us
        Estimated onset, microseconds since 1970.
    before
        Mean before the onset, or None if there is no group before it.
    after
        Mean since the onset, or None; biased upwards, because the onset was chosen from the same data.
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

    The mass of a group that was not observed goes to the next group, but at most a day's mass: the mass of a longer silence
    is not spent, because the first groups after it could page on it. A signal with `live` 0 does not take part and gets
    no mass.
    """
    now, silent_us = max(mass, state[MASS]), at_us - state[LAST_AT]
    allowance: float = (now - state[MASS]) * state[PAGING] * live
    if silent_us > DAY_US:
        allowance *= DAY_US / silent_us
    state[MASS] = now
    state[PAGE_MASS] += allowance
    state[TICKET_MASS] = state[PAGE_MASS] * state[TICKETING]
    state[LAST_AT] = max(state[LAST_AT], at_us)
    return allowance


def handed_over(state: FloatArray, before: FloatArray, parts: Sequence[slice]) -> bool:
    """Move evidence of a version's signal that ended into that of one that serves instead, in place; return whether it was.

    Why the bound stays: given the past, the sum of all evidence of the fleet grows on average by at most the allowance, and an
    alarm takes 1 / q out of it. The sum is the same before and after the move, whatever the version's means, bets and
    allowance, and when a version ends is read from arrivals, which say nothing about the divergence given the past. So
    the expected number of false alarms of the fleet is bounded as without it. A version that begins brings no evidence: it is one
    more detector of the clock, which gives each of them less, and the sum of what they get is the same.
    Nothing is moved while one of them alerts: its evidence was spent.

    Parameters
    ----------
    parts
        Where in a state the evidence is; in both states it counts the same.
    """
    if state[SCALE] != before[SCALE] or state[ALERTING] or before[ALERTING]:
        return False
    for part in parts:
        moved = HANDED_OVER * before[part]
        state[part] += moved
        before[part] -= moved
    for mass in (PAGE_MASS, TICKET_MASS):
        state[mass] += before[mass]
        before[mass] = 0.0
    return True


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
