"""Next steps for an alert, from the figures that moved. Pure."""

import re
from urllib.parse import urlsplit

import msgspec

from quantdrift.core.notation import count_of, percent
from quantdrift.core.records import Metric, Verdict
from quantdrift.core.tasks import Task
from quantdrift.drift.explain.damage import DamageCause
from quantdrift.drift.explain.diagnosis import (
    Aggregate,
    Begin,
    Decided,
    Diagnosis,
    Kind,
    begin_of,
    build_of,
    causes_of,
)
from quantdrift.drift.explain.diagnosis_text import first_step
from quantdrift.drift.explain.mix import FEWEST_BEFORE
from quantdrift.facts.estimate import Estimate
from quantdrift.storage.monitor.explanation import Explanation
from quantdrift.storage.report.facts import Episode, SliceName, Version

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_AFTER = {
    "recovered": "It has recovered: find out what changed at that time, so that it does not happen again.",
    "replaced": "Its version serves no more: nothing has shown that the slice was well in it. Do not serve it again unchanged.",
    "retired": "The slice is not compared any more: nothing has shown that it was well.",
    "closed": "A person closed the alert: nothing has shown that the slice was well.",
}
"""The last step, by why the alert is over."""
_GROWN = 2.0  # a share of traffic that at least doubled is worth a sentence


def advise(
    case: Diagnosis,
    episode: Episode,
    *,
    n_before: int,
    flips: Estimate | None,
    flip_budget: float | None,
    share_before: float | None,
    share_after: float | None,
) -> tuple[str, ...]:
    """Return the next steps for one alert, in the order in which they should be taken.

    Parameters
    ----------
    case
        As `diagnosis` returns it.
    n_before
        Exchanges compared before the onset.
    flips, flip_budget
        The share of decisions that changed since the onset, and its budget, noise allowance included.
    share_before, share_after
        The slice's share of the model's exchanges before and after the onset.
    """
    first = first_step(case)
    steps = [f"{first[0].upper()}{first[1:]}"]
    if share_before and share_after and share_after >= _GROWN * share_before:
        grown = (
            f"from {percent(share_before)} to {percent(share_after)} of all exchanges"
            if n_before >= FEWEST_BEFORE
            else f"to {percent(share_after)} of all exchanges ({count_of(n_before, 'exchange')} before the onset)"
        )
        steps.append(f"Its traffic grew {grown}: the fault affects more users than before.")
    if episode.metric is Metric.FLIP:
        steps.append(
            "A flip is a disagreement, not necessarily an error: join the examples with their labels to see which side"
            " is right."
        )
    elif episode.metric is Metric.LATENCY:
        if flips is not None:
            accepted = "" if flip_budget is None else f", {percent(flip_budget)} accepted"
            steps.append(f"Of its decisions, {percent(flips.mean)} changed since the onset{accepted}.")
    else:
        steps.append(_decisions(flips, flip_budget))
    if episode.resolved_at is not None:
        steps.append(_AFTER.get(episode.ended, _AFTER["recovered"]))
    return tuple(steps)


def deciding_figures(episode: Episode, task: Task) -> Decided:
    """Return the figures that decided an alert; none where an earlier release stored the alert without them."""
    evidence = episode.evidence
    if evidence is None:
        return Decided(task=task, metric=episode.metric, kind=Kind.BUDGET, after=None, n_after=0)
    return Decided(
        task=task,
        metric=evidence.metric,
        kind=evidence.detector,
        after=evidence.after,
        n_after=evidence.n_since_onset or 0,
        before=evidence.before if evidence.n_history is not None else None,
        budget=evidence.budget,
        noise=evidence.noise or 0.0,
        tail_level=evidence.tail_level,
        tail_before=evidence.tail_before,
        tail_after=evidence.tail_after,
        latency_budget_s=evidence.latency_budget_s,
        suspect=evidence.suspect,
    )


def diagnosis(
    episode: Episode,
    slice_name: SliceName,
    version: Version,
    *,
    task: Task,
    whole: Aggregate,
    before: Estimate | None,
    n_before: int,
    budget: float | None,
    flips: Estimate | None,
) -> Diagnosis:
    """Return the facts that the texts of an alert are written from, as the monitor does.

    Parameters
    ----------
    whole
        All traffic of the version, by the metric that decided.
    before, n_before
        The metric before the onset (None where there is too little data), and the exchanges compared there.
    budget
        The accepted mean, noise allowance included.
    flips
        The share of decisions that changed since the onset.
    """
    found, evidence = episode.explanation, episode.evidence
    above_before = before is not None and budget is not None and (before.low or 0.0) > budget
    n_history = evidence.n_history if evidence else None
    by_flips = episode.metric is Metric.FLIP
    return Diagnosis(
        model=version.model,
        version=version.candidate_version,
        slice=slice_name.name,
        page=episode.severity is Verdict.FIRING,
        # The page shows the day before the onset; the alert's own mean before is of another window.
        deciding=msgspec.structs.replace(deciding_figures(episode, task), before=None),
        begin=_begin(found, n_before, above_before=above_before),
        # The page shows the exchanges of a day before the onset: two numbers would contradict each other.
        n_before=n_before if n_history is None or n_before < FEWEST_BEFORE else n_history,
        onset=episode.onset_at,
        whole=whole,
        causes=causes_of(
            found.cause,
            {
                DamageCause.DAMAGE: (found.damage, found.damage_se),
                DamageCause.INPUT_SHIFT: (found.shift, found.shift_se),
                DamageCause.UNSEEN: (found.unseen, found.unseen_se),
            },
        ),
        undecided=found.cause == DamageCause.UNDECIDED,
        changed=None if by_flips or flips is None else flips.mean,
        daily=found.daily,
        explained_by=found.explained_by or "",
        news=found.changes,
        build=build_of(found.build, task),
    )


def _begin(explanation: Explanation, n_before: int, *, above_before: bool) -> Begin:
    """Return the state of the slice before the onset: the monitor's decision, where the alert has one."""
    new_version = any(
        change.startswith("candidate version ") and "(this one)" in change for change in explanation.changes
    )
    derived = begin_of(n_before, new_version=new_version, above_before=above_before)
    begin = Begin(explanation.begin) if explanation.begin in set(Begin) else derived
    return Begin.OLDER if begin is Begin.CHANGED and above_before else begin


def _decisions(after: Estimate | None, accepted: float | None) -> str:
    """Return the step for outputs that moved, by how many decisions changed with them."""
    if after is None:
        return (
            "Look at thresholds and rankings that use these outputs: how many decisions changed is not known."
        )
    changed = f"{percent(after.mean)} since the onset"
    if accepted is not None and after.mean <= accepted:
        return (
            f"Few decisions changed ({changed}, {percent(accepted)} accepted): look at thresholds and rankings that use"
            " the outputs."
        )
    return (
        f"Decisions changed too ({changed}): join the examples with their labels to see which side is right, and look at"
        " thresholds and rankings that use the outputs."
    )


def trace_link(template: str, traceparent: str) -> str:
    """Return the address of a production trace; empty where there is none, or none that is safe to show.

    Parameters
    ----------
    template
        `telemetry.trace_url`, with `{trace_id}`.
    traceparent
        As the client sent it, so not trusted.
    """
    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None or urlsplit(template).scheme not in {"http", "https"}:
        return ""
    return template.replace("{trace_id}", match[1])
