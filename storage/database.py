"""The door to Postgres: one engine per process, transactions, and errors in our own words."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self
from urllib.parse import urlsplit

import asyncpg
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from quantdrift.core.config.schema import Storage
from quantdrift.core.errors import OperatorError, RetryError

_PASSING = (OperationalError, InterfaceError, OSError, TimeoutError)
# Classes of SQLSTATE that pass by themselves: connection, resources, operator intervention, rollback by conflict.
_PASSING_STATES = ("08", "53", "57", "40", "55")


class Database:
    """Connections to the record.

    Parameters
    ----------
    dsn
        `postgresql://user:password@host:port/name`; never logged.
    storage
        Pool size and statement timeout.
    """

    def __init__(self, dsn: str, storage: Storage) -> None:
        if urlsplit(dsn).scheme not in {"postgresql", "postgres"}:
            raise OperatorError("the Postgres address must begin with postgresql://")
        self._engine: AsyncEngine = create_async_engine(
            "postgresql+asyncpg" + dsn[dsn.index(":") :],
            pool_size=storage.pool_size,
            max_overflow=0,
            pool_pre_ping=True,
            connect_args={
                "timeout": 10,
                "server_settings": {
                    "application_name": "quantdrift",
                    "statement_timeout": str(int(storage.statement_timeout_s * 1000)),
                    "timezone": "UTC",
                },
            },
        )

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncConnection]:
        """Open a transaction; it commits at the end, or rolls back when an error passes through.

        Raises
        ------
        RetryError
            Postgres is away, overloaded or resolved a conflict: the same work may succeed later.
        """
        async with translated(), self._engine.begin() as connection:
            yield connection

    async def ping(self) -> None:
        """Ask the server for a sign of life.

        Raises
        ------
        RetryError
            There is none.
        """
        async with self.begin() as connection:
            await connection.execute(text("select 1"))

    async def close(self) -> None:
        """Close every connection."""
        await self._engine.dispose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


@asynccontextmanager
async def translated() -> AsyncIterator[None]:
    """Turn passing database errors into `RetryError`; all others are bugs and go through."""
    try:
        yield
    except _PASSING as error:
        raise RetryError(f"Postgres is not available: {type(error).__name__}") from error
    except DBAPIError as error:
        if (getattr(error.orig, "sqlstate", None) or "")[:2] in _PASSING_STATES:
            raise RetryError(f"Postgres could not do it now: {type(error.orig).__name__}") from error
        raise
    except asyncpg.PostgresError as error:
        if (error.sqlstate or "")[:2] in _PASSING_STATES:
            raise RetryError(f"Postgres could not do it now: {type(error).__name__}") from error
        raise
    except asyncpg.InterfaceError as error:
        raise RetryError(f"Postgres is not available: {type(error).__name__}") from error
