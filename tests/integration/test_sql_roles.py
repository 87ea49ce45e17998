"""SQL roles: each can do its work and nothing else."""

import asyncio
import re
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import asyncpg
import click
import pytest
from sqlalchemy import text

from quantdrift.cli.main import main
from quantdrift.core.clock import SystemClock
from quantdrift.core.config.schema import Storage
from quantdrift.core.errors import OperatorError, QuarantineReason
from quantdrift.core.records import Loss, Predicate, StratumCount, Tally
from quantdrift.core.slices import everything, slice_of
from quantdrift.monitor.fold.fold import Fold
from quantdrift.storage.account.expiries import count_expired
from quantdrift.storage.admin.migrate import upgrade
from quantdrift.storage.admin.retention import maintain
from quantdrift.storage.comparisons.rows import (
    ComparedExchange,
    ComparedItem,
    ConfigWarningRow,
    Quarantined,
    StoreBatch,
    VersionKey,
)
from quantdrift.storage.comparisons.writer import Writer
from quantdrift.storage.database import Database
from quantdrift.storage.fold.read import claim, load_catalog, resume
from quantdrift.storage.fold.write import write
from quantdrift.storage.leader import Leadership
from quantdrift.storage.schema.revision import check_schema
from quantdrift.storage.schema.roles import (
    MONITOR,
    OPERATOR,
    READER,
    REPORT,
    ROLES,
    SHADOW,
    apply,
    login_of,
    statements,
)
from quantdrift.storage.schema.tables import Base
from quantdrift.storage.slices.discovery import StoredRow, store
from tests.integration.test_blocks import batch as numbered
from tests.support.commands import invoked
from tests.support.monitor.fold_stream import CONFIG as WATCH
from tests.support.monitor.fold_stream import batches, store_batch, store_catalog
from tests.support.shadow.onnx_models import exchange_of, inputs_of
from tests.support.storage.databases import Databases
from tests.support.storage.discovered_traffic import discovery
from tests.support.storage.logins import login_in

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
Login = Callable[[str], Awaitable[str]]
AT = datetime.now(UTC)
VERSION = VersionKey(model="digits", candidate_version="1", reference_digest="d" * 64)
ITEM = ComparedItem(
    slices=(everything("digits"),),
    features={},
    flip=True,
    topk=True,
    js=0.1,
    divergence=0.1,
    margin=0.1,
    candidate_margin=0.5,
    reference_margin=0.6,
    detail=None,
)
TALLY = Tally(
    source="pod",
    boot="f" * 32,
    sequence=1,
    at=AT,
    strata=(
        StratumCount(stratum="default", offered=9, taken=5, thinned=1, published=3, lost={Loss.DECODE: 1}),
    ),
    blind_connections=0,
)


@pytest.fixture
async def postgres_dsn(databases: Databases) -> AsyncIterator[str]:
    """Return the address of a database with the roles, as `quantdrift setup postgres` applies them; dropped after the test."""
    async with databases.copy(apply) as dsn:
        yield dsn


@pytest.fixture
def login(postgres_dsn: str) -> Login:
    """Return what makes a user in one of them and returns its address."""
    return partial(login_in, postgres_dsn)


def batch(sequence: int) -> StoreBatch:
    """Return a batch with a comparison and a quarantined message."""
    compared = ComparedExchange(
        stream_sequence=sequence,
        payload=b"wire",
        exchange=exchange_of(inputs_of(1), captured_at=AT),
        version=VERSION,
        items=(ITEM,),
    )
    bad = Quarantined(
        stream_sequence=sequence + 1, payload=b"secret", reason=QuarantineReason.DECODE, detail="no"
    )
    doubt = ConfigWarningRow(model="digits", reference_digest="d" * 64, option="", doubt="")
    return StoreBatch(worker="w", at=AT, compared=(compared,), quarantined=(bad,), doubts=(doubt,))


