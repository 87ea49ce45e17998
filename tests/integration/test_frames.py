"""The drift tables as frames, and their export, against a real database as a reader."""

import json
import math
import shutil
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import asyncpg
import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from quantdrift import frames
from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.frames.connection import SnapshotConnection
from quantdrift.frames.export import Day, Request, days_of, export
from tests.support.commands import invoked
from tests.support.storage.comparisons import Comparison, make_partitions, store_comparisons

pytestmark = pytest.mark.integration

NOON = datetime(2031, 6, 15, 12, tzinfo=UTC)
DAYS = [NOON.date() - timedelta(days=1), NOON.date()]
LATE = timedelta(hours=1)
RANGE: dict[str, Any] = {"start": NOON - timedelta(days=2), "end": NOON + timedelta(days=1)}


@pytest.fixture
async def dsn(record: asyncpg.Connection, postgres_dsn: str) -> str:
    """Return the address of a database with four exchanges on two days; the flipped ones have weight 10."""
    await record.execute("""
        insert into model_version (model, candidate_version, reference_digest) values ('digits', 'int8', 'abc');
        insert into slice (model, predicate, name, definition) values
            ('digits', 'true', 'all', '{}'), ('digits', 'header.x-scanner = "faint"', 'scanner=faint', '{}');
    """)
    await make_partitions(record, DAYS)
    rows = [
        Comparison(
            captured_at=NOON - timedelta(days=number % 2, minutes=number),
            exchange_id=f"00000000-0000-0000-0000-{number:012d}",
            batch_id=1,
            model_version_id=1,
            slice_ids=(1, 2) if number < 2 else (1,),
            pi1=0.1 if number < 2 else 1.0,
            flip=number < 2,
            divergence=float("inf") if number == 0 else number / 10,
            attributes=json.dumps({"header.x-request-id": f"r{number}"}),
            detail=json.dumps({"candidate_top": 8 if number < 2 else 3, "reference_top": 3}),
        )
        for number in range(4)
    ]
    await store_comparisons(record, rows)
    return postgres_dsn


def columns_of(frame: Any) -> dict[str, list[Any]]:
    """Return the columns of a frame of any kind as lists."""
    if isinstance(frame, pd.DataFrame):
        return {name: frame[name].tolist() for name in frame.columns}
    return dict(frame.to_pydict() if isinstance(frame, pa.Table) else frame.to_dict(as_series=False))


@pytest.mark.parametrize(
    ("opened", "kind"),
    [(frames.pandas, pd.DataFrame), (frames.polars, pl.DataFrame), (frames.arrow, pa.Table)],
)
def test_each_kind_of_frame_has_the_same_rows(dsn: str, opened: Callable[[str], Any], kind: type) -> None:
    """Items with their weights, the worst first with infinity kept, and which answer became which."""
    with opened(dsn) as drift:
        items: Any = drift.items("digits", columns=["flip", "weight", "divergence"], **RANGE)
        assert issubclass(type(items), kind)
        assert frames.weighted_mean(items["flip"], items["weight"]) == pytest.approx(20 / 22)
        assert frames.weighted_quantile(items["divergence"], items["weight"], 0.4) == 0.1
        worst = columns_of(drift.worst("digits", n=2, **RANGE))
        assert worst["divergence"] == [float("inf"), 0.3]
        assert worst["request_id"] == ["r0", "r3"]
        assert worst["exchange_id"][0] == "00000000-0000-0000-0000-000000000000"
        directions = columns_of(drift.direction("digits", **RANGE))
        assert list(
            zip(directions["reference_class"], directions["candidate_class"], directions["n"], strict=True)
        ) == [
            (3, 8, 2),
        ]
        assert directions["share"] == pytest.approx([1.0])
        found = columns_of(drift.request("r2"))
        assert found["exchange_id"] == ["00000000-0000-0000-0000-000000000002"]


