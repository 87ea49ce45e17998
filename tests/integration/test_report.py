"""The weekly report from a real database."""

import os
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit
from uuid import UUID

import asyncpg
import msgspec
import pytest
from aiohttp import ClientSession
from sqlalchemy import event
from sqlalchemy.engine import Engine

from quantdrift.cli.look.report import summary
from quantdrift.core.clock import ManualClock
from quantdrift.core.config.load import Secrets
from quantdrift.core.config.schema import Config, Model, TelemetryOptions
from quantdrift.core.errors import OperatorError
from quantdrift.core.notation import percent
from quantdrift.core.records import Metric, Verdict
from quantdrift.report.figures import ReportFigures
from quantdrift.show.page.server import page_port
from quantdrift.show.report.page import Form, Period, write
from quantdrift.storage.alerts.alerts import FindingKind, add_finding
from quantdrift.storage.database import Database
from quantdrift.storage.schema import roles
from tests.support.monitor.report_figures import Page
from tests.support.storage.comparisons import Comparison, make_partitions, store_comparisons
from tests.support.storage.page_rows import write_history
from tests.support.storage.release_rows import BEGIN, END, NEW, OLD, RELEASE, write_release_week
from tests.support.storage.report_rows import (
    HOUR,
    MINUTE,
    PAGED,
    PARTS,
    START,
    Part,
    write_short_story,
    write_week,
)

pytestmark = pytest.mark.integration

CONFIG = Config(
    models=(Model(name="digits"),),
    telemetry=TelemetryOptions(trace_url="https://tracing.example.com/{trace_id}"),
)
NOW = START + 90 * MINUTE


async def _write(
    dsn: str, tmp_path: Path, *, days: int = 0, model: str = "", kind: str = "week"
) -> tuple[ReportFigures, str]:
    now = START.replace(hour=0) + days * 24 * HOUR if days else NOW
    figures = await write(
        CONFIG,
        Secrets(dsn=dsn),
        Period.of(kind=kind, end=now),
        out=tmp_path / "report.html",
        progress=lambda _: None,
        model=model,
        clock=ManualClock(now),
    )
    return figures, (tmp_path / "report.html").read_text(encoding="utf-8")


async def test_outputs_that_are_no_distributions_are_not_reported_as_no_divergence(
    postgres_dsn: str, tmp_path: Path
) -> None:
    """Where nothing could be measured the page says so, instead of a mean of zero."""
    await write_short_story(postgres_dsn)
    db = await asyncpg.connect(postgres_dsn)
    await db.execute("update comparison set flip = null, js = null, divergence = null")
    await db.close()
    figures, html = await _write(postgres_dsn, tmp_path)
    (model,) = figures.models
    assert model.aggregate is not None
    assert model.aggregate.n_exchanges > 0
    measures = [(entry.flip, entry.divergence) for entry in (model.aggregate, *model.slices)]
    assert set(measures) == {(None, None)}
    assert figures.briefs[0].lines[0].answer == "Not known."
    assert "no data" in Page(html).text


async def test_a_drifted_slice_is_the_headline(postgres_dsn: str, tmp_path: Path) -> None:
    """The page and its figures say which slice drifted, from what to what, and that the aggregate looks fine."""
    story = await write_short_story(postgres_dsn)
    db = await asyncpg.connect(postgres_dsn)
    await db.execute("""update comparison set detail = '{"candidate_not_finite": true}' where flip""")
    await db.close()
    figures, html = await _write(postgres_dsn, tmp_path)
    (model,), (episode,) = figures.models, figures.episodes
    assert model.status is Verdict.FIRING
    answer = (
        "No, not everywhere: in scanner=faint more answers of digits int8-7 changed than the budget allows."
    )
    assert figures.headlines()[0] == figures.briefs[0].answer == answer
    said = {line.question: line.answer for line in figures.briefs[0].lines}
    assert said["Not known"].startswith("How 1 slice of int8-7 is: too little was compared")
    assert (episode.alert_id, episode.metric) == (story.alert_id, Metric.FLIP)
    assert episode.now is not None
    assert episode.now.changed_share is not None
    assert episode.now.changed_share.value > 0.01
    assert len(episode.examples) == 5
    assert {len(one.detail) for one in episode.examples} == {1}
    assert (figures.source, figures.bucket_s) == ("comparison", 120.0)
    assert (figures.n_pages, figures.n_tickets, figures.n_slices) == (1, 0, 5)
    text = Page(html).text
    assert "Quantisation drift" in text
    assert "against reference 5f1d5f1d5f1d, float32+bfloat16" in text
    assert answer in text
    assert f"Since: about {START + 50 * MINUTE:%Y-%m-%d %H:%M} UTC (estimated)." in text
    assert episode.when_paged is not None
    assert (episode.when_paged.value, episode.when_paged.n) == (PAGED["changed"], PAGED["n_answers"])
    assert "Changed answers when it paged 5.3 % 3.1 to 8.3 % 254 answers" in text
    assert text.count("candidate not finite") == 5
    assert "https://tracing.example.com/4bf92f3577b34da6a3ce929d0e0e4736" in html
    assert (
        html.count('class="chart plot"') == 2 * 6 + 1
    )  # flips and divergence of each slice, and the alert's