# Each command that reads or changes the database, with the role that it needs: as docs/how-to/rights.md says.
COMMANDS = (
    (READER, "slices list"),
    (READER, "slices show scanner=faint"),
    (READER, "slices clusters"),
    (READER, "baseline list"),
    (READER, "triage"),
    (READER, "compare --from 1 --to 2"),
    (READER, "plan --model digits --day-rate 1000"),
    (READER, "backtest --model digits"),
    (READER, "status"),
    (READER, "slices search --dry-run"),
    (READER, "audit list"),
    (READER, "audit verify"),
    (REPORT, "report --day --out report.html"),
    (OPERATOR, "report --day --out report.html"),
    (OPERATOR, "baseline accept --model digits"),
    (OPERATOR, "baseline freeze --model digits"),
    (OPERATOR, "baseline keep --model digits"),
    (OPERATOR, "baseline import offline.json --model digits --version 1"),
    (OPERATOR, "slices retire x-site=s1"),
    (OPERATOR, "slices restore x-site=s1"),
    (OPERATOR, "slices forget scanner=faint"),
    (MONITOR, "slices fit --model digits"),
    (MONITOR, "slices search"),
)
COMMANDS_FILE = """
[capture]
headers = ["x-scanner"]
[[slices]]
name = "scanner"
header = "x-scanner"
max_values = 4
[[models]]
name = "digits"
"""
# It may find nothing to do in a small record; it must not lack a right.
NOTHING_TO_DO = {
    "baseline accept --model digits": "nothing was stored",
    "baseline freeze --model digits": "no",
    "baseline keep --model digits": "has a baseline and is still watched",
    "slices fit --model digits": "has no `embedding`",
    "slices clusters": "",
    "compare --from 1 --to 2": "is compared yet",
    "status": "",
    "plan --model digits --day-rate 1000": "",
}


async def refused(dsn: str, *queries: str) -> None:
    """Assert that the server refuses each statement."""
    connection = await asyncpg.connect(dsn)
    for query in queries:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            async with connection.transaction():
                await connection.execute(query)
    await connection.close()


async def of_one_statement(dsn: str) -> bool:
    """Return whether the last batch was stored by one statement, which needs all rights that it may ever use."""
    connection = await asyncpg.connect(dsn)
    try:
        return bool(
            await connection.fetchval(
                "select bool_and(c.cmin = b.cmin) from comparison c join batch b on b.id = c.batch_id"
                " where b.id = (select max(id) from batch)"
            )
        )
    finally:
        await connection.close()


async def test_the_shadow_can_do_what_the_writer_does_and_no_more(postgres_dsn: str, login: Login) -> None:
    """It stores batches, twice as well, and tallies; it deletes no comparison and raises no alert."""
    dsn = await login(SHADOW)
    async with Database(dsn) as database:
        writer = Writer(database, SystemClock())
        one = batch(1)
        assert (await writer.store(one)).n_rows == 1
        assert (await Writer(database, SystemClock()).store(one)).n_rows == 0
        blocks = Writer(database, SystemClock(), as_blocks=True)
        stored = [(await blocks.store(numbered(first, 20))).n_rows for first in (1, 21, 21, 40)]
        assert stored == [20, 20, 0, 19]
        assert [(await writer.store(numbered(first, 3))).n_rows for first in (101, 104)] == [3, 3]
        assert await of_one_statement(postgres_dsn)
        assert (await writer.store_tallies("w", [TALLY])).n_rows == 1
        assert (await writer.store_tallies("w", [TALLY])).n_rows == 0
        await check_schema(database)
        await writer.store_shares()
    await refused(
        dsn,
        "delete from comparison",
        "delete from condensed_block",
        "select detail from condensed_block",
        "select blocks_merge(now(), 10)",
        "update comparison set flip = false",
        "delete from tally",
        "select payload from quarantine",
        "update batch set fold_seq = 1",
        "delete from doubt",
        "select * from alert",
        "drop table comparison",
        "create table mine (n int)",
    )


