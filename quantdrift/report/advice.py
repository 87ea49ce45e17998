"""What to do next about an alert, from what moved. Pure."""

import re
from urllib.parse import urlsplit

from quantdrift.core.records import Metric
from quantdrift.report.interval import Estimate
from quantdrift.report.wording import percent
from storage.explained import Explanation
from storage.facts import Episode, SliceName, Version

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_GROWN = 2.0  # a share of traffic that at least doubled is worth a sentence


def advise(
    episode: Episode,
    slice_name: SliceName,
    version: Version,
    *,
    before: Estimate | None,
    after: Estimate | None,
    budget: float | None,
    share_before: float | None,
    share_after: float | None,
) -> tuple[str, ...]:
    """Return the next steps for one alert, in the order in which they should be taken.

    Parameters
    ----------
    episode, slice_name, version
        Which alert.
    before, after
        The metric before and after the onset, where there is data.
    budget
        What the owner accepts, with what is added to it for noise.
    share_before, share_after
        The slice's share of the model's exchanges before and after the onset.
    """
    steps = [_cause(version, before, after, budget, episode.explanation)]
    if episode.explanation.explained_by:
        steps.insert(0, f"Look at {episode.explanation.explained_by} first: it explains this alert.")
    if share_before and share_after and share_after >= _GROWN * share_before:
        steps.append(
            f"Its traffic grew from {percent(share_before)} to {percent(share_after)} of all exchanges: more"
            " people meet the fault than before."
        )
    if episode.metric is Metric.FLIP:
        steps.append(
            "A flip is a disagreement, not yet an error: join the examples with their labels to see which side is"
            " right."
        )
    else:
        steps.append("Outputs moved before decisions did: look at thresholds and rankings that use them.")
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


def _cause(
    version: Version, before: Estimate | None, after: Estimate | None, budget: float | None, told: Explanation
) -> str:
    if before is None or after is None:
        return (
            "The slice has no history before the drift: compare with the version that served before, and go back to"
            " it if that one is better."
        )
    if budget is not None and (before.low or 0.0) > budget:
        return "The slice was above its budget before the estimated onset already: the fault is older than the alert."
    if any(change.startswith("candidate version ") and "(this one)" in change for change in told.changes):
        return (
            f"The version is new ({version.candidate_version} came within an hour of the estimated onset): compare with"
            " the one that served before, and go back to it if that one is better."
        )
    if told.cause == "unseen":
        return (
            f"The version did not change ({version.candidate_version}): its inputs are of a kind that was not there"
            " before, so nothing tells what it always did on them. Ask who sends them."
        )
    if told.cause == "input_shift":
        return (
            f"The version did not change ({version.candidate_version}) and does what it always did: its inputs moved"
            " towards the decision boundary. Ask who sends them; to calibrate again will not bring them back."
        )
    return (
        f"The version did not change ({version.candidate_version}, one reference throughout): its inputs did, or"
        " what serves it. See whether the calibration set holds inputs as this slice has them now."
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
