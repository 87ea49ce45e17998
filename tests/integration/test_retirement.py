"""Discovered slices that are monitored no more: by the nightly round, by a person, and back; the fold follows."""

import asyncio
import json
from datetime import timedelta
from pathlib import Path

import asyncpg
import msgspec
import pytest
from click.testing import CliRunner, Result

from quantdrift.cli.main import main
from quantdrift.core.config.schema import Config, Model
from quantdrift.core.errors import RetryError
from quantdrift.core.records import Predicate
from quantdrift.core.slices import slice_of
from quantdrift.monitor.discovery.limits import DiscoveryLimits
from quantdrift.monitor.discovery.round import discover
from quantdrift.monitor.fold.fold import Fold
from quantdrift.storage.database import Database
from quantdrift.storage.fold.read import claim, load_catalog, refold, resume
from quantdrift.storage.fold.write import write
from quantdrift.storage.sampling import read_evidence, read_traffic
from quantdrift.storage.schema.slice_tables import DiscoveryStatus
from quantdrift.storage.slices.discovery import (
    DiscoveryRow,
    StoredRow,
    active_slices,
    load_state,
    store,
    store_round,
)
from tests.support.monitor.fold_stream import BEGIN, FAINT_ID, batches, store_batch, store_catalog
from tests.support.monitor.fold_stream import CONFIG as WATCH
from tests.support.storage.discovered_traffic import DAY, FAINT, NOW, discovery, write_traffic, write_version

pytestmark = pytest.mark.integration

CONFIG = Config(models=(Model(name="digits"),))


async def _store(database: Database, *rows: DiscoveryRow) -> None:
    async with database.begin() as connection:
        for row in rows:
            await store(connection, StoredRow(row=row, reason="so the test says"), made_by="monitor")


def _other(site: str, **changes: object) -> DiscoveryRow:
    """Return a discovery of another slice than the faint scanner's."""
    key = slice_of("digits", [Predicate(key="header.x-site", equals=site)])
    row = discovery(id=0, predicate=key.predicate, name=key.name, where=key.where)
    return msgspec.structs.replace(row, **changes)


async def _sums(record: asyncpg.Connection, slice_id: int, *, n: int, flips: int) -> None:
    """Insert a day's roll-up of a slice in the middle of the month before `NOW`."""
    await record.execute(
        "insert into rollup_hour (model_version_id, slice_id, hour, n_items, n_groups, weight, weight_sq, flip, topk,"
        " js, divergence, margin, flip_weight, topk_weight, js_weight, divergence_weight, margin_weight, n_infinite, divergence_bins)"
        " values (1, $1, $2, $3, $3, $5, $5, $4, 0, 0, 0, 0, $5, 0, 0, $5, 0, 0, '{}')",
        slice_id,
        NOW - 15 * DAY,
        n,
        float(flips),
        float(n),
    )


async def test_a_quiet_slice_gives_its_place_to_one_that_waits_and_its_history_stays(
    database: Database, record: asyncpg.Connection
) -> None:
    """The round retires it, says why, and confirms the other; the id stays, workers hear of the new one alone."""
    await write_version(record)
    long_ago = {"frozen_at": NOW - 50 * DAY, "tested_at": NOW, "confirmed_at": NOW - 40 * DAY}
    await _store(
        database,
        discovery(id=0, status=DiscoveryStatus.CONFIRMED, **long_ago),
        _other("s3", log_evidence=9.0, waits_since=NOW - DAY),
    )
    calm = await record.fetchval("select slice_id from discovery where slice_id is not null")
    await record.execute(
        "insert into verdict (model_version_id, slice_id, verdict, reason, since, n_groups, evidence, threshold,"
        " estimate, last_at, updated_at, fold_seq) values (1, $1, 'ok', '', $2, 9, 0.001, 8, '{}', $2, $2, 1)",
        calm,
        NOW,
    )
    limits = DiscoveryLimits(most_slices=1)
    await _sums(
        record, await record.fetchval("select id from slice where predicate = 'true'"), n=90_000, flips=1_800
    )
    await _sums(record, calm, n=9_000, flips=360)
    assert (await discover(database, CONFIG, NOW, dry_run=True, limits=limits)).settled == ()
    await record.execute("update rollup_hour set flip = 180 where slice_id = $1", calm)
    done = await discover(database, CONFIG, NOW, limits=limits)
    assert [(row.name, row.status) for row in done.settled] == [
        ("x-scanner=faint", DiscoveryStatus.RETIRED),
        ("x-site=s3", DiscoveryStatus.CONFIRMED),
    ]
    assert [key.name for key in await active_slices(database)] == ["x-site=s3"]
    rows = await record.fetch(
        "select status, made_by, reason from discovery_change where discovery_id = 1 order by id"
    )
    assert [(row["status"], row["made_by"]) for row in rows] == [
        ("confirmed", "monitor"),
        ("retired", "monitor"),
    ]
    assert rows[1]["reason"].startswith("quiet for 30 days: mean flip 0.02, at most 0.02")
    assert await record.fetchval("select slice_id from discovery where status = 'retired'") == calm