async def test_the_monitor_folds_and_maintains_and_touches_no_evidence(
    postgres_dsn: str, login: Login
) -> None:
    """It numbers batches, makes, condenses and drops days and forgets payloads; it stores tallies that no shadow does, and changes none."""
    dsn = await login(MONITOR)
    async with Database(postgres_dsn) as database:
        await Writer(database, SystemClock()).store(batch(1))
    async with Database(dsn) as database:
        for _ in range(2):
            await Writer(database, SystemClock()).store_tallies("monitor", [TALLY], [AT])
            await count_expired(database, "monitor", AT)
    # Partitions that a later upgrade makes, by another user, belong to the monitor as well.
    await upgrade(postgres_dsn, progress=lambda _: None, ahead_days=20)
    async with Database(dsn) as database:
        async with database.begin() as connection:
            position = (await resume(connection)).position
            await load_catalog(connection)
            assert len(await claim(connection, position.fold_seq, 10)) == 2
            await connection.execute(text("select blocks_merge(now(), 10)"))
        made = await maintain(database, Storage(), AT, ahead_days=30)
        assert len(made.partitions_made) == 10
        async with Database(postgres_dsn) as owners, owners.begin() as connection:
            await connection.execute(text("update fold set event_time = '2199-01-01'"))
        later = AT + timedelta(days=9)
        assert (
            await maintain(database, Storage(condense_after_days=3, quarantine_days=60), later)
        ).n_condensed == 1
        dropped = await maintain(database, Storage(), datetime(2199, 1, 1, tzinfo=UTC))
        assert (len(dropped.partitions_dropped), dropped.partitions_busy) == (32, ())
        assert dropped.n_blocks == 1
        assert (dropped.n_batches, dropped.n_payloads, dropped.n_quarantined) == (2, 1, 1)
    await refused(
        dsn,
        "select payload from quarantine",
        "update quarantine set payload = 'x'",
        "update tally set taken = 0",
        "update policy set definition = '{}'",
        "update model_version set model = 'x'",
        "drop table alert",
    )


async def test_a_reader_sees_everything_but_payloads_and_changes_nothing(login: Login) -> None:
    """A data scientist reads every table and view, not production traffic, and writes nowhere."""
    dsn = await login(READER)
    connection = await asyncpg.connect(dsn)
    for name in {
        *Base.metadata.tables,
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
    } - {
        "quarantine",
        "embedding",
    }:
        await connection.execute(f"select * from {name}")
        assert not await connection.fetchval(
            "select has_table_privilege($1, 'insert, update, delete, truncate')", name
        )
    await connection.execute("select * from not_observed_in('7 days')")
    await connection.execute("select id, reason, detail from quarantine")
    await connection.execute("select exchange_id, space from embedding")
    await connection.close()
    await refused(
        dsn,
        "select payload from quarantine",
        "select vector from embedding",
        "delete from quarantine",
        "insert into report_run (kind) values ('week')",
        "create table mine (n int)",
    )


async def test_a_report_reads_and_notes_that_it_was_written(login: Login) -> None:
    """The report's role adds its own run, and nothing else."""
    dsn = await login(REPORT)
    connection = await asyncpg.connect(dsn)
    await connection.execute(
        "insert into report_run (kind, from_at, to_at, path, figures) values ('week', now(), now(), 'x', '{}')"
    )
    await connection.execute("select * from slice_now")
    await connection.close()
    await refused(dsn, "delete from report_run", "delete from alert")


async def test_roles_can_be_applied_again(postgres_dsn: str, login: Login) -> None:
    """Rights beyond the documented ones are revoked."""
    dsn = await login(READER)
    connection = await asyncpg.connect(postgres_dsn)
    await connection.execute(f"grant delete on alert to {READER}")
    await connection.close()
    await apply(postgres_dsn)
    await refused(dsn, "delete from alert")


async def test_an_ordinary_user_cannot_make_roles(login: Login) -> None:
    """Whoever may not make roles is told so."""
    with pytest.raises(OperatorError, match="permission denied"):
        await apply(await login(READER))


def test_the_statements_can_be_printed() -> None:
    """Each is one statement without its semicolon, and none makes a user that can log in."""
    assert all(not statement.rstrip().endswith(";") for statement in statements())
    assert not any(" login" in statement.replace("nologin", "") for statement in statements())


