"""What is kept, for how long, and what is forgotten."""

from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from sqlalchemy import ARRAY, Boolean, Column, DateTime, LargeBinary, Text, text
from sqlalchemy.dialects.postgresql import INT8MULTIRANGE, JSONB, UUID

import quantdrift.storage.admin.retention
from quantdrift.core.config.schema import Storage
from quantdrift.storage.admin.retention import (
    ENDS,
    Maintenance,
    maintain,
    maintain_by_two_clocks,
    thin_tallies,
)
from quantdrift.storage.baselines import baselines
from quantdrift.storage.database import Database
from quantdrift.storage.fold.read import resume
from quantdrift.storage.schema.partitions import AHEAD_DAYS, ensure_partitions, partition_days
from quantdrift.storage.schema.tables import Base

pytestmark = pytest.mark.integration

NOW = datetime(2031, 6, 15, 9, 30, tzinfo=UTC)
KEEP = Storage(retention_days=10, quarantine_days=1)
BOOT, OVER = "0" * 32, "1" * 32
TALLY = text("""
    insert into tally values (:source, :boot, 'default', :sequence, :at, :batch, 9, 9, 0, 9, '{}', 0)
""")
BATCH = text("""
    insert into batch (kind, worker, stored_at, captured_from, captured_to, n_rows)
    values ('tally', 'w', :at, :at, :at, 1) returning id
""")
NOISE = text("""
    insert into noise (exchange_id, item, side, captured_at, batch_id, model_version_id, policy_id, pi1, pi2, flip)
    values (gen_random_uuid(), 0, 'reference', :at, :batch, 1, 1, 1, 1, true)
""")
QUARANTINE = text("""
    insert into quarantine (stream_sequence, digest, model, quarantined_at, reason, detail, payload)
    values (:n, '', 'm', :at, 'decode', '', 'bytes')
""")
MODEL = text("""
    with v as (
        insert into model_version (model, candidate_version, reference_digest) values ('m', '1', 'd') returning id
    )
    insert into slice (model, predicate, name, definition) values ('m', 'p', 'p', '{}'), ('m', 'q', 'q', '{}')
""")
DETECTOR = text("""
    insert into detector (model_version_id, slice_id, metric, kind, state, budget, n_groups, evidence, fold_seq,
        created_at, last_at, retired_at)
    values (1, :slice, :metric, :kind, '', 0, 0, 0, 1, now(), now(), cast(:retired_at as timestamptz))
""")
BASELINE = text("""
    insert into baseline (model_version_id, slice_id, metric, kind, source, made_by, made_at, reason, n_groups, content,
        fold_seq)
    values (1, :slice, :metric, :kind, :source, 'ada', :made_at, :reason, 5, cast(:content as jsonb), :fold_seq)
""")
FOLDED = text("""
    insert into batch (kind, worker, stored_at, captured_from, captured_to, n_rows, fold_seq)
    values ('comparison', 'w', :at, :at, :at, 1, 7)
""")
# Slice, metric, kind, and how many days ago it was retired.
DETECTORS = (
    (1, "flip", "change", None),
    (1, "divergence", "tail", None),
    (2, "flip", "change", 25),
    (2, "divergence", "tail", 12),
)
# Why, slice, metric, kind, source, days ago, and in force since which fold.
BASELINES = (
    ("superseded long ago", 1, "flip", "change", "learned", 50, 1),
    ("superseded, in a batch that is kept", 1, "flip", "change", "accepted", 40, 7),
    ("in force", 1, "flip", "change", "accepted", 30, 2),
    ("about the one in force", 1, "flip", "change", "frozen", 25, 2),
    ("superseded lately", 1, "divergence", "tail", "learned", 50, 1),
    ("waits for the monitor", 1, "divergence", "tail", "accepted", 45, None),
    ("in force since lately", 1, "divergence", "tail", "accepted", 5, 3),
    ("retired long ago", 2, "flip", "change", "learned", 60, 1),
    ("a budget", 2, "flip", "budget", "imported", 60, 1),
    ("retired lately", 2, "divergence", "tail", "learned", 60, 1),
)


def ago(days: float) -> datetime:
    """Return the time so many days before now."""
    return NOW - timedelta(days=days)


@pytest.fixture
async def database(postgres_dsn: str):  # type: ignore[no-untyped-def]
    """Return a database without the partitions that the upgrade made today."""
    async with Database(postgres_dsn) as opened:
        async with opened.begin() as connection:
            for day in await partition_days(connection):
                await connection.execute(text(f"drop table comparison_{day:%Y%m%d}"))
        yield opened