async def test_the_first_screen_says_how_many_people_got_a_changed_answer(
    postgres_dsn: str, tmp_path: Path
) -> None:
    """People are counted once in each slice and in all traffic, however many of their answers changed; releases come first."""
    story = await write_short_story(postgres_dsn)
    db = await asyncpg.connect(postgres_dsn)
    faint = story.slice_ids[1]
    await db.execute("update comparison set group_key = 'one' where flip")
    await db.execute(
        "update comparison set group_key = 'another' where (captured_at, exchange_id) in ("
        " select captured_at, exchange_id from comparison where flip and slice_ids @> array[$1::int] limit 1)",
        faint,
    )
    await db.execute("select audit_add('configuration', '', 'shadow vm', null, null, '')")
    await db.execute("alter table audit disable trigger user")
    await db.execute("update audit set at = $1", START + 80 * MINUTE)
    await db.execute("update model_version set first_seen_at = $1", START + MINUTE)
    await db.close()
    figures, _ = await _write(postgres_dsn, tmp_path)
    people = {entry.name: entry.people for entry in figures.models[0].slices}["scanner=faint"]
    assert people is not None
    assert people.value == 2
    (brief,) = figures.briefs
    said = {line.question: line.answer for line in brief.lines}
    assert "a day, for at least 2 people on the last day" in said["How many answers"]
    assert "of the answers changed (budget: 1 %)" in said["How many answers"]
    assert said["People"] == "At least 2 people got a changed answer on the last day."
    assert said["What changed"].startswith("Version ")
    assert "configuration shadow vm" in said["What changed"]


async def test_a_configuration_warning_is_next_to_the_headline(postgres_dsn: str, tmp_path: Path) -> None:
    """Of the reference that was compared with, on the page and in the terminal; one that was mended does not."""
    await write_short_story(postgres_dsn)
    db = await asyncpg.connect(postgres_dsn)
    await db.execute(
        "insert into doubt select model, reference_digest, 'output_kind', 'they are <i>probabilities', now()"
        " from model_version where candidate_version = 'int8-7'"
    )
    figures, html = await _write(postgres_dsn, tmp_path)
    assert figures.models[0].doubt == "they are <i>probabilities"
    assert "Its figures may mislead. They are <i>probabilities." in Page(html).text
    assert "its figures may mislead. They are <i>probabilities." in summary(figures)
    await db.execute("update doubt set option = '', doubt = ''")
    await db.close()
    figures, html = await _write(postgres_dsn, tmp_path)
    assert "may mislead" not in Page(html).text + summary(figures)