async def test_each_command_works_with_its_role_alone(
    database: Database, record: asyncpg.Connection, login: Login, tmp_path: Path
) -> None:
    """Every command of people that opens the database runs as the role that the manual names, and is not refused."""
    await store_catalog(record, days=3)
    for rows in batches(60):
        await store_batch(record, rows)
    async with database.begin() as connection:
        fold = Fold(WATCH, await resume(connection))
        rows_claimed = await claim(connection, 0, 1000)
        fold.learn(await load_catalog(connection))
        for rows in rows_claimed:
            fold.batch(rows)
        await write(connection, fold.take(), "")
        site = slice_of("digits", [Predicate(key="header.x-site", equals="s1")])
        found = discovery(id=0, predicate=site.predicate, name=site.name, where=site.where)
        await store(connection, StoredRow(row=found, reason="found"), made_by="monitor")
    await record.execute(
        "insert into value_share (model, source, places, counted_at, total, error, counts, reserved)"
        " values ('digits', 'header.x-scanner', 4, now(), 0, 0, '[]', '{}')"
    )
    (tmp_path / "config.toml").write_text(COMMANDS_FILE)
    (tmp_path / "offline.json").write_text(
        '[{"slice": "scanner=faint", "metric": "flip", "upper": 0.08, "n": 4000}]'
    )
    for role, command in COMMANDS:
        dsn = await login(role)
        done = await asyncio.to_thread(
            invoked, *command.split(), directory=tmp_path, QUANTDRIFT_DSN=dsn, COLUMNS="200"
        )
        said = f"{role}: quantdrift {command}: {done.stdout}{done.stderr}"
        assert "permission denied" not in said, said
        assert "42501" not in said, said
        if command in NOTHING_TO_DO:
            assert NOTHING_TO_DO[command] in said, said
        else:
            assert done.returncode == 0, said
    decided = await record.fetch("select source, fold_seq from baseline where source = 'imported'")
    assert [tuple(row) for row in decided] == [("imported", None)]
    assert await record.fetchval("select status from discovery") == "expired"
    assert await record.fetchval("select lapsed_at is not null from slice where name = 'scanner=faint'")
    assert await record.fetchval("select count(*) from report_run") == 2


def test_the_manual_names_a_role_for_every_command_with_a_database() -> None:
    """Each command with `--data` has a row in the table, with the role that the tests use."""
    table = (ROOT / "docs" / "how-to" / "rights.md").read_text()
    roles = {
        name: role
        for line in table.splitlines()
        if (match := re.fullmatch(r"\| `(quantdrift_\w+)` \| [^|]* \| ([^|]*) \| .*", line))
        for role in [match[1]]
        for name in re.findall(r"`([a-z -]+)`", match[2])
    }

    def commands(group: click.Group, words: tuple[str, ...] = ()) -> Iterator[str]:
        for name, command in group.commands.items():
            if isinstance(command, click.Group):
                yield from commands(command, (*words, name))
            elif not command.hidden and any(option.name == "data" for option in command.params):
                yield " ".join((*words, name))

    by_owner = {"db upgrade", "setup postgres", "up", "privacy find", "privacy erase"}
    of_nats = {"policy show", "pause", "resume", "exemplars list", "exemplars show", "exemplars erase"}
    known = set(commands(main)) - by_owner - of_nats
    assert known <= roles.keys(), known - roles.keys()
    for role, command in COMMANDS:
        words = command.split()
        name = next(" ".join(words[:n]) for n in (2, 1) if " ".join(words[:n]) in roles)
        if "--dry-run" not in words and (role, name) != (OPERATOR, "report"):
            assert roles[name] == role, command


async def test_an_operator_decides_and_changes_no_evidence(login: Login) -> None:
    """Neither comparisons nor what the monitor made of them, no payload, and no lead."""
    await refused(
        await login(OPERATOR),
        "delete from comparison",
        "update comparison set flip = false",
        "delete from tally",
        "insert into verdict (model_version_id) values (1)",
        "update verdict set verdict = 'ok'",
        "update alert set resolved_at = now()",
        "delete from alert",
        "delete from outbox",
        "update detector set state = ''",
        "delete from noise_floor",
        "select payload from quarantine",
        "delete from quarantine",
        "select vector from embedding",
        "update baseline set content = null",
        "delete from baseline",
        "insert into baseline (model_version_id, slice_id, metric, kind, source, made_by, reason, n_groups, fold_seq)"
        " values (1, 1, 'flip', 'budget', 'imported', 'x', '', 1, 1)",
        "update discovery set log_evidence = 0",
        "delete from discovery_change",
        "delete from slice_change",
        "insert into slice (model, predicate, name, definition) values ('m', 'p', 'n', '{}')",
        "update slice set name = 'x'",
        "update policy set definition = '{}'",
        "update leader set term = 9",
        "lock table leader_lock in exclusive mode",
        "delete from report_run",
        "update alembic_version set version_num = '0001'",
        "create table mine (n int)",
        "drop table alert",
    )


