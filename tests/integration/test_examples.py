"""The exchanges that alerts show: the worst of each, found at once for all alerts of a fold."""

import json
import math
import random

import asyncpg
import msgspec
import pytest
from sqlalchemy import event

import quantdrift.storage.alerts.examples
from quantdrift.core.records import Metric, Verdict
from quantdrift.storage.alerts.alerts import DETAILS, LAST_EVENT
from quantdrift.storage.database import Database
from quantdrift.storage.fold.write import write
from quantdrift.storage.fold_rows import (
    BatchRows,
    ComparisonRow,
    Episode,
    FoldResult,
    Position,
    TransitionRow,
)
from tests.support.monitor.alert_cases import event_with
from tests.support.monitor.fold_stream import (
    ALL_ID,
    BEGIN_US,
    FAINT_ID,
    SECOND_US,
    batches,
    store_batch,
    store_catalog,
)

pytestmark = pytest.mark.integration

TEMPLATE = batches(1)[0].comparisons[0]
N_SLICES = 24
FIRST_ID = 100
TRACES = "https://traces.example/{trace_id}"


@pytest.fixture
async def record(record: asyncpg.Connection) -> asyncpg.Connection:
    """Return a connection to a fresh record with two dozen more slices."""
    await store_catalog(record)
    await record.execute(
        "insert into slice (id, model, predicate, name, definition) overriding system value"
        " select n, 'digits', 'p' || n, 's' || n, '{\"where\": []}' from generate_series($1::int, $2::int) n",
        FIRST_ID,
        FIRST_ID + N_SLICES - 1,
    )
    return record


def opened(
    slice_id: int,
    *,
    at_us: int,
    onset_us: int = BEGIN_US,
    fold_seq: int = 1,
    metric: Metric = Metric.DIVERGENCE,
) -> TransitionRow:
    """Return an alert of the version that `TEMPLATE` is of."""
    return TransitionRow(
        model_version_id=TEMPLATE.model_version_id,
        slice_id=slice_id,
        from_verdict=Verdict.UNKNOWN,
        to_verdict=Verdict.FIRING,
        at_us=at_us,
        fold_seq=fold_seq,
        episode=Episode.OPEN,
        metric=metric,
        onset_us=onset_us,
        reason="r",
        event=event_with(),
    )


async def told(
    database: Database, record: asyncpg.Connection, rows: list[TransitionRow]
) -> tuple[dict[int, list[str]], list[int]]:
    """Write alerts in one fold; return the examples of each slice, and what each look at the items returned."""
    n_read: list[int] = []
    outcome = FoldResult(
        position=Position(fold_seq=1), detectors=(), verdicts=(), transitions=tuple(rows), rollups=()
    )
    async with database.begin() as connection:
        event.listen(
            connection.sync_connection,
            "after_cursor_execute",
            lambda _c, cursor, statement, *_: (
                n_read.append(cursor.rowcount) if "from comparison" in statement else None
            ),
        )
        await write(connection, outcome, TRACES)
    details = {
        row["slice_id"]: json.loads(row["details"])
        for row in await record.fetch(f"select a.slice_id, {DETAILS} as details from alert a {LAST_EVENT}")
    }
    for one in details.values():
        assert one["traces"] == [TRACES.format(trace_id=example) for example in one["examples"]]
    return {slice_id: one["examples"] for slice_id, one in details.items()}, n_read


def worst(rows: list[tuple[int, ComparisonRow]], alarm: TransitionRow) -> list[str]:
    """Return what the examples of an alert must be, found the plain way; rows with the batch they came in."""
    best: dict[str, tuple[float, float]] = {}
    for fold_seq, row in rows:
        since_us = max(alarm.onset_us, alarm.at_us - 3600 * SECOND_US)
        if (
            row.model_version_id == alarm.model_version_id
            and alarm.slice_id in row.slice_ids
            and since_us <= row.captured_us <= alarm.at_us
            and fold_seq <= alarm.fold_seq
            and (row.flip or alarm.metric is not Metric.FLIP)
        ):
            rank = (-(row.flip or 0.0), -(row.divergence or 0.0))
            best[row.exchange_id] = min(best.get(row.exchange_id, rank), rank)
    return sorted(best, key=lambda exchange: (*best[exchange], exchange))[:5]