async def test_partitions_come_and_go_with_the_days(database: Database) -> None:
    """Yesterday to the days ahead are made; a day goes when all of it is too old."""
    async with database.begin() as connection:
        await ensure_partitions(connection, date(2031, 6, 3), date(2031, 6, 6))
    done = await maintain(database, KEEP, NOW, ahead_days=3)
    assert done.partitions_made == tuple(date(2031, 6, day) for day in range(14, 19))
    assert done.partitions_dropped == (date(2031, 6, 3), date(2031, 6, 4))
    assert done.partitions_busy == ()
    async with database.begin() as connection:
        days = await partition_days(connection)
    assert [day.day for day in days] == [5, 6, 14, 15, 16, 17, 18]


async def test_nothing_goes_by_one_wrong_clock(database: Database) -> None:
    """The clock of the monitor is years ahead of that of Postgres: by that one nothing is old, and each finds its next days."""
    async with database.begin() as connection:
        today = (await connection.execute(text("select now()"))).scalar_one().date()
        await ensure_partitions(connection, today - timedelta(days=3), today)
    ahead = datetime.now(UTC) + timedelta(days=30)
    done = await maintain_by_two_clocks(database, KEEP, ahead)
    assert done.partitions_dropped == ()
    async with database.begin() as connection:
        days = await partition_days(connection)
    assert days == [
        today + timedelta(days=n) for n in range(-3, (ahead.date() - today).days + AHEAD_DAYS + 1)
    ]


