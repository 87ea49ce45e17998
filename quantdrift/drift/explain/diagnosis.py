"""The case of an alert, decided once from typed facts; whoever words it is handed the case and re-derives nothing."""

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
    """How an alert's slice stood before the estimated onset."""

    NEW_VERSION = "new_version"  # the version came with the onset
    FIRST_SEEN = "first_seen"  # too few exchanges before it to say that anything changed
    OLDER = "older"  # above its budget before it already
    CHANGED = "changed"  # it has a history, and left it


class Whole(StrEnum):
    """How all of the version's traffic stands beside an alert."""

    ITSELF = "itself"  # the alert is about all traffic
    ALERTING = "alerting"
    FINE = "fine"  # its verdict is ok, and its mean is within what is accepted
    QUIET = "quiet"  # its verdict is ok, and its mean is above what is accepted or not known
    UNKNOWN = "unknown"


class Aggregate(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of all of a version's traffic.

    Parameters
    ----------
    verdict
        The monitor's.
    mean
        Of the metric that decided the alert, in its unit.
    accepted
        Its own budget and what is added to that for noise, in the same unit; None where there is no budget.
    itself
        Whether the alert is about all traffic.
    """

    verdict: Verdict
    mean: float | None = None
    accepted: float | None = None
    itself: bool = False

    @property
    def stands(self) -> Whole:
        """How it stands: fine only where both verdict and mean say so."""
        if self.itself:
            return Whole.ITSELF
        if self.verdict in {Verdict.WARNING, Verdict.FIRING}:
            return Whole.ALERTING
        if self.verdict is Verdict.UNKNOWN:
            return Whole.UNKNOWN
        return Whole.QUIET if self.mean is None or self.above else Whole.FINE

    @property
    def above(self) -> bool:
        """Whether its mean is not known to be within what is accepted."""
        return self.mean is None or self.accepted is None or self.mean > self.accepted


class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """What decided an alert: the signal with the most evidence, from the estimated onset on.

    Parameters
    ----------
    task, metric, kind
        The signal.
    after, n_after
        Its mean (of a tail: p99) since the onset, in the metric's unit, and the exchanges that it rests on.
    before
        The same before the onset; None below `FEWEST_BEFORE` exchanges.
    budget, noise
        What is accepted, and what was added to that for noise.
    tail_level, tail_before, tail_after
        Of a tail: a level, and the shares of items above it.
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
    """Return how a slice stood before the onset.

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
