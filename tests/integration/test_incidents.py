"""Incidents in Postgres: what the fold writes of them, with its alerts."""

import asyncio
import json
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import click
import msgspec
import pytest
from aiohttp import ClientSession
from click.testing import CliRunner, Result

from quantdrift import aio
from quantdrift.cli.look.incidents import incidents
from quantdrift.cli.main import main
from quantdrift.core.config.load import Secrets, load
from quantdrift.core.errors import OperatorError
from quantdrift.facts.incidents import Incident
from quantdrift.facts.words.incident import headline, standing_sentence
from quantdrift.show.page.server import page_port
from quantdrift.storage.alerts.alerts import Act, act
from quantdrift.storage.audit import entries
from quantdrift.storage.database import Database
from quantdrift.storage.fold_rows import BatchRows
from quantdrift.storage.incidents.incidents import Say, count_due, find_incident, say, store_count, story
from quantdrift.storage.schema.roles import OPERATOR, READER
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
from tests.support.storage.logins import login_in

pytestmark = pytest.mark.integration
MODEL = '[[models]]\nname = "digits"\n[[models.references]]\npath = "digits.onnx"\n'


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
        " select 1, $1, 'warning', metric, onset_at - interval '1 day', onset_at - interval '23 hours', '{}'"
        " from alert where id = $2 returning id",
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


async def test_damage_that_is_everywhere_is_one_incident(
    database: Database, record: asyncpg.Connection
) -> None:
    """All traffic and both scanners page, and none explains another; the scanner that breaks a day later is an incident of its own."""
    await store_catalog(record, days=3)
    for batch in batches(60, faint_flips=0.3):
        flips = (
            msgspec.structs.replace(row, flip=1.0) if int(row.exchange_id, 16) % 4 == 0 else row
            for row in batch.comparisons
        )
        await store_batch(record, msgspec.structs.replace(batch, comparisons=tuple(flips)))
    await fold_stored(database)
    (incident,) = await _incidents(record)
    alerts = await record.fetch("select * from alert where resolved_at is null order by id")
    assert {row["slice_id"] for row in alerts} == {ALL_ID, FAINT_ID, CLEAR_ID}
    assert not any("explained_by" in json.loads(row["details"]) for row in alerts)
    assert set(incident["slices"]) == {"all", "scanner=faint", "scanner=clear"}
    assert incident["alerts"] == [row["id"] for row in alerts]
    (of_clear,) = [row["id"] for row in alerts if row["slice_id"] == CLEAR_ID]
    for slice_id, metric, hours in ((FAINT_ID, "flip", 24), (ALL_ID, "latency", 0)):
        await record.execute(
            "update alert set resolved_at = opened_at, ended = 'recovered' where slice_id = $1", slice_id
        )
        await record.execute(
            "insert into alert (model_version_id, slice_id, severity, metric, onset_at, opened_at, details)"
            " select 1, $1, 'warning', $3, onset_at + $4, opened_at + $4, '{}' from alert where id = $2",
            slice_id,
            of_clear,
            metric,
            timedelta(hours=hours),
        )
    await _more(database, record, 0)
    slices = [row["slices"] for row in await _incidents(record)]
    assert slices[1:] == [["scanner=faint"], ["all"]]


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


async def _state(database: Database, number: int) -> Incident:
    async with database.begin() as connection:
        return await find_incident(connection, number)


async def _count(database: Database) -> None:
    """Count every incident that waits, as the monitor does."""
    async with database.begin() as connection:
        while (count := await count_due(connection)) is not None:
            await store_count(connection, count)


async def test_the_damage_is_counted_from_the_beginning_on_each_answer_once(
    database: Database, record: asyncpg.Connection, fired: int
) -> None:
    """The weighted sum of changed answers since the onset, in the slice of the cause, with its interval; people where they are known."""
    number = (await _of_slice(record, FAINT_ID))["id"]
    await record.execute(
        "update comparison set group_key = 'p' || left(md5(exchange_id::text), 1) where 2 = any(slice_ids) and captured_at < $1",
        (await _of_slice(record, FAINT_ID))["opened_at"],
    )
    await record.execute(
        "update comparison c set n_items = e.n from ("
        " select captured_at, exchange_id, count(*) as n from comparison group by 1, 2"
        ") e where e.captured_at = c.captured_at and e.exchange_id = c.exchange_id"
    )
    await _count(database)
    found = await _state(database, number)
    truth = await record.fetchrow(
        "select sum(flips * w / n) as changed, sum(n) as n, (select count(distinct group_key) from comparison"
        "   where flip and group_key <> '' and slice_ids && $2::int[] and captured_at >= $1) as people"
        " from (select exchange_id, count(*) as n, count(*) filter (where flip) as flips, max(1 / (pi1 * pi2)) as w from comparison"
        "   where slice_ids && $2::int[] and captured_at >= $1 and model_version_id = 1 group by 1) e",
        found.began_at,
        list(found.slice_ids),
    )
    assert found.changed is not None
    assert found.people is not None
    assert found.changed.value == pytest.approx(truth["changed"])
    assert found.changed.low is not None
    assert found.changed.high is not None
    assert found.changed.low < found.changed.value < found.changed.high
    assert (found.changed.n, found.people.value) == (truth["n"], truth["people"])
    assert str(round(found.people.value)) in headline(found)
    assert fired in found.alerts