async def test_an_alert_has_its_cause_and_its_repair_as_far_as_they_were_known_then(
    postgres_dsn: str, database: Database, tmp_path: Path
) -> None:
    """In the order cause, repair; what was found after the period is not in its report, so that it stays the same."""
    story = await write_short_story(postgres_dsn)
    assert story.alert_id is not None
    async with database.begin() as connection:
        await add_finding(connection, story.alert_id, FindingKind.REPAIR, "Repair: <b>a copy</b>.", {})
        await add_finding(connection, story.alert_id, FindingKind.CAUSE, "Cause: resolution.", {})
    figures, _ = await _write(postgres_dsn, tmp_path)
    assert figures.episodes[0].findings == ()
    db = await asyncpg.connect(postgres_dsn)
    await db.execute("update alert_action set made_at = $1", NOW - MINUTE)
    await db.close()
    figures, page = await _write(postgres_dsn, tmp_path)
    assert figures.episodes[0].findings == ("Cause: resolution.", "Repair: <b>a copy</b>.")
    assert "Cause: resolution. Repair: <b>a copy</b>." in Page(page).text


async def test_an_alert_that_warned_and_then_paged_is_a_page_and_no_ticket(
    postgres_dsn: str, tmp_path: Path
) -> None:
    """As a back-test counts; one that warned alone is a ticket, and one whose page came later is one until then."""
    story = await write_short_story(postgres_dsn)
    db = await asyncpg.connect(postgres_dsn)
    paged_at = await db.fetchval("update transition set from_verdict = 'warning' returning at")
    await db.execute(
        "insert into transition (model_version_id, slice_id, alert_id, from_verdict, to_verdict, at, fold_seq, details)"
        " select model_version_id, slice_id, alert_id, 'ok', 'warning', at - interval '2 minutes', 1, '{}'"
        " from transition"
    )
    figures, _ = await _write(postgres_dsn, tmp_path)
    assert (figures.n_pages, figures.n_tickets) == (1, 0)
    other = await db.fetchval(
        "insert into alert (model_version_id, slice_id, severity, metric, onset_at, opened_at, details)"
        " values ($1, $2, 'warning', 'flip', $3, $3, '{}') returning id",
        story.version_id,
        story.all_id,
        paged_at,
    )
    await db.execute(
        "insert into transition (model_version_id, slice_id, alert_id, from_verdict, to_verdict, at, fold_seq, details)"
        " values ($1, $2, $3, 'ok', 'warning', $4, 1, '{}')",
        story.version_id,
        story.all_id,
        other,
        paged_at,
    )
    figures, _ = await _write(postgres_dsn, tmp_path)
    assert (figures.n_pages, figures.n_tickets) == (1, 1)
    await db.execute("update transition set at = $1 where to_verdict = 'firing'", NOW + HOUR)
    figures, _ = await _write(postgres_dsn, tmp_path)
    assert (figures.n_pages, figures.n_tickets) == (0, 2)
    await db.close()


async def test_the_figures_are_those_of_the_items(postgres_dsn: str, tmp_path: Path) -> None:
    """Every number on a slice is recomputed from the rows that were inserted."""
    story = await write_short_story(postgres_dsn)
    figures, _ = await _write(postgres_dsn, tmp_path)
    gain = next(entry for entry in figures.models[0].slices if entry.name == "scanner=gain")
    items = [item for item in story.items if item.part == 2]
    groups: dict[str, list[bool]] = {}
    for item in items:
        groups.setdefault(item.exchange, []).append(item.flip)
    assert gain.n_items == len(items)
    assert gain.n_exchanges == len(groups)
    assert gain.flip is not None
    assert gain.flip.mean == pytest.approx(
        sum(sum(group) / len(group) for group in groups.values()) / len(groups)
    )
    everything = len({item.exchange for item in story.items})
    assert gain.figures.share == pytest.approx(len(items) / len(story.items))
    assert figures.n_compared == everything


async def test_unknown_is_reported_with_its_reason(postgres_dsn: str, tmp_path: Path) -> None:
    """A slice with too little data is unknown, whatever its flips."""
    await write_short_story(postgres_dsn)
    figures, _ = await _write(postgres_dsn, tmp_path)
    offset = next(entry for entry in figures.models[0].slices if entry.name == "scanner=offset")
    assert offset.verdict is Verdict.UNKNOWN
    assert "300 are needed" in offset.reason


