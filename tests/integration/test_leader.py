"""The lead: Postgres takes it from a monitor that hangs, and what a former leader had begun is not written."""

import asyncio
import logging
import signal
import sys
import time

import asyncpg
import pytest
from sqlalchemy import text

from quantdrift.core.errors import RetryError
from quantdrift.storage.database import Database
from quantdrift.storage.leader import Leadership
from quantdrift.storage.schema.roles import MONITOR, READER
from tests.support.storage.logins import login_in

pytestmark = pytest.mark.integration

DEADLINE_S = 60.0
WRITE = text("insert into policy (epoch, definition) values (:epoch, '{}')")
# A process that leads and renews its lease, until it is stopped.
LEADER = """
import asyncio, sys
from quantdrift.storage.leader import Leadership
async def main():
    async with Leadership(sys.argv[1], lease_s=1.0) as leadership:
        while True:
            print(await leadership.acquire(), flush=True)
            await asyncio.sleep(0.1)
asyncio.run(main())
"""


async def led_by(leadership: Leadership) -> None:
    """Wait until it leads."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                if await leadership.acquire():
                    return
            except RetryError:
                pass  # the former leader's transaction has not ended yet
            await asyncio.sleep(0.05)


async def test_a_leader_that_makes_no_progress_gives_up_the_lead(
    postgres_dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so, and counts as stuck until its work goes on; meanwhile another one leads."""
    async with Leadership(postgres_dsn, lease_s=2.0, progress_s=0.5) as one, Leadership(postgres_dsn) as two:
        assert await one.acquire()
        assert not await two.acquire()
        await led_by(two)
        assert one.is_stuck
        assert one.hangs
        assert not one.leads
        assert "made no progress for 0.5 s" in caplog.text
        assert not await one.acquire()
        assert not one.is_stuck
        assert not one.hangs


async def test_a_leader_that_makes_progress_keeps_the_lead_through_a_long_step(postgres_dsn: str) -> None:
    """A fold that takes longer than the lease renews it as long as it shows progress."""
    async with Leadership(postgres_dsn, lease_s=0.5, progress_s=0.4) as one, Leadership(postgres_dsn) as two:
        assert await one.acquire()
        until_s = time.monotonic() + 2.0
        while time.monotonic() < until_s:
            one.progress()
            await asyncio.sleep(0.01)
        assert one.leads
        assert not await two.acquire()
        assert await one.acquire()


