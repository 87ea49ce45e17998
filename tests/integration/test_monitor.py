"""The monitor as a process, against a real Postgres and a real OTLP receiver."""

import asyncio
from pathlib import Path

import asyncpg
import psutil
import pytest

from quantdrift.demo.otlp_receiver import OtlpReceiver
from quantdrift.storage.audit import Action, add
from quantdrift.storage.database import Database
from tests.support.monitor.fold_stream import FAINT_ID, WITHOUT_REFERENCE, batches, store_batch, store_catalog
from tests.support.monitor.monitor_processes import folded, running_monitor, stop_monitor, until

pytestmark = pytest.mark.integration


@pytest.fixture
async def record(record: asyncpg.Connection) -> asyncpg.Connection:
    """Return a connection to a fresh record that knows versions, slices and the policy."""
    await store_catalog(record)
    return record


async def test_the_drifted_slice_pages_over_otlp_and_no_other_does(
    postgres_dsn: str, record: asyncpg.Connection, tmp_path: Path, otlp_receiver: OtlpReceiver
) -> None:
    """Stored comparisons become an event with everything on-call needs, gauges, roll-ups and a row for ever.

    Seeded: the stream's truth is 8 % flips on one slice, 0.1 % elsewhere; a false page has P < 1e-3. A version
    without a reference flips always and never fires.
    """
    for rows in (*batches(200), *batches(3, seed=2, version=WITHOUT_REFERENCE, faint_flips=1.0)):
        await store_batch(record, rows)

    def firing(receiver: OtlpReceiver) -> bool:
        return any(event.attributes.get("quantdrift.verdict") == "firing" for event in receiver.events)

    def gauged(receiver: OtlpReceiver) -> bool:
        return any(
            point.name == "quantdrift.slice.verdict"
            and point.attributes == {"model": "digits", "version": "1", "slice": "scanner=faint"}
            and point.value == 3
            for point in receiver.metrics
        )

    def audited(receiver: OtlpReceiver) -> bool:
        heads = [event for event in receiver.events if event.name == "quantdrift.audit.head"]
        return any(event.attributes["quantdrift.intact"] for event in heads)

    async def all_folded() -> bool:
        return await folded(record) == 203

    async with running_monitor(postgres_dsn, tmp_path, otlp_receiver.endpoint) as process:
        await until(all_folded, "everything is folded")
        assert await asyncio.to_thread(otlp_receiver.wait_for, firing, 30)
        assert await asyncio.to_thread(otlp_receiver.wait_for, gauged, 30)
        assert await asyncio.to_thread(otlp_receiver.wait_for, audited, 30)
        assert await stop_monitor(process) == 0
    assert await record.fetch("select action, subject from audit order by seq") == [
        ("db upgrade", ""),
        ("configuration", "monitor"),
    ]
    events = [
        event for event in otlp_receiver.events if event.attributes.get("quantdrift.verdict") == "firing"
    ]
    assert {event.attributes["quantdrift.slice"] for event in events} == {"scanner=faint"}
    event = events[0]
    assert (event.name, event.severity) == ("quantdrift.slice.transition", 17)
    assert event.attributes["quantdrift.budget"] == 0.01
    assert event.attributes["quantdrift.low"] <= event.attributes["quantdrift.mean"]
    assert len(event.attributes["quantdrift.examples"]) == 5
    assert event.attributes["quantdrift.traces"][0].startswith("https://traces.example/")
    assert event.resource["service.name"] == "quantdrift-monitor"
    assert {point.name for point in otlp_receiver.metrics} >= {
        "quantdrift.progress.age",
        "quantdrift.monitor.leader",
        "quantdrift.slice.evidence",
        "quantdrift.slice.divergence",
    }

    verdicts = await record.fetch(
        "select model_version_id, slice_id, verdict, alert_id is not null from verdict order by 1, 2"
    )
    assert [tuple(row) for row in verdicts] == [
        (1, 1, "ok", False),
        (1, 2, "firing", True),
        (1, 3, "ok", False),
        (2, 1, "unknown", False),
    ]
    assert await record.fetchval("select array_agg(distinct slice_id) from alert") == [FAINT_ID]
    numbers = await record.fetch("select fold_seq from batch order by id")
    assert [row["fold_seq"] for row in numbers] == list(range(1, 204))
    flipped = await record.fetchval(
        "select bool_or(flip) from comparison where exchange_id = any($1::uuid[])",
        event.attributes["quantdrift.examples"],
    )
    assert flipped
    for row in await record.fetch("select weight, divergence_bins from rollup_hour"):
        assert sum(row["divergence_bins"]) == pytest.approx(row["weight"])