def test_every_table_can_be_read(dsn: str) -> None:
    """Each function returns a frame, with rows or without, and its columns are those of the view."""
    with frames.arrow(dsn) as drift:
        tables = {
            "slices": drift.slices(model="digits"),
            "hours": drift.history("digits", slice="scanner=faint", **RANGE),
            "days": drift.history("digits", step="day", **RANGE),
            "alerts": drift.alerts(**RANGE),
            "coverage": drift.coverage(**RANGE),
            "not observed": drift.not_observed(model="digits"),
            "releases": drift.releases(model="digits"),
            "changes": drift.changes(start=datetime(2000, 1, 1, tzinfo=UTC)),
        }
    assert {name: "flip_budget" in table.column_names for name, table in tables.items()}["days"]
    assert "release" in tables["changes"]["what"].to_pylist()
    assert all(table.num_columns > 3 for table in tables.values())


async def test_an_alert_that_is_open_is_among_those_of_a_week_however_old_it_is(
    dsn: str, record: asyncpg.Connection
) -> None:
    """It opened before the week and still is open, or ended in the week; one that ended before, or opens after it, is not."""
    day = timedelta(days=1)
    for slice_id, begin, end in (
        (1, -30 * day, None),
        (2, -30 * day, -day),
        (2, -30 * day, -20 * day),
        (2, 2 * day, None),
    ):
        await record.execute(
            "insert into alert (model_version_id, slice_id, severity, metric, onset_at, opened_at, resolved_at, ended, details)"
            " values (1, $1, 'warning', 'flip', $2, $2, $3, $4, '{}')",
            slice_id,
            NOON + begin,
            NOON + end if end else None,
            "recovered" if end else None,
        )
    with frames.arrow(dsn) as drift:
        found = columns_of(drift.alerts(model="digits", **RANGE))
    assert sorted(zip(found["slice"], found["resolved_at"], strict=True)) == [
        ("all", None),
        ("scanner=faint", NOON - day),
    ]


async def test_what_was_not_observed_can_be_asked_of_a_week(dsn: str, record: asyncpg.Connection) -> None:
    """The last 24 hours by default, or the time that is given."""
    await record.execute(
        "insert into quarantine (stream_sequence, digest, model, quarantined_at, reason, detail, payload)"
        " values (1, 'a', 'digits', now() - interval '3 days', 'schema', '', '')"
    )
    with frames.arrow(dsn) as drift:
        assert drift.not_observed(model="digits").num_rows == 0
        week = columns_of(drift.not_observed(model="digits", period=timedelta(days=7)))
    assert (week["what"], week["requests"]) == (["not comparable"], [1])


def test_a_query_of_ones_own_reads_and_changes_nothing(dsn: str) -> None:
    """Parameters are no text of the query; the message is the server's, and the connection goes on."""
    with frames.arrow(dsn) as drift:
        assert drift.sql("select $1::text as it", "'; drop table slice; --")["it"].to_pylist() == [
            "'; drop table slice; --"
        ]
        for query, message in (
            ("delete from slice", "read-only transaction"),
            ("select nothing from slice", 'column "nothing" does not exist'),
        ):
            with pytest.raises(OperatorError, match=message):
                drift.sql(query)
        assert drift.sql("select 1 as one")["one"].to_pylist() == [1]
    slow = SnapshotConnection(dsn, statement_timeout=timedelta(milliseconds=50))
    with pytest.raises(RetryError, match="took too long"):
        slow.table("select pg_sleep(30)")
    slow.close()


def exported(dsn: str, directory: Path, request: Request, now: datetime) -> list[Day]:
    """Export both days at a time."""
    connection = SnapshotConnection(dsn)
    try:
        return list(export(connection, directory, DAYS, request, late=LATE, now=lambda: now))
    finally:
        connection.close()


def files_in(directory: Path) -> list[str]:
    """Return the names of all files below a directory."""
    return sorted(path.name for path in directory.rglob("*") if path.is_file())


