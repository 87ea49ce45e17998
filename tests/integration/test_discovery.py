"""Discovered slices in the record: found, frozen, tested on later traffic, confirmed, expired, found again."""

import asyncio
import json
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import asyncpg
import pytest

from quantdrift.core.clock import ManualClock
from quantdrift.core.config.schema import Config, Model
from quantdrift.core.errors import RetryError
from quantdrift.core.process.run import Stop
from quantdrift.core.records import Predicate
from quantdrift.core.slices import SliceAssigner, SliceKey, time_attributes
from quantdrift.core.telemetry import Telemetry
from quantdrift.drift.discovery.search import GivenUpError
from quantdrift.monitor.discovery.candidates import EXPIRE_DAYS
from quantdrift.monitor.discovery.limits import DiscoveryLimits
from quantdrift.monitor.discovery.round import Round, discover
from quantdrift.monitor.discovery.schedule import Discoverer
from quantdrift.shadow.slices.refresh import DiscoveredSlices
from quantdrift.storage.database import Database
from quantdrift.storage.schema.slice_tables import DiscoveryStatus
from quantdrift.storage.slices import search_rows
from quantdrift.storage.slices.discovery import load_state, store_round
from tests.support.commands import invoked
from tests.support.storage.discovered_traffic import DAY, NOW, write_traffic, write_version

pytestmark = pytest.mark.integration

CONFIG = Config(models=(Model(name="digits"),))
FAINT = 'header.x-scanner = "faint"'
BAD = {"faint": 0.12}


async def _found(database: Database, record: asyncpg.Connection) -> Round:
    """Write a day on which one scanner is bad, and search it."""
    version = await write_version(record)
    await write_traffic(record, version, begin=NOW - DAY, end=NOW, n=4000, flips=BAD, seed=1)
    return await discover(database, CONFIG, NOW)


async def test_what_a_search_finds_is_frozen_and_becomes_a_slice_only_on_later_traffic(
    database: Database, record: asyncpg.Connection
) -> None:
    """The night it is found nothing is a slice; a day of later traffic makes it one, with an id."""
    first = await _found(database, record)
    assert [row.predicate for row in first.frozen] == [FAINT]
    assert first.settled == ()
    assert await record.fetchval("select count(*) from slice where predicate <> 'true'") == 0
    row = await record.fetchrow("select * from discovery")
    assert row["status"] == "candidate"
    assert row["frozen_at"] > NOW
    assert row["n_groups"] == 0
    # The same rows again, an hour and a half later: they lie before the freezing and count nothing.
    again = await discover(database, CONFIG, NOW + timedelta(hours=3))
    assert again.frozen == ()
    assert [origin.watched for origin in again.searches[0].origins] == [True]
    assert await record.fetchval("select n_groups from discovery") == 0
    await write_traffic(record, 1, begin=NOW, end=NOW + DAY, n=4000, flips=BAD, seed=2)
    second = await discover(database, CONFIG, NOW + DAY)
    assert [row.status for row in second.settled] == [DiscoveryStatus.CONFIRMED]
    confirmed = await record.fetchrow(
        "select d.*, s.name as slice, s.definition as sliced from discovery d join slice s on s.id = d.slice_id"
    )
    assert confirmed["status"] == "confirmed"
    assert confirmed["slice"] == "x-scanner=faint"
    assert json.loads(confirmed["sliced"])["where"][0]["equals"] == "faint"
    # Some 400 of a day less what may still come and the part of an hour before the freezing.
    assert 300 < confirmed["n_groups"] < 400


async def test_a_damaged_language_is_found_without_a_slice_or_a_header(
    database: Database, record: asyncpg.Connection
) -> None:
    """`capture.text` names the language, and no slice does: the first night finds it, the second makes it one."""
    version = await write_version(record)
    shares = {"en": 0.55, "fr": 0.2, "es": 0.15, "de": 0.1}
    nights = []
    for night in range(2):
        begin = NOW + (night - 1) * DAY
        await write_traffic(
            record,
            version,
            begin=begin,
            end=begin + DAY,
            n=4000,
            flips={"de": 0.12},
            seed=night,
            key="text.language",
            shares=shares,
        )
        nights.append(await discover(database, CONFIG, begin + DAY))
    assert [row.predicate for row in nights[0].frozen] == ['text.language = "de"']
    assert [row.status for row in nights[1].settled] == [DiscoveryStatus.CONFIRMED]
    assert await record.fetchval("select name from slice where predicate <> 'true'") == "language=de"


