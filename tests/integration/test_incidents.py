"""Incidents in Postgres: what the fold writes of them, with its alerts."""

from datetime import timedelta
from typing import Any

import asyncpg
import msgspec
import pytest

from quantdrift.storage.database import Database
from quantdrift.storage.monitor.alerts import Act, act
from quantdrift.storage.monitor.rows import BatchRows
from tests.support.monitor.fold_stream import (
    ALL_ID,
    CLEAR_ID,
    FAINT_ID,
    SECOND_US,
    batches,
    fold_stored,
    store_batch,
    store_catalog,
    store_serving,
)

pytestmark = pytest.mark.integration


@pytest.fixture
async def fired(database: Database, record: asyncpg.Connection) -> int:
    """Return the number of a firing alert on faint that the fold has written; `all` alerts, too."""
    await store_catalog(record)
    for batch in batches(60, faint_flips=0.3):
        await store_batch(record, batch)
    await fold_stored(database)
    number = await record.fetchval("select id from alert where slice_id = $1 order by id desc", FAINT_ID)
    return int(number)


async def _incidents(record: asyncpg.Connection) -> list[asyncpg.Record]:
    return list(await record.fetch("select * from incidents order by id"))


async def _changes(record: asyncpg.Connection, incident: int) -> list[tuple[str, str | None]]:
    rows = await record.fetch(
        "select state, mitigation from incident_change where incident_id = $1 order by id", incident
    )
    return [(row["state"], row["mitigation"]) for row in rows]


async def _of_slice(record: asyncpg.Connection, slice_id: int) -> asyncpg.Record:
    """Return the incident of the newest alert of a slice."""
    return await record.fetchrow(
        "select i.* from incidents i join alert a on a.incident_id = i.id where a.slice_id = $1 order by a.id desc",
        slice_id,
    )


async def test_an_alert_has_its_incident_and_its_event_has_the_number(
    record: asyncpg.Connection, fired: int
) -> None:
    """In the transaction of the fold: the alert's row, its event and the log of the incident agree."""
    found = await _of_slice(record, FAINT_ID)
    alert = await record.fetchrow("select * from alert where id = $1", fired)
    assert found["state"] == "open"
    assert fired in found["alerts"]
    assert found["began_at"] == min(
        row["onset_at"]
        for row in await record.fetch("select onset_at from alert where incident_id = $1", found["id"])
    )
    assert await _changes(record, found["id"]) == [("open", None)]
    numbers = await record.fetch(
        "select t.details ->> 'incident' as number from outbox o join transition t on t.id = o.transition_id"
        " where t.alert_id = $1",
        fired,
    )
    assert {row["number"] for row in numbers} == {str(found["id"])}
    assert alert["incident_id"] == found["id"]
    assert not await record.fetchval("select count(*) from alert where incident_id is null")


async def test_a_later_explanation_joins_two_incidents(
    database: Database, record: asyncpg.Connection, fired: int
) -> None:
    """The older number stays, the other says where its alerts are, and the root of the cause names the incident."""
    before = {row["id"] for row in await _incidents(record)}
    other = await record.fetchval(
        "insert into alert (model_version_id, slice_id, severity, metric, onset_at, opened_at, details)"
        " select 1, $1, 'warning', metric, onset_at, opened_at, '{}' from alert where id = $2 returning id",
        CLEAR_ID,
        fired,
    )
    await _more(database, record, 0)
    young = await _of_slice(record, CLEAR_ID)
    assert young["id"] not in before
    await record.execute(
        "update alert set details = details || jsonb_build_object('explained_by', 'scanner=clear', 'explained_by_id', $1::int)"
        " where id = $2",
        CLEAR_ID,
        fired,
    )
    await _more(database, record, 1)
    found = await _of_slice(record, FAINT_ID)
    assert {other, fired} <= set(found["alerts"])
    assert found["slices"] == ["scanner=clear"] or "scanner=faint" not in found["slices"]
    assert await _changes(record, young["id"]) == [("open", None), ("merged", None)]
    assert await record.fetchval("select merged_into from incident where id = $1", young["id"]) == found["id"]
    assert await record.fetchval("select details ->> 'incident' from alert where id = $1", other) == str(
        found["id"]
    )


async def _more(database: Database, record: asyncpg.Connection, turn: int) -> None:
    """Fold one more exchange of version 1, so much later."""
    (of_one, *_) = batches(1)
    at_us = batches(60)[-2].comparisons[-1].captured_us + (turn + 1) * SECOND_US
    await _store(record, of_one, at_us, ALL_ID, FAINT_ID)
    await fold_stored(database)


async def _store(
    record: asyncpg.Connection, like: BatchRows, at_us: int, *slice_ids: int, n: int = 1
) -> None:
    rows = tuple(
        msgspec.structs.replace(
            like.comparisons[0],
            exchange_id=f"{at_us + number:032x}",
            captured_us=at_us + number,
            slice_ids=slice_ids,
            flip=0.0,
        )
        for number in range(n)
    )
    await store_batch(record, msgspec.structs.replace(like, stored_us=at_us + n, comparisons=rows))


