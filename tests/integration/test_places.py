"""Values that clients choose get places by their share, with a real Postgres: the database decides for all workers."""

import asyncio
import json
import subprocess
from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from quantdrift.core.clock import SystemClock
from quantdrift.core.config.schema import Capture, Config, Slice
from quantdrift.core.process.run import Stop
from quantdrift.core.slices import SliceAssigner, ValueRules
from quantdrift.monitor.service import PlaceKeeper
from quantdrift.storage.comparisons.rows import (
    ComparedExchange,
    ComparedItem,
    StoreBatch,
    Unreferenced,
    VersionKey,
)
from quantdrift.storage.comparisons.writer import Writer
from quantdrift.storage.database import Database
from quantdrift.storage.fold.read import claim, resume
from quantdrift.storage.locks import try_lock
from quantdrift.storage.schema.partitions import ensure_partitions
from quantdrift.storage.schema.roles import MONITOR, OPERATOR, READER, SHADOW
from quantdrift.storage.slices.discovery import take_turn
from tests.support.commands import invoked
from tests.support.shadow.onnx_models import exchange_of, inputs_of
from tests.support.storage.logins import login_in

pytestmark = pytest.mark.integration

CONFIG = Config(
    capture=Capture(headers=("x-scanner",)),
    slices=(Slice(name="scanner", header="x-scanner", max_values=4),),
)
ASSIGNER = SliceAssigner(CONFIG, "digits")
DIGEST = "d" * 64


def compared(scanner: str, version: str = "int8") -> ComparedExchange:
    """Return an exchange with this value of the header."""
    attributes = {"header.x-scanner": scanner}
    item = ComparedItem(
        slices=tuple(ASSIGNER.assign(attributes, {})),
        features={},
        flip=False,
        topk=False,
        js=0.0,
        divergence=0.0,
        margin=0.0,
        candidate_margin=0.5,
        reference_margin=0.5,
        detail=None,
    )
    return ComparedExchange(
        stream_sequence=1,
        payload=b"",
        exchange=exchange_of(inputs_of(1), attributes=attributes, version=version),
        version=VersionKey(model="digits", candidate_version=version, reference_digest=DIGEST),
        items=(item,),
    )


def batch(scanners: Iterable[str], **parts: Any) -> StoreBatch:
    """Return a batch of exchanges with these values."""
    exchanges = tuple(compared(scanner) for scanner in scanners)
    return StoreBatch(
        worker="w", at=datetime.now(UTC), **({"compared": exchanges, "references": {DIGEST: "{}"}} | parts)
    )


def a_writer(database: Database) -> Writer:
    """Return the writer of one shadow worker."""
    return Writer(database, SystemClock(), ValueRules(CONFIG))


def keeper(database: Database) -> PlaceKeeper:
    """Return the turn of the leading monitor."""
    return PlaceKeeper(database=database, clock=SystemClock(), stop=Stop(), leads=lambda: True, wait_s=0.0)


async def with_place(record: asyncpg.Connection) -> list[str]:
    """Return the values that have a place."""
    rows = await record.fetch(
        "select name from slice where name like 'scanner=%' and name <> 'scanner=(other)' and lapsed_at is null order by 1"
    )
    return [row["name"].partition("=")[2] for row in rows]


async def items_of(record: asyncpg.Connection) -> Mapping[str, int]:
    """Return how many items each slice of the header has."""
    rows = await record.fetch(
        "select s.name, count(*) as n from comparison c join slice s on s.id = any(c.slice_ids)"
        " where s.name <> 'all' group by 1"
    )
    return {row["name"].partition("=")[2]: row["n"] for row in rows}


async def test_invented_values_that_come_first_lose_their_places_to_real_ones(
    database: Database, record: asyncpg.Connection
) -> None:
    """40 of them take every place; with the next decision the real values have slices, and keep them in a flood."""
    writer = a_writer(database)
    await writer.store(batch(f"invented-{number}" for number in range(40)))
    assert len(await with_place(record)) == 4
    real = ["archive", "faint", "office"]
    written = await writer.store(batch(real * 20))
    assert written.n_other == {"digits": 60}
    await writer.store_shares()
    await keeper(database).settle()
    assert set(real) <= set(await with_place(record))
    written = await writer.store(batch([*real, *(f"flood-{number}" for number in range(50))]))
    assert written.n_other == {"digits": 50}
    await writer.store_shares()
    await keeper(database).settle()
    assert set(real) <= set(await with_place(record))
    changes = await record.fetch("select status, made_by, reason from slice_change order by id")
    assert [row["status"] for row in changes] == ["lapsed"] * 3 + ["admitted"] * 3
    assert {row["made_by"] for row in changes} == {"monitor"}
    assert "of the recent traffic" in changes[0]["reason"]


