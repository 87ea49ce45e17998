"""Comparisons that workers store as blocks: each is stored once, and every reader finds the same as in rows."""

import asyncio
import math
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from typing import Any

import asyncpg
import msgspec
import pytest
from alembic import command
from sqlalchemy import Connection, TextClause, text
from sqlalchemy.pool import NullPool

from quantdrift.core.clock import SystemClock
from quantdrift.core.errors import QuarantineReason, RetryError
from quantdrift.core.records import Side
from quantdrift.core.slices import SliceKey, everything
from quantdrift.core.stream.numbering import Numbered
from quantdrift.storage import sampling
from quantdrift.storage.account import flow
from quantdrift.storage.admin.migrate import alembic_config
from quantdrift.storage.admin.retention import merge_blocks
from quantdrift.storage.alerts import evidence, examples
from quantdrift.storage.comparisons.rows import (
    ComparedExchange,
    ComparedItem,
    NoiseItem,
    StoreBatch,
    VersionKey,
)
from quantdrift.storage.comparisons.writer import Writer
from quantdrift.storage.database import Database, make_engine
from quantdrift.storage.figures import figures, spans
from quantdrift.storage.fold import undeclared_sessions
from quantdrift.storage.fold.read import claim, refold
from quantdrift.storage.fold_rows import BatchRows
from quantdrift.storage.schema.partitions import ensure_partitions
from tests.integration.test_condensed import BASE, DIFFERENCES, ROWS, rows
from tests.support.monitor.fold_stream import BEGIN, batches, store_batch, store_catalog
from tests.support.shadow.onnx_models import exchange_of, inputs_of
from tests.support.storage.comparisons import as_blocks

pytestmark = pytest.mark.integration

MIDNIGHT = datetime(2031, 6, 10, tzinfo=UTC)
VERSION = VersionKey(model="digits", candidate_version="int8", reference_digest="d" * 64)
EVERYTHING = "select * from comparisons('-infinity', 'infinity') order by captured_at, exchange_id, item"
STORED = (
    "select captured_at, exchange_id, item, model_version_id, policy_id, slice_ids, n_items, source, header_stratum, body_stratum, pi1,"
    " pi2, u1, u2, group_key, flip, topk, js, divergence, margin, candidate_margin, reference_margin, detail, attributes, features,"
    " trace, tie, origin, latency_s, first_token_s, per_token_s from comparisons('-infinity', 'infinity') order by 1, 2, 3"
)
PLACES = "select (select count(*) from comparison), (select coalesce(sum(n), 0)::int from condensed_block)"


def batch(
    first: int, n: int, *, boot: str = "b" * 32, at: datetime | None = None, n_items: int = 1, **changes: Any
) -> StoreBatch:
    """Return a batch of `n` exchanges with the numbers from `first` on; the same number is the same exchange."""
    at = at or datetime.now(UTC).replace(hour=12, minute=0, second=0, microsecond=0)
    kinds = (
        {"header.x-scanner": "faint", "header.x-request-id": "a81bc81b-dead-4e5d-abff-90865d1e13b1"},
        {"header.x-request-id": "a81bc81b-dead-4e5d-abff-90865d1e13b1"},
        {"header.x-request-id": "not a uuid", "header.lang": 'dé"\\'},
        {"header.x-quote": '"header.x-request-id":"a81bc81b-dead-4e5d-abff-90865d1e13b1"'},
    )
    compared = []
    for number in range(first, first + n):
        exchange = exchange_of(inputs_of(1), captured_at=at + timedelta(milliseconds=number))
        exchange = msgspec.structs.replace(
            exchange,
            id=uuid.uuid5(uuid.NAMESPACE_OID, f"{boot} {number}").hex,
            attributes=kinds[number % 4],
            group=("", "5f" * 16, "Ada's, {session}")[number % 3],
            trace=("", f"00-{'ab' * 16}-{'f7' * 8}-01", f"00-{'ab' * 16}-{'f7' * 8}-00")[number % 3],
        )
        item = ComparedItem(
            slices=(
                everything("digits"),
                SliceKey(model="digits", name=f"s={number % 3}", predicate=f"s={number % 3}"),
            ),
            features={"feature.mean": 0.1 * number} if number % 2 else {},
            flip=(True, False, None)[number % 3],
            topk=number % 2 == 0,
            js=0.1 * number,
            divergence=(math.inf, None, math.nan, 0.1 * number)[number % 4],
            margin=-0.0,
            candidate_margin=None,
            reference_margin=1e-300,
            detail=(None, '{"candidate_top":1,"reference_top":2}')[number % 2],
        )
        compared.append(
            ComparedExchange(
                stream_sequence=number,
                payload=b"wire",
                exchange=exchange,
                version=VERSION,
                items=(msgspec.structs.replace(item, **changes),) * n_items,
            )
        )
    return StoreBatch(
        worker="w",
        at=at,
        compared=tuple(compared),
        references={VERSION.reference_digest: "{}"},
        numbered=tuple(Numbered(boot=boot, row=0, number=number) for number in range(first, first + n)),
        known_by_number=True,
    )


