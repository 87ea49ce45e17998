"""Leader election: a lock that Postgres takes back from a leader that hangs, and a term that fences its writes.

The lock belongs to a transaction on a direct connection. Its session asks the server to end it after `LEASE_S` without a
statement, so that the lease is measured by the server alone, whatever becomes of the leader, its machine or the network. A
leader that works renews it ten times in that. The transaction writes nothing and reads nothing that lasts, so it does not hold
back vacuum, however long it is open.

What is locked is the view `leader_lock`: a name for which rights can be granted, and no table, so that `vacuum` and `analyze`
of the whole database do not wait for the lead. To lock it takes the right to update it. An advisory lock would need no right at
all: any reader could take it, and nobody would lead. Nor does it need a right to name the view in a statement that is prepared and never
run: Postgres locks what is named before it asks for rights, as a reader or a writer of rows would. The mode of the lead's lock conflicts
with neither; with the lead's lock of the release before (`exclusive`) it does.

Whoever gets the lock ends the transactions that the former leader still has open, and writes the next term into the row of
`leader`. Every transaction of a leader begins with `fence`, which locks that row for share and compares the term. So a
former leader that wakes up cannot write: it finds another term, or its transaction was ended before the term changed.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, Self

import asyncpg
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.errors import QuantdriftError, RetryError
from quantdrift.storage.address import Connector, Dsn
from quantdrift.storage.database import translated

LEASE_S: Final = 20.0
"""Postgres takes the lock back from a leader that has sent nothing for so long. Longer than a leader ever keeps its event
loop busy in one piece; short beside the 30 s in which another monitor must lead."""
PROGRESS_S: Final = 60.0
"""A leader whose event loop works gives up the lead after so long without progress of its fold. Longer than Postgres may
take for one statement."""
_TIMEOUT_S: Final = 5.0
_LOOKS: Final = 10  # in a timeout
_RENEWALS: Final = 10  # in a lease
_STILL: Final = 0.25  # share of a lease: a process that stood still for so long says so
_LOG = logging.getLogger(__name__)

# Another isolation level would keep its snapshot, and hold back vacuum.
_BEGIN: Final = "begin isolation level read committed"
_LOCK: Final = "lock table leader_lock in share update exclusive mode nowait"
# Whoever locks rows of `leader` for share has passed `fence` and not ended its transaction.
_FENCED: Final = """
    select pid from pg_locks
    where locktype = 'relation' and relation = 'leader'::regclass and mode = 'RowShareLock' and granted
        and database = (select oid from pg_database where datname = current_database()) and pid <> pg_backend_pid()
"""
_TAKE: Final = """
    insert into leader (id, term, holder) values (1, 1, $1)
    on conflict (id) do update set term = leader.term + 1, holder = excluded.holder, since = now()
    returning term
