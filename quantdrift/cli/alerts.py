"""The command `quantdrift alerts`: what alerts, since when, who looks into it, and what to do."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec
from click.shell_completion import CompletionItem

from quantdrift.cli.options import CONFIG, DATA, JSON, emit, prepare
from quantdrift.cli.output import columns
from quantdrift.core.config.load import Role
from quantdrift.core.errors import QuantdriftError
from quantdrift.core.text import plain, plain_lines

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from quantdrift.storage.monitor.alerts import ActionFact, AlertFact, Finding

_MOST_CHARACTERS = 60
_COMPLETION_S = 2.0
_Found = TypeVar("_Found")


def _completed(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the numbers of open alerts for the shell; nothing where the database does not answer at once."""
    from quantdrift.storage.monitor.alerts import list_alerts

    async def ask(connection: "AsyncConnection") -> "list[AlertFact]":
        return await list_alerts(connection)

    found: list[AlertFact] = []
    with context.scope(cleanup=False), contextlib.suppress(QuantdriftError, TimeoutError):
        path = context.params.get("config_path") or Path("config.toml")
        found = _run(path, context.params.get("data"), ask, timeout_s=_COMPLETION_S)
    return [
        CompletionItem(str(alert.id), help=plain(f"{alert.severity}: {alert.model} {alert.slice}"))
        for alert in found
        if str(alert.id).startswith(incomplete)
    ]


_ALERT = click.argument("alert_id", metavar="ALERT", type=click.IntRange(min=1), shell_complete=_completed)
_WHY = click.option("--reason", required=True, help="Why; the alert and the audit have it.")


@click.group()
def alerts() -> None:
    """Show alerts, acknowledge them, and write down what others must know.

    An acknowledged alert stays acknowledged until it is resolved or escalates: from warning to firing, or clearly worse than
    when it was acknowledged. Each action is kept with the database user, the time and the reason, in the audit too.
    """


@alerts.command("list")
@CONFIG
@DATA
@click.option("--model", default="", help="Only alerts of this model.")
@click.option("--all", "with_resolved", is_flag=True, help="Resolved alerts too.")
@JSON
def list_(config_path: Path, data: Path | None, model: str, *, with_resolved: bool, as_json: bool) -> None:
    """List open alerts: those that nobody has acknowledged first, pages before tickets.

    \b
    Examples:
      quantdrift alerts list
      quantdrift alerts list --model digits --all --json
    """
    from quantdrift.core.links import alert_page
    from quantdrift.storage.monitor.alerts import list_alerts

    async def ask(connection: "AsyncConnection") -> "list[AlertFact]":
        return await list_alerts(connection, model=model, with_resolved=with_resolved)

    config, _ = prepare(config_path, Role.REPORT, data)
    found = _run(config_path, data, ask)
    links = [alert_page(config, alert.id) for alert in found]
    if as_json:
        emit([{**msgspec.to_builtins(alert), "page": link} for alert, link in zip(found, links, strict=True)])
    elif not found:
        click.echo(
            f"No {'' if with_resolved else 'open '}alerts{f' of the model {plain(model)}' if model else ''}."
        )
    else:
        head = (
            "alert",
            "severity",
            "model",
            "version",
            "slice",
            "since (UTC)",
            "resolved (UTC)",
            "acknowledged",
        )
        if config.web.url:
            rows = [(*_row(alert), link) for alert, link in zip(found, links, strict=True)]
            click.echo(columns((*head, "live page"), rows))
        else:
            click.echo(columns(head, [_row(alert) for alert in found]))


@alerts.command("show")
@CONFIG
@DATA
@_ALERT
@JSON
def show(config_path: Path, data: Path | None, alert_id: int, *, as_json: bool) -> None:
    """Show one alert: what broke, where, since when, how many answers and people, what to do first, and who looks into it.

    \b
    Example:
      quantdrift alerts show 12
    """
    from quantdrift.core.links import alert_page, runbook
    from quantdrift.monitor.fold.alert_text import page
    from quantdrift.storage.monitor.alerts import actions_of, count_people, find_alert, findings_of
    from quantdrift.storage.monitor.events import event_of

    async def ask(
        connection: "AsyncConnection",
    ) -> "tuple[AlertFact, list[ActionFact], list[Finding], int]":
        alert = await find_alert(connection, alert_id)
        actions, findings = await actions_of(connection, alert_id), await findings_of(connection, [alert_id])
        return alert, actions, findings.get(alert_id, []), await count_people(connection, alert)

    config, _ = prepare(config_path, Role.REPORT, data)
    alert, actions, findings, people = _run(config_path, data, ask)
    event = event_of(alert.details)
    text = page(event) if event else f"{alert.model} {alert.version}: {alert.slice} is {alert.severity}."
    link = alert_page(config, alert.id)
    if as_json:
        facts = msgspec.to_builtins(alert)
        emit(
            {
                **facts,
                "text": text,
                "people": people,
                "actions": actions,
                "findings": findings,
                "runbook": runbook(config),
                "page": link,
            }
        )
        return
    lines = [f"Alert {alert.id}: {_state(alert)}.", "", plain_lines(text), ""]
    if people:
        lines.append(
            f"People: at least {people:,} got a changed answer in this slice in its last day; only sampled requests are counted."
        )
    lines += [f"{plain(one.text)} ({_utc(one.at)} UTC, {plain(one.by)})" for one in findings]
    lines += [_said(action) for action in actions if not action.is_finding]
    lines.append(f"Runbook: {runbook(config)}")
    if link:
        lines.append(f"Live page: {link}")
    if alert.resolved_at is None:
        known = {one.kind.value for one in findings}
        if "cause" not in known:
            lines.append(
                f"Cause in an ONNX model: quantdrift diagnose {alert.id} --candidate FILE --inputs FILE"
            )
        if "repair" not in known:
            lines.append(
                f"Build repairs: quantdrift repair {alert.id} --candidate FILE --inputs FILE --out FOLDER"
            )
        if "gate" not in known:
            lines.append(f"Is a repair safe: quantdrift gate FILE --inputs FILE --note {alert.id}")
    if alert.resolved_at is None and alert.acknowledged is None:
        lines.append(f'Acknowledge: quantdrift alerts ack {alert.id} --reason "..."')
    click.echo("\n".join(lines))


