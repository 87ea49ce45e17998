"""The event of an alert: how it follows from the states at a change of verdict, its advice, and its one-line summary."""

from datetime import UTC, datetime

import msgspec

from quantdrift.core.notation import number, percent
from quantdrift.core.records import Metric, Verdict
from quantdrift.core.slices import EVERYTHING
from quantdrift.core.tasks import MEASURES, Task
from quantdrift.drift.detectors.protocol import BUDGET, DETECTORS, TAIL
from quantdrift.drift.detectors.tail.pooled_histogram import exceedance
from quantdrift.drift.evidence import header as fields
from quantdrift.drift.evidence.header import Onset
from quantdrift.drift.evidence.interval import Estimate
from quantdrift.drift.evidence.observations import FloatArray
from quantdrift.drift.explain.diagnosis import Aggregate, Begin, Decided, begin_of
from quantdrift.drift.explain.diagnosis_text import decided
from quantdrift.drift.explain.mix import FEWEST_BEFORE
from quantdrift.monitor.fold.alert_text import advice
from quantdrift.storage.monitor.events import (
    AggregateEvidence,
    AlertEvent,
    AlertEvidence,
    AlertSlice,
    VerdictChange,
)
from quantdrift.storage.monitor.explanation import Explanation
from quantdrift.storage.monitor.rows import Episode, SliceRow, TransitionRow, VersionRow

MICROSECONDS = 1_000_000


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
    aggregate: tuple[Verdict, Estimate | None, float | None],
    episode: Episode,
    at_us: int,
    fold_seq: int,
    kind: str = BUDGET.kind,
    budget: float | None = None,
    noise: float = 0.0,
) -> TransitionRow:
    """Return the row of a change of verdict that opens, escalates or closes an alert, with its event.

    Parameters
    ----------
    place
        The slice.
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
    """
    recent = DETECTORS[kind].recent(state)
    tail = exceedance(state) if moved and kind == TAIL.kind else None
    mean, low, high = interval_of(recent)
    n_history = max(int(state[fields.N_TOTAL]) - moved.n_after, 0) if moved else 0
    begin = begin_of(n_history)
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
        change=VerdictChange(before=change[0], after=change[1], reason=reason, advice=ended(change[1])),
        evidence=AlertEvidence(
            metric=metric,
            measure=measure_of(metric, task),
            unit=unit_of(metric, task),
            budget=float(state[fields.M] * state[fields.SCALE]) if budget is None else budget,
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
        event=with_advice(event) if moved else event,
    )


def with_advice(event: AlertEvent) -> AlertEvent:
    """Return the event of an alert that opens or escalates with the advice that follows from what is known of it."""
    whole, explanation = event.aggregate, event.explanation
    text = advice(
        event.evidence.metric,
        event.slice.task,
        Aggregate(
            verdict=whole.verdict,
            mean=whole.mean,
            accepted=whole.accepted,
            itself=event.slice.predicate == EVERYTHING,
        ),
        event.evidence.onset or "",
        begin=Begin(explanation.begin or Begin.CHANGED),
        n_before=event.evidence.n_history or 0,
        version=event.slice.version,
        cause=explanation.cause,
        explained_by=explanation.explained_by,
    )
    return msgspec.structs.replace(event, change=msgspec.structs.replace(event.change, advice=text))


def iso(at_us: int) -> str:
    """Return microseconds since 1970 as ISO 8601 in UTC."""
    seconds, micros = divmod(at_us, MICROSECONDS)
    return datetime.fromtimestamp(seconds, UTC).replace(microsecond=micros).isoformat()


def measure_of(metric: Metric, task: Task) -> str:
    """Return the name for people of a metric of a task."""
    return MEASURES[task].name if metric is Metric.DIVERGENCE else metric.value


def unit_of(metric: Metric, task: Task) -> str:
    """Return the unit of a metric's mean; empty: it has none."""
    return MEASURES[task].unit if metric is Metric.DIVERGENCE else "share of exchanges"


def ended(verdict: Verdict) -> str:
    """Return the advice for an alert that has ended; `unknown` means that its slice is not compared any more."""
    if verdict is Verdict.UNKNOWN:
        return (
            "Nothing: the slice is not compared any more, so its health is unknown. "
            "If it comes back, its detectors start from the beginning."
        )
    return "Nothing. The slice is within its budget again, shown with the same rigour as the alert."


def summary(event: AlertEvent) -> str:
    """Return one line for people: the slice, the verdicts, and the figures that decided."""
    where, change, evidence = event.slice, event.change, event.evidence
    line = f"{where.model} {where.version}, {where.name}: {change.before} -> {change.after}"
    if change.after is Verdict.OK:
        return f"{line}: {_recovered(evidence)}"
    figures = decided(_decided(evidence, where.task), _moment(evidence.onset)) if evidence.onset else ""
    if not figures:
        return f"{line} ({change.reason})"
    return (
        f"{line}: {figures}" if evidence.detector == BUDGET.kind else f"{line}: {figures} ({change.reason})"
    )


def _decided(evidence: AlertEvidence, task: Task) -> Decided:
    return Decided(
        task=task,
        metric=evidence.metric,
        kind=evidence.detector,
        after=evidence.after,
        n_after=evidence.n_since_onset or 0,
        before=evidence.before,
        budget=evidence.budget,
        noise=evidence.noise or 0.0,
        tail_level=evidence.tail_level,
        tail_before=evidence.tail_before,
        tail_after=evidence.tail_after,
    )


def _recovered(evidence: AlertEvidence) -> str:
    """Return what ended an alert: the evidence of recovery. The recent window still contains the drift, so it is left out."""
    share = evidence.metric is Metric.FLIP
    what = "the flip rate" if share else f"the mean {evidence.measure}"
    against = "its learned baseline"
    if evidence.detector == TAIL.kind:
        what = f"the upper tail of {evidence.measure}"
    elif evidence.detector == BUDGET.kind:
        against = f"its budget of {percent(evidence.budget) if share else number(evidence.budget)}"
        against += "" if share or not evidence.unit else f" {evidence.unit}"
    return (
        f"{what} is within {against} again; the evidence of recovery is "
        f"{number(evidence.total, 3)}, and {number(evidence.threshold, 3)} is needed"
    )


def _moment(at: str) -> str:
    return f"{datetime.fromisoformat(at):%Y-%m-%d %H:%M} UTC"


def interval_of(estimate: Estimate | None) -> tuple[float | None, float | None, float | None]:
    """Return mean, low and high; None where nothing was observed, and for the ends of an interval that holds every value."""
    if estimate is None:
        return None, None, None
    return (estimate.mean, None, None) if estimate.missing else (estimate.mean, estimate.low, estimate.high)
