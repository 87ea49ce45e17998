"""SQL roles: each can do its work and nothing else."""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

import asyncpg
import pytest

from quantdrift.core.clock import SystemClock
from quantdrift.core.config.schema import Storage
from quantdrift.core.errors import OperatorError, QuarantineReason
from quantdrift.core.records import Loss, StratumCount, Tally
from quantdrift.core.slices import everything
from quantdrift.storage.admin.migrate import upgrade
from quantdrift.storage.admin.retention import maintain
from quantdrift.storage.database import Database
from quantdrift.storage.monitor.read import claim, load_catalog, resume
from quantdrift.storage.schema.revision import check_schema
from quantdrift.storage.schema.roles import MONITOR, READER, REPORT, SHADOW, apply, statements
from quantdrift.storage.schema.tables import Base
from quantdrift.storage.shadow.expiries import count_expired
from quantdrift.storage.shadow.rows import (
    ComparedExchange,
    ComparedItem,
    ConfigWarningRow,
    Quarantined,
    StoreBatch,
    VersionKey,
)
from quantdrift.storage.shadow.writer import Writer
from tests.support.shadow.onnx_models import exchange_of, inputs_of

pytestmark = pytest.mark.integration

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
async def login(postgres_dsn: str) -> Login:
    """Apply the roles; return what makes a user in one of them and returns its address."""
    await apply(postgres_dsn)

    async def user_in(role: str) -> str:
        place, _, name = postgres_dsn.rpartition("/")
        user = f"{role}_{name}"
        connection = await asyncpg.connect(postgres_dsn)
        await connection.execute(f"create user {user} password 'p' in role {role}")
        await connection.close()
        return f"postgresql://{user}:p@{place.rpartition('@')[2]}/{name}"

    return user_in


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


async def refused(dsn: str, *queries: str) -> None:
    """Assert that the server refuses each statement."""
    connection = await asyncpg.connect(dsn)
    for query in queries:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await connection.execute(query)
    await connection.close()


async def test_the_shadow_can_do_what_the_writer_does_and_no_more(login: Login) -> None:
    """It stores batches, twice as well, and tallies; it deletes no comparison and raises no alert."""
    dsn = await login(SHADOW)
    async with Database(dsn) as database:
        writer = Writer(database, SystemClock())
        one = batch(1)
        assert (await writer.store(one)).n_rows == 1
        assert (await Writer(database, SystemClock()).store(one)).n_rows == 0
        assert (await writer.store_tallies("w", [TALLY])).n_rows == 1
        assert (await writer.store_tallies("w", [TALLY])).n_rows == 0
        await check_schema(database)
        await writer.store_shares()
    await refused(
        dsn,
        "delete from comparison",
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
    """It numbers batches, makes and drops partitions and forgets payloads; it stores tallies that no shadow does, and changes none."""
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
        made = await maintain(database, Storage(), AT, ahead_days=30)
        assert len(made.partitions_made) == 10
        dropped = await maintain(database, Storage(), datetime(2199, 1, 1, tzinfo=UTC))
        assert (len(dropped.partitions_dropped), dropped.partitions_busy) == (32, ())
        assert (dropped.n_batches, dropped.n_quarantined) == (2, 1)
    await refused(
        dsn,
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
        "slice_history",
        "slice_item",
        "coverage_hour",
        "account",
    } - {
        "quarantine",
        "embedding",
    }:
        await connection.execute(f"select * from {name}")
        assert not await connection.fetchval(
            "select has_table_privilege($1, 'insert, update, delete, truncate')", name
        )
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
