"""The diagnosis of an alert, decided once from typed facts. The texts are written from it and derive nothing themselves."""

from enum import StrEnum

import msgspec

from quantdrift.core.records import Metric, Verdict
from quantdrift.core.tasks import Task
from quantdrift.drift.explain.mix import FEWEST_BEFORE


class Kind(StrEnum):
    """Kind of the detector that decided; the names are those in `quantdrift.drift.detectors.protocol`."""

    BUDGET = "budget"
    CHANGE = "change"
    TAIL = "tail"


class Begin(StrEnum):
    """The state of an alert's slice before the estimated onset."""

    NEW_VERSION = "new_version"  # the version was first seen around the onset
    FIRST_SEEN = "first_seen"  # too few exchanges before the onset to say that anything changed
    OLDER = "older"  # above its budget before the onset already
    CHANGED = "changed"  # it has a history, and moved away from it


class AggregateState(StrEnum):
    """The state of the aggregate (all traffic of the version) while a slice alerts."""

    ITSELF = "itself"  # the alert is about the aggregate
    ALERTING = "alerting"
    FINE = "fine"  # its verdict is ok, and its mean is within the accepted mean
    QUIET = "quiet"  # its verdict is ok, and its mean is above the accepted mean or not known
    UNKNOWN = "unknown"


class Aggregate(msgspec.Struct, frozen=True, kw_only=True):
    """Verdict and mean of all traffic of a version.

    Parameters
    ----------
    mean
        Mean of the metric that decided the alert, in the metric's unit.
    accepted
        The aggregate's own budget plus the noise allowance, in the same unit; None where there is no budget.
    itself
        Whether the alert is about the aggregate.
    """

    verdict: Verdict
    mean: float | None = None
    accepted: float | None = None
    itself: bool = False

    @property
    def state(self) -> AggregateState:
        """The state; fine only where both verdict and mean say so."""
        if self.itself:
            return AggregateState.ITSELF
        if self.verdict in {Verdict.WARNING, Verdict.FIRING}:
            return AggregateState.ALERTING
        if self.verdict is Verdict.UNKNOWN:
            return AggregateState.UNKNOWN
        return AggregateState.QUIET if self.mean is None or self.above else AggregateState.FINE

    @property
    def above(self) -> bool:
        """Whether the mean is above the accepted mean, or either of them is unknown."""
        return self.mean is None or self.accepted is None or self.mean > self.accepted


class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """The figures that decided an alert: those of the signal with the most evidence, since the estimated onset.

    Parameters
    ----------
    kind
        The kind of detector, as in `Kind`.
    after, n_after
        The signal's mean (for a tail: its p99) since the onset, in the metric's unit, and the number of exchanges
        behind it.
    before
        The same before the onset; None below `FEWEST_BEFORE` exchanges.
    budget, noise
        The accepted mean, and the allowance for noise that was added to it.
    tail_level, tail_before, tail_after
        For a tail: a level, and the shares of items above it before and since the onset.
    """

    task: Task
    metric: Metric
    kind: str
    after: float | None
    n_after: int
    before: float | None = None
    budget: float | None = None
    noise: float = 0.0
    tail_level: float | None = None
    tail_before: float | None = None
    tail_after: float | None = None


def begin_of(n_before: int, *, new_version: bool = False, above_before: bool = False) -> Begin:
    """Return the state of a slice before the onset.

    Parameters
    ----------
    n_before
        Exchanges of the slice, by this version, that were compared before the onset.
    new_version
        Whether the version was first seen within an hour of the onset, and is not the model's first.
    above_before
        Whether it was above its budget before the onset beyond chance.
    """
    if new_version:
        return Begin.NEW_VERSION
    if n_before < FEWEST_BEFORE:
        return Begin.FIRST_SEEN
    return Begin.OLDER if above_before else Begin.CHANGED
