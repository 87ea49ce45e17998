"""The seam that detectors fill, and the registry of those that there are.

A detector is one module: states are rows of float64 that it alone can read, and `run` takes many of them along a
block at a time. Adding one is that module plus one entry in `DETECTORS`.
"""

from typing import Any, Protocol

import msgspec
import numpy as np

from quantdrift.drift.detectors.budget import BudgetDetector
from quantdrift.drift.detectors.change.detector import ChangeDetector
from quantdrift.drift.detectors.tail.detector import TailDetector
from quantdrift.drift.evidence import group
from quantdrift.drift.evidence.header import Onset
from quantdrift.drift.evidence.interval import Estimate
from quantdrift.drift.evidence.numba_cache import note_kept
from quantdrift.drift.evidence.observations import FloatArray, GroupSequence, IntArray, ObservationBlock
from quantdrift.drift.evidence.run import BlockRun, SequenceRun


class Detector(Protocol):
    """A sequential detector with bounded false alarms on the calendar clock."""

    kind: str
    size: int
    width: int

    def run(self, states: FloatArray, block: ObservationBlock) -> BlockRun:
        """Return what signals with `states`, (N, size), go through along `block`."""
        ...

    def follow(self, states: FloatArray, trail: GroupSequence) -> SequenceRun:
        """Return what signals with `states`, (N, size), go through along their groups, and move these on, in place."""
        ...

    def arm(self, state: FloatArray, *, mass: float, at_us: int) -> None:
        """Let the evidence begin anew, in place."""
        ...

    def live(self, state: FloatArray) -> bool:
        """Return whether it takes part; one that still learns gets no allowance and its evidence is 0."""
        ...

    def missing(self, state: FloatArray) -> int:
        """Return how many groups it lacks until it takes part."""
        ...

    def tend(self, state: FloatArray, *, mass: float, at_us: int) -> None:
        """Between batches: let windows move on and what has learned enough take part, in place."""
        ...

    def moved(self, state: FloatArray) -> Onset:
        """Return onset and what moved, of a copy that runs: before `alarmed` resets it."""
        ...

    def recent(self, state: FloatArray) -> Estimate | None:
        """Return mean and interval over the recent window, in the metric's own unit."""
        ...

    def since_change(self, state: FloatArray) -> Estimate | None:
        """Return the same since the last change of verdict; while firing its `low` is the severity."""
        ...

    def evidence(self, state: FloatArray) -> float:
        """Return the evidence for paging."""
        ...

    def evidences(self, states: FloatArray) -> FloatArray:
        """Return `evidence` of each of many states, (N,), to the bit."""
        ...

    def missings(self, states: FloatArray) -> IntArray:
        """Return `missing` of each of many states, (N,)."""
        ...

    def due_us(self, states: FloatArray) -> FloatArray:
        """Return for each of many states, (N,), the event time before which `tend` changes nothing."""
        ...

    def page_mass(self, state: FloatArray) -> float:
        """Return the calendar mass that the page copy was given since its reset."""
        ...

    def alarmed(self, state: FloatArray, *, page: bool) -> None:
        """Reset after an alarm and watch for recovery, in place."""
        ...


class Learner(Detector, Protocol):
    """A detector that measures against a baseline which it has learned."""

    record: type[msgspec.Struct]

    def fresh(self, *, tau: float, scale: float, mass: float, at_us: int) -> FloatArray:
        """Return the state of a new signal, (size,), which knows nothing yet.

        Parameters
        ----------
        tau
            How far the baseline may be exceeded, as a share of it.
        scale
            What one unit of the signal is in the metric's own unit.
        mass, at_us
            The calendar clock now.
        """
        ...

    def inherit(self, state: FloatArray, *, mass: float, at_us: int) -> FloatArray:
        """Return the state of a new signal that is measured against the baseline in `state`, and takes part at once."""
        ...

    def freeze(self, state: FloatArray) -> None:
        """Learn nothing more, in place."""
        ...

    def keep(self, state: FloatArray) -> None:
        """Learn what was seen while an alert lasted that was none, in place."""
        ...

    def aside(self, state: FloatArray) -> bool:
        """Return whether there is anything that `keep` would learn: an alert lasts, or has set something aside."""
        ...

    def learned(self, state: FloatArray) -> int:
        """Return how many groups the baseline is made from."""
        ...

    def content(self, state: FloatArray) -> msgspec.Struct:
        """Return the baseline as it is recorded, of type `record`."""
        ...

    def from_content(self, content: Any, *, scale: float, mass: float, at_us: int) -> FloatArray:
        """Return the state of a signal that is measured against a recorded baseline, of type `record`."""
        ...


BUDGET = BudgetDetector()
CHANGE = ChangeDetector()
TAIL = TailDetector()
LEARNERS: dict[str, Learner] = {CHANGE.kind: CHANGE, TAIL.kind: TAIL}
DETECTORS: dict[str, Detector] = {BUDGET.kind: BUDGET, **LEARNERS}


def compile_all() -> None:
    """Let every detector follow one group: compiles what is not compiled yet, and keeps it where it can be kept."""
    nothing = np.zeros(1)
    for detector in DETECTORS.values():
        trail = GroupSequence(
            ends=np.ones(1, dtype=np.intp),
            x=np.zeros((1, detector.width)),
            seen=np.zeros(1, dtype=np.bool_),
            mass=nothing,
            at_us=nothing,
        )
        states = np.zeros((1, detector.size))
        detector.follow(states, trail)
        detector.evidences(states)
    group.compile_all()
    note_kept()