async def test_one_command_makes_a_user_for_each_role(
    postgres_dsn: str, record: asyncpg.Connection, tmp_path: Path
) -> None:
    """It writes complete addresses that only the owner reads, changes nothing the second time, and rotates one password."""
    (tmp_path / "config.toml").write_text('[[models]]\nname = "digits"\n')

    async def setup(*more: str) -> subprocess.CompletedProcess[str]:
        words = ("setup", "postgres", "--apply", "--users", "users", *more)
        return await asyncio.to_thread(invoked, *words, directory=tmp_path, QUANTDRIFT_DSN=postgres_dsn)

    def addresses() -> dict[str, str]:
        return {path.name: path.read_text().strip() for path in (tmp_path / "users").iterdir()}

    try:
        done = await setup()
        assert done.returncode == 0, done.stderr
        first = addresses()
        assert first.keys() == {
            f"{name}.dsn" for name in ("shadow", "monitor", "report", "operator", "page", "reader")
        }
        assert {path.stat().st_mode & 0o777 for path in (tmp_path / "users").iterdir()} == {0o600}
        assert not any(dsn.split(":")[2].split("@")[0] in done.stdout + done.stderr for dsn in first.values())
        stored = await record.fetch("select rolpassword from pg_authid where rolname like 'quantdrift%_user'")
        assert {row["rolpassword"][:14] for row in stored} == {"SCRAM-SHA-256$"}
        await refused(first["shadow.dsn"], "select payload from quarantine")
        await refused(first["operator.dsn"], "delete from comparison")
        async with Leadership(first["monitor.dsn"]) as leadership:
            assert await leadership.acquire()

        done = await setup()
        assert (done.returncode, addresses()) == (0, first), done.stderr
        done = await setup("--rotate", "shadow")
        assert done.returncode == 0, done.stderr
        second = addresses()
        assert {name for name in first if first[name] != second[name]} == {"shadow.dsn"}
        with pytest.raises(asyncpg.InvalidPasswordError):
            await asyncpg.connect(first["shadow.dsn"])
        await refused(second["shadow.dsn"], "select payload from quarantine")

        # People cannot use up the connections of the server.
        taken = [await asyncpg.connect(first["reader.dsn"]) for _ in range(10)]
        with pytest.raises(asyncpg.TooManyConnectionsError):
            await asyncpg.connect(first["reader.dsn"])
        assert await taken[0].fetchval("show statement_timeout") == "10min"
        for connection in taken:
            await connection.close()

        (tmp_path / "users" / "reader.dsn").unlink()
        done = await setup()
        assert (done.returncode, "--rotate reader" in done.stderr) == (2, True), done.stderr
        done = await setup("--rotate", "nobody")
        assert (done.returncode, "roles: shadow, monitor" in done.stderr) == (2, True), done.stderr
    finally:
        for role in ROLES:
            await record.execute(f"drop role if exists {login_of(role)}")


async def test_roles_that_are_so_already_make_no_entry(postgres_dsn: str) -> None:
    """Each start of `quantdrift up` applies them; an entry says that somebody changed something."""

    async def n_entries() -> int:
        async with Database(postgres_dsn) as database, database.begin() as connection:
            found = await connection.scalar(
                text("select count(*) from audit where action = 'setup postgres'")
            )
        return int(found or 0)

    before = await n_entries()
    await apply(postgres_dsn, {SHADOW: "a"}, is_start=True)
    first = await n_entries()
    for password in ("b", "c"):
        await apply(postgres_dsn, {SHADOW: password}, is_start=True)
    await apply(postgres_dsn)
    assert await n_entries() == first <= before + 1
    await apply(postgres_dsn, {SHADOW: "d"})
    assert await n_entries() == first + 1
    connection = await asyncpg.connect(postgres_dsn)
    await connection.execute(f"grant update on comparison to {READER}")
    await connection.close()
    await apply(postgres_dsn)
    assert await n_entries() == first + 2
