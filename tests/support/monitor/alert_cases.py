"""Alerts by case, built as the monitor builds them: the event, its explanation, and the texts of both."""

from typing import Any

from quantdrift.core.records import Metric, Suspect, Verdict
from quantdrift.core.tasks import Task
from quantdrift.drift.detectors.protocol import BUDGET, CHANGE
from quantdrift.drift.evidence.header import N_TOTAL, Onset
from quantdrift.drift.evidence.interval import WeightedEstimate
from quantdrift.facts.events import AlertEvent
from quantdrift.facts.explanation import Explanation
from quantdrift.facts.words.alert import reason_of, text_of
from quantdrift.facts.words.steps import Ways
from quantdrift.monitor.explain.explain import with_explanation
from quantdrift.monitor.fold.alert_event import transition_row
from quantdrift.storage.fold_rows import Episode, TransitionRow
from tests.support.monitor.fold_stream import BEGIN_US, CATALOG, FAINT_ID, WITH_REFERENCE

UNIT = {Metric.FLIP: 0.01, Metric.DIVERGENCE: 0.04, Metric.LATENCY: 0.01}


def alert(
    *,
    metric: Metric = Metric.FLIP,
    kind: str = BUDGET.kind,
    verdict: Verdict = Verdict.FIRING,
    n_before: int = 400,
    n_after: int = 254,
    before: float | None = 0.004,
    after: float | None = 0.053,
    aggregate: Verdict = Verdict.OK,
    aggregate_mean: float | None = 0.0058,
    budget: float | None = None,
    noise: float = 0.0,
    slice_id: int = FAINT_ID,
    found: Explanation | None = None,
    suspect: Suspect | None = None,
) -> TransitionRow:
    """Return an alert of a slice, with its explanation where one was found.

    Parameters
    ----------
    metric, kind
        The signal that decided: by `budget` or `change`.
    n_before, n_after, before, after
        Exchanges before and since the onset, and the signal's means there.
    aggregate, aggregate_mean
        The verdict on all traffic, and its mean over the recent window.
    suspect
        Of a latency, where to look first; its budget is 0.25 s.
    """
    fresh = (
        BUDGET.fresh(budget=0.01, scale=1.0, weighted=False, mass=0.0, at_us=0)
        if kind == BUDGET.kind
        else CHANGE.fresh(tau=0.25, scale=1.0, mass=0.0, at_us=0)
    )
    fresh[N_TOTAL] = n_before + n_after
    accepted = UNIT[metric] if budget is None else budget
    estimate = (
        None
        if aggregate_mean is None
        else WeightedEstimate(mean=aggregate_mean, low=0.0, high=2 * aggregate_mean, n=2600)
    )
    row = transition_row(
        task=Task.CLASSIFICATION,
        version=CATALOG.versions[WITH_REFERENCE],
        place=CATALOG.slices[slice_id],
        change=(Verdict.OK, verdict),
        reason=reason_of(kind, metric, page=verdict is Verdict.FIRING, suspect=suspect),
        metric=metric,
        kind=kind,
        state=fresh,
        budget=accepted,
        noise=noise,
        n_groups=n_before + n_after,
        moved=Onset(onset_us=BEGIN_US, before=before, after=after, n_after=n_after, n_before=n_before),
        evidence=16.2,
        threshold=10.0,
        aggregate=(aggregate, estimate, accepted),
        episode=Episode.OPEN,
        at_us=BEGIN_US,
        fold_seq=1,
        latency_budget_s=0.25 if metric is Metric.LATENCY else None,
        suspect=suspect,
    )
    return row if found is None else with_explanation(row, found)


def text(row: TransitionRow) -> str:
    """Return the whole text of an alert, as the person on call reads it."""
    return page(row.alert)


def page(event: AlertEvent, ways: Ways | None = None) -> str:
    """Return the whole text of an event."""
    return text_of(event, ways or Ways()).plain()


def event_with(**flat: Any) -> AlertEvent:
    """Return the event of an alert from its flat form: `flat`, and for what it leaves out an alert of flips."""
    return AlertEvent.read(_FLIPS | flat)


_FLIPS: dict[str, Any] = {
    "model": "digits",
    "version": "1",
    "reference": "d",
    "slice": "scanner=faint",
    "predicate": "p",
    "from_verdict": "ok",
    "verdict": "firing",
    "reason": "r",
    "metric": "flip",
    "unit": "share of exchanges",
    "budget": 0.01,
    "n_recent": 400,
    "n_groups": 400,
    "evidence": 12.0,
    "threshold": 10.0,
    "aggregate_verdict": "ok",
}