async def test_a_person_mitigates_reopens_and_closes_an_incident(
    database: Database, record: asyncpg.Connection, fired: int
) -> None:
    """With the name and the reason in incident and audit; what its state does not allow is refused."""
    number = (await _of_slice(record, FAINT_ID))["id"]

    async def said(what: Say, reason: str) -> Incident:
        async with database.begin() as connection:
            return await say(connection, number, what, reason, identity="ada")

    with pytest.raises(OperatorError, match="only one that a person has mitigated"):
        await said(Say.REOPEN, "x")
    with pytest.raises(OperatorError, match="the reason is empty"):
        await said(Say.CLOSE, " ")
    found = await said(Say.MITIGATE, "the caller ignores them")
    assert (found.state, found.mitigation, found.said_by) == ("mitigated", "reported", "ada")
    assert "by ada: the caller ignores them" in standing_sentence(found)
    with pytest.raises(OperatorError, match="mitigated already"):
        await said(Say.MITIGATE, "x")
    await _more(database, record, 0)
    assert (await _state(database, number)).mitigation == "reported"
    assert await record.fetchval(
        "select count(*) from outbox o join incident_change c on c.id = o.incident_change_id where c.incident_id = $1",
        number,
    ) == len([one for one in found.alerts if await _lasts(record, one)])
    assert (await said(Say.REOPEN, "rolled back")).state == "open"
    await said(Say.MITIGATE, "again")
    other = await record.fetchval(
        "insert into alert (model_version_id, slice_id, severity, metric, onset_at, opened_at, details)"
        ' select 1, $1, \'warning\', metric, onset_at, now(), \'{"explained_by": "scanner=faint", "explained_by_id": 2}\''
        " from alert where id = $2 returning id",
        CLEAR_ID,
        fired,
    )
    await _more(database, record, 1)
    opened = await _state(database, number)
    assert (opened.state, other in opened.alerts) == ("open", True)
    closed = await said(Say.CLOSE, "goes to fp32")
    assert (closed.state, closed.said_by, closed.reason) == ("closed", "ada", "goes to fp32")
    await _more(database, record, 2)
    over = await _state(database, number)
    assert (over.state, over.said_by, over.reason) == ("closed", "ada", "goes to fp32")
    assert not await _lasts(record, fired)
    with pytest.raises(OperatorError, match="is closed by ada already"):
        await said(Say.CLOSE, "x")
    async with database.begin() as connection:
        written = [
            (one.action, one.note) for one in (await entries(connection)) if one.action.startswith("incident")
        ]
        events = await story(connection, closed)
    assert written == [
        ("incident mitigate", "the caller ignores them"),
        ("incident reopen", "rolled back"),
        ("incident mitigate", "again"),
        ("incident close", "goes to fp32"),
    ]
    assert [one.at for one in events] == sorted(one.at for one in events)
    assert {"onset", "page", "state", "closed", "release"} <= {one.kind for one in events}


async def _lasts(record: asyncpg.Connection, alert: int) -> bool:
    return await record.fetchval("select resolved_at from alert where id = $1", alert) is None


async def _costs_elsewhere(dsn: str, config: Path, number: int) -> tuple[list[Any], list[Any]]:
    """Return the cost of an incident as Python and as the read API have it."""
    listed = (await aio.connect(dsn, config=config).incidents()).incidents
    async with Database(dsn) as database:
        port = page_port(load(config), Secrets(dsn=dsn), database)
        address = f"http://127.0.0.1:{await port.open(('127.0.0.1', 0))}/api/v1/incidents"
        try:
            async with ClientSession() as session, session.get(address) as reply:
                rows = (await reply.json())["rows"]
        finally:
            await port.close()
    (row,) = [one for one in rows if one["id"] == number]
    in_python = [msgspec.to_builtins(one.cost) for one in listed if one.id == number]
    return in_python, [row[name] for name in ("cost", "cost_low", "cost_high", "currency")]