async def test_an_export_is_read_by_duckdb_and_written_again_only_where_it_may_have_changed(
    dsn: str, record: asyncpg.Connection, tmp_path: Path
) -> None:
    """The day that is over is left alone; the day that late exchanges may still reach is written again."""
    out = tmp_path / "week"
    at = NOON + timedelta(minutes=1)
    days = exported(dsn, out, Request(), at)
    assert [(day.day, day.rows, day.written) for day in days] == [(DAYS[0], 3, True), (DAYS[1], 3, True)]
    await store_comparisons(
        record,
        [
            Comparison(
                captured_at=NOON,
                exchange_id="00000000-0000-0000-0000-000000000009",
                batch_id=1,
                model_version_id=1,
            )
        ],
    )
    days = exported(dsn, out, Request(), at + timedelta(minutes=1))
    assert [(day.rows, day.written) for day in days] == [(3, False), (4, True)]
    query = f"select slice, day, count(*), sum(weight) from '{out}/*/*.parquet' group by 1, 2 order by 1, 2"
    relation = duckdb.sql(query)
    assert relation is not None
    assert relation.fetchall() == [
        ("all", DAYS[0], 2, 11.0),
        ("all", DAYS[1], 3, 12.0),
        ("scanner=faint", DAYS[0], 1, 10.0),
        ("scanner=faint", DAYS[1], 1, 10.0),
    ]
    assert files_in(out) == ["items.parquet"] * 2


def test_a_directory_holds_one_choice_and_nothing_of_others(dsn: str, tmp_path: Path) -> None:
    """Another choice of slices, or a file that somebody else wrote, is refused by name."""
    exported(dsn, tmp_path, Request(slice="all"), NOON)
    with pytest.raises(
        OperatorError, match="holds the slice all of all models, and not all slices of digits"
    ):
        exported(dsn, tmp_path, Request(model="digits"), NOON)
    (tmp_path / f"day={DAYS[0]}" / "items.parquet").write_bytes(b"something else")
    with pytest.raises(OperatorError, match="was not written by `quantdrift export`"):
        exported(dsn, tmp_path, Request(slice="all"), NOON)


async def test_an_export_that_is_interrupted_goes_on(
    dsn: str, record: asyncpg.Connection, tmp_path: Path
) -> None:
    """What was whole stays, and nothing half-written is under the name of a file."""
    late = NOON + timedelta(days=2)
    connection = SnapshotConnection(dsn)
    days = export(connection, tmp_path, DAYS, Request(), late=LATE, now=lambda: late)
    assert next(days).written
    await record.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where datname = current_database() and pid <> pg_backend_pid()"
    )
    with pytest.raises((OperatorError, RetryError)):
        next(days)
    connection.close()
    assert files_in(tmp_path) == ["items.parquet"]
    assert [day.written for day in exported(dsn, tmp_path, Request(), late)] == [False, True]


def test_the_command_writes_a_directory_and_says_what_is_in_it(dsn: str, tmp_path: Path) -> None:
    """A person sees rows and days, a program JSON; days without data have an empty file."""
    (tmp_path / "config.toml").write_text('[[models]]\nname = "digits"\n')
    words = ("export", "--out", "out", "--from", "2031-06-13", "--to", "2031-06-15")
    done = invoked(*words, directory=tmp_path, QUANTDRIFT_DSN=dsn)
    assert (done.returncode, done.stdout) == (0, "6 rows of 3 days in out\n")
    done = invoked(*words, "--json", directory=tmp_path, QUANTDRIFT_DSN=dsn)
    assert [day["rows"] for day in json.loads(done.stdout)["days"]] == [0, 3, 3]
    shutil.rmtree(tmp_path / "out")
    done = invoked(*words, "--model", "tippo", directory=tmp_path, QUANTDRIFT_DSN=dsn)
    assert "check the names of --model and --slice" in done.stdout
    done = invoked(
        "export",
        "--out",
        "out",
        "--from",
        "2031-06-16",
        "--to",
        "2031-06-15",
        directory=tmp_path,
        QUANTDRIFT_DSN=dsn,
    )
    assert (done.returncode, "is after --to" in done.stderr) == (2, True)