def writer(database: Database, *, blocks: bool = True) -> Writer:
    """Return a writer of blocks, or of rows."""
    return Writer(database, SystemClock(), as_blocks=blocks)


@pytest.fixture
async def filled(postgres_dsn: str) -> AsyncIterator[Database]:
    """Return a database with 2,400 comparisons of a past day in 40 batches that are folded, as blocks of workers."""
    async with Database(postgres_dsn) as opened:
        async with opened.begin() as connection:
            await ensure_partitions(connection, date(2031, 6, 9), date(2031, 6, 11))
            for statement in BASE.split(";\n"):
                if statement.strip():
                    await connection.exec_driver_sql(statement)
            await connection.execute(text(ROWS), {"begin": MIDNIGHT, "n": 2400})
            await connection.exec_driver_sql(DIFFERENCES)
            await connection.exec_driver_sql("delete from batch")
            await connection.exec_driver_sql(
                "insert into batch (id, kind, worker, stored_at, captured_from, captured_to, n_rows, fold_seq, compared_model)"
                " overriding system value"
                " select 1 + n, 'comparison', 'w', timestamptz '2031-06-11', timestamptz '2031-06-10' + n * interval '25 minutes',"
                " timestamptz '2031-06-10' + (n + 1) * interval '25 minutes', 60, 1 + n, 'm' from generate_series(0, 39) n"
            )
            await connection.exec_driver_sql(
                "update comparison set batch_id = 1 + floor(extract(epoch from captured_at - timestamptz '2031-06-10') / 1500)"
            )
        yield opened


async def test_every_row_is_the_same_in_a_block_of_a_worker(
    filled: Database, record: asyncpg.Connection
) -> None:
    """Every column of the functions and of both views, over all and over a part; and again when blocks are merged to a thousand."""
    questions = {
        "all": EVERYTHING,
        "changed": "select * from comparisons('2031-06-10', '2031-06-11', '{2}', true) where flip and slice_ids && '{2}'"
        " order by captured_at, exchange_id, item",
        "item": "select * from item order by captured_at, exchange_id, item, slice_id",
        "items": "select * from items('2031-06-10 05:00+00', '2031-06-10 06:00+00') order by captured_at, exchange_id, item, slice_id",
        "slice_item": "select * from slice_item order by captured_at, exchange_id, item, slice_id",
    }
    of_batches = "select * from comparisons_of('{3,5,40}') order by captured_at, exchange_id, item"
    before = {name: await rows(filled, query) for name, query in questions.items()}
    before_of = await rows(filled, of_batches)
    assert len(before_of) == 180
    assert await as_blocks(record) == 2400
    assert await rows(filled, "select count(*) from condensed_block") == [(80,)]  # two versions in each batch
    assert {name: await rows(filled, query) for name, query in questions.items()} == before
    assert await rows(filled, of_batches) == before_of
    # What was summed up by the worker is what Postgres would have.
    assert await rows(
        filled,
        "select count(*) from condensed_block b cross join lateral unnest(b.slices, b.changed, b.worst_changed, b.worst_other)"
        " as of (slice, changed, worst_changed, worst_other) cross join lateral ("
        " select count(*) filter (where flip) as n, max(divergence) filter (where flip) as first,"
        " max(divergence) filter (where flip is not true) as second from block_rows(b) where of.slice = any(slice_ids)) it"
        " where (of.changed, of.worst_changed, of.worst_other) is distinct from (it.n, it.first, it.second)",
    ) == [(0,)]
    assert await merge_blocks(filled, MIDNIGHT + timedelta(days=2)) == 2400
    sizes = (
        "select model_version_id, n, of_batch, form, cardinality(detail_formats)"
        " from condensed_block order by model_version_id, captured_from"
    )
    assert await rows(filled, sizes) == [(1, 1024, None, 1, 1), (1, 896, None, 1, 1), (2, 480, None, 2, 1)]
    assert {name: await rows(filled, query) for name, query in questions.items()} == before
    assert await merge_blocks(filled, MIDNIGHT + timedelta(days=2)) == 0


