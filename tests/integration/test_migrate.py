"""The schema that migrations build, and what an upgrade promises."""

import asyncio
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection
from sqlalchemy.pool import NullPool

from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.storage.admin import migrate
from quantdrift.storage.admin.migrate import alembic_config, check, current, head, upgrade
from quantdrift.storage.database import Database, make_engine
from quantdrift.storage.schema import revision
from quantdrift.storage.schema.revision import OLDEST, chain, check_schema, newest
from quantdrift.storage.schema.tables import Base
from quantdrift.storage.server.postgres import PostgresServer
from tests.support.commands import invoked

pytestmark = pytest.mark.integration

# What autogenerate does not compare, and what it does, straight from the catalog.
CATALOG = {
    "columns": """
        select c.relname, a.attname, format_type(atttypid, atttypmod), attnotnull, attidentity, attnum,
            pg_get_expr(adbin, adrelid), col_description(c.oid, attnum)
        from pg_attribute a
        join pg_class c on c.oid = attrelid
        left join pg_attrdef d on adrelid = c.oid and adnum = attnum
        where {ours} and relkind in ('r', 'p') and attnum > 0
        order by 1, 2
    """,
    "tables": """
        select relname, relkind::text, pg_get_partkeydef(c.oid), reloptions::text, obj_description(c.oid, 'pg_class')
        from pg_class c where {ours} and relkind in ('r', 'p') order by 1
    """,
    "constraints": """
        select relname, conname, contype::text, pg_get_constraintdef(o.oid)
        from pg_constraint o join pg_class c on c.oid = conrelid where {ours} order by 1, 2
    """,
    "indexes": """
        select tablename, indexname, indexdef
        from pg_indexes join pg_class c on c.oid = (quote_ident(schemaname) || '.' || quote_ident(tablename))::regclass
        where {ours} order by 1, 2
    """,
}
OURS = "c.relnamespace = 'public'::regnamespace and not c.relispartition and c.relname <> 'alembic_version'"

REVISIONS = ["0001", "0002", "0003", "0004", "0005", "0006", "0007", "0008", "0009", "0010", "0011", "0012"]


def quiet(_line: str) -> None:
    """Ignore progress."""


async def run_sync(dsn: str, work: Any, *args: Any) -> Any:
    """Run `work` on a synchronous connection and commit."""
    engine = make_engine(dsn, settings={}, poolclass=NullPool)
    try:
        async with engine.begin() as connection:
            return await connection.run_sync(work, *args)
    finally:
        await engine.dispose()


async def catalog(dsn: str) -> dict[str, Sequence[tuple[Any, ...]]]:
    """Return everything the catalog says of our tables."""
    connection = await asyncpg.connect(dsn)
    try:
        return {
            name: [tuple(row) for row in await connection.fetch(query.format(ours=OURS))]
            for name, query in CATALOG.items()
        }
    finally:
        await connection.close()


async def empty_database(dsn: str) -> str:
    """Create a second database next to the test's own, and return its address."""
    connection = await asyncpg.connect(dsn)
    name = f"{dsn.rpartition('/')[2]}_empty"
    await connection.execute(f"create database {name}")
    await connection.close()
    return f"{dsn.rpartition('/')[0]}/{name}"


async def test_migrations_build_what_the_tables_declare(postgres_dsn: str) -> None:
    """Alembic finds no difference between a migrated database and `storage.tables`."""

    def difference(connection: Connection) -> Any:
        options = {
            "compare_type": True,
            "compare_server_default": True,
            "include_name": lambda name, kind, _: kind != "table" or not name.startswith("comparison_"),
        }
        return compare_metadata(MigrationContext.configure(connection, opts=options), Base.metadata)

    assert await run_sync(postgres_dsn, difference) == []


async def test_migrations_and_create_all_leave_the_same_catalog(postgres_dsn: str) -> None:
    """Types, defaults, constraints with their names, indexes, partitioning and comments are equal."""
    declared = await empty_database(postgres_dsn)
    await run_sync(declared, Base.metadata.create_all)
    by_migration, by_metadata = await catalog(postgres_dsn), await catalog(declared)
    for part, rows in by_metadata.items():
        assert by_migration[part] == rows, part
    assert all(row[-1] for row in by_metadata["columns"] + by_metadata["tables"]), "a comment is missing"  # type: ignore[operator]


