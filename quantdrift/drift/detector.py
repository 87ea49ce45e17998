"""The seam that detectors fill, and the registry of those that there are.

A detector is one module: states are rows of float64 that it alone can read, and `run` takes many of them along a
block at a time. Adding one is that module plus one entry in `DETECTORS`.
"""

from typing import Protocol

from quantdrift.drift.block import Block, FloatArray, IntArray
from quantdrift.drift.budget import BudgetDetector


class Path(Protocol):
    """What N signals go through along a block; every array is (steps, N)."""

    @property
    def page(self) -> FloatArray:
        """Evidence of the page copy after each step."""
        ...

    @property
    def page_mass(self) -> FloatArray:
        """Calendar mass that the page copy was given since its reset."""
        ...

    @property
    def ticket(self) -> FloatArray:
        """Evidence of the ticket copy."""
        ...

    @property
    def ticket_mass(self) -> FloatArray:
        """Calendar mass that the ticket copy was given since its reset."""
        ...

    @property
    def recovery(self) -> FloatArray:
        """Evidence that what was alarmed about is over."""
        ...

    def stopped(self, step: IntArray) -> FloatArray:
        """Return the states after step `step[i]` of signal i."""
        ...


class Detector(Protocol):
    """A sequential detector with bounded false alarms on the calendar clock."""

    kind: str
    size: int

    def run(self, states: FloatArray, block: Block) -> Path:
        """Return what signals with `states`, (N, size), go through along `block`."""
        ...

    def arm(self, state: FloatArray, *, mass: float, at_us: int) -> None:
        """Let the evidence begin anew, in place."""
        ...

    def evidence(self, state: FloatArray) -> float:
        """Return the evidence for paging."""
        ...

    def page_mass(self, state: FloatArray) -> float:
        """Return the calendar mass that the page copy was given since its reset."""
        ...

    def alarmed(self, state: FloatArray, *, page: bool) -> None:
        """Reset after an alarm and watch for recovery, in place."""
        ...


BUDGET = BudgetDetector()
DETECTORS: dict[str, Detector] = {BUDGET.kind: BUDGET}
