"""Alerts: their list, and the page of one as the person on call needs it."""

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final

import msgspec
from aiohttp import web

from quantdrift.core.errors import QuantdriftError
from quantdrift.core.text import plain, plain_lines
from quantdrift.facts.words.happened import ONSET
from quantdrift.facts.words.incident import mitigated_sentence
from quantdrift.report.labels import labelled
from quantdrift.show import charts
from quantdrift.show.page.rendering import render
from quantdrift.show.page.request import CONFIG, DATABASE, OPERATOR, acting, serving_of, who_may_act
from quantdrift.show.page.slice_history import Period, history_of, history_sql, points, young_history
from quantdrift.storage.commands.slice_list import where_of
from quantdrift.storage.figures import frozen, of_alert
from quantdrift.storage.monitor.alerts import (
    LONGEST_REASON,
    Act,
    Finding,
    FindingKind,
    act,
    actions_of,
    find_alert,
    findings_of,
)
from quantdrift.storage.page import history as past
from quantdrift.storage.page import now as present
from quantdrift.storage.page import queries

_DAY: Final = timedelta(days=1)
_BY_PEOPLE: Final = (Act.ACK, Act.UNACK, Act.NOTE, Act.CLOSE)


async def alerts(request: web.Request) -> web.Response:
    """Show the alerts, open ones first."""
    async with present.reading(request.app[DATABASE]) as connection:
        found = await past.alerts(connection)
    return render(request, "alerts.html", alerts=found, now=datetime.now(UTC), sql=queries.ALERTS.strip())


async def alert_page(request: web.Request) -> web.Response:
    """Show one alert as the person on call needs it."""
    return await _alert(request)


async def act_on_alert(request: web.Request) -> web.Response:
    """Acknowledge an alert, take that back, close it or add a note, in the name of the person who has logged in."""
    form = await request.post()
    person = acting(request, form, "Alerts")
    if isinstance(person, web.Response):
        return person
    reason = plain_lines(str(form.get("reason", "")))
    what = next((one for one in _BY_PEOPLE if one.value == form.get("action")), None)
    if what is None:
        return render(request, "error.html", status=400, text="This form names no action of an alert.")
    alert_id = int(request.match_info["alert"])
    try:
        async with request.app[OPERATOR].begin() as connection:
            await act(connection, alert_id, what, reason, identity=person)
    except QuantdriftError as error:
        return await _alert(request, problem=str(error), typed=reason)
    return web.Response(status=303, headers={"Location": f"/alert/{alert_id}"})


