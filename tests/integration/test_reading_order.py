"""Exchanges are folded in the order of capture, each once, whatever the batches that brought them and whoever was killed meanwhile."""

import random
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import asyncpg
import msgspec
import pytest

from quantdrift.storage.database import Database
from quantdrift.storage.fold.read import claim, refold
from quantdrift.storage.fold.reading_order import ReadingOrder, WaitingBatch
from quantdrift.storage.fold.write import write
from quantdrift.storage.fold_rows import BatchRows, ComparisonRow, FoldResult, Position, to_us
from tests.support.monitor.fold_stream import BEGIN_US, SECOND_US, batches, store_batch, store_catalog

pytestmark = pytest.mark.integration
HORIZON = timedelta(seconds=5)


@pytest.fixture
async def record(record: asyncpg.Connection) -> asyncpg.Connection:
    """Return a connection to a fresh record."""
    await store_catalog(record)
    return record


def by_shape(n: int, *, late: int = 0) -> list[BatchRows]:
    """Return batches of one of two shapes each; `late` exchanges of the second shape come alone, a minute after the others."""
    rows = [row for batch in batches(n, tally_every=10**9) for row in batch.comparisons]
    rng = random.Random(5)
    ids = sorted({row.exchange_id for row in rows})
    large = set(rng.sample(ids, len(ids) // 10))
    alone = set(rng.sample(sorted(large), late))
    found: dict[tuple[int, str], list[ComparisonRow]] = {}
    for row in rows:
        window_us = (row.captured_us - BEGIN_US) // (2 * SECOND_US) * 2 * SECOND_US
        if row.exchange_id in alone:
            key = (row.captured_us + 60 * SECOND_US, row.exchange_id)
        elif row.exchange_id in large:
            key = (BEGIN_US + window_us + 5 * SECOND_US, "large")
        else:
            key = (BEGIN_US + window_us + 3 * SECOND_US, "small")
        found.setdefault(key, []).append(row)
    return [
        BatchRows(fold_seq=0, stored_us=key[0], comparisons=tuple(rng.sample(of, len(of))))
        for key, of in sorted(found.items())
    ]


def later(batch: BatchRows, by_us: int) -> BatchRows:
    """Return a batch that was captured and stored later."""
    rows = (msgspec.structs.replace(row, captured_us=row.captured_us + by_us) for row in batch.comparisons)
    return msgspec.structs.replace(batch, stored_us=batch.stored_us + by_us, comparisons=tuple(rows))


async def store(record: asyncpg.Connection, rows: BatchRows) -> None:
    """Store a batch as a shadow worker does, with its model."""
    await store_batch(record, rows)
    await record.execute(
        "update batch set compared_model = 'digits' where kind = 'comparison' and compared_model is null"
    )


async def claimed(database: Database, at_once: int, *, most: int = 10**9, after: int = 0) -> list[BatchRows]:
    """Return what monitors fold after a number that are killed after each claim."""
    found: list[BatchRows] = []
    while len(found) < most:
        async with database.begin() as connection:
            rows = await claim(connection, after + len(found), at_once, HORIZON)
            if not rows:
                break
            found += rows
            position = Position(fold_seq=after + len(found))
            outcome = FoldResult(position=position, detectors=(), verdicts=(), transitions=(), rollups=())
            await write(connection, outcome, "")
    return found


def exchanges(found: list[BatchRows]) -> list[tuple[str, int]]:
    """Return exchange and item of each row, in the order of the fold."""
    return [(plain(row), row.item) for batch in found for row in batch.comparisons]


def plain(row: ComparisonRow) -> str:
    """Return the id of an exchange without the dashes that Postgres writes."""
    return row.exchange_id.replace("-", "")


@pytest.mark.parametrize("at_once", [1, 7, 1000])
async def test_everything_is_folded_once_and_in_the_order_of_capture(
    database: Database, record: asyncpg.Connection, at_once: int
) -> None:
    """Batches of one shape that are stored seconds apart are read as one stream, to the last exchange before a silence."""
    stream = by_shape(40)
    for rows in stream:
        await store(record, rows)
    found = await claimed(database, at_once)
    stored = sorted(
        (row.captured_us, row.exchange_id, row.item) for batch in stream for row in batch.comparisons
    )
    assert exchanges(found) == [(exchange_id, item) for _, exchange_id, item in stored]
    async with database.begin() as connection:
        assert await refold(connection, 1, len(found)) == found
        half = len(found) // 2
        assert await refold(connection, half, len(found)) == found[half - 1 :]


def test_small_batches_of_a_second_are_folded_as_one() -> None:
    """The mark moves with the first batch that is stored in a second, and then past all that has waited for the horizon, also for a monitor that begins there."""
    order, now_us = ReadingOrder(5 * SECOND_US), BEGIN_US // SECOND_US * SECOND_US
    moved = []
    for number in range(200):
        stored_us = now_us + number * SECOND_US // 10
        stretch = order.stretch(stored_us, stored_us - SECOND_US, stored_us - SECOND_US)
        if stretch.until_us > stretch.after_us:
            moved.append(number)
            assert stretch.until_us == stored_us - 6 * SECOND_US
        waiting = [
            WaitingBatch(earlier, at_us, at_us - SECOND_US)
            for earlier in range(number + 1)
            if (at_us := now_us + earlier * SECOND_US // 10) - SECOND_US > stretch.until_us
        ]
        order = ReadingOrder(5 * SECOND_US, (stretch, stored_us), waiting)
    assert moved[1:] == list(range(moved[1], 200, 10))


async def test_late_exchanges_are_spread_and_folded_once(
    database: Database, record: asyncpg.Connection
) -> None:
    """Redelivered exchanges of one shape come a minute later: none is lost, none doubled, and they are no neighbours."""
    stream = by_shape(120, late=12)
    late = {
        row.exchange_id
        for batch in stream
        for row in batch.comparisons
        if batch.stored_us - row.captured_us == 60 * SECOND_US
    }
    for rows in stream:
        await store(record, rows)
    found = await claimed(database, 5)
    stored = [(row.exchange_id, row.item) for batch in stream for row in batch.comparisons]
    order = exchanges(found)
    assert sorted(order) == sorted(stored)
    on_time = [row for batch in found for row in batch.comparisons if plain(row) not in late]
    assert all(a.captured_us <= b.captured_us for a, b in pairwise(on_time))
    places = sorted({order.index((exchange_id, 0)) for exchange_id in late})
    assert len(places) == 12
    assert max(b - a for a, b in pairwise(places)) > 20
    async with database.begin() as connection:
        assert await refold(connection, 1, len(found)) == found


async def test_a_batch_without_a_mark_comes_with_its_own_rows(
    database: Database, record: asyncpg.Connection
) -> None:
    """A worker of the release before stores no model: its rows are folded with its batch."""
    for rows in batches(5, tally_every=10**9):
        await store_batch(record, rows)
    found = await claimed(database, 1000)
    assert [len(batch.comparisons) for batch in found] == [
        len(rows.comparisons) for rows in batches(5, tally_every=10**9)
    ]


async def test_a_silent_model_is_folded_to_its_end_after_the_horizon(
    database: Database, record: asyncpg.Connection
) -> None:
    """While exchanges could still come nothing is folded; once none came for the horizon, an empty batch folds the rest."""
    (rows,) = batches(1, tally_every=10**9)
    await store(record, rows)
    await record.execute("update batch set stored_at = now()")
    (first,) = await claimed(database, 10, most=1)
    assert (first.comparisons, await claimed(database, 10, most=0)) == ((), [])
    async with database.begin() as connection:
        assert await claim(connection, 1, 10, HORIZON) == []
    await record.execute("update batch set stored_at = stored_at - interval '5 seconds'")
    async with database.begin() as connection:
        (last,) = await claim(connection, 1, 10, HORIZON)
    assert {plain(row) for row in last.comparisons} == {row.exchange_id for row in rows.comparisons}
    assert last.captured_us > BEGIN_US


async def test_late_exchanges_of_a_silent_model_wait_for_no_further_captures(
    database: Database, record: asyncpg.Connection
) -> None:
    """All that waits is folded one horizon after the last batch, late exchanges too; what comes then is folded once, in its own order."""
    now_us = to_us(datetime.now(UTC))
    stream = [
        later(batch, now_us - 6 * SECOND_US - max(batch.stored_us for batch in by_shape(40, late=3)))
        for batch in by_shape(40, late=3)
    ]
    for rows in stream:
        await store(record, rows)
    folded = await claimed(database, 1000)
    assert len(folded) == len(stream) + 1
    stored = [(row.exchange_id, row.item) for batch in stream for row in batch.comparisons]
    assert sorted(exchanges(folded)) == sorted(stored)
    (redelivered,) = batches(1, tally_every=10**9, seed=9)
    await store(record, redelivered)
    more = await claimed(database, 1000, after=len(folded))
    assert len(more) == 2
    assert sorted(exchanges(more)) == [(row.exchange_id, row.item) for row in redelivered.comparisons]
    async with database.begin() as connection:
        assert await refold(connection, 1, len(folded) + 2) == folded + more


async def test_late_exchanges_have_places_among_all_that_waits_when_traffic_ends(
    database: Database, record: asyncpg.Connection
) -> None:
    """Late exchanges of one shape are no lump after the last of the others, which no bound would survive."""
    now_us = to_us(datetime.now(UTC))
    (first, *rest) = batches(400, tally_every=10**9)
    newest_us = max(batch.stored_us for batch in rest)
    stream = [later(batch, now_us - 6 * SECOND_US - newest_us) for batch in rest]
    for rows in stream:
        await store(record, rows)
    late = later(first, now_us - 6 * SECOND_US - newest_us)
    await store(record, msgspec.structs.replace(late, stored_us=now_us - 6 * SECOND_US))
    found = await claimed(database, 7)
    ids = {row.exchange_id for row in late.comparisons}
    order = exchanges(found)
    stored = [(row.exchange_id, row.item) for batch in (*stream, late) for row in batch.comparisons]
    assert sorted(order) == sorted(stored)
    late_is = [exchange_id in ids for exchange_id, _ in exchanges(found[-1:])]
    assert 4 < sum(late_is) < len(late_is) - 4
    assert not all(late_is[-sum(late_is) // 2 :])
    async with database.begin() as connection:
        assert await refold(connection, 1, len(found)) == found
