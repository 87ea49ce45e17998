"""The door to Postgres while Postgres is killed, slow, or asked for nonsense."""

import asyncio
import logging
import os
import signal
from collections.abc import Iterator

import asyncpg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

import quantdrift.storage.database
from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.storage.database import Database
from quantdrift.storage.server.postgres import PostgresServer

pytestmark = pytest.mark.fault


async def n_models(database: Database) -> int:
    """Return the number of candidate versions."""
    async with database.begin() as connection:
        return int(await connection.scalar(text("select count(*) from model_version")) or 0)


INSERT = text("insert into model_version (model, candidate_version, reference_digest) values (:m, '1', '')")


@pytest.mark.release
def test_killed_in_the_middle_of_a_transaction(postgres_server: PostgresServer) -> None:
    """The transaction ends with a RetryError, nothing of it is kept, and after a restart the same object works."""

    async def scenario() -> None:
        async with Database(postgres_server.dsn) as database:
            async with database.begin() as connection:
                await connection.execute(INSERT, {"m": "committed"})

            async def interrupted() -> None:
                async with database.begin() as connection:
                    await connection.execute(INSERT, {"m": "lost"})
                    postgres_server.kill()
                    await connection.execute(INSERT, {"m": "lost too"})

            with pytest.raises(RetryError, match="Postgres"):
                await interrupted()
            with pytest.raises(RetryError, match="not available"):
                await database.ping()
            postgres_server.start()
            assert await n_models(database) == 1

    asyncio.run(scenario())


def test_killed_just_before_the_commit(postgres_server: PostgresServer) -> None:
    """A commit that found nobody is a RetryError too."""

    async def scenario() -> None:
        async with Database(postgres_server.dsn) as database:

            async def interrupted() -> None:
                async with database.begin() as connection:
                    await connection.execute(INSERT, {"m": "lost"})
                    postgres_server.kill()

            with pytest.raises(RetryError):
                await interrupted()
            postgres_server.start()
            assert await n_models(database) == 0

    asyncio.run(scenario())


@pytest.mark.release
def test_killed_during_a_copy(postgres_server: PostgresServer) -> None:
    """A COPY that waits for leave to write to a server that is gone ends too, and at once."""

    async def scenario() -> None:
        async with Database(postgres_server.dsn) as database:
            begun = asyncio.Event()

            async def kill() -> None:
                await begun.wait()  # runs when the COPY first has to wait
                postgres_server.kill()

            async def copy() -> None:
                async with database.begin() as connection:
                    session = await connection.scalar(text("select pg_backend_pid()"))
                    driver = (await connection.get_raw_connection()).driver_connection
                    assert isinstance(driver, asyncpg.Connection)

                    def rows() -> Iterator[tuple[str, str, str]]:
                        for n in range(10_000):
                            if n == 10:
                                os.kill(session, signal.SIGSTOP)
                                begun.set()
                            yield (f"model {n}", "1" * 10_000, "")

                    columns = ["model", "candidate_version", "reference_digest"]
                    await driver.copy_records_to_table("model_version", columns=columns, records=rows())

            killing = asyncio.create_task(kill())
            async with asyncio.timeout(10) as deadline:
                with pytest.raises(RetryError):
                    await copy()
            assert not deadline.expired()
            await killing
            postgres_server.start()
            assert await n_models(database) == 0

    asyncio.run(scenario())


