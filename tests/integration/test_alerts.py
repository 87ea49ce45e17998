"""Alerts as people handle them: acknowledged by name and reason until they escalate, with an entry in the audit."""

import asyncio
import json
import re
from collections.abc import Awaitable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import click
import msgspec
import pytest
from click.testing import CliRunner, Result

from quantdrift.cli.look.alerts import alerts
from quantdrift.cli.main import main
from quantdrift.core.config.schema import Web
from quantdrift.core.errors import OperatorError
from quantdrift.monitor.notify.alertmanager import encode
from quantdrift.monitor.notify.webhook import document
from quantdrift.release.notes import add_note
from quantdrift.release.progress import Watch
from quantdrift.release.setting import Setting
from quantdrift.storage.alerts.alerts import (
    Act,
    AlertFact,
    FindingKind,
    act,
    actions_of,
    add_finding,
    current_alerts,
    delay_delivery,
    due_deliveries,
    end_delivery,
    escalate,
    find_alert,
    findings_of,
    list_alerts,
)
from quantdrift.storage.audit import entries
from quantdrift.storage.database import Database
from quantdrift.storage.schema.roles import MONITOR, OPERATOR, PAGE, READER
from tests.support.monitor.fold_stream import (
    CLEAR_ID,
    CONFIG,
    FAINT_ID,
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
    """Return the number of a firing alert that the fold has written."""
    await store_catalog(record)
    for batch in batches(60, faint_flips=0.3):
        await store_batch(record, batch)
    await fold_stored(database)
    number = await record.fetchval(
        "select id from alert where slice_id = $1 and severity = 'firing' and resolved_at is null", FAINT_ID
    )
    return int(number)


async def _state(database: Database, alert_id: int) -> AlertFact:
    async with database.begin() as connection:
        return await find_alert(connection, alert_id)


async def test_an_acknowledgement_has_the_person_and_the_reason_also_in_the_audit(
    database: Database, fired: int
) -> None:
    """The database user and the identity that the web server passes are both kept; a note changes nothing."""
    async with database.begin() as connection:
        made = await act(connection, fired, Act.ACK, " looking into it ", identity="ada@example.org")
        await act(connection, fired, Act.NOTE, "the scanner was cleaned")
    assert (made.by, made.reason) == ("ada@example.org", "looking into it")
    assert made.through
    found = await _state(database, fired)
    assert found.acknowledged == made
    async with database.begin() as connection:
        await act(connection, fired, Act.UNACK, "going home")
        written = (await entries(connection))[-3:]
        done = await actions_of(connection, fired)
    assert [one.act for one in done] == [Act.ACK, Act.NOTE, Act.UNACK]
    assert [(one.action, one.subject, one.note) for one in written] == [
        ("alert ack", f"alert {fired}", "looking into it"),
        ("alert note", f"alert {fired}", "the scanner was cleaned"),
        ("alert unack", f"alert {fired}", "going home"),
    ]
    assert written[0].after == {"acknowledged": True, "identity": "ada@example.org"}
    assert written[1].after == {"acknowledged": True}
    assert (await _state(database, fired)).acknowledged is None


async def test_what_cannot_be_done_is_refused_by_name(
    database: Database, record: asyncpg.Connection, fired: int
) -> None:
    """No such alert, no reason, nothing to take back, and an alert that was resolved."""
    for number, what, reason, why in (
        (999, Act.ACK, "x", "there is no alert 999"),
        (fired, Act.ACK, "  ", "the reason is empty"),
        (fired, Act.NOTE, "x" * 2001, "2,001 characters"),
        (fired, Act.UNACK, "x", "is not acknowledged"),
    ):
        with pytest.raises(OperatorError, match=why):
            async with database.begin() as connection:
                await act(connection, number, what, reason)
    await record.execute("update alert set resolved_at = now() where id = $1", fired)
    with pytest.raises(OperatorError, match="was resolved"):
        async with database.begin() as connection:
            await act(connection, fired, Act.ACK, "x")
    async with database.begin() as connection:
        await act(connection, fired, Act.NOTE, "it was the lamp")


async def test_an_alert_stays_acknowledged_until_its_interval_is_above_the_one_of_then(
    database: Database, record: asyncpg.Connection, fired: int
) -> None:
    """A lower end up to the upper end of then changes nothing; above it the acknowledgement ends, once."""
    estimate = '{"flip": {"mean": 0.1, "low": %f, "high": %f}}'
    moved = "update verdict set estimate = cast($2::text as jsonb) where alert_id = $1"
    await record.execute(moved, fired, estimate % (0.1, 0.5))
    async with database.begin() as connection:
        await act(connection, fired, Act.ACK, "known")
    for low, acknowledged, escalations in ((0.5, True, 0), (0.51, False, 1), (0.9, False, 1)):
        await record.execute(moved, fired, estimate % (low, 1.0))
        async with database.begin() as connection:
            await escalate(connection, webhook=True)
        found = await _state(database, fired)
        assert (found.acknowledged is not None, found.escalations) == (acknowledged, escalations)
    waiting = await record.fetch("select webhook_due_at, sent_at from outbox where escalation_id is not null")
    assert [row["webhook_due_at"] is not None for row in waiting] == [True]


async def test_a_ticket_that_becomes_a_page_is_not_acknowledged_any_more(
    database: Database, record: asyncpg.Connection, fired: int
) -> None:
    """The change of verdict itself is in the outbox, so the escalation adds nothing there."""
    await record.execute("update alert set severity = 'warning' where id = $1", fired)
    async with database.begin() as connection:
        await act(connection, fired, Act.ACK, "known")
        await escalate(connection, webhook=True)
    assert (await _state(database, fired)).acknowledged is not None
    await record.execute("update alert set severity = 'firing' where id = $1", fired)
    async with database.begin() as connection:
        await escalate(connection, webhook=True)
        done = await actions_of(connection, fired)
    assert [(one.act, one.reason) for one in done][1:] == [(Act.ESCALATE, "from warning to firing")]
    assert await record.fetchval("select count(*) from outbox where escalation_id is not null") == 0


async def test_the_operator_may_act_under_his_own_name_alone_and_the_reader_may_not(
    postgres_dsn: str, fired: int
) -> None:
    """Nobody can write another database user's name, or the escalation's table as a reader."""
    async with Database(await login_in(postgres_dsn, OPERATOR)) as operators:
        async with operators.begin() as connection:
            made = await act(connection, fired, Act.ACK, "mine")
        assert OPERATOR in made.by
    operator = await asyncpg.connect(await login_in(postgres_dsn, OPERATOR))
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await operator.execute(
            "insert into alert_action (alert_id, action, reason, made_by) values ($1, 'ack', '', 'ada')",
            fired,
        )
    await operator.close()
    async with Database(await login_in(postgres_dsn, READER)) as readers:
        with pytest.raises(OperatorError, match="permission denied"):
            async with readers.begin() as connection:
                await act(connection, fired, Act.ACK, "mine")
        async with readers.begin() as connection:
            listed = {alert.id: alert for alert in await list_alerts(connection)}
        assert listed[fired].acknowledged == made


async def test_nobody_but_the_page_acknowledges_in_somebody_elses_name(postgres_dsn: str, fired: int) -> None:
    """An operator who names another person is refused; of an acknowledgement at the page the person and its user are shown."""
    operator = await asyncpg.connect(await login_in(postgres_dsn, OPERATOR))
    forged = (
        "insert into alert_action (alert_id, action, identity, reason) values ($1, 'ack', 'alice', 'fine')"
    )
    with pytest.raises(asyncpg.CheckViolationError, match="identity"):
        await operator.execute(forged, fired)
    with pytest.raises(asyncpg.CheckViolationError, match="identity"):
        await operator.execute(
            "insert into incident_change (incident_id, state, at, identity, reason)"
            " select incident_id, 'closed', now(), 'alice', 'over' from alert"
        )
    await operator.close()
    async with Database(await login_in(postgres_dsn, PAGE)) as page, page.begin() as connection:
        made = await act(connection, fired, Act.ACK, "mine", identity="alice")
    assert made.who.startswith(f"alice through {PAGE}")


async def test_the_commands_show_and_acknowledge_what_a_person_on_call_needs(
    postgres_dsn: str, fired: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list has who looks into it, one alert has its text, its actions and what to type; the shell completes numbers."""
    config = tmp_path / "config.toml"
    text = f'[notify]\nrunbook_url = "https://wiki.example/run"\n{MODEL}'
    config.write_text(text)
    monkeypatch.setenv("QUANTDRIFT_DSN", postgres_dsn)

    def typed(*words: str) -> Awaitable[Result]:
        return asyncio.to_thread(lambda: CliRunner().invoke(main, ["alerts", *words, "-c", str(config)]))

    before = (await typed("show", str(fired))).output
    assert f"quantdrift diagnose {fired} --candidate FILE" in before
    assert f"quantdrift gate FILE --inputs FOLDER --model=digits --note={fired} --config={config}" in before
    assert "Do now\n1. " in before
    assert "Runbook: https://wiki.example/run" in before
    assert f'Acknowledge: quantdrift alerts ack {fired} --reason "..."' in before
    done = await typed("ack", str(fired), "--reason", "rolling back")
    assert done.exit_code == 0
    assert f"Alert {fired} is acknowledged until it is resolved or escalates; by " in done.output
    assert "rolling back" in (await typed("list")).output
    await typed("note", str(fired), "the lamp was old")
    facts = json.loads((await typed("show", str(fired), "--json")).output)
    assert facts["acknowledged"]["reason"] == "rolling back"
    assert [action["act"] for action in facts["actions"]] == ["ack", "note"]
    assert (await typed("unack", str(fired), "--reason", "done")).exit_code == 0
    assert "live page" not in (await typed("list")).output
    assert {one["page"] for one in json.loads((await typed("list", "--json")).output)} == {""}
    config.write_text(f'[web]\nurl = "https://drift.example.com"\n{text}')
    page = f"https://drift.example.com/alert/{fired}"
    assert f"Live page: {page}\n" in (await typed("show", str(fired))).output
    head, *rows = (await typed("list")).output.rstrip().splitlines()
    assert head.endswith("live page")
    assert [row.split()[0] for row in rows if row.endswith(page)] == [str(fired)]
    listed = json.loads((await typed("list", "--json")).output)
    assert {one["id"]: one["page"] for one in listed}[fired] == page
    config.write_text(text)
    assert "No alerts of the model other." in (await typed("list", "--model", "other", "--all")).output
    wrong = await typed("ack", "999", "--reason", "x")
    assert (wrong.exit_code, "there is no alert 999" in wrong.output) == (2, True)

    def completed() -> list[str]:
        context = click.Context(main, info_name="quantdrift")
        context.params["config_path"] = config
        ack = alerts.commands["ack"]
        (argument,) = [one for one in ack.params if one.name == "number"]
        return [item.value for item in argument.shell_complete(context, str(fired))]

    assert str(fired) in await asyncio.to_thread(completed)


async def test_what_commands_have_found_is_a_note_that_everybody_reads(
    database: Database, postgres_dsn: str, fired: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest of each kind, cause first, a cause in the same words once; a person's note stays a note, and no acknowledgement changes."""
    async with database.begin() as connection:
        await act(connection, fired, Act.ACK, "looking")
        await add_finding(connection, fired, FindingKind.REPAIR, "Repair: a copy.", {"repairs": []})
        await add_finding(connection, fired, FindingKind.CAUSE, "Cause: weights.", {"sites": []})
        await add_finding(connection, fired, FindingKind.CAUSE, "Cause: resolution.", {"sites": [1]})
        await add_finding(connection, fired, FindingKind.CAUSE, "Cause: resolution.", {"sites": [2]})
        await act(connection, fired, Act.NOTE, "the lamp was old")
        found = (await findings_of(connection, [fired, 999]))[fired]
        assert [(one.kind.value, one.text) for one in found] == [
            ("cause", "Cause: resolution."),
            ("repair", "Repair: a copy."),
        ]
        assert found[0].details == {"sites": [1]}
        assert [one.is_finding for one in await actions_of(connection, fired)] == [
            False,
            True,
            True,
            True,
            False,
        ]
    assert (await _state(database, fired)).acknowledged is not None
    config = tmp_path / "config.toml"
    config.write_text(MODEL)
    monkeypatch.setenv("QUANTDRIFT_DSN", postgres_dsn)
    command = ["alerts", "show", str(fired), "-c", str(config)]
    shown = (await asyncio.to_thread(CliRunner().invoke, main, command)).output
    assert "\nCause: resolution. (" in shown
    assert "Cause: weights." not in shown
    assert shown.count("Repair: a copy.") == 1
    assert "the lamp was old" in shown
    assert f"quantdrift diagnose {fired}" not in shown
    assert f"quantdrift gate FILE --inputs FOLDER --model=digits --note={fired}" in shown


async def test_a_reader_diagnoses_and_is_told_that_the_alert_has_no_note(
    postgres_dsn: str,
    fired: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Writing needs the operator's role; without it the command goes on."""
    config = tmp_path / "config.toml"
    config.write_text('[[models]]\nname = "digits"\n')

    def noted() -> list[str]:
        watch = Watch(None)
        setting = Setting.of(config, None)
        add_note(setting, watch, fired, kind=FindingKind.CAUSE, text="Cause: weights.", details={})
        return watch.notes

    monkeypatch.setenv("QUANTDRIFT_DSN", await login_in(postgres_dsn, READER))
    (note,) = noted()
    assert note.startswith(f"Alert {fired} has no note of this result: ")
    monkeypatch.setenv("QUANTDRIFT_DSN", await login_in(postgres_dsn, OPERATOR))
    assert noted() == []


async def test_each_state_of_an_alert_is_a_label_set_of_its_own_and_the_former_ones_end(
    database: Database, record: asyncpg.Connection, fired: int
) -> None:
    """An acknowledged alert that becomes worse is a new alert to Alertmanager; the one before ends with its own labels."""
    async with database.begin() as connection:
        await act(connection, fired, Act.ACK, "known")
    await record.execute("update alert_action set level = -1 where alert_id = $1", fired)
    await record.execute(
        """update verdict set estimate = '{"flip": {"mean": 0.1, "low": 0.1, "high": 0.2}}' where alert_id = $1""",
        fired,
    )
    async with database.begin() as connection:
        await escalate(connection, webhook=True)
        current, ended = await current_alerts(connection, timedelta(hours=1))
        due = await due_deliveries(connection, 100)
    now = datetime.now(UTC) + timedelta(seconds=1)
    rows = json.loads(encode(current, ended, CONFIG, now))
    states = {
        (row["labels"]["severity"], row["labels"].get("escalation", "0"), row["endsAt"] > now.isoformat())
        for row in rows
        if row["labels"]["alert"] == str(fired)
    }
    assert {("page", "0", False), ("page", "1", True)} <= states
    assert [state for state in states if state[2]] == [("page", "1", True)]
    assert [event.change for event in due if event.alert.id == fired][-1] == "worse"


@pytest.mark.usefixtures("fired")
async def test_a_webhook_that_refuses_one_event_gets_the_others_and_that_one_later(
    postgres_dsn: str, record: asyncpg.Connection
) -> None:
    """A failure delays its own event alone, and is written beside it."""
    async with Database(postgres_dsn) as database, database.begin() as connection:
        due = await due_deliveries(connection, 100)
        await delay_delivery(connection, due[0].id, 60.0, "it answers with status 400")
        left = await due_deliveries(connection, 100)
        for event in left:
            await end_delivery(connection, event.id)
    assert len(due) > len(left) > 0
    rows = await record.fetch(
        "select id, webhook_attempts, webhook_error, webhook_due_at > now() as later from outbox"
        " where webhook_due_at is not null"
    )
    assert [tuple(row) for row in rows] == [(due[0].id, 1, "it answers with status 400", True)]


async def test_an_alert_prints_no_command_that_cannot_work_for_it_and_names_those_of_its_cause(
    record: asyncpg.Connection, postgres_dsn: str, fired: int, tmp_path: Path
) -> None:
    """Of a learned slice nothing can be diagnosed, and it is said why; without a runbook's address there is no line for it."""

    async def shown(alert_id: int) -> str:
        return (await _typed(tmp_path, postgres_dsn, "alerts", "show", str(alert_id)))[1]

    assert "quantdrift diagnose" in (before := await shown(fired))
    assert "Runbook" not in before
    assert "docs/how-to" not in before
    learned = '{"where": [{"key": "cluster", "equals": "7"}]}'
    await record.execute("update slice set definition = $1 where id = $2", learned, FAINT_ID)
    other = await record.fetchval(
        "insert into alert (model_version_id, slice_id, severity, metric, onset_at, opened_at, details)"
        " select model_version_id, $2, severity, metric, onset_at, opened_at, details || jsonb_build_object('explained_by_id',"
        " slice_id, 'explained_by', 'scanner=faint') from alert where id = $1 returning id",
        fired,
        CLEAR_ID,
    )
    text = await shown(fired)
    assert "quantdrift diagnose 1" not in text
    assert "quantdrift repair 1" not in text
    assert "cannot help here: recorded inputs do not tell which items belong to the slice" in text
    assert f"quantdrift gate FILE --inputs FOLDER --model=digits --note={fired}" in text
    assert f"Same cause: this one explains alert {other}: quantdrift alerts show {other}\n" in text
    assert f"Same cause: alert {fired} explains this one: quantdrift alerts show {fired}\n" in await shown(
        other
    )
    _, listed = await _typed(tmp_path, postgres_dsn, "alerts", "list")
    numbers = [row.split()[0] for row in listed.splitlines()[1:]]
    assert numbers.index(str(fired)) < numbers.index(str(other))
    assert f"explained by {fired}" in listed


async def test_a_replaced_version_ends_its_alerts_everywhere_and_they_come_back_with_it(
    database: Database, record: asyncpg.Connection, postgres_dsn: str, fired: int, tmp_path: Path
) -> None:
    """Commands, Alertmanager and webhook say what serves now; the same alert, acknowledged as before, is open again."""
    async with database.begin() as connection:
        await act(connection, fired, Act.ACK, "rolling back")
    await store_serving(record, 3, 400, 200)
    await fold_stored(database)
    over = await _state(database, fired)
    assert (over.is_open, over.ended, over.serving) == (False, "replaced", ("3",))

    async def typed(*words: str) -> str:
        code, output = await _typed(tmp_path, postgres_dsn, *words)
        assert code == 0, output
        return output

    said = "1 does not serve any more (last seen 2026-03-01 12:02 UTC). 3 serves now."
    listed = await typed("alerts", "list")
    assert listed.startswith(f"No open alerts.\ndigits {said} Over for that reason: alert ")
    state, _, first, then, *rest = (await typed("alerts", "show", str(fired))).splitlines()
    assert then.startswith("When it opened: digits 1: ")
    assert not any("Do now" in line or "ack" in line.split() or "diagnose" in line for line in rest)
    assert state.endswith(" UTC (version replaced).")
    assert first == f"{said} This alert is over. It opens again if 1 serves again."
    assert f"digits {said}" in (triage := await typed("triage"))
    assert "a day" not in triage
    assert f"{said} This alert is over" in await typed("slices", "show", "scanner=faint")
    rows, now = await _posted(database)
    posted = [row for row in rows if row["labels"]["alert"] == str(fired)]
    assert {row["annotations"]["ended"] for row in posted} == {"replaced"}
    assert all(row["endsAt"] <= now for row in posted)
    assert {row["annotations"]["summary"].partition(".")[0] for row in posted} == {said.partition(".")[0]}
    assert (await _delivered(database, fired))[-1] == (
        "ended",
        f"digits {said} The alert of scanner=faint is over.",
    )

    await store_serving(record, 1, 700, 200)
    await store_serving(record, 3, 701, 200)
    await fold_stored(database)
    back = await _state(database, fired)
    assert (back.is_open, back.ended, back.serving) == (True, "", ())
    assert back.acknowledged is not None
    rows, now = await _posted(database)
    posted = [
        row for row in rows if row["labels"]["alert"] == str(fired) and row["labels"]["severity"] == "page"
    ]
    assert [row["endsAt"] > now for row in posted] == [True]
    change, summary = (await _delivered(database, fired))[-1]
    assert (change, "answers in scanner=faint changed" in summary) == ("opened", True)
    why = await record.fetchval(
        "select details ->> 'reason' from transition where alert_id = $1 order by id desc", fired
    )
    assert why == "this version serves again, and its alert lasts"
    assert f"{fired} " in await typed("alerts", "list")


async def _typed(folder: Path, dsn: str, *words: str) -> tuple[int, str]:
    """Return the exit code and the output of a command."""
    config = folder / "config.toml"
    config.write_text(MODEL)
    runner, command = CliRunner(env={"QUANTDRIFT_DSN": dsn}), [*words, "-c", str(config)]
    result = await asyncio.to_thread(lambda: runner.invoke(main, command))
    return result.exit_code, result.output


async def _posted(database: Database) -> tuple[list[dict[str, Any]], str]:
    """Return what Alertmanager gets, and the time."""
    async with database.begin() as connection:
        current, ended = await current_alerts(connection, timedelta(hours=1))
    now = datetime.now(UTC) + timedelta(seconds=1)
    return json.loads(encode(current, ended, CONFIG, now)), now.isoformat()


async def _delivered(database: Database, alert_id: int) -> list[tuple[str, str]]:
    """Return the changes of an alert that the webhook gets, with their summaries."""
    async with database.begin() as connection:
        due = [one for one in await due_deliveries(connection, 100) if one.alert.id == alert_id]
    return [(one.change, json.loads(document(one, CONFIG))["summary"]) for one in due]


async def test_a_link_in_the_name_of_a_slice_is_no_link_in_any_chat(
    database: Database, record: asyncpg.Connection
) -> None:
    """Slack's markup, Markdown, HTML, mentions and bare addresses that a client sends are words in every text; our own links stay."""
    hostile = "scanner=<https://evil.example|Ack> [a](https://evil.example) <b> @here https://drift.example.com@evil.example"
    await store_catalog(record)
    await record.execute("update slice set name = $1 where id = $2", hostile, FAINT_ID)
    for batch in batches(60, faint_flips=0.3):
        await store_batch(record, batch)
    await fold_stored(database)
    config = msgspec.structs.replace(CONFIG, web=Web(url="https://drift.example.com"))
    async with database.begin() as connection:
        current, ended = await current_alerts(connection, timedelta(hours=1))
        due = await due_deliveries(connection, 100)
    rows = json.loads(encode(current, ended, config, datetime.now(UTC)))
    documents = [json.loads(document(one, config)) for one in due]
    shown = [row["annotations"][name] for row in rows for name in ("summary", "description")]
    shown += [text for one in documents for text in (one["summary"], one["text"])]
    shown += [step["text"] for one in documents for step in one["do_now"]]
    assert any("scanner=" in text for text in shown)
    for text in shown:
        assert not re.search(r"[<>]|\]\(|(?<!\w)@", text), text
        assert re.sub(r"https://drift\.example\.com/(?!/)", "", text).count("://") == 0, text
    assert any("https://drift.example.com/alert/" in row["annotations"]["page"] for row in rows)


async def test_a_person_closes_an_alert_for_everybody_to_see(
    database: Database, record: asyncpg.Connection, postgres_dsn: str, fired: int, tmp_path: Path
) -> None:
    """With the operator's right, a name and a reason, in the audit; pagers get the end at once, and no traffic is needed."""
    reason = "archive goes to digits-fp32 since 03:20"
    command = ("alerts", "close", str(fired), "--reason", reason)
    code, output = await _typed(tmp_path, await login_in(postgres_dsn, READER), *command)
    assert (code, "permission denied" in output) == (2, True)
    operator = await login_in(postgres_dsn, OPERATOR)
    code, output = await _typed(tmp_path, operator, *command)
    assert code == 0
    assert f"Alert {fired} is closed, and the detectors of its slice start from the beginning; by " in output
    code, output = await _typed(tmp_path, operator, *command)
    assert (code, "already" in output) == (2, True)
    rows, now = await _posted(database)
    posted = [row for row in rows if row["labels"]["alert"] == str(fired)]
    assert posted
    assert all(row["endsAt"] <= now for row in posted)
    assert f"closed this alert ({datetime.now(UTC):%Y-%m-%d}" in posted[-1]["annotations"]["summary"]
    async with database.begin() as connection:
        newest = (await entries(connection))[-1]
        assert fired not in {one.id for one in await list_alerts(connection)}
    assert (newest.action, newest.subject, newest.note) == ("alert close", f"alert {fired}", reason)

    async with Database(await login_in(postgres_dsn, MONITOR)) as of_monitor:
        await fold_stored(of_monitor)
    row = await record.fetchrow(
        "select a.ended, v.verdict, v.reason, v.alert_id from alert a join verdict v using (model_version_id, slice_id)"
        " where a.id = $1",
        fired,
    )
    assert row is not None
    assert (row["ended"], row["verdict"], row["alert_id"]) == ("closed", "unknown", None)
    assert row["reason"].startswith("closed by ")
    assert row["reason"].endswith(f": {reason}")
    change, summary = (await _delivered(database, fired))[-1]
    assert change == "ended"
    assert summary.startswith("digits 1: the alert of scanner=faint was closed by ")
    _, shown = await _typed(tmp_path, operator, "alerts", "show", str(fired))
    assert shown.startswith(f"Alert {fired}: a page, closed by ")
    with pytest.raises(OperatorError, match="was closed by"):
        async with database.begin() as connection:
            await act(connection, fired, Act.ACK, "x")
