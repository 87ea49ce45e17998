"""The state of a change signal, field by field, and the run of many signals over a sequence of groups."""

import math

import numpy as np

from quantdrift.drift.detectors.change import baseline_state, bets
from quantdrift.drift.detectors.change.baseline import N_STRATA
from quantdrift.drift.evidence import header, onset, run, window
from quantdrift.drift.evidence import recovery as resolve
from quantdrift.drift.evidence.group import ROUNDING
from quantdrift.drift.evidence.header import (
    ALERTING,
    MOST_EVIDENCE,
    N_TOTAL,
    TICKETING,
    M,
    N,
    W,
    X,
)
from quantdrift.drift.evidence.margin import N_BINS
from quantdrift.drift.evidence.numba_cache import compiled, dot
from quantdrift.drift.evidence.observations import FloatArray, GroupSequence, IntArray
from quantdrift.drift.evidence.run import SequenceRun

FOLLOWED = bets.HALF + len(
    bets.COMMON
)  # bets with a twin for the onset: the learned ones, and the frozen common ones

PAGE = slice(baseline_state.STOP, baseline_state.STOP + bets.N_BETS)
TICKET = slice(PAGE.stop, PAGE.stop + bets.N_BETS)
CUSUM = slice(TICKET.stop, TICKET.stop + FOLLOWED)
FLOOR_AT = slice(CUSUM.stop, CUSUM.stop + FOLLOWED)
FLOOR_N = slice(FLOOR_AT.stop, FLOOR_AT.stop + FOLLOWED)
FLOOR_X = slice(FLOOR_N.stop, FLOOR_N.stop + FOLLOWED)
MIRROR = slice(FLOOR_X.stop, FLOOR_X.stop + len(resolve.BETS))
MIRROR_M = slice(MIRROR.stop, MIRROR.stop + N_STRATA)  # per stratum, (1 + tau) times the baseline at onset
MIRRORED = slice(MIRROR_M.stop, MIRROR_M.stop + N_STRATA)  # 1.0 for strata that must recover
WINDOWS = slice(MIRRORED.stop, MIRRORED.stop + window.PLAIN_SIZE)
RECURRING = slice(WINDOWS.stop, WINDOWS.stop + bets.N_RECURRING)  # bets of the page copy on recurring hours
SIZE = RECURRING.stop
# Start indices, since compiled code cannot use slices of the module.
_PAGE, _TICKET, _CUSUM = PAGE.start, TICKET.start, CUSUM.start
_FLOOR_AT, _FLOOR_N, _FLOOR_X = FLOOR_AT.start, FLOOR_N.start, FLOOR_X.start
_MIRROR, _MIRROR_M, _MIRRORED, _WINDOWS = MIRROR.start, MIRROR_M.start, MIRRORED.start, WINDOWS.start
_RECURRING = RECURRING.start
_LIVE = baseline_state.ROWS.start + baseline_state.LIVE * baseline_state.ROW


def follow(states: FloatArray, groups: GroupSequence) -> SequenceRun:
    """Run signals over their groups, changing `states`, (N, SIZE), in place, and return their run.

    Raises
    ------
    ValueError
        A group is no group: shares above 1 in sum, or values above 1. Both would break the false-alarm bound.
    """
    course = np.empty((run.N_ROWS, len(groups.seen)))
    if not _follow(states, groups, course):
        raise ValueError(
            "a group's shares sum to 1 and its values lie in [0, 1]: anything else breaks the bound"
        )
    return SequenceRun(course=course, states=states)


@compiled
def _follow(states: FloatArray, groups: GroupSequence, course: FloatArray) -> bool:
    """Run states, (N, SIZE), over a sequence of groups, in place, and write their run; False: an invalid group."""
    cells, factor, weight = np.empty((2, N_STRATA)), np.empty(bets.N_BETS), np.empty(bets.N_BETS)
    ends, x, seen, mass, at_us, captured_us = groups
    begin = 0
    for row in range(len(states)):
        state = states[row]
        strata = baseline_state.strata_of(state)
        bets.weigh(state, weight)
        asked = state[ALERTING] > 0 and state[baseline_state.STAGE] != baseline_state.LEARNING
        mirror = state[_MIRROR : _MIRROR + len(resolve.BETS)]
        if not asked:
            mirror[:] = 0.0
        page = _evidence(state, weight)
        recovery = resolve.recovered(mirror) if asked else math.inf
        for group in range(begin, ends[row]):
            if seen[group]:
                if not _cells(x[group], strata, cells):
                    return False
                allowance = header.spend(state, mass[group], at_us[group], 1.0)
                bets.factors(state, strata, cells, factor)
                _see(state, factor, cells[1].sum(), allowance, at_us[group])
                if captured_us[group] < at_us[group]:
                    onset.redate(
                        state[_FLOOR_AT : _FLOOR_AT + FOLLOWED],
                        state[_CUSUM : _CUSUM + FOLLOWED],
                        factor[:FOLLOWED],
                        captured_us[group],
                    )
                baseline_state.learn(state, x[group])
                page = _evidence(state, weight)
                if asked:
                    _reflect(state, cells)
                    recovery = resolve.recovered(mirror)
            run.note(course, group, state, page, recovery)
        begin = ends[row]
        for bet in range(bets.N_BETS):
            state[_TICKET + bet] = state[_PAGE + bet] * state[TICKETING]
        mean = state[_LIVE + baseline_state.TOTAL_AT : _LIVE + baseline_state.TOTAL_AT + N_BINS].sum()
        mean /= max(state[_LIVE + baseline_state.GROUPS], 1.0)
        state[M] = min(1.0, (1.0 + state[baseline_state.TAU]) * mean)
    return True