async def test_workers_share_the_places(database: Database, record: asyncpg.Connection) -> None:
    """Eight workers store other values at the same time: no place is given twice, and no item is lost."""
    writers = [a_writer(database) for _ in range(8)]
    await asyncio.gather(
        *(writer.store(batch([f"w{number}-a", f"w{number}-b"])) for number, writer in enumerate(writers))
    )
    assert len(await with_place(record)) == 4
    items = dict(await items_of(record))
    assert items.pop("(other)") == 12
    assert sorted(items) == await with_place(record)


async def test_a_value_with_an_open_alert_keeps_its_place(
    database: Database, record: asyncpg.Connection
) -> None:
    """Drift is not hidden by sending more of something else."""
    writer = a_writer(database)
    await writer.store(batch(["a", "b", "c", "d"]))
    await record.execute(
        "insert into alert (model_version_id, slice_id, severity, metric, onset_at, opened_at, details)"
        " select 1, id, 'firing', 'flip', now(), now(), '{}' from slice where name = 'scanner=a'"
    )
    await writer.store(batch(["e", "f", "g", "h", "i"] * 20))
    await writer.store_shares()
    await keeper(database).settle()
    assert "a" in await with_place(record)
    assert len(await with_place(record)) == 4


async def test_the_fold_is_told_once_and_remembers(database: Database, record: asyncpg.Connection) -> None:
    """A value that loses its place is a change of the next batch, and part of the state of a monitor that begins."""
    writer = a_writer(database)
    await writer.store(batch(["a", "b", "c", "d"]))
    async with database.begin() as connection:
        position = (await resume(connection)).position
        await claim(connection, position.fold_seq, 10)
    lapsed = await record.fetchval("select id from slice where name = 'scanner=a'")
    await record.execute("update slice set lapsed_at = now() where id = $1", lapsed)
    await record.execute(
        "insert into slice_change (slice_id, status, made_by, reason) values ($1, 'lapsed', 'anna', 'a test')",
        lapsed,
    )
    await writer.store(batch(["b", "a"]))
    await record.execute("update fold set fold_seq = 1")
    async with database.begin() as connection:
        (rows,) = await claim(connection, 1, 10)
        changes = [(change.slice_id, change.lapsed, change.watched) for change in rows.slices]
        assert changes == [(lapsed, True, False), (lapsed, False, True)], (
            "its place was free, so it came back"
        )
        assert (await resume(connection)).lapsed == ()
    await record.execute(
        "insert into slice_change (slice_id, status, made_by, reason, fold_seq) values ($1, 'lapsed', 'anna', 'x', 2)",
        lapsed,
    )
    async with database.begin() as connection:
        assert (await resume(connection)).lapsed == (lapsed,)


async def test_invented_versions_make_a_bounded_number_of_rows_and_displace_no_real_one(
    database: Database, record: asyncpg.Connection
) -> None:
    """With and without a reference; the version that serves the traffic gets its place at the next decision."""
    writer = a_writer(database)
    invented = tuple(
        Unreferenced(
            version=VersionKey(model="digits", candidate_version=f"v{number}", reference_digest=""),
            captured_at=datetime.now(UTC),
        )
        for number in range(100)
    )
    await writer.store(batch((), unreferenced=invented))
    assert await record.fetchval("select count(*) from model_version") == 33, "32 and `(other)`"
    real = tuple(compared("a", "int8-2026-11") for _ in range(200))
    await writer.store(batch((), compared=real))
    await writer.store_shares()
    await keeper(database).settle()
    await writer.store(batch((), compared=(compared("a", "int8-2026-11"),)))
    versions = await record.fetch(
        "select m.candidate_version, count(*) as n from comparison c join model_version m on m.id = c.model_version_id group by 1"
    )
    assert {row["candidate_version"]: row["n"] for row in versions} == {"(other)": 200, "int8-2026-11": 1}
    assert (
        await record.fetchval(
            "select count(distinct candidate_version) from model_version where lapsed_at is null"
        )
        <= 33
    )


