"""The events that are sent: of an alert, as nested records with one flat form, and of a change of noise.

The monitor builds an `AlertEvent` at the change of verdict, and explains it. It is stored once, flat, in `transition.details`, with
its words in `transition.text`: the outbox and the alert point there, and every surface reads that. The attributes that reach the
collector are the flat form, each with `quantdrift.` before its name. Whoever reads it back gets the same record.
"""

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any

import msgspec

from quantdrift.core.records import Metric, Side, Suspect, Verdict
from quantdrift.core.signals import Signal, signal_of
from quantdrift.core.slices import ALL, EVERYTHING
from quantdrift.core.tasks import Build, Task
from quantdrift.facts import figures
from quantdrift.facts.explanation import Begin, Explanation
from quantdrift.facts.figures import Figure, FigureName, Subject, when_paged


class AlertSlice(msgspec.Struct, frozen=True, kw_only=True, rename={"name": "slice"}):
    """The slice that an alert is about.

    Parameters
    ----------
    model, version, reference
        Candidate, its version, the digest of its reference.
    name, predicate
        The slice's name and its canonical text.
    task
        The model's task: it defines what a flip is, and the graded divergence.
    """

    model: str
    version: str
    reference: str
    name: str
    predicate: str
    task: Task = Task.CLASSIFICATION


class Ending(StrEnum):
    """Why an alert is over."""

    RECOVERED = "recovered"  # by evidence
    REPLACED = (
        "replaced"  # its version serves no more, and another one does; it comes back if the version does
    )
    RETIRED = "retired"  # the slice is not compared any more
    CLOSED = "closed"  # by a person


class VerdictChange(
    msgspec.Struct, frozen=True, kw_only=True, rename={"before": "from_verdict", "after": "verdict"}
):
    """The verdicts before and after, and why.

    Parameters
    ----------
    ended
        Why the alert is over; None while it lasts.
    last_seen, serving
        Of a version that was replaced: the capture time of its newest exchange, ISO 8601, and the versions that serve now.
    """

    before: Verdict
    after: Verdict
    reason: str
    ended: Ending | None = None
    last_seen: str | None = None
    serving: tuple[str, ...] | None = None


class AlertEvidence(msgspec.Struct, frozen=True, kw_only=True, rename={"total": "evidence"}):
    """The figures that decided, and those that stand beside them.

    Parameters
    ----------
    metric, measure, unit, budget
        The metric with the most evidence, its name for people, its unit (empty: none) and the accepted mean.
    noise
        The allowance added to the budget because reference or candidate differ from themselves.
    detector
        The kind of detector with the most evidence: `budget` (the mean is above the accepted mean), `change` (flips
        are above their learned baseline), `tail` (the upper tail of the divergence is above its learned baseline;
        `mean`, `low`, `high`, `before` and `after` are then its 99 % quantile) or `growth` (the latency is above its learned
        baseline, which `latency_budget_s` follows from).
    total, threshold
        Evidence at the change (summed over the slice's signals; for the end of an alert the least of their evidence
        of recovery), and the threshold it had to reach.
    before, after
        The mean before and since the estimated onset: the figures that decided. `after` is biased upwards, because the
        onset is chosen from the same data. `before` is left out below 30 exchanges.
    onset
        Estimated onset, ISO 8601; None where an alert has ended.
    n_groups, n_since_onset, n_history
        Exchanges compared in this slice so far, and those that the deciding signal observed since the onset and before
        it.
    mean, low, high, n_recent
        The mean over the recent window with its time-uniform 95 % interval, and the window's exchanges. These figures
        did not decide.
    tail_level, tail_before, tail_after
        For a tail: a level, and the share of items above it before and since the onset, where that rose beyond chance.
    latency_budget_s, suspect
        For a latency: the seconds that `before`, `after` and `mean` are the share of slower exchanges of, and where to look
        first.
    """

    metric: Metric
    measure: str = ""
    unit: str
    budget: float
    noise: float | None = None
    detector: str = "budget"
    total: float
    threshold: float
    before: float | None = None
    after: float | None = None
    onset: str | None = None
    n_groups: int
    n_since_onset: int | None = None
    n_history: int | None = None
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    n_recent: int
    tail_level: float | None = None
    tail_before: float | None = None
    tail_after: float | None = None
    latency_budget_s: float | None = None
    suspect: Suspect | None = None

    @property
    def signal(self) -> Signal:
        """The record of the signal that decided."""
        return signal_of(self.metric)


class AggregateState(StrEnum):
    """The state of all traffic of the version while a slice alerts."""

    ITSELF = "itself"  # the alert is about all traffic
    ALERTING = "alerting"
    FINE = "fine"  # its verdict is ok, and its mean is within the accepted mean
    QUIET = "quiet"  # its verdict is ok, and its mean is above the accepted mean or not known
    UNKNOWN = "unknown"


class AggregateEvidence(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={
        "verdict": "aggregate_verdict",
        "mean": "aggregate_mean",
        "low": "aggregate_low",
        "high": "aggregate_high",
        "accepted": "aggregate_accepted",
    },
):
    """The same metric over all of the version's traffic: it shows whether only this slice drifts.

    Parameters
    ----------
    mean, low, high
        Over the recent window.
    accepted
        The accepted mean there, noise allowance included.
    """

    verdict: Verdict
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    accepted: float | None = None

    @property
    def state(self) -> AggregateState:
        """The state, beside a slice; fine only where both verdict and mean say so."""
        if self.verdict in {Verdict.WARNING, Verdict.FIRING}:
            return AggregateState.ALERTING
        if self.verdict is Verdict.UNKNOWN:
            return AggregateState.UNKNOWN
        is_within = self.mean is not None and self.accepted is not None and self.mean <= self.accepted
        return AggregateState.FINE if is_within else AggregateState.QUIET