async def test_every_view_and_each_of_its_columns_is_commented(postgres_dsn: str) -> None:
    """Whoever looks at a view in psql is told what it means."""
    connection = await asyncpg.connect(postgres_dsn)
    rows = await connection.fetch("""
        select relname, attname, obj_description(c.oid, 'pg_class') as of_view, col_description(c.oid, attnum) as said
        from pg_class c join pg_attribute on attrelid = c.oid
        where relnamespace = 'public'::regnamespace and relkind = 'v' and attnum > 0
    """)
    await connection.close()
    assert {row["relname"] for row in rows} == {
        "slice_now",
        "signal_now",
        "slice_history",
        "slice_item",
        "slice_day",
        "item",
        "release_compare",
        "not_observed",
        "change_log",
        "coverage_hour",
        "account",
        "incidents",
        "incident_now",
        "version_now",
        "leader_lock",
        "discovery_lock",
        "partition_lock",
    }
    assert all(row["of_view"] and row["said"] for row in rows)


async def test_downgrade_takes_everything_back_and_upgrade_brings_the_same(postgres_dsn: str) -> None:
    """Down to nothing and up again gives the same schema."""
    before = await catalog(postgres_dsn)

    def down(connection: Connection) -> None:
        config = alembic_config()
        config.attributes["connection"] = connection
        command.downgrade(config, "base")

    await run_sync(postgres_dsn, down)
    assert not any((await catalog(postgres_dsn)).values())
    assert await current(postgres_dsn) is None
    assert await upgrade(postgres_dsn, progress=quiet) == REVISIONS
    assert await catalog(postgres_dsn) == before


async def test_a_second_upgrade_does_nothing(postgres_dsn: str) -> None:
    """An upgrade of the newest schema applies nothing and says so."""
    said: list[str] = []
    assert await upgrade(postgres_dsn, progress=said.append) == []
    assert said == [f"schema revision: {head()}, newest: {head()}", "daily partitions exist"]
    assert await current(postgres_dsn) == head()


async def test_two_upgrades_at_once_take_turns(postgres_dsn: str) -> None:
    """Each revision is applied once, whoever comes first."""
    fresh = await empty_database(postgres_dsn)
    applied = await asyncio.gather(*(upgrade(fresh, progress=quiet) for _ in range(3)))
    assert sorted(applied) == [[], [], REVISIONS]


