"""Latencies in Postgres: folded into a ticket, explained, shown and reported beside the answers."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import asyncpg
import msgspec
import pytest

from quantdrift.core.clock import ManualClock, SystemClock
from quantdrift.core.config.load import Secrets
from quantdrift.core.config.schema import Budget, Model
from quantdrift.core.records import Metric, Suspect
from quantdrift.monitor.explain.explain import Explainer
from quantdrift.monitor.fold.alert_text import page
from quantdrift.monitor.fold.fold import Fold
from quantdrift.report.interval import Estimate
from quantdrift.report.page import Form
from quantdrift.report.page import write as write_report
from quantdrift.report.period import Period, PeriodKind
from quantdrift.storage.database import Database
from quantdrift.storage.monitor.events import AlertEvent
from quantdrift.storage.monitor.evidence import Evidence
from quantdrift.storage.monitor.read import claim, load_catalog, resume
from quantdrift.storage.monitor.write import write
from quantdrift.storage.page.history import Times, times
from quantdrift.storage.page.now import Saved, reading, saved
from tests.support.monitor.fold_stream import (
    ALL_ID,
    BEGIN,
    CONFIG,
    FAINT_ID,
    WITH_REFERENCE,
    batches,
    store_batch,
    store_catalog,
)
from tests.support.storage.comparisons import Comparison, make_partitions, store_comparisons

pytestmark = pytest.mark.integration

LIMIT_S = 0.25
TIMED = msgspec.structs.replace(CONFIG, models=(Model(name="digits", budget=Budget(latency_p99_s=LIMIT_S)),))


@pytest.fixture
async def slow(database: Database, record: asyncpg.Connection) -> AlertEvent:
    """Return the event of the ticket of a slice that is slow from the first exchange on, as it is stored."""
    await store_catalog(record)
    for batch in batches(60, faint_flips=0.0):
        rows = tuple(
            msgspec.structs.replace(row, latency_s=0.4 if FAINT_ID in row.slice_ids else 0.1)
            for row in batch.comparisons
        )
        await store_batch(record, msgspec.structs.replace(batch, comparisons=rows))
    async with database.begin() as connection:
        fold = Fold(TIMED, await resume(connection))
        claimed = await claim(connection, fold.position.fold_seq, 100)
        fold.learn(await load_catalog(connection, wanted={1}, known=fold.catalog))
        for batch in claimed:
            fold.batch(batch)
        explainer = Explainer(TIMED, SystemClock(), lambda _: None)
        outcome = await explainer.explain(Evidence(connection), fold.take(), fold.catalog)
        await write(connection, outcome, "")
    details = await record.fetchval("select details from alert where slice_id = $1", FAINT_ID)
    return AlertEvent.read(msgspec.json.decode(details))


async def test_a_slow_slice_is_a_ticket_that_names_the_latency(
    slow: AlertEvent, record: asyncpg.Connection
) -> None:
    """Stored, explained without margins or examples, and as the person on call reads it."""
    assert (slow.evidence.metric, slow.evidence.latency_budget_s) == (Metric.LATENCY, LIMIT_S)
    assert slow.evidence.suspect in {Suspect.UNKNOWN, Suspect.ENGINE}
    assert slow.examples.exchanges == ()
    assert slow.explanation.cause is None
    assert slow.explanation.unexplained is None
    text = page(slow)
    assert text.splitlines()[0].endswith("took longer than 0.25 s, 1 % is accepted; 0 % of answers changed.")
    assert slow.explanation.slow_elsewhere == 0.0
    assert (
        f"Of all other traffic 0 % took longer since the onset ({slow.explanation.n_elsewhere} exchanges)."
        in text
    )
    assert slow.evidence.after == pytest.approx(1.0)
    severities = await record.fetch("select distinct severity from alert")
    assert [row["severity"] for row in severities] == ["warning"]


async def test_times_are_those_of_the_traffic_and_not_of_the_sample(
    slow: AlertEvent, database: Database
) -> None:
    """Each exchange counts once, however many items it has, and as often as it stands for others: 0.25 against 1."""
    begin, end = BEGIN, BEGIN + timedelta(hours=1)
    async with reading(database) as connection:
        (of_all,) = await times(connection, WITH_REFERENCE, ALL_ID, (begin, end), latency_budget_s=LIMIT_S)
        (of_slice,) = await times(connection, WITH_REFERENCE, FAINT_ID, (begin, end))
    n, n_faint = of_all.n, of_slice.n
    assert slow.evidence.n_groups <= n_faint < n
    assert msgspec.structs.replace(of_all, slower=0.0) == Times(
        part="answer", n=n, median=0.1, p99=0.4, slower=0.0
    )
    assert of_all.slower == pytest.approx(n_faint / (n_faint + 4 * (n - n_faint)))
    assert (of_slice.median, of_slice.p99) == (0.4, 0.4)


async def test_what_quantisation_saves_is_per_item_and_only_where_both_sides_were_timed(
    database: Database, record: asyncpg.Connection
) -> None:
    """Of two batches with a time of the reference one has exchanges with a latency: two items each, in 0.02 s."""
    await store_catalog(record)
    now = datetime.now(UTC)
    await make_partitions(record, [(now - timedelta(minutes=1)).date()])
    for replay_s, latency_s in ((0.4, 0.02), (9.0, None), (None, 0.02)):
        batch_id = await record.fetchval(
            "insert into batch (kind, worker, captured_from, captured_to, n_rows, provenance, replay_s)"
            " values ('comparison', 'w', $1, $1, 4, $2, $3) returning id",
            now,
            '{"device": "cpu"}',
            replay_s,
        )
        await store_comparisons(
            record,
            [
                Comparison(
                    captured_at=now - timedelta(minutes=1),
                    exchange_id=exchange,
                    item=item,
                    n_items=2,
                    batch_id=batch_id,
                    model_version_id=WITH_REFERENCE,
                    latency_s=latency_s,
                )
                for exchange in (uuid4(), uuid4())
                for item in (0, 1)
            ],
        )
    async with reading(database) as connection:
        found = await saved(connection, now - timedelta(hours=1), now + timedelta(hours=1))
    assert found == [
        Saved(model="digits", version="1", device="cpu", items=4, reference=0.1, candidate=0.01),
    ]


async def test_the_report_has_the_ticket_of_a_slow_slice_beside_its_answers(
    slow: AlertEvent, postgres_dsn: str, tmp_path: Path
) -> None:
    """Its first sentence names the share of slow answers; how many decisions changed is a step; the version has its times."""
    figures = await write_report(
        TIMED,
        Secrets(dsn=postgres_dsn),
        Period(kind=PeriodKind.WEEK, begin=BEGIN - timedelta(days=6), end=BEGIN + timedelta(days=1)),
        out=tmp_path / "report.md",
        progress=lambda _: None,
        form=Form.MARKDOWN,
        clock=ManualClock(BEGIN + timedelta(days=1)),
    )
    (version,) = figures.models
    episode = next(one for one in figures.episodes if one.slice_id == FAINT_ID)
    assert (episode.metric, episode.after) == (
        Metric.LATENCY,
        Estimate(mean=slow.evidence.after or 0.0, low=None, high=None),
    )
    assert episode.examples == ()
    assert episode.advice[0] == slow.change.advice
    assert episode.advice[1].startswith("Of its decisions, 0 % changed since the onset, 1 % accepted")
    assert "100 % of exchanges took longer than 0.25 s since" in episode.decided
    assert "100 % of exchanges took longer than 0.25 s since" in version.headline
    assert version.speed.startswith(
        "Half of its answers took 0.1 s at most, as the relay saw it, and 99 % took 0.4 s at most (0.25 s is the budget, "
    )
    text = (tmp_path / "report.md").read_text(encoding="utf-8").replace("\\", "")
    assert version.speed in text