@compiled
def _cells(group: FloatArray, strata: IntArray, cells: FloatArray) -> bool:
    """Add a group up by testing stratum, (2, N_STRATA); return whether it is one."""
    cells[:] = 0.0
    whole = 0.0
    for bin_ in range(N_BINS):
        share, total = group[bin_], group[N_BINS + bin_]
        if share != 0.0:
            if not (share > 0.0 and 0.0 <= total <= share + ROUNDING):
                return False
            cells[0, strata[bin_]] += share
            cells[1, strata[bin_]] += min(total, share)
            whole += share
    return whole <= 1.0 + ROUNDING


@compiled
def _see(state: FloatArray, factor: FloatArray, x: float, given: float, at_us: float) -> None:
    state[N_TOTAL] += 1.0
    state[N] += 1.0
    state[W] = state[N]
    state[X] += x
    n, total = state[N], state[X]
    for bet in range(bets.N_BETS):
        state[_PAGE + bet] = min((state[_PAGE + bet] + given) * factor[bet], MOST_EVIDENCE)
    while_there = bets.recurring_factor(state, factor)
    half_day, part = bets.moment(at_us)
    for hours in range(bets.N_RECURRING):
        won = while_there if bets.within(hours, half_day, part) else 1.0
        state[_RECURRING + hours] = min((state[_RECURRING + hours] + given) * won, MOST_EVIDENCE)
    for bet in range(FOLLOWED):
        after = onset.twin(state[_CUSUM + bet], factor[bet])
        # Without branches, so that the processor handles several bets at a time; mostly the old value is written.
        state[_CUSUM + bet] = after
        state[_FLOOR_AT + bet] = at_us if after == 1.0 else state[_FLOOR_AT + bet]
        state[_FLOOR_N + bet] = n if after == 1.0 else state[_FLOOR_N + bet]
        state[_FLOOR_X + bet] = total if after == 1.0 else state[_FLOOR_X + bet]
    window.advance(state[_WINDOWS : _WINDOWS + window.PLAIN_SIZE], 1.0, x)


@compiled
def _evidence(state: FloatArray, weight: FloatArray) -> float:
    recurring = 0.0
    for hours in range(bets.N_RECURRING):
        recurring += state[_RECURRING + hours]
    always = dot(weight, state[_PAGE : _PAGE + bets.N_BETS])
    return (1.0 - bets.RECURRING_SHARE) * always + bets.RECURRING_SHARE * recurring / bets.N_RECURRING


def evidence(state: FloatArray) -> float:
    """Return the evidence of the page copy."""
    weight = np.empty(bets.N_BETS)
    bets.weigh(state, weight)
    return _evidence(state, weight)


def evidences(states: FloatArray) -> FloatArray:
    """Return the evidence of the page copies of many signals, (N,); 0 for one that still learns."""
    page_evidence = np.zeros(len(states))
    _evidences(states, page_evidence)
    return page_evidence


@compiled
def _evidences(states: FloatArray, found: FloatArray) -> None:
    weight = np.empty(bets.N_BETS)
    for row in range(len(states)):
        if states[row, baseline_state.STAGE] != baseline_state.LEARNING:
            bets.weigh(states[row], weight)
            found[row] = _evidence(states[row], weight)


@compiled
def _reflect(state: FloatArray, cells: FloatArray) -> None:
    """Add a group to the mirror image, in place: all strata that must recover together, each relative to its own range."""
    share = z = 0.0
    for stratum in range(N_STRATA):
        mirrored, m = state[_MIRRORED + stratum], state[_MIRROR_M + stratum]
        share += cells[0, stratum] * mirrored
        z += (cells[1, stratum] - m * cells[0, stratum]) * mirrored / (1.0 - m)
    if share > 0.0:
        resolve.reflect(state[_MIRROR : _MIRROR + len(resolve.BETS)], 0.0, z)