async def test_what_the_fold_may_still_read_by_its_batch_is_not_merged(
    filled: Database, record: asyncpg.Connection
) -> None:
    """A batch without a number, one of the last hour, and a day that is not over and has fewer than a thousand."""
    await as_blocks(record)
    before = await rows(filled, EVERYTHING)
    now = MIDNIGHT + timedelta(days=2)
    await rows(filled, "update batch set fold_seq = null where id > 20 returning 1")
    assert await merge_blocks(filled, now) == 1200
    assert await rows(filled, "select count(*) from condensed_block where of_batch is not null") == [(40,)]
    await rows(
        filled, "update batch set fold_seq = id, stored_at = '2031-06-11 23:30+00' where id > 20 returning 1"
    )
    assert await merge_blocks(filled, now) == 0
    await rows(filled, "update fold set event_time = '2031-06-10 18:00+00' returning 1")
    assert await merge_blocks(filled, now + timedelta(days=1)) == 0
    await rows(filled, "update fold set event_time = '2031-06-15' returning 1")
    assert (
        await merge_blocks(filled, now + timedelta(days=1)) == 1200 + 480 // 2
    )  # with the rest of the second version
    assert await rows(filled, EVERYTHING) == before


@pytest.mark.parametrize("merged", [False, True])
async def test_an_erased_exchange_leaves_the_block_of_a_worker(
    filled: Database, record: asyncpg.Connection, *, merged: bool
) -> None:
    """What was with it stays, byte for byte, with its batch."""
    await as_blocks(record)
    if merged:
        await merge_blocks(filled, MIDNIGHT + timedelta(days=2))
    before = await rows(filled, EVERYTHING)
    erased = {before[100][:2], before[2000][:2]}
    await record.execute(
        "select comparison_erase($1, $2)", [at for at, _ in erased], [one for _, one in erased]
    )
    assert await rows(filled, EVERYTHING) == [row for row in before if row[:2] not in erased]


async def test_a_downgrade_makes_rows_of_the_blocks_of_workers(
    filled: Database, record: asyncpg.Connection, postgres_dsn: str
) -> None:
    """The release before folds rows alone; what is merged was folded, and stays."""
    before = await rows(filled, EVERYTHING)
    await as_blocks(record)
    await rows(filled, "update batch set fold_seq = null where id > 35 returning 1")
    await merge_blocks(filled, MIDNIGHT + timedelta(days=2))

    def down(connection: Connection) -> None:
        config = alembic_config()
        config.attributes["connection"] = connection
        command.downgrade(config, "0008")

    engine = make_engine(postgres_dsn, settings={}, poolclass=NullPool)
    async with engine.begin() as connection:
        await connection.run_sync(down)
    await engine.dispose()
    assert await rows(filled, "select count(*) from comparison where batch_id > 35") == [(300,)]
    assert await rows(filled, EVERYTHING) == before


async def test_the_writer_stores_the_same_in_a_block_as_in_rows(database: Database) -> None:
    """Every value of exchanges of all kinds, of one and of three items; in one statement once the ids are known."""
    found = []
    for blocks in (False, True):
        store = writer(database, blocks=blocks).store
        stored = [
            await store(batch(1, 64)),
            await store(batch(65, 32)),
            await store(batch(97, 16, n_items=3)),
            await store(batch(113, 9, boot="c" * 32)),
            await store(batch(122, 9, margin=abs(0.7 - 0.2), candidate_margin=0.7, reference_margin=0.2)),
        ]
        assert [written.n_rows for written in stored] == [64, 32, 48, 9, 9]
        assert await rows(database, PLACES) == [(0, 162) if blocks else (162, 0)]
        forms = await rows(database, "select form, margin is null from condensed_block order by id")
        assert forms == [(1, False)] * 4 * blocks + [(2, True)] * blocks
        found.append(await rows(database, STORED))
        assert await rows(database, "select n_rows, compared_model from batch order by id") == [
            (n, "digits") for n in (64, 32, 48, 9, 9)
        ]
        assert await rows(
            database,
            "select count(*) from comparisons('-infinity', 'infinity') c join batch b on b.id = c.batch_id and b.stored_at = c.stored_at",
        ) == [(162,)]
        for table in ("comparison", "condensed_block", "batch", "arrival"):
            await rows(database, f"delete from {table} returning 1")
    assert found[0] == found[1]


