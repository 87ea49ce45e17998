"""Comparisons that are some days old, a thousand in a row: every reader finds the same as before."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any

import asyncpg
import pytest
from alembic import command
from sqlalchemy import Connection, text
from sqlalchemy.pool import NullPool

import quantdrift.storage.admin.retention
from quantdrift import frames
from quantdrift.core.config.schema import Storage
from quantdrift.storage.admin.migrate import alembic_config
from quantdrift.storage.admin.retention import maintain
from quantdrift.storage.database import Database, make_engine
from quantdrift.storage.labels import LabelOutcome, outcomes
from quantdrift.storage.schema.partitions import ensure_partitions

pytestmark = pytest.mark.integration

NOW = datetime(2031, 6, 15, 9, 30, tzinfo=UTC)
DAY = date(2031, 6, 10)
MIDNIGHT = datetime(2031, 6, 10, tzinfo=UTC)
KEEP = Storage(retention_days=10, condense_after_days=3)
# Of every kind that a column can have: exchanges of two items, no session and one that is no hash, request ids and traces of
# all forms, nothing measured, NaN and infinity.
ROWS = """
    insert into comparison
    select cast(:begin as timestamptz) + make_interval(secs => (n / 2) * 50), lpad(to_hex(n / 2 + 1), 32, '0')::uuid, (n % 2)::smallint, 1,
        1 + (n / 2 % 5 = 0)::int, 1, case when n % 7 = 0 then '{1}' when n % 3 = 0 then '{1,2,3}' else '{1,3}' end::int[], 2, 'pod-' || n / 2 % 3, 'default',
        'night', 0.5, 0.25, 0.3, 0.1, case n / 2 % 3 when 0 then '' when 1 then md5((n / 2 % 11)::text) else 'Ada''s "session"' end,
        case when n % 5 = 0 then null else n % 11 = 0 end, n % 2 = 0, n * 0.001,
        case n % 13 when 0 then null when 1 then 'NaN' when 2 then 'infinity' else n * 1e-7 end, 0.1, 0.2, case when n % 4 > 0 then 0.3 end,
        case when n % 6 > 0 then jsonb_build_object('candidate_top', n % 10, 'reference_top', 3, 'tv', 0.125, 'candidate_scores', '[[1, 0.5]]'::jsonb) end,
        case n / 2 % 4 when 0 then '{}' when 1 then jsonb_build_object('header.x-request-id', md5(n::text)::uuid, 'header.lang', 'dé"')
            when 2 then '{"header.x-request-id": "not a uuid"}' else '{"header.x-request-id": "A81BC81B-DEAD-4E5D-ABFF-90865D1E13B1"}' end,
        case when n % 2 = 0 then '{"length": 3}' else '{}' end::jsonb,
        case n / 2 % 4 when 0 then '' when 1 then '00-' || md5(n::text) || '-' || substr(md5(n::text), 3, 16) || '-01'
            when 2 then '00-' || md5(n::text) || '-00f067aa0ba902b7-00' else 'odd' end,
        cast(:begin as timestamptz) + interval '1 day', n % 9 = 0, case when n % 10 = 0 then 'intake ada' end,
        case when n % 3 > 0 then 0.02 end, case when n % 3 = 1 then 0.01 end, null
    from generate_series(0, :n - 1) n