async def test_a_process_that_stood_still_for_less_than_the_lease_keeps_the_lead(
    postgres_dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also with an answer under way: it came in time, and only was not read. The log says how long the process stood still."""
    async with Leadership(postgres_dsn, lease_s=4.0, timeout_s=0.5) as one, Leadership(postgres_dsn) as two:
        assert await one.acquire()
        asking, loop = asyncio.create_task(one.acquire()), asyncio.get_running_loop()
        # Right behind the step that sends the question, nothing of this process runs.
        loop.call_soon(loop.call_soon, time.sleep, 1.5)
        assert await asking
        async with asyncio.timeout(DEADLINE_S):
            while "this monitor stood still for 1." not in caplog.text:
                await asyncio.sleep(0.01)
        assert one.leads
        assert not await two.acquire()


async def test_a_stopped_process_loses_the_lead_with_its_lease(postgres_dsn: str) -> None:
    """Its connection stays open, but Postgres ends a session that has sent nothing for so long."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LEADER, postgres_dsn, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"True\n"
        process.send_signal(signal.SIGSTOP)
        async with Leadership(postgres_dsn) as standby:
            await led_by(standby)
    finally:
        process.kill()
        await process.wait()


async def test_what_a_former_leader_had_begun_is_not_written(
    postgres_dsn: str, database: Database, record: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """Its open transaction is ended before the next leader begins, and no later one passes the fence."""
    caplog.set_level(logging.WARNING)
    async with (
        Leadership(postgres_dsn, lease_s=1.0, progress_s=0.3) as former,
        Leadership(postgres_dsn) as leader,
    ):
        assert await former.acquire()

        async def write_late() -> None:
            async with database.begin() as connection:
                await former.fence(connection)
                await connection.execute(WRITE, {"epoch": "former"})
                await led_by(leader)
                assert "ended a transaction that the former leader had left open" in caplog.text

        with pytest.raises(RetryError):
            await write_late()
        with pytest.raises(RetryError, match="does not lead any more"):
            async with database.begin() as connection:
                await former.fence(connection)
        async with database.begin() as connection:
            await leader.fence(connection)
            await connection.execute(WRITE, {"epoch": "leader"})
    assert [row["epoch"] for row in await record.fetch("select epoch from policy")] == ["leader"]
    assert await record.fetchval("select term from leader") == 2


async def test_a_leader_that_was_cut_off_is_fenced_although_it_believes_that_it_leads(
    postgres_dsn: str, database: Database, record: asyncpg.Connection
) -> None:
    """Between the end of its session and its next statement it does not know; the term in the database does."""
    async with Leadership(postgres_dsn) as former, Leadership(postgres_dsn) as leader:
        assert await former.acquire()
        await record.execute(
            "select pg_terminate_backend(pid) from pg_locks where relation = 'leader_lock'::regclass and granted"
            " and database = (select oid from pg_database where datname = current_database())"
        )
        await led_by(leader)
        assert former.leads
        with pytest.raises(RetryError, match="does not lead any more"):
            async with database.begin() as connection:
                await former.fence(connection)
        assert not former.leads


async def test_a_statement_that_is_still_under_way_costs_the_connection_and_no_traceback(
    postgres_dsn: str,
) -> None:
    """As after a process stood still: the driver refuses a second one, the lead is given up, and the next try has a new connection."""
    async with Leadership(postgres_dsn) as leader:
        assert await leader.acquire()
        connection = leader._connection
        stuck = asyncio.create_task(connection.execute("select pg_sleep(1)"))
        await asyncio.sleep(0)
        with pytest.raises(RetryError, match="another operation"):
            await leader.acquire()
        assert not leader.leads
        with pytest.raises(asyncpg.PostgresError):
            await stuck
        await led_by(leader)


async def test_monitors_of_different_users_wait_for_the_end_of_the_transaction(
    postgres_dsn: str, record: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """A user that may not end the former leader's session says what to grant, and leads once the transaction has ended."""
    name = f"other_{record.get_server_pid()}"
    await record.execute(f"create role {name} login password 'other'")
    await record.execute(f"grant select, insert, update on leader to {name}")
    _, _, where = postgres_dsn.rpartition("@")
    try:
        await record.execute(f"grant update on leader_lock to {name}")
        await record.execute("insert into leader (id, term, holder) values (1, 7, 'former')")
        async with Leadership(f"postgresql://{name}:other@{where}") as other:
            async with record.transaction():
                await record.fetch("select term from leader for share")
                with pytest.raises(RetryError):
                    await other.acquire()
                assert "grant pg_signal_backend" in caplog.text
                assert not other.leads
            await led_by(other)
    finally:
        await record.execute(f"drop owned by {name}")
        await record.execute(f"drop role {name}")


async def test_a_reader_cannot_keep_the_monitors_from_leading(postgres_dsn: str) -> None:
    """Every lock that a reader may take is taken, and the monitor leads, writes, and loses nothing to the next one."""
    reader = await asyncpg.connect(await login_in(postgres_dsn, READER))
    monitor = await login_in(postgres_dsn, MONITOR)
    await reader.execute("begin isolation level repeatable read")
    await reader.execute("lock table leader in access share mode")
    await reader.fetch("select * from leader")
    async with Leadership(monitor) as leader, Leadership(monitor) as standby, Database(monitor) as database:
        assert await leader.acquire()
        assert not await standby.acquire()
        async with database.begin() as connection:
            await leader.fence(connection)
        await leader.release()
        await led_by(standby)
    await reader.close()


async def test_a_reader_who_only_prepares_statements_keeps_no_monitor_from_leading(postgres_dsn: str) -> None:
    """Postgres locks what a statement names before it asks for rights, and a statement that is never run keeps these locks."""
    reader = await asyncpg.connect(await login_in(postgres_dsn, READER))
    monitor = await login_in(postgres_dsn, MONITOR)
    await reader.execute("begin")
    for number, statement in enumerate(
        (
            "select from leader_lock for update",
            "select from partition_lock for update",
            "select from discovery_lock for update",
            "select from leader for update",
            "update leader set term = 0",
            "delete from leader",
        )
    ):
        await reader.execute(f"prepare attack_{number} as {statement}")
    async with Leadership(monitor) as leader, Leadership(monitor) as standby, Database(monitor) as database:
        assert await leader.acquire()
        assert not await standby.acquire()
        async with database.begin() as connection:
            await leader.fence(connection)
        await leader.release()
        await led_by(standby)
    await reader.close()


async def test_a_reader_may_not_take_a_lock_that_the_lead_needs(postgres_dsn: str) -> None:
    """Each needs a right that only monitors have."""
    reader = await asyncpg.connect(await login_in(postgres_dsn, READER))
    for attack in (
        *(
            f"lock table leader_lock in {mode} mode"
            for mode in ("access share", "row exclusive", "share", "access exclusive")
        ),
        *(f"lock table leader in {mode} mode" for mode in ("row share", "share", "access exclusive")),
        "select * from leader for key share",
        "select * from leader_lock",
        "update leader set term = term + 1",
        "delete from leader",
    ):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            async with reader.transaction():
                await reader.execute(attack)
    await reader.close()


async def test_a_lead_holds_back_no_vacuum(postgres_dsn: str, record: asyncpg.Connection) -> None:
    """Its open transaction has no snapshot and no number, and maintenance of the whole database does not wait for it."""
    async with Leadership(postgres_dsn) as leader:
        assert await leader.acquire()
        assert await leader.acquire()
        held = await record.fetch(
            "select backend_xmin, backend_xid from pg_stat_activity"
            " where application_name = 'quantdrift leader' and datname = current_database()"
            " and state = 'idle in transaction'"
        )
        assert [tuple(row) for row in held] == [(None, None)]
        await record.execute("set lock_timeout = '30s'")
        await record.execute("vacuum analyze")
        assert await leader.acquire()
