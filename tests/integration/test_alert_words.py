"""An alert is stored once and worded once: every surface shows what was written with it."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import asyncpg
import msgspec
import pytest
from click.testing import CliRunner

from quantdrift.cli.main import main
from quantdrift.facts.words.text import AlertText
from quantdrift.monitor.notify.alertmanager import encode
from quantdrift.monitor.notify.webhook import document
from quantdrift.monitor.outbox import log_record
from quantdrift.storage.alerts.alerts import (
    RELATED,
    alerts_between,
    current_alerts,
    due_deliveries,
    find_alert,
)
from quantdrift.storage.alerts.outbox import unsent
from quantdrift.storage.database import Database
from quantdrift.storage.snapshot import reading
from tests.support.monitor.fold_stream import (
    CONFIG,
    FAINT_ID,
    WITH_REFERENCE,
    batches,
    fold_stored,
    store_batch,
    store_catalog,
)

pytestmark = pytest.mark.integration
SPAN = timedelta(hours=1)
HEADLINE = "digits 1: as it was written, and as no code would word it."


async def test_every_surface_says_what_was_written_with_the_alert(
    database: Database, record: asyncpg.Connection, postgres_dsn: str, tmp_path: Path
) -> None:
    """A headline that no code would write is put into the row: event, webhook, Alertmanager, command and report show it."""
    await store_catalog(record)
    for batch in batches(60, faint_flips=0.3):
        await store_batch(record, batch)
    await fold_stored(database)
    alert_id, details = await record.fetchrow(
        "select id, details from alert where slice_id = $1 and severity = 'firing' and resolved_at is null",
        FAINT_ID,
    )
    assert msgspec.json.decode(details).keys() <= set(RELATED)
    stored = [
        msgspec.json.decode(text, type=AlertText)
        for (text,) in await record.fetch(
            "select text from transition where alert_id = $1 order by id", alert_id
        )
    ]
    assert f"quantdrift alerts ack {alert_id} " in stored[-1].plain()
    await record.execute(
        "update transition set text = text || jsonb_build_object('headline', $2::text) where alert_id = $1",
        alert_id,
        HEADLINE,
    )
    async with database.begin() as connection:
        alert = await find_alert(connection, alert_id)
        current, ended = await current_alerts(connection, SPAN)
        due = [one for one in await due_deliveries(connection, 100) if one.alert.id == alert_id]
        events = [one for one in await unsent(connection, 100) if one.alert_id == alert_id]
    assert alert.event is not None
    assert alert.words == msgspec.structs.replace(stored[-1], headline=HEADLINE)
    assert {str(log_record(event).body).partition("\n")[0] for event in events} == {HEADLINE}
    assert {json.loads(document(one, CONFIG))["summary"] for one in due} == {HEADLINE}
    posted = json.loads(encode(current, ended, CONFIG, datetime.now(UTC)))
    rows = [one["annotations"] for one in posted if one["labels"]["alert"] == str(alert_id)]
    assert {row["summary"] for row in rows} == {HEADLINE}
    assert not any(HEADLINE in row["description"] for row in rows)
    (tmp_path / "config.toml").write_text("")
    shown = await asyncio.to_thread(
        lambda: CliRunner(env={"QUANTDRIFT_DSN": postgres_dsn}).invoke(
            main, ["alerts", "show", str(alert_id), "-c", str(tmp_path / "config.toml")]
        )
    )
    assert HEADLINE in shown.output
    async with reading(database) as connection:
        at = alert.opened_at
        (episode,) = [
            one
            for one in await alerts_between(connection, at, at + SPAN, [WITH_REFERENCE])
            if one.id == alert_id
        ]
    assert episode.words == alert.words
