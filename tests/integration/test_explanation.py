"""Alerts with their explanation, from a real record, inside the fold's transaction."""

import itertools
import random
import re
from collections import Counter
from typing import Any

import asyncpg
import msgspec
import pytest
from sqlalchemy import text

from quantdrift.core.clock import ManualClock
from quantdrift.core.clusters import cluster_slice
from quantdrift.core.config.schema import Config, Model, Monitor
from quantdrift.core.tasks import MEASURES, Task
from quantdrift.facts.explanation import Explanation, explanation_of
from quantdrift.facts.words.text import AlertText
from quantdrift.monitor.explain.explain import Explainer
from quantdrift.monitor.fold.fold import Fold
from quantdrift.storage.alerts.alerts import DETAILS, LAST_EVENT
from quantdrift.storage.alerts.evidence import Evidence, EvidenceItem
from quantdrift.storage.database import Database
from quantdrift.storage.figures.grammar import grammar_tokens
from quantdrift.storage.figures.tokens import token_bins
from quantdrift.storage.fold.read import claim, load_catalog, resume
from quantdrift.storage.fold.write import write
from quantdrift.storage.fold_rows import from_us
from quantdrift.storage.versions import measure_of_text
from tests.support.monitor.fold_stream import BEGIN, BEGIN_US, SECOND_US
from tests.support.monitor.onset_stream import (
    ALL,
    CLEAR,
    DARK,
    FAINT,
    ONSET_S,
    Draw,
    Item,
    damage,
    input_shift,
    items,
    store_items,
    store_names,
    store_successor,
)

pytestmark = pytest.mark.integration
# Weights are 1 in the stream, and the policy would have it that some are not: only their ratio matters.
CONFIG = Config(models=(Model(name="digits"),), monitor=Monitor(min_groups=50))


@pytest.fixture
async def record(record: asyncpg.Connection) -> asyncpg.Connection:
    """Return a connection to a record that knows version, slices and policy."""
    await store_names(record)
    return record


async def fold_all(
    database: Database, *, at_once: int, evidence: type[Evidence] = Evidence, most: int | None = None
) -> Counter[str]:
    """Fold what waits, `at_once` batches in a transaction, `most` of these; return what became of the alerts to be explained."""
    counted: Counter[str] = Counter()
    explainer = Explainer(CONFIG, ManualClock(BEGIN), lambda outcome: counted.update([outcome]))
    for turn in itertools.count(1):
        async with database.begin() as connection:
            fold = Fold(CONFIG, await resume(connection))
            found = await claim(connection, fold.position.fold_seq, at_once)
            fold.learn(await load_catalog(connection))
            for rows in found:
                fold.batch(rows)
            outcome = await explainer.explain(evidence(connection), fold.take(), fold.catalog)
            await write(connection, outcome, "")
        if not found or turn == most:
            break
    return counted


async def texts(record: asyncpg.Connection) -> dict[int, str]:
    """Return by slice what its newest alert said when it was written."""
    rows = await record.fetch(
        "select slice_id, text from transition where text is not null and to_verdict in ('warning', 'firing') order by id"
    )
    return {row["slice_id"]: msgspec.json.decode(row["text"], type=AlertText).plain() for row in rows}


async def told(record: asyncpg.Connection) -> list[tuple[Any, ...]]:
    """Return every alerting change of verdict with its details."""
    rows = await record.fetch(
        "select slice_id, to_verdict, at, fold_seq, details from transition where to_verdict in ('warning', 'firing')"
        " order by fold_seq, slice_id"
    )
    return [(*row[:4], msgspec.json.decode(row["details"])) for row in rows]


async def alerts(record: asyncpg.Connection) -> dict[int, Explanation]:
    """Return per slice what is told of its open alert."""
    rows = await record.fetch(
        f"select a.slice_id, {DETAILS} as details from alert a {LAST_EVENT} where a.resolved_at is null"
    )
    return {row["slice_id"]: explanation_of(msgspec.json.decode(row["details"])) for row in rows}


async def story(database: Database, record: asyncpg.Connection, draw: Draw, *, at_once: int = 16) -> None:
    """Store and fold a stream."""
    await store_items(record, items(draw), engine=True)
    assert set(await fold_all(database, at_once=at_once)) == {"explained"}