async def test_a_copy_that_nobody_takes_has_a_deadline(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that stands still without going away does not hold the caller for ever."""
    monkeypatch.setattr(quantdrift.storage.database, "_NETWORK_GRACE_S", 0.1)
    async with Database(postgres_dsn, statement_timeout_s=0.1) as database:
        stopped: list[int] = []

        async def copy() -> None:
            async with database.begin() as connection:
                stopped.append(int(await connection.scalar(text("select pg_backend_pid()")) or 0))
                driver = (await connection.get_raw_connection()).driver_connection
                assert isinstance(driver, asyncpg.Connection)
                os.kill(stopped[0], signal.SIGSTOP)
                await driver.copy_records_to_table("slice", columns=["model"], records=[("m",)])

        try:
            with pytest.raises(RetryError):
                await copy()
        finally:
            os.kill(stopped[0], signal.SIGCONT)
        await database.ping()


@pytest.mark.release
def test_connections_lost_while_idle_are_not_noticed(postgres_server: PostgresServer) -> None:
    """A restart between two transactions costs nothing: dead connections are replaced."""

    async def scenario() -> None:
        async with Database(postgres_server.dsn, pool_size=2) as database:
            await asyncio.gather(database.ping(), database.ping())
            postgres_server.stop()
            postgres_server.start()
            await asyncio.gather(database.ping(), database.ping())

    asyncio.run(scenario())


async def test_a_server_that_became_a_standby_is_left(postgres_dsn: str) -> None:
    """After a failover the old primary still answers, and refuses to write: its connections are not used again."""
    async with Database(postgres_dsn) as database:
        async with database.begin() as connection:
            await connection.execute(text("set session default_transaction_read_only = on"))
        with pytest.raises(RetryError, match="read-only"):
            async with database.begin() as connection:
                await connection.execute(INSERT, {"m": "m"})
        async with database.begin() as connection:
            await connection.execute(INSERT, {"m": "m"})


async def test_a_statement_that_takes_too_long_passes(postgres_dsn: str) -> None:
    """The server cancels it, the work may be tried again, and the connection stays usable."""
    async with Database(postgres_dsn, statement_timeout_s=0.05, pool_size=2) as database:
        with pytest.raises(RetryError, match="statement timeout"):
            async with database.begin() as connection:
                await connection.execute(text("select pg_sleep(60)"))
        await database.ping()


async def test_a_deadlock_passes(postgres_dsn: str) -> None:
    """Of two transactions that wait for each other, one is asked to try again."""
    async with Database(postgres_dsn) as database:
        async with database.begin() as connection:
            await connection.execute(INSERT, {"m": "a"})
            await connection.execute(INSERT, {"m": "b"})
        both = asyncio.Barrier(2)
        update = text("update model_version set candidate_version = '2' where model = :m")

        async def cross(first: str, second: str) -> None:
            async with database.begin() as connection:
                await connection.execute(text("set local deadlock_timeout = '10ms'"))
                await connection.execute(update, {"m": first})
                await both.wait()
                await connection.execute(update, {"m": second})

        ended = await asyncio.gather(cross("a", "b"), cross("b", "a"), return_exceptions=True)
    assert sorted(type(end).__name__ for end in ended) == ["NoneType", "RetryError"]


@pytest.mark.parametrize(
    ("query", "values"),
    [
        ("insert into model_version (model) values (:value)", {"value": "private"}),
        ("select cast(:value as integer)", {"value": "private"}),
        ("this is no SQL", {}),
    ],
)
async def test_our_own_mistakes_go_through(
    postgres_dsn: str, caplog: pytest.LogCaptureFixture, query: str, values: dict[str, str]
) -> None:
    """A bug is not taken for a passing condition, and the statement's values are not shown."""
    caplog.set_level(logging.DEBUG, logger="sqlalchemy")
    async with Database(postgres_dsn) as database:
        with pytest.raises(DBAPIError) as caught:
            async with database.begin() as connection:
                await connection.execute(text(query), values)
        assert "[parameters:" not in str(caught.value) or "hidden" in str(caught.value)
        await database.ping()


async def test_a_schema_that_was_never_made_is_the_operator_s_to_mend(postgres_dsn: str) -> None:
    """A missing table says which command makes it."""
    async with Database(postgres_dsn.rpartition("/")[0] + "/postgres") as database:
        with pytest.raises(OperatorError, match="quantdrift db upgrade"):
            await n_models(database)


async def test_a_busy_pool_is_a_passing_condition(postgres_dsn: str) -> None:
    """Whoever finds no free connection in time may come again."""
    async with Database(postgres_dsn, pool_size=2, statement_timeout_s=0.05) as database:
        async with database.begin(), database.begin():
            with pytest.raises(RetryError, match="not available"):
                await database.ping()
        await database.ping()
