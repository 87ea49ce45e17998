"""The commands `quantdrift slices retire` and `restore`, for discovered slices, and `forget`, for slices of values."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quantdrift.cli.look.slices import listed_slices, pick
from quantdrift.cli.options import CONFIG, DATA, JSON, REASON, emit, prepare
from quantdrift.core.clock import SystemClock
from quantdrift.core.config.load import Role
from quantdrift.core.errors import OperatorError
from quantdrift.facts.status import ALERTS

if TYPE_CHECKING:
    from quantdrift.core.config.load import Secrets
    from quantdrift.core.config.schema import Config
    from quantdrift.storage.audit import Action
    from quantdrift.storage.slices.discovery import DiscoveryRow, StoredRow
    from quantdrift.storage.slices.slice_list import ListedSlice

_MODEL = click.option("--model", default="", help="Model of the slice.")


@click.command("retire")
@CONFIG
@DATA
@_MODEL
@click.argument("which")
@REASON
@JSON
def retire(config_path: Path, data: Path | None, model: str, which: str, reason: str, as_json: bool) -> None:
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

    from quantdrift.storage.audit import Action

    stored = asyncio.run(_change(secrets, listed, Action.SLICES_RETIRE, reason, decide))
    consequence = "the monitor applies it with its next batch"
    if listed.verdict in ALERTS:
        consequence += ", and ends its alert"
    _print_result(listed, stored, consequence, as_json=as_json)


@click.command("restore")
@CONFIG
@DATA
@_MODEL
@click.argument("which")
@REASON
@JSON
def restore(config_path: Path, data: Path | None, model: str, which: str, reason: str, as_json: bool) -> None:
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

        return restored(row, rows, SystemClock().now(), reason)

    from quantdrift.storage.audit import Action

    stored = asyncio.run(_change(secrets, listed, Action.SLICES_RESTORE, reason, decide))
    consequence = (
        "a search may find it again"
        if listed.id is None
        else "shadow workers assign items to it within a minute"
    )
    _print_result(listed, stored, consequence, as_json=as_json)


@click.command("forget")
@CONFIG
@DATA
@_MODEL
@click.argument("which")
@REASON
@JSON
def forget(config_path: Path, data: Path | None, model: str, which: str, reason: str, as_json: bool) -> None:
    """Take the place of a slice that is made of a value, or of a combination of values. WHICH is its id, name or predicate.

    Its items count as `(other)`, its detectors end, and an open alert of it ends as unknown. Its id and its history stay.
    If the value is seen again it can get a place like every other: a free one, or by its share of the traffic.

    \b
    Example:
      quantdrift slices forget 'scanner=test-7' --reason "a load test"
    """
    config, secrets = prepare(config_path, Role.MONITOR, data)
    listed = asyncio.run(_forgotten(config, secrets, model, which, reason or "by hand"))
    if as_json:
        emit(
            {
                "id": listed.id,
                "model": listed.model,
                "name": listed.name,
                "status": "lapsed",
                "reason": reason or "by hand",
            }
        )
        return
    consequence = "the monitor applies it with its next batch"
    if listed.verdict in ALERTS:
        consequence += ", and ends its alert"
    click.echo(f"{listed.name} of {listed.model} is lapsed: {consequence}")


async def _forgotten(config: Config, secrets: Secrets, model: str, which: str, reason: str) -> ListedSlice:
    """Take the place of a slice, and return the slice.

    Raises
    ------
    OperatorError
        It is not made of a value, the configuration declares it, or it has no place.
    """
    from quantdrift.core.slices import SliceKey, ValueRules
    from quantdrift.storage.audit import Action, add, who
    from quantdrift.storage.database import Database
    from quantdrift.storage.slices.places import forget as forget_slice
    from quantdrift.storage.slices.slice_list import where_of

    listed = pick(await listed_slices(config, secrets, model), which, model)
    if listed.discovery is not None:
        raise OperatorError(f"a search found `{listed.name}`: `quantdrift slices retire` ends its watch")
    async with Database(secrets.dsn) as database, database.begin() as connection:
        where = () if listed.id is None else await where_of(connection, listed.id)
        key = SliceKey(model=listed.model, name=listed.name, predicate=listed.predicate, where=where)
        rule = ValueRules(config).of(key)
        if rule is None or key.predicate == rule.other(key).predicate:
            raise OperatorError(
                f"`{listed.name}` is not made of a value that was seen: only values of [[slices]] without `values`,"
                " and combinations of `cross`, can be forgotten"
            )
        made_by = await who(connection)
        if not await forget_slice(connection, key, rule.source, made_by=made_by, reason=reason):
            raise OperatorError(f"`{listed.name}` has no place already")
        await add(
            connection,
            Action.SLICES_FORGET,
            model=listed.model,
            subject=f"slice {listed.id}",
            before={"status": "admitted"},
            after={"status": "lapsed"},
            note=reason,
        )
    return listed


async def _listed(config: Config, secrets: Secrets, model: str, which: str) -> ListedSlice:
    listed = pick(await listed_slices(config, secrets, model), which, model)
    if listed.discovery is None:
        raise OperatorError(
            f"`{listed.name}` is not a discovered slice: remove it from the configuration instead"
        )
    return listed


async def _change(
    secrets: Secrets,
    listed: ListedSlice,
    action: Action,
    reason: str,
    decide: Callable[[DiscoveryRow, tuple[DiscoveryRow, ...]], StoredRow],
) -> StoredRow:
    """Lock the discovered slices, decide on their current state, and store the decision with its audit entry."""
    from quantdrift.storage.audit import add, who
    from quantdrift.storage.database import Database
    from quantdrift.storage.slices.discovery import load_discoveries, store, take_turn

    assert listed.discovery is not None
    async with Database(secrets.dsn) as database, database.begin() as connection:
        await take_turn(connection)
        rows = await load_discoveries(connection)
        (row,) = (row for row in rows if row.id == listed.discovery.id)
        stored = decide(row, rows)
        await store(connection, stored, made_by=await who(connection), before=row)
        await add(
            connection,
            action,
            model=listed.model,
            subject=f"discovery {row.id}" if listed.id is None else f"slice {listed.id}",
            before={"status": row.status.value},
            after={"status": stored.row.status.value},
            note=reason,
        )
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
