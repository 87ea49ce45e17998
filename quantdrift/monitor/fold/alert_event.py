"""The event of an alert: how it follows from the states at a change of verdict."""

import math
from datetime import UTC, datetime

import msgspec

from quantdrift.core.records import Metric, Suspect, Verdict
from quantdrift.core.signals import signal_of
from quantdrift.core.tasks import MEASURES, Task
from quantdrift.drift.detectors.protocol import BUDGET, DETECTORS, TAIL
from quantdrift.drift.detectors.tail.pooled_histogram import exceedance
from quantdrift.drift.evidence import header as fields
from quantdrift.drift.evidence.header import Onset
from quantdrift.drift.evidence.interval import WeightedEstimate
from quantdrift.drift.evidence.observations import FloatArray
from quantdrift.facts.events import (
    AggregateEvidence,
    AlertEvent,
    AlertEvidence,
    AlertSlice,
    Ending,
    VerdictChange,
)
from quantdrift.facts.explanation import FEWEST_BEFORE, Begin, Explanation, Z
from quantdrift.storage.fold_rows import Episode, SliceRow, TransitionRow, VersionRow

MICROSECONDS = 1_000_000


class AlertEnd(msgspec.Struct, frozen=True, kw_only=True):
    """Why an alert is over; of a version that was replaced, when it was last seen, and which versions serve now."""

    ended: Ending
    last_seen_us: int | None = None
    serving: tuple[str, ...] | None = None


def transition_row(
    *,
    task: Task,
    version: VersionRow,
    place: SliceRow,
    change: tuple[Verdict, Verdict],
    reason: str,
    metric: Metric,
    state: FloatArray,
    n_groups: int,
    moved: Onset | None,
    evidence: float,
    threshold: float,
    aggregate: tuple[Verdict, WeightedEstimate | None, float | None],
    episode: Episode,
    at_us: int,
    fold_seq: int,
    kind: str = BUDGET.kind,
    budget: float | None = None,
    noise: float = 0.0,
    latency_budget_s: float | None = None,
    suspect: Suspect | None = None,
    end: AlertEnd | None = None,
    quiet: bool = False,
) -> TransitionRow:
    """Return the row of a change of verdict that opens, escalates or closes an alert, with its event.

    Parameters
    ----------
    change
        The verdicts before and after.
    metric, kind, state
        The metric and the kind of detector that decided, and that detector's state.
    n_groups, evidence, threshold
        As `n_groups`, `total` and `threshold` in `AlertEvidence`.
    moved
        The estimated onset with the means around it; None where an alert has ended.
    aggregate
        Verdict, estimate and accepted mean (noise allowance included) over all of the version's traffic.
    budget
        The accepted mean, in the metric's unit; None: the mean that `state` tests against.
    noise
        The allowance added to it for noise, in the same unit.
    latency_budget_s, suspect
        As in `AlertEvidence`.
    end
        Why the alert is over; None while it lasts.
    quiet
        As in `TransitionRow`.
    """
    recent = DETECTORS[kind].recent(state)
    tail = exceedance(state) if moved and kind == TAIL.kind else None
    mean, low, high = interval_of(recent)
    n_history = max(int(state[fields.N_TOTAL]) - moved.n_after, 0) if moved else 0
    if budget is None:
        budget = float(state[fields.M] * state[fields.SCALE])
    is_older = kind == BUDGET.kind and _is_above(moved, budget + noise, float(state[fields.SCALE]))
    begin = Begin.FIRST_SEEN if n_history < FEWEST_BEFORE else Begin.OLDER if is_older else Begin.CHANGED
    verdict, estimate, accepted = aggregate
    aggregate_mean, aggregate_low, aggregate_high = interval_of(estimate)
    event = AlertEvent(
        slice=AlertSlice(
            model=version.model,
            version=version.candidate_version,
            reference=version.reference_digest,
            name=place.name,
            predicate=place.predicate,
            task=task,
        ),
        change=VerdictChange(
            before=change[0],
            after=change[1],
            reason=reason,
            ended=end.ended if end else None,
            last_seen=iso(end.last_seen_us) if end and end.last_seen_us is not None else None,
            serving=end.serving if end else None,
        ),
        evidence=AlertEvidence(
            metric=metric,
            measure=measure_of(metric, task),
            unit=unit_of(metric, task),
            budget=budget,
            noise=noise or None,
            detector=kind,
            total=evidence,
            threshold=threshold,
            before=moved.before if moved and moved.n_before >= FEWEST_BEFORE else None,
            after=moved.after if moved else None,
            onset=iso(moved.onset_us) if moved else None,
            n_groups=n_groups,
            n_since_onset=moved.n_after if moved else None,
            n_history=n_history if moved else None,
            mean=mean,
            low=low,
            high=high,
            n_recent=recent.n if recent else 0,
            tail_level=tail.level if tail else None,
            tail_before=tail.before if tail else None,
            tail_after=tail.after if tail else None,
            latency_budget_s=latency_budget_s,
            suspect=suspect,
        ),
        aggregate=AggregateEvidence(
            verdict=verdict, mean=aggregate_mean, low=aggregate_low, high=aggregate_high, accepted=accepted
        ),
        explanation=Explanation(begin=begin if moved else None),
    )
    return TransitionRow(
        model_version_id=version.id,
        slice_id=place.id,
        from_verdict=change[0],
        to_verdict=change[1],
        at_us=at_us,
        fold_seq=fold_seq,
        episode=episode,
        metric=metric,
        onset_us=moved.onset_us if moved else at_us,
        reason=reason,
        event=event,
        ended=end.ended if end else None,
        quiet=quiet,
    )


def _is_above(moved: Onset | None, limit: float, scale: float) -> bool:
    """Return whether the mean before the onset was above the limit beyond chance.

    Assumption: groups are independent, with values in [0, scale]. Bound: of a mean at the limit it is said with a probability of 2.5 %
    at most, asymptotically: no such value has a larger variance than limit (scale - limit). The onset is where the mean rose most, which
    makes the mean before it smaller, if anything.
    """
    if moved is None or moved.before is None or not moved.n_before:
        return False
    return moved.before > limit + Z * math.sqrt(max(limit * (scale - limit), 0.0) / moved.n_before)


def iso(at_us: int) -> str:
    """Return microseconds since 1970 as ISO 8601 in UTC."""
    seconds, micros = divmod(at_us, MICROSECONDS)
    return datetime.fromtimestamp(seconds, UTC).replace(microsecond=micros).isoformat()


def measure_of(metric: Metric, task: Task) -> str:
    """Return the name for people of a metric of a task."""
    return metric.value if signal_of(metric).is_share else MEASURES[task].name


def unit_of(metric: Metric, task: Task) -> str:
    """Return the unit of a metric's mean; empty: it has none."""
    signal = signal_of(metric)
    return f"share of {signal.things or 'exchanges'}" if signal.is_share else MEASURES[task].unit


def interval_of(estimate: WeightedEstimate | None) -> tuple[float | None, float | None, float | None]:
    """Return mean, low and high; None where nothing was observed, and for the ends of an interval that holds every value."""
    if estimate is None:
        return None, None, None
    return (estimate.mean, None, None) if estimate.missing else (estimate.mean, estimate.low, estimate.high)
