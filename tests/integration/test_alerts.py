"""Alerts as people handle them: acknowledged by name and reason until they escalate, with an entry in the audit."""

import asyncpg
import pytest

from quantdrift.core.errors import OperatorError
from quantdrift.monitor.fold.fold import Fold
from quantdrift.storage.audit import entries
from quantdrift.storage.database import Database
from quantdrift.storage.monitor.alerts import (
    Act,
    AlertFact,
    act,
    actions_of,
    escalate,
    find_alert,
    list_alerts,
)
from quantdrift.storage.monitor.read import claim, load_catalog, resume
from quantdrift.storage.monitor.write import write
from quantdrift.storage.schema.roles import OPERATOR, READER
from tests.support.monitor.fold_stream import CONFIG, FAINT_ID, batches, store_batch, store_catalog
from tests.support.storage.logins import login_in

pytestmark = pytest.mark.integration


@pytest.fixture
async def fired(database: Database, record: asyncpg.Connection) -> int:
    """Return the number of a firing alert that the fold has written."""
    await store_catalog(record)
    for batch in batches(60, faint_flips=0.3):
        await store_batch(record, batch)
    async with database.begin() as connection:
        fold = Fold(CONFIG, await resume(connection))
        rows = await claim(connection, fold.position.fold_seq, 100)
        fold.learn(await load_catalog(connection, wanted={1}, known=fold.catalog))
        for batch in rows:
            fold.batch(batch)
        await write(connection, fold.take(), "", webhook=True)
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
