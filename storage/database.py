"""The connections to Postgres: one engine per process, transactions, and errors translated to our own.

It includes a subclass of asyncpg's connection, because a COPY of asyncpg can wait for ever.
"""

import asyncio
import select
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, Self, TypeAlias

import asyncpg
from sqlalchemy import event, text
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DBAPIError, InvalidatePoolError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from quantdrift.core.errors import OperatorError, QuantdriftError, RetryError
from quantdrift.storage.address import Connector, Dsn


def connection_class(copy_timeout_s: float | None) -> type[asyncpg.Connection]:
    """Return the class of the connections of an engine.

    In asyncpg (0.32) a COPY whose rows do not fit the socket's buffer waits until it may write again. When the server
    is gone by then, it waits for ever, and no timeout of the driver covers this wait. Here the end of the connection,
    or a deadline of our own, ends it with `TimeoutError`.

    Parameters
    ----------
    copy_timeout_s
        Longest COPY; None: no deadline, only the end of the connection ends it.
    """

    class Connection(asyncpg.Connection):  # type: ignore[misc]  # asyncpg publishes no types
        __slots__ = ()

        def has_unread(self) -> bool:
            """Return whether the server has sent something that nobody asked for: that, or its end, is how it ends a connection."""
            if self.is_closed() or self._transport.is_closing():
                return True
            waiting = select.poll()
            waiting.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
            return bool(waiting.poll(0))

        async def copy_records_to_table(self, table_name: str, **options: Any) -> str:
            """Copy rows as asyncpg does; raise `TimeoutError` when the server does not take them any more."""
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(copy_timeout_s) as deadline:

                def lost(_connection: object) -> None:
                    # Wait a moment for the driver's own error, which says more.
                    if not deadline.expired():
                        deadline.reschedule(loop.time() + 0.05)

                self.add_termination_listener(lost)
                try:
                    status: str = await super().copy_records_to_table(table_name, **options)
                finally:
                    self.remove_termination_listener(lost)
            return status

    return Connection


# Classes of SQLSTATE that are temporary: connection, resources, operator intervention, rollback by conflict,
# locks; and two single ones: a standby that is not yet the primary, and a transaction ended for idling.
_READ_ONLY: Final = "25006"
_PASSING_STATES: Final = ("08", "53", "57", "40", "55", _READ_ONLY, "25P03")
_OPERATOR_STATES: Final = {
    "28": "check user and password in the Postgres address, and the server's pg_hba.conf",
    "3D000": "create it, or correct the name at the end of the Postgres address",
    "42501": "grant what is missing: `quantdrift setup postgres` prints the statements",
    "42P01": "run `quantdrift db upgrade`",
    "42703": "run `quantdrift db upgrade`",
    "42883": "run `quantdrift db upgrade`",
}
# Rows that are there already, or that no partition takes, and what our own functions refuse.
_REFUSED_STATES: Final = ("23", "QD")
POOL_SIZE: Final = 4
"""Connections of each process: each of the few tasks that run at a time has one."""
STATEMENT_TIMEOUT_S: Final = 30.0
"""No statement of a process takes a tenth of it; a longer one waits for a lock, or for a server that is overloaded."""
# How long after its timeout a statement may be overdue on our own clock before the network counts as dead.
_NETWORK_GRACE_S: Final = 5.0
_SURE_S: Final = 5.0
"""The server of a connection that was used so recently is there, unless it has sent something since."""
_USED_S: Final = "used_s"
# The server notices within half a minute that a client's machine is gone, and releases its locks.
_KEEPALIVE: Final = {"tcp_keepalives_idle": "15", "tcp_keepalives_interval": "5", "tcp_keepalives_count": "3"}


Connection: TypeAlias = AsyncConnection
"""A connection inside a transaction, for those who hand it on from one function of `storage` to the next."""


