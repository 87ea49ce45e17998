"""The state of a change signal, field by field, and what many of them go through along a block."""

import msgspec
import numpy as np

from quantdrift.drift import bets, memory, onset, resolve, window
from quantdrift.drift.baseline import N_STRATA
from quantdrift.drift.block import Block, BoolArray, FloatArray, IntArray, accumulate, running_sum
from quantdrift.drift.signal import (
    ALERTING,
    LAST_AT,
    MASS,
    N_TOTAL,
    PAGE_MASS,
    PAGING,
    TICKET_MASS,
    TICKETING,
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
SIDE_BY_SIDE = 64  # signals whose arrays stay in the processor's cache together


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What some of the signals go through; arrays begin with (steps, signals)."""

    start: FloatArray
    block: Block
    entries: bets.Entries
    mass: FloatArray
    product: FloatArray
    given: FloatArray
    page: FloatArray
    page_mass: FloatArray
    ticket: FloatArray
    ticket_mass: FloatArray
    recovery: FloatArray
    mirror: FloatArray
    twin: onset.Twin
    counts: FloatArray  # (1 + steps, signals, 2): N, X
    windows: FloatArray  # (1 + steps, signals, window.SIZE)

    def stopped(self, step: IntArray) -> FloatArray:
        """Return the states after step `step[i]` of signal i."""
        row = np.arange(len(self.start))
        at, after = (step, row), (step + 1, row)
        state = self.start.copy()
        state[:, MASS] = self.mass[at]
        state[:, PAGE_MASS] = self.page_mass[at]
        state[:, TICKET_MASS] = self.ticket_mass[at]
        state[:, (N, X)] = self.counts[after]
        state[:, W] = state[:, N]
        state[:, N_TOTAL] += state[:, N] - self.start[:, N]
        seen = np.where(self.block.seen, self.block.at_us, 0.0)
        state[:, LAST_AT] = np.maximum(state[:, LAST_AT], np.maximum.accumulate(seen, axis=0)[at])
        for copy, flag in ((PAGE, PAGING), (TICKET, TICKETING)):
            state[:, copy] = self.product[at] * (state[:, copy] + state[:, flag, None] * self.given[at])
        state[:, CUSUM] = self.twin.cusum[at]
        floor = self.twin.floor[at]
        fell, column = floor >= 0, row[:, None]
        state[:, FLOOR_AT] = np.where(fell, self.block.at_us[floor, column], state[:, FLOOR_AT])
        for index, field in enumerate((FLOOR_N, FLOOR_X)):
            state[:, field] = np.where(fell, self.counts[floor + 1, column, index], state[:, field])
        state[:, MIRROR] = self.mirror[at]
        state[:, WINDOWS] = self.windows[after]
        self._remember(state, step)
        return state

    def _remember(self, state: FloatArray, step: IntArray) -> None:
        """Take the groups up to the stop into the baseline, or set them aside."""
        rows = memory.rows_of(state).copy()
        into = np.where(state[:, ALERTING] > 0, memory.ASIDE, memory.LIVE)
        learns = state[:, memory.STAGE] != memory.FIXED
        found = self.entries
        taken = (found.step <= step[found.row]) & learns[found.row]
        place = (found.row[taken], into[found.row[taken]])
        np.add.at(rows, (*place, memory.SHARE.start + found.column[taken]), found.share[taken])
        np.add.at(rows, (*place, memory.TOTAL.start + found.column[taken]), found.total[taken])
        more = np.where(learns, state[:, N] - self.start[:, N], 0.0)
        every = np.arange(len(state))
        rows[every, into, memory.GROUPS] += more
        rows[every, into, memory.AT] = np.where(more > 0, state[:, LAST_AT], rows[every, into, memory.AT])
        state[:, memory.ROWS] = rows.reshape(len(state), -1)


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """What N signals go through along a block; arrays are (steps, N)."""

    parts: list[Part]
    page: FloatArray
    page_mass: FloatArray
    ticket: FloatArray
    ticket_mass: FloatArray
    recovery: FloatArray

    def stopped(self, step: IntArray) -> FloatArray:
        """Return the states, (N, SIZE), after step `step[i]` of signal i."""
        ends = np.cumsum([len(part.start) for part in self.parts])
        steps = np.split(step, ends[:-1])
        return np.concatenate([part.stopped(one) for part, one in zip(self.parts, steps, strict=True)])


def follow(states: FloatArray, block: Block) -> Course:
    """Return what signals with `states`, (N, SIZE), go through along `block`."""
    parts = []
    weights = bets.weights(states)
    for first in range(0, len(states), SIDE_BY_SIDE):
        few = slice(first, first + SIDE_BY_SIDE)
        part = Block(
            x=block.x[:, few], seen=block.seen[:, few], mass=block.mass[:, few], at_us=block.at_us[:, few]
        )
        parts.append(_run(states[few], part, weights[few]))
    return Course(
        parts=parts,
        page=np.concatenate([part.page for part in parts], axis=1),
        page_mass=np.concatenate([part.page_mass for part in parts], axis=1),
        ticket=np.concatenate([part.ticket for part in parts], axis=1),
        ticket_mass=np.concatenate([part.ticket_mass for part in parts], axis=1),
        recovery=np.concatenate([part.recovery for part in parts], axis=1),
    )


def _run(states: FloatArray, block: Block, weights: FloatArray) -> Part:
    seen = block.seen.astype(np.float64)
    learning = (states[:, memory.STAGE] != memory.FIXED) & (states[:, ALERTING] == 0)
    entries = bets.entries_of(block)
    strata = bets.strata_of(states, entries, learning, len(seen))
    product = accumulate(np.multiply, bets.factors(states, strata))
    masses = np.maximum.accumulate(
        np.concatenate((states[None, :, MASS], np.where(block.seen, block.mass, 0.0)))
    )
    gamma = np.diff(masses, axis=0)
    given = np.empty_like(product)
    given[0] = gamma[0][:, None]
    np.divide(gamma[1:, :, None], product[:-1], out=given[1:])
    given = accumulate(np.add, given)
    weighted = product * weights
    grown = np.einsum("snk,snk->sn", weighted, given)
    page = np.einsum("snk,nk->sn", weighted, states[:, PAGE]) + states[:, PAGING] * grown
    ticket = np.einsum("snk,nk->sn", weighted, states[:, TICKET]) + states[:, TICKETING] * grown
    mirror, recovery = _recovery(states, strata)
    x = strata.total.sum(axis=2)
    return Part(
        start=states,
        block=block,
        entries=entries,
        mass=masses[1:],
        product=product,
        given=given,
        page=page,
        page_mass=running_sum(states[:, PAGE_MASS], gamma * states[:, PAGING])[1:],
        ticket=ticket,
        ticket_mass=running_sum(states[:, TICKET_MASS], gamma * states[:, TICKETING])[1:],
        recovery=recovery,
        mirror=mirror,
        twin=onset.follow(states[:, CUSUM], product[:, :, :FOLLOWED], block.seen),
        counts=running_sum(states[:, (N, X)], np.stack((seen, x), axis=-1)),
        windows=window.advance(states[:, WINDOWS], x, seen, seen),
    )


def _recovery(states: FloatArray, strata: bets.Strata) -> tuple[FloatArray, FloatArray]:
    """Return the mirror image after each step, (steps, N, 5), and the evidence that the change is over."""
    alerting: BoolArray = (states[:, ALERTING] > 0) & (states[:, memory.STAGE] != memory.LEARNING)
    if not alerting.any():
        shape = strata.share.shape[:2]
        return np.zeros((*shape, len(resolve.BETS))), np.full(shape, np.inf)
    m, mirrored = states[:, MIRROR_M], states[:, MIRRORED]
    z = ((strata.total - m * strata.share) * (mirrored / (1.0 - m))).sum(axis=2)
    running = ((strata.share * mirrored).sum(axis=2) > 0) & alerting
    mirror = resolve.mirror(states[:, MIRROR], np.zeros(len(states)), z, running.astype(np.float64))
    recovery = mirror.sum(axis=2) / len(resolve.BETS)
    return mirror, np.where(alerting, recovery, np.inf)