async def test_second_replays_are_stored_with_a_block(database: Database) -> None:
    """In a transaction while ids are new, then in one statement with the block; each value is the one that was given."""
    store = writer(database).store
    for number in range(2):
        compared = batch(1 + 64 * number, 64)
        first = compared.compared[0]
        again = NoiseItem(
            captured_at=first.exchange.captured_at,
            exchange_id=first.exchange.id,
            item=0,
            side=Side.REFERENCE,
            version=VERSION,
            policy=first.exchange.sampling.policy,
            pi1=0.5,
            pi2=1.0,
            flip=None,
            divergence=0.25,
            slices=first.items[0].slices,
        )
        assert (await store(msgspec.structs.replace(compared, noise=(again,)))).n_rows == 64
    assert await rows(database, PLACES) == [(0, 128)]
    # What one statement writes has one number of its command.
    assert await rows(
        database,
        "select n.cmin = c.cmin, n.side, n.flip, n.divergence, n.pi1, cardinality(n.slice_ids)"
        " from batch b join condensed_block c on c.of_batch = b.id join noise n on n.batch_id = b.id order by b.id",
    ) == [(False, "reference", None, 0.25, 0.5, 2), (True, "reference", None, 0.25, 0.5, 2)]


async def test_a_redelivered_exchange_is_stored_once(database: Database) -> None:
    """As a whole batch, as a part of another one, as one of few, by a worker that stores rows, and after its block was merged."""
    blocks, of_rows = writer(database), writer(database, blocks=False)
    assert (await blocks.store(batch(1, 64))).n_rows == 64
    for again in (batch(1, 64), batch(5, 20), batch(64, 1)):
        assert [(await one.store(again)).n_rows for one in (blocks, of_rows)] == [0, 0]
    assert await rows(database, "select count(*) from batch") == [(1,)]
    assert (await blocks.store(batch(60, 20))).n_rows == 15
    assert (await of_rows.store(batch(76, 10))).n_rows == 6
    assert (await blocks.store(batch(80, 30))).n_rows == 24  # of which rows have some
    assert await rows(
        database, "select count(*), count(distinct exchange_id) from comparisons('-infinity', 'infinity')"
    ) == [(109, 109)]
    await rows(database, "update condensed_block set of_batch = null returning 1")
    assert (await blocks.store(batch(1, 64))).n_rows == 0


async def test_an_exchange_with_a_second_number_is_stored_once_if_the_numbers_do_not_tell(
    database: Database,
) -> None:
    """Published late, delivered again, or without a number: it is looked for, in blocks and in rows, and what is new is a row."""
    store = writer(database).store
    await store(batch(1, 64))
    again = batch(40, 30)
    other = tuple(Numbered(boot="c" * 32, row=0, number=number) for number in range(1, 31))
    for numbers in (other, ()):
        unknown = msgspec.structs.replace(again, numbered=numbers, known_by_number=False)
        assert (await store(unknown)).n_rows == (5 if numbers else 0)
    assert await rows(database, PLACES) == [(5, 64)]


async def test_a_number_that_was_given_up_does_not_hide_an_exchange(database: Database) -> None:
    """Where too many numbers are missing, all up to the last count as finished: what comes late is stored all the same, once."""
    await writer(database).store(batch(1, 10))
    await rows(database, "update arrival set numbers = '{[1,1000)}' returning 1")
    assert (await writer(database).store(batch(5, 20))).n_rows == 14
    assert (await writer(database).store(batch(5, 20))).n_rows == 0


