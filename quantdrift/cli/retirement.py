"""The commands `quantdrift slices retire` and `quantdrift slices restore`, for discovered slices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quantdrift.cli.options import BY, CONFIG, DATA, JSON, REASON, emit, prepare
from quantdrift.cli.slices import listed_slices, pick
from quantdrift.core.clock import SystemClock
from quantdrift.core.config.load import Role
from quantdrift.core.errors import OperatorError

if TYPE_CHECKING:
    from quantdrift.core.config.load import Secrets
    from quantdrift.core.config.schema import Config
    from quantdrift.storage.commands.slice_list import ListedSlice
    from quantdrift.storage.slices.discovery import DiscoveryRow, StoredRow

_MODEL = click.option("--model", default="", help="Model of the slice.")


@click.command("retire")
@CONFIG
@DATA
@_MODEL
@click.argument("which")
@BY
@REASON
@JSON
def retire(
    config_path: Path, data: Path | None, model: str, which: str, by: str, reason: str, as_json: bool
) -> None:
    """Stop monitoring a discovered slice. WHICH is its id, name or predicate.

    Its slot becomes free, an open alert of it ends as unknown, and no search tests it until it is restored. Its id and
    its history stay. A candidate can be retired too.

    \b
    Example:
      quantdrift slices retire 12 --reason "a load test"
    """
    config, secrets = prepare(config_path, Role.MONITOR, data)
    listed = asyncio.run(_listed(config, secrets, model, which))

    def decide(row: DiscoveryRow, _: tuple[DiscoveryRow, ...]) -> StoredRow:
        from quantdrift.monitor.discovery.retirement import retired_by_hand

        return retired_by_hand(row, config, reason)

    stored = asyncio.run(_change(config, secrets, listed, by, decide))
    consequence = "the monitor applies it with its next batch"
    if listed.verdict in {"warning", "firing"}:
        consequence += ", and ends its alert"
    _print_result(listed, stored, consequence, as_json=as_json)


@click.command("restore")
@CONFIG
@DATA
@_MODEL
@click.argument("which")
@BY
@REASON
@JSON
def restore(
    config_path: Path, data: Path | None, model: str, which: str, by: str, reason: str, as_json: bool
) -> None:
    """Undo a retirement. WHICH is the slice's id, name or predicate.

    A slice is monitored again under its old id, if a slot is free; its detectors start from zero. A candidate can be
    found again.

    \b
    Example:
      quantdrift slices restore 12
    """
    config, secrets = prepare(config_path, Role.MONITOR, data)
    listed = asyncio.run(_listed(config, secrets, model, which))

    def decide(row: DiscoveryRow, rows: tuple[DiscoveryRow, ...]) -> StoredRow:
        from quantdrift.monitor.discovery.retirement import restored

        return restored(row, rows, config.discovery, SystemClock().now(), reason)

    stored = asyncio.run(_change(config, secrets, listed, by, decide))
    consequence = (
        "a search may find it again"
        if listed.id is None
        else "shadow workers assign items to it within a minute"
    )
    _print_result(listed, stored, consequence, as_json=as_json)


async def _listed(config: Config, secrets: Secrets, model: str, which: str) -> ListedSlice:
    listed = pick(await listed_slices(config, secrets, model), which, model)
    if listed.discovery is None:
        raise OperatorError(
            f"`{listed.name}` is not a discovered slice: remove it from the configuration instead"
        )
    return listed


async def _change(
    config: Config,
    secrets: Secrets,
    listed: ListedSlice,
    by: str,
    decide: Callable[[DiscoveryRow, tuple[DiscoveryRow, ...]], StoredRow],
) -> StoredRow:
    """Lock the discovered slices, decide on their current state, and store the decision."""
    from quantdrift.storage.database import Database
    from quantdrift.storage.slices.discovery import load_discoveries, store, take_turn

    assert listed.discovery is not None
    async with Database(secrets.dsn, config.storage) as database, database.begin() as connection:
        await take_turn(connection)
        rows = await load_discoveries(connection)
        (row,) = (row for row in rows if row.id == listed.discovery.id)
        stored = decide(row, rows)
        await store(connection, stored, made_by=by)
    return stored


def _print_result(listed: ListedSlice, stored: StoredRow, consequence: str, *, as_json: bool) -> None:
    status = stored.row.status.value
    if as_json:
        emit(
            {
                "id": listed.id,
                "model": listed.model,
                "name": listed.name,
                "status": status,
                "reason": stored.reason,
            }
        )
    else:
        click.echo(f"{listed.name} of {listed.model} is {status}: {consequence}")
