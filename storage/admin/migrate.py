"""Upgrade of a database to the newest schema, and the revision that a database is at."""

import importlib.util
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import msgspec
from alembic import command
from alembic.config import Config as AlembicConfig
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.pool import NullPool

from quantdrift.core.errors import OperatorError
from quantdrift.storage.audit import Action, add, newest
from quantdrift.storage.database import make_engine, translated
from quantdrift.storage.schema.partitions import AHEAD_DAYS, ensure_partitions
from quantdrift.storage.schema.revision import OLDEST, chain, other_chain, refusal, write_chain
from quantdrift.storage.schema.unknown import refuse_unknown

# "quantdri" as a number: the advisory lock that lets one upgrade of a database run at a time.
_LOCK: Final = 0x7175616E74647269
_TURN_TIMEOUT_S: Final = 300
# A change of a table waits for its readers, and every later reader waits behind it: give up soon and try again.
_LOCK_TIMEOUT_S: Final = 5
_STATEMENT_TIMEOUT_S: Final = 600
_COMPATIBILITY: Final = text("""
    insert into compatibility (id, oldest_revision) values (1, :oldest)
    on conflict (id) do update set oldest_revision = excluded.oldest_revision
""")


class SchemaState(msgspec.Struct, frozen=True, kw_only=True):
    """The schema of a database beside that of this release.

    Parameters
    ----------
    revision
        Of the database; None: it was never upgraded.
    waiting
        Names of the revisions that an upgrade would apply, in order.
    is_newer
        Whether a newer release has upgraded it, and this one can work with it.
    """

    revision: str | None
    waiting: tuple[str, ...] = ()
    is_newer: bool = False


async def upgrade(dsn: str, *, progress: Callable[[str], None], ahead_days: int = AHEAD_DAYS) -> list[str]:
    """Upgrade the schema to the newest revision, and create the partitions of the coming days.

    Idempotent; concurrent calls run one after the other. Every revision is its own transaction, so that after an
    interruption the next call continues there. Needs a direct connection (no transaction pooler).

    Parameters
    ----------
    dsn
        `postgresql://user:password@host:port/name`; the user owns the tables.
    progress
        Called with one line of text per step.
    ahead_days
        How many days ahead partitions are created.

    Returns
    -------
    list[str]
        Revisions that were applied, in order; empty if the schema was already the newest.

    Raises
    ------
    OperatorError
        Wrong address, password or rights; a trigger, rule, function or owner that quantdrift did not make; or the schema of a
        newer release that this one cannot work with. A newer schema that it can work with is left as it is.
    RetryError
        The server is unavailable, or another session locks a table for too long.
    """
    applied: list[str] = []

    def on_applied(*, step: object, **_: object) -> None:
        revision = str(step.up_revision_id)  # type: ignore[attr-defined]  # alembic hands over a MigrationInfo
        applied.append(revision)
        progress(f"applied {revision}")

    async with _connected(dsn) as connection:
        await connection.execute(text(f"set lock_timeout = '{_TURN_TIMEOUT_S}s'"))
        await connection.execute(
            text("select pg_catalog.pg_advisory_lock(cast(:key as bigint))"), {"key": _LOCK}
        )
        await connection.execute(text(f"set lock_timeout = '{_LOCK_TIMEOUT_S}s'"))
        await connection.execute(text(f"set statement_timeout = '{_STATEMENT_TIMEOUT_S}s'"))
        await connection.commit()
        state = await _state(connection)
        # Alembic opens a transaction per revision only where none is open yet.
        await connection.commit()
        progress(f"schema revision: {state.revision or 'none'}, newest: {head()}")
        if state.is_newer:
            progress(
                f"a newer release upgraded the schema to revision {state.revision}; this release can work with it: nothing to upgrade"
            )
            return applied
        await connection.run_sync(_upgrade, on_applied)
        await write_chain(connection)
        await connection.execute(_COMPATIBILITY, {"oldest": OLDEST})
        last = await newest(connection, [Action.DB_UPGRADE])
        before = None if last is None else last.after
        # Also what an earlier call applied, if it ended before it could add its entry.
        if (after := {"revision": head()}) != before:
            await add(connection, Action.DB_UPGRADE, before=before, after=after)
        await connection.commit()
        today = datetime.now(UTC).date()
        new_partitions = await ensure_partitions(
            connection,
            today - timedelta(days=1),
            today + timedelta(days=ahead_days),
        )
        await connection.commit()
        progress(
            f"created {len(new_partitions)} daily partitions" if new_partitions else "daily partitions exist"
        )
    return applied


async def check(dsn: str) -> SchemaState:
    """Return what an upgrade would do; nothing is changed.

    Raises
    ------
    OperatorError, RetryError
        As `upgrade`.
    """
    async with _connected(dsn) as connection:
        return await _state(connection)


async def current(dsn: str) -> str | None:
    """Return the revision of a database; None if it was never upgraded.

    Raises
    ------
    OperatorError
        As `upgrade`.
    """
    async with _connected(dsn) as connection:
        return await connection.run_sync(_revision)


def head() -> str:
    """Return the newest revision of this release."""
    newest = ScriptDirectory.from_config(alembic_config()).get_current_head()
    assert newest is not None
    return newest


def alembic_config() -> AlembicConfig:
    """Return Alembic's settings, with the revisions of the installed package `quantdrift.migrations`."""
    spec = importlib.util.find_spec("quantdrift.migrations")
    if spec is None or not spec.submodule_search_locations:
        raise OperatorError("the package `quantdrift.migrations` is missing: install quantdrift again")
    config = AlembicConfig()
    config.set_main_option("script_location", str(Path(spec.submodule_search_locations[0])))
    config.set_main_option("path_separator", "os")
    return config


def _revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


async def _state(connection: AsyncConnection) -> SchemaState:
    """Return the state of a schema that this release can work with.

    Raises
    ------
    OperatorError
        Somebody else made something in it, it belongs to another chain of revisions, or a newer release took something away.
    """
    await refuse_unknown(connection)
    if why := await other_chain(connection):
        raise OperatorError(why)
    revision = await connection.run_sync(_revision)
    numbers = [name[:4] for name in chain()]
    if revision is None:
        return SchemaState(revision=None, waiting=chain())
    if revision in numbers:
        return SchemaState(revision=revision, waiting=chain()[numbers.index(revision) + 1 :])
    if why := await refusal(connection):
        raise OperatorError(why)
    return SchemaState(revision=revision, is_newer=True)


def _upgrade(connection: Connection, on_applied: Callable[..., None]) -> None:
    config = alembic_config()
    config.attributes["connection"] = connection
    config.attributes["on_version_apply"] = on_applied
    command.upgrade(config, "head")


@asynccontextmanager
async def _connected(dsn: str) -> AsyncIterator[AsyncConnection]:
    engine = make_engine(dsn, settings={"application_name": "quantdrift db"}, poolclass=NullPool)
    try:
        async with translated(), engine.connect() as connection:
            yield connection
    finally:
        await engine.dispose()