async def test_who_waits_for_a_place_holds_none_among_the_candidates(
    database: Database, record: asyncpg.Connection
) -> None:
    """With one place for candidates and one that waits, the next finding is still tested."""
    version = await write_version(record)
    await write_traffic(record, version, begin=NOW - DAY, end=NOW, n=4000, flips={"faint": 0.12}, seed=1)
    await _store(
        database,
        _other("s1", status=DiscoveryStatus.CONFIRMED, confirmed_at=NOW - DAY, seen_at=NOW),
        _other("s2", log_evidence=9.0, waits_since=NOW - DAY),
    )
    one = DiscoveryLimits(most_slices=1)
    done = await discover(database, CONFIG, NOW, dry_run=True, most_candidates=1, limits=one)
    assert [row.name for row in done.frozen] == ["x-scanner=faint"]
    assert done.waiting == {"digits": 1}
    await record.execute("update discovery set waits_since = null, log_evidence = 0")
    assert (await discover(database, CONFIG, NOW, dry_run=True, most_candidates=1, limits=one)).frozen == ()


async def test_a_policy_that_is_gone_ends_no_round(database: Database, record: asyncpg.Connection) -> None:
    """Its items are counted; those of a policy that came after the round began are tested."""
    version = await write_version(record)
    await write_traffic(record, version, begin=NOW - DAY, end=NOW, n=2000, flips={}, seed=1)
    candidate = discovery(id=0, frozen_at=NOW - DAY, tested_at=NOW - DAY)
    await _store(database, candidate)
    await record.execute(
        "update comparison set policy_id = 99 where attributes ->> 'header.x-scanner' = 'faint' and u1 < 0.2"
    )
    n_gone = await record.fetchval("select count(*) from comparison where policy_id = 99")
    done = await discover(database, CONFIG, NOW + DAY)
    assert 0 < n_gone == done.unknown["digits"]
    assert done.tested[0].n_groups > 100


