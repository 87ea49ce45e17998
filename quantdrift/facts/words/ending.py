"""The words for the end of an alert."""

from collections.abc import Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Final

from quantdrift.core.notation import listed, moment, number, percent
from quantdrift.core.records import Verdict
from quantdrift.core.signals import DetectorKind, SignalForm
from quantdrift.facts.events import AlertEvent, Ending
from quantdrift.facts.words.model import full_precision, slower
from quantdrift.facts.words.text import AlertText, Line, Step

ENDS: Final = MappingProxyType(
    {
        Ending.RECOVERED.value: "recovered",
        Ending.REPLACED.value: "version replaced",
        Ending.RETIRED.value: "not compared any more",
        Ending.CLOSED.value: "closed by a person",
    }
)
"""Why alerts are over, in two or three words."""
AFTER: Final = MappingProxyType(
    {
        Ending.RECOVERED.value: "It has recovered. Find out what changed, so that it does not happen again.",
        Ending.REPLACED.value: "Its version does not serve any more. It has not recovered: do not serve it again as it is.",
        Ending.RETIRED.value: "The slice is not compared any more. It has not recovered.",
        Ending.CLOSED.value: "A person closed the alert. It has not recovered.",
    }
)
"""What follows for the owner, by why the alert is over."""
RETIRED: Final = "The slice is not compared any more, so this alert is over."
_NOTHING: Final = "Nothing."


def serves_no_more(version: str, last_seen: datetime | None, serving: Sequence[str]) -> str:
    """Return that a version does not serve any more, when it was last seen, and what serves now.

    Parameters
    ----------
    last_seen
        Capture time of its newest exchange; None: not known.
    serving
        The versions that serve now; with `version` among them it is compared with another reference now.
    """
    at = "" if last_seen is None else f" {moment(last_seen)}"
    if version in serving:
        last = f"; with this one last{at}" if at else ""
        return f"{version} is compared with another reference now{last}."
    seen = f"{version} does not serve any more{f' (last seen{at})' if at else ''}."
    if not serving:
        return seen
    return f"{seen} {listed(serving)} {'serves' if len(serving) == 1 else 'serve'} now."


def over_with(version: str, last_seen: datetime | None, serving: Sequence[str]) -> str:
    """Return why an alert of a version that was replaced is over; parameters as in `serves_no_more`."""
    again = "" if version in serving else f". It opens again if {version} serves again"
    return f"{serves_no_more(version, last_seen, serving)} This alert is over{again}."


def closed_by(person: str, at: datetime, reason: str) -> str:
    """Return who closed an alert, and why."""
    return f"{person} closed this alert ({moment(at)}): {reason}"


def ended(event: AlertEvent) -> AlertText:
    """Return the text of the end of an alert. The recent window still contains the drift, so its mean is left out."""
    where, change = event.slice, event.change
    title = f"{where.model} {where.version}"
    if change.ended is Ending.REPLACED:
        at = None if change.last_seen is None else datetime.fromisoformat(change.last_seen)
        serving = change.serving or ()
        again = (
            f"{where.version} has not recovered in {where.name}. If it serves again, the alert opens again."
        )
        return AlertText(
            headline=(
                f"{where.model} {serves_no_more(where.version, at, serving)} The alert of {where.name} is over."
            ),
            lines=() if where.version in serving else (Line(text=again),),
            do_now=(Step(text=f"{_NOTHING} What serves now is watched by itself."),),
        )
    if change.ended is Ending.CLOSED:
        return AlertText(
            headline=f"{title}: the alert of {where.name} was {change.reason}.",
            do_now=(Step(text=f"{_NOTHING} If the drift goes on, a new alert opens."),),
        )
    if change.after is Verdict.UNKNOWN:
        return AlertText(
            headline=f"{title}: {where.name} is not compared any more, so its state is not known.",
            do_now=(Step(text=f"{_NOTHING} If its traffic comes back, it is watched from the beginning."),),
        )
    evidence = event.evidence
    return AlertText(
        headline=f"{title}: {where.name} has recovered: {_recovered(event)}.",
        lines=(Line(label="Confidence", text="as certain as the alert was."),),
        do_now=(Step(text=_NOTHING),),
        tomorrow=(Step(text="Find out what changed, so that it does not happen again."),),
        details=(
            f"The evidence of recovery is {number(evidence.total, 3)}, and {number(evidence.threshold, 3)} is needed.",
        ),
    )


def _recovered(event: AlertEvent) -> str:
    evidence = event.evidence
    signal = evidence.signal
    if signal.form is SignalForm.SHARE:
        return _no_more(event)
    if evidence.detector == DetectorKind.TAIL:
        return f"its worst outputs are as near to those of {full_precision(event)} as before"
    if signal.form is SignalForm.SLOW:
        return f"no more than {percent(evidence.budget)} of exchanges take {slower(evidence.latency_budget_s)}, as budgeted"
    if signal.form is SignalForm.DIVERGENCE:
        return f"its outputs are as near to those of {full_precision(event)} as the budget asks for"
    if evidence.detector == DetectorKind.CHANGE:
        return "no more answers change than before"
    return f"its changed answers are within the budget of {percent(evidence.budget)}"


def _no_more(event: AlertEvent) -> str:
    """Return to what the share of a signal is back."""
    evidence, signal = event.evidence, event.evidence.signal
    if evidence.detector == DetectorKind.BUDGET:
        return f"no more than {percent(evidence.budget)} of its {signal.things} {signal.verb}, as budgeted"
    where = "in its worst outputs " if evidence.detector == DetectorKind.TAIL else ""
    return f"{where}no more of its {signal.things} {signal.verb} than before"
