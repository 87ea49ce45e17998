"""What the fold reads from the database: one monitor at a time, and tallies counted correctly."""

import asyncio
from datetime import datetime, timedelta

import asyncpg
import msgspec
import pytest
from sqlalchemy import text

from quantdrift.core.errors import RetryError
from quantdrift.monitor.fold.fold import Fold
from quantdrift.storage.database import Database
from quantdrift.storage.fold.read import claim, load_catalog, resume, unfolded
from quantdrift.storage.fold.write import write
from quantdrift.storage.fold_rows import BatchRows, Catalog, TallyRow, from_us
from tests.support.monitor.fold_stream import (
    BEGIN,
    BEGIN_US,
    CATALOG,
    CONFIG,
    SECOND_US,
    batches,
    store_batch,
    store_catalog,
)

pytestmark = pytest.mark.integration
HOUR_US = 3600 * SECOND_US
DAY_US = 24 * HOUR_US


@pytest.fixture
async def record(record: asyncpg.Connection) -> asyncpg.Connection:
    """Return a connection to a fresh record."""
    await store_catalog(record, days=40)
    return record


async def _fold(database: Database, most: int = 1000) -> Fold:
    """Fold from the record as a monitor that has just started."""
    async with database.begin() as connection:
        fold = Fold(CONFIG, await resume(connection))
        found = await claim(connection, fold.position.fold_seq, most)
        fold.learn(await load_catalog(connection))
        for rows in found:
            fold.batch(rows)
        await write(connection, fold.take(), "")
    return fold


def _tally(sequence: int, at_us: int, *, stored_us: int, lost: int = 0, boot: str = "b") -> BatchRows:
    row = TallyRow(
        source="pod",
        boot=boot * 32,
        stratum="faint",
        sequence=sequence,
        at_us=at_us,
        offered=1000 * sequence,
        taken=100 * sequence,
        lost=lost,
    )
    return BatchRows(fold_seq=0, stored_us=stored_us, compares=False, tallies=(row,))


async def test_stored_batches_wait_until_they_are_folded(
    database: Database, record: asyncpg.Connection
) -> None:
    """Their number, and when the oldest was stored: what says that a monitor does not keep up."""
    stored = batches(3)
    for rows in stored:
        await store_batch(record, rows)

    async def waiting() -> dict[str, tuple[int, datetime]]:
        async with database.begin() as connection:
            return await unfolded(connection)

    assert await waiting() == {"": (3, from_us(stored[0].stored_us))}
    await _fold(database, most=2)
    assert await waiting() == {"": (1, from_us(stored[2].stored_us))}
    await _fold(database)
    assert await waiting() == {}


async def test_policies_are_read_once_and_only_where_they_are_wanted(
    database: Database, record: asyncpg.Connection
) -> None:
    """Hundreds of policies a day: a fold reads those of its batches, keeps what it knows, and no more than a bound."""
    await record.execute(
        "insert into policy (id, epoch, definition) overriding system value select n, 'e' || n, p.definition"
        " from generate_series(2, 40) n, (select definition from policy where epoch = 'e1') p"
    )
    async with database.begin() as connection:
        everything = await load_catalog(connection)
        few = await load_catalog(connection, wanted={1, 7})
        assert (len(everything.policies), sorted(few.policies)) == (40, [1, 7])
        await connection.execute(text("update policy set definition = '{}' where id = 7"))
        more = await load_catalog(connection, wanted={7, 9, 1000}, known=few)
        assert sorted(more.policies) == [1, 7, 9]