async def test_an_empty_database_gives_a_page_that_does_not_reassure(
    postgres_dsn: str, tmp_path: Path
) -> None:
    """Nothing compared: the page says so, and nothing on it is green."""
    figures, html = await _write(postgres_dsn, tmp_path)
    assert figures.models == ()
    assert figures.episodes == ()
    assert "health is unknown, not good" in Page(html).text
    assert figures.headlines()[0].startswith("Nothing was compared")
    assert 'class="card model unknown"' in html


async def test_a_model_without_slices_has_its_aggregate(postgres_dsn: str, tmp_path: Path) -> None:
    """No slice configured: the aggregate alone is told and drawn."""
    await write_short_story(postgres_dsn)
    db = await asyncpg.connect(postgres_dsn)
    await db.execute("truncate transition, verdict, alert cascade")
    await db.execute("update comparison set slice_ids = slice_ids[1:1]")
    await db.close()
    figures, html = await _write(postgres_dsn, tmp_path)
    (model,) = figures.models
    assert (model.n_slices, model.slices) == (0, ())
    assert model.aggregate is not None
    assert model.aggregate.reason == "the monitor has not folded it yet"
    assert (
        figures.briefs[0].answer
        == "Not known if digits int8-7 is good enough: the monitor has not folded it yet."
    )
    assert html.count('class="chart plot"') == 2


@pytest.mark.parametrize("n", [pytest.param(200, marks=pytest.mark.release), 40])
async def test_many_slices_are_capped_and_counted(postgres_dsn: str, tmp_path: Path, n: int) -> None:
    """A week from roll-ups alone: the drifted slice leads, few are drawn, the rest is counted."""
    await write_week(postgres_dsn, n_slices=n)
    figures, html = await _write(postgres_dsn, tmp_path, days=7)
    (model,) = figures.models
    assert (figures.source, figures.bucket_s) == ("rollup_hour", 10_800.0)
    assert model.n_slices == n
    assert model.slices[0].name == "scanner=s001"
    assert figures.briefs[0].answer.startswith("No, not everywhere: in scanner=s001 ")
    assert html.count('class="chart plot"') == 2 * 13 + 1
    text = Page(html).text
    assert f"{n - 25} slices with less divergence are left out here; {n - 25} OK" in text
    assert f"{n - 12} slices are not drawn" in text
    assert len(html) < 600_000


async def test_the_number_of_statements_does_not_grow_with_slices(postgres_dsn: str, tmp_path: Path) -> None:
    """A report asks the same number of questions of 3 slices and of 60."""
    statements: list[str] = []

    def heard(*arguments: object) -> None:
        statements.append(str(arguments[2]))

    counts = []
    event.listen(Engine, "before_cursor_execute", heard)
    try:
        for n_slices in (3, 60):
            db = await asyncpg.connect(postgres_dsn)
            await db.execute("truncate model_version, slice, tally, batch cascade")
            await db.execute("truncate rollup_hour")
            await db.close()
            await write_week(postgres_dsn, n_slices=n_slices)
            statements.clear()
            await _write(postgres_dsn, tmp_path, days=7)
            counts.append(len(statements))
    finally:
        event.remove(Engine, "before_cursor_execute", heard)
    assert counts[0] == counts[1] <= 40


async def test_hostile_slice_values_stay_text(postgres_dsn: str, tmp_path: Path) -> None:
    """Slice values come from request headers: markup in them is shown, not obeyed."""
    evil = "<script>alert(1)</script><img src=x onerror=alert(1)>$\\frac{"
    parts = (*PARTS[:1], msgspec.structs.replace(PARTS[1], value=evil), *PARTS[2:])
    await write_short_story(postgres_dsn, parts=parts)
    db = await asyncpg.connect(postgres_dsn)
    await db.execute("update comparison set trace = $1, header_stratum = $1", evil)
    await db.execute("update quarantine set detail = $1", evil)
    await db.execute("update verdict set reason = $1", evil)
    await db.close()
    figures, html = await _write(postgres_dsn, tmp_path)
    page = Page(html)
    assert evil in figures.briefs[0].answer
    assert evil in page.text
    assert not {"script", "img"} & set(page.tags)
    assert not any(name.startswith("on") for name, _ in page.attributes)