@pytest.mark.release
async def test_a_fault_on_weekends_alone_is_found_as_a_slice_by_the_time_of_week(
    database: Database, record: asyncpg.Connection
) -> None:
    """No client sends that attribute. One bad weekend may be a fault that has just begun; the third confirms the slice."""
    version = await write_version(record)
    monday = NOW - timedelta(hours=3)
    frozen, settled = [], []
    for week in range(3):
        begin = monday + week * 7 * DAY
        await write_traffic(
            record, version, begin=begin, end=begin + 7 * DAY, n=7000, flips={}, seed=week, weekend=30.0
        )
        night = await discover(database, CONFIG, begin + 7 * DAY)
        frozen.append([row.predicate for row in night.frozen])
        settled.append([(row.predicate, row.status) for row in night.settled])
    assert frozen[0] == []
    assert 'time.week = "weekend"' in frozen[1]
    assert settled[:2] == [[], []]
    assert ('time.week = "weekend"', DiscoveryStatus.CONFIRMED) in settled[2]


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "America/Los_Angeles", "Asia/Kolkata"])
async def test_the_database_counts_days_and_hours_as_the_workers_do(
    database: Database, record: asyncpg.Connection, zone: str
) -> None:
    """Also across a change to winter time: each item of ten days is in the slices that its worker would name."""
    version = await write_version(record)
    begin = datetime(2026, 10, 20, 0, 15, tzinfo=UTC)
    await write_traffic(record, version, begin=begin, end=begin + 10 * DAY, n=480, flips={}, seed=1)
    window = search_rows.SearchWindow(version_id=version, begin=begin, end=begin + 10 * DAY)
    names = [
        *(("time.week", value) for value in ("weekday", "weekend")),
        *(
            ("time.day", day)
            for day in ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
        ),
        *(("time.hours", hours) for hours in ("00-06", "06-12", "12-18", "18-24")),
    ]
    wheres = [(Predicate(key=key, equals=value),) for key, value in names]
    n_items = 0
    async with database.begin() as connection:
        async for item in search_rows.tested_items(connection, window, wheres, 1000, ZoneInfo(zone)):
            at = datetime.fromtimestamp(item.captured_us / 1e6, UTC)
            assert {names[place] for place in item.slice_ids} == set(
                time_attributes(at, ZoneInfo(zone)).items()
            )
            n_items += 1
    assert n_items == 480


async def test_good_traffic_confirms_nothing_and_the_candidate_expires_and_keeps_its_id(
    database: Database, record: asyncpg.Connection
) -> None:
    """A week of later traffic without the fault; found again much later it is the same discovery."""
    await _found(database, record)
    identity = await record.fetchval("select id from discovery")
    days = EXPIRE_DAYS + 1
    end = NOW + days * DAY
    await write_traffic(record, 1, begin=NOW, end=end, n=6000, flips={}, seed=3)
    later = await discover(database, CONFIG, end)
    assert [row.status for row in later.settled] == [DiscoveryStatus.EXPIRED]
    assert [row.n_groups > 400 for row in later.settled] == [True]
    await write_traffic(record, 1, begin=end, end=end + DAY, n=4000, flips={"faint": 0.5}, seed=4)
    again = await discover(database, CONFIG, end + DAY)
    assert [row.predicate for row in again.frozen] == [FAINT]
    row = await record.fetchrow("select * from discovery")
    assert row["id"] == identity
    assert row["status"] == "candidate"
    assert row["n_found"] == 2
    assert row["n_groups"] == 0
    assert row["log_evidence"] == 0


async def test_a_confirmed_slice_without_traffic_is_retired_and_keeps_its_slice(
    database: Database, record: asyncpg.Connection
) -> None:
    """After 30 days unseen it is monitored no more; the workers hear of it."""
    await _found(database, record)
    await write_traffic(record, 1, begin=NOW, end=NOW + DAY, n=4000, flips=BAD, seed=2)
    await discover(database, CONFIG, NOW + DAY)
    slice_id = await record.fetchval("select slice_id from discovery")
    heard: list[dict[str, tuple[SliceKey, ...]]] = []
    watched = DiscoveredSlices(database, heard.append, Stop(), most=20)
    await watched.refresh()
    await watched.refresh()
    assert [[key.predicate for key in found["digits"]] for found in heard] == [[FAINT]]
    assigner = SliceAssigner(CONFIG, "digits")
    assigner.extra = heard[0]["digits"]
    assert [key.name for key in assigner.assign({"header.x-scanner": "faint"}, {})] == [
        "all",
        "x-scanner=faint",
    ]
    assert len(assigner.assign({"header.x-scanner": "clean"}, {})) == 1
    assert (await discover(database, CONFIG, NOW + 32 * DAY)).settled == (), (
        "nothing of the model is compared"
    )
    await write_traffic(record, 1, begin=NOW + 31 * DAY, end=NOW + 32 * DAY, n=200, flips={}, seed=3)
    gone = await discover(database, CONFIG, NOW + 32 * DAY)
    assert [row.status for row in gone.settled] == [DiscoveryStatus.RETIRED]
    assert await record.fetchval("select reason from discovery_change order by id desc limit 1") == (
        "unseen: nothing was compared in it for 30 days"
    )
    await watched.refresh()
    assert heard[1:] == [{}]
    assert await record.fetchval("select slice_id from discovery") == slice_id