@alerts.command("ack")
@CONFIG
@DATA
@_ALERT
@_WHY
@JSON
def ack(config_path: Path, data: Path | None, alert_id: int, reason: str, *, as_json: bool) -> None:
    """Acknowledge an alert: somebody looks into it. It stays acknowledged until it is resolved or escalates.

    Needs the operator's role.

    \b
    Example:
      quantdrift alerts ack 12 --reason "rolling back to version 3"
    """
    _act(config_path, data, alert_id, "ack", reason, as_json=as_json)


@alerts.command("unack")
@CONFIG
@DATA
@_ALERT
@_WHY
@JSON
def unack(config_path: Path, data: Path | None, alert_id: int, reason: str, *, as_json: bool) -> None:
    """Take an acknowledgement back: nobody looks into the alert any more. Needs the operator's role.

    \b
    Example:
      quantdrift alerts unack 12 --reason "my shift ends"
    """
    _act(config_path, data, alert_id, "unack", reason, as_json=as_json)


@alerts.command("note")
@CONFIG
@DATA
@_ALERT
@click.argument("text")
@JSON
def note(config_path: Path, data: Path | None, alert_id: int, text: str, *, as_json: bool) -> None:
    """Add a note to an alert, also to one that was resolved. Needs the operator's role.

    \b
    Example:
      quantdrift alerts note 12 "the scanner in room 4 was cleaned at 02:40"
    """
    _act(config_path, data, alert_id, "note", text, as_json=as_json)


_DONE = {
    "ack": "is acknowledged until it is resolved or escalates",
    "unack": "is not acknowledged any more",
    "note": "has the note",
}


def _act(
    config_path: Path, data: Path | None, alert_id: int, what: str, reason: str, *, as_json: bool
) -> None:
    from quantdrift.storage.monitor.alerts import Act, act

    async def run(connection: "AsyncConnection") -> "ActionFact":
        return await act(connection, alert_id, Act(what), reason)

    made = _run(config_path, data, run)
    if as_json:
        emit({"alert": alert_id, **msgspec.to_builtins(made)})
    else:
        click.echo(f"Alert {alert_id} {_DONE[what]}; by {plain(made.by)}.")


NO_NOTE = click.option(
    "--no-note", is_flag=True, help="With an alert: do not write the result to it as a note."
)


def add_note(
    config_path: Path, data: Path | None, alert_id: int, kind: str, said: str, details: Mapping[str, Any]
) -> None:
    """Write what a command has found about an alert as a note; where that is not possible, say why on stderr."""
    from quantdrift.storage.monitor.alerts import FindingKind, add_finding

    async def run(connection: "AsyncConnection") -> None:
        await add_finding(connection, alert_id, FindingKind(kind), said, details)

    try:
        _run(config_path, data, run)
    except QuantdriftError as error:
        click.echo(f"Alert {alert_id} has no note of this result: {error}", err=True)


def _run(
    config_path: Path,
    data: Path | None,
    ask: "Callable[[AsyncConnection], Awaitable[_Found]]",
    timeout_s: float | None = None,
) -> _Found:
    """Return what one transaction returns."""
    from quantdrift.storage.database import Database

    _, secrets = prepare(config_path, Role.REPORT, data)

    async def run() -> _Found:
        async with (
            asyncio.timeout(timeout_s),
            Database(secrets.dsn) as database,
            database.begin() as connection,
        ):
            return await ask(connection)

    return asyncio.run(run())


def _row(alert: "AlertFact") -> tuple[str, ...]:
    made = alert.acknowledged
    return (
        str(alert.id),
        alert.severity,
        plain(alert.model),
        plain(alert.version),
        plain(alert.slice),
        _utc(alert.onset_at),
        _utc(alert.resolved_at) if alert.resolved_at else "-",
        plain(f"{made.by}: {made.reason}", _MOST_CHARACTERS) if made else "-",
    )


def _state(alert: "AlertFact") -> str:
    kind = "a page" if alert.severity == "firing" else "a ticket"
    if alert.resolved_at:
        return f"{kind}, resolved at {_utc(alert.resolved_at)} UTC"
    made = alert.acknowledged
    if made:
        return f"{kind}, open since {_utc(alert.opened_at)} UTC, acknowledged by {plain(made.by)}"
    again = " any more: it has escalated" if alert.escalations else ""
    return f"{kind}, open since {_utc(alert.opened_at)} UTC, not acknowledged{again}"


_WORDS = {
    "ack": "acknowledged",
    "unack": "not acknowledged any more",
    "note": "note",
    "escalate": "escalated",
}


def _said(action: "ActionFact") -> str:
    through = f" through {plain(action.through)}" if action.through else ""
    return f"{_utc(action.at)} UTC, {_WORDS[action.act.value]}, {plain(action.by)}{through}: {plain(action.reason)}"


def _utc(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M}"