"""
# Of one version as comparators of classes have it; of the other a margin of its own, which is no difference.
DIFFERENCES = (
    "update comparison set margin = abs(candidate_margin - reference_margin) where model_version_id = 2"
)
# Nothing, no object, no keys, keys and texts that need care, numbers whose digits matter, and values that are objects themselves.
DETAILS = (
    None,
    "null",
    "1.0",
    '"a: \\"b\\", %s"',
    '[{"a": 1}]',
    "{}",
    '{"tv": 1.0, "top": 3}',
    '{"tv": 1.00, "top": null}',
    '{"tv": 1e400, "top": -0}',
    '{"tv": {}, "top": {"tv": [1.10, {"top": "x"}]}}',
    '{"tv": "\\u0001\\u0003\\n, \\"top\\": 1", "top": ""}',
    '{"%s": "%2$s", "100%": true, "a\\"b\\u0003\\\\": "\\u00e9\\u2028", "": 1}',
)
BASE = """
    insert into model_version (model, candidate_version, reference_digest) values ('m', '1', 'd'), ('m', '2', 'd');
    insert into slice (model, predicate, name, definition) values
        ('m', 'true', 'all', '{"where": []}'), ('m', 'lang=de', 'lang=de', '{}'), ('m', 'lang=fr', 'lang=fr', '{}');
    insert into batch (kind, worker, stored_at, captured_from, captured_to, n_rows, fold_seq, compared_model)
        values ('comparison', 'w', '2031-06-10', '2031-06-10', '2031-06-11', 1, 1, 'm'),
            ('comparison', 'w', '2031-06-10', '2031-06-10', '2031-06-11', 1, null, 'm');
    insert into fold (id, fold_seq, event_time, mass, n_detectors) values (1, 1, '2031-06-15', 0, 0);