@pytest.mark.release
async def test_more_than_the_cap_wait_for_a_place(database: Database, record: asyncpg.Connection) -> None:
    """Confirmed beyond `most_slices`: counted, not lost; candidates beyond `most_candidates` likewise."""
    version = await write_version(record)
    bad = {"faint": 0.2, "gain": 0.1}
    await write_traffic(record, version, begin=NOW - DAY, end=NOW, n=4000, flips=bad, seed=5)
    roomy = DiscoveryLimits(least_ratio=1.0, most_slices=1)
    first = await discover(database, CONFIG, NOW, dry_run=True, most_candidates=1, limits=roomy)
    assert len(first.frozen) == 1
    two = await discover(database, CONFIG, NOW, limits=roomy)
    assert len(two.frozen) == 2
    await write_traffic(record, version, begin=NOW, end=NOW + DAY, n=6000, flips=bad, seed=6)
    done = await discover(database, CONFIG, NOW + DAY, limits=roomy)
    assert [row.status for row in done.settled] == [DiscoveryStatus.CONFIRMED]
    assert done.waiting == {"digits": 1}
    assert await record.fetchval("select count(*) from discovery where log_evidence >= log_threshold") == 2
    wider = DiscoveryLimits(least_ratio=1.0, most_slices=2)
    assert len((await discover(database, CONFIG, NOW + DAY + timedelta(hours=2), limits=wider)).settled) == 1


async def test_of_too_many_rows_a_part_is_looked_at(database: Database, record: asyncpg.Connection) -> None:
    """`most_rows` bounds the search whatever was stored, and the slice is still found."""
    version = await write_version(record)
    await write_traffic(record, version, begin=NOW - DAY, end=NOW, n=6000, flips={"faint": 0.3}, seed=7)
    few = DiscoveryLimits(most_rows=2000)
    found = await discover(database, CONFIG, NOW, dry_run=True, limits=few)
    assert 1800 < found.searches[0].search.n_items < 2200
    assert [row.predicate for row in found.frozen] == [FAINT]
    assert await record.fetchval("select count(*) from discovery") == 0


@pytest.mark.release
async def test_two_rounds_at_once_do_not_count_the_same_exchanges_twice(
    database: Database, record: asyncpg.Connection
) -> None:
    """The one that writes later finds that the record has moved on, and writes nothing."""
    version = await write_version(record)
    await write_traffic(record, version, begin=NOW - DAY, end=NOW, n=4000, flips=BAD, seed=1)
    done = await asyncio.gather(
        discover(database, CONFIG, NOW), discover(database, CONFIG, NOW), return_exceptions=True
    )
    assert sum(isinstance(one, Round) for one in done) >= 1
    assert all(isinstance(one, Round | RetryError) for one in done)
    assert await record.fetchval("select count(*) from discovery") == 1
    async with database.begin() as connection:
        standing = await load_state(connection, NOW)
    await discover(database, CONFIG, NOW + timedelta(hours=2))
    with pytest.raises(RetryError, match="in the meantime"):
        async with database.begin() as connection:
            await store_round(connection, after=standing.mark, discoveries=[], searches=[])


