"""What was folded, read again; and what a model was sent."""

from collections.abc import AsyncIterator
from datetime import timedelta

import asyncpg
import pytest

from quantdrift.core.errors import OperatorError
from quantdrift.core.records import Verdict
from quantdrift.monitor.fold.fold import Fold
from quantdrift.storage.account.coverage import usage
from quantdrift.storage.database import Database
from quantdrift.storage.fold.history import History
from quantdrift.storage.fold.read import claim, load_catalog, resume
from quantdrift.storage.fold.write import write
from quantdrift.storage.fold_rows import BatchRows
from tests.support.monitor.fold_stream import BEGIN, CATALOG, CONFIG, batches, store_batch, store_catalog
from tests.support.storage.comparisons import condense

pytestmark = pytest.mark.integration

STREAM = batches(60)
DAY = timedelta(days=1)


@pytest.fixture
async def record(record: asyncpg.Connection) -> asyncpg.Connection:
    """Return a connection to a fresh record."""
    await store_catalog(record)
    return record


@pytest.fixture
async def history(postgres_dsn: str) -> AsyncIterator[History]:
    """Return the record as a back-test sees it."""
    async with Database(postgres_dsn) as database:
        yield History(database)


async def _fold(dsn: str, record: asyncpg.Connection) -> list[BatchRows]:
    """Store and fold the stream as a monitor would, in three goes; return the batches that were folded."""
    for rows in STREAM:
        await store_batch(record, rows)
    folded = []
    async with Database(dsn) as database:
        for _ in range(3):
            async with database.begin() as connection:
                fold = Fold(CONFIG, await resume(connection))
                found = await claim(connection, fold.position.fold_seq, 25)
                fold.learn(await load_catalog(connection))
                for rows in found:
                    fold.batch(rows)
                await write(connection, fold.take(), "")
            folded += found
    return folded


async def test_the_batches_come_back_as_they_were_folded(
    postgres_dsn: str, record: asyncpg.Connection, history: History
) -> None:
    """Every row of every batch, however many are read at once; and the catalogue they speak of."""
    folded = await _fold(postgres_dsn, record)
    extent = await history.extent(None, None)
    assert (extent.first, extent.last, extent.complete) == (1, 60, True)
    assert extent.n_items == sum(len(rows.comparisons) for rows in STREAM)
    for at_once, condensed in ((7, False), (64, False), (64, True)):
        if condensed:
            assert await condense(record) == extent.n_items
        read = [rows async for chunk in history.batches(extent, at_once) for rows in chunk]
        assert read == folded
    catalog = await history.catalog()
    assert catalog.slices == CATALOG.slices
    assert catalog.policies == CATALOG.policies


async def test_a_period_is_cut_out_by_capture_time(
    postgres_dsn: str, record: asyncpg.Connection, history: History
) -> None:
    """With the alerts that were open when it begins."""
    await _fold(postgres_dsn, record)
    middle = BEGIN + timedelta(seconds=100)
    late, early = await history.extent(middle, None), await history.extent(None, middle)
    assert early.first == 1
    assert early.last in {late.first, late.first - 1}
    assert not late.complete
    whole = await history.transitions(await history.extent(None, None))
    assert {one.to_verdict for one in whole} >= {Verdict.OK}
    opened = next(one for one in whole if one.to_verdict in {Verdict.WARNING, Verdict.FIRING})
    after = await history.extent(BEGIN + timedelta(seconds=165), None)
    assert opened.fold_seq < after.first
    (open_then, *_) = await history.transitions(after)
    assert (open_then.slice_id, open_then.fold_seq < after.first) == (opened.slice_id, True)


async def test_an_empty_record_and_an_empty_period_say_so(
    postgres_dsn: str, record: asyncpg.Connection, history: History
) -> None:
    """Different things to do: start a monitor, or widen the period."""
    with pytest.raises(OperatorError, match="no folded batches yet"):
        await history.extent(None, None)
    await _fold(postgres_dsn, record)
    with pytest.raises(OperatorError, match="widen --from and --to"):
        await history.extent(BEGIN - 9 * DAY, BEGIN - 8 * DAY)


async def test_what_retention_took_is_left_out_or_counted(
    postgres_dsn: str, record: asyncpg.Connection, history: History
) -> None:
    """Old batches go, but for one that holds a sidecar's last tally: history begins after the gap."""
    await _fold(postgres_dsn, record)
    whole = await history.extent(None, None)
    await record.execute("delete from batch where fold_seq < 20 and fold_seq <> 10")
    extent = await history.extent(None, None)
    assert (extent.first, extent.last, extent.complete) == (20, 60, False)
    await record.execute("delete from comparison where batch_id = (select id from batch where fold_seq = 31)")
    read = [rows async for chunk in history.batches(extent) for rows in chunk]
    assert sum(len(rows.comparisons) for rows in read) < extent.n_items
    with pytest.raises(OperatorError, match="retention has just deleted"):
        _ = [chunk async for chunk in history.batches(whole)]


async def test_the_traffic_of_a_model_is_read_from_the_database(
    postgres_dsn: str, record: asyncpg.Connection
) -> None:
    """Requests from the exact tallies, shares from the weights: the sampling is undone."""
    await _fold(postgres_dsn, record)
    async with Database(postgres_dsn) as database:
        found = await usage(database, "digits", BEGIN - DAY, BEGIN + DAY)
        with pytest.raises(OperatorError, match="models: digits"):
            await usage(database, "digit", BEGIN - DAY, BEGIN + DAY)
        with pytest.raises(OperatorError, match="no tallies since"):
            await usage(database, "digits", BEGIN - 9 * DAY, BEGIN - 8 * DAY)
    tallies = [tally for rows in STREAM for tally in rows.tallies]
    seconds = (tallies[-1].at_us - tallies[0].at_us) / 1e6
    assert found.requests_per_s == pytest.approx(2 * 6000 / seconds)
    assert found.strata == {"default": 0.5, "faint": 0.5}
    shares = {one.name: one.share for one in found.slices}
    # 30 % of the comparisons are faint ones, each stands for itself; a clear one stands for four.
    assert shares["scanner=faint"] == pytest.approx(0.3 / (0.3 + 0.7 * 4), abs=0.02)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert found.n_detectors > 0