async def test_a_replaced_version_mitigates_its_incident_and_a_comeback_opens_it_again(
    database: Database, record: asyncpg.Connection, fired: int
) -> None:
    """The same incident, with each state in its log."""
    number = (await _of_slice(record, FAINT_ID))["id"]
    await store_serving(record, 3, 400, 200)
    await fold_stored(database)
    gone = await _of_slice(record, FAINT_ID)
    assert (gone["id"], gone["state"], gone["mitigation"]) == (number, "mitigated", "replaced")
    assert gone["ended_at"] == await record.fetchval("select resolved_at from alert where id = $1", fired)
    await store_serving(record, 1, 700, 200)
    await store_serving(record, 3, 701, 200)
    await fold_stored(database)
    back = await _of_slice(record, FAINT_ID)
    assert (back["id"], back["state"], back["mitigation"], back["ended_at"]) == (number, "open", None, None)
    assert await _changes(record, number) == [("open", None), ("mitigated", "replaced"), ("open", None)]


@pytest.mark.usefixtures("fired")
async def test_a_close_of_the_last_alert_closes_the_incident_with_its_reason(
    database: Database, record: asyncpg.Connection
) -> None:
    """The incident's log has who closed it, and why."""
    number = (await _of_slice(record, FAINT_ID))["id"]
    for row in await record.fetch(
        "select id from alert where resolved_at is null and incident_id = $1", number
    ):
        async with database.begin() as connection:
            await act(connection, row["id"], Act.CLOSE, "goes to fp32", identity="ada")
    await _more(database, record, 0)
    found = next(row for row in await _incidents(record) if row["id"] == number)
    assert (found["state"], found["said_by"], found["reason"]) == ("closed", "ada", "goes to fp32")


async def test_a_slice_that_is_routed_away_mitigates_its_incident_until_it_returns(
    database: Database, record: asyncpg.Connection, fired: int
) -> None:
    """Not by silence alone: the version must have served a hundred answers' worth. Stragglers do not open it again."""
    await record.execute(
        "update alert set resolved_at = opened_at, ended = 'recovered' where slice_id <> $1", FAINT_ID
    )
    number = (await _of_slice(record, FAINT_ID))["id"]
    (like, *_) = batches(1)
    last_us = batches(60)[-2].comparisons[-1].captured_us
    minute_us = 60 * SECOND_US

    async def serve(minutes: float, n: int, *slice_ids: int) -> dict[str, Any]:
        await _store(record, like, last_us + int(minutes * minute_us), *slice_ids, n=n)
        await fold_stored(database)
        return dict(await record.fetchrow("select * from incident where id = $1", number))

    assert (await serve(5, 1000, ALL_ID, CLEAR_ID))["state"] == "open"
    assert (await serve(9.9, 1000, ALL_ID, CLEAR_ID))["state"] == "open"
    away = await serve(10.5, 10, ALL_ID, CLEAR_ID)
    assert (away["state"], away["mitigation"]) == ("mitigated", "routed")
    assert away["ended_at"] == await record.fetchval(
        "select last_at from verdict where slice_id = $1", FAINT_ID
    )
    waiting = await record.fetch(
        "select t.alert_id from outbox o join transition t on t.id = o.transition_id"
        " where o.incident_change_id is not null and o.webhook_due_at is not null"
    )
    assert [row["alert_id"] for row in waiting] == [fired]
    assert (await serve(11, 2, ALL_ID, FAINT_ID))["mitigation"] == "routed"
    assert (await serve(12, 100, ALL_ID, CLEAR_ID))["mitigation"] == "routed"
    back = await serve(13, 400, ALL_ID, FAINT_ID)
    assert (back["state"], back["mitigation"], back["ended_at"]) == ("open", None, None)
    assert await _changes(record, number) == [("open", None), ("mitigated", "routed"), ("open", None)]


@pytest.mark.usefixtures("fired")
async def test_too_little_traffic_shows_no_route(database: Database, record: asyncpg.Connection) -> None:
    """At night nothing of the version is compared either: after an hour with a few answers the incident is open."""
    number = (await _of_slice(record, FAINT_ID))["id"]
    (like, *_) = batches(1)
    last_us = batches(60)[-2].comparisons[-1].captured_us
    await _store(record, like, last_us + 3600 * SECOND_US, ALL_ID, CLEAR_ID, n=20)
    await fold_stored(database)
    assert await record.fetchval("select state from incident where id = $1", number) == "open"
    assert timedelta(minutes=50) < await record.fetchval(
        "select (select event_time from fold) - last_at from verdict where slice_id = $1", FAINT_ID
    )
