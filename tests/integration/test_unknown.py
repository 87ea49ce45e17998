"""Who may write a table of the schema cannot make its owner run code: attacks with the monitor's user on a real server."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import asyncpg
import pytest

from quantdrift.core.errors import OperatorError
from quantdrift.storage.address import with_user
from quantdrift.storage.admin.migrate import upgrade
from quantdrift.storage.database import Database
from quantdrift.storage.schema.roles import MONITOR, OPERATOR, apply, login_of
from quantdrift.storage.schema.unknown import ERASURE, PARTITIONS, refuse_unknown, unknown_objects
from quantdrift.storage.server.postgres import PostgresServer
from tests.support.storage.comparisons import Comparison, store_comparisons

pytestmark = pytest.mark.integration

AT: Final = datetime.now(UTC)
# Rights that `setup postgres` does not give: with them the monitor's user can plant things.
TOO_MUCH: Final = (
    f"grant create on schema public to {MONITOR}",
    f"""do $$ declare part regclass; begin
        for part in select 'comparison'::regclass union select inhrelid from pg_inherits where inhparent = 'comparison'::regclass
        loop execute format('alter table %s owner to {MONITOR}', part); end loop;
    end $$""",
)
AS_BEFORE: Final = (
    f"revoke create on schema public from {MONITOR}",
    TOO_MUCH[1].replace(f"owner to {MONITOR}", f"owner to {PARTITIONS}"),
)
# A trigger that does, as whoever writes, what the writer may: here it makes the monitor a member of the owner and clears the audit.
TAKE: Final = f"""do $$ declare part regclass; begin
    for part in select 'comparison'::regclass union select inhrelid from pg_inherits where inhparent = 'comparison'::regclass
    loop execute format('grant all on %s to {MONITOR}', part); end loop;
end $$"""
PLANT: Final = """
    create function public.planted() returns trigger language plpgsql as $$ begin
        if current_user <> '{monitor}' then
            begin execute 'reset role'; exception when others then null; end;
            execute 'alter table public.audit disable trigger user';
            execute 'delete from public.audit';
            execute format('grant %I to {monitor}', current_user);
        end if;
        return null;
    exception when others then return null; end $$