async def test_beside_a_verdict_the_collector_gets_whether_the_version_serves_and_is_paused(
    database: Database,
    postgres_dsn: str,
    record: asyncpg.Connection,
    tmp_path: Path,
    otlp_receiver: OtlpReceiver,
) -> None:
    """Gauges follow what API and pages say: silent, serving, paused, and replaced by which version; an event says it, too."""
    for rows in batches(200):
        await store_batch(record, rows)

    async def said(value: float, name: str = "serving", **others: str) -> None:
        attributes = {"model": "digits", "version": "1", **others}

        def newest(receiver: OtlpReceiver) -> bool:
            points = [
                point
                for point in receiver.metrics
                if point.name == f"quantdrift.version.{name}" and point.attributes["version"] == "1"
            ]
            return bool(points) and (points[-1].attributes, points[-1].value) == (attributes, value)

        assert await asyncio.to_thread(otlp_receiver.wait_for, newest, 120), (name, value, others)

    async with running_monitor(postgres_dsn, tmp_path, otlp_receiver.endpoint) as process:
        await said(2.0)  # its comparisons are of long ago
        await said(0.0, "paused")
        await record.execute("update serving set last_at = now()")
        await said(0.0)
        async with database.begin() as connection:
            after = {"everything": {"by": "ann", "at": "2026-03-01T12:00:00+00:00"}, "models": {}}
            await add(connection, Action.PAUSE, subject="all models", after=after)
        await said(1.0, "paused")
        await record.execute("insert into serving values (2, now() + interval '1 second', 1, 10, null, null)")
        await record.execute("update serving set replaced_at = now() where model_version_id = 1")
        await said(1.0, replaced_by="2")
        assert await stop_monitor(process) == 0
    events = [event for event in otlp_receiver.events if event.name == "quantdrift.slice.transition"]
    assert events
    assert {event.attributes["quantdrift.version_serving"] for event in events} <= {"silent", "serving"}


@pytest.mark.release
async def test_a_collector_that_is_down_gets_every_event_when_it_is_back(
    postgres_dsn: str, record: asyncpg.Connection, tmp_path: Path, otlp_receiver: OtlpReceiver
) -> None:
    """Rows stay unsent with their error while nobody answers, and are sent afterwards."""
    otlp_receiver.stop()
    for rows in batches(120):
        await store_batch(record, rows)

    async def tried() -> bool:
        return bool(await record.fetchval("select count(*) from outbox where last_error is not null"))

    async def sent() -> bool:
        return bool(
            await record.fetchval("select count(*) > 0 and bool_and(sent_at is not null) from outbox")
        )

    async with running_monitor(postgres_dsn, tmp_path, otlp_receiver.endpoint) as process:
        await until(tried, "an export fails")
        assert not await sent()
        otlp_receiver.start()
        await until(sent, "every event is sent")
        assert await stop_monitor(process) == 0
    n_events = await record.fetchval("select count(*) from outbox")
    assert await asyncio.to_thread(otlp_receiver.wait_for, lambda one: len(one.events) >= n_events, 10)


@pytest.mark.release
async def test_without_a_collector_events_stay_in_the_record(
    postgres_dsn: str, record: asyncpg.Connection, tmp_path: Path
) -> None:
    """With no endpoint rows are marked sent without an error: `transition` holds every event."""
    for rows in batches(120):
        await store_batch(record, rows)

    async def sent() -> bool:
        return bool(
            await record.fetchval(
                "select count(*) > 0 and bool_and(sent_at is not null and last_error is null) from outbox"
            )
        )

    async with running_monitor(postgres_dsn, tmp_path) as process:
        await until(sent, "every event is marked")
        assert await stop_monitor(process) == 0
    assert (
        await record.fetchval(
            "select count(*) from transition where jsonb_array_length(text -> 'do_now') > 0"
        )
        > 0
    )


@pytest.mark.release
async def test_one_leads_and_the_standby_takes_over(
    postgres_dsn: str, record: asyncpg.Connection, tmp_path: Path
) -> None:
    """Of two monitors one folds; when it is killed the other goes on, and each batch is folded once."""
    stream = batches(40)
    for rows in stream[:20]:
        await store_batch(record, rows)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()

    async def at(number: int) -> bool:
        return await folded(record) == number

    async def both() -> bool:
        held = "select count(*) from pg_stat_activity where application_name = 'quantdrift leader'"
        return bool(await record.fetchval(f"{held} and datname = current_database()") == 2)

    async with (
        running_monitor(postgres_dsn, tmp_path / "one") as one,
        running_monitor(postgres_dsn, tmp_path / "two") as two,
    ):
        await until(lambda: at(20), "the leader folds")
        await until(both, "the second stands by")
        (port,) = await record.fetchrow(
            "select a.client_port from pg_locks l join pg_stat_activity a using (pid) where l.relation = 'leader_lock'::regclass"
            " and l.granted and a.application_name = 'quantdrift leader' and a.datname = current_database()"
        )
        leader, standby = (one, two) if _owns(one.pid, port) else (two, one)
        leader.kill()
        await leader.wait()
        for rows in stream[20:]:
            await store_batch(record, rows)
        await until(lambda: at(40), "the standby takes over")
        assert await stop_monitor(standby) == 0
    numbers = await record.fetch("select fold_seq from batch order by id")
    assert [row["fold_seq"] for row in numbers] == list(range(1, 41))


def _owns(pid: int, port: int) -> bool:
    return port in {one.laddr[1] for one in psutil.Process(pid).net_connections("tcp")}