async def test_two_workers_with_the_same_exchanges_store_them_once(
    postgres_dsn: str, record: asyncpg.Connection
) -> None:
    """Both wait for the row of the numbers at the same time; one stores the batch, and the other one what it has beyond it."""
    async with Database(postgres_dsn) as one, Database(postgres_dsn) as other:
        first, second = writer(one), writer(other)
        await first.store(batch(1, 64))
        await second.store(batch(65, 64))
        for blocks in (second, writer(other, blocks=False)):
            begin = 129 if blocks is second else 301
            lock = record.transaction()
            await lock.start()
            await record.execute("select from arrival for update")
            stores = [
                asyncio.create_task(first.store(batch(begin, 64))),
                asyncio.create_task(blocks.store(batch(begin + 32, 64))),
            ]
            while await record.fetchval("select count(*) from pg_locks where not granted") < 2:
                await asyncio.sleep(0.01)
            await lock.rollback()
            assert sum(written.n_rows for written in await asyncio.gather(*stores)) == 96
        found = "select count(*), count(distinct exchange_id) from comparisons('-infinity', 'infinity')"
        assert await rows(one, found) == [(128 + 2 * 96, 128 + 2 * 96)]


async def test_a_worker_whose_connection_is_killed_stores_all_or_nothing(
    postgres_dsn: str, record: asyncpg.Connection
) -> None:
    """In the middle of its statement; it stores the batch once when it tries again."""
    async with Database(postgres_dsn) as database:
        store = writer(database).store
        await store(batch(1, 64))
        await store(batch(65, 64))
        watch, lock = await asyncpg.connect(postgres_dsn), record.transaction()
        await lock.start()
        await record.execute("select from arrival for update")
        task = asyncio.create_task(store(batch(129, 64)))
        waiting = "select pid from pg_locks where not granted"
        for _ in range(2):  # the statement, and the transaction after it
            while (pid := await record.fetchval(waiting)) is None and not task.done():
                await asyncio.sleep(0.01)
            # In a transaction pg_stat_activity stays as it was at the first look.
            await watch.execute("select pg_terminate_backend($1)", pid)
            while await watch.fetchval("select exists (select from pg_stat_activity where pid = $1)", pid):
                await asyncio.sleep(0.01)
        with pytest.raises(RetryError):
            await task
        await lock.rollback()
        await watch.close()
        assert await rows(database, PLACES) == [(0, 128)]
        assert await rows(database, "select count(*) from batch") == [(2,)]
        with suppress(RetryError):  # another pooled connection may have ended, too
            await store(batch(129, 64))
        await store(batch(129, 64))
        assert await rows(database, PLACES) == [(0, 192)]


async def test_an_id_that_means_something_else_since_is_not_used(database: Database) -> None:
    """A failover hands out an id again: the worker looks what it is before it stores anything by it."""
    store = writer(database).store
    await store(batch(1, 64))
    await store(batch(65, 64))
    await rows(
        database,
        "update slice set predicate = predicate || ' of another' where predicate = 's=1' returning 1",
    )
    await store(batch(129, 64))
    assert await rows(
        database,
        "select s.predicate, count(*) from comparisons('-infinity', 'infinity') c join batch b on b.id = c.batch_id"
        " cross join lateral unnest(c.slice_ids) as member (id) join slice s on s.id = member.id"
        " where b.id = (select max(id) from batch) group by 1 order by 1",
    ) == [("s=0", 22), ("s=1", 21), ("s=2", 21), ("true", 64)]


async def test_what_a_block_cannot_have_is_stored_as_rows_or_set_aside(database: Database) -> None:
    """Few comparisons; an exchange that is there twice; one without a partition; and a surrogate, which Postgres refuses."""
    store = writer(database).store
    assert (await store(batch(1, 7))).n_rows == 7
    assert await rows(database, PLACES) == [(7, 0)]
    twice = batch(101, 20)
    twice = msgspec.structs.replace(twice, compared=(*twice.compared, twice.compared[0]))
    assert (await store(twice)).n_rows == 20
    assert await rows(database, PLACES) == [(27, 0)]
    late = await store(batch(201, 20, at=datetime(2001, 1, 1, tzinfo=UTC)))
    assert set(late.unplaced.values()) == {QuarantineReason.TOO_LATE}
    yesterday = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(
        milliseconds=310
    )
    assert (await store(batch(301, 20, at=yesterday))).n_rows == 20  # 9 on one day, 11 on the next
    assert (await store(batch(400, 20, at=datetime.now(UTC), detail='{"text":"\\\\u0000"}'))).n_rows == 20
    with pytest.raises(Exception, match="u0000"):
        await store(batch(500, 20, detail='{"text":"\\u0000"}'))
    assert await rows(database, PLACES) == [(47, 20)]


