"""The command `quantdrift incidents`: what happened, whom it hit, whether it is over, and who did what."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from quantdrift.cli.look.alerts import command_options, decide, decision, number_argument, run
from quantdrift.cli.options import CONFIG, DATA, JSON, emit, prepare
from quantdrift.core.config.load import Role
from quantdrift.core.text import plain, plain_lines

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from quantdrift.facts.incidents import Incident, StoryEvent


async def _current(connection: "AsyncConnection") -> dict[int, str]:
    from quantdrift.storage.incidents.incidents import list_incidents

    current_incidents = await list_incidents(connection)
    return {
        incident.id: f"{incident.state}: {incident.model} {', '.join(incident.slices)}"
        for incident in current_incidents
    }


_INCIDENT = number_argument("INCIDENT", _current)
_DECISION = decision(_INCIDENT, "incident")


@click.group()
def incidents() -> None:
    """Show incidents, and say what quantdrift cannot see of their state.

    An incident is what people talk about: the alerts of one cause, with all that was done about them. It is open while people get its
    answers; mitigated once nobody does, because another version serves or its slice goes elsewhere; recovered once the evidence says so;
    closed when a person says so. The pagers get its end in each case.
    """


@incidents.command("list")
@CONFIG
@DATA
@click.option("--model", default="", help="Only incidents of this model.")
@click.option("--all", "with_ended", is_flag=True, help="Also those that ended more than a day ago.")
@JSON
def list_(config_path: Path, data: Path | None, model: str, *, with_ended: bool, as_json: bool) -> None:
    """List incidents: open ones first, then those that ended within a day.

    \b
    Examples:
      quantdrift incidents list
      quantdrift incidents list --model digits --all --json
    """
    from quantdrift.core.links import incident_page
    from quantdrift.facts.words.incident import incident_table
    from quantdrift.storage.incidents.incidents import list_incidents, with_costs

    async def ask(connection: "AsyncConnection") -> "list[Incident]":
        listed = await list_incidents(connection, model=model, with_ended=with_ended)
        return await with_costs(connection, listed, config)

    config, _ = prepare(config_path, Role.REPORT, data)
    incident_list = run(config_path, data, ask)
    links = [incident_page(config, incident.id) for incident in incident_list]
    if as_json:
        emit(
            [
                {**msgspec.to_builtins(incident), "page": link}
                for incident, link in zip(incident_list, links, strict=True)
            ]
        )
        return
    if not incident_list:
        click.echo(f"No {'' if with_ended else 'current '}incidents{f' of {plain(model)}' if model else ''}.")
        return
    click.echo(str(incident_table(incident_list, links if config.web.url else ())))


@incidents.command("show")
@CONFIG
@DATA
@_INCIDENT
@JSON
def show(config_path: Path, data: Path | None, number: int, *, as_json: bool) -> None:
    """Show one incident: its state, the damage so far, what is not known yet, and its story.

    \b
    Example:
      quantdrift incidents show 3
    """
    from quantdrift.core.links import incident_page
    from quantdrift.facts.words.incident import (
        damage_sentence,
        headline,
        labels_wanted,
        standing_sentence,
        unknown_sentence,
    )
    from quantdrift.storage.incidents.incidents import find_incident, has_labels, story, with_costs

    async def ask(connection: "AsyncConnection") -> "tuple[Incident, list[StoryEvent], bool]":
        (incident,) = await with_costs(connection, [await find_incident(connection, number)], config)
        return incident, await story(connection, incident), await has_labels(connection, incident)

    config, _ = prepare(config_path, Role.REPORT, data)
    incident, events, is_labelled = run(config_path, data, ask)
    options = command_options(config_path, data)
    link = incident_page(config, incident.id)
    unknown = "" if is_labelled else unknown_sentence(incident)
    wanted = labels_wanted(incident, options) if unknown else ""
    if as_json:
        emit(
            {
                **msgspec.to_builtins(incident),
                "headline": headline(incident),
                "story": events,
                "not_known": unknown,
                "labels_wanted": wanted,
                "page": link,
            }
        )
        return
    lines = []
    if incident.id != number:
        lines.append(f"Incident {number} is a part of incident {incident.id}: they have one cause.")
    lines += [
        f"Incident {incident.id}: {plain(incident.model)} {plain(incident.version)}, {plain(', '.join(incident.slices))}.",
        plain(standing_sentence(incident)),
    ]
    if damage := damage_sentence(incident):
        lines.append(damage)
    if unknown:
        lines += [unknown, f"  {plain(wanted)}"]
    lines += ["", *(_told(event) for event in events), ""]
    lines.append(
        f"Alerts: {', '.join(f'quantdrift alerts show {alert}{options}' for alert in incident.alerts[:5])}"
    )
    if link:
        lines.append(f"Live page: {link}")
    lines += _next(incident, options)
    click.echo("\n".join(lines))


@incidents.command("mitigate")
@_DECISION
def mitigate(**options: Any) -> None:
    """Say that nobody gets the answers of an incident any more, where quantdrift cannot see it.

    The pagers get its end. Its alerts go on by evidence: the incident opens again if one becomes worse, if another one is added, or with
    `quantdrift incidents reopen`. A version that was replaced, and a slice that gets no requests of it any more, quantdrift sees by
    itself. Needs the operator's role.

    \b
    Example:
      quantdrift incidents mitigate 3 --reason "the caller ignores these answers since 03:20"
    """
    _say("mitigate", **options)


@incidents.command("reopen")
@_DECISION
def reopen(**options: Any) -> None:
    """Take back that an incident is mitigated: people get its answers. Needs the operator's role.

    \b
    Example:
      quantdrift incidents reopen 3 --reason "the caller was rolled back"
    """
    _say("reopen", **options)


@incidents.command("close")
@_DECISION
def close(**options: Any) -> None:
    """Close an incident with all of its alerts: you know that it is over.

    The detectors of its slices start from the beginning, and a drift that goes on is a new incident. Needs the operator's role.

    \b
    Example:
      quantdrift incidents close 3 --reason "int8-2 serves everywhere"
    """
    _say("close", **options)


_DONE = {
    "mitigate": "is mitigated, until an alert of it becomes worse, another one is added, or you open it again",
    "reopen": "is open again",
    "close": "is closed, and the detectors of its slices start from the beginning",
}


def _say(what: str, *, config_path: Path, data: Path | None, number: int, reason: str, as_json: bool) -> None:
    from quantdrift.storage.incidents.incidents import Say, say

    decide(
        config_path,
        data,
        lambda connection: say(connection, number, Say(what), reason),
        lambda incident: f"Incident {incident.id} {_DONE[what]}; by {plain(incident.said_by)}.",
        as_json={} if as_json else None,
    )


_WHEN = {
    "mitigate": "If nobody gets these answers any more, and quantdrift cannot see it",
    "reopen": "If people get these answers again",
    "close": "If it is over for good",
}


def _next(incident: "Incident", options: str) -> list[str]:
    """Return what can be typed next about an incident that is not over."""
    from quantdrift.facts.words.incident import commands_of_incident

    commands = commands_of_incident(incident, options)
    return [f"{_WHEN[command.split()[2]]}: {command}" for command in commands]


def _told(event: "StoryEvent") -> str:
    from quantdrift.facts.words.incident import story_sentence, utc

    return f"{utc(event.at)} UTC  {plain_lines(story_sentence(event)).splitlines()[0]}"
