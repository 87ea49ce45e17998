"""Incidents: their list, and the page of one with its story."""

from datetime import UTC, datetime
from typing import Final

from aiohttp import web

from quantdrift.core.errors import OperatorError
from quantdrift.core.records import ExemplarKind
from quantdrift.facts.incidents import changes_of
from quantdrift.facts.words.cluster import sets_apart
from quantdrift.facts.words.incident import (
    commands_of_incident,
    headline,
    labels_wanted,
    standing_sentence,
    unknown_sentence,
)
from quantdrift.show.page.exemplars import ShownExemplars
from quantdrift.show.page.rendering import render
from quantdrift.show.page.request import (
    CONFIG,
    DATABASE,
    EXEMPLARS,
    NOT_REFUSED,
    Refused,
    act_by_form,
    who_may_act,
)
from quantdrift.storage import queries
from quantdrift.storage.alerts.alerts import LONGEST_REASON
from quantdrift.storage.described_clusters import described
from quantdrift.storage.incidents.incidents import (
    Say,
    find_incident,
    has_labels,
    list_incidents,
    say,
    story,
    with_costs,
)
from quantdrift.storage.snapshot import reading

_ROWS: Final = 100


async def incidents(request: web.Request) -> web.Response:
    """Show the incidents, open ones first."""
    async with reading(request.app[DATABASE]) as connection:
        config = request.app[CONFIG]
        listed = await with_costs(
            connection, await list_incidents(connection, with_ended=True, most=_ROWS), config
        )
    return render(
        request,
        "incidents.html",
        incidents=listed,
        headlines={incident.id: headline(incident) for incident in listed},
        now=datetime.now(UTC),
        sql=queries.INCIDENTS.strip(),
    )


async def act_on_incident(request: web.Request) -> web.Response:
    """Mitigate, open again or close an incident, in the name of the person who has logged in."""
    answer = await act_by_form(request, "incident", Say, say)
    return await incident_page(request, answer) if isinstance(answer, Refused) else answer


async def incident_page(request: web.Request, refused: Refused = NOT_REFUSED) -> web.Response:
    """Show one incident: its state, whom it hit, what is not known, and its story."""
    number = int(request.match_info["incident"])
    async with reading(request.app[DATABASE]) as connection:
        try:
            incident = await find_incident(connection, number)
        except OperatorError as error:
            raise web.HTTPNotFound(
                reason="There is no incident with this number; it may have been deleted."
            ) from error
        if incident.id != number:
            raise web.HTTPFound(f"/incident/{incident.id}")
        (incident,) = await with_costs(connection, [incident], request.app[CONFIG])
        events = await story(connection, incident)
        is_labelled = await has_labels(connection, incident)
        clusters = await described(connection, incident.version_id, incident.slice_ids)
    reader = request.app.get(EXEMPLARS)
    kept = ShownExemplars()
    if reader is not None:
        kept = await reader.shown(incident.model, incident.slices, incident.version, ExemplarKind.DAMAGED)
    unknown = "" if is_labelled else unknown_sentence(incident)
    return render(
        request,
        "incident.html",
        status=409 if refused.problem else 200,
        incident=incident,
        standing=standing_sentence(incident),
        story=events,
        inputs=[
            (name, words)
            for name, slice_id in zip(incident.slices, incident.slice_ids, strict=True)
            if slice_id in clusters and (words := sets_apart(clusters[slice_id]))
        ],
        unknown=unknown,
        wanted=labels_wanted(incident) if unknown else "",
        commands=commands_of_incident(incident),
        kept=kept,
        changes=changes_of(incident) if who_may_act(request) else (),
        longest_reason=LONGEST_REASON,
        refused=refused,
        now=datetime.now(UTC),
    )
