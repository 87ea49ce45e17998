"""What to do next about an alert, from what moved. Pure."""

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
    episode, slice_name, version
        Which alert.
    before, n_before
        The metric before the onset, where there is data enough, and the exchanges compared there.
    budget
        What the owner accepts, with what is added to it for noise.
    flips, flip_budget
        The share of decisions that changed since the onset, and what is accepted of that, noise included.
    share_before, share_after
        The slice's share of the model's exchanges before and after the onset.
    """
    told, n_history = episode.explanation, episode.deciding.n_history
    above_before = before is not None and budget is not None and (before.low or 0.0) > budget
    begin = _begin(told, n_before, above_before=above_before)
    known = n_before if n_history is None else n_history
    steps = [first_step(begin, version.candidate_version, known, told.cause)]
    if episode.explanation.explained_by:
        steps.insert(0, f"Look at {episode.explanation.explained_by} first: it explains this alert.")
    if share_before and share_after and share_after >= _GROWN * share_before:
        grown = (
            f"from {percent(share_before)} to {percent(share_after)} of all exchanges"
            if n_before >= FEWEST_BEFORE
            else f"to {percent(share_after)} of all exchanges ({count_of(n_before, 'exchange')} of it before)"
        )
        steps.append(f"Its traffic grew {grown}: more people meet the fault than before.")
    if episode.metric is Metric.FLIP:
        steps.append(
            "A flip is a disagreement, not yet an error: join the examples with their labels to see which side is"
            " right."
        )
    else:
        steps.append(_decisions(flips, flip_budget))
    if episode.resolved_at is None:
        everything = slice_name.predicate == "true"
        inputs = "inputs as they come now" if everything else f"inputs of {slice_name.name}"
        steps.append(
            f"Calibrate {version.model} again with {inputs}, or use finer (per-channel) quantisation, measure with"
            f" labels, and send {'the traffic' if everything else 'the slice'} to the reference until then."
        )
    else:
        steps.append("It has recovered: find what changed at that time, so that it does not come back.")
    return tuple(steps)


def _begin(told: Explanation, n_before: int, *, above_before: bool) -> Begin:
    """Return how the slice stood before the onset: as the monitor decided, where its release decided it."""
    new_version = any(one.startswith("candidate version ") and "(this one)" in one for one in told.changes)
    found = begin_of(n_before, new_version=new_version, above_before=above_before)
    known = Begin(told.begin) if told.begin in set(Begin) else found
    return Begin.OLDER if known is Begin.CHANGED and above_before else known


def _decisions(after: Estimate | None, accepted: float | None) -> str:
    """Return what to do about outputs that moved, by what became of the decisions."""
    if after is None:
        return (
            "Look at thresholds and rankings that use these outputs: of changed decisions nothing is known."
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
    """Return the address of a production trace, or nothing where there is none that is safe to show.

    Parameters
    ----------
    template
        `telemetry.trace_url`, with `{trace_id}`.
    traceparent
        As the client sent it: not trusted.
    """
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None or urlsplit(template).scheme not in {"http", "https"}:
        return ""
    return template.replace("{trace_id}", found[1])
