"""What to do about an alert: now, by whoever is woken, and tomorrow, by the owner of the model."""

import shlex
from typing import Final

import msgspec

from quantdrift.core.notation import capital, count_of, estimated
from quantdrift.core.records import Suspect
from quantdrift.core.signals import DetectorKind
from quantdrift.core.tasks import Build
from quantdrift.core.text import plain
from quantdrift.facts.events import AggregateState, AlertEvent
from quantdrift.facts.explanation import Begin, DamageCause
from quantdrift.facts.words.model import full_precision
from quantdrift.facts.words.text import Step

LOOK_FIRST: Final = {
    Suspect.MODEL: "look at what was deployed, the model and its engine",
    Suspect.ENGINE: "look at the engine, the machine and the load; if only some slices are slow, at their requests",
    Suspect.TRAFFIC: "look at the requests of this slice, such as their size",
    Suspect.UNKNOWN: "look at the load, then at what was deployed",
}
_AGAIN: Final = {
    Build.NETWORK: (
        "Calibrate again with inputs of this slice, or quantise more finely (per channel, or with higher precision in the"
        " sensitive layers). Labels show which of them helps."
    ),
    Build.TREES: (
        "Quantise thresholds and leaf values in finer steps, with inputs of this slice among the data that sets them. Labels show"
        " if that helps."
    ),
    Build.LANGUAGE: (
        "Quantise again with prompts of this slice among those that calibrate, or with more bits. Judged answers show which of them"
        " helps."
    ),
    Build.OTHER: (
        "Quantise again with inputs of this slice, or with higher precision. Labels show which of them helps."
    ),
}
"""How to make a better candidate."""


class Ways(msgspec.Struct, frozen=True, kw_only=True):
    """What can be done about a slice in this installation.

    Parameters
    ----------
    alert_id
        Number of the alert; None: it has none yet, and commands that need it are left out.
    can_route
        Whether a proxy can recognise the requests of the slice, by a header for example.
    previous
        The version that served before; empty: not known, or there was none.
    diagnose, repair
        Commands that work for this model and slice; empty: none does.
    """

    alert_id: int | None = None
    can_route: bool = True
    previous: str = ""
    diagnose: str = ""
    repair: str = ""


def do_now(event: AlertEvent, ways: Ways) -> tuple[Step, ...]:
    """Return what whoever is woken does: at most three steps."""
    explanation = event.explanation
    if explanation.explained_by:
        look = (
            f"Look at the alert of {explanation.explained_by}: without its answers this one would not exist."
        )
        return (Step(text=look, command="quantdrift alerts list"),)
    if event.evidence.signal.is_about_speed:
        first = LOOK_FIRST[event.evidence.suspect or Suspect.UNKNOWN]
        return (Step(text=f"{_sentence(first)}."),)
    if not event.pages:
        return (
            Step(text="Nothing tonight. This is a ticket, and the owner of the model looks at it tomorrow."),
        )
    return (*_stop(event, ways), *_acknowledge(ways))[:3]


def _stop(event: AlertEvent, ways: Ways) -> tuple[Step, ...]:
    """Return the steps that stop the damage."""
    model, version, name = event.slice.model, event.slice.version, event.slice.name
    route = _route(event, ways)
    if event.begin is not Begin.CHANGED and ways.previous:
        compare = _command("compare", "--model", model, "--from", ways.previous, "--to", version)
        return (
            Step(text=f"Compare {version} with {ways.previous}, which served before.", command=compare),
            Step(text=f"If {ways.previous} is better in {_part(event)}, roll back to it. If not, {route}."),
        )
    if event.begin is Begin.NEW_VERSION:
        return (Step(text=f"Roll back to the version before {version}. If you cannot, {route}."),)
    if event.explanation.causes in {(DamageCause.INPUT_SHIFT,), (DamageCause.UNSEEN,)}:
        ask = f"Ask who sends {name} what changed there: the inputs are different, not the model."
        return (Step(text=ask), Step(text=f"If {_daily(event)} are too many until tomorrow, {route}."))
    changed = event.explanation.changed
    if event.evidence.detector == DetectorKind.CHANGE and changed is not None and changed <= event.limit:
        wait = f"Decide if it can wait until tomorrow: changed answers are still within the budget. If not, {route}."
        return (Step(text=wait),)
    return (Step(text=f"{_sentence(route)}."),)


def _acknowledge(ways: Ways) -> tuple[Step, ...]:
    if ways.alert_id is None:
        return ()
    command = f'quantdrift alerts ack {ways.alert_id} --reason "..."'
    return (Step(text="Say that you look into it.", command=command),)


def tomorrow(event: AlertEvent, ways: Ways) -> tuple[Step, ...]:
    """Return what the owner of the model does in daylight."""
    if event.explanation.explained_by or event.evidence.signal.is_about_speed:
        return ()
    steps = []
    causes = event.explanation.causes
    inputs = causes in {(DamageCause.INPUT_SHIFT,), (DamageCause.UNSEEN,)}
    if not causes and event.begin is Begin.CHANGED:
        steps.append(
            Step(
                text="Look for what changed at the onset: inputs, servers, preprocessing.",
                command=_command("slices", "show", event.slice.name, "--model", event.slice.model),
            )
        )
    if ways.diagnose and not inputs:
        steps.append(Step(text="Find the cause in the model.", command=ways.diagnose))
    if not inputs:
        steps.append(Step(text=_AGAIN[event.build], command=ways.repair))
    elif causes == (DamageCause.INPUT_SHIFT,):
        steps.append(Step(text="Do not calibrate again: that does not change the inputs."))
    else:
        steps.append(Step(text="Add these inputs to the calibration set and to the evaluation."))
    label = "A changed answer is not always wrong. Label 50 of them: that shows if accuracy was lost."
    steps.append(
        Step(
            text=label,
            command=_command("labels", "wanted", "--model", event.slice.model, "--slice", event.slice.name),
        )
    )
    if ways.alert_id is not None and event.pages:
        close = f'quantdrift alerts close {ways.alert_id} --reason "..."'
        steps.append(
            Step(
                text="If the slice was routed away, close the alert: nothing of it is compared any more, so it cannot end by itself.",
                command=close,
            )
        )
    return tuple(steps)


def _route(event: AlertEvent, ways: Ways) -> str:
    """Return where to route which traffic, as words that follow `if not`."""
    target, model = full_precision(event), event.slice.model
    if event.whole in {AggregateState.ITSELF, AggregateState.ALERTING}:
        return f"route all traffic of {model} to {target}, or roll back"
    if not ways.can_route:
        return (
            f"route all traffic of {model} to {target}, or roll back (a proxy cannot recognise the requests of"
            f" {event.slice.name})"
        )
    return f"route {event.slice.name} to {target}"


def _part(event: AlertEvent) -> str:
    return "all traffic" if event.whole is AggregateState.ITSELF else event.slice.name


def _daily(event: AlertEvent) -> str:
    return (
        f"{count_of(estimated(event.daily), 'changed answer')} a day"
        if event.daily >= 2
        else "these changed answers"
    )


def _command(*words: str) -> str:
    """Return a command; empty where a terminal would not show one of its words as it is."""
    return "" if any(plain(word) != word for word in words) else shlex.join(["quantdrift", *words])


def _sentence(text: str) -> str:
    return capital(text)