async def test_damage_in_a_small_slice_explains_the_larger_ones(
    database: Database, record: asyncpg.Connection
) -> None:
    """`dark` flips since the onset: it is damage, `faint` and `all` fold under it, `clear` is silent.

    Seeded; 35 % flips against 0.2 %. The engine that replays changed with the onset, and is named.
    """
    await story(database, record, damage)
    found = await alerts(record)
    assert DARK in found
    assert CLEAR not in found
    assert len(found) > 1
    for larger in found.keys() - {DARK}:
        assert (found[larger].explained_by, found[larger].explained_by_id) == ("dark", DARK)
    dark = found[DARK]
    assert dark.explained_by is None
    assert set(dark.explains_ids) == found.keys() - {DARK}
    assert dark.cause == "damage"
    assert dark.aggregate_cause == "within"
    # The version is old and the stream is not: what lies right before an onset that came late is left out.
    assert dark.compared_with == "the week before the onset without its newest quarter"
    assert dark.compared_version is None
    assert dark.changes == (
        "provider of the replay: CUDAExecutionProvider, first seen 2026-03-01 12:06 UTC (before: CPUExecutionProvider)",
        "device of the replay: NVIDIA H200, first seen 2026-03-01 12:06 UTC (before: cpu)",
    )
    assert "Numeric damage" in (await texts(record))[DARK]
    for slice_id, verdict, *_, details in await told(record):
        assert details["verdict"] == verdict
        if explanation_of(details).explained_by:
            # A page is never hidden behind a ticket, and stays a page.
            assert slice_id in {ALL, FAINT}
            assert "Look at the alert of dark: without" in (await texts(record))[slice_id]
        assert details["incident"] == await record.fetchval(
            "select incident_id::text from alert where slice_id = $1", DARK
        )


@pytest.mark.parametrize("at_once", [pytest.param(1, marks=pytest.mark.release), 40])
async def test_two_damaged_stores_of_a_city_are_two_incidents(
    database: Database, record: asyncpg.Connection, at_once: int
) -> None:
    """`dark` and `clear` are two of the six stores of `faint`: the city and the aggregate stand under them, not beside them."""
    rng = random.Random(4)
    stream = []
    for number in range(5400):
        at_us = BEGIN_US + number * SECOND_US // 10
        store = rng.randrange(6) if rng.random() < 0.6 else None
        slices = (
            ALL,
            *((FAINT,) if store is not None else ()),
            *{0: (DARK,), 1: (CLEAR,)}.get(store or 0, ()),
        )
        damaged = store in {0, 1} and at_us >= BEGIN_US + ONSET_S * SECOND_US
        stream.append(
            Item(
                at_us=at_us,
                exchange=f"{rng.getrandbits(128):032x}",
                slices=slices if store is not None else (ALL,),
                margin=0.5,
                flip=rng.random() < (0.35 if damaged else 0.002),
                divergence=0.001,
            )
        )
    await store_items(record, stream)
    await fold_all(database, at_once=at_once)
    found = await alerts(record)
    assert {DARK, CLEAR} < found.keys()
    larger = found.keys() - {DARK, CLEAR}
    assert larger
    assert len({found[one].incident for one in (DARK, CLEAR)}) == 2
    for one in larger:
        assert set(str(found[one].explained_by).split(" and ")) == {"dark", "clear"}
        assert found[one].incident in {found[DARK].incident, found[CLEAR].incident}


async def test_outputs_that_are_not_finite_are_reported(
    database: Database, record: asyncpg.Connection
) -> None:
    """Half of the flips since the onset are of such outputs: their share of the slice is said, beside that before."""
    await store_items(record, items(damage))
    await record.execute(
        """update comparison set divergence = null, detail = '{"candidate_not_finite": true}'"""
        " where flip and $1 = any(slice_ids) and captured_at >= $2 and exchange_id::text < '8'",
        DARK,
        from_us(BEGIN_US + ONSET_S * SECOND_US),
    )
    await fold_all(database, at_once=16)
    dark = (await alerts(record))[DARK]
    assert dark.not_finite is not None
    assert 0.1 < dark.not_finite < 0.7
    assert dark.not_finite_before == 0
    said = (await texts(record))[DARK]
    assert f"{100 * dark.not_finite:.3g} % of the slice's outputs since the onset" in said
    assert "(before: 0 %)" in said


