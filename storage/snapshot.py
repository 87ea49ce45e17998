"""Reads of one state of the database: all statements of a page or a report see the same."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, Final, TypeVar

import msgspec
from sqlalchemy import RowMapping, TextClause, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.errors import OperatorError
from quantdrift.storage.database import Database

Connection = AsyncConnection
"""A transaction that `reading` opens."""
_T = TypeVar("_T")
PATIENCE_S: Final = 0.4
"""Longest query of single exchanges on the overview, which has two of them, seconds."""
PAST_PATIENCE_S: Final = 2.0
"""Longest query of single exchanges on the page of a slice, seconds."""
_CANCELED: Final = "57014"  # SQLSTATE query_canceled
KNOWN_STRATA: Final = """with recursive known as (
    (select source, boot, stratum from tally order by source, boot, stratum limit 1)
    union all
    select n.source, n.boot, n.stratum from known k cross join lateral (
        select t.source, t.boot, t.stratum from tally t
        where (t.source, t.boot, t.stratum) > (k.source, k.boot, k.stratum)
        order by t.source, t.boot, t.stratum limit 1
    ) n
)"""
"""As SQL: each start of a sidecar with its strata, one step per key along the primary key of `tally`; reading every tally would take minutes."""
_STANDBY_AGE: Final = text(
    r"select case when pg_is_in_recovery() then extract(epoch from clock_timestamp() - pg_last_xact_replay_timestamp())\:\:double precision end"
)
_STATE: Final = text(
    r"select (select fold_seq from fold) + (select coalesce(sum(fold_seq), 0)\:\:bigint from model_fold) as fold, (select max(id) from alert) as alert,"
    " (select max(seq) from audit) as audit"
)


async def standby_age_s(connection: AsyncConnection) -> float | None:
    """Return how old the last change is that reached this standby; None: it is no standby, or none has reached it since it started."""
    age_s = await connection.scalar(_STANDBY_AGE)
    return None if age_s is None else float(age_s)


async def in_time(
    connection: AsyncConnection, read: Callable[[], Awaitable[_T]], timeout_s: float
) -> _T | None:
    """Return what `read` reads with `connection`, None if one of its statements takes too long.

    The transaction goes on either way.
    """
    try:
        async with connection.begin_nested():
            await connection.execute(text(f"set local statement_timeout = {int(1000 * timeout_s)}"))
            result = await read()
            await connection.execute(text("set local statement_timeout to default"))
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", "") != _CANCELED:
            raise
        return None
    return result


@asynccontextmanager
async def reading(database: Database) -> AsyncIterator[AsyncConnection]:
    """Open a transaction that reads one state of the database and can change nothing.

    Raises
    ------
    OperatorError
        The database has no tables yet.
    RetryError
        Postgres is not available.
    """
    async with database.begin() as connection:
        await connection.execute(text("set transaction isolation level repeatable read, read only"))
        if await connection.scalar(text("select to_regclass('report_run') is null")):
            raise OperatorError("the database has no tables yet: run `quantdrift db upgrade`")
        yield connection


async def rows(
    connection: AsyncConnection, kind: type[_T], statement: TextClause, **parameters: Any
) -> list[_T]:
    """Return the rows of a statement as records."""
    result = (await connection.execute(statement, parameters)).mappings()
    return [msgspec.convert(dict(row), kind, strict=False) for row in result]


async def data_state(connection: AsyncConnection) -> str:
    """Return a text that changes whenever something that the page shows has changed."""
    row = (await connection.execute(_STATE)).one()
    return ".".join(str(value or 0) for value in row)


async def judged_until(connection: AsyncConnection) -> datetime | None:
    """Return the capture time up to which the monitor has folded; None where it never has."""
    until: datetime | None = await connection.scalar(text("select event_time from fold"))
    return until


class SnapshotReader:
    """Reads in one snapshot.

    Parameters
    ----------
    connection
        Inside a transaction.
    """

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    @property
    def connection(self) -> AsyncConnection:
        """The connection, for what else is read in the same snapshot."""
        return self._connection

    async def _rows(self, statement: TextClause, **parameters: Any) -> Sequence[RowMapping]:
        return (await self._connection.execute(statement, parameters)).mappings().all()