class AlertExamples(msgspec.Struct, frozen=True, kw_only=True, rename={"exchanges": "examples"}):
    """The most divergent recent exchanges, and links to their production traces."""

    exchanges: tuple[str, ...] = ()
    traces: tuple[str, ...] = ()


class AlertEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One change of verdict that opens, escalates or closes an alert.

    Parameters
    ----------
    explanation
        Why the slice alerts. Before the explainer has seen it, only the state of the slice before the onset (`begin`).
    examples
        Found when the event is written.
    """

    slice: AlertSlice
    change: VerdictChange
    evidence: AlertEvidence
    aggregate: AggregateEvidence
    explanation: Explanation = Explanation()
    examples: AlertExamples = AlertExamples()

    @property
    def is_open(self) -> bool:
        """Whether it opens an alert or makes it worse; else it ends one."""
        return self.change.after in {Verdict.WARNING, Verdict.FIRING}

    @property
    def pages(self) -> bool:
        """Whether it pages; else it is a ticket, or the end of an alert."""
        return self.change.after is Verdict.FIRING

    @property
    def onset(self) -> datetime | None:
        """The estimated onset, aware; None where an alert has ended."""
        return None if self.evidence.onset is None else datetime.fromisoformat(self.evidence.onset)

    @property
    def begin(self) -> Begin:
        """The state of the slice before the onset."""
        return Begin(self.explanation.begin or Begin.CHANGED)

    @property
    def limit(self) -> float:
        """The accepted mean, the allowance for noise included."""
        return self.evidence.budget + (self.evidence.noise or 0.0)

    @property
    def whole(self) -> AggregateState:
        """The state of all traffic."""
        return AggregateState.ITSELF if self.slice.predicate == EVERYTHING else self.aggregate.state

    @property
    def build(self) -> Build:
        """What the model is made of, as far as it is known: what helps depends on it."""
        if self.explanation.build in set(Build):
            return Build(self.explanation.build)
        return Build.LANGUAGE if self.slice.task is Task.GENERATION else Build.NETWORK

    def when_paged(self, written_at: datetime) -> Figure | None:
        """Return the share of changed answers from the onset until the alert was written; None where it does not say so."""
        share, onset = self.explanation, self.onset
        if share.changed is None or onset is None:
            return None
        return Figure(
            name=FigureName.CHANGED_SHARE,
            value=share.changed,
            low=share.changed_low,
            high=share.changed_high,
            n=share.n_answers or 0,
            n_people=share.n_people,
            window=when_paged(onset, written_at),
            of=Subject(model=self.slice.model, version=self.slice.version, slice=self.slice.name),
            as_of=written_at,
        )

    def changed_per_day(self, written_at: datetime) -> Figure | None:
        """Return the changed answers a day at the rate from the onset until the alert was written; None where it does not say so."""
        share, requests = self.when_paged(written_at), self.explanation.requests_per_day
        if share is None or requests is None:
            return None
        rate = {"name": FigureName.REQUESTS_PER_DAY, "value": requests, "low": None, "high": None}
        basis = self.explanation.basis or ""
        return figures.changed_per_day(msgspec.structs.replace(share, **rate, basis=basis), share)

    @property
    def daily(self) -> float:
        """Changed answers a day, 0 where the event does not say so."""
        a_day = None if self.onset is None else self.changed_per_day(self.onset)
        return 0.0 if a_day is None else a_day.value

    def attributes(self) -> dict[str, Any]:
        """Return the flat form: plain JSON types by name, without values that are unknown."""
        flat: dict[str, Any] = {}
        for part in (self.slice, self.change, self.evidence, self.aggregate, self.examples):
            flat |= msgspec.to_builtins(part)
        present = {name: value for name, value in flat.items() if value is not None}
        return present | self.explanation.attributes()

    @classmethod
    def read(cls, details: Mapping[str, Any]) -> "AlertEvent":
        """Return the event whose flat form is `details`.

        Raises
        ------
        msgspec.ValidationError
            They have another form: a change between `ok` and `unknown` has no event.
        """
        return cls(
            slice=msgspec.convert(details, AlertSlice),
            change=msgspec.convert(details, VerdictChange),
            evidence=msgspec.convert(details, AlertEvidence),
            aggregate=msgspec.convert(details, AggregateEvidence),
            explanation=msgspec.convert(details, Explanation),
            examples=msgspec.convert(details, AlertExamples),
        )


class NoiseEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A change of noise, flat, as it is stored and sent.

    Parameters
    ----------
    model, version, reference
        Candidate, its version, the digest of its reference.
    slice
        Name of the slice; `all`: all of the version's traffic.
    side
        The side that differs from itself: `reference` or `candidate`.
    metric, measure, unit
        The metric, its name for people, and its unit (empty: none).
    exceeds
        Whether the noise is too high from now on; false: it was shown to be below the limit again.
    mean, low, high, n_recent
        Mean divergence of the side from itself, its time-uniform bounds, and the number of exchanges behind them.
    budget, limit
        The accepted mean, and the part of it that noise may reach.
    added
        The allowance that is added to the budget of the slice; of `all`, also to those of the slices whose own noise is
        not known well enough.
    """

    model: str
    version: str
    reference: str
    slice: str = ALL
    side: Side
    metric: Metric
    measure: str
    unit: str
    exceeds: bool
    mean: float
    low: float
    high: float
    n_recent: int
    budget: float
    limit: float
    added: float
    advice: str


def event_of(details: Mapping[str, Any]) -> AlertEvent | None:
    """Return the event in `details`, or None where they hold none."""
    try:
        return AlertEvent.read(details)
    except msgspec.ValidationError:
        return None
