"""The diagnosis of an alert, decided once from typed facts. The texts are written from it and derive nothing themselves."""

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum

import msgspec

from quantdrift.core.records import Metric, Suspect, Verdict
from quantdrift.core.tasks import Task
from quantdrift.drift.explain.damage import DamageCause
from quantdrift.drift.explain.mix import FEWEST_BEFORE, Z


class Kind(StrEnum):
    """Kind of the detector that decided; the names are those in `quantdrift.drift.detectors.protocol`."""

    BUDGET = "budget"
    CHANGE = "change"
    TAIL = "tail"
    GROWTH = "growth"


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
    latency_budget_s, suspect
        For a latency: what counts as slow, and where to look first.
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
    latency_budget_s: float | None = None
    suspect: Suspect | None = None


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the texts of an alert are written from.

    Parameters
    ----------
    model, version, slice
        Where.
    page
        Whether it pages; else it is a ticket.
    deciding
        The figures that decided.
    begin, n_before
        The state of the slice before the onset, and the exchanges that the deciding signal observed there.
    onset
        The estimated onset, aware.
    whole
        All traffic of the version, by the metric that decided.
    causes
        The parts of the move that rose beyond chance, the largest first: damage, input shift or unseen inputs; empty
        where they cannot be told apart, or nothing before can be compared with.
    undecided
        Whether they were compared, and cannot be told apart.
    changed
        Share of the slice's answers that changed since the onset, where another measure decided.
    daily, daily_basis
        Answers of the slice in a day, at the rate since the onset; and of which time that rate is, in words: empty from a day on.
    evidence_ratio
        Evidence at the alert over what it needed.
    explained_by
        The smaller slice that explains this alert; empty: none.
    news
        What is new around the onset: versions, sidecars, engines.
    """

    model: str
    version: str
    slice: str
    page: bool
    deciding: Decided
    begin: Begin
    n_before: int
    onset: datetime
    whole: Aggregate
    causes: tuple[DamageCause, ...] = ()
    undecided: bool = False
    changed: float | None = None
    daily: float | None = None
    daily_basis: str = ""
    evidence_ratio: float | None = None
    explained_by: str = ""
    news: tuple[str, ...] = ()


def causes_of(
    cause: str | None, parts: Mapping[DamageCause, tuple[float | None, float | None]]
) -> tuple[DamageCause, ...]:
    """Return the causes of a rise, the largest first; empty where none is decided.

    Parameters
    ----------
    cause
        As `quantdrift.drift.explain.damage` names it: one cause, `both` for more than one, or another word.
    parts
        The part of the rise by each cause, with its standard error.
    """
    if cause != DamageCause.BOTH:
        return tuple(one for one in parts if one == cause)
    risen = {one: value for one, (value, se) in parts.items() if value is not None and se and value > Z * se}
    return tuple(sorted(risen, key=lambda one: -risen[one]))


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
