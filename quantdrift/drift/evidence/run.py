"""The run of a detector over the groups of many signals: the evidence after each group, and the final states."""

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
    """The result of a run over a `GroupSequence`.

    Parameters
    ----------
    course
        (5, groups) after each group: evidence of the page copy and the mass given to it since its reset; the same of the
        ticket copy; and the evidence that an alert is over, infinite for a signal that does not prevent its end.
    states
        (N, size) after the last group.
    """

    course: FloatArray
    states: FloatArray


@compiled
def note(course: FloatArray, group: int, state: FloatArray, page: float, recovery: float) -> None:
    """Write the figures of one signal after a group."""
    course[PAGE, group] = page
    course[PAGE_MASS, group] = state[header.PAGE_MASS]
    # The ticket copy is the page copy until it is paused: it is reset only together with that, or to be paused.
    course[TICKET, group] = page * state[header.TICKETING]
    course[TICKET_MASS, group] = state[header.TICKET_MASS]
    course[RECOVERY, group] = recovery


Follow = Callable[[FloatArray, GroupSequence], SequenceRun]


class BlockRun:
    """A run of N signals over an `ObservationBlock`; arrays are (steps, N).

    Parameters
    ----------
    follow
        The detector's run over a `GroupSequence`.
    states
        (N, size) before the block.
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
        sequence = GroupSequence(
            ends=np.cumsum(step + 1),
            x=block.x[steps, rows],
            seen=block.seen[steps, rows],
            mass=block.mass[steps, rows],
            at_us=block.at_us[steps, rows],
            captured_us=block.at_us[steps, rows],
        )
        return self._follow(self._start.copy(), sequence)