async def test_versions_and_slices_are_read_again_only_where_some_came_or_went(
    database: Database, record: asyncpg.Connection
) -> None:
    """A turn of the fold asks twice a second; also as many as before may be others, and of other models."""
    model = next(iter(CATALOG.versions.values())).model

    async def load(known: Catalog, *models: str) -> Catalog:
        async with database.begin() as connection:
            return await load_catalog(connection, wanted=(), known=known, models=models)

    first = await load(Catalog(versions={}, slices={}, policies={}), model)
    assert first.versions
    assert await load(first, model) is first
    add = """
        insert into slice (id, model, predicate, name, definition) overriding system value
        values ($1::integer, $2, 'p' || $1, 's' || $1, '{"where": []}')
    """
    await record.execute(add, 101, model)
    second = await load(first, model)
    assert second.slices.keys() == first.slices.keys() | {101}
    await record.execute("delete from slice where id = 101")
    await record.execute(add, 102, model)
    third = await load(second, model)
    assert third.slices.keys() == first.slices.keys() | {102}
    assert (await load(third, "other")).slices.keys().isdisjoint(third.slices)


async def test_two_monitors_at_the_very_first_fold_do_not_both_fold(
    database: Database, record: asyncpg.Connection
) -> None:
    """The first waits for the row that the second holds, and then finds that the record has moved on."""
    for rows in batches(30):
        await store_batch(record, rows)

    async def late() -> None:
        async with database.begin() as connection:
            await claim(connection, 0, 10)

    async with database.begin() as connection:
        fold = Fold(CONFIG, await resume(connection))
        found = await claim(connection, 0, 10)
        other = asyncio.create_task(late())
        waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock'"
        while not await record.fetchval(waiting):
            await asyncio.sleep(0.01)
        fold.learn(await load_catalog(connection))
        for rows in found:
            fold.batch(rows)
        await write(connection, fold.take(), "")
    with pytest.raises(RetryError, match="another monitor leads"):
        await other
    assert await record.fetchval("select count(fold_seq) from batch") == 10
    assert await record.fetchval("select fold_seq from fold") == 10


async def test_a_claim_ends_with_the_batch_that_reaches_its_rows(
    database: Database, record: asyncpg.Connection
) -> None:
    """Whatever the number of batches; one that has more rows alone is claimed alone."""
    for rows in batches(6):
        await store_batch(record, rows)
    await record.execute(
        "update batch set n_rows = case when id = (select min(id) from batch) then 9 else 2 end"
    )
    n_claimed, after = [], 0
    while after < 6:
        async with database.begin() as connection:
            await resume(connection)
            found = await claim(connection, after, 10, most_rows=4)
            after += len(found)
            await connection.execute(text("update fold set fold_seq = :after where id = 1"), {"after": after})
        n_claimed.append(len(found))
    assert n_claimed == [1, 2, 2, 1]


async def test_requests_without_an_answer_are_no_losses(
    database: Database, record: asyncpg.Connection
) -> None:
    """Errors, aborts and names that are not configured are neither taken nor lost; the counts that are open stay whole."""
    await store_batch(record, _tally(1, BEGIN_US, stored_us=BEGIN_US))
    await record.execute(
        "update tally set taken = 200, thinned = 3, published = 100, lost = $1, models = $2",
        '{"error_status": 20, "client_abort": 30, "unknown_model": 7, "decode": 5, "held_bytes": 4}',
        '{"digits": {"taken": 100, "published": 60, "lost": {"client_abort": 30, "decode": 5}},'
        ' "idle": {"taken": 0, "published": 0, "lost": {}, "configured": true},'
        ' "digit": {"taken": 0, "published": 0, "lost": {}, "unknown": 7}}',
    )
    async with database.begin() as connection:
        await resume(connection)
        (found,) = await claim(connection, 0, 1)
    (row,) = found.tallies
    assert (row.taken, row.lost) == (143, 9)
    assert row.models == {"digits": (70, 5), "idle": (0, 0)}
    assert (row.unknown, row.open) == ({"digit": 7}, {"digits": 5, "": 26})


async def test_a_sidecar_that_was_silent_for_days_is_measured_against_its_last_tally(
    database: Database, record: asyncpg.Connection
) -> None:
    """After three days of silence only what is new counts, also for a monitor that starts in between."""
    for rows in batches(20, tally_every=100):
        await store_batch(record, rows)
    await store_batch(record, _tally(900, BEGIN_US, stored_us=BEGIN_US))
    # Its neighbour keeps the clock going.
    later_us = BEGIN_US + 3 * DAY_US
    await store_batch(record, _tally(1, later_us, stored_us=later_us, boot="c"))
    await _fold(database)
    await store_batch(record, _tally(901, later_us + SECOND_US, stored_us=later_us + SECOND_US))
    fold = await _fold(database)
    assert fold.state.losses.recent(["faint"], "digits").taken == 100 + 100