async def test_other_measures_that_moved_are_listed(database: Database, record: asyncpg.Connection) -> None:
    """Of all that the comparator measures beside: what moved in the slice and what is counted, and not what stayed."""
    await store_items(record, items(damage))
    await record.execute(
        """
        with drawn as (
            select exchange_id, ('x' || left(exchange_id::text, 4))::bit(16)::int / 65536.0 as u,
                $1 = any(slice_ids) and captured_at >= $2 as moved from comparison
        )
        update comparison c set detail = jsonb_strip_nulls(jsonb_build_object(
            'box_shift', case when moved then 0.3 else 0.1 end + u / 100, 'score_shift', u - 0.5, 'gained', u < 0.1,
            'worst_class', case when moved then 7 else 2 end, 'by_output', jsonb_build_object('mask', u, 'logits', 1 - u),
            'candidate_nan', case when moved and u < 0.9 then 1 end, 'finish_reason', 'stop'
        )) from drawn d where d.exchange_id = c.exchange_id
        """,
        DARK,
        from_us(BEGIN_US + ONSET_S * SECOND_US),
    )
    await fold_all(database, at_once=16)
    dark = (await alerts(record))[DARK]
    assert set(dark.moved) == {"box_shift", "candidate_nan"}
    assert dark.n_measures == 6
    before, after = (
        dict(zip(dark.moved, means, strict=True)) for means in (dark.moved_before, dark.moved_after)
    )
    assert before == {"box_shift": pytest.approx(0.105, abs=0.01), "candidate_nan": 0}
    assert after == {
        "box_shift": pytest.approx(0.305, abs=0.01),
        "candidate_nan": pytest.approx(0.9, abs=0.1001),
    }
    said = (await texts(record))[DARK]
    assert "box_shift from 0.105 to 0.30" in said
    assert "(6 compared)" in said


async def test_which_divergence_answers_of_a_language_model_have_is_said(
    database: Database, record: asyncpg.Connection
) -> None:
    """KL and regret are different measures: the alert names that of its answers, and page and report that of the newest ones."""
    await store_items(record, items(damage))
    await record.execute(
        """
        update comparison set detail = jsonb_build_object('measure', case
            when ('x' || left(exchange_id::text, 4))::bit(16)::int < 16384 then 'regret' else 'kl' end)
        """
    )
    await fold_all(database, at_once=16)
    name = (await alerts(record))[DARK].divergence_is
    assert name is not None
    assert re.fullmatch(r"divergence per token \(KL of \d\d % of the answers, else regret\)", name)
    version = await record.fetchval("select min(model_version_id) from comparison")
    before, measure = from_us(2 * BEGIN_US), MEASURES[Task.GENERATION]
    async with database.begin() as connection:
        named = await measure_of_text(connection, version, measure, before)
        assert named.name.startswith("divergence per token (KL of ")
        await record.execute('update comparison set detail = \'{"measure": "regret"}\'')
        named = await measure_of_text(connection, version, measure, before)
        assert (named.name, named.unit) == ("regret per token", "nat")
        # Few tokens diverge, but each stands for a thousand.
        await record.execute(
            """
            update comparison set pi1 = 1, pi2 = case when item = 0 and exchange_id::text < '8' then 0.001 else 1 end,
                detail = jsonb_build_object('divergence_bins',
                    case when item = 0 and exchange_id::text < '8' then '37:7' else '0:3 1:4' end)
            """
        )
        slice_id = await record.fetchval("select id from slice where predicate = 'true'")
        of_tokens = (await token_bins(connection, version, slice_id, from_us(0), before)).quantiles
        assert of_tokens is not None
        assert of_tokens.median == of_tokens.p999 == pytest.approx(1e-6 * 10 ** (36.5 / 6))
        assert of_tokens.tokens % 7 == 0 < of_tokens.tokens <= 35_000
        assert (await token_bins(connection, version, slice_id, before, before)).quantiles is None
        # A third of the answers has no grammar, and of another third it is not known where it left no choice.
        await record.execute(
            """
            update comparison set detail = case ascii(exchange_id::text) % 3 when 0 then '{"n_scored": 9}' when 1 then '{"n_scored": 9, "grammar": true}'
                else '{"n_scored": 8, "grammar": true, "n_forced": 3}' end::jsonb
            """
        )
        under = await grammar_tokens(connection, version, slice_id, from_us(0), before)
        assert under is not None
        assert 0 < under.known < under.answers
        assert (under.forced, under.scored) == (3 * under.known, 8 * under.known)
        assert await grammar_tokens(connection, version, slice_id, before, before) is None
        assert (
            await measure_of_text(connection, version, MEASURES[Task.RANKING], before)
            is MEASURES[Task.RANKING]
        )