async def traffic(record: asyncpg.Connection) -> list[tuple[int, ComparisonRow]]:
    """Store four folded batches over two hours; each item lies in `all` and two more slices, which differ in KL.

    The largest slices diverge least: among the worst items of all there are none of theirs.
    """
    rng = random.Random(5)
    stored = []
    for fold_seq in range(1, 5):
        rows = []
        for number in range(200):
            common = 0 if rng.random() < 0.5 else rng.randrange(2, N_SLICES // 2)
            rare = rng.randrange(N_SLICES // 2, N_SLICES)
            rows.append(
                msgspec.structs.replace(
                    TEMPLATE,
                    exchange_id=f"{fold_seq * 1000 + number // 2:032x}",
                    item=number % 2,
                    captured_us=BEGIN_US + (fold_seq * 1800 + number) * SECOND_US,
                    model_version_id=1 if rng.random() < 0.9 else 2,
                    slice_ids=(ALL_ID, FIRST_ID + common, FIRST_ID + rare),
                    flip=float(common > 0 and rng.random() < 0.1),
                    divergence=rng.random() * (1e-6 if common == 0 else 0.01 * common),
                )
            )
        await store_batch(
            record, BatchRows(fold_seq=0, stored_us=rows[-1].captured_us, comparisons=tuple(rows))
        )
        stored += [(fold_seq, row) for row in rows]
    await record.execute("update batch set fold_seq = id")
    return stored


def alarms() -> list[TransitionRow]:
    """Return one alert per slice, with onsets, times and folds of their own."""
    return [
        opened(
            FIRST_ID + number,
            at_us=BEGIN_US + (3 + number % 2) * 1900 * SECOND_US,
            onset_us=BEGIN_US + number * 240 * SECOND_US,
            fold_seq=3 + number // 2 % 2,
        )
        for number in range(N_SLICES)
        if number != 1  # nothing lies in it
    ]


async def test_the_examples_of_an_alert_are_the_worst_and_few(
    database: Database, record: asyncpg.Connection
) -> None:
    """Flips first, then the largest divergence, whatever else the hour holds: only these leave the store."""
    rows = tuple(
        msgspec.structs.replace(
            TEMPLATE,
            exchange_id=f"{number:032x}",
            item=item,
            captured_us=BEGIN_US + number * SECOND_US,
            flip=float(number == 7 and item == 1),
            divergence=math.nan if number == 3 else float(number % 50),
        )
        for number in range(100)
        for item in range(2)
    )
    await store_batch(record, BatchRows(fold_seq=0, stored_us=rows[-1].captured_us, comparisons=rows))
    await record.execute("update batch set fold_seq = 1")
    found, n_read = await told(database, record, [opened(ALL_ID, at_us=rows[-1].captured_us)])
    assert found == {ALL_ID: [f"{number:032x}" for number in (7, 49, 99, 48, 98)]}
    assert n_read == [5]


async def test_many_alerts_in_one_fold_are_one_look_at_the_items(
    database: Database, record: asyncpg.Connection
) -> None:
    """Each has its own worst exchanges, of its own window and fold."""
    stored = await traffic(record)
    found, n_read = await told(database, record, alarms())
    expected = {alarm.slice_id: worst(stored, alarm) for alarm in alarms()}
    assert found == expected
    assert sum(len(one) == 5 for one in expected.values()) > N_SLICES / 2
    assert len(n_read) == 1


async def test_a_slice_that_diverges_little_has_its_worst_all_the_same(
    database: Database, record: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is crowded out of the worst items of all, and asked for again without the others: once, not per alert."""
    monkeypatch.setattr(quantdrift.storage.alerts.examples, "DEPTH", 250)
    stored = await traffic(record)
    found, n_read = await told(database, record, alarms())
    assert found == {alarm.slice_id: worst(stored, alarm) for alarm in alarms()}
    assert 1 < len(n_read) <= quantdrift.storage.alerts.examples.ROUNDS


async def test_an_alert_goes_out_without_examples_where_the_items_cannot_be_read(
    database: Database, record: asyncpg.Connection, postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody holds the table: the fold is not held up for longer than its bound, and is written."""
    monkeypatch.setattr(quantdrift.storage.alerts.examples, "STATEMENT_S", 0.05)
    await traffic(record)
    other = await asyncpg.connect(postgres_dsn)
    async with other.transaction():
        await other.execute("lock table comparison in access exclusive mode")
        found, _ = await told(database, record, [opened(FAINT_ID, at_us=BEGIN_US)])
    await other.close()
    assert found == {FAINT_ID: []}


async def test_an_alert_about_nothing_that_is_kept_has_no_examples(
    database: Database, record: asyncpg.Connection
) -> None:
    """Its hour holds no items: one look, and no more."""
    await traffic(record)
    found, n_read = await told(database, record, [opened(FAINT_ID, at_us=BEGIN_US)])
    assert (found, n_read) == ({FAINT_ID: []}, [0])


async def test_an_alert_that_flips_decided_has_no_example_that_did_not_flip(
    database: Database, record: asyncpg.Connection
) -> None:
    """Fewer examples are shown rather than others; a slice without a flip has none."""
    rows = await traffic(record)
    at_us = max(row.captured_us for _, row in rows)
    alarms = [
        opened(slice_id, at_us=at_us, fold_seq=4, metric=Metric.FLIP)
        for slice_id in range(FIRST_ID, FIRST_ID + N_SLICES)
    ]
    found, _ = await told(database, record, alarms)
    assert found == {alarm.slice_id: worst(rows, alarm) for alarm in alarms}
    assert found[FIRST_ID] == []
    assert any(found.values())