"""
_FENCE: Final = text("select term, holder from leader where id = 1 for share")

Fence = Callable[[AsyncConnection], Awaitable[None]]
"""Refuses a transaction of a process that does not lead; see `Leadership.fence`."""


class Leadership:
    """The monitor's lock on one database. At most one monitor holds it; the others try again.

    The connection does not come from a pool: a pooler that reassigns the session would reassign the lock.

    Parameters
    ----------
    dsn
        `postgresql://user:password@host:port/name`, or a function that reads it for each connection; never logged.
    lease_s, progress_s
        As `LEASE_S` and `PROGRESS_S`.
    timeout_s
        How long the server may take for an answer, by the time in which this process was able to see one.

    Attributes
    ----------
    is_stuck : bool
        Whether it gave up the lead because `progress` was not called for `progress_s`; false again once it is called.
    """

    def __init__(
        self,
        dsn: Dsn,
        *,
        lease_s: float = LEASE_S,
        progress_s: float = PROGRESS_S,
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        self._connector = Connector(dsn)
        self._lease_s = lease_s
        self._limit_s = progress_s
        self._timeout_s = timeout_s
        self._connection: Any = None
        self._one_statement = asyncio.Lock()
        self._renewing: asyncio.Task[None] | None = None
        self._term: int | None = None
        self._progress_s = time.monotonic()
        self.is_stuck = False

    @property
    def leads(self) -> bool:
        """Whether this process leads, as far as it knows; only `fence` is certain."""
        return self._term is not None

    @property
    def pid(self) -> int | None:
        """The server process of its session, which lasts as long as this process; None: it has none now."""
        return None if self._connection is None else self._connection.get_server_pid()

    @property
    def hangs(self) -> bool:
        """Whether `progress` was not called for `progress_s`, also while the event loop itself stands still."""
        return self.is_stuck or time.monotonic() - self._progress_s > self._limit_s

    def progress(self) -> None:
        """Note that the leader's work goes on."""
        self._progress_s = time.monotonic()
        self.is_stuck = False

    async def acquire(self) -> bool:
        """Return whether this process leads now; repeated calls are cheap and check that it still does.

        Raises
        ------
        RetryError
            Postgres is not available, or the former leader's transaction has not ended yet; if this process led, it does
            not any more.
        OperatorError
            Postgres refuses the connection, or its certificate is not accepted; the message says what to do.
        """
        self.progress()
        try:
            async with translated(), self._one_statement:
                await self._in_time(self._acquire())
        except QuantdriftError:
            await self.release()  # its transaction may be broken
            raise
        except (asyncpg.InterfaceError, asyncpg.InternalClientError) as error:
            # A statement that was given up is still under way on this connection, after the process stood still.
            await self.release()
            raise RetryError(f"the connection of the lead is broken: {error}") from error
        return self.leads

    async def fence(self, connection: AsyncConnection) -> None:
        """Refuse the transaction of `connection` unless this process leads.

        Whoever takes the lead before the transaction ends will end it first.

        Raises
        ------
        RetryError
            Another process leads.
        """
        row = (await connection.execute(_FENCE)).one_or_none()
        if row is None or row.term != self._term:
            await self.release()
            holder = "nobody" if row is None else row.holder
            raise RetryError(f"this monitor does not lead any more: the lead is with {holder}")

    async def release(self) -> None:
        """Give up leadership."""
        connection, self._connection, self._term = self._connection, None, None
        renewing, self._renewing = self._renewing, None
        if renewing is not None and renewing is not asyncio.current_task():
            renewing.cancel()
        if connection is not None:
            connection.terminate()

    async def _acquire(self) -> None:
        if self._connection is None:
            self._connection = await self._connect()
        if self._term is not None:
            await self._connection.execute("select 1")
        elif await self._lock():
            self._term = await self._take()
            self._renewing = asyncio.create_task(self._renew())

    async def _in_time(self, answer: Coroutine[Any, Any, None]) -> None:
        """Wait for an answer of the server.

        After a time in which this process stood still, its clock says that the answer is late before the loop has read what came
        meanwhile. So time counts in small steps, and one of them is lost at most.
        """
        waiting = asyncio.create_task(answer)
        try:
            for _ in range(_LOOKS):
                done, _ = await asyncio.wait((waiting,), timeout=self._timeout_s / _LOOKS)
                if done:
                    return waiting.result()
            raise TimeoutError(f"no answer within {self._timeout_s:g} s")
        finally:
            if not waiting.done():
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)

    async def _connect(self) -> asyncpg.Connection:
        lease_ms = str(int(self._lease_s * 1000))
        return await self._connector.connect(
            timeout=_TIMEOUT_S,
            server_settings={
                "application_name": "quantdrift leader",
                "idle_session_timeout": lease_ms,
                "idle_in_transaction_session_timeout": lease_ms,
                # A machine that is gone is noticed at the latest by then, also while the server sends.
                "tcp_keepalives_idle": "5",
                "tcp_keepalives_interval": "5",
                "tcp_keepalives_count": "3",
                "tcp_user_timeout": lease_ms,
                "lock_timeout": "1000",
            },
        )

    async def _lock(self) -> bool:
        """Return whether this process has the lock now; its transaction stays open for as long as it has it."""
        await self._connection.execute(_BEGIN)
        try:
            await self._connection.execute(_LOCK)
        except asyncpg.LockNotAvailableError:
            await self._connection.execute("rollback")
            return False
        # A server may limit all transactions (from Postgres 17 on); this one lasts as long as the lead.
        await self._connection.execute(
            "select set_config(name, '0', false) from pg_settings where name = 'transaction_timeout'"
        )
        return True

    async def _take(self) -> int:
        """End the transactions of the former leader, and return the new term."""
        # The transaction with the lock must not write: as long as it is open, vacuum would remove nothing newer.
        connection = await self._connect()
        try:
            while True:
                for row in await connection.fetch(_FENCED):
                    await self._end_session(connection, row["pid"])
                with contextlib.suppress(asyncpg.LockNotAvailableError):
                    term: int = await connection.fetchval(_TAKE, f"{socket.gethostname()}:{os.getpid()}")
                    return term
        finally:
            connection.terminate()

    async def _end_session(self, connection: asyncpg.Connection, pid: int) -> None:
        try:
            await connection.execute("select pg_terminate_backend($1)", pid)
        except asyncpg.InsufficientPrivilegeError:
            _LOG.warning(
                "the former leader has a transaction open that this monitor's user may not end: the lead is taken once"
                " Postgres ends it, after a minute. Give all monitors the same user, or grant pg_signal_backend"
            )
        else:
            _LOG.warning("ended a transaction that the former leader had left open (backend %d)", pid)

    async def _renew(self) -> None:
        """Renew the lease as long as the leader makes progress; give up the lead otherwise."""
        while True:
            every_s, slept_at_s = self._lease_s / _RENEWALS, time.monotonic()
            await asyncio.sleep(every_s)
            still_s = time.monotonic() - slept_at_s - every_s
            if still_s > _STILL * self._lease_s:
                _LOG.warning(
                    "this monitor stood still for %.1f s: it had no processor, or one step of its fold took so long. Postgres gives the lead to"
                    " another one after %g s: give it a whole core, or fewer slices",
                    still_s,
                    self._lease_s,
                )
            if time.monotonic() - self._progress_s > self._limit_s:
                _LOG.error(
                    "this monitor gives up the lead: its fold has made no progress for %g s. Another monitor takes over;"
                    " restart this one",
                    self._limit_s,
                )
                self.is_stuck = True
                break
            try:
                async with translated(), self._one_statement:
                    await self._in_time(self._connection.execute("select 1"))
            except RetryError as error:
                _LOG.warning("the lead is lost: %s", error)
                break
            except (asyncpg.InterfaceError, asyncpg.InternalClientError) as error:
                _LOG.warning(
                    "the lead is lost: Postgres has ended its connection, as it does where this process stands still for %g s (%s)",
                    self._lease_s,
                    error,
                )
                break
        await self.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()


async def unfenced(_: AsyncConnection) -> None:
    """Refuse nothing: the `Fence` of a process that is alone with its database."""