def test_the_days_of_a_time_are_those_that_it_touches() -> None:
    """In UTC; the end does not belong to it."""
    assert days_of(NOON, NOON + timedelta(hours=12)) == [date(2031, 6, 15)]
    assert days_of(NOON, NOON + timedelta(hours=13)) == [date(2031, 6, 15), date(2031, 6, 16)]


async def test_attributes_become_columns_and_labels_say_what_each_item_did(
    record: asyncpg.Connection, dsn: str
) -> None:
    """A recorded attribute is a column of texts; a labelled item was hurt, helped, right, wrong, or changed without harm."""
    await record.execute(
        "insert into label (captured_at, exchange_id, item, model_version_id, label, candidate_right, reference_right)"
        " select captured_at, exchange_id, item, model_version_id, 'x',"
        " right(exchange_id::text, 1) in ('1', '2'), right(exchange_id::text, 1) = '2' from comparison"
    )
    with frames.arrow(dsn) as drift:
        items = drift.items(
            "digits", columns=["flip"], attributes=["header.x-request-id", "header.x-absent"], **RANGE
        )
        everything = drift.items("digits", attributes=["header.x-request-id"], **RANGE)
        labelled = drift.labelled_items("digits", **RANGE)
        of_slice = drift.labelled_items("digits", slice="scanner=faint", version="int8", **RANGE)
    assert sorted(items["header.x-request-id"].to_pylist()) == ["r0", "r1", "r2", "r3"]
    assert items.column_names == ["flip", "header.x-request-id", "header.x-absent"]
    assert set(items["header.x-absent"].to_pylist()) == {None}
    assert {"captured_at", "attributes", "header.x-request-id"} <= set(everything.column_names)
    did = dict(zip(labelled["request_id"].to_pylist(), labelled["did"].to_pylist(), strict=True))
    assert did == {"r0": "did not matter", "r1": "helped", "r2": "right", "r3": "wrong"}
    assert sorted(of_slice["did"].to_pylist()) == ["did not matter", "helped"]


async def test_a_trend_is_by_local_day_with_intervals_and_without_what_is_left_out(dsn: str) -> None:
    """Near midnight a local day is another one than in UTC; a mean is that of `estimate` over the items of that day."""
    with frames.arrow(dsn) as drift:
        days = drift.trend("digits", slices=["all", "scanner=faint"], timezone="Pacific/Auckland", **RANGE)
        utc = drift.trend("digits", slices=["all"], **RANGE)
        fewer = drift.trend("digits", not_in=[DAYS[0]], **RANGE)
        without = drift.trend(
            "digits", not_in=[(NOON - timedelta(hours=1), NOON + timedelta(hours=1))], step="week", **RANGE
        )
        items = drift.items("digits", **RANGE)
        with pytest.raises(ValueError, match="no time zone"):
            drift.trend("digits", timezone="Mars")
    assert set(days["slice"].to_pylist()) == {"all", "scanner=faint"}
    assert set(days["day"].to_pylist()) == {
        at.astimezone(ZoneInfo("Pacific/Auckland")).date() for at in items["captured_at"].to_pylist()
    }
    assert utc["day"].to_pylist() == DAYS
    assert fewer["day"].to_pylist() == [DAYS[1]]
    assert sum(without["n"].to_pylist()) == sum(row["n"] for row in utc.to_pylist() if row["day"] == DAYS[0])
    whole = frames.estimate(items)
    total = sum(utc["n"].to_pylist())
    assert total == whole["n"].to_pylist()[0]


def test_the_edges_are_those_of_the_bins() -> None:
    """The smallest, the largest and a value in the middle fall into the bins that the monitor counts them in."""
    edges = frames.divergence_edges()
    assert (len(edges), edges[0], edges[-1]) == (65, 0.0, float("inf"))
    for value in (0.0, 1e-7, 3e-4, 0.02, 1.0, 9.9, 50.0):
        expected = min(max(math.floor(64 * math.log(max(value, 1e-12) / 1e-6) / math.log(1e7)), 0), 63)
        assert int(np.histogram([value], edges)[0].argmax()) == expected
