"""The command `quantdrift alerts`: what alerts, since when, who looks into it, and what to do."""

import asyncio
import contextlib
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec
from click.shell_completion import CompletionItem

from quantdrift.cli.options import CONFIG, DATA, JSON, emit, prepare
from quantdrift.core.config.load import Role
from quantdrift.core.errors import QuantdriftError
from quantdrift.core.records import Verdict
from quantdrift.core.text import columns, plain, plain_lines
from quantdrift.facts.status import alert_kind
from quantdrift.facts.words.ending import ENDS
from quantdrift.facts.words.happened import ACTIONS
from quantdrift.facts.words.incident import mitigated_sentence

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from quantdrift.core.config.schema import Config
    from quantdrift.core.records import Predicate
    from quantdrift.storage.alerts.alerts import ActionFact, AlertFact, Finding
    from quantdrift.storage.figures.figures import AlertFigures

_MOST_CHARACTERS = 60
COMPLETION_S = 2.0
_Found = TypeVar("_Found")
_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def completed(
    ask: "Callable[[AsyncConnection], Awaitable[dict[int, str]]]",
) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Return what completes numbers for the shell, each with a word on it; nothing where the database does not answer at once."""

    def complete(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
        words: dict[int, str] = {}
        with context.scope(cleanup=False), contextlib.suppress(QuantdriftError, TimeoutError):
            path = context.params.get("config_path") or Path("config.toml")
            words = run(path, context.params.get("data"), ask, timeout_s=COMPLETION_S)
        items = [CompletionItem(str(number), help=plain(text)) for number, text in words.items()]
        return [item for item in items if item.value.startswith(incomplete)]

    return complete


async def _current(connection: "AsyncConnection") -> dict[int, str]:
    from quantdrift.storage.alerts.alerts import list_alerts

    open_alerts = await list_alerts(connection)
    return {alert.id: f"{alert_kind(alert.severity)}: {alert.model} {alert.slice}" for alert in open_alerts}


def number_argument(
    metavar: str, ask: "Callable[[AsyncConnection], Awaitable[dict[int, str]]]"
) -> _Decorator:
    """Return the argument `number`, which the shell completes with what `ask` returns."""
    return click.argument(
        "number", metavar=metavar, type=click.IntRange(min=1), shell_complete=completed(ask)
    )


def decision(number: _Decorator, what: str) -> _Decorator:
    """Return the options of a command with which a person decides about `what`, an alert or an incident."""
    why = click.option("--reason", required=True, help=f"Why; the {what} and the audit have it.")
    return lambda command: CONFIG(DATA(number(why(JSON(command)))))


_ALERT = number_argument("ALERT", _current)
_DECISION = decision(_ALERT, "alert")


@click.group()
def alerts() -> None:
    """Show alerts, acknowledge and close them, and write down what others must know.

    An acknowledged alert stays acknowledged until it is resolved or escalates: from warning to firing, or clearly worse than
    when it was acknowledged. Each action is kept with the database user, the time and the reason, in the audit too.

    An alert ends by itself: by evidence of recovery, or within minutes of another version of the model taking over. Close one if
    you know better, for example because its slice goes to the unquantised model now.
    """


@alerts.command("list")
@CONFIG
@DATA
@click.option("--model", default="", help="Only alerts of this model.")
@click.option("--all", "with_resolved", is_flag=True, help="Resolved alerts too.")
@JSON
def list_(config_path: Path, data: Path | None, model: str, *, with_resolved: bool, as_json: bool) -> None:
    """List open alerts: those that nobody has acknowledged first, pages before tickets, what explains before what it explains.

    \b
    Examples:
      quantdrift alerts list
      quantdrift alerts list --model digits --all --json
    """
    from quantdrift.core.links import alert_page
    from quantdrift.storage.alerts.alerts import lately_replaced, list_alerts

    async def ask(connection: "AsyncConnection") -> "tuple[list[AlertFact], list[AlertFact]]":
        alert_facts = await list_alerts(connection, model=model, with_resolved=with_resolved)
        return alert_facts, [] if with_resolved else await lately_replaced(connection, model=model)

    config, _ = prepare(config_path, Role.REPORT, data)
    alert_facts, lately = run(config_path, data, ask)
    links = [alert_page(config, alert.id) for alert in alert_facts]
    if as_json:
        emit(
            [
                {**msgspec.to_builtins(alert), "page": link}
                for alert, link in zip(alert_facts, links, strict=True)
            ]
        )
        return
    if not alert_facts:
        click.echo(
            f"No {'' if with_resolved else 'open '}alerts{f' of the model {plain(model)}' if model else ''}."
        )
    else:
        head = (
            "alert",
            "kind",
            "model",
            "version",
            "slice",
            "since (UTC)",
            "ended (UTC)",
            "acknowledged",
            "same cause",
        )
        if config.web.url:
            rows = [(*_row(alert), link) for alert, link in zip(alert_facts, links, strict=True)]
            click.echo(columns((*head, "live page"), rows))
        else:
            click.echo(columns(head, [_row(alert) for alert in alert_facts]))
    for line in replaced_lines(alert_facts if with_resolved else lately):
        click.echo(line)


@alerts.command("show")
@CONFIG
@DATA
@_ALERT
@JSON
def show(config_path: Path, data: Path | None, number: int, *, as_json: bool) -> None:
    """Show one alert: what broke, where, since when, how many answers and people, what to do first, and who looks into it.

    \b
    Example:
      quantdrift alerts show 12
    """
    from quantdrift.core.clock import SystemClock
    from quantdrift.core.links import alert_link, alert_page
    from quantdrift.facts.figures import shown
    from quantdrift.facts.words.size import size
    from quantdrift.storage.alerts.alerts import actions_of, find_alert, findings_of
    from quantdrift.storage.figures.figures import of_alert, versions
    from quantdrift.storage.slices.slice_list import where_of

    async def ask(
        connection: "AsyncConnection",
    ) -> "tuple[AlertFact, list[ActionFact], list[Finding], AlertFigures, tuple[Predicate, ...]]":
        alert = await find_alert(connection, number)
        actions, findings = await actions_of(connection, number), await findings_of(connection, [number])
        version = (await versions(connection, [alert.version_id])).get(alert.version_id)
        unit, now = config.measure(alert.model).unit, SystemClock().now()
        figures = await of_alert(connection, alert, version, now, unit=unit, with_people=True)
        where = await where_of(connection, alert.slice_id)
        return alert, actions, findings.get(number, []), figures, where

    config, _ = prepare(config_path, Role.REPORT, data)
    alert, actions, findings, figures, where = run(config_path, data, ask)
    text = alert.plain(partial(alert_link, config))
    link = alert_page(config, alert.id)
    if as_json:
        facts = msgspec.to_builtins(alert)
        emit(
            {
                **facts,
                "text": text,
                "words": alert.words,
                "figures": figures,
                "actions": actions,
                "findings": findings,
                "runbook": config.notify.runbook_url,
                "page": link,
            }
        )
        return
    lines = [f"Alert {alert.id}: {_state(alert)}."]
    if alert.mitigation:
        lines.append(
            plain(mitigated_sentence(alert.version, alert.slice, alert.mitigation, alert.mitigated_by))
        )
    lines += ["", plain_lines(text), ""]
    if figures.now is not None:
        is_page, is_over = alert.severity == Verdict.FIRING, alert.ended_at is not None
        both = size(figures.when_paged, figures.now.changed_share, is_page=is_page, is_over=is_over)
        lines.append(f"Size: {both}.")
    if figures.people is not None:
        lines.append(
            f"People: at least {shown(figures.people)} got a changed answer in this slice in its last day; only sampled requests are"
            " counted."
        )
    lines += [f"{plain(finding.text)} ({_utc(finding.at)} UTC, {plain(finding.by)})" for finding in findings]
    lines += [_said(action) for action in actions if not action.is_finding]
    if alert.incident is not None:
        lines.append(
            f"Incident: quantdrift incidents show {alert.incident}{command_options(config_path, data)}"
        )
    if config.notify.runbook_url:
        lines.append(f"Runbook: {config.notify.runbook_url}")
    if link:
        lines.append(f"Live page: {link}")
    if alert.is_open:
        lines += _next(config, alert, where, findings, command_options(config_path, data))
    click.echo("\n".join(lines))


def command_options(config_path: Path, data: Path | None) -> str:
    """Return the options with which a command finds the same configuration and data."""
    config = "" if config_path == Path("config.toml") else f" --config={shlex.quote(str(config_path))}"
    return f"{config}{'' if data is None else f' --data={shlex.quote(str(data))}'}"


def _next(
    config: "Config",
    alert: "AlertFact",
    where: "Sequence[Predicate]",
    findings: "Sequence[Finding]",
    options: str,
) -> list[str]:
    """Return what can be typed next about an open alert: only what works for it."""
    from quantdrift.monitor.explain.ways import commands_of

    next_commands = commands_of(config, alert, where, [entry.kind for entry in findings], options)
    lines = [f"{entry.gives}: {entry.text}" for entry in next_commands.commands]
    if next_commands.why_not:
        lines.append(f"`quantdrift diagnose` and `repair` cannot help here: {next_commands.why_not}.")
    if alert.acknowledged is None:
        lines.append(f'Acknowledge: quantdrift alerts ack {alert.id} --reason "..."{options}')
    lines.append(
        f'If nobody gets these answers any more, and quantdrift cannot see it: quantdrift alerts close {alert.id} --reason "..."{options}'
    )
    return lines


@alerts.command("ack")
@_DECISION
def ack(**options: Any) -> None:
    """Acknowledge an alert: somebody looks into it. It stays acknowledged until it is resolved or escalates.

    Needs the operator's role.

    \b
    Example:
      quantdrift alerts ack 12 --reason "rolling back to version 3"
    """
    _act("ack", **options)


@alerts.command("unack")
@_DECISION
def unack(**options: Any) -> None:
    """Take an acknowledgement back: nobody looks into the alert any more. Needs the operator's role.

    \b
    Example:
      quantdrift alerts unack 12 --reason "my shift ends"
    """
    _act("unack", **options)


@alerts.command("close")
@_DECISION
def close(**options: Any) -> None:
    """Close an alert: you know that it is over, and quantdrift cannot see it, for example because its slice was routed away.

    The pagers get its end. The detectors of the slice start from the beginning, and a drift that goes on alerts again, under a
    new number. Needs the operator's role.

    \b
    Example:
      quantdrift alerts close 12 --reason "archive goes to digits-fp32 since 03:20"
    """
    _act("close", **options)


@alerts.command("note")
@CONFIG
@DATA
@_ALERT
@click.argument("text")
@JSON
def note(text: str, **options: Any) -> None:
    """Add a note to an alert, also to one that was resolved. Needs the operator's role.

    \b
    Example:
      quantdrift alerts note 12 "the scanner in room 4 was cleaned at 02:40"
    """
    _act("note", reason=text, **options)


_DONE = {
    "ack": "is acknowledged until it is resolved or escalates",
    "unack": "is not acknowledged any more",
    "note": "has the note",
    "close": "is closed, and the detectors of its slice start from the beginning",
}


def _act(what: str, *, config_path: Path, data: Path | None, number: int, reason: str, as_json: bool) -> None:
    from quantdrift.storage.alerts.alerts import Act, act

    decide(
        config_path,
        data,
        lambda connection: act(connection, number, Act(what), reason),
        lambda record: f"Alert {number} {_DONE[what]}; by {plain(record.by)}.",
        as_json={"alert": number} if as_json else None,
    )


def decide(
    config_path: Path,
    data: Path | None,
    ask: "Callable[[AsyncConnection], Awaitable[_Found]]",
    said: "Callable[[_Found], str]",
    as_json: Mapping[str, Any] | None,
) -> None:
    """Do what a person has decided, and say so; `as_json` is what the record is printed with, None: print the sentence."""
    record = run(config_path, data, ask)
    if as_json is None:
        click.echo(said(record))
    else:
        emit({**as_json, **msgspec.to_builtins(record)})


NO_NOTE = click.option(
    "--no-note", is_flag=True, help="With an alert: do not write the result to it as a note."
)


def run(
    config_path: Path,
    data: Path | None,
    ask: "Callable[[AsyncConnection], Awaitable[_Found]]",
    timeout_s: float | None = None,
) -> _Found:
    """Return what one transaction returns."""
    from quantdrift.storage.database import Database

    _, secrets = prepare(config_path, Role.REPORT, data)

    async def transaction() -> _Found:
        async with (
            asyncio.timeout(timeout_s),
            Database(secrets.dsn) as database,
            database.begin() as connection,
        ):
            return await ask(connection)

    return asyncio.run(transaction())


def _row(alert: "AlertFact") -> tuple[str, ...]:
    acknowledgement = alert.acknowledged
    return (
        str(alert.id),
        alert_kind(alert.severity),
        plain(alert.model),
        plain(alert.version),
        plain(alert.slice),
        _utc(alert.onset_at),
        _ended(alert),
        plain(f"{acknowledgement.by}: {acknowledgement.reason}", _MOST_CHARACTERS)
        if acknowledgement
        else "-",
        _same_cause(alert),
    )


def _ended(alert: "AlertFact") -> str:
    """Return when an alert ended, and why; a hyphen while it lasts."""
    if alert.closed is not None:
        return f"{_utc(alert.resolved_at or alert.closed.at)} {ENDS['closed']}"
    if alert.resolved_at is None:
        return "mitigated" if alert.mitigation else "-"
    return f"{_utc(alert.resolved_at)} {ENDS.get(alert.ended, alert.ended)}".rstrip()


def _same_cause(alert: "AlertFact") -> str:
    """Return which alert explains an alert, or which ones it explains; a hyphen for none."""
    if alert.explained_by is not None:
        return f"explained by {alert.explained_by}"
    return f"explains {', '.join(map(str, alert.explains))}" if alert.explains else "-"


def replaced_lines(found: "Sequence[AlertFact]") -> list[str]:
    """Return a line for each version that was replaced, with the alerts that are over for that reason."""
    from quantdrift.facts.words.ending import serves_no_more

    lines: dict[str, list[int]] = {}
    for alert in found:
        if alert.ended == "replaced" and alert.closed is None:
            sentence = serves_no_more(plain(alert.version), alert.last_seen_at, [*map(plain, alert.serving)])
            lines.setdefault(f"{plain(alert.model)} {sentence}", []).append(alert.id)
    return [
        f"{sentence} Over for that reason: alert {', '.join(map(str, sorted(numbers)))}."
        for sentence, numbers in lines.items()
    ]


def _state(alert: "AlertFact") -> str:
    kind = f"a {alert_kind(alert.severity)}"
    if alert.closed:
        return f"{kind}, closed by {plain(alert.closed.who)} at {_utc(alert.closed.at)} UTC"
    if alert.resolved_at:
        why = f" ({ENDS.get(alert.ended, alert.ended)})" if alert.ended else ""
        return f"{kind}, ended at {_utc(alert.resolved_at)} UTC{why}"
    acknowledgement = alert.acknowledged
    if acknowledgement:
        return f"{kind}, open since {_utc(alert.opened_at)} UTC, acknowledged by {plain(acknowledgement.who)}"
    again = " any more: it has escalated" if alert.escalations else ""
    return f"{kind}, open since {_utc(alert.opened_at)} UTC, not acknowledged{again}"


def _said(action: "ActionFact") -> str:
    return f"{_utc(action.at)} UTC, {ACTIONS[action.act.value]}, {plain(action.who)}: {plain(action.reason)}"


def _utc(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M}"