async def test_the_monitor_searches_when_it_leads_and_it_is_time(
    database: Database, record: asyncpg.Connection, postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standby does not; the leader does once a day, also after a restart; a stop ends it at once."""
    version = await write_version(record)
    await write_traffic(record, version, begin=NOW - DAY, end=NOW + 2 * DAY, n=4000, flips={}, seed=1)
    clock, stop, leads = ManualClock(NOW), Stop(), False
    monkeypatch.setattr("quantdrift.monitor.discovery.schedule.TURN_S", 0.01)
    telemetry = Telemetry("test")

    def discoverer(stop: Stop) -> Discoverer:
        return Discoverer(
            config=CONFIG,
            dsn=postgres_dsn,
            database=database,
            telemetry=telemetry,
            clock=clock,
            stop=stop,
            leads=lambda: leads,
        )

    async def searched_at() -> datetime | None:
        found: datetime | None = await record.fetchval("select max(searched_at) from discovery_search")
        return found

    try:
        one = discoverer(stop)
        await one.turn()
        assert await searched_at() is None
        leads = True
        await one.turn()
        assert await searched_at() == NOW
        clock.advance(3600)
        await one.turn()
        await discoverer(stop).turn()
        assert await searched_at() == NOW
        clock.advance(86_400 - 3600)
        await discoverer(stop).turn()
        assert await searched_at() == NOW + DAY
        clock.advance(86_400)
        stop.set()
        await discoverer(stop).turn()
        assert await searched_at() == NOW + DAY
    finally:
        telemetry.close()


async def test_a_round_that_fails_is_tried_again_in_an_hour_and_not_at_once(
    database: Database, record: asyncpg.Connection, postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is wrong with a round, it does not read the record again and again."""
    await write_version(record)
    clock, stop, begun = ManualClock(NOW), Stop(), []

    async def fails(*_: object, **__: object) -> Round:
        begun.append(clock.now())
        raise ZeroDivisionError

    monkeypatch.setattr("quantdrift.monitor.discovery.schedule.discover", fails)
    stop.set()  # a turn does not wait then
    telemetry = Telemetry("test")
    try:
        one = Discoverer(
            config=CONFIG,
            dsn=postgres_dsn,
            database=database,
            telemetry=telemetry,
            clock=clock,
            stop=stop,
            leads=lambda: True,
        )
        with pytest.raises(ZeroDivisionError):
            await one.turn()
        await one.turn()
        assert len(begun) == 1
        clock.advance(3600)
        with pytest.raises(ZeroDivisionError):
            await one.turn()
    finally:
        telemetry.close()


async def test_a_cancelled_round_writes_nothing(database: Database, record: asyncpg.Connection) -> None:
    """In the middle of reading, and the next one begins from the same place."""
    version = await write_version(record)
    await write_traffic(record, version, begin=NOW - DAY, end=NOW, n=4000, flips=BAD, seed=1)
    asked = iter(range(100_000))
    with pytest.raises(GivenUpError):
        await discover(database, CONFIG, NOW, give_up=lambda: next(asked) > 500)
    assert await record.fetchval("select count(*) from discovery_search") == 0


async def test_the_command_line_lists_searches_and_shows(
    record: asyncpg.Connection, postgres_dsn: str, tmp_path: Path
) -> None:
    """As text and as JSON; a dry run writes nothing; a slice that is not there is told without a traceback."""
    version = await write_version(record)
    end = datetime.now(NOW.tzinfo).replace(microsecond=0)
    await write_traffic(record, version, begin=end - DAY, end=end, n=4000, flips=BAD, seed=1)
    (tmp_path / "config.toml").write_text('[[models]]\nname = "digits"\n')

    def quantdrift(*arguments: str) -> subprocess.CompletedProcess[str]:
        return invoked("slices", *arguments, directory=tmp_path, QUANTDRIFT_DSN=postgres_dsn)

    dry = await asyncio.to_thread(quantdrift, "search", "--dry-run", "--json")
    assert dry.returncode == 0, dry.stderr
    assert json.loads(dry.stdout)["searches"][0]["found"][0]["predicate"] == FAINT
    assert await record.fetchval("select count(*) from discovery") == 0
    search = await asyncio.to_thread(quantdrift, "search")
    assert search.returncode == 0, search.stderr
    assert "x-scanner=faint" in search.stdout
    assert "left out" not in search.stdout
    listed = await asyncio.to_thread(quantdrift, "list", "--json")
    kinds = {one["name"]: (one["kind"], one["status"]) for one in json.loads(listed.stdout)["slices"]}
    assert kinds == {"all": ("all", "active"), "x-scanner=faint": ("discovered", "candidate")}
    shown = await asyncio.to_thread(quantdrift, "show", "x-scanner=faint")
    assert "candidate" in shown.stdout
    assert "evidence" in shown.stdout
    for unknown in ("typo", "None"):
        wrong = await asyncio.to_thread(quantdrift, "show", unknown)
        assert wrong.returncode == 2
        assert "quantdrift slices list" in wrong.stderr
    for command in (("list",), ("show", "1")):
        nobody = await asyncio.to_thread(quantdrift, *command, "--model", "digit")
        assert nobody.returncode == 2
        assert "has a model `digit`: did you mean `digits`?" in nobody.stderr
