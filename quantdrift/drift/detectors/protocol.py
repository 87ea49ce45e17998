"""The protocol of detectors, and the registry of all detectors.

A detector is one module: states are rows of float64 that it alone can read, and `run` takes many of them along a
block at a time. Adding one is that module plus one entry in `DETECTORS`.
"""

from typing import Any, Protocol

import msgspec
import numpy as np

from quantdrift.drift.detectors.budget import BudgetDetector
from quantdrift.drift.detectors.change.detector import ChangeDetector
from quantdrift.drift.detectors.growth import GrowthDetector
from quantdrift.drift.detectors.tail.detector import TailDetector
from quantdrift.drift.evidence import group
from quantdrift.drift.evidence.header import Onset
from quantdrift.drift.evidence.interval import WeightedEstimate
from quantdrift.drift.evidence.numba_cache import mark_complete
from quantdrift.drift.evidence.observations import FloatArray, GroupSequence, IntArray, ObservationBlock
from quantdrift.drift.evidence.run import BlockRun, SequenceRun


class Detector(Protocol):
    """A sequential detector with bounded false alarms on the calendar clock."""

    kind: str
    size: int
    width: int

    def run(self, states: FloatArray, block: ObservationBlock) -> BlockRun:
        """Run signals with `states`, (N, size), over `block`, and return their run."""
        ...

    def follow(self, states: FloatArray, groups: GroupSequence) -> SequenceRun:
        """Run signals over their groups, changing `states`, (N, size), in place, and return their run."""
        ...

    def arm(self, state: FloatArray, *, mass: float, at_us: int) -> None:
        """Restart the evidence, in place."""
        ...

    def live(self, state: FloatArray) -> bool:
        """Return whether the signal is live; one that still learns gets no allowance and its evidence is 0."""
        ...

    def missing(self, state: FloatArray) -> int:
        """Return how many more groups the signal needs until it is live."""
        ...

    def tend(self, state: FloatArray, *, mass: float, at_us: int) -> None:
        """Do the work between batches, in place: advance windows, and go live when the baseline is ready."""
        ...

    def moved(self, state: FloatArray) -> Onset:
        """Return the onset and the figures that moved, of a running copy: call it before `alarmed` resets it."""
        ...

    def recent(self, state: FloatArray) -> WeightedEstimate | None:
        """Return mean and interval over the recent window, in the metric's own unit."""
        ...

    def since_change(self, state: FloatArray) -> WeightedEstimate | None:
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
        """Return the calendar mass given to the page copy since its reset."""
        ...

    def carry(self, state: FloatArray, before: FloatArray) -> bool:
        """Move the evidence of a version that ended to the one that serves instead, both in place.

        The sum stays the same, and with it the bound (`quantdrift.drift.evidence.header.handed_over`).

        Parameters
        ----------
        state
            Of the version that serves.
        before
            Of the version that ended: its evidence is zero afterwards.

        Returns
        -------
        Whether anything was moved: not while one of them alerts or learns.
        """
        ...

    def alarmed(self, state: FloatArray, *, page: bool) -> None:
        """Reset after an alarm and watch for recovery, in place."""
        ...


class Learner(Detector, Protocol):
    """A detector that compares with a learned baseline."""

    record: type[msgspec.Struct]

    def fresh(self, *, tau: float, scale: float, mass: float, at_us: int) -> FloatArray:
        """Return the state of a new signal, (size,), that has learned nothing yet.

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
        """Return the state of a new signal with the baseline in `state`: live at once, or learning on where that learns."""
        ...

    def freeze(self, state: FloatArray) -> None:
        """Stop learning, in place."""
        ...

    def keep(self, state: FloatArray) -> None:
        """Learn the groups that were seen during a false alert, in place."""
        ...

    def aside(self, state: FloatArray) -> bool:
        """Return whether `keep` would change the baseline: an alert is open, or has set groups aside."""
        ...

    def learned(self, state: FloatArray) -> int:
        """Return the number of groups in the baseline."""
        ...

    def content(self, state: FloatArray) -> msgspec.Struct:
        """Return the baseline for storing, of type `record`."""
        ...

    def from_content(self, content: Any, *, scale: float, mass: float, at_us: int) -> FloatArray:
        """Return the state of a signal with a stored baseline, of type `record`."""
        ...


BUDGET = BudgetDetector()
CHANGE = ChangeDetector()
TAIL = TailDetector()
GROWTH = GrowthDetector()
LEARNERS: dict[str, Learner] = {CHANGE.kind: CHANGE, TAIL.kind: TAIL, GROWTH.kind: GROWTH}
DETECTORS: dict[str, Detector] = {BUDGET.kind: BUDGET, **LEARNERS}


def compile_all() -> None:
    """Run every detector over one group, which compiles its loops and stores them in the cache where there is one."""
    nothing = np.zeros(1)
    for detector in DETECTORS.values():
        groups = GroupSequence(
            ends=np.ones(1, dtype=np.intp),
            x=np.zeros((1, detector.width)),
            seen=np.zeros(1, dtype=np.bool_),
            mass=nothing,
            at_us=nothing,
            captured_us=nothing,
        )
        states = np.zeros((1, detector.size))
        detector.follow(states, groups)
        detector.evidences(states)
    BUDGET.recents(np.zeros((1, BUDGET.size)), np.zeros(1, dtype=np.intp))
    group.compile_all()
    mark_complete()