async def test_a_version_without_a_reference_is_unknown_and_named(postgres_dsn: str, tmp_path: Path) -> None:
    """It is listed under coverage and never turns a headline red or green."""
    await write_short_story(postgres_dsn)
    db = await asyncpg.connect(postgres_dsn)
    await db.execute(
        "insert into model_version (model, candidate_version, reference_digest) values ('digits', 'int8-8', '')"
    )
    await db.close()
    figures, html = await _write(postgres_dsn, tmp_path)
    assert [entry.version for entry in figures.models] == ["int8-7"]
    assert [entry.version for entry in figures.coverage.unreferenced] == ["int8-8"]
    assert "Versions without a reference" in Page(html).text


async def test_old_versions_without_data_are_left_out(postgres_dsn: str, tmp_path: Path) -> None:
    """A version that did not serve in the period, and whose alerts are over, is not told."""
    story = await write_short_story(postgres_dsn)
    db = await asyncpg.connect(postgres_dsn)
    await db.execute("update alert set resolved_at = $1", NOW)
    await db.close()
    figures, _ = await _write(postgres_dsn, tmp_path, days=40)
    assert figures.models == ()
    assert story.version_id


async def test_a_silent_slice_with_an_open_alert_is_still_reported(postgres_dsn: str, tmp_path: Path) -> None:
    """An alert that stays open belongs into every report, with or without new data."""
    await write_short_story(postgres_dsn)
    figures, html = await _write(postgres_dsn, tmp_path, days=40)
    (model,) = figures.models
    assert model.status is Verdict.FIRING
    assert figures.briefs[0].answer.startswith("No, not everywhere: in scanner=faint ")
    assert all(entry.verdict is not Verdict.OK for entry in model.slices)
    assert "There is no data to draw" in Page(html).text


async def test_one_model_alone_is_reported_on_request(postgres_dsn: str, tmp_path: Path) -> None:
    """Another model's slices are left out; an unknown name is refused."""
    await write_short_story(postgres_dsn, parts=(Part(value="clean", share=1.0),))
    figures, _ = await _write(postgres_dsn, tmp_path, model="digits")
    assert [entry.model for entry in figures.models] == ["digits"]
    with pytest.raises(OperatorError, match="a model `digit`"):
        await _write(postgres_dsn, tmp_path, model="digit")


async def test_the_run_is_recorded_as_printed(postgres_dsn: str, tmp_path: Path) -> None:
    """`report_run` holds the figures that --json prints, and they read back as the same record."""
    await write_short_story(postgres_dsn)
    figures, _ = await _write(postgres_dsn, tmp_path, kind="day")
    db = await asyncpg.connect(postgres_dsn)
    row = await db.fetchrow("select kind, from_at, to_at, path, figures from report_run")
    await db.close()
    assert row is not None
    assert (row["kind"], row["to_at"] - row["from_at"]) == ("day", 24 * HOUR)
    assert row["path"] == figures.path
    # An infinite KL has no number in JSON.
    assert msgspec.json.decode(row["figures"]) == msgspec.json.decode(msgspec.json.encode(figures))
    assert msgspec.json.decode(row["figures"], type=ReportFigures).models == figures.models


async def test_a_file_that_cannot_be_written_is_said(postgres_dsn: str, tmp_path: Path) -> None:
    """The message names the file, nothing is left beside it, and no run is recorded."""
    (tmp_path / "report.html").mkdir()
    with pytest.raises(OperatorError, match=r"cannot be written to .*report\.html"):
        await write(
            CONFIG,
            Secrets(dsn=postgres_dsn),
            Period.of(kind="day", end=NOW),
            out=tmp_path / "report.html",
            progress=lambda _: None,
            clock=ManualClock(NOW),
        )
    assert os.listdir(tmp_path) == ["report.html"]  # noqa: PTH208 - pathlib's would be refused in a coroutine
    db = await asyncpg.connect(postgres_dsn)
    assert await db.fetchval("select count(*) from report_run") == 0
    await db.close()


