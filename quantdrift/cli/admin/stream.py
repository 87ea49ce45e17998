"""The command `quantdrift stream`."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from quantdrift.cli.look.blockers import ago
from quantdrift.cli.options import CONFIG, JSON, REASON, audit_dsn, data_option, emit
from quantdrift.cli.output import Steps
from quantdrift.core.config.load import load
from quantdrift.core.config.schema import Config
from quantdrift.core.config.wrong_values import nearest
from quantdrift.core.data_directory import at_data
from quantdrift.core.errors import OperatorError
from quantdrift.core.notation import count_of, listed
from quantdrift.core.stream.rights import NatsRole

if TYPE_CHECKING:
    from quantdrift.core.stream.connection import Queue


class DroppedBacklog(msgspec.Struct, frozen=True, kw_only=True):
    """What was dropped: the exchanges of each model, and whether the audit has an entry about it."""

    dropped: Mapping[str, int]
    audited: bool

    def __str__(self) -> str:
        n = sum(self.dropped.values())
        if not n:
            return "Nothing waits in the stream: nothing was dropped."
        parts = [f"{count} of `{model}`" for model, count in self.dropped.items()]
        return f"Dropped {count_of(n, 'exchange')}: {listed(parts)}. They are never compared, and are counted as lost: `quantdrift status`"


@click.group("stream")
def stream() -> None:
    """Drop what waits in the stream."""


@stream.command("drop")
@CONFIG
@data_option("NATS and Postgres")
@click.option("--model", default="", help="Only exchanges of this model.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@REASON
@JSON
def stream_drop(
    config_path: Path, *, data: Path | None, model: str, yes: bool, reason: str, as_json: bool
) -> None:
    """Drop every exchange that waits for a shadow worker: they are never compared.

    For a backlog that nobody needs, such as one after an outage, so that what is compared is new again. Usually nothing
    has to be dropped: the monitor lowers the sampling rates before exchanges expire. What is dropped counts as lost, so that slices
    are `unknown` for an hour where it is more than monitor.max_loss_ratio of their samples.

    Needs the administrator's key at NATS. The entry in the audit is written with your own user of Postgres.

    \b
    Examples:
      quantdrift stream drop
      quantdrift stream drop --model digits --yes --reason "load test"
    """
    config = at_data(load(config_path), data, NatsRole.ADMIN)
    waiting, oldest_s = asyncio.run(_waiting(config))
    if model and waiting and model not in waiting:
        raise OperatorError(f"nothing of a model `{model}` waits in the stream: {nearest(model, [*waiting])}")
    wanted = {name: n for name, n in waiting.items() if model in {"", name}}
    if wanted and not yes:
        what = listed([f"{n:,} of `{name}`" for name, n in wanted.items()])
        click.confirm(
            f"Drop {count_of(sum(wanted.values()), 'exchange')} ({what}), the oldest of which waits for"
            f" {ago(timedelta(seconds=oldest_s))}? They are never compared, and this cannot be undone.",
            abort=True,
            err=as_json,
        )
    dsn = audit_dsn(config, data)
    if wanted and not dsn:
        click.echo("warning: not in the audit: there is no Postgres address (QUANTDRIFT_DSN)", err=True)
    with Steps(quiet=as_json) as step:
        dropped = DroppedBacklog(
            dropped=asyncio.run(_dropped(config, dsn, [*wanted], reason, step)), audited=bool(wanted and dsn)
        )
    if as_json:
        emit(dropped)
    else:
        click.echo(str(dropped))


@asynccontextmanager
async def _connected(config: Config) -> "AsyncIterator[Queue]":
    from quantdrift.core.stream.connection import Queue

    queue = await Queue.connect(config.stream, client_name="quantdrift-stream", role=NatsRole.ADMIN)
    try:
        yield queue
    finally:
        await queue.close()


async def _waiting(config: Config) -> tuple[dict[str, int], float]:
    """Return how many exchanges of each model wait, and the age of the oldest in seconds."""
    from quantdrift.core.stream.backlog import read_backlog

    async with _connected(config) as queue:
        backlog = await read_backlog(queue)
    return {model: n for model, n in sorted(backlog.by_model.items()) if n}, backlog.oldest_s


async def _dropped(
    config: Config, dsn: str, models: Sequence[str], reason: str, step: Callable[[str], None]
) -> dict[str, int]:
    """Drop what waits of some models, each with its entry in the audit, and return how many of each there were."""
    from quantdrift.core.stream.backlog import drop_waiting

    counts: dict[str, int] = {}
    async with _connected(config) as queue:
        for model in models:
            step(f"dropping what waits of {model}")
            counts[model] = (
                await _audited(dsn, model, reason, partial(drop_waiting, queue, model))
                if dsn
                else await drop_waiting(queue, model)
            )
    return counts


async def _audited(dsn: str, model: str, reason: str, drop: Callable[[], Awaitable[int]]) -> int:
    """Drop what waits of a model and add the entry with the number; without the right to an entry nothing is dropped."""
    from quantdrift.storage.audit import Action, add
    from quantdrift.storage.database import Database

    async with Database(dsn) as database, database.begin() as connection:
        tried = await connection.begin_nested()
        await add(connection, Action.STREAM_DROP, model=model, subject="stream", note=reason)
        await tried.rollback()
        n = await drop()
        await add(connection, Action.STREAM_DROP, model=model, subject="stream", after={"n": n}, note=reason)
    return n