async def test_the_sketch_in_the_database_is_bounded(database: Database, record: asyncpg.Connection) -> None:
    """Four counters for each place, whatever clients send."""
    writer = a_writer(database)
    for begin in range(0, 600, 200):
        await writer.store(batch(f"v{number}" for number in range(begin, begin + 200)))
        await writer.store_shares()
    row = await record.fetchrow(
        "select jsonb_array_length(counts) as n, total, error from value_share where source = 'header.x-scanner'"
    )
    assert row["n"] <= 16
    assert row["error"] <= row["total"] / 17 * 1.0001
    assert row["total"] == pytest.approx(1200, rel=0.01), "each was sampled with a probability of 1/2"


async def test_a_person_forgets_a_value(
    database: Database, record: asyncpg.Connection, postgres_dsn: str, tmp_path: Path
) -> None:
    """Its place is free at once, with who and why on record; what is not made of a value cannot be forgotten."""
    (tmp_path / "config.toml").write_text(
        '[capture]\nheaders = ["x-scanner"]\n[[slices]]\nname = "scanner"\nheader = "x-scanner"\nmax_values = 4\n'
        '[[models]]\nname = "digits"\n'
    )
    await a_writer(database).store(batch(["a", "b", "c", "d", "e"]))

    def quantdrift(*arguments: str) -> subprocess.CompletedProcess[str]:
        return invoked("slices", *arguments, directory=tmp_path, QUANTDRIFT_DSN=postgres_dsn)

    done = await asyncio.to_thread(quantdrift, "forget", "scanner=a", "--reason", "a load test", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["name"], result["status"], result["reason"]) == ("scanner=a", "lapsed", "a load test")
    assert await with_place(record) == ["b", "c", "d"]
    shown = await asyncio.to_thread(quantdrift, "show", "scanner=a")
    assert "lapsed by quantdrift: a load test" in shown.stdout
    listed = await asyncio.to_thread(quantdrift, "list")
    assert "scanner=a" not in listed.stdout
    assert "1 more are expired, retired or lapsed" in listed.stdout
    for which, message in (
        ("scanner=a", "has no place already"),
        ("all", "is not made of a value"),
        ("scanner=(other)", "is not made of a value"),
    ):
        refused = await asyncio.to_thread(quantdrift, "forget", which)
        assert refused.returncode != 0
        assert message in refused.stderr


async def _hold_everything(reader: asyncpg.Connection) -> None:
    """Take every lock that a reader may take, and keep it."""
    await reader.execute("begin")
    for what in ("header.x-scanner", "version"):
        await reader.execute("select pg_advisory_lock($1, hashtext($2))", 0x71706C63, f"digits\n{what}")
    tables = "comparison, value_share, discovery, arrival, expiry, slice, model_version"
    await reader.execute(f"lock table {tables} in access share mode")


async def test_a_reader_who_holds_all_locks_that_it_can_keeps_nobody_waiting(postgres_dsn: str) -> None:
    """Partitions are made, slices change, new values get their places, and what expires is counted."""
    users = [await login_in(postgres_dsn, role) for role in (READER, MONITOR, SHADOW, OPERATOR)]
    reader = await asyncpg.connect(users[0])
    await _hold_everything(reader)
    async with (
        asyncio.timeout(20),
        Database(users[1]) as monitor,
        Database(users[2]) as shadow,
        Database(users[3]) as operator,
    ):
        async with monitor.begin() as connection:
            assert await ensure_partitions(connection, date(2031, 1, 1), date(2031, 1, 1)) == [
                date(2031, 1, 1)
            ]
        for database in (monitor, operator):
            async with database.begin() as connection:
                await take_turn(connection)
        written = await a_writer(shadow).store(batch(["a", "b"]))
        assert written.n_rows == 2
        for database in (monitor, shadow):
            async with database.begin() as connection:
                assert await try_lock(connection, "arrival")
    for attack in (
        *(
            f"lock table {name} in share update exclusive mode"
            for name in ("partition_lock", "arrival", "discovery_lock")
        ),
        "lock table discovery_lock in access share mode",
        "select from value_share for key share",
    ):
        await reader.execute("rollback")
        await reader.execute("begin")
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await reader.execute(attack)
    await reader.close()


async def test_one_process_counts_what_expires_at_a_time(postgres_dsn: str) -> None:
    """The other one finds nothing to do."""
    monitor, shadow = [await login_in(postgres_dsn, role) for role in (MONITOR, SHADOW)]
    async with (
        Database(monitor) as first,
        Database(shadow) as second,
        first.begin() as connection,
        second.begin() as other,
    ):
        assert await try_lock(connection, "arrival")
        assert not await try_lock(other, "arrival")