async def test_without_a_name_the_file_is_dated(
    postgres_dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory `reports` is made below the working directory, and the name tells the period."""
    monkeypatch.chdir(tmp_path)
    figures = await write(
        CONFIG,
        Secrets(dsn=postgres_dsn),
        Period.of(kind="week", end=NOW),
        out=None,
        progress=lambda _: None,
        clock=ManualClock(NOW),
    )
    assert figures.path == "reports/quantdrift-20261109-20261116.html"
    assert os.listdir(tmp_path / "reports") == ["quantdrift-20261109-20261116.html"]  # noqa: PTH208 - as above


async def test_the_reports_own_role_is_enough(postgres_dsn: str, tmp_path: Path) -> None:
    """With the rights of `quantdrift_report` alone everything is read and the run is recorded."""
    await write_short_story(postgres_dsn)
    await roles.apply(postgres_dsn)
    where = urlsplit(postgres_dsn)
    user = f"reporter_{where.path[1:]}"
    db = await asyncpg.connect(postgres_dsn)
    try:
        await db.execute(f"create user {user} password 'secret' in role {roles.REPORT}")
        figures, _ = await _write(
            f"postgresql://{user}:secret@{where.hostname}:{where.port}{where.path}", tmp_path
        )
        assert len(figures.episodes) == 1
        assert await db.fetchval("select count(*) from report_run") == 1
    finally:
        await db.execute(f"drop user if exists {user}")
        await db.close()


async def test_the_same_data_gives_the_same_bytes_in_each_format(postgres_dsn: str, tmp_path: Path) -> None:
    """A repeated run replaces its file by an equal one, in each format, and each run is recorded."""
    await write_release_week(postgres_dsn)
    for form in Form:
        written = []
        for hours in (0, 5):
            out = tmp_path / f"report.{form.value}"
            await write(
                CONFIG,
                Secrets(dsn=postgres_dsn),
                Period.of(kind="range", start=BEGIN, end=END),
                out=out,
                progress=lambda _: None,
                form=form,
                clock=ManualClock(END + hours * HOUR),
            )
            written.append(out.read_bytes())
        assert written[0] == written[1]
    db = await asyncpg.connect(postgres_dsn)
    assert await db.fetchval("select count(*) from report_run") == 2 * len(Form)
    await db.close()


async def test_the_first_screen_answers_for_the_version_that_serves_now(
    postgres_dsn: str, tmp_path: Path
) -> None:
    """Where not, how many a day, since when, the release and who does what; the replaced version is apart."""
    week = await write_release_week(postgres_dsn)
    db = await asyncpg.connect(postgres_dsn)
    await db.execute(
        "select audit_add('baseline accept', 'digits', 'slice 3', null, null, 'new scanners on floor 2')"
    )
    # Exchanges of unverified senders came last: they are no release, and no version that serves.
    other = await db.fetchval(
        "insert into model_version (model, candidate_version, reference_digest, reference, first_seen_at) select model,"
        " candidate_version || ' (unverified)', reference_digest, reference, $1 from model_version where id = $2"
        " returning id",
        RELEASE,
        week.version_ids[1],
    )
    await db.execute(
        "update rollup_hour set model_version_id = $1 where model_version_id = $2 and hour >= $3",
        other,
        week.version_ids[1],
        END - HOUR,
    )
    await db.execute("alter table audit disable trigger user")
    await db.execute("update audit set at = $1 where action = 'baseline accept'", RELEASE + HOUR)
    await db.close()
    figures = await write(
        CONFIG,
        Secrets(dsn=postgres_dsn),
        Period.of(kind="range", start=BEGIN, end=END),
        out=tmp_path / "report.md",
        progress=lambda _: None,
        form=Form.MARKDOWN,
        clock=ManualClock(END),
    )
    (brief,) = figures.briefs
    said = {line.question: line.answer for line in brief.lines}
    assert (brief.version, brief.status) == (NEW, Verdict.FIRING)
    assert brief.answer.startswith(
        f"No, not everywhere: in scanner=archive more answers of digits {NEW} changed"
    )
    flips = (
        sum(bool(row.flip) for row in week.rows if row.model_version_id == week.version_ids[1]) / 3.5 / 0.25
    )
    archive = next(entry for entry in figures.models[0].slices if entry.name == "scanner=archive")
    whole = figures.models[0].aggregate
    assert whole is not None
    assert whole.flip is not None
    assert whole.figures.changed is not None
    assert whole.figures.changed.value == pytest.approx(flips, rel=0.02)
    assert archive.flip is not None
    assert percent(archive.flip.mean) in said["How many answers"]
    assert said["What changed"].startswith(f"Version {NEW} was seen for the first time")
    assert f"is worse than {OLD}" in said["What changed"]
    assert "baseline accept slice 3" in said["What changed"]
    assert said["What to do"].startswith("The owner of digits, for scanner=archive: ")
    assert [line.question for line in brief.others] == [f"{OLD} ({figures.models[-1].serving.words})"]
    assert [mark.kind for mark in figures.marks] == ["release", "release", "decision"]
    assert [one.new.version for one in figures.comparisons] == [NEW]
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "new scanners on floor 2" in text
    assert "scanner=archive" in text
    (alert,) = figures.episodes
    changed = Counter(
        (f"class {detail['reference_top']}", f"class {detail['candidate_top']}")
        for row in week.rows
        if row.flip
        and row.captured_at >= RELEASE + HOUR
        and week.slice_ids["archive"] in row.slice_ids
        and (detail := msgspec.json.decode(row.detail or "{}"))
    )
    assert alert.directions[0].n == max(changed.values())
    for one in alert.directions:
        assert one.n == changed[one.reference, one.candidate]
        assert one.share == pytest.approx(one.n / changed.total())
    assert sum(one.share for one in alert.directions) <= 1
    assert not any(" nat" in line for line in (brief.answer, *said.values()))


@pytest.mark.parametrize("canary_drifts", [True, False])
async def test_the_worst_version_that_serves_answers_on_report_and_page(
    postgres_dsn: str, record: asyncpg.Connection, tmp_path: Path, *, canary_drifts: bool
) -> None:
    """Beside a canary, the one that drifted answers, whether it is the newer or the older one; the other one stands below."""
    end = datetime.now(UTC)
    await make_partitions(record, [(end - HOUR).date(), end.date()])
    bad, good = (NEW, OLD) if canary_drifts else (OLD, NEW)
    for version in (OLD, NEW):
        version_id, slices, _ = await write_history(
            record, n_slices=2 if version == bad else 1, n_days=1, end=end, version=version
        )
        # The older one was seen a second before the newer one, and serves.
        last = end - timedelta(seconds=version == OLD)
        await record.execute(
            "insert into serving (model_version_id, last_at, gap_s, gaps_s) values ($1, $2, 1, 60)",
            version_id,
            last,
        )
        rows = [
            Comparison(
                captured_at=last - number * MINUTE,
                exchange_id=str(UUID(int=1000 * version_id + number)),
                batch_id=1,
                model_version_id=version_id,
                slice_ids=tuple(slices),
                flip=version == bad and number % 2 == 0,
                divergence=0.001,
            )
            for number in range(50)
        ]
        await store_comparisons(record, rows)
    figures = await write(
        CONFIG,
        Secrets(dsn=postgres_dsn),
        Period.of(kind="range", start=end - HOUR, end=end + MINUTE),
        out=tmp_path / "report.html",
        progress=lambda _: None,
        clock=ManualClock(end + MINUTE),
    )
    (brief,) = figures.briefs
    assert (brief.version, brief.status) == (bad, Verdict.FIRING)
    assert brief.answer.startswith(
        f"No, not everywhere: in scanner=0001 more answers of digits {bad} changed"
    )
    (other,) = brief.others
    assert (other.question, other.answer) == (
        f"{good} (serving)",
        f"Yes: digits {good} is good enough. It is within its budget in every slice.",
    )
    async with Database(postgres_dsn) as database:
        port = page_port(CONFIG, Secrets(dsn=postgres_dsn), database)
        number = await port.open(("127.0.0.1", 0))
        try:
            async with ClientSession() as session, session.get(f"http://127.0.0.1:{number}/") as reply:
                page = Page(await reply.text())
        finally:
            await port.close()
    assert f"No, not everywhere: in scanner=0001 digits {bad} has drifted." in page.text
    assert f"Other versions: {good} (serving, OK)." in page.text
    assert f"Slices of digits {bad}, worst first" in page.text