async def test_an_upgrade_does_not_wait_for_ever_for_its_turn(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another upgrade hangs, this one ends with an error that says it may be tried again."""
    monkeypatch.setattr(migrate, "_TURN_TIMEOUT_S", 0.05)
    other = await asyncpg.connect(postgres_dsn)
    await other.execute("select pg_advisory_lock($1)", migrate._LOCK)
    with pytest.raises(RetryError, match="lock timeout"):
        await upgrade(postgres_dsn, progress=quiet)
    await other.close()


async def test_a_schema_of_a_newer_release_is_left_alone(postgres_dsn: str) -> None:
    """Where the newer release has only expanded it this release works with it, else it says which one to install."""
    connection, progress = await asyncpg.connect(postgres_dsn), list[str]()
    await connection.execute("update alembic_version set version_num = '9999'")
    assert await upgrade(postgres_dsn, progress=progress.append) == []
    assert "9999" in progress[-1]
    assert "can work with it" in progress[-1]
    async with Database(postgres_dsn) as database:
        await check_schema(database)
        await connection.execute("update compatibility set oldest_revision = '9998'")
        for use in (upgrade(postgres_dsn, progress=quiet), check_schema(database)):
            with pytest.raises(
                OperatorError, match=r"9999 .* needs revision 9998 .* install the newer release"
            ):
                await use
    assert await connection.fetchval("select version_num from alembic_version") == "9999"
    await connection.close()


async def test_another_numbering_is_refused_before_anything_is_applied(postgres_dsn: str) -> None:
    """A revision with the same number and another name, and a schema without the first tables, are no older releases."""
    connection = await asyncpg.connect(postgres_dsn)
    written = await connection.fetchval("select obj_description('alembic_version'::regclass)")
    assert written == f"Revisions: {', '.join(chain())}"
    await connection.execute("update alembic_version set version_num = '0002'")
    await connection.execute("comment on table alembic_version is 'Revisions: 0001_initial, 0002_other'")
    foreign = await empty_database(postgres_dsn)
    before = await asyncpg.connect(foreign)
    await before.execute(
        "create table alembic_version (version_num text); insert into alembic_version values ('0011')"
    )
    for dsn, why in (
        (postgres_dsn, f"0002_other where this release has {chain()[1]}"),
        (foreign, "lacks .*slice_change"),
    ):
        async with Database(dsn) as database:
            for use in (upgrade(dsn, progress=quiet), check(dsn), check_schema(database)):
                with pytest.raises(OperatorError, match=f"{why}.* begin with an empty database"):
                    await use
    assert await connection.fetchval("select version_num from alembic_version") == "0002"
    assert await before.fetchval("select count(*) from pg_tables where schemaname = 'public'") == 1
    await before.close()
    await connection.close()


async def test_a_schema_without_the_names_of_its_revisions_gets_them(postgres_dsn: str) -> None:
    """1.0.0rc1 wrote none: its databases are upgraded."""
    connection = await asyncpg.connect(postgres_dsn)
    await connection.execute("comment on table alembic_version is null")
    assert await upgrade(postgres_dsn, progress=quiet) == []
    written = await connection.fetchval("select obj_description('alembic_version'::regclass)")
    assert written == f"Revisions: {', '.join(chain())}"
    await connection.close()


def test_a_check_says_what_an_upgrade_would_apply(postgres_dsn: str, tmp_path: Path) -> None:
    """It changes nothing, and its exit code says whether there is anything to do."""
    (tmp_path / "config.toml").touch()
    fresh = asyncio.run(empty_database(postgres_dsn))
    for dsn, waiting, code in ((fresh, list(chain()), 3), (postgres_dsn, [], 0)):

        def checked(*more: str, dsn: str = dsn) -> subprocess.CompletedProcess[str]:
            return invoked("db", "upgrade", "--check", *more, directory=tmp_path, QUANTDRIFT_DSN=dsn)

        answer = checked("--json")
        assert (answer.returncode, json.loads(answer.stdout)["waiting"]) == (code, waiting)
        would = f"would apply {', '.join(chain())}" if waiting else "nothing to upgrade"
        assert would in checked().stdout
    assert asyncio.run(current(fresh)) is None


async def test_a_schema_of_an_older_release_is_to_be_upgraded_first(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names both revisions and the command; without any schema it names the command too."""
    async with Database(postgres_dsn) as database:
        await check_schema(database)
        monkeypatch.setattr(revision, "newest", lambda: "9999")
        with pytest.raises(OperatorError, match=f"revision {head()}.* needs 9999.*quantdrift db upgrade"):
            await check_schema(database)
    async with Database(await empty_database(postgres_dsn)) as database:
        with pytest.raises(OperatorError, match="no schema: run `quantdrift db upgrade`"):
            await check_schema(database)


async def test_a_user_who_may_not_read_the_revision_is_not_stopped(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rights of an older release are enough to work; `quantdrift setup postgres` grants the new ones."""
    connection = await asyncpg.connect(postgres_dsn)
    name = f"limited_{postgres_dsn.rpartition('/')[2]}"
    await connection.execute(f"create role {name} login password 'limited'")
    monkeypatch.setattr(revision, "newest", lambda: "9999")
    address = urlsplit(postgres_dsn)
    dsn = address._replace(netloc=f"{name}:limited@{address.hostname}:{address.port}").geturl()
    async with Database(dsn) as database:
        await check_schema(database)
        await connection.execute(f"grant select on alembic_version to {name}")
        with pytest.raises(OperatorError, match=f"revision {head()}"):
            await check_schema(database)
    await connection.execute(f"drop owned by {name}; drop role {name}")
    await connection.close()


def test_the_oldest_release_that_can_work_with_the_schema_is_a_known_one() -> None:
    """A release raises it when a revision takes something away, and never above its own newest revision."""
    assert OLDEST in REVISIONS
    assert newest() == head() == REVISIONS[-1]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda dsn: dsn.replace("quantdrift:", "quantdrift:wrong"),
            OperatorError,
            "check user and password",
        ),
        (lambda dsn: dsn.rpartition("/")[0] + "/nothing", OperatorError, "create it"),
        (
            lambda _: "postgresql://u:p@127.0.0.1:1/x",
            RetryError,
            "at 127.0.0.1:1 is not available: connection refused",
        ),
        (
            lambda _: "postgresql://u:p@host.invalid:1/x?sslmode=disable",
            RetryError,
            "at host.invalid:1 is not available: ",
        ),
        (
            lambda _: "postgresql://u:secret@127.0.0.1:port/x",
            OperatorError,
            "form postgresql://user:password",
        ),
        (lambda _: "mysql://u:p@127.0.0.1/x", OperatorError, "begin with postgresql://"),
    ],
)
async def test_what_is_wrong_with_the_address_is_said(
    postgres_cluster: PostgresServer, change: Any, error: type[Exception], message: str
) -> None:
    """Whoever must act learns what to do, and no message repeats the password."""
    with pytest.raises(error, match=message) as caught:
        await upgrade(change(postgres_cluster.dsn), progress=quiet)
    assert "secret" not in str(caught.value)
