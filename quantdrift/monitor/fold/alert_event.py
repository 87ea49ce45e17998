"""The event of a change of verdict: its attributes, its row, and its one-line summary."""

from datetime import UTC, datetime
from typing import Any

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
from quantdrift.drift.explain.diagnosis import Aggregate, Decided, begin_of
from quantdrift.drift.explain.diagnosis_text import decided
from quantdrift.drift.explain.mix import FEWEST_BEFORE
from quantdrift.monitor.fold.alert_text import advice
from quantdrift.storage.monitor.rows import Episode, SliceRow, TransitionRow, VersionRow

MICROSECONDS = 1_000_000


class AlertEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One change of verdict, flat, as it is stored and sent; `None` is left out of the event.

    Parameters
    ----------
    model, version, reference
        Candidate, its version, the digest of its reference.
    slice, predicate
        The slice's name and its canonical text.
    task
        The model's task: it defines what a flip is, and the graded divergence.
    metric, measure, unit, budget
        The metric with the most evidence, its name for people, its unit (empty: none) and the accepted mean.
    noise
        The allowance added to the budget because reference or candidate differ from themselves.
    before, after
        The mean before and since the estimated onset: the figures that decided. `after` is biased upwards, because the
        onset is chosen from the same data. `before` is left out below 30 exchanges.
    mean, low, high, n_recent
        The mean over the recent window with its time-uniform 95 % interval, and the window's exchanges. These figures
        did not decide.
    onset
        Estimated onset, ISO 8601.
    n_groups, n_since_onset, n_history
        Exchanges compared in this slice so far, and those that the deciding signal observed since the onset and before
        it.
    begin
        The state of the slice before the onset; `new_version` only where the alert could be explained.
    evidence, threshold
        Evidence at the change (summed over the slice's signals; for the end of an alert the least of their evidence
        of recovery), and the threshold it had to reach.
    aggregate_verdict, aggregate_mean, aggregate_low, aggregate_high
        The same metric over all of the version's traffic, recent window: it shows whether only this slice drifts.
    aggregate_accepted
        The accepted mean there, noise allowance included.
    detector
        The kind of detector with the most evidence: `budget` (the mean is above the accepted mean), `change` (flips
        are above their learned baseline) or `tail` (the upper tail of the divergence is above its learned baseline;
        `mean`, `low`, `high`, `before` and `after` are then its 99 % quantile).
    tail_level, tail_before, tail_after
        For a tail: a level, and the share of items above it before and since the onset, where that rose beyond chance.
    examples, traces
        The most divergent recent exchanges, and links to their production traces.
    """

    model: str
    version: str
    reference: str
    slice: str
    predicate: str
    from_verdict: Verdict
    verdict: Verdict
    reason: str
    task: Task = Task.CLASSIFICATION
    metric: Metric
    measure: str = ""
    unit: str
    budget: float
    noise: float | None = None
    before: float | None = None
    after: float | None = None
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    n_recent: int
    n_groups: int
    evidence: float
    threshold: float
    aggregate_verdict: Verdict
    aggregate_mean: float | None = None
    aggregate_low: float | None = None
    aggregate_high: float | None = None
    aggregate_accepted: float | None = None
    onset: str | None = None
    n_since_onset: int | None = None
    n_history: int | None = None
    begin: str | None = None
    advice: str
    detector: str = BUDGET.kind
    tail_level: float | None = None
    tail_before: float | None = None
    tail_after: float | None = None
    examples: tuple[str, ...] = ()
    traces: tuple[str, ...] = ()

    def attributes(self) -> dict[str, Any]:
        """Return it as plain JSON types, without unknown values."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return {name: value for name, value in plain.items() if value is not None}


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
    """Return the row of a change of verdict, with the attributes of its event.

    Parameters
    ----------
    place
        The slice.
    change
        The verdicts before and after.
    metric, kind, state
        The metric and the kind of detector that decided, and that detector's state.
    n_groups, evidence, threshold
        As in `AlertEvent`.
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
    aggregate_mean, aggregate_low, aggregate_high = interval_of(aggregate[1])
    n_history = max(int(state[fields.N_TOTAL]) - moved.n_after, 0) if moved else 0
    begin = begin_of(n_history)
    whole = Aggregate(
        verdict=aggregate[0],
        mean=aggregate_mean,
        accepted=aggregate[2],
        itself=place.predicate == EVERYTHING,
    )
    event = AlertEvent(
        model=version.model,
        version=version.candidate_version,
        reference=version.reference_digest,
        slice=place.name,
        predicate=place.predicate,
        from_verdict=change[0],
        verdict=change[1],
        reason=reason,
        task=task,
        metric=metric,
        measure=measure_of(metric, task),
        unit=unit_of(metric, task),
        budget=float(state[fields.M] * state[fields.SCALE]) if budget is None else budget,
        noise=noise or None,
        before=moved.before if moved and moved.n_before >= FEWEST_BEFORE else None,
        after=moved.after if moved else None,
        mean=mean,
        low=low,
        high=high,
        n_recent=recent.n if recent else 0,
        n_groups=n_groups,
        evidence=evidence,
        threshold=threshold,
        aggregate_verdict=aggregate[0],
        aggregate_mean=aggregate_mean,
        aggregate_low=aggregate_low,
        aggregate_high=aggregate_high,
        aggregate_accepted=aggregate[2],
        onset=iso(moved.onset_us) if moved else None,
        n_since_onset=moved.n_after if moved else None,
        n_history=n_history if moved else None,
        begin=begin if moved else None,
        advice=advice(
            metric,
            task,
            whole,
            iso(moved.onset_us),
            begin=begin,
            n_before=n_history,
            version=version.candidate_version,
        )
        if moved
        else ended(change[1]),
        detector=kind,
        tail_level=tail.level if tail else None,
        tail_before=tail.before if tail else None,
        tail_after=tail.after if tail else None,
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
        details=event.attributes(),
    )


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
    where = f"{event.model} {event.version}, {event.slice}: {event.from_verdict} -> {event.verdict}"
    if event.verdict is Verdict.OK:
        return f"{where}: {_recovered(event)}"
    figures = decided(_decided(event), _moment(event.onset)) if event.onset else ""
    if not figures:
        return f"{where} ({event.reason})"
    return f"{where}: {figures}" if event.detector == BUDGET.kind else f"{where}: {figures} ({event.reason})"


def _decided(event: AlertEvent) -> Decided:
    return Decided(
        task=event.task,
        metric=event.metric,
        kind=event.detector,
        after=event.after,
        n_after=event.n_since_onset or 0,
        before=event.before,
        budget=event.budget,
        noise=event.noise or 0.0,
        tail_level=event.tail_level,
        tail_before=event.tail_before,
        tail_after=event.tail_after,
    )


def _recovered(event: AlertEvent) -> str:
    """Return what ended an alert: the evidence of recovery. The recent window still contains the drift, so it is left out."""
    share = event.metric is Metric.FLIP
    what = "the flip rate" if share else f"the mean {event.measure}"
    against = "its learned baseline"
    if event.detector == TAIL.kind:
        what = f"the upper tail of {event.measure}"
    elif event.detector == BUDGET.kind:
        against = f"its budget of {percent(event.budget) if share else number(event.budget)}"
        against += "" if share or not event.unit else f" {event.unit}"
    return (
        f"{what} is within {against} again; the evidence of recovery is "
        f"{number(event.evidence, 3)}, and {number(event.threshold, 3)} is needed"
    )


def _moment(at: str) -> str:
    return f"{datetime.fromisoformat(at):%Y-%m-%d %H:%M} UTC"


def interval_of(estimate: Estimate | None) -> tuple[float | None, float | None, float | None]:
    """Return mean, low and high; None where nothing was observed, and for the ends of an interval that holds every value."""
    if estimate is None:
        return None, None, None
    return (estimate.mean, None, None) if estimate.missing else (estimate.mean, estimate.low, estimate.high)