ASKED: Sequence[tuple[TextClause, dict[str, Any]]] = (
    (sampling._ITEMS, {"since": BEGIN, "most": 100}),
    (sampling._ITEMS, {"since": BEGIN, "most": 100_000}),
    (flow._COMPARED, {"begin": BEGIN + timedelta(seconds=30)}),
    (flow._LATENCY, {"begin": BEGIN}),
    (undeclared_sessions._EXCHANGES, {"after": 1, "until": 20, "most": 10_000}),
    (spans._UNFOLDED_SPANS, {"versions": [1, 2], "end": None}),
    (figures._NAMES_PEOPLE, {"version": 1}),
)


async def test_readers_of_the_newest_comparisons_find_the_same_in_blocks(
    database: Database, record: asyncpg.Connection
) -> None:
    """What the fold reads of each batch, again after it, the evidence of an alert, and what other readers take of the newest ones."""
    await store_catalog(record)
    for of_batch in batches(40):
        await store_batch(record, msgspec.structs.replace(of_batch, model="digits"))
    await record.execute(
        "update comparison set latency_s = divergence, group_key = case when u1 > 0 then 'one' else '' end"
    )
    window = {"begin": BEGIN, "end": BEGIN + timedelta(minutes=1), "version": 1, "slice": 2, "fold_seq": 30}
    columns, item = evidence._ITEM_COLUMNS, evidence._ITEM.format(signals="'{}'::jsonb")
    newest = text(evidence._NEWEST_OF_SLICE.format(columns=columns, read=item))
    alarms = {
        "places": [0],
        "versions": [1],
        "slices": [2],
        "begins": [window["begin"]],
        "ends": [window["end"]],
        "fold_seqs": [30],
        "by_flips": [False],
        **{name: window[name] for name in ("begin", "end", "fold_seq")},
        "depth": 5_000,
        "most": 20,
    }
    asked = [
        *ASKED,
        *((newest, {**window, "scanned": scanned, "most": 5_000}) for scanned in (50, 100_000)),
        (evidence._NEWEST, {**window, "versions": [1], "scanned": 100_000}),
        (examples._WORST, alarms),
    ]

    async def found() -> tuple[list[BatchRows], list[BatchRows], list[list[tuple[Any, ...]]]]:
        async with database.begin() as connection:
            unfolded = await connection.execute(flow._UNFOLDED, {"begin": BEGIN + timedelta(seconds=30)})
            answers = [list(map(tuple, unfolded.all()))]
            claimed = await claim(connection, 0, 100, timedelta(seconds=5))
            again = await refold(connection, 1, len(claimed))
            answers += [list(map(tuple, (await connection.execute(*question)).all())) for question in asked]
            await connection.rollback()
        return claimed, again, answers

    before = await found()
    assert sum(len(of_batch.comparisons) for of_batch in before[0]) > 500
    assert [place for place, answer in enumerate(before[2]) if not answer] == []
    assert await as_blocks(record) > 500
    after = await found()
    assert after[:2] == before[:2]
    for place, (answer, expected) in enumerate(zip(after[2], before[2], strict=True)):
        assert answer == expected, place
    await rows(
        database,
        "update condensed_block set of_batch = null, batch_id = array_fill(of_batch, array[n]), stored_at = array_fill(condensed_at, array[n])"
        " where id % 2 = 0 returning 1",
    )
    merged = await found()
    assert merged[1] == before[1]  # what is merged is read by its time
    # The search for sessions may be an hour behind, when all of its batches are merged or condensed.
    await rows(
        database,
        "update condensed_block set of_batch = null, batch_id = array_fill(of_batch, array[n]), stored_at = array_fill(condensed_at, array[n])"
        " where of_batch is not null returning 1",
    )
    place = 1 + next(n for n, (question, _) in enumerate(asked) if question is undeclared_sessions._EXCHANGES)
    assert (await found())[2][place] == before[2][place]