"""


@pytest.fixture
async def database(postgres_dsn: str) -> AsyncIterator[Database]:
    """Return a database with 2,400 comparisons of a day that is five days old."""
    async with Database(postgres_dsn) as opened:
        async with opened.begin() as connection:
            await ensure_partitions(connection, DAY - timedelta(days=1), DAY + timedelta(days=1))
            for statement in BASE.split(";\n"):
                if statement.strip():
                    await connection.exec_driver_sql(statement)
            await connection.execute(text(ROWS), {"begin": MIDNIGHT, "n": 2400})
            await connection.exec_driver_sql(DIFFERENCES)
        yield opened


async def rows(database: Database, query: str, **values: Any) -> list[tuple[Any, ...]]:
    """Return the rows of a query, with NaN as a word."""
    async with database.begin() as connection:
        found = await connection.execute(text(query), values)
        return [tuple("NaN" if one != one else one for one in row) for row in found]  # noqa: PLR0124


async def test_every_row_is_the_same_once_it_is_condensed(database: Database) -> None:
    """Every column of the function and of both views, over all and over a part; two versions, three blocks."""
    questions = {
        "all": "select * from comparisons('-infinity', 'infinity') order by captured_at, exchange_id, item",
        "some": "select * from comparisons('2031-06-10 05:00+00', '2031-06-10 06:00:00+00') order by captured_at, exchange_id, item",
        "changed": "select * from comparisons('2031-06-10', '2031-06-11', '{2}', true) where flip and slice_ids && '{2}'"
        " order by captured_at, exchange_id, item",
        "item": "select * from item order by captured_at, exchange_id, item, slice_id",
        "items": "select * from items('2031-06-10 05:00+00', '2031-06-10 06:00+00') order by captured_at, exchange_id, item, slice_id",
        "slice_item": "select * from slice_item order by captured_at, exchange_id, item, slice_id",
    }
    before = {name: await rows(database, query) for name, query in questions.items()}
    assert all(before.values())
    done = await maintain(database, KEEP, NOW, ahead_days=3)
    assert done.n_condensed == 2400
    assert await rows(database, "select count(*) from comparison") == [(0,)]
    blocks = await rows(
        database,
        "select model_version_id, n, n_changed > 0, form from condensed_block order by model_version_id, captured_from",
    )
    assert blocks == [(1, 1024, True, 1), (1, 896, True, 1), (2, 480, True, 2)]
    assert {name: await rows(database, query) for name, query in questions.items()} == before
    assert (await maintain(database, KEEP, NOW, ahead_days=3)).n_condensed == 0
    sizes = "select pg_total_relation_size('comparison_20310610') > 200000"
    assert await rows(database, sizes) == [(True,)]
    await rows(database, "update condensed_block set condensed_at = now() - interval '2 hours' returning 1")
    await maintain(database, KEEP, NOW, ahead_days=3)
    assert await rows(database, sizes) == [(False,)]
    assert {name: await rows(database, query) for name, query in questions.items()} == before


async def test_what_waits_for_the_fold_is_not_condensed(database: Database) -> None:
    """Nor are days that the fold has just passed, or that are young."""
    await rows(
        database, "update comparison set batch_id = 2 where captured_at < '2031-06-10 01:00+00' returning 1"
    )
    waiting = (await rows(database, "select count(*) from comparison where batch_id = 2"))[0][0]
    for at, event in ((NOW, MIDNIGHT + timedelta(days=1, hours=23)), (MIDNIGHT + timedelta(days=3), NOW)):
        await rows(database, "update fold set event_time = :event returning 1", event=event)
        assert (await maintain(database, KEEP, at, ahead_days=3)).n_condensed == 0
    await rows(database, "update fold set event_time = :event returning 1", event=NOW)
    assert (await maintain(database, KEEP, NOW, ahead_days=3)).n_condensed == 2400 - waiting
    await rows(database, "update batch set fold_seq = 2 where id = 2 returning 1")
    assert (await maintain(database, KEEP, NOW, ahead_days=3)).n_condensed == waiting


async def test_a_block_goes_with_its_day(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """After retention_days, as its rows would have; in small transactions before."""
    monkeypatch.setattr(quantdrift.storage.admin.retention, "_CONDENSED_AT_ONCE", 500)
    assert (await maintain(database, KEEP, NOW, ahead_days=3)).n_condensed == 2400
    n_blocks = (await rows(database, "select count(*) from condensed_block"))[0][0]
    assert n_blocks == 10
    later = await maintain(database, KEEP, NOW + timedelta(days=6), ahead_days=3)
    assert (later.n_blocks, later.partitions_dropped) == (n_blocks, (DAY - timedelta(days=1), DAY))
    assert await rows(database, "select * from comparisons('-infinity', 'infinity')") == []


async def test_an_erased_exchange_leaves_its_block(database: Database, postgres_dsn: str) -> None:
    """What was with it in the block stays, byte for byte, and is condensed again."""
    everything = "select * from comparisons('-infinity', 'infinity') order by captured_at, exchange_id, item"
    await maintain(database, KEEP, NOW, ahead_days=3)
    before = await rows(database, everything)
    erased = {before[100][:2], before[2000][:2]}
    connection = await asyncpg.connect(postgres_dsn)
    try:
        await connection.execute(
            "select comparison_erase($1, $2)", [at for at, _ in erased], [one for _, one in erased]
        )
    finally:
        await connection.close()
    after = await rows(database, everything)
    assert after == [row for row in before if row[:2] not in erased]
    assert len(after) == len(before) - 4  # two items each
    assert (await maintain(database, KEEP, NOW, ahead_days=3)).n_condensed > 0
    assert await rows(database, everything) == after


async def test_single_exchanges_are_found_in_blocks(database: Database, postgres_dsn: str) -> None:
    """By request id and by another header, as a UUID, in capitals and as no UUID; and by the key of a label."""
    await rows(
        database,
        "insert into label (captured_at, exchange_id, item, model_version_id, label, candidate_right, reference_right)"
        " select captured_at, exchange_id, item, model_version_id, 'x', true, false from comparison"
        " where item = 0 and attributes ? 'header.lang' returning 1",
    )
    when: dict[str, Any] = {"start": MIDNIGHT, "end": MIDNIGHT + timedelta(days=1)}
    capitals = "A81BC81B-DEAD-4E5D-ABFF-90865D1E13B1"
    request_id = (await rows(database, "select md5('2')::uuid::text"))[0][0]

    def found() -> list[list[dict[str, Any]]]:
        with frames.arrow(postgres_dsn) as drift:
            return [
                drift.request(request_id).to_pylist(),
                drift.request(capitals).to_pylist(),
                drift.request("not a uuid").to_pylist(),
                drift.request('dé"', header="lang").to_pylist(),
                drift.labelled_items("m", **when).to_pylist(),
            ]

    async def labelled() -> Sequence[LabelOutcome]:
        async with database.begin() as connection:
            return await outcomes(connection, [1, 2], MIDNIGHT, MIDNIGHT + timedelta(days=1))

    before, of_labels = await asyncio.to_thread(found), await labelled()
    assert all(before)
    assert {outcome.model_version_id for outcome in of_labels} == {1, 2}
    await maintain(database, KEEP, NOW, ahead_days=3)
    assert str(await asyncio.to_thread(found)) == str(before)  # as text: NaN is not equal to itself
    assert await labelled() == of_labels


async def downgrade(dsn: str, revision: str) -> None:
    """Bring the schema back to a revision."""

    def down(connection: Connection) -> None:
        config = alembic_config()
        config.attributes["connection"] = connection
        command.downgrade(config, revision)

    engine = make_engine(dsn, settings={}, poolclass=NullPool)
    async with engine.begin() as connection:
        await connection.run_sync(down)
    await engine.dispose()


async def test_a_downgrade_makes_rows_of_blocks(database: Database, postgres_dsn: str) -> None:
    """Nothing is lost on the way back."""
    everything = "select * from comparison order by captured_at, exchange_id, item"
    before = await rows(database, everything)
    await maintain(database, KEEP, NOW, ahead_days=3)
    await downgrade(postgres_dsn, "0006")
    assert await rows(database, everything) == before


async def test_details_are_the_same_without_their_keys(database: Database, postgres_dsn: str) -> None:
    """Digit by digit, whatever they are; with 17 sets of keys they stay JSON. The revision before reads them, too."""
    details = "select captured_at, exchange_id, item, detail::text from comparisons('-infinity', 'infinity') order by 1, 2, 3"
    place = "(extract(epoch from captured_at)::bigint / 50 + item)"
    async with database.begin() as connection:
        await connection.execute(
            text(f"update comparison set detail = (cast(:details as jsonb[]))[1 + {place} % {len(DETAILS)}]"),
            {"details": list(DETAILS)},
        )
        await connection.exec_driver_sql(
            f"update comparison set detail = jsonb_build_object('key ' || {place} % 17, 1.0) where model_version_id = 2"
        )
    before = await rows(database, details)
    assert len({row[3] for row in before}) == len(DETAILS) + 17
    await maintain(database, KEEP, NOW, ahead_days=3)
    kept = "select model_version_id, cardinality(detail_formats) from condensed_block order by id"
    assert await rows(database, kept) == [(1, 4), (1, 4), (2, None)]
    assert await rows(database, details) == before
    of_some = (
        "select distinct captured_at, exchange_id, item, detail::text"
        " from some_items('-infinity', 'infinity', null, false, '{exchange_id,item,detail,slice_ids,in_slices,pi1,pi2}')"
    )
    assert set(await rows(database, of_some)) == set(before)
    await downgrade(postgres_dsn, "0011")
    assert await rows(database, details) == before
    blocks = "select count(*) from condensed_block where strpos(detail[1], chr(3)) > 0"
    assert await rows(database, blocks) == [(0,)]


async def test_exchanges_are_found_by_their_keys_in_rows_and_blocks(database: Database) -> None:
    """Ten that are rows, each asked for twice, and four of blocks of two versions: all their items, each once; a wrong time finds nothing."""
    await rows(
        database, "update comparison set batch_id = 2 where captured_at < '2031-06-10 01:00+00' returning 1"
    )
    await maintain(database, KEEP, NOW, ahead_days=3)
    keys = await rows(
        database,
        "select distinct captured_at, exchange_id from comparisons('-infinity', 'infinity') order by 1 limit 120",
    )
    chosen = [*keys[60:70], *keys[60:70], *keys[100:120:5], (keys[0][0], keys[1][1])]
    values = {"times": [at for at, _ in chosen], "ids": [str(one) for _, one in chosen]}
    found = await rows(
        database,
        "select * from items_of(cast(:times as timestamptz[]), cast(:ids as uuid[])) order by captured_at, exchange_id, item, slice_id",
        **values,
    )
    expected = await rows(
        database,
        "select * from item where (captured_at, exchange_id) in (select * from unnest(cast(:times as timestamptz[]), cast(:ids as uuid[])))"
        " order by captured_at, exchange_id, item, slice_id",
        **values,
    )
    assert len({row[:3] for row in expected}) > 20
    assert found == expected
