"""Latencies in Postgres: folded into a ticket, explained, shown and reported beside the answers."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import aiohttp
import asyncpg
import msgspec
import pytest

from quantdrift.cli.look.slices import signal_lines
from quantdrift.core.clock import ManualClock, SystemClock
from quantdrift.core.config.load import Secrets
from quantdrift.core.config.schema import Budget, Config, Model
from quantdrift.core.errors import OperatorError
from quantdrift.core.notation import percent
from quantdrift.core.records import Metric, Suspect
from quantdrift.facts.events import AlertEvent
from quantdrift.facts.speed import ItemTimes, Times
from quantdrift.facts.words.alert import text_of
from quantdrift.monitor.baselines.decisions import DecisionScope, accept, freeze_or_keep
from quantdrift.monitor.baselines.signal_view import signal_views
from quantdrift.monitor.explain.explain import Explainer
from quantdrift.monitor.fold.fold import Fold
from quantdrift.report.period import Period, PeriodKind
from quantdrift.show.page.server import page_port
from quantdrift.show.report.page import Form
from quantdrift.show.report.page import write as write_report
from quantdrift.storage.account.flow import flow
from quantdrift.storage.alerts.evidence import Evidence
from quantdrift.storage.baselines import baselines_now
from quantdrift.storage.database import Database
from quantdrift.storage.exchanges import times
from quantdrift.storage.fold.read import claim, load_catalog, resume
from quantdrift.storage.fold.write import write
from quantdrift.storage.fold_rows import Source, to_us
from quantdrift.storage.slices.slice_list import signals_of
from quantdrift.storage.snapshot import reading
from quantdrift.storage.speed import item_times
from tests.support.monitor.alert_cases import page
from tests.support.monitor.fold_stream import (
    ALL_ID,
    BEGIN,
    CONFIG,
    FAINT_ID,
    WITH_REFERENCE,
    batches,
    spread,
    store_batch,
    store_catalog,
)
from tests.support.storage.comparisons import Comparison, make_partitions, store_comparisons

pytestmark = pytest.mark.integration

LIMIT_S = 0.25
TIMED = msgspec.structs.replace(CONFIG, models=(Model(name="digits", budget=Budget(latency_p99_s=LIMIT_S)),))


GROWS = msgspec.structs.replace(CONFIG, models=(Model(name="digits", budget=Budget(latency_growth=2.0)),))
EDGE_S = 2**-3.25  # above the 0.1 s that an exchange takes
N_LEARNED, N_SLOW = 270, 220  # batches: 10 days, and 8


async def slice_page_of(database: Database, config: Config, dsn: str) -> str:
    """Return the live page of all traffic, as the server sends it."""
    port = page_port(config, Secrets(dsn=dsn), database)
    number = await port.open(("127.0.0.1", 0))
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{number}/slice/{WITH_REFERENCE}/{ALL_ID}") as answer,
        ):
            assert answer.status == 200
            return await answer.text()
    finally:
        await port.close()


async def fold_everything(database: Database, config: Config) -> None:
    """Fold what is stored, explain the alerts, and store the outcome."""
    async with database.begin() as connection:
        fold = Fold(config, await resume(connection))
        claimed = await claim(connection, fold.position.fold_seq, 1000)
        fold.learn(await load_catalog(connection, wanted={1}, known=fold.catalog))
        for batch in claimed:
            fold.batch(batch)
        explainer = Explainer(config, SystemClock(), lambda _: None)
        outcome = await explainer.explain(Evidence(connection), fold.take(), fold.catalog)
        await write(connection, outcome, "")


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
    await fold_everything(database, TIMED)
    return await event_of(record, FAINT_ID)


async def event_of(record: asyncpg.Connection, slice_id: int) -> AlertEvent:
    """Return the newest event of the alert of a slice."""
    details = await record.fetchval(
        "select details from transition where slice_id = $1 and text is not null order by id desc limit 1",
        slice_id,
    )
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
    assert text.splitlines()[0].endswith("took longer than 0.25 s (budget: 1 %).")
    assert slow.explanation.changed == 0
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
            now - timedelta(minutes=1),
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
        found = await item_times(connection, now - timedelta(hours=1), now + timedelta(hours=1))
    assert found == [
        ItemTimes(model="digits", version="1", device="cpu", items=4, reference=0.1, candidate=0.01),
    ]


async def test_the_report_has_the_ticket_of_a_slow_slice_beside_its_answers(
    slow: AlertEvent, postgres_dsn: str, tmp_path: Path
) -> None:
    """Its first sentence is that of the alert, and so are its steps; the version has its times."""
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
    assert episode.metric is Metric.LATENCY
    assert slow.evidence.after is not None
    assert f"{percent(slow.evidence.after)} of exchanges took longer than 0.25 s since" in episode.decided
    assert episode.examples == ()
    assert (episode.do_now, episode.tomorrow) == (tuple(map(str, text_of(slow).do_now)), ())
    assert "100 % of exchanges took longer than 0.25 s since" in episode.decided
    assert "100 % of exchanges in scanner=faint took longer than 0.25 s" in episode.headline
    assert version.speed.startswith(
        "Half of its answers took at most 0.1 s at the relay, and 99 % at most 0.4 s (budget: 0.25 s; "
    )
    text = (tmp_path / "report.md").read_text(encoding="utf-8").replace("\\", "")
    assert version.speed in text


async def test_a_latency_without_a_budget_is_learned_shown_and_accepted_anew(
    database: Database, record: asyncpg.Connection, postgres_dsn: str, tmp_path: Path
) -> None:
    """A week of 0.1 s, then 0.4 s: a ticket against what was learned, which every view shows; a person accepts the new time."""
    await store_catalog(record, days=20)
    stream = spread(batches(N_LEARNED + N_SLOW, faint_flips=0.0))
    for number, batch in enumerate(stream):
        rows = tuple(
            msgspec.structs.replace(row, latency_s=0.4 if number >= N_LEARNED else 0.1)
            for row in batch.comparisons
        )
        await store_batch(record, msgspec.structs.replace(batch, comparisons=rows))
    await fold_everything(database, GROWS)
    event = await event_of(record, ALL_ID)
    assert (event.evidence.detector, event.evidence.latency_budget_s) == ("growth", 2 * EDGE_S)
    assert event.explanation.unexplained is None
    async with database.begin() as connection:
        took = (await flow(connection, BEGIN)).models["digits"].latency
    assert took is not None
    assert took.learned_s == EDGE_S
    async with reading(database) as connection:
        now = (await baselines_now(connection, WITH_REFERENCE, ALL_ID))["latency"]
        (shown,) = [one for one in signal_views(await signals_of(connection, ALL_ID)) if one.kind == "growth"]
    assert (now.learned_s, now.level, now.source) == (EDGE_S, None, "learned")
    assert (
        f"latency growth  a baseline of {now.n_groups:,} exchanges: 1 % may take longer than 0.21 s"
        in "\n".join(signal_lines([shown], verdict="ok", unit="nat"))
    )
    seen = await slice_page_of(database, GROWS, postgres_dsn)
    assert "Learned: 99 % took 0.11 s at most, learned " in seen
    assert (
        f"from {now.n_groups:,} exchanges. A ticket opens when more than 1 % take longer than 2 times that."
        in seen
    )
    assert (shown.metric, shown.limit_s, shown.n_learned) == ("latency", 2 * EDGE_S, now.n_groups)
    figures = await write_report(
        GROWS,
        Secrets(dsn=postgres_dsn),
        Period(kind=PeriodKind.WEEK, begin=BEGIN + timedelta(days=10), end=BEGIN + timedelta(days=17)),
        out=tmp_path / "report.md",
        progress=lambda _: None,
        form=Form.MARKDOWN,
        clock=ManualClock(BEGIN + timedelta(days=17)),
    )
    assert "In the time that was learned from, 99 % took at most 0.11 s." in figures.models[0].speed
    with pytest.raises(OperatorError, match="no alert has set aside"):
        await freeze_or_keep(database, DecisionScope(model="digits", metrics=(Metric.LATENCY,)), Source.KEPT)
    since = BEGIN + timedelta(microseconds=stream[N_LEARNED].stored_us - to_us(BEGIN))
    found = await accept(
        database,
        GROWS,
        DecisionScope(model="digits", metrics=(Metric.LATENCY,), slices=("all",)),
        since=since,
        until=None,
        progress=lambda _: None,
    )
    assert [(one.metric, one.kind, one.recorded) for one in found] == [("latency", "growth", True)]
    for batch in spread(batches(N_LEARNED + N_SLOW + 10, faint_flips=0.0))[N_LEARNED + N_SLOW :]:
        rows = tuple(msgspec.structs.replace(row, latency_s=0.4) for row in batch.comparisons)
        await store_batch(record, msgspec.structs.replace(batch, comparisons=rows))
    await fold_everything(database, GROWS)
    async with reading(database) as connection:
        now = (await baselines_now(connection, WITH_REFERENCE, ALL_ID))["latency"]
    assert now.source == "accepted"
    assert now.learned_s is not None
    assert 0.4 < now.learned_s < 0.5