async def test_a_person_decides_and_a_round_that_began_before_writes_nothing(
    database: Database, record: asyncpg.Connection, postgres_dsn: str, tmp_path: Path
) -> None:
    """By the commands that people type: who and why are in the history, no search finds it again, and back."""
    version = await write_version(record)
    await _store(database, discovery(id=0, status=DiscoveryStatus.CONFIRMED, confirmed_at=NOW))
    (tmp_path / "config.toml").write_text('[[models]]\nname = "digits"\n')

    path = str(tmp_path / "config.toml")

    async def quantdrift(*arguments: str) -> Result:
        return await asyncio.to_thread(
            CliRunner().invoke,
            main,
            ["slices", *arguments, "--config", path],
            env={"QUANTDRIFT_DSN": postgres_dsn},
        )

    slice_id = str(await record.fetchval("select slice_id from discovery"))
    async with database.begin() as connection:
        standing = await load_state(connection, NOW)
    done = await quantdrift("retire", slice_id, "--reason", "a load test")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("x-scanner=faint of digits is retired: ")
    with pytest.raises(RetryError, match="in the meantime"):
        async with database.begin() as connection:
            await store_round(connection, after=standing.mark, discoveries=[], searches=[])
    await write_traffic(record, version, begin=NOW - DAY, end=NOW, n=4000, flips={"faint": 0.12}, seed=1)
    night = await discover(database, CONFIG, NOW)
    assert [origin.watched for origin in night.searches[0].origins] == [True]
    assert await active_slices(database) == []
    listed = await quantdrift("list")
    assert "x-scanner=faint" not in listed.stdout
    assert "1 more are expired, retired or lapsed; --all shows them" in listed.stdout
    everything = json.loads((await quantdrift("list", "--all", "--json")).stdout)["slices"]
    assert ("x-scanner=faint", "retired") in {(one["name"], one["status"]) for one in everything}
    shown = (await quantdrift("show", slice_id)).stdout
    assert "retired by quantdrift: a load test" in shown
    assert "quantdrift slices restore" in shown
    again = await quantdrift("retire", slice_id)
    assert (again.exit_code, "already" in again.stderr) == (2, True)
    back = await quantdrift("restore", "x-scanner=faint", "--json")
    assert json.loads(back.stdout)["status"] == "confirmed"
    assert [key.where for key in await active_slices(database)] == [(FAINT,)]
    assert await record.fetchval("select slice_id from discovery") == int(slice_id)
    assert (
        await record.fetchval("select made_by from discovery_change order by id desc limit 1") == "quantdrift"
    )
    wrong = await quantdrift("retire", "all")
    assert (wrong.exit_code, "is not a discovered slice" in wrong.stderr) == (2, True)


async def test_the_fold_applies_a_retirement_once_and_gives_the_same_result_when_folded_again(
    database: Database, record: asyncpg.Connection
) -> None:
    """The alert ends with the batch after the decision; a fresh monitor and a back-test know of it."""
    await store_catalog(record)
    key = slice_of("digits", [FAINT])
    await _store(
        database, discovery(id=0, name=key.name, slice_id=FAINT_ID, status=DiscoveryStatus.CONFIRMED)
    )

    async def folded() -> set[int]:
        async with database.begin() as connection:
            fold = Fold(WATCH, await resume(connection))
            rows = await claim(connection, fold.position.fold_seq, 64)
            fold.learn(await load_catalog(connection))
            for batch in rows:
                fold.batch(batch)
            await write(connection, fold.take(), "")
            return {row.slice_id for row in fold.verdicts()}

    async def shared() -> set[bool]:
        """Return whether the slice has a part in the sampling: by its traffic, and by its evidence."""
        now = BEGIN + timedelta(minutes=5)
        found = await read_traffic(database, now, window_s=3600, tally_s=10, stale_s=3600)
        evidence = await read_evidence(database, now - timedelta(hours=1))
        return {FAINT_ID in {one.id for one in found.slices}, FAINT_ID in evidence}

    stream = batches(150)
    for batch in stream[:10]:
        await store_batch(record, batch)
    assert FAINT_ID in await folded()
    assert await shared() == {True}
    for batch in stream[10:60]:
        await store_batch(record, batch)
    assert FAINT_ID in await folded()
    assert await record.fetchval("select count(*) from alert where resolved_at is null") == 1
    row = discovery(id=1, slice_id=FAINT_ID, status=DiscoveryStatus.RETIRED, held=True)
    async with database.begin() as connection:
        await store(connection, StoredRow(row=row, reason="enough"), made_by="anna")
    for batch in stream[60:100]:
        await store_batch(record, batch)
    assert FAINT_ID not in await folded()
    assert await shared() == {False}
    assert await record.fetchval("select count(*) from alert where resolved_at is null") == 0
    said = await record.fetchval(
        "select t.details ->> 'reason' from outbox o join transition t on t.id = o.transition_id"
        " where t.to_verdict = 'unknown'"
    )
    assert said == "retired by anna: enough"
    assert not await record.fetchval(
        "select count(*) from detector where slice_id = $1 and retired_at is null", FAINT_ID
    )
    for batch in stream[100:]:
        await store_batch(record, batch)
    assert FAINT_ID not in await folded(), "a monitor that begins anew knows what is retired"
    async with database.begin() as connection:
        rows = await refold(connection, 1, 150)
    assert [(batch.fold_seq, change.watched) for batch in rows for change in batch.slices] == [
        (1, True),
        (61, False),
    ]