@pytest.mark.release
async def test_a_slow_database_leaves_out_the_other_measures(
    database: Database, record: asyncpg.Connection
) -> None:
    """The rest of the explanation stands without it."""

    class Slow(Evidence):
        async def details(self, **asked: Any) -> Any:
            await self._connection.execute(text("select pg_sleep(2)"))
            return await super().details(**asked)

    await store_items(record, items(damage))
    assert set(await fold_all(database, at_once=16, evidence=Slow)) == {"explained"}
    dark = (await alerts(record))[DARK]
    assert dark.cause == "damage"
    assert dark.n_measures is None


async def test_a_configuration_warning_is_in_the_explanation(
    database: Database, record: asyncpg.Connection
) -> None:
    """Whoever is woken by figures that may mislead reads so in the alert."""
    await store_items(record, items(damage))
    await record.execute(
        "insert into doubt select model, reference_digest, 'output_kind', 'they are probabilities', now() from model_version"
    )
    await fold_all(database, at_once=16)
    dark = (await alerts(record))[DARK]
    assert dark.doubt == "they are probabilities"
    assert "Doubt about the configuration: they are probabilities." in (await texts(record))[DARK]


async def test_the_advice_fits_what_the_shadow_has_seen_the_reference_to_be_made_of(
    database: Database, record: asyncpg.Connection
) -> None:
    """Nobody is told to quantise decision trees by channel, and the event says what the model is made of."""
    await store_items(record, items(damage))
    await record.execute("""update batch set provenance = provenance || '{"build": "trees"}'""")
    await fold_all(database, at_once=16)
    assert (await alerts(record))[DARK].build == "trees"
    advice = (await texts(record))[DARK]
    assert "thresholds and leaf values" in advice
    assert "channel" not in advice


async def test_more_close_calls_are_reported_as_input_shift(
    database: Database, record: asyncpg.Connection
) -> None:
    """The model does what it always did on close calls; `faint` has more of them. Nobody calls it damage."""
    await story(database, record, input_shift)
    found = await alerts(record)
    assert found[FAINT].cause == "input_shift"
    assert found[FAINT].low_margin_after == pytest.approx(0.5, abs=0.1)
    assert all(one.cause != "damage" for one in found.values())


async def test_a_version_that_is_bad_from_its_first_exchange_is_compared_with_the_one_before(
    database: Database, record: asyncpg.Connection
) -> None:
    """It has no before of its own, or a bad one: damage is told against version 1, of the slice and of all traffic.

    Seeded; 35 % flips of version 2 in `dark` against 0.2 % of version 1. A ticket of a few exchanges may be undecided.
    """
    await store_successor(record)
    await store_items(record, items(damage), successor=True)
    assert set(await fold_all(database, at_once=16)) == {"explained"}
    found = await alerts(record)
    dark = found[DARK]
    assert dark.compared_version == "1"
    assert dark.compared_with == "version 1 in the week before this version came"
    assert (dark.cause, dark.aggregate_cause) == ("damage", "within")
    assert "Compared with version 1" in (await texts(record))[DARK]
    assert any(change.startswith("candidate version 2 (this one)") for change in dark.changes)
    assert all(one.cause != "input_shift" for one in found.values())


@pytest.mark.release
async def test_the_same_record_gives_the_same_explanation_however_it_is_cut(
    database: Database, record: asyncpg.Connection
) -> None:
    """Folded one batch or forty at a time, every event says the same."""
    await story(database, record, damage, at_once=40)
    once = await told(record)
    await record.execute(
        "truncate fold, detector, verdict, outbox, transition, alert, incident, rollup_hour, rollup_day, baseline restart"
        " identity cascade;"
        " update batch set fold_seq = null"
    )
    await fold_all(database, at_once=1)
    assert once == await told(record)
    assert once


class _Slow(Evidence):
    """Answers too late."""

    async def items(self, **_: int) -> list[EvidenceItem]:
        """Wait in the server."""
        await self._connection.execute(text("select pg_sleep(30)"))
        return []


class _Faulty(Evidence):
    """Sends a statement that fails."""

    async def items(self, **_: int) -> list[EvidenceItem]:
        """Fail in the server, which spoils the savepoint."""
        await self._connection.execute(text("select 1 / 0"))
        return []


