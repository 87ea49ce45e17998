"""Next steps for an alert, from the figures that moved. Pure."""

import re
from urllib.parse import urlsplit

from quantdrift.core.notation import count_of, percent
from quantdrift.core.records import Metric
from quantdrift.drift.explain.diagnosis import Begin, begin_of
from quantdrift.drift.explain.diagnosis_text import first_step
from quantdrift.drift.explain.mix import FEWEST_BEFORE
from quantdrift.report.interval import Estimate
from quantdrift.storage.monitor.explanation import Explanation
from quantdrift.storage.report.facts import Episode, SliceName, Version

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_GROWN = 2.0  # a share of traffic that at least doubled is worth a sentence


def advise(
    episode: Episode,
    slice_name: SliceName,
    version: Version,
    *,
    before: Estimate | None,
    n_before: int,
    budget: float | None,
    flips: Estimate | None,
    flip_budget: float | None,
    share_before: float | None,
    share_after: float | None,
) -> tuple[str, ...]:
    """Return the next steps for one alert, in the order in which they should be taken.

    Parameters
    ----------
    before, n_before
        The metric before the onset (None where there is too little data), and the exchanges compared there.
    budget
        The accepted mean, noise allowance included.
    flips, flip_budget
        The share of decisions that changed since the onset, and its budget, noise allowance included.
    share_before, share_after
        The slice's share of the model's exchanges before and after the onset.
    """
    explanation = episode.explanation
    n_history = episode.evidence.n_history if episode.evidence else None
    above_before = before is not None and budget is not None and (before.low or 0.0) > budget
    begin = _begin(explanation, n_before, above_before=above_before)
    n_known = n_before if n_history is None else n_history
    steps = [first_step(begin, version.candidate_version, n_known, explanation.cause)]
    if episode.explanation.explained_by:
        steps.insert(0, f"Look at {episode.explanation.explained_by} first: it explains this alert.")
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
    else:
        steps.append(_decisions(flips, flip_budget))
    if episode.resolved_at is None:
        everything = slice_name.predicate == "true"
        inputs = "current inputs" if everything else f"inputs of {slice_name.name}"
        steps.append(
            f"Calibrate {version.model} again with {inputs}, or use finer (per-channel) quantisation, and measure with"
            f" labels. Until then, send {'the traffic' if everything else 'the slice'} to the reference."
        )
    else:
        steps.append(
            "It has recovered: find out what changed at that time, so that it does not happen again."
        )
    return tuple(steps)


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
