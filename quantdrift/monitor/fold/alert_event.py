"""What an alert tells: the attributes of its event, and what to do next."""

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
    from_verdict, verdict, reason
        What changed, and why.
    task
        What the model gives: it tells what a flip is, and the graded divergence.
    metric, measure, unit, budget
        The metric with the most evidence, what people call it, its unit (empty: none) and the accepted mean.
    noise
        What was added to that mean because reference or candidate differ from themselves.
    before, after
        Its mean before and since the estimated onset, which is what decided; `after` is biased upwards, the onset having
        been chosen by looking. `before` is left out below 30 exchanges.
    mean, low, high, n_recent
        Its mean over the recent window with the time-uniform 95 % interval, and the window's exchanges: not what decided.
    onset
        Estimated begin, ISO 8601.
    n_groups, n_since_onset, n_history
        Exchanges compared in this slice so far, and those that the deciding signal has seen since the onset and before
        it.
    begin
        How the slice stood before the onset; `new_version` only where it could be explained.
    evidence, threshold
        Evidence at the change (summed over the slice's signals; for the end of an alert the least of their evidence
        of recovery), and what it had to reach.
    aggregate_verdict, aggregate_mean, aggregate_low, aggregate_high
        The same metric over all of the version's traffic, recent window: is it only this slice?
    aggregate_accepted
        What is accepted there, noise included.
    detector
        Which kind of detector has the most evidence: `budget` (the mean is above what is accepted), `change` (flips
        are above what was learned) or `tail` (the upper tail of the divergence is above what was learned; `mean`, `low`, `high`,
        `before` and `after` are then its 99 % quantile).
    tail_level, tail_before, tail_after
        Of a tail: a level, and the share of items above it before and since the onset, where that rose clearly.
    examples, traces
        The most divergent recent exchanges, and links to their production traces.
    advice
        What to do next.
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
        """Return it as plain JSON types, without what is not known."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return {name: value for name, value in plain.items() if value is not None}


def tell(
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
    """Return a change of verdict with its story.

    Parameters
    ----------
    task
        What the model gives.
    version, place
        Candidate version and slice.
    change, reason
        The verdicts before and after, and why.
    metric, kind, state
        The metric and the kind of detector that decided, and that detector then.
    n_groups, evidence, threshold
        As in `AlertEvent`.
    moved
        What moved, or None where an alert has ended.
    aggregate
        Verdict and estimate over all of the version's traffic, and what is accepted there, noise included.
    episode, at_us, fold_seq
        As in the row.
    budget
        The accepted mean, in the metric's unit; None: what `state` tests against.
    noise
        What was added to it for noise, in the same unit.
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
    story = AlertEvent(
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
        details=story.attributes(),
    )


def iso(at_us: int) -> str:
    """Return microseconds since 1970 as ISO 8601 in UTC."""
    seconds, micros = divmod(at_us, MICROSECONDS)
    return datetime.fromtimestamp(seconds, UTC).replace(microsecond=micros).isoformat()


def measure_of(metric: Metric, task: Task) -> str:
    """Return what people call a metric of a task."""
    return MEASURES[task].name if metric is Metric.DIVERGENCE else metric.value


def unit_of(metric: Metric, task: Task) -> str:
    """Return the unit of a metric's mean; empty: it has none."""
    return MEASURES[task].unit if metric is Metric.DIVERGENCE else "share of exchanges"


def ended(verdict: Verdict) -> str:
    """Return what is to be done where an alert has ended; `unknown` when its slice is compared no more."""
    if verdict is Verdict.UNKNOWN:
        return (
            "Nothing: it is compared no more, so nothing can be said of it, good or bad. "
            "If it comes back it is watched from nothing."
        )
    return "Nothing. The slice is inside its budget again with the same rigour that the alert had."


def summary(story: AlertEvent) -> str:
    """Return one line for people: where, the verdicts, and the figures that decided."""
    where = f"{story.model} {story.version}, {story.slice}: {story.from_verdict} -> {story.verdict}"
    if story.verdict is Verdict.OK:
        return f"{where}: {_recovered(story)}"
    told = decided(_decided(story), _moment(story.onset)) if story.onset else ""
    if not told:
        return f"{where} ({story.reason})"
    return f"{where}: {told}" if story.detector == BUDGET.kind else f"{where}: {told} ({story.reason})"


def _decided(story: AlertEvent) -> Decided:
    return Decided(
        task=story.task,
        metric=story.metric,
        kind=story.detector,
        after=story.after,
        n_after=story.n_since_onset or 0,
        before=story.before,
        budget=story.budget,
        noise=story.noise or 0.0,
        tail_level=story.tail_level,
        tail_before=story.tail_before,
        tail_after=story.tail_after,
    )


def _recovered(story: AlertEvent) -> str:
    """Return what ended an alert: the evidence of recovery. The recent window still holds the drift, and is not told."""
    share = story.metric is Metric.FLIP
    what = "the flip rate" if share else f"the mean {story.measure}"
    against = "its learned baseline"
    if story.detector == TAIL.kind:
        what = f"the upper tail of {story.measure}"
    elif story.detector == BUDGET.kind:
        against = f"its budget of {percent(story.budget) if share else number(story.budget)}"
        against += "" if share or not story.unit else f" {story.unit}"
    return (
        f"{what} is within {against} again; the evidence for that is "
        f"{number(story.evidence, 3)}, and {number(story.threshold, 3)} is needed"
    )


def _moment(at: str) -> str:
    return f"{datetime.fromisoformat(at):%Y-%m-%d %H:%M} UTC"


def interval_of(estimate: Estimate | None) -> tuple[float | None, float | None, float | None]:
    """Return mean, low and high, or three times None where nothing was observed."""
    return (estimate.mean, estimate.low, estimate.high) if estimate else (None, None, None)
