"""What many signals of one kind go through, group by group, and where it leaves them."""

from collections.abc import Callable

import msgspec
import numpy as np

from quantdrift.drift.evidence import header
from quantdrift.drift.evidence.numba_cache import compiled
from quantdrift.drift.evidence.observations import FloatArray, GroupSequence, IntArray, ObservationBlock

SIDE_BY_SIDE = 128  # signals whose states stay in the processor's cache together
PAGE, PAGE_MASS, TICKET, TICKET_MASS, RECOVERY = range(5)  # rows of a course
N_ROWS = 5


class SequenceRun(msgspec.Struct, frozen=True, kw_only=True):
    """What signals go through along a trail.

    Parameters
    ----------
    course
        (5, groups) after each: evidence of the page copy and the mass given to it since its reset, the same of the
        ticket copy, and the evidence that an alert is over, infinite for what does not stand in its way.
    states
        (N, size) after the last.
    """

    course: FloatArray
    states: FloatArray


@compiled
def note(course: FloatArray, group: int, state: FloatArray, page: float, recovery: float) -> None:
    """Write down what one signal has come to after a group."""
    course[PAGE, group] = page
    course[PAGE_MASS, group] = state[header.PAGE_MASS]
    # The ticket copy is the page copy until it is paused: it is reset only together with that, or to be paused.
    course[TICKET, group] = page * state[header.TICKETING]
    course[TICKET_MASS, group] = state[header.TICKET_MASS]
    course[RECOVERY, group] = recovery


Follow = Callable[[FloatArray, GroupSequence], SequenceRun]


class BlockRun:
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

    def __init__(self, follow: Follow, states: FloatArray, block: ObservationBlock) -> None:
        self._follow, self._start, self._block = follow, states, block
        steps = len(block.seen)
        self._flow = flow = self._go(np.full(len(states), steps - 1))
        course = flow.course.reshape(N_ROWS, -1, steps).transpose(0, 2, 1)
        self.page, self.page_mass, self.ticket, self.ticket_mass, self.recovery = course

    def stopped(self, step: IntArray) -> FloatArray:
        """Return the states, (N, size), after step `step[i]` of signal i."""
        if (step == len(self._block.seen) - 1).all():
            return self._flow.states.copy()
        return self._go(step).states

    def _go(self, step: IntArray) -> SequenceRun:
        block = self._block
        rows, steps = np.nonzero(np.arange(len(block.seen)) <= step[:, None])
        trail = GroupSequence(
            ends=np.cumsum(step + 1),
            x=block.x[steps, rows],
            seen=block.seen[steps, rows],
            mass=block.mass[steps, rows],
            at_us=block.at_us[steps, rows],
        )
        return self._follow(self._start.copy(), trail)