class Database:
    """The pooled connections to the database.

    Parameters
    ----------
    dsn
        `postgresql://user:password@host:port/name`, or a function that reads it for each connection; never logged.
    pool_size
        Most connections.
    statement_timeout_s
        Postgres cancels a statement that takes longer.
    """

    def __init__(
        self, dsn: Dsn, *, pool_size: int = POOL_SIZE, statement_timeout_s: float = STATEMENT_TIMEOUT_S
    ) -> None:
        timeout_ms = int(statement_timeout_s * 1000)
        self._kept: list[tuple[AsyncConnection, asyncpg.Connection]] = []
        self._most_kept = min(pool_size - 1, 1)
        self._engine = make_engine(
            dsn,
            command_timeout_s=statement_timeout_s + _NETWORK_GRACE_S,
            settings={
                "application_name": "quantdrift",
                "statement_timeout": str(timeout_ms),
                "idle_in_transaction_session_timeout": str(2 * timeout_ms),
            },
            pool_size=pool_size,
            max_overflow=0,
            pool_timeout=statement_timeout_s,
        )
        event.listen(self._engine.sync_engine, "checkin", _note_use)
        event.listen(self._engine.sync_engine, "checkout", _make_sure)

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncConnection]:
        """Open a transaction; it commits at the end, or rolls back when an error passes through.

        Raises
        ------
        RetryError
            Postgres is not available, overloaded or resolved a conflict: the same work may succeed later. Where the
            connection was lost during the commit itself, it may even have succeeded: the work must be idempotent.
        OperatorError
            The address, a permission or the schema is wrong; the message says what to do.
        """
        async with translated(), self._engine.begin() as connection:
            yield connection

    @asynccontextmanager
    async def statement(self) -> AsyncIterator[asyncpg.Connection]:
        """Lend a connection outside of a transaction, for one statement that is a transaction by itself.

        It is kept for the next call, and costs nothing then: no look whether the server is still there, and no layer above the driver.
        After any error the caller tries the same by `begin`, which knows what to do about it.

        Raises
        ------
        RetryError, OperatorError
            As `begin`.
        """
        async with translated():
            if self._kept:
                connection, driver = self._kept.pop()
            else:
                connection = await self._engine.connect()
                driver = (await connection.get_raw_connection()).driver_connection
            is_usable = False
            try:
                yield driver
                is_usable = True
            except asyncpg.PostgresError as error:
                is_usable = (error.sqlstate or "").startswith(_REFUSED_STATES)
                raise
            finally:
                if not is_usable:  # after any other error that is not sure
                    await connection.invalidate()
                if not is_usable or driver.is_closed() or len(self._kept) >= self._most_kept:
                    await connection.close()
                else:
                    self._kept.append((connection, driver))

    async def ping(self) -> None:
        """Check that the server answers.

        Raises
        ------
        RetryError, OperatorError
            As `begin`.
        """
        async with self.begin() as connection:
            await connection.execute(text("select 1"))

    async def close(self) -> None:
        """Close every connection."""
        while self._kept:
            await self._kept.pop()[0].close()
        await self._engine.dispose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def make_engine(
    dsn: Dsn, *, settings: dict[str, str], command_timeout_s: float | None = None, **options: Any
) -> AsyncEngine:
    """Return an engine on `dsn` in UTC; errors and logs never show the values of a statement.

    Parameters
    ----------
    settings
        Server settings of each session.
    command_timeout_s
        Longest wait for an answer on our own clock; None: only the server's own timeout.
    options
        For SQLAlchemy's `create_async_engine`.
    """
    connector = Connector(dsn)
    engine = create_async_engine(
        connector.address.url,
        hide_parameters=True,
        connect_args={
            "async_creator_fn": connector.connect,
            "timeout": 10,
            "command_timeout": command_timeout_s,
            "connection_class": connection_class(command_timeout_s),
            "server_settings": {"timezone": "UTC"} | _KEEPALIVE | settings,
        },
        **options,
    )
    event.listen(engine.sync_engine, "handle_error", _leave_standby)
    return engine


def _leave_standby(context: ExceptionContext) -> None:
    """Close every connection to a server that has become a standby: new connections reach the new primary."""
    if getattr(context.original_exception, "sqlstate", "") == _READ_ONLY:
        context.is_disconnect = True


def _note_use(_: Any, record: ConnectionPoolEntry) -> None:
    record.info[_USED_S] = time.monotonic()


def _make_sure(connection: Any, record: ConnectionPoolEntry, _: Any) -> None:
    """Ask the server whether it is still there where that is not certain; a connection that is lost is replaced.

    To ask takes three messages, as many as a transaction of one statement. When the server ends a connection it sends that.
    """
    used_s = record.info.get(_USED_S)
    if used_s is None:  # it is new
        return
    if time.monotonic() - used_s > _SURE_S or connection.driver_connection.has_unread():
        try:
            connection.ping()
        except connection.dbapi.Error as error:
            raise InvalidatePoolError from error


@asynccontextmanager
async def translated() -> AsyncIterator[None]:
    """Translate database errors into `RetryError` (temporary) or `OperatorError` (a person must act).

    All others are bugs and are raised unchanged.
    """
    try:
        yield
    except QuantdriftError:
        raise
    except (OSError, TimeoutError, PoolTimeoutError) as error:
        raise RetryError(f"Postgres is not available: {type(error).__name__}: {error}") from error
    except (DBAPIError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError) as error:
        translation = _translate(error)
        if translation is None:
            raise
        raise translation from error


def _translate(error: Exception) -> QuantdriftError | None:
    lost = isinstance(error, DBAPIError) and error.connection_invalidated
    driver = _driver_error(error)
    if isinstance(driver, asyncpg.PostgresError):
        state, message = driver.sqlstate or "", driver.args[0] if driver.args else ""
        if lost or state.startswith(_PASSING_STATES):
            why = ": the address leads to a standby" if state == _READ_ONLY else ""
            return RetryError(f"Postgres reports a temporary error: {message} ({state}){why}")
        for prefix, advice in _OPERATOR_STATES.items():
            if state.startswith(prefix):
                return OperatorError(f"Postgres reports: {message} ({state}): {advice}")
        return None
    # The driver's own errors are bugs of ours (a wrong type, two statements at once), except a lost connection.
    if lost or "connection is closed" in str(driver) or "connection_lost" in str(driver):
        return RetryError(f"Postgres is not available: {type(driver).__name__}: {driver}")
    return None


def sqlstate(error: DBAPIError) -> str:
    """Return the code of an error of the server, empty if it has none."""
    return str(getattr(_driver_error(error), "sqlstate", None) or "")


def _driver_error(error: Exception) -> BaseException:
    """Return asyncpg's error under the layers that SQLAlchemy puts around it."""
    cause: BaseException = error
    if isinstance(error, DBAPIError) and error.orig is not None:
        cause = error.orig.__cause__ or error.orig
    return cause