@pytest.mark.parametrize(("evidence", "outcome"), [(_Slow, "late"), (_Faulty, "failed")])
async def test_an_alert_that_cannot_be_explained_goes_out_and_says_so(
    database: Database, record: asyncpg.Connection, evidence: type[Evidence], outcome: str
) -> None:
    """A read that hangs or fails costs the explanation alone: the fold commits, the event waits to be sent."""
    await store_items(record, items(damage, seconds=430))
    counted = await fold_all(database, at_once=200, evidence=evidence)
    assert set(counted) == {outcome}
    events = await told(record)
    assert events
    assert await record.fetchval("select count(*) from outbox") == len(events)
    for slice_id, *_, details in events:
        assert explanation_of(details).unexplained
        assert "Not explained" in (await texts(record))[slice_id]


@pytest.mark.release
async def test_an_alert_that_gets_worse_keeps_its_explanation_where_the_new_one_fails(
    database: Database, record: asyncpg.Connection
) -> None:
    """The ticket was explained; as it becomes a page the database fails, and the page says what the ticket said."""

    def mild(rng: random.Random, slices: set[int], *, since: bool) -> tuple[float, float]:
        return rng.uniform(0.05, 1.0), 0.12 if since and DARK in slices else 0.002

    await store_items(record, items(mild, seconds=900))
    while not await record.fetchval("select count(*) from alert where slice_id = $1", DARK):
        await fold_all(database, at_once=1, most=1)
    assert await record.fetchval("select severity from alert where slice_id = $1", DARK) == "warning"
    ticket = (await alerts(record))[DARK]
    severity = "select severity from alert where slice_id = $1"
    while await record.fetchval(severity, DARK) == "warning":
        assert set(await fold_all(database, at_once=1, most=1, evidence=_Faulty)) <= {"failed"}
    page = (await alerts(record))[DARK]
    assert ticket.n_window_after
    assert (page.cause, page.n_window_after) == (ticket.cause, ticket.n_window_after)
    assert page.unexplained is None


async def test_the_bound_on_time_ends_with_the_reading(database: Database) -> None:
    """What the fold does afterwards has its own timeout again, also where the block failed."""
    async with database.begin() as connection:
        evidence = Evidence(connection)
        show = text("select current_setting('statement_timeout')")
        before = await connection.scalar(show)
        async with evidence.bounded(0.5):
            assert await connection.scalar(show) == "500ms"
        assert await connection.scalar(show) == before
        with pytest.raises(RuntimeError):
            await _fail(evidence)
        assert await connection.scalar(show) == before


async def _fail(evidence: Evidence) -> None:
    async with evidence.bounded(0.5):
        raise RuntimeError("planted")


@pytest.mark.parametrize("evidence", [Evidence, _Slow])
async def test_a_learned_slice_is_described_even_where_nothing_else_is_explained(
    database: Database, record: asyncpg.Connection, evidence: type[Evidence]
) -> None:
    """What its newest fit found stands in headline, text and event; the fit before it, and another reference, do not matter."""
    cluster = cluster_slice("digits", 7)
    await record.execute(
        "update slice set predicate = $2, name = $3, definition = $4 where id = $1",
        *(DARK, cluster.predicate, cluster.name, msgspec.json.encode({"where": cluster.where}).decode()),
    )
    traits = ({"label": "scanner=old", "lift": 3.0, "share": 0.9, "count": 90, "p_adjusted": 1e-9},)
    for version, (digest, share) in enumerate((("d", 0.2), ("d", 0.9), ("e", 0.3))):
        described = [{"id": 7, "traits": [{**traits[0], "share": share}], "medoids": []}]
        await record.execute(
            "insert into clustering (model, version, reference_digest, space, made_by, from_at, to_at, n_vectors, next_id, clusters, content)"
            " values ('digits', $1, repeat($2, 64), 'pool', 'monitor', now(), now(), 900, 8, $3, '')",
            *(version, digest, msgspec.json.encode(described).decode()),
        )
    await store_items(record, items(damage, seconds=430))
    await fold_all(database, at_once=200, evidence=evidence)
    found, text_of_alert = (await alerts(record))[DARK], (await texts(record))[DARK]
    assert found.sets_apart == "scanner=old (90 % of them, 3 times its share of all traffic)"
    assert "in cluster=7 (mostly scanner=old) changed" in text_of_alert
    assert f"Which inputs: {found.sets_apart}." in text_of_alert
