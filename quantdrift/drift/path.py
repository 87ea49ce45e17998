"""What many signals of one kind go through, group by group, and where it leaves them."""

from collections.abc import Callable

import msgspec
import numpy as np

from quantdrift.drift.block import Block, FloatArray, IntArray, Steps, Trail
from quantdrift.drift.signal import (
    LAST_AT,
    MASS,
    PAGE_MASS,
    PAGING,
    TICKET_MASS,
    TICKETING,
)

SIDE_BY_SIDE = 64  # signals whose arrays stay in the processor's cache together


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """The calendar clock along a trail, all (groups,).

    Parameters
    ----------
    mass
        After each group.
    given
        What the page copy is given at each.
    page_mass, ticket_mass
        What the copies were given since their reset.
    """

    mass: FloatArray
    given: FloatArray
    page_mass: FloatArray
    ticket_mass: FloatArray

    def write(self, states: FloatArray, trail: Trail) -> None:
        """Move the header of states, (N, size), on to the last group, in place."""
        last = trail.steps.last
        states[:, MASS] = self.mass[last]
        states[:, PAGE_MASS] = self.page_mass[last]
        states[:, TICKET_MASS] = self.ticket_mass[last]
        at_us = trail.at_us
        if not trail.seen.all():
            at_us = trail.steps.combine(np.maximum, np.where(trail.seen, at_us, 0.0))
        states[:, LAST_AT] = np.maximum(states[:, LAST_AT], at_us[last])


def spend(states: FloatArray, trail: Trail) -> Spent:
    """Return the clock along a trail; a group that was not observed leaves its mass to the next one."""
    steps, mass = trail.steps, trail.mass
    begin, paging, page_mass, ticketing = states[:, (MASS, PAGING, PAGE_MASS, TICKETING)].T[:, steps.row]
    if not trail.seen.all():
        mass = steps.combine(np.maximum, np.where(trail.seen, mass, 0.0))
    mass = np.maximum(mass, begin)
    given = (mass - steps.prior(states[:, MASS], mass)) * paging
    page_mass = page_mass + (mass - begin) * paging
    return Spent(mass=mass, given=given, page_mass=page_mass, ticket_mass=page_mass * ticketing)


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """What signals go through along a trail.

    Parameters
    ----------
    page, page_mass, ticket, ticket_mass, recovery
        (groups,) after each.
    page_bets
        (groups, bets) the page evidence of each bet.
    states
        (N, size) after the last.
    """

    page: FloatArray
    page_mass: FloatArray
    ticket: FloatArray
    ticket_mass: FloatArray
    recovery: FloatArray
    page_bets: FloatArray
    states: FloatArray


Follow = Callable[[FloatArray, Trail], Flow]


class Path:
    """What N signals go through along a block; arrays are (steps, N).

    Parameters
    ----------
    follow
        Of the detector.
    states
        (N, size) before.
    block
        What they are given.
    """

    def __init__(self, follow: Follow, states: FloatArray, block: Block) -> None:
        self._follow, self._start, self._block = follow, states, block
        every = np.full(len(states), len(block.seen) - 1)
        self._flows = [flow for _, flow in self._parts(every)]
        self.page = self._whole([flow.page for flow in self._flows])
        self.page_mass = self._whole([flow.page_mass for flow in self._flows])
        self.ticket = self._whole([flow.ticket for flow in self._flows])
        self.ticket_mass = self._whole([flow.ticket_mass for flow in self._flows])
        self.recovery = self._whole([flow.recovery for flow in self._flows])

    @property
    def page_bets(self) -> FloatArray:
        """Page evidence of each bet, (steps, N, bets)."""
        return self._whole([flow.page_bets for flow in self._flows])

    def stopped(self, step: IntArray) -> FloatArray:
        """Return the states, (N, size), after step `step[i]` of signal i."""
        if (step == len(self._block.seen) - 1).all():
            return np.concatenate([flow.states for flow in self._flows])
        found = np.empty_like(self._start)
        for rows, flow in self._parts(step):
            found[rows] = flow.states
        return found

    def _parts(self, step: IntArray) -> list[tuple[IntArray, Flow]]:
        parts = []
        block, order = self._block, np.argsort(-step, kind="stable")
        for first in range(0, len(order), SIDE_BY_SIDE):
            rows = order[first : first + SIDE_BY_SIDE]
            steps = Steps(step[rows] + 1)
            at = (steps.step, rows[steps.row])
            trail = Trail(
                steps=steps, x=block.x[at], seen=block.seen[at], mass=block.mass[at], at_us=block.at_us[at]
            )
            parts.append((rows, self._follow(self._start[rows], trail)))
        return parts

    def _whole(self, parts: list[FloatArray]) -> FloatArray:
        n_steps = len(self._block.seen)
        return np.concatenate([one.reshape(n_steps, -1, *one.shape[1:]) for one in parts], axis=1)