async def test_a_clock_that_runs_ahead_does_not_keep_its_losses_recent(
    database: Database, record: asyncpg.Connection
) -> None:
    """A tally from the future counts when it was stored, and is forgotten an hour later: before and after a restart."""
    for rows in batches(20, tally_every=100):
        await store_batch(record, rows)
    await store_batch(record, _tally(1, BEGIN_US + 300 * DAY_US, stored_us=BEGIN_US, lost=90))
    fold = await _fold(database)
    assert fold.state.losses.recent(["faint"], "digits").lost == 90
    later_us = BEGIN_US + 2 * HOUR_US
    await store_batch(record, _tally(1, later_us, stored_us=later_us, boot="c"))
    fold = await _fold(database)
    assert fold.state.losses.recent(["faint"], "digits").lost == 0
    fold = await _fold(database)
    assert fold.state.losses.recent(["faint"], "digits").lost == 0


async def test_what_is_retired_stays_behind_in_the_record(
    database: Database, record: asyncpg.Connection
) -> None:
    """After 30 days of silence a restart loads nothing of it, and the allowance is no longer shared with it."""
    for rows in batches(20):
        await store_batch(record, rows)
    await _fold(database)
    assert await record.fetchval("select count(*) from detector where retired_at is null") == 12
    for day in range(1, 33):
        at_us = BEGIN_US + day * DAY_US
        await store_batch(record, _tally(day, at_us, stored_us=at_us, boot="c"))
    await _fold(database)
    assert await record.fetchval("select count(*) from detector where retired_at is null") == 0
    assert await record.fetchval("select n_detectors from fold") == 0
    reasons = await record.fetch("select distinct verdict, reason from verdict")
    assert [(row["verdict"], row["reason"].partition(":")[0]) for row in reasons] == [("unknown", "retired")]
    async with database.begin() as connection:
        snapshot = await resume(connection)
    assert (snapshot.detectors, snapshot.verdicts) == ((), ())
    # It comes back: watched from nothing.
    at_us = BEGIN_US + 32 * DAY_US + SECOND_US
    (rows,) = batches(1)
    again = tuple(msgspec.structs.replace(row, captured_us=at_us) for row in rows.comparisons)
    await store_batch(record, BatchRows(fold_seq=0, stored_us=at_us + SECOND_US, comparisons=again))
    fold = await _fold(database)
    assert fold.position.n_detectors == 6
    assert await record.fetchval("select max(n_groups) from verdict") == 16
    assert BEGIN + timedelta(days=32) < await record.fetchval("select max(last_at) from detector")


async def test_a_version_without_a_reference_is_unknown_for_as_long_as_it_serves(
    database: Database, record: asyncpg.Connection
) -> None:
    """Nothing of it is compared, but batches name it: after 30 days without one it is gone, until it serves again."""
    said = {}
    for day in range(92):
        at_us = BEGIN_US + day * DAY_US
        serves = day in {20, 28} or day == 90
        batch = _tally(day, at_us, stored_us=at_us)
        await store_batch(record, msgspec.structs.replace(batch, unreferenced=(2,) * serves))
        if day % 15 == 0 or day in {58, 59, 91}:
            fold = await _fold(database)  # every time as a monitor that has just started
            said[day] = [(row.model_version_id, row.reason.partition(":")[0]) for row in fold.verdicts()]
    assert {day for day, verdicts in said.items() if verdicts == [(2, "no reference")]} == {
        *(0, 15, 30, 45, 58),
        *(90, 91),
    }
    assert all(verdicts == [] for day, verdicts in said.items() if 59 <= day < 90)
    times = await record.fetch("select last_at, reason from verdict")
    assert [row["last_at"] for row in times] == [BEGIN + timedelta(days=90)]