""".format(monitor=login_of(MONITOR))
TRIGGER: Final = "create trigger planted after insert or delete on comparison for each statement execute function public.planted()"


class Site:
    """A server, and the owner of a database on it."""

    def __init__(self, server: PostgresServer, dsn: str) -> None:
        self.server, self.dsn = server, dsn

    def of(self, role: str) -> str:
        """Return the address of the user in a role."""
        return with_user(self.dsn, login_of(role), "p")

    def as_superuser(self) -> str:
        """Return the address of the superuser in the same database."""
        return f"{self.server.dsn.rpartition('/')[0]}/{self.dsn.rpartition('/')[2]}"

    async def run(self, dsn: str, *statements: str) -> Any:
        """Run statements as one user; return the rows of the last one."""
        connection = await asyncpg.connect(dsn)
        try:
            for statement in statements[:-1]:
                await connection.execute(statement)
            return await connection.fetch(statements[-1])
        finally:
            await connection.close()

    async def taken(self) -> tuple[bool, int]:
        """Return whether the monitor has become more than it was, and how many entries the audit has lost."""
        (user,) = await self.run(
            self.dsn,
            "select rolsuper or rolcreaterole or pg_has_role(oid, current_user, 'member') as more from pg_roles"
            f" where rolname = '{login_of(MONITOR)}'",
        )
        (audit,) = await self.run(self.dsn, "select coalesce(max(seq), 0) - count(*) as lost from audit")
        return user["more"], audit["lost"]


@pytest.fixture(params=[pytest.param("superuser", marks=pytest.mark.release), "no superuser"])
async def site(request: pytest.FixtureRequest, memory_path: Path) -> AsyncIterator[Site]:
    """Return a server whose owner is as under `quantdrift up`, or as docs/how-to/kubernetes.md asks for."""
    with PostgresServer(memory_path / "postgres", durable=False) as server:
        dsn = server.dsn
        if request.param != "superuser":
            connection = await asyncpg.connect(server.dsn)
            await connection.execute("create role bankowner login createrole password 'p'")
            await connection.execute("create database bank owner bankowner")
            await connection.close()
            dsn = with_user(f"{server.dsn.rpartition('/')[0]}/bank", "bankowner", "p")
        yield Site(server, dsn)


async def make(site: Site) -> None:
    """Make the schema with one partition, so that an error has room for what else it names, the users, and an entry of the audit."""
    await upgrade(site.dsn, progress=lambda _: None)
    await apply(site.dsn, {MONITOR: "p", OPERATOR: "p"})
    others = f"""do $$ declare part regclass; begin
        for part in select inhrelid from pg_inherits where inhparent = 'comparison'::regclass
            and inhrelid <> 'comparison_{AT:%Y%m%d}'::regclass
        loop execute format('drop table %s', part); end loop;
    end $$"""
    await site.run(site.as_superuser(), others, "select 1")
    await site.run(
        site.of(OPERATOR), "select audit_add('alert ack', 'digits', 'alert 1', null, '{}', 'fine')"
    )


async def test_the_monitor_owns_and_creates_nothing(site: Site) -> None:
    """It makes and drops partitions by functions; what else was granted on the table, an upgrade and a setup take back."""
    await make(site)
    given = (
        "create role dashboards",
        f"grant all on comparison to {login_of(MONITOR)}",
        "grant select, trigger on comparison to dashboards",
    )
    await site.run(site.as_superuser(), *given, "select 1")
    await upgrade(site.dsn, progress=lambda _: None)
    await apply(site.dsn)
    owners = "select distinct pg_get_userbyid(relowner) from pg_class where relname like 'comparison%' and relkind in ('r', 'p')"
    assert [row[0] for row in await site.run(site.dsn, owners)] == [PARTITIONS]
    before = await site.run(
        site.dsn, "select count(*) from pg_inherits where inhparent = 'comparison'::regclass"
    )
    await site.run(
        site.of(MONITOR), "select partition_make('2199-01-01')", "select partition_make('2199-01-02')"
    )
    await site.run(
        site.of(MONITOR), "select partition_drop('2199-01-01')", "select partition_drop('2199-01-02')"
    )
    assert (
        await site.run(site.dsn, "select count(*) from pg_inherits where inhparent = 'comparison'::regclass")
        == before
    )
    for statement in (
        PLANT,
        TRIGGER.replace("public.planted", "public.audit_refuse"),
        "create operator public.= (function = nameeqtext, leftarg = name, rightarg = text)",
        "create rule planted as on delete to comparison do also select 1",
        "create policy planted on comparison",
        "alter table comparison enable row level security",
        "alter table comparison alter column trace set default current_user",
        "drop table comparison",
        "truncate comparison",
        "create schema planted",
        f"set role {PARTITIONS}",
        f"set role {ERASURE}",
        "select comparison_erase('{}', '{}')",
    ):
        with pytest.raises((asyncpg.InsufficientPrivilegeError, asyncpg.InvalidObjectDefinitionError)):
            await site.run(site.of(MONITOR), statement)
    # A grant that one may not give is a warning.
    rights = (
        "select has_table_privilege('comparison', 'trigger, delete, insert, update, references, truncate')"
    )
    assert await site.run(site.of(MONITOR), "grant all on comparison to current_user", rights) == [(False,)]
    rights = "select has_table_privilege('dashboards', 'comparison', one) from unnest('{select, trigger}'::text[]) one"
    assert await site.run(site.dsn, rights) == [(True,), (False,)]
    await upgrade(site.dsn, progress=lambda _: None)
    await apply(site.dsn)
    assert await site.taken() == (False, 0)


PLANTED: Final = {
    "trigger": (PLANT, TRIGGER, "trigger planted on public.comparison, which runs public.planted()"),
    "trigger of a partition": (
        PLANT,
        TRIGGER.replace("on comparison", f"on comparison_{AT:%Y%m%d}"),
        f"trigger planted on public.comparison_{AT:%Y%m%d}, which runs public.planted()",
    ),
    "rule": (
        "create rule planted as on delete to comparison do also select 1",
        "rule planted on public.comparison",
    ),
    "policy": (
        "create policy planted on comparison using (true)",
        "policy planted on public.comparison",
    ),
    "default": (
        "create function public.planted() returns text language sql as $$ select 'x' $$",
        "alter table comparison alter column trace set default public.planted()",
        "default of public.comparison, which uses function public.planted()",
    ),
    "check": (
        "create function public.planted(text) returns boolean language sql as $$ select true $$",
        "alter table comparison add constraint planted check (public.planted(trace))",
        "constraint planted of public.comparison, which uses function public.planted(text)",
    ),
    "index": (
        "create function public.planted(text) returns text language sql immutable as $$ select 'x' $$",
        "create index planted on comparison (public.planted(trace))",
        "index public.planted of public.comparison, which uses function public.planted(text)",
    ),
    "function": (
        "create function public.concat_ws(text, text) returns text language sql as $$ select 'x' $$",
        "function public.concat_ws(text,text), which belongs to quantdrift_monitor_user",
    ),
    "operator": (
        "create operator public.= (function = texteqname, leftarg = text, rightarg = name)",
        "operator public.=(text,name), which belongs to quantdrift_monitor_user",
    ),
}


async def test_what_a_monitor_planted_is_named_before_the_owner_writes(site: Site) -> None:
    """`db upgrade` refuses and changes nothing, whatever it is; once it is removed, it goes on."""
    await make(site)
    for kind, (*statements, named) in PLANTED.items():
        await site.run(site.as_superuser(), *TOO_MUCH, "select 1")
        await site.run(site.of(MONITOR), TAKE, *statements, "select 1")
        await site.run(site.as_superuser(), *AS_BEFORE, "select 1")
        with pytest.raises(OperatorError) as raised:
            await upgrade(site.dsn, progress=lambda _: None)
        found = str(raised.value).partition("of this command: ")[2].partition(". Find out")[0].split("; ")
        assert named in found, kind
        assert await site.taken() == (False, 0)
        if kind in {"rule", "policy"}:
            await site.run(site.as_superuser(), f"drop {kind} planted on comparison", "select 1")
        await site.run(site.of(MONITOR), f"drop owned by {login_of(MONITOR)} cascade", "select 1")
    assert await upgrade(site.dsn, progress=lambda _: None) == []
    await apply(site.dsn)
    assert await site.taken() == (False, 0)


@pytest.mark.release
async def test_an_erasure_runs_as_a_role_without_other_rights(site: Site) -> None:
    """Even a trigger that nobody noticed gets nothing; `privacy` names it, as it names a user who gets at the table."""
    await upgrade(site.dsn, progress=lambda _: None)
    await apply(site.dsn, {MONITOR: "p", OPERATOR: "p"})
    exchange = str(uuid4())
    connection = await asyncpg.connect(site.dsn)
    await store_comparisons(
        connection, [Comparison(captured_at=AT, exchange_id=exchange, batch_id=1, model_version_id=1)]
    )
    await connection.execute(PLANT)
    await connection.execute(TRIGGER)
    await connection.execute("select comparison_erase($1, $2)", [AT], [exchange])
    assert await connection.fetchval("select count(*) from comparison") == 0
    assert await site.taken() == (False, 0)
    assert await connection.fetchval("select count(*) from audit") > 0
    async with Database(site.dsn) as database, database.begin() as opened:
        with pytest.raises(OperatorError, match=r"trigger planted on public\.comparison"):
            await refuse_unknown(opened)
    await connection.execute("drop function public.planted() cascade")
    for statement, undo, named in (
        (
            f"alter role {PARTITIONS} login",
            f"alter role {PARTITIONS} nologin",
            "as which somebody can log in",
        ),
        (
            f"grant {ERASURE} to {login_of(MONITOR)}",
            f"revoke {ERASURE} from {login_of(MONITOR)}",
            f"{login_of(MONITOR)} is a member of {ERASURE}",
        ),
        (
            f"alter table comparison owner to {MONITOR}",
            f"alter table comparison owner to {PARTITIONS}",
            f"table public.comparison belongs to {MONITOR}",
        ),
    ):
        await connection.execute(f"grant create on schema public to {MONITOR}")
        await connection.execute(statement)
        async with Database(site.dsn) as database, database.begin() as opened:
            assert [named in one for one in await unknown_objects(opened)] == [True]
        await connection.execute(undo)
    await connection.close()
