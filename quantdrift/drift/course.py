"""The state of a change signal, field by field, and what many of them go through along a block."""

import numpy as np

from quantdrift.drift import bets, memory, onset, resolve, window
from quantdrift.drift.baseline import N_STRATA
from quantdrift.drift.block import BoolArray, FloatArray, IntArray, Trail
from quantdrift.drift.margin import N_BINS
from quantdrift.drift.path import Flow, spend
from quantdrift.drift.signal import (
    ALERTING,
    LAST_AT,
    N_TOTAL,
    TICKETING,
    M,
    N,
    W,
    X,
)

FOLLOWED = bets.HALF + len(
    bets.COMMON
)  # bets with a twin for the onset: the learned ones, and the frozen common ones

PAGE = slice(memory.STOP, memory.STOP + bets.N_BETS)
TICKET = slice(PAGE.stop, PAGE.stop + bets.N_BETS)
CUSUM = slice(TICKET.stop, TICKET.stop + FOLLOWED)
FLOOR_AT = slice(CUSUM.stop, CUSUM.stop + FOLLOWED)
FLOOR_N = slice(FLOOR_AT.stop, FLOOR_AT.stop + FOLLOWED)
FLOOR_X = slice(FLOOR_N.stop, FLOOR_N.stop + FOLLOWED)
MIRROR = slice(FLOOR_X.stop, FLOOR_X.stop + len(resolve.BETS))
MIRROR_M = slice(MIRROR.stop, MIRROR.stop + N_STRATA)  # per stratum, (1 + tau) times the baseline at onset
MIRRORED = slice(MIRROR_M.stop, MIRROR_M.stop + N_STRATA)  # 1.0 for strata that must recover
WINDOWS = slice(MIRRORED.stop, MIRRORED.stop + window.SIZE)
SIZE = WINDOWS.stop


def follow(states: FloatArray, trail: Trail) -> Flow:
    """Return what signals with `states`, (N, SIZE), go through along their groups."""
    steps, seen = trail.steps, trail.seen
    row, last = steps.row, steps.last
    learns = states[:, memory.STAGE] != memory.FIXED
    entries = bets.entries_of(trail)
    strata = bets.strata_of(states, entries, learns, trail)
    factor = bets.factors(len(row), strata)
    spent = spend(states, trail)
    grown = steps.grow(states[:, PAGE], factor, factor * spent.given[:, None])
    page = np.einsum("gk,gk->g", grown, bets.weights(states)[row])
    twin = onset.follow(steps, states[:, CUSUM], np.ascontiguousarray(factor[:, :FOLLOWED]), seen)
    groups = np.empty((len(row), 3))
    groups[:, 0] = groups[:, 1] = seen
    groups[:, 2] = bets.sums(entries.group, entries.total, len(row))
    counts = trail.sums(groups.copy())
    recovery, mirror = _recovery(states, strata, trail)
    state = states.copy()
    spent.write(state, trail)
    more = counts[last]
    state[:, N_TOTAL] += more[:, 0]
    state[:, N] += more[:, 0]
    state[:, W] = state[:, N]
    state[:, X] += more[:, 2]
    state[:, PAGE] = grown[last]
    state[:, TICKET] = state[:, PAGE] * state[:, TICKETING, None]
    state[:, CUSUM] = twin.cusum
    fell, at = twin.floor >= 0, steps.places(np.maximum(twin.floor, 0))
    state[:, FLOOR_AT] = np.where(fell, trail.at_us[at], state[:, FLOOR_AT])
    for index, count, field in ((0, N, FLOOR_N), (2, X, FLOOR_X)):
        state[:, field] = np.where(fell, counts[:, index][at] + states[:, count, None], state[:, field])
    state[:, MIRROR] = mirror
    state[:, WINDOWS] = window.advance(states[:, WINDOWS], trail, groups, counts)
    _remember(state, learns, entries, more[:, 0], row)
    return Flow(
        page=page,
        page_mass=spent.page_mass,
        ticket=page * states[row, TICKETING],
        ticket_mass=spent.ticket_mass,
        recovery=recovery,
        page_bets=grown,
        states=state,
    )


def _remember(
    state: FloatArray, learns: BoolArray, entries: bets.Entries, n_groups: FloatArray, row: IntArray
) -> None:
    """Take the groups into the baseline, or set them aside."""
    n = len(state)
    rows = memory.rows_of(state).copy()
    every, into = np.arange(n), np.where(state[:, ALERTING] > 0, memory.ASIDE, memory.LIVE)
    place = row[entries.group] * N_BINS + entries.column
    kept = rows[every, into]
    for part, values in ((memory.SHARE, entries.share), (memory.TOTAL, entries.total)):
        kept[:, part] += bets.sums(place, values, n * N_BINS).reshape(n, N_BINS)
    kept[:, memory.GROUPS] += n_groups
    kept[:, memory.AT] = np.where(n_groups > 0, state[:, LAST_AT], kept[:, memory.AT])
    rows[every, into] = np.where(learns[:, None], kept, rows[every, into])
    state[:, memory.ROWS] = rows.reshape(n, -1)
    live = rows[:, memory.LIVE]
    mean = live[:, memory.TOTAL].sum(axis=1) / np.maximum(live[:, memory.GROUPS], 1.0)
    state[:, M] = np.minimum(1.0, (1.0 + state[:, memory.TAU]) * mean)


def _recovery(states: FloatArray, strata: bets.Strata, trail: Trail) -> tuple[FloatArray, FloatArray]:
    """Return the evidence after each group that the change is over, (groups,), and the mirror image at the end."""
    alerting: BoolArray = (states[:, ALERTING] > 0) & (states[:, memory.STAGE] != memory.LEARNING)
    steps, n_groups = trail.steps, len(trail.seen)
    if not alerting.any():
        return np.full(n_groups, np.inf), np.zeros((len(states), len(resolve.BETS)))
    owner = steps.row[strata.group]
    m = states[owner, MIRROR_M.start + strata.stratum]
    mirrored = states[owner, MIRRORED.start + strata.stratum]
    z = bets.sums(strata.group, (strata.total - m * strata.share) * mirrored / (1.0 - m), n_groups)
    asked = alerting[steps.row]
    running = (bets.sums(strata.group, strata.share * mirrored, n_groups) > 0) & asked
    start = states[:, MIRROR] * alerting[:, None]
    recovery, mirror = resolve.mirror(steps, start, np.zeros(len(states)), z, running)
    return np.where(asked, recovery, np.inf), mirror
