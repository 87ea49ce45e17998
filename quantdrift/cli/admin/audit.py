"""The command `quantdrift audit`: who changed what, and whether these entries are intact."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from quantdrift.cli.options import CONFIG, DATA, JSON, emit, prepare
from quantdrift.core.config.load import Role
from quantdrift.core.errors import OperatorError
from quantdrift.core.text import columns, plain

if TYPE_CHECKING:
    from quantdrift.storage.audit import AuditEntry

_MOST_CHARACTERS = 100


@click.group()
def audit() -> None:
    """Show who changed what, and check that no entry was changed or removed.

    The database writes each entry with the user that it authenticated and its own clock.
    """


@audit.command("list")
@CONFIG
@DATA
@click.option("--since", type=click.DateTime(), help="Only entries since this time, UTC.")
@click.option("--by", default="", help="Only entries of this database user.")
@click.option("--action", default="", help="Only this action, such as `pause` or `baseline accept`.")
@JSON
def list_(
    config_path: Path, data: Path | None, since: datetime | None, by: str, action: str, as_json: bool
) -> None:
    """List the entries, the oldest first: when, who, what, the state before and after, and why.

    \b
    Examples:
      quantdrift audit list --since 2026-11-01 --by ada
      quantdrift audit list --action "baseline accept" --json
    """
    from quantdrift.storage.audit import entries
    from quantdrift.storage.database import Database

    _, secrets = prepare(config_path, Role.REPORT, data)

    async def ask() -> "list[AuditEntry]":
        async with Database(secrets.dsn) as database, database.begin() as connection:
            return await entries(
                connection, since=since.replace(tzinfo=UTC) if since else None, by=by, action=action
            )

    listed = asyncio.run(ask())
    if as_json:
        emit(listed)
    elif not listed:
        click.echo("There are no such entries.")
    else:
        head = ("entry", "when (UTC)", "by", "action", "model", "subject", "before", "after", "note")
        click.echo(columns(head, map(_row, listed)))


@audit.command("verify")
@CONFIG
@DATA
@click.option(
    "--from-head",
    default="",
    metavar="NUMBER:HASH",
    help="Head that an earlier call printed, or the monitor sent; its entry must be unchanged.",
)
@JSON
def verify(config_path: Path, data: Path | None, from_head: str, as_json: bool) -> None:
    """Check that no entry was changed, removed, moved or inserted; exit code 2 if one was.

    Whoever owns the database could write the whole chain again, or remove its newest entries. To find that, keep the
    last line of the output somewhere else and give it to the next call. The monitor sends it to the collector every day.

    \b
    Example:
      quantdrift audit verify --from-head 12:0f3a...
    """
    from quantdrift.storage.audit import ChainHead, Verified
    from quantdrift.storage.audit import verify as verified
    from quantdrift.storage.database import Database

    _, secrets = prepare(config_path, Role.REPORT, data)
    kept = ChainHead.parse(from_head) if from_head else None

    async def check() -> Verified:
        async with Database(secrets.dsn) as database, database.begin() as connection:
            return await verified(connection, kept)

    result = asyncio.run(check())
    if as_json:
        emit({"n": result.n, "head": str(result.head), "findings": result.findings})
    else:
        for finding in result.findings:
            click.echo(finding.problem)
        if not result.findings:
            click.echo(f"{result.n:,} entries, none changed or missing. The head, to be kept elsewhere:")
            click.echo(str(result.head))
    if result.findings:
        raise OperatorError(
            f"the audit is not intact from entry {min(finding.seq for finding in result.findings)} on: compare it with a"
            " backup of the database, and find out who can act as its owner"
        )


def _row(entry: "AuditEntry") -> tuple[str, ...]:
    return (
        str(entry.seq),
        f"{entry.at.astimezone(UTC):%Y-%m-%d %H:%M:%S}",
        plain(entry.actor),
        plain(entry.action),
        plain(entry.model) or "-",
        plain(entry.subject) or "-",
        _state(entry.before),
        _state(entry.after),
        plain(entry.note, _MOST_CHARACTERS),
    )


def _state(state: Any) -> str:
    return "-" if state is None else plain(msgspec.json.encode(state).decode(), _MOST_CHARACTERS)
