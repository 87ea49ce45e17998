"""Alerts: their list, and the page of one as the person on call needs it."""

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final, TypeVar

import msgspec
from aiohttp import web

from quantdrift.core.records import Metric, Verdict
from quantdrift.core.signals import SignalForm, signal_of
from quantdrift.core.text import plain
from quantdrift.facts.events import Ending
from quantdrift.facts.words.incident import mitigated_sentence
from quantdrift.facts.words.size import size_parts
from quantdrift.report.labels import labelled
from quantdrift.show.page.rendering import render
from quantdrift.show.page.request import (
    CONFIG,
    DATABASE,
    NOT_REFUSED,
    Refused,
    act_by_form,
    serving_of,
    who_may_act,
)
from quantdrift.show.page.slice_history import ShownPeriod, history, history_sql
from quantdrift.show.trends import alert_marks, plot
from quantdrift.storage import queries, snapshot
from quantdrift.storage.alerts.alerts import (
    LONGEST_REASON,
    Act,
    Finding,
    FindingKind,
    act,
    actions_of,
    alerts_by_id,
    findings_of,
    list_alerts,
)
from quantdrift.storage.alerts.timeline import steps
from quantdrift.storage.figures.figures import frozen, of_alert
from quantdrift.storage.labels import outcome_of_slice
from quantdrift.storage.slices.slice_list import where_of
from quantdrift.storage.snapshot import in_time, reading
from quantdrift.storage.versions import seen, versions_now

_HOUR: Final = timedelta(hours=1)
_DAY: Final = timedelta(days=1)
_ROWS: Final = 100
_RowT = TypeVar("_RowT")
_BY_PEOPLE: Final = (Act.ACK, Act.UNACK, Act.NOTE, Act.CLOSE)


async def alerts(request: web.Request) -> web.Response:
    """Show the alerts, open ones first."""
    async with reading(request.app[DATABASE]) as connection:
        listed = await list_alerts(connection, with_resolved=True, most=_ROWS)
    return render(request, "alerts.html", alerts=listed, now=datetime.now(UTC), sql=queries.ALERTS.strip())


async def act_on_alert(request: web.Request) -> web.Response:
    """Acknowledge an alert, take that back, close it or add a note, in the name of the person who has logged in."""
    answer = await act_by_form(request, "alert", _BY_PEOPLE, act)
    return await alert_page(request, answer) if isinstance(answer, Refused) else answer


async def alert_page(request: web.Request, refused: Refused = NOT_REFUSED) -> web.Response:
    """Show one alert as the person on call needs it."""
    from quantdrift.monitor.explain.ways import commands_of  # noqa: PLC0415 - what it imports is not needed before

    config, now = request.app[CONFIG], datetime.now(UTC)
    async with reading(request.app[DATABASE]) as connection:
        number = int(request.match_info["alert"])
        alert = (await alerts_by_id(connection, [number])).get(number)
        if alert is None:
            raise web.HTTPNotFound(reason="There is no alert with this number; it may have been deleted.")
        cap = config.budget(alert.model).cap
        transitions = await steps(connection, alert.id)
        actions = await actions_of(connection, alert.id)
        where = await where_of(connection, alert.slice_id)
        findings = (await findings_of(connection, [alert.id])).get(alert.id, [])
        versions = await versions_now(connection)
        version = next(version for version in versions if version.id == alert.version_id)
        serving = await serving_of(request, connection, version)
        last_at = alert.ended_at or version.last_at or now
        end = last_at + _HOUR
        begin = alert.onset_at - max(6 * _HOUR, (end - alert.onset_at) / 2)
        first = max(version.first_at, begin) if version.first_at <= alert.onset_at else begin
        rolled_up = ShownPeriod.rolled_up(begin, end, _HOUR if end - begin <= 4 * _DAY else _DAY)
        for period in filter(None, (ShownPeriod.fine(first, last_at), rolled_up)):
            buckets = await history(
                connection, version.id, alert.slice_id, period, cap=cap, onset=alert.onset_at
            )
            if buckets:
                break
        measured = await in_time(
            connection,
            partial(
                of_alert,
                connection,
                alert,
                seen(version),
                now,
                unit=config.measure(alert.model).unit,
                with_people=True,
            ),
            snapshot.PATIENCE_S,
        )
        truth = await outcome_of_slice(connection, version.id, alert.slice_id, alert.onset_at, period.end)
    event = alert.event
    figures = measured or frozen(event, alert.written_at)
    size_now = figures.now
    ends = alert.over()
    if alert.mitigation:
        ends = [mitigated_sentence(alert.version, alert.slice, alert.mitigation, alert.mitigated_by)]
    name = "all traffic" if alert.predicate == "true" else alert.slice
    budget = event.evidence.budget if event and event.evidence.signal.form is SignalForm.CHANGED else None
    chart = plot(
        Metric.FLIP,
        buckets,
        period.grid(buckets, first, last_at),
        name=plain(name),
        budget=budget,
        marks=alert_marks(alert.onset_at, alert.opened_at),
        alerts=[(alert.onset_at, alert.ended_at)],
    )
    return render(
        request,
        "alert.html",
        status=409 if refused.problem else 200,
        alert=alert,
        serving=serving,
        over=ends,
        may_close=alert.is_open or (alert.ended == Ending.REPLACED and alert.closed is None),
        commands=commands_of(config, alert, where, [finding.kind for finding in findings]),
        actions=[action for action in actions if not action.is_finding],
        findings=findings,
        sites=_noted(findings, FindingKind.CAUSE, "sites", NotedSite),
        repairs=_noted(findings, FindingKind.REPAIR, "repairs", NotedRepair),
        may_act=bool(who_may_act(request)),
        refused=refused,
        truth=labelled(truth) if truth else None,
        wanted=_wanted(alert.model, alert.slice, alert.slice_id),
        runbook=config.notify.runbook_url,
        longest_reason=LONGEST_REASON,
        name=name,
        transitions=transitions,
        figures=figures,
        size=size_parts(
            figures.when_paged,
            size_now.changed_share if size_now else None,
            is_page=alert.severity == Verdict.FIRING,
            is_over=alert.ended_at is not None,
            changed=size_now.changed if size_now else None,
            requests=size_now.requests if size_now else None,
            basis=size_now.basis if size_now else "",
        ),
        budget=budget,
        chart=chart.drawing,
        sql=history_sql(
            signal_of(Metric.FLIP),
            period,
            chart.trend,
            alert.onset_at,
            cap,
            version=version.id,
            slice=alert.slice_id,
        ),
        event=event,
        now=now,
    )


class NotedRepair(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table that `quantdrift repair` has written to an alert; all texts."""

    repair: str
    changed: str
    worst: str = "-"
    all: str
    time: str
    files: str
    gate: str


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


def _noted(findings: Sequence[Finding], kind: FindingKind, name: str, of: type[_RowT]) -> list[_RowT]:
    """Return the table of the newest finding of a kind; empty: there is none that can be read."""
    details = next((finding.details for finding in findings if finding.kind is kind), {})
    try:
        return msgspec.convert(details.get(name, []), list[of])  # type: ignore[valid-type]
    except msgspec.ValidationError:
        return []
