"""Sentences about incidents: their state, their damage, their story, and what can be done."""

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime

from quantdrift.core.notation import count_of, listed, moment
from quantdrift.core.text import Table, plain
from quantdrift.facts.cost import money_of
from quantdrift.facts.figures import shown
from quantdrift.facts.incidents import Incident, IncidentState, Mitigation, StoryEvent, StoryKind, changes_of
from quantdrift.facts.status import alert_kind
from quantdrift.facts.words.happened import released


def standing_sentence(incident: Incident) -> str:
    """Return the state of an incident in a sentence, with the reason."""
    where, at = listed(incident.slices), "" if incident.ended_at is None else moment(incident.ended_at)
    by = f" by {incident.said_by}: {incident.reason.rstrip('.')}" if incident.said_by else ""
    match incident.state, incident.mitigation:
        case IncidentState.OPEN, _:
            return f"Open since {moment(incident.opened_at)}."
        case IncidentState.MITIGATED, Mitigation.ROUTED:
            return f"Mitigated: no request of {where} has reached {incident.version} since {at}. It serves other requests."
        case IncidentState.MITIGATED, Mitigation.REPORTED:
            return f"Mitigated at {at}{by}."
        case IncidentState.MITIGATED, _:
            serve = f" serve{'' if len(incident.serving) > 1 else 's'} now"
            now = f", and {listed(incident.serving)}{serve}" if incident.serving else ""
            return f"Mitigated at {at}: {incident.version} does not serve any more{now}."
        case IncidentState.RECOVERED, _:
            return f"Recovered at {at}: the evidence says so."
        case _:
            return f"Closed at {at}{by or ': its slice is not compared any more'}."


def mitigated_sentence(version: str, slice_: str, mitigation: str, by: str = "") -> str:
    """Return why nobody gets the answers of an alert any more that lasts by evidence.

    Parameters
    ----------
    by
        Of `reported`: who said so, and why.
    """
    if mitigation == Mitigation.ROUTED:
        return f"Mitigated: no request of {slice_} reaches {version} any more. It serves other requests."
    return f"Mitigated, as reported by {by.rstrip('.')}."


def damage_sentence(incident: Incident) -> str:
    """Return how many answers changed and how many people got one, so far; empty where neither is known."""
    damage, people, cost = "", "", ""
    if incident.people is not None:
        people = f"at least {count_of(round(incident.people.value), 'person', 'people')}"
    if incident.changed is not None:
        answers = shown(incident.changed)
        interval = f" ({answers.low} to {answers.high})" if answers.low else ""
        damage = f"Some {answers.value} changed answers{interval}{f' for {people}' if people else ''}"
    elif people:
        damage = f"A changed answer for {people}"
    if incident.cost is not None:
        cost = f", at a cost of {money_of(incident.cost)}"
    return f"{damage}{cost}{' so far' if incident.is_open else ''}." if damage else ""


def headline(incident: Incident) -> str:
    """Return an incident in one line: when, where, the damage, and its state."""
    begin, end = _day(incident.began_at), "" if incident.ended_at is None else _day(incident.ended_at)
    when = f"Since {begin}" if incident.is_open else begin if begin == end else f"{begin} to {end}"
    damage = damage_sentence(incident).rstrip(".")
    what = f"{damage[:1].lower()}{damage[1:]}" if damage else "answers changed"
    return f"{when}, {incident.model} {incident.version}, {listed(incident.slices)}: {what}. {standing_sentence(incident)}"


def labels_wanted(incident: Incident, options: str = "") -> str:
    """Return the command that draws changed answers of an incident for somebody to label.

    Parameters
    ----------
    options
        With which it finds the same configuration and data, after a space.
    """
    names = ("model", incident.model), ("version", incident.version), ("slice", str(incident.slice_ids[0]))
    chosen = " ".join(f"--{name} {shlex.quote(value)}" for name, value in names)
    return f"quantdrift labels wanted {chosen} --out wanted.csv{options}"


def commands_of_incident(incident: Incident, options: str = "") -> list[str]:
    """Return the commands that change the state of an incident, each with a placeholder for the reason; none where it is over."""
    return [
        f'quantdrift incidents {word} {incident.id} --reason "..."{options}' for word in changes_of(incident)
    ]


def story_text(event: StoryEvent) -> str:
    """Return what happened, beside its kind and the person."""
    match event.kind:
        case StoryKind.ONSET:
            return f"{event.text} began to drift, as estimated"
        case StoryKind.RELEASE:
            return released(event.text)
        case _:
            return event.text


def story_sentence(event: StoryEvent) -> str:
    """Return what happened in one line: the kind, the person, the text, the alert."""
    by = f" by {event.who}" if event.who else ""
    of = f" (alert {event.alert})" if event.alert is not None else ""
    return f"{event.kind}{by}: {story_text(event)}{of}"


def unknown_sentence(incident: Incident) -> str:
    """Return what is not known of an incident without labels, and what would tell; empty where that is of no use."""
    if incident.changed is None or not incident.changed.value:
        return ""
    return "Not known yet: whether the changed answers are wrong. 50 labels would tell."


def _day(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d}"


def incident_table(incidents: Sequence[Incident], links: Sequence[str] = ()) -> Table:
    """Return a row for each incident; `links` are their pages, empty: there is no live page."""
    head: tuple[str, ...] = (
        "incident",
        "kind",
        "model",
        "version",
        "slices",
        "began (UTC)",
        "state",
        "changed answers",
        "people",
    )
    rows = [_row(incident) for incident in incidents]
    if any(incident.cost for incident in incidents):
        head = (*head, "cost")
        rows = [
            (*row, money_of(of.cost) if of.cost else "-") for row, of in zip(rows, incidents, strict=True)
        ]
    if links:
        head = (*head, "live page")
        rows = [(*row, link) for row, link in zip(rows, links, strict=True)]
    return Table(head, tuple(rows))


def utc(at: datetime) -> str:
    """Return a time of day in UTC."""
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M}"


def _row(incident: Incident) -> tuple[str, ...]:
    mitigation = f" ({incident.mitigation})" if incident.mitigation else ""
    return (
        str(incident.id),
        alert_kind(incident.severity),
        plain(incident.model),
        plain(incident.version),
        plain(", ".join(incident.slices)),
        utc(incident.began_at),
        f"{incident.state}{mitigation}{f' {utc(incident.ended_at)}' if incident.ended_at else ''}",
        "-" if incident.changed is None else shown(incident.changed).value,
        "-" if incident.people is None else f">= {shown(incident.people).value}",
    )