async def test_the_command_lists_shows_and_closes_incidents(
    database: Database, record: asyncpg.Connection, postgres_dsn: str, fired: int, tmp_path: Path
) -> None:
    """As text and as JSON; the operator's role alone changes one; what is not known names the command that tells."""
    number = (await _of_slice(record, FAINT_ID))["id"]
    await _count(database)

    async def typed(*words: str, dsn: str = postgres_dsn, more: str = "") -> Result:
        (tmp_path / "config.toml").write_text(f"{more}{MODEL}")
        environment = {"QUANTDRIFT_DSN": dsn}
        return await asyncio.to_thread(
            CliRunner().invoke,
            main,
            ["incidents", *words, "-c", str(tmp_path / "config.toml")],
            env=environment,
        )

    def completed() -> list[str]:
        context = click.Context(main, info_name="quantdrift")
        context.params["config_path"] = tmp_path / "config.toml"
        (argument,) = [one for one in incidents.commands["close"].params if one.name == "number"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("QUANTDRIFT_DSN", postgres_dsn)
            return [item.value for item in argument.shell_complete(context, str(number))]

    listed = await typed("list")
    assert listed.exit_code == 0, listed.output
    assert "scanner=faint" in listed.output
    assert str(number) in await asyncio.to_thread(completed)
    (row, *_) = [one for one in json.loads((await typed("list", "--json")).output) if one["id"] == number]
    assert (row["state"], row["changed"]["name"], fired in row["alerts"]) == ("open", "changed", True)
    shown = (await typed("show", str(number))).output
    assert "50 labels would tell." in shown
    assert "quantdrift labels wanted --model digits --version 1 --slice" in shown
    assert "began to drift" in shown
    assert "page:" in shown
    async with database.begin() as connection:
        await act(connection, fired, Act.ACK, "looking", identity="ada")
    assert "acknowledged by ada through quantdrift: looking" in (await typed("show", str(number))).output
    assert "at a cost of" not in (await typed("show", str(number))).output
    costly = await typed("show", str(number), more='[cost]\ncurrency = "EUR"\nvalue_per_request = 0.5\n')
    assert re.search(r"at a cost of about [0-9.]+ EUR \([0-9.]+ EUR to [0-9.]+ EUR\) so far", costly.output)
    changed = json.loads((await typed("show", str(number), "--json")).output)["changed"]["value"]
    await record.execute(
        "update comparison set attributes = jsonb_build_object('header.x-customer', case when exchange_id < $1 then 'acme' else 'birch' end)",
        "8" + 31 * "0",
    )
    window = await record.fetchrow("select began_at, counted_until from incident where id = $1", number)
    worth = await record.fetchval(
        "select sum(w * case customer when 'acme' then 40 else 0.5 end) / sum(w) from (select 1 / (pi1 * pi2) as w,"
        " attributes ->> 'header.x-customer' as customer from comparison where flip and model_version_id = 1"
        " and slice_ids && $1::int[] and captured_at >= $2 and captured_at < $3) changed",
        (await _of_slice(record, FAINT_ID))["slice_ids"],
        *window,
    )
    (tmp_path / "customers.csv").write_text("customer,value\nacme,40\n")
    by_customer = (
        '[cost]\ncurrency = "EUR"\nvalue_per_request = 0.5\nattribute = "header.x-customer"\n'
        f'values_file = "{tmp_path / "customers.csv"}"\n[capture]\nheaders = ["x-customer"]\n'
    )
    costs = [
        json.loads((await typed(*words, "--json", more=by_customer)).output)
        for words in (("show", str(number)), ("list",))
    ]
    assert costs[0]["cost"]["value"] == pytest.approx(changed * worth)
    assert [one["cost"] for one in costs[1] if one["id"] == number] == [costs[0]["cost"]]
    assert 0.5 < worth < 40
    cost = costs[0]["cost"]
    assert await _costs_elsewhere(postgres_dsn, tmp_path / "config.toml", number) == (
        [cost],
        [pytest.approx(cost[end]) for end in ("value", "low", "high")] + [cost["unit"]],
    )
    refused = await typed("close", str(number), "--reason", "x", dsn=await login_in(postgres_dsn, READER))
    assert refused.exit_code == 2
    assert "permission denied" in refused.output
    closed = await typed("close", str(number), "--reason", "over", dsn=await login_in(postgres_dsn, OPERATOR))
    assert closed.output.startswith(f"Incident {number} is closed"), closed.output
    assert (await typed("show", "99")).exit_code == 2
    assert json.loads((await typed("show", str(number), "--json")).output)["state"] == "closed"