async def _alert(request: web.Request, *, problem: str = "", typed: str = "") -> web.Response:
    """Return the page of an alert.

    Parameters
    ----------
    problem
        Why the person's action was not done; empty: there was none, or it was.
    typed
        What the person has typed.
    """
    from quantdrift.monitor.explain.ways import commands_of  # noqa: PLC0415 - what it imports is not needed before

    async with present.reading(request.app[DATABASE]) as connection:
        found = await past.alert(connection, int(request.match_info["alert"]))
        if found is None:
            raise web.HTTPNotFound(reason="There is no alert with this number; it may have been deleted.")
        steps = await past.steps(connection, found.id)
        state = await find_alert(connection, found.id)
        actions = await actions_of(connection, found.id)
        where = await where_of(connection, found.slice_id)
        findings = (await findings_of(connection, [found.id])).get(found.id, [])
        version = next(one for one in await present.versions(connection) if one.id == found.version_id)
        last_at = found.resolved_at or version.last_at or datetime.now(UTC)
        end = last_at + timedelta(hours=1)
        begin = found.onset_at - max(timedelta(hours=6), (end - found.onset_at) / 2)
        serving = await serving_of(request, connection, version)
        ids, config = (found.version_id, found.slice_id), request.app[CONFIG]
        cap = config.budget(found.model).cap
        period = Period(
            span="", begin=begin, end=end, width=timedelta(hours=1) if end - begin <= 4 * _DAY else _DAY
        )
        first = max(version.first_at, begin) if version.first_at <= found.onset_at else begin
        young = (
            await young_history(connection, ids, (first, found.onset_at, last_at), cap)
            if timedelta() <= last_at - first < _DAY
            else None
        )
        period, history = young or (period, await history_of(connection, ids, period, found.onset_at, cap))
        begin, end = period.begin, period.end
        measured = await present.in_time(
            connection,
            partial(
                of_alert,
                connection,
                state,
                present.seen(version),
                datetime.now(UTC),
                unit=config.measure(found.model).unit,
                with_people=True,
            ),
            present.PATIENCE_S,
        )
        truth = await past.truth(connection, found.version_id, found.slice_id, found.onset_at, end)
    event = state.event
    ends = state.over()
    if state.mitigation:
        ends = [mitigated_sentence(state.version, state.slice, state.mitigation, state.mitigated_by)]
    marks = [
        charts.Mark(at=found.onset_at, kind="onset", text=ONSET),
        charts.Mark(at=found.opened_at, kind="alert", text="alert"),
    ]
    return render(
        request,
        "alert.html",
        status=409 if problem else 200,
        alert=found,
        serving=serving,
        over=ends,
        text=state.text,
        incident=state.incident,
        explained_by=state.explained_by,
        explains=state.explains,
        may_close=state.is_open or (state.ended == "replaced" and state.closed is None),
        commands=commands_of(config, state, where, [one.kind for one in findings]),
        acknowledged=state.acknowledged,
        has_escalated=state.escalations > 0,
        actions=[one for one in actions if not one.is_finding],
        findings=findings,
        sites=_sites(findings),
        repairs=_repairs(findings),
        may_act=bool(who_may_act(request)),
        problem=problem,
        typed=typed,
        truth=labelled(truth) if truth else None,
        wanted=_wanted(found.model, found.slice, found.slice_id),
        runbook=config.notify.runbook_url,
        longest_reason=LONGEST_REASON,
        name="all traffic" if found.predicate == "true" else found.slice,
        steps=steps,
        figures=measured or frozen(event, state.written_at),
        budget=event.evidence.budget if event and event.evidence.metric == "flip" else None,
        chart=charts.line(
            points(history, "flip", period.width, (version.first_at, last_at)),
            begin,
            end,
            title="Changed answers before and since the alert",
            width=period.width,
            alerts=[(found.onset_at, found.resolved_at or end)],
            budget=event.evidence.budget if event and event.evidence.metric == "flip" else None,
            marks=marks,
        ),
        sql=history_sql(period, cap, found.onset_at, version=found.version_id, slice=found.slice_id),
        event=event,
        trace_url=config.telemetry.trace_url,
        now=datetime.now(UTC),
    )


class NotedRepair(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table that `quantdrift repair` has written to an alert; all texts."""

    repair: str
    changed: str
    all: str
    time: str
    files: str
    gate: str


def _repairs(findings: Sequence[Finding]) -> list[NotedRepair]:
    """Return the table of the newest repair; empty: there is none that can be read."""
    details = next((one.details for one in findings if one.kind is FindingKind.REPAIR), {})
    try:
        return msgspec.convert(details.get("repairs", []), list[NotedRepair])
    except msgspec.ValidationError:
        return []


class NotedSite(msgspec.Struct, frozen=True, kw_only=True):
    """A place of the model that damages the slice, as `quantdrift diagnose` has written it to an alert.

    Parameters
    ----------
    restores, placebo
        Shares of the damage that it restores, and that a random change restores at most.
    used, elsewhere_used
        Shares of its range that the slice and other slices use; None: it is a weight, or there were no others.
    """

    site: str
    restores: float
    placebo: float
    used: float | None = None
    elsewhere_used: float | None = None


def _wanted(model: str, name: str, slice_id: int) -> str:
    """Return the command that draws answers of a slice to label; names that a terminal would not show as they are stay out of it."""
    of = ["--model", model] if plain(model) == model else []
    return shlex.join(
        ["quantdrift", "labels", "wanted", *of, "--slice", name if plain(name) == name else str(slice_id)]
    )


def _sites(findings: Sequence[Finding]) -> list[NotedSite]:
    """Return the sites of the newest cause; empty: there are none that can be read."""
    details = next((one.details for one in findings if one.kind is FindingKind.CAUSE), {})
    try:
        return msgspec.convert(details.get("sites", []), list[NotedSite])
    except msgspec.ValidationError:
        return []