async def test_a_partition_in_use_is_left_for_the_next_round(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is stopped for the sake of tidiness, and the rest is done all the same."""
    monkeypatch.setattr(quantdrift.storage.admin.retention, "_DROP_TIMEOUT_S", 0.05)
    async with database.begin() as connection:
        await ensure_partitions(connection, date(2031, 6, 1), date(2031, 6, 1))
    async with database.begin() as reader:
        await reader.execute(text("select count(*) from comparison_20310601"))
        busy = await maintain(database, KEEP, NOW, ahead_days=3)
    assert (busy.partitions_dropped, busy.partitions_busy) == ((), (date(2031, 6, 1),))
    assert (await maintain(database, KEEP, NOW, ahead_days=3)).partitions_dropped == (date(2031, 6, 1),)


async def test_noise_goes_with_its_batch(database: Database) -> None:
    """What is known of it stays: sums, not items."""
    async with database.begin() as connection:
        await connection.execute(MODEL)
        for days in (11, 1):
            batch = await connection.scalar(BATCH, {"at": NOW - timedelta(days=days)})
            await connection.execute(NOISE, {"at": NOW - timedelta(days=days), "batch": batch})
    await maintain(database, KEEP, NOW, ahead_days=3)
    async with database.begin() as connection:
        kept = (await connection.scalars(text("select captured_at from noise"))).all()
    assert kept == [NOW - timedelta(days=1)]


async def test_tallies_keep_what_later_ones_are_measured_against(database: Database) -> None:
    """Old tallies go, but for the last one before the border of a boot that goes on; its batch stays with it."""
    async with database.begin() as connection:
        for boot, days in ((BOOT, (12, 11, 10.5, 9, 0)), (OVER, (12, 11))):
            for sequence, at in enumerate(map(ago, days), start=1):
                batch = await connection.scalar(BATCH, {"at": at})
                await connection.execute(
                    TALLY, {"source": "s", "boot": boot, "sequence": sequence, "at": at, "batch": batch}
                )
    before = await coverage(database)
    done = await maintain(database, KEEP, NOW, ahead_days=3)
    assert (done.n_tallies, done.n_batches) == (4, 4)
    async with database.begin() as connection:
        kept = (await connection.execute(text("select boot, sequence from tally order by at"))).all()
        assert [row.sequence for row in kept] == [3, 4, 5]
        assert await connection.scalar(text("select count(*) from batch")) == 3
    assert (await coverage(database)) == before


async def test_after_an_hour_a_tally_stays_for_every_three_minutes(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums over hours stay exact, the gaps stay shorter than those after which a sidecar counts as ended, and new ones stay all."""
    monkeypatch.setattr(quantdrift.storage.admin.retention, "_CHUNK", 100)
    begin = NOW - timedelta(hours=3)
    step = timedelta(seconds=10)
    async with database.begin() as connection:
        batch = await connection.scalar(BATCH, {"at": begin})
        for boot, shift in ((BOOT, 0.0), (OVER, 7.3)):
            await connection.execute(
                text("""
                    insert into tally
                    select 's', :boot, 'default', n, cast(:begin as timestamptz) + make_interval(secs => n * 10 + :shift), :batch,
                        n * n, n, 0, n, '{}', 0
                    from generate_series(0, 1079) n
                """),
                {"boot": boot, "begin": begin, "shift": shift, "batch": batch},
            )
    before = await coverage(database)
    assert await thin_tallies(database, None) == 0  # nothing is folded yet
    async with database.begin() as connection:
        await connection.execute(
            text("insert into fold (id, fold_seq, event_time, mass, n_detectors) values (1, 1, :now, 0, 0)"),
            {"now": NOW},
        )
    folded = NOW - timedelta(minutes=75)
    assert await thin_tallies(database, begin + timedelta(hours=1)) > 0
    assert await thin_tallies(database, None) > 0
    assert await thin_tallies(database, None) == 0
    assert await coverage(database) == before
    async with database.begin() as connection:
        rows = await connection.execute(text("select boot::text, at from tally order by boot, at"))
        times: dict[str, list[datetime]] = {}
        for row in rows:
            times.setdefault(row.boot, []).append(row.at)
    assert len(times) == 2
    for of_boot in times.values():
        gaps = [later - earlier for earlier, later in pairwise(of_boot)]
        assert max(gaps) <= timedelta(minutes=3) + step
        assert sum(at < folded for at in of_boot) == 35  # of 105 minutes
        assert sum(at >= folded for at in of_boot) == 75 * 6


async def coverage(database: Database) -> list[tuple[datetime, int]]:
    """Return what the sidecars saw per hour since the border."""
    query = text("select hour, offered from coverage_hour where hour >= :since order by hour")
    async with database.begin() as connection:
        return [(row.hour, row.offered) for row in await connection.execute(query, {"since": ago(10)})]


async def test_payloads_are_forgotten_before_the_fact(database: Database) -> None:
    """A quarantined exchange loses its payload after a day, and the row itself with everything else."""
    async with database.begin() as connection:
        for n, days in enumerate((0.5, 2, 11)):
            await connection.execute(QUARANTINE, {"n": n, "at": ago(days)})
    done = await maintain(database, KEEP, NOW, ahead_days=3)
    assert (done.n_payloads, done.n_quarantined) == (2, 1)
    async with database.begin() as connection:
        rows = (await connection.execute(text("select payload from quarantine order by id"))).scalars().all()
    assert rows == [b"bytes", None]


async def test_a_policy_goes_after_what_it_sampled(database: Database) -> None:
    """Hundreds are made on a day: the record keeps those whose comparisons it may still hold."""
    async with database.begin() as connection:
        for days in (5, 11, 13):
            values = {"epoch": f"{days} days", "at": ago(days)}
            await connection.execute(
                text("insert into policy (epoch, definition, first_seen_at) values (:epoch, '{}', :at)"),
                values,
            )
    assert (await maintain(database, KEEP, NOW, ahead_days=3)).n_policies == 1
    async with database.begin() as connection:
        kept = (await connection.execute(text("select epoch from policy order by id"))).scalars().all()
    assert kept == ["5 days", "11 days"]


async def test_what_is_measured_against_no_more_goes_and_who_decided_stays(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contents of superseded and retired baselines, and rows of retired detectors, once that is long ago."""
    monkeypatch.setattr(quantdrift.storage.admin.retention, "SUPERSEDED_AFTER", timedelta(days=20))
    keep = KEEP
    async with database.begin() as connection:
        await connection.execute(MODEL)
        for name, metric, kind, days in DETECTORS:
            retired = None if days is None else ago(days)
            await connection.execute(
                DETECTOR, {"slice": name, "metric": metric, "kind": kind, "retired_at": retired}
            )
        for reason, name, metric, kind, source, days, fold_seq in BASELINES:
            content = {"frozen": None, "imported": '{"budget": 0.1}'}.get(source, '{"n_groups": 5}')
            values = {"reason": reason, "slice": name, "metric": metric, "kind": kind, "content": content}
            await connection.execute(
                BASELINE, {**values, "source": source, "made_at": ago(days), "fold_seq": fold_seq}
            )
        await connection.execute(FOLDED, {"at": ago(5)})
        before = await baselines(connection, history=True)
    done = await maintain(database, keep, NOW, ahead_days=3)
    assert (done.n_contents, done.n_detectors) == (2, 1)
    async with database.begin() as connection:
        after = await baselines(connection, history=True)
        left = await connection.execute(
            text("select metric, kind from detector where retired_at is not null")
        )
        assert [tuple(row) for row in left] == [("divergence", "tail")]
        assert {row.slice_id for row in (await resume(connection)).imported} == {2}
    gone = [one for one, then in zip(after, before, strict=True) if one != then]
    assert {one.reason for one in gone} == {"superseded long ago", "retired long ago"}
    assert [msgspec.structs.replace(one, content=None) for one in before] == [
        msgspec.structs.replace(one, content=None) for one in after
    ]
    again = await maintain(database, keep, NOW, ahead_days=3)
    assert (again.n_contents, again.n_detectors) == (0, 0)


async def test_nothing_goes_that_a_kept_comparison_was_measured_against(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where comparisons are kept for longer, so is what they are folded against again."""
    monkeypatch.setattr(quantdrift.storage.admin.retention, "SUPERSEDED_AFTER", timedelta(days=20))
    keep = msgspec.structs.replace(KEEP, retention_days=365)
    async with database.begin() as connection:
        await connection.execute(MODEL)
        values = {"slice": 1, "metric": "flip", "kind": "change"}
        await connection.execute(DETECTOR, {**values, "retired_at": ago(100)})
    assert (await maintain(database, keep, NOW, ahead_days=3)).n_detectors == 0


async def test_many_rows_go_in_small_transactions(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows than one transaction takes are all deleted, and a second round finds nothing."""
    monkeypatch.setattr(quantdrift.storage.admin.retention, "_CHUNK", 4)
    async with database.begin() as connection:
        for n in range(10):
            await connection.execute(QUARANTINE, {"n": n, "at": ago(30)})
    assert (await maintain(database, KEEP, NOW, ahead_days=3)).n_quarantined == 10
    assert await maintain(database, KEEP, NOW, ahead_days=3) == Maintenance(
        partitions_made=(),
        partitions_dropped=(),
        partitions_busy=(),
        n_condensed=0,
        n_blocks=0,
        n_tallies=0,
        n_arrivals=0,
        n_batches=0,
        n_quarantined=0,
        n_payloads=0,
        n_policies=0,
        n_contents=0,
        n_detectors=0,
        n_events=0,
        n_transitions=0,
        n_alerts=0,
        n_incidents=0,
        n_noise_changes=0,
        n_hours=0,
        n_days=0,
        n_reports=0,
        n_gates=0,
        n_sessions=0,
        n_vectors=0,
        n_labels=0,
        n_processes=0,
        n_baselines=0,
        n_changes=0,
        n_doubts=0,
        n_shares=0,
        n_discoveries=0,
        n_slices=0,
        n_versions=0,
    )


ALERT = text("""
    insert into alert (model_version_id, slice_id, severity, metric, onset_at, opened_at, resolved_at, details)
    values (1, :slice, 'firing', 'flip', :opened_at, :opened_at, cast(:resolved_at as timestamptz), '{}') returning id
""")
TRANSITION = text("""
    insert into transition (model_version_id, slice_id, alert_id, from_verdict, to_verdict, at, fold_seq, details)
    values (1, :slice, :alert, :from_verdict, :to_verdict, :at, 1, '{}') returning id
""")
EVENT = text("insert into outbox (transition_id, created_at, sent_at) values (:transition, :at, :sent_at)")
NOISE_CHANGE = text("""
    with change as (
        insert into noise_change (model_version_id, side, metric, exceeds, at, fold_seq)
        values (1, 'reference', 'flip', true, :at, 1) returning id
    )
    insert into outbox (noise_change_id, created_at, sent_at) select id, :at, :sent_at from change
""")
REPORT = text("""
    insert into report_run (kind, from_at, to_at, created_at, path, figures) values ('day', :at, :at, :at, 'p', '{}')
""")
# Slice, opened and resolved how many days ago (None: still open), and when its events were sent (None: they wait).
EPISODES = (
    ("resolved long ago", 1, 40, 30, 30),
    ("resolved lately", 1, 25, 5, 5),
    ("open for long", 1, 50, None, 50),
    ("resolved long ago, and its event waits", 2, 40, 30, None),
)


async def test_old_history_goes_and_open_alerts_and_waiting_events_stay(database: Database) -> None:
    """What belongs to an open alert, or was not sent, stays however old it is; the rest goes after history_days."""
    keep = msgspec.structs.replace(KEEP, history_days=20)
    async with database.begin() as connection:
        await connection.execute(MODEL)
        for _, slice_id, opened, resolved, sent in EPISODES:
            ended = None if resolved is None else ago(resolved)
            values = {"slice": slice_id, "opened_at": ago(opened), "resolved_at": ended}
            alert = await connection.scalar(ALERT, values)
            changes = [("ok", "firing", opened)] + (
                [("firing", "ok", resolved)] if resolved is not None else []
            )
            for before, after, days in changes:
                change = {"from_verdict": before, "to_verdict": after, "at": ago(days)}
                number = await connection.scalar(TRANSITION, {"slice": slice_id, "alert": alert, **change})
                at = {"at": ago(days), "sent_at": None if sent is None else ago(sent)}
                await connection.execute(EVENT, {"transition": number, **at})
        for days in (30, 5):
            change = {"from_verdict": "unknown", "to_verdict": "ok", "at": ago(days)}
            await connection.execute(TRANSITION, {"slice": 2, "alert": None, **change})
            await connection.execute(NOISE_CHANGE, {"at": ago(days), "sent_at": ago(days)})
            await connection.execute(REPORT, {"at": ago(days)})
    done = await maintain(database, keep, NOW, ahead_days=3)
    assert (done.n_events, done.n_transitions, done.n_alerts) == (3, 3, 1)
    assert (done.n_noise_changes, done.n_reports) == (1, 1)
    async with database.begin() as connection:
        alerts = (await connection.scalars(text("select opened_at from alert order by id"))).all()
        waiting = await connection.scalar(text("select count(*) from outbox where sent_at is null"))
        of_open = await connection.scalar(
            text(
                "select count(*) from transition join alert a on a.id = alert_id where a.resolved_at is null"
            )
        )
    assert alerts == [ago(25), ago(50), ago(40)]
    assert (waiting, of_open) == (2, 1)


@pytest.mark.parametrize(("history_days", "n_left"), [(20, 2), (5, 1)])
async def test_sums_go_after_the_longer_of_two_times(
    database: Database, history_days: int, n_left: int
) -> None:
    """Hourly and daily sums stay for history_days, and at least as long as the comparisons they sum up."""
    keep = msgspec.structs.replace(KEEP, history_days=history_days)
    async with database.begin() as connection:
        await connection.execute(MODEL)
        for table, column in (("rollup_hour", "hour"), ("rollup_day", "day")):
            for days in (30, 15, 5):
                await connection.execute(text(ROLLUP.format(table=table, column=column)), {"at": ago(days)})
    done = await maintain(database, keep, NOW, ahead_days=3)
    assert (done.n_hours, done.n_days) == (3 - n_left, 3 - n_left)
    async with database.begin() as connection:
        hours = (await connection.scalars(text("select hour from rollup_hour order by hour desc"))).all()
    assert hours == [ago(5), ago(15)][:n_left]


ROLLUP = """
    insert into {table} (model_version_id, slice_id, {column}, n_items, n_groups, weight, weight_sq, flip, topk, js,
        divergence, margin, flip_weight, topk_weight, js_weight, divergence_weight, margin_weight, n_infinite,
        divergence_bins)
    values (1, 1, :at, 1, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 0, '{{}}')
"""


OLD = ago(3000)
# What a row needs to be past its end, beside times long ago; everything else is 1, empty or null.
PAST_ITS_END: dict[str, dict[str, Any]] = {
    "alert": {"severity": "firing", "resolved_at": OLD},
    "alert_action": {"action": "ack"},
    "batch": {"kind": "tally"},
    "baseline": {"kind": "change", "source": "learned", "fold_seq": 1},
    "detector": {"kind": "change", "retired_at": OLD},
    "discovery": {"status": "retired", "slice_id": 1},
    "discovery_change": {"status": "retired", "fold_seq": 1},
    "model_version": {"lapsed_at": OLD},
    "noise": {"side": "reference"},
    "noise_change": {"side": "reference"},
    "noise_floor": {"side": "reference"},
    "noise_slice": {"side": "reference"},
    "outbox": {"transition_id": 1, "sent_at": OLD},
    "gate_run": {"verdict": "insufficient"},
    "gate_verdict": {"verdict": "pass"},
    "incident": {"state": "closed"},
    "incident_change": {"state": "closed"},
    "report_run": {"kind": "day"},
    "slice": {"lapsed_at": OLD},
    "slice_change": {"status": "lapsed", "fold_seq": 1},
    "transition": {"from_verdict": "ok", "to_verdict": "firing", "alert_id": 1},
    "verdict": {"verdict": "ok"},
}
KEPT = {
    "audit": "entries never go",
    "clustering": "the newest is in use",
    "compatibility": "one row",
    "fold": "one row",
    "leader": "one row",
    "model_fold": "one row for each model",
    "model_span": "few rows for each model",
    "monitor_process": "a monitor deletes those of others when it takes its part of the shards",
    "shard": "one row for each shard",
}


def literal(column: Column[Any], given: Any) -> str:
    """Return a value for a column as SQL."""
    if given is None:
        kinds = {
            DateTime: f"'{OLD.isoformat()}'",
            JSONB: "'{}'",
            ARRAY: "'{}'",
            LargeBinary: "''",
            UUID: f"'{BOOT}'",
            Text: "'x'",
            Boolean: "false",
        }
        return next((one for kind, one in kinds.items() if isinstance(column.type, kind)), "1")
    return f"'{given.isoformat() if isinstance(given, datetime) else given}'"


async def test_a_row_past_its_end_goes_from_every_table(database: Database) -> None:
    """Every table says when its rows end; one row in each, past that end, and only those with a reason are left."""
    tables = {table.name: table for table in Base.metadata.sorted_tables}
    assert set(ENDS) == set(tables)
    async with database.begin() as connection:
        await ensure_partitions(connection, OLD.date(), OLD.date())
        for name, table in tables.items():
            given = PAST_ITS_END.get(name, {})
            columns = [
                column
                for column in table.columns
                if column.identity is None
                and (
                    column.name in given
                    or (not column.nullable and column.type.__class__ is not INT8MULTIRANGE)
                )
            ]
            values = ", ".join(literal(column, given.get(column.name)) for column in columns)
            names = ", ".join(column.name for column in columns)
            if name not in {"audit", "compatibility", "fold", "leader"}:
                await connection.execute(
                    text(f"insert into {name} ({names}) values ({values})".replace(":", "\\:"))
                )
        before = {name: await connection.scalar(text(f"select count(*) from {name}")) for name in tables}
    assert {name for name, n in before.items() if not n} <= {"fold", "leader"}
    await maintain(database, KEEP, NOW, ahead_days=1)
    async with database.begin() as connection:
        left = [name for name in tables if await connection.scalar(text(f"select count(*) from {name}"))]
    assert set(left) <= set(KEPT)
    assert {"audit", "clustering"} <= set(left)


async def test_a_slice_without_a_place_stays_while_something_refers_to_it(database: Database) -> None:
    """A slice that lost its place long ago stays with its open alert, with a later change, and if it has a place."""
    changes = {1: (OLD, 1), 2: (ago(3), 1), 3: (OLD, None), 4: (OLD, 1), 5: (OLD, 1)}
    async with database.begin() as connection:
        await connection.execute(MODEL)
        for name in ("r", "s", "t"):
            await connection.execute(
                text(
                    "insert into slice (model, predicate, name, definition) values ('m', :name, :name, '{}')"
                ),
                {"name": name},
            )
        await connection.execute(text("update slice set lapsed_at = :old where id < 5"), {"old": OLD})
        for slice_id, (at, fold_seq) in changes.items():
            await connection.execute(
                text(
                    "insert into slice_change (slice_id, status, made_by, made_at, reason, fold_seq)"
                    " values (:slice, 'lapsed', 'w', :at, '', :fold_seq)"
                ),
                {"slice": slice_id, "at": at, "fold_seq": fold_seq},
            )
        await connection.execute(ALERT, {"slice": 4, "opened_at": OLD, "resolved_at": None})
    done = await maintain(database, msgspec.structs.replace(KEEP, history_days=20), NOW, ahead_days=1)
    assert done.n_slices == 1
    async with database.begin() as connection:
        left = (await connection.scalars(text("select id from slice order by id"))).all()
        kept = (await connection.scalars(text("select slice_id from slice_change order by 1"))).all()
    assert left == [2, 3, 4, 5]
    assert kept == [2, 3, 4, 5]
