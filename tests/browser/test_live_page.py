"""The live page in a real browser, against the real server and database. Skipped where there is no Chromium."""

import asyncio
import hashlib
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Literal
from urllib.parse import quote
from uuid import uuid4

import asyncpg
import pytest
from playwright.async_api import Browser, Page

from quantdrift.core.config.load import Secrets
from quantdrift.core.config.schema import Config, Model, Notify, Reference, Web
from quantdrift.core.tasks import Task
from quantdrift.report.period import Period, PeriodKind
from quantdrift.show.page.server import page_port
from quantdrift.show.report.page import write
from quantdrift.storage import snapshot
from quantdrift.storage.alerts.alerts import Act, FindingKind, act, add_finding, find_alert
from quantdrift.storage.database import Database
from quantdrift.storage.incidents.incidents import IncidentCount, Say, say, store_count
from quantdrift.storage.incidents.writing import write_incidents
from quantdrift.storage.schema.roles import PAGE, READER
from tests.support.monitor.monitor_processes import connected
from tests.support.storage.comparisons import Comparison, make_partitions, store_comparisons
from tests.support.storage.logins import login_in
from tests.support.storage.page_rows import write_history
from tests.support.storage.report_rows import (
    MINUTE,
    PARTS,
    START,
    Item,
    Story,
    write_frame,
    write_short_story,
)

pytestmark = pytest.mark.browser

_CHECKS: Final = """() => {
  const parse = (text) => text.match(/[0-9.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const wrong = [];
  for (const element of document.querySelectorAll("body *:not(svg):not(svg *):not(option):not(select)")) {
    if (![...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim())) continue;
    const [a, b] = [light(parse(getComputedStyle(element).color)), light(behind(element))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) wrong.push(`contrast ${contrast.toFixed(1)}: ${element.textContent.slice(0, 40)}`);
    if (parseFloat(getComputedStyle(element).fontSize) < 12) wrong.push(`small: ${element.textContent.slice(0, 40)}`);
  }
  const levels = [...document.querySelectorAll("h1, h2, h3")].map((each) => Number(each.tagName[1]));
  if (levels.filter((each) => each === 1).length !== 1) wrong.push("not one h1");
  if (levels.some((each, at) => at && each > levels[at - 1] + 1)) wrong.push("a heading level is left out");
  for (const each of document.querySelectorAll("input:not([type=hidden]):not([hidden]), select"))
    if (!document.querySelector(`label[for="${each.id}"]`)) wrong.push(`no label: ${each.outerHTML.slice(0, 60)}`);
  for (const each of document.querySelectorAll("svg[role=img]")) if (!each.getAttribute("aria-label")) wrong.push("no text: svg");
  const ids = [...document.querySelectorAll("[id]")].map((each) => each.id);
  if (new Set(ids).size !== ids.length) wrong.push("an id stands twice");
  for (const name of ["main", "header", "footer"]) if (!document.querySelector(name)) wrong.push(`no ${name}`);
  if (document.documentElement.scrollWidth > innerWidth) wrong.push(`scrolls sideways: ${document.documentElement.scrollWidth}`);
  return wrong;
}"""
_FOCUSABLE: Final = """() => [...document.querySelectorAll("a[href], button, summary, input, select, textarea, [tabindex='0']")]
  .filter((each) => each.type !== "hidden" && each.checkVisibility())"""
_REACHED: Final = """() => {
  const active = document.activeElement;
  if (!active || active === document.body) return -1;
  const style = getComputedStyle(active);
  if (style.outlineStyle === "none" || parseFloat(style.outlineWidth) < 2) throw new Error(`no focus is seen: ${active.outerHTML}`);
  return FOCUSABLE().indexOf(active);
}""".replace("FOCUSABLE", f"({_FOCUSABLE})")
_NASTY: Final = "</td><script>alert(1)</script>\u202e\u001b[31m{:d}"


@asynccontextmanager
async def _served(
    dsn: str, web: Web | None = None, token: str = "", operator_file: str = "", config: Config | None = None
) -> AsyncIterator[str]:
    model = Model(name="digits", references=(Reference(path="digits.onnx"),))
    config = config or Config(models=(model,), web=web or Web())
    async with Database(dsn) as database:
        port = page_port(config, Secrets(dsn=dsn, web_token=token, operator_dsn_file=operator_file), database)
        number = await port.open(("127.0.0.1", 0))
        try:
            yield f"http://127.0.0.1:{number}"
        finally:
            await port.close()


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no figure be left out because this machine is busy."""
    monkeypatch.setattr(snapshot, "PATIENCE_S", 60.0)
    monkeypatch.setattr(snapshot, "PAST_PATIENCE_S", 60.0)


async def _open(
    browser: Browser, width: int, scheme: Literal["light", "dark"]
) -> tuple[Page, list[str], list[str]]:
    page = await browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
    requests: list[str] = []
    complaints: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    return page, requests, complaints


async def _look(
    browser: Browser, base: str, paths: list[str], width: int, scheme: Literal["light", "dark"]
) -> dict[str, str]:
    """Open each page, check it, and return what stands in it."""
    page, requests, complaints = await _open(browser, width, scheme)
    found = {}
    for path in paths:
        answer = await page.goto(f"{base}{path}")
        assert answer is not None
        assert answer.status == 200, path
        assert await page.evaluate(_CHECKS) == [], path
        found[path] = await page.locator("main").inner_text()
    assert complaints == []  # a violation of the content security policy would be one
    assert all(url.startswith(f"{base}/") for url in requests)
    await page.close()
    return found


async def test_pages_without_data_say_what_to_do(browser: Browser, postgres_dsn: str) -> None:
    """An empty database shows no error and no figure, but the next step."""
    async with _served(postgres_dsn) as base:
        seen = await _look(browser, base, ["/", "/alerts", "/compare", "/system"], 390, "light")
    assert "Send requests through the sidecar" in seen["/"]
    assert "No alert is open" in seen["/alerts"]
    assert "No sidecar has sent its counts yet" in seen["/system"]


async def test_pages_with_a_firing_alert_lead_with_it(
    browser: Browser, postgres_dsn: str, record: asyncpg.Connection
) -> None:
    """On a phone in the dark: the slice is named, the alert's first step is on the first screen, names are only text."""
    end = datetime.now(UTC)
    story = await write_short_story(postgres_dsn)
    version, slices, alert = await write_history(
        record, n_slices=5, n_days=10, end=end, version="int8-8", name=_NASTY
    )
    paths = ["/", "/alerts", f"/alert/{alert}", f"/slice/{version}/{slices[1]}", "/compare", "/system"]
    paths.append(f"/slice/{story.version_id}/{story.slice_ids[1]}?span=1d")
    async with _served(postgres_dsn) as base:
        for width, scheme in ((390, "dark"), (1280, "light")):
            seen = await _look(browser, base, paths, width, scheme)  # type: ignore[arg-type]
            assert all("\u202e" not in text and "\x1b" not in text for text in seen.values())
            assert "No, not everywhere: in </td><script>" in seen["/"]
            assert "trace 4bf92f35" in seen[paths[-1]]
            assert f"quantdrift diagnose {alert} --candidate" in seen[f"/alert/{alert}"]
            assert "labels wanted --model digits --slice" in seen[f"/alert/{alert}"]
        page, _, _ = await _open(browser, 390, "dark")
        await page.goto(f"{base}/compare")
        assert "quantdrift compare --model digits --from" in str(
            await page.locator("#command").text_content()
        )
        shares = await record.fetch(
            "select sum(flip) / sum(flip_weight) as share from rollup_hour group by model_version_id, slice_id"
        )
        figures = await page.locator("td [data-figure=changed_share]").all()
        assert figures
        for figure in figures:
            value = float(await figure.get_attribute("data-value") or "nan")
            assert value in [pytest.approx(row["share"]) for row in shares if row["share"] is not None]
        await page.goto(f"{base}/alert/{alert}")
        assert len(await record.fetch(str(await page.locator("#chart-query").text_content()))) > 0
        box = await page.locator(".qa.first").bounding_box()
        assert box is not None
        assert box["y"] + box["height"] <= 844


async def test_an_alert_shows_its_cause_its_repairs_and_the_gate(
    browser: Browser, postgres_dsn: str, record: asyncpg.Connection, database: Database
) -> None:
    """In words on the first card, with a picture of the sites and the table of repairs; what cannot be drawn is left out."""
    _, _, alert = await write_history(record, n_slices=3, n_days=2, end=datetime.now(UTC))
    assert alert is not None
    site = {"site": _NASTY, "restores": 0.67, "placebo": 0.1, "used": 0.009, "elsewhere_used": 0.4}
    weight = {"site": "W:conv", "restores": 0.1, "placebo": 0.02, "used": None, "cause": "weights"}
    repair = dict.fromkeys(("repair", "changed", "worst", "all", "time", "files", "gate"), _NASTY)
    async with database.begin() as connection:
        for kind, said, details in (
            ("cause", "Cause: resolution at A:image. Serve the slice by a copy.", {"sites": [site, weight]}),
            ("repair", "Repair: a copy for the slice. Gate: pass.", {"repairs": [repair] * 7}),
            ("gate", "Gate: insufficient evidence.", {"candidate": "sha256:0123456789abcdef"}),
        ):
            await add_finding(connection, alert, FindingKind(kind), said, details)
    async with _served(postgres_dsn) as base:
        for width, scheme in ((390, "dark"), (1280, "light")):
            seen = (await _look(browser, base, [f"/alert/{alert}"], width, scheme))[f"/alert/{alert}"]  # type: ignore[arg-type]
            assert "Cause: resolution at A:image." in seen
            assert "Repair: a copy for the slice." in seen
            assert "Range used elsewhere" in seen
            assert "67 %" in seen
            assert "at most 10 % by chance" in seen
            assert "\u202e" not in seen
            assert "\x1b" not in seen
            assert "quantdrift repair" not in seen  # it was done, as `alerts show` has it
        async with database.begin() as connection:
            await add_finding(connection, alert, FindingKind.CAUSE, "Cause: input.", {"sites": "?"})
        seen = (await _look(browser, base, [f"/alert/{alert}"], 390, "light"))[f"/alert/{alert}"]
        assert "Cause: input." in seen
        assert "Range used" not in seen


async def test_an_open_page_follows_the_database(
    browser: Browser, postgres_dsn: str, record: asyncpg.Connection
) -> None:
    """A change of the verdict appears without a reload, and without a request to anybody else."""
    version, slices, _ = await write_history(record, n_slices=3, n_days=3, end=datetime.now(UTC))
    async with _served(postgres_dsn) as base:
        page, _, complaints = await _open(browser, 1280, "light")
        async with page.expect_response(lambda answer: answer.url.endswith("/events")):
            await page.goto(f"{base}/slice/{version}/{slices[2]}")
        await page.get_by_text("Live.").wait_for()
        assert await page.locator(".model .badge").inner_text() == "possible drift"
        # Until the page's first event has come, a change is part of it.
        async with asyncio.timeout(30):
            while await page.locator(".model .badge").inner_text() != "OK":
                await record.execute("update verdict set verdict = 'ok' where slice_id = $1", slices[2])
                await record.execute("update fold set fold_seq = fold_seq + 1")
                await page.wait_for_timeout(300)
        assert complaints == []


@pytest.mark.release
async def test_a_thousand_slices_are_shown_worst_first_and_found_by_name(
    browser: Browser, postgres_dsn: str, record: asyncpg.Connection
) -> None:
    """The page stays small: a hundred rows, with links that keep the search."""
    await write_history(record, n_slices=1000, n_days=2, end=datetime.now(UTC))
    async with _served(postgres_dsn) as base:
        seen = await _look(browser, base, ["/", "/?verdict=unknown", "/?page=10", "/?q=0999"], 390, "light")
        page, _, _ = await _open(browser, 1280, "light")
        await page.goto(f"{base}/?q=scanner%3D0&page=1")
        assert await page.locator("tbody tr").count() == 100
        assert "scanner=0001" in await page.locator("tbody tr").first.inner_text()
        await page.get_by_role("link", name="Next 100").click()
        assert "q=scanner%3D0" in page.url
        assert await page.get_by_label("Find a slice").input_value() == "scanner=0"
    assert "901 to 1,000 of 1,000" in seen["/?page=10"]


async def test_a_token_opens_the_page_and_a_link_from_elsewhere_keeps_the_session(
    browser: Browser, postgres_dsn: str
) -> None:
    """A wrong token is refused with words; the right one leads to the page that was asked for, by keyboard alone."""
    async with _served(postgres_dsn, token="s3cret-token") as base:
        page, _, complaints = await _open(browser, 390, "light")
        await page.goto(f"{base}/system")
        assert await page.evaluate(_CHECKS) == []
        await page.keyboard.type("wrong")
        await page.keyboard.press("Enter")
        await page.get_by_text("this token is wrong").wait_for()
        complaints.clear()  # Chromium reports the status 403
        await page.get_by_label("Token").fill("s3cret-token")
        await page.keyboard.press("Enter")
        await page.wait_for_url(f"{base}/system")
        (cookie,) = await page.context.cookies()
        assert cookie["httpOnly"]
        assert cookie["sameSite"] == "Strict"
        # Another site, whose page has a link to an alert.
        await page.route(
            "http://localhost:1/",
            lambda route: route.fulfill(body=f'<a href="{base}/alerts">alert</a>', content_type="text/html"),
        )
        await page.goto("http://localhost:1/")
        await page.get_by_role("link").click()
        await page.get_by_text("No alert is open").wait_for()
        await page.get_by_role("button", name="Log out").click()
        await page.get_by_label("Token").wait_for()
        assert complaints == []


async def test_a_replaced_version_and_a_closed_alert_say_so_first(
    browser: Browser, postgres_dsn: str, record: asyncpg.Connection, tmp_path: Path
) -> None:
    """On the alert, its slice, the list and the overview: what serves now, when the other was seen last, and who closed what."""
    end = datetime.now(UTC)
    old, slices, alert = await write_history(record, n_slices=3, n_days=2, end=end - timedelta(hours=1))
    new, *_ = await write_history(record, n_slices=1, n_days=2, end=end, version="int8-9")
    serving = "insert into serving (model_version_id, last_at, gap_s, gaps_s, replaced_at) values ($1, $2, 1, 60, $3)"
    await record.execute(serving, old, end - timedelta(minutes=50), end - timedelta(minutes=47))
    await record.execute(serving, new, end, None)
    await record.execute("update alert set resolved_at = $2, ended = 'replaced' where id = $1", alert, end)
    await record.execute(
        "update verdict set verdict = 'unknown', alert_id = null where model_version_id = $1", old
    )
    file = tmp_path / "operator.dsn"
    file.write_text(await login_in(postgres_dsn, PAGE))
    token = f"ana sha256:{hashlib.sha256(b'one').hexdigest()}\n"
    said = f"int8-7 does not serve any more (last seen {end - timedelta(minutes=50):%Y-%m-%d %H:%M} UTC). int8-9 serves now."
    paths = [f"/alert/{alert}", f"/slice/{old}/{slices[1]}", "/alerts", "/"]
    async with _served(postgres_dsn) as base:
        for width, scheme in ((390, "dark"), (1280, "light")):
            seen = await _look(browser, base, paths, width, scheme)  # type: ignore[arg-type]
            assert seen[paths[0]].index(said) < seen[paths[0]].index("answers in scanner=0001 changed")
            assert "(version replaced)" in seen[paths[0]]
            assert said in seen[paths[1]]
            assert "No alert is open" in seen["/alerts"]
            assert "version replaced" in seen["/alerts"]
            assert "Other versions: int8-7 (replaced by int8-9, last seen" in seen["/"]
            assert "Open alert" not in seen["/"]
    async with _served(await login_in(postgres_dsn, READER), token=token, operator_file=str(file)) as base:
        page, _, complaints = await _open(browser, 390, "dark")
        await page.goto(f"{base}/alert/{alert}")
        await page.get_by_label("Token").fill("one")
        await page.keyboard.press("Enter")
        await page.get_by_label("Why, or what the next person on call must know").fill("it stays away")
        await page.get_by_role("button", name="Close", exact=True).click()
        await page.get_by_text("ana closed this alert").wait_for()
        seen_closed = await page.locator("main").inner_text()
        assert "(closed by a person)" in seen_closed
        assert await page.get_by_role("button", name="Close", exact=True).count() == 0
        assert await page.evaluate(_CHECKS) == []
        assert complaints == []
    assert await record.fetchval("select action from audit order by seq desc limit 1") == "alert close"


async def test_a_person_acknowledges_an_alert_on_the_page(
    browser: Browser, postgres_dsn: str, record: asyncpg.Connection, tmp_path: Path
) -> None:
    """The page and the audit have the login's name, the time and the reason; the page itself reads as a reader."""
    _, _, alert = await write_history(record, n_slices=3, n_days=2, end=datetime.now(UTC))
    file = tmp_path / "operator.dsn"
    file.write_text(await login_in(postgres_dsn, PAGE))
    people = (
        f"ana sha256:{hashlib.sha256(b'one').hexdigest()}\nben sha256:{hashlib.sha256(b'two').hexdigest()}\n"
    )
    async with _served(await login_in(postgres_dsn, READER), token=people, operator_file=str(file)) as base:
        page, _, complaints = await _open(browser, 390, "dark")
        await page.goto(f"{base}/alert/{alert}")
        await page.get_by_label("Token").fill("one")
        await page.keyboard.press("Enter")
        reason = page.get_by_label("Why, or what the next person on call must know")
        await reason.fill("rolling back to int8-6 <b>now</b>")
        assert await page.evaluate(_CHECKS) == []
        # What somebody types stays, also when the database changes meanwhile and nothing has the focus.
        await page.get_by_text("Live.").wait_for()
        await reason.blur()
        await record.execute("update fold set fold_seq = fold_seq + 1")
        async with page.expect_response(lambda answer: answer.request.method == "POST"):
            await page.get_by_role("button", name="Acknowledge").click()
        await page.get_by_role("button", name="Take the acknowledgement back").wait_for()
        seen = await page.locator("main").inner_text()
        assert "acknowledged by ana" in seen
        assert "rolling back to int8-6 <b>now</b>" in seen
        assert await page.evaluate(_CHECKS) == []
        await reason.fill("   ")
        await page.get_by_role("button", name="Add a note").click()
        await page.get_by_text("Nothing was changed: the note is empty").wait_for()
        complaints.clear()  # Chromium reports the status 409
        await reason.fill("the scanner was cleaned")
        await page.get_by_role("button", name="Add a note").click()
        await page.get_by_text("note by ana").wait_for()
        await reason.fill("my shift ends")
        await page.get_by_role("button", name="Take the acknowledgement back").click()
        await page.get_by_text("not acknowledged any more by ana").wait_for()
        assert complaints == []
        # A form with the mark of another person, or of no page, is refused.
        forged = await page.request.post(
            f"{base}/alert/{alert}",
            form={"action": "note", "reason": "forged", "form_mark": "none"},
            headers={"Authorization": "Bearer two"},
        )
        assert forged.status == 403
    rows = await record.fetch(
        "select action, after ->> 'identity' as identity, actor, note from audit where subject = $1 order by seq",
        f"alert {alert}",
    )
    assert [(row["identity"], row["note"]) for row in rows] == [
        ("ana", "rolling back to int8-6 <b>now</b>"),
        ("ana", "the scanner was cleaned"),
        ("ana", "my shift ends"),
    ]
    assert all(row["actor"].startswith(PAGE) for row in rows)


async def test_without_a_login_the_page_shows_the_command_and_changes_nothing(
    browser: Browser, postgres_dsn: str, record: asyncpg.Connection, tmp_path: Path
) -> None:
    """Nobody who has not said who they are acts in somebody's name, also where an operator's address is there."""
    _, _, alert = await write_history(record, n_slices=3, n_days=2, end=datetime.now(UTC))
    file = tmp_path / "operator.dsn"
    file.write_text(await login_in(postgres_dsn, PAGE))
    async with _served(postgres_dsn, operator_file=str(file)) as base:
        page, _, _ = await _open(browser, 390, "light")
        await page.goto(f"{base}/alert/{alert}")
        assert f'quantdrift alerts ack {alert} --reason "..."' in await page.locator("#command").inner_text()
        assert await page.locator("form[action^='/alert']").count() == 0
        await page.goto(f"{base}/alert/{alert}")
        refused = await page.evaluate(
            """async (path) => (await fetch(path, {method: "POST", body: new URLSearchParams(
              {action: "ack", reason: "x"})})).status""",
            f"/alert/{alert}",
        )
        assert refused == 403
    assert await record.fetchval("select count(*) from alert_action") == 0


async def test_the_pages_say_what_labels_and_scores_say_and_wait_for_no_slow_query(
    browser: Browser, postgres_dsn: str, record: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """True labels in words, the highest scores by name, the request's id; where rows cannot be read in time, a sentence."""
    story = await write_short_story(postgres_dsn)
    faint = story.slice_ids[1]
    await record.execute(
        """update comparison set attributes = attributes || '{"header.x-request-id": "r-17"}',
            detail = coalesce(detail, '{}') || '{"reference_scores": [[1, 0.71], [0, 0.2]], "candidate_scores": [[0, 0.6]]}'"""
    )
    await record.execute("""
        insert into label (captured_at, exchange_id, item, model_version_id, label, candidate_right, reference_right)
        select captured_at, exchange_id, item, model_version_id, '1', not coalesce(flip, false), true from comparison
    """)
    config = Config(
        models=(Model(name="digits", labels=("zero", "one")),),
        notify=Notify(runbook_url="https://wiki.example.com/drift"),
    )
    paths = [
        f"/slice/{story.version_id}/{faint}",
        f"/alert/{story.alert_id}",
        f"/?model=digits&q={quote('scanner=faint', safe='')}",
    ]
    async with _served(await login_in(postgres_dsn, READER), config=config) as base:
        for width, scheme in ((390, "dark"), (1280, "light")):
            seen = await _look(browser, base, paths, width, scheme)  # type: ignore[arg-type]
        assert "unquantised: one 71 %, zero 20 %" in seen[paths[0]]
        assert "request id r-17" in seen[paths[0]]
        assert "Worst exchanges of the last day" in seen[paths[0]]
        assert "fewer answers are right than with the reference" in seen[paths[0]]
        assert re.search(
            r"\S+ % fewer answers are right than with the reference \(\S+ % to \S+ %\) since the onset",
            seen[paths[1]],
        )
        assert "Runbook" in seen[paths[1]]
        assert "scanner=faint" in seen[paths[2]]
        async with record.transaction():  # whoever reads single exchanges waits for this
            for (name,) in await record.fetch(
                "select inhrelid::regclass::text from pg_inherits where inhparent = 'comparison'::regclass"
            ):
                await record.execute(f"lock table {name} in access exclusive mode")
            monkeypatch.setattr(snapshot, "PATIENCE_S", 0.4)
            monkeypatch.setattr(snapshot, "PAST_PATIENCE_S", 2.0)
            seen = await _look(browser, base, paths[:2], 390, "light")
        assert "too busy, to find the worst ones" in seen[paths[0]]
        assert "Answers that changed" in seen[paths[0]]


async def _tell_more(record: asyncpg.Connection, story: Story) -> None:
    """Give the short story people, margins, labels, a baseline, an acknowledgement and another budget."""
    faint = story.slice_ids[1]
    await record.execute("""
        update comparison set group_key = 'person ' || (extract(epoch from captured_at)::bigint / 60),
            reference_margin = case when flip then 0.04 else 0.8 end, candidate_margin = 0.1,
            detail = jsonb_build_object('reference_top', 0, 'candidate_top', flip::int)
    """)
    await record.execute("""
        insert into label (captured_at, exchange_id, item, model_version_id, label, candidate_right, reference_right)
        select captured_at, exchange_id, item, model_version_id, '1', not coalesce(flip, false), true from comparison
    """)
    await record.execute(
        "insert into baseline (model_version_id, slice_id, metric, kind, source, made_by, made_at, reason, n_groups, content, fold_seq)"
        " values ($1, $2, 'flip', 'change', 'accepted', 'ana', $3, 'the new scanner </b>', 600, $4, 1)",
        story.version_id,
        faint,
        START + 20 * MINUTE,
        '{"total": [1.5, 1.5], "share": [200, 400]}',
    )
    await record.execute(
        "insert into alert_action (alert_id, action, identity, made_at, reason) values ($1, 'ack', 'ben', $2, 'on it')",
        story.alert_id,
        START + 70 * MINUTE,
    )
    for flip in ("0.01", "0.02"):
        await record.execute(
            "select audit_add('configuration', '', 'monitor', $1, $2, '')",
            None if flip == "0.01" else '{"options": {"models.digits.budget.flip": 0.01}}',
            f'{{"changed": ["models.digits.budget.flip"], "options": {{"models.digits.budget.flip": {flip}}}}}',
        )
    await record.execute("alter table audit disable trigger user")
    await record.execute("update audit set at = $1 where action = 'configuration'", START + 30 * MINUTE)


async def test_a_slice_shows_its_decisions_its_baseline_and_its_margins_and_the_overview_its_people(
    browser: Browser, postgres_dsn: str, record: asyncpg.Connection
) -> None:
    """Plots mark what people decided, with who and why beside them; figures of people and labels stand beside the verdict."""
    story = await write_short_story(postgres_dsn)
    await _tell_more(record, story)
    paths = [
        f"/slice/{story.version_id}/{story.slice_ids[1]}",
        "/?model=digits",
        f"/alert/{story.alert_id}",
    ]
    async with _served(await login_in(postgres_dsn, READER)) as base:
        for width, scheme in ((390, "dark"), (1280, "light")):
            seen = await _look(browser, base, paths, width, scheme)  # type: ignore[arg-type]
        page, _, complaints = await _open(browser, 1280, "light")
        await page.goto(f"{base}{paths[0]}")
        marks = await page.locator(".chart").first.locator(".mark title").all_text_contents()
        plots = [
            await page.locator("figure .baseline").count(),
            await page.locator("#margins ~ figure rect").count(),
        ]
        assert complaints == []
    assert "baseline accepted: changed answers by ana" in seen[paths[0]]
    assert "the new scanner </b>" in seen[paths[0]]
    assert f"alert {story.alert_id} acknowledged by ben" in seen[paths[0]]
    assert "budget flip: 0.01 to 0.02" in seen[paths[0]]
    assert "Baseline of changed answers: 0.5 %, accepted" in seen[paths[0]]
    assert {"baseline accepted: changed answers", "budget flip: 0.01 to 0.02"} <= set(marks)
    assert plots[0] >= 1
    assert plots[1] == 40
    changed = {item.at.timestamp() // 60 for item in story.items if item.flip}
    assert f"People affected, last day\nat least {len(changed)}\n" in seen[paths[1]]
    since = START + 50 * MINUTE
    faint = {
        item.at.timestamp() // 60 for item in story.items if item.flip and item.part == 1 and item.at >= since
    }
    assert f"at least {len(faint)} people got a changed answer on its last day." in seen[paths[2]]
    assert "fewer answers are right than with the reference" in seen[paths[1]]
    assert "no clear difference in accuracy" in seen[paths[1]]


async def _nasty_story(dsn: str, record: asyncpg.Connection) -> Story:
    """Write the short story with all that people decided; the slice that fires has a name that could be code."""
    story = await write_short_story(dsn)
    await _tell_more(record, story)
    name = _NASTY.format(1) + "'''\"\n\\"
    await record.execute("update slice set name = $1 where id = $2", name, story.slice_ids[1])
    return story


async def _n_points(page: Page, plot: str) -> int:
    """Return how many points of a slice are drawn."""
    lines = await page.locator(f"{plot} polyline.mean").all()
    on_lines = [len(str(await each.get_attribute("points")).split()) for each in lines]
    return sum(on_lines) + await page.locator(f"{plot} circle.mean").count()


def _mean_flip(items: list[Item]) -> float:
    """Return the share of changed answers, each exchange counted once."""
    total = sum(one.flip / one.n_items for one in items)
    return total / len({one.exchange for one in items})


async def test_the_query_under_each_plot_and_table_gives_its_rows(
    browser: Browser, postgres_dsn: str, record: asyncpg.Connection
) -> None:
    """Queries are copied with a button, can be read without a script, and stay open when the page follows the database."""
    story = await _nasty_story(postgres_dsn, record)
    dsn = await login_in(postgres_dsn, READER)
    reader = await asyncpg.connect(dsn)
    async with _served(dsn) as base:
        page, _, complaints = await _open(browser, 1280, "light")
        await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        await page.goto(f"{base}/slice/{story.version_id}/{story.slice_ids[1]}?span=7d")
        await page.get_by_text("Live.").wait_for()
        rows = {
            str(await each.get_attribute("id")).removesuffix("-query"): await reader.fetch(
                str(await each.text_content())
            )
            for each in await page.locator("details.sql code").all()
        }
        plots = {"flips", "divergence", "spread", "margins"}
        assert rows.keys() == plots | {"state", "events", "baselines", "directions", "worst"}
        shown = await page.locator("#worst ~ .scroll td:last-child > code").all_text_contents()
        directions = await page.locator("#directions ~ .scroll td:nth-child(4)").all_text_contents()
        drawn = await _n_points(page, "#flips ~ figure")
        # With the keyboard: open, copy; what is open and has the focus stays so when the database changes.
        await page.locator("#margins-summary").focus()
        await page.keyboard.press("Enter")
        await page.keyboard.press("Tab")
        await page.keyboard.press("Enter")
        await page.get_by_role("button", name="Copied").wait_for()
        copied = await page.evaluate("navigator.clipboard.readText()")
        assert copied == await page.locator("#margins-query").text_content()
        await page.get_by_role("link", name="Open in a notebook").focus()
        async with asyncio.timeout(30):
            while await page.locator(".model .badge").inner_text() != "OK":
                await record.execute(
                    "update verdict set verdict = 'ok' where slice_id = $1", story.slice_ids[1]
                )
                await record.execute("update fold set fold_seq = fold_seq + 1")
                await page.wait_for_timeout(300)
        assert await page.locator("#margins-sql").get_attribute("open") is not None
        assert await page.evaluate("document.activeElement.textContent") == "Open in a notebook"
        for path in ("/", "/alerts"):
            await page.goto(f"{base}{path}")
            sql = str(await page.locator("details.sql code").text_content())
            assert len(await reader.fetch(sql)) == await page.locator("tbody tr").count() > 0
        assert complaints == []
        plain = await browser.new_context(java_script_enabled=False)
        without = await plain.new_page()
        await without.goto(f"{base}/slice/{story.version_id}/{story.slice_ids[1]}")
        await without.locator("#worst-summary").click()
        assert await without.locator("#worst-query").is_visible()
    await reader.close()
    assert shown == [str(row["exchange_id"]) for row in rows["worst"]]
    assert directions == [f"{row['n']:,}" for row in rows["directions"]]
    assert drawn == len(rows["flips"]) == 2  # before and since the onset
    faint = [one for one in story.items if one.part == 1]
    in_bars = {
        flip: sum(row["n"] for row in rows["margins"] if row["flip"] is flip) for flip in (True, False)
    }
    assert in_bars == {flip: sum(one.flip is flip for one in faint) for flip in (True, False)}
    assert {row["kind"] for row in rows["events"]} == {"baseline accepted", "alert ack", "budget"}
    before, since = rows["flips"]
    for row, is_since in ((before, False), (since, True)):
        assert row["flip"] == pytest.approx(
            _mean_flip([one for one in faint if (one.at >= since["at"]) is is_since])
        )


@pytest.mark.release
async def test_a_slice_opens_in_a_notebook_that_runs(
    browser: Browser, postgres_dsn: str, record: asyncpg.Connection, tmp_path: Path
) -> None:
    """The file is a valid notebook; names from the wire stand in it as literals of Python alone, and its figures are the page's."""
    story = await _nasty_story(postgres_dsn, record)
    dsn = await login_in(postgres_dsn, READER)
    async with _served(dsn) as base:
        page, _, complaints = await _open(browser, 390, "light")
        await page.goto(f"{base}/slice/{story.version_id}/{story.slice_ids[1]}?span=7d")
        async with page.expect_download() as download:
            await page.get_by_role("link", name="Open in a notebook").click()
        file = tmp_path / "slice.ipynb"
        await (await download.value).save_as(file)
        assert complaints == []
    import nbformat  # 3 s of processor time

    document = nbformat.read(file, as_version=4)  # type: ignore[no-untyped-call]
    nbformat.validate(document)
    assert all("alert(1)" not in cell.source for cell in document.cells if cell.cell_type == "markdown")
    code = "\n".join(cell.source for cell in document.cells if cell.cell_type == "code")
    assert code.isascii()
    ended = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, env={**os.environ, "QUANTDRIFT_DSN": dsn}, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await ended.communicate()
    assert ended.returncode == 0
    assert float(out.split()[0]) == pytest.approx(_mean_flip([one for one in story.items if one.part == 1]))


async def test_the_system_page_says_how_much_is_replayed_where_and_for_how_many_requests(
    browser: Browser, postgres_dsn: str, record: asyncpg.Connection
) -> None:
    """Replays a second by device; by model, replays per million requests and the seconds in which references computed them."""
    now = datetime.now(UTC)
    version, everything, _ = await write_frame(record, PARTS)
    other = await record.fetchval(
        "insert into model_version (model, candidate_version, reference_digest) values ('faces', '1', 'f') returning id"
    )
    await make_partitions(record, [(now - 10 * MINUTE).date()])
    batches = [
        await record.fetchval(
            "insert into batch (kind, worker, stored_at, captured_from, captured_to, n_rows, provenance, replay_s, compared_model)"
            " values ('comparison', $1, $2, $3, $3, 1800, $4, $5, 'digits') returning id",
            worker,
            now - 9 * MINUTE,
            now - 10 * MINUTE,
            '{"runtime": "onnxruntime", "version": "1.2", "provider": "CPU", "device": "<b>EPYC</b>"}',
            replay_s,
        )
        for worker, replay_s in (("shadow-1", 1.8), ("shadow-2", None))
    ]
    of_other = await record.fetchval(
        "insert into batch (kind, worker, stored_at, captured_from, captured_to, n_rows, provenance, replay_s, compared_model)"
        " values ('comparison', 'shadow-3', $1, $2, $2, 10, $3, 0.5, 'faces') returning id",
        now - 9 * MINUTE,
        now - 10 * MINUTE,
        '{"runtime": "torch", "version": "2", "provider": "CUDA", "device": "GPU"}',
    )
    await store_comparisons(
        record,
        [
            Comparison(
                captured_at=now - 10 * MINUTE,
                exchange_id=uuid4(),
                batch_id=batch_id,
                model_version_id=version_id,
                slice_ids=(everything,) if version_id == version else (),
                latency_s=0.004 if version_id == version else None,
            )
            for batch_id, version_id, n in ((batches[0], version, 30), (of_other, other, 10))
            for _ in range(n)
        ],
    )
    boot, counts = uuid4(), '{"taken": 300, "thinned": 0, "published": 300, "lost": {}}'
    insert = (
        "insert into tally (source, boot, stratum, sequence, at, batch_id, offered, taken, thinned, published, lost,"
        " blind_connections, models, relay_cpu_s) values ('pod-1', $1, 'default', $2, $3, $4, $5, $6, 0, $6, '{}', 0, $7, $8)"
    )
    await record.execute(insert, boot, 1, now - 41 * MINUTE, batches[0], 0, 0, "{}", 0.2)
    await record.execute(
        insert,
        boot,
        2,
        now - MINUTE,
        batches[0],
        1200,
        600,
        f'{{"digits": {counts}, "faces": {counts}}}',
        24.2,
    )
    async with _served(await login_in(postgres_dsn, READER)) as base:
        seen = [
            (await _look(browser, base, ["/system"], width, scheme))["/system"]  # type: ignore[arg-type]
            for width, scheme in ((390, "dark"), (1280, "light"))
        ][-1]
    assert "<b>EPYC</b>\nonnxruntime 1.2, CPU\n\t2\t3,600\t1\t60\t1.8 s\tabout 1,000 s\t60 s" in seen
    assert "pod-1\t1,200\t20,000 µs\t0.01\t" in seen
    assert "digits\t600\t30\tabout 50,000\tabout 50 s" in seen
    timed = seen.split("How long an item took on both sides, last hour")[1]
    assert "\t<b>EPYC</b>\t30\t0.001 s\t0.004 s" in timed
    assert re.search(r"faces\t600\t10\tabout 1[67],000\tabout 8[0-9]{2} s", seen)


async def test_every_link_and_button_is_reached_by_the_keyboard_and_has_a_name(
    browser: Browser, postgres_dsn: str, record: asyncpg.Connection
) -> None:
    """With Tab alone, in the order of the page; the focus is seen, and a screen reader says what each thing is."""
    story = await write_short_story(postgres_dsn)
    await _tell_more(record, story)
    paths = ["/", "/alerts", f"/alert/{story.alert_id}", f"/slice/{story.version_id}/{story.slice_ids[1]}"]
    async with _served(postgres_dsn) as base:
        page, _, complaints = await _open(browser, 1280, "dark")
        for path in [*paths, "/compare", "/system"]:
            await page.goto(f"{base}{path}")
            n = await page.evaluate(f"({_FOCUSABLE})().length")
            assert n > 5
            reached = []
            for _ in range(n):
                await page.keyboard.press("Tab")
                reached.append(await page.evaluate(_REACHED))
            assert reached == list(range(n)), path
            tree = await page.locator("body").aria_snapshot()
            nameless = re.findall(
                r"^\s*- (?:link|button|textbox|combobox|img|region)(?=:|$| \[)", tree, re.MULTILINE
            )
            assert nameless == [], path
        assert complaints == []


async def test_a_person_says_on_the_page_what_became_of_an_incident(
    browser: Browser, postgres_dsn: str, record: asyncpg.Connection, tmp_path: Path
) -> None:
    """Mitigated, opened again and closed under the name of the login; a form without its mark is refused."""
    end = datetime.now(UTC)
    version, _, alert = await write_history(record, n_slices=3, n_days=2, end=end)
    assert alert is not None
    async with Database(postgres_dsn) as database, database.begin() as connection:
        await write_incidents(
            connection, versions={version}, transitions=[], now=end, fold_seq=1, webhook=False
        )
        number = (await find_alert(connection, alert)).incident
        assert number is not None
    file = tmp_path / "operator.dsn"
    file.write_text(await login_in(postgres_dsn, PAGE))
    token = f"ana sha256:{hashlib.sha256(b'one').hexdigest()}\n"
    async with _served(await login_in(postgres_dsn, READER), token=token, operator_file=str(file)) as base:
        page, _, complaints = await _open(browser, 390, "dark")
        await page.goto(f"{base}/incident/{number}")
        await page.get_by_label("Token").fill("one")
        await page.keyboard.press("Enter")
        reason = page.get_by_label("Why")
        for button, why in (
            ("Nobody gets these answers any more", "the caller ignores them"),
            ("Open it again", "the caller was rolled back"),
            ("Close", "int8-8 serves everywhere"),
        ):
            await reason.fill(why)
            assert await page.evaluate(_CHECKS) == []
            await page.get_by_role("button", name=button, exact=True).click()
            await page.get_by_text(why).first.wait_for()
        assert await page.get_by_role("button", name="Close", exact=True).count() == 0
        assert complaints == []
        forged = await page.request.post(
            f"{base}/incident/{number}",
            form={"action": "reopen", "reason": "forged", "form_mark": "none"},
            headers={"Authorization": "Bearer one"},
        )
        assert forged.status == 403
    rows = await record.fetch(
        "select after ->> 'state' as state, after ->> 'identity' as identity, note from audit where subject = $1 order by seq",
        f"incident {number}",
    )
    assert [tuple(row) for row in rows] == [
        ("mitigated", "ana", "the caller ignores them"),
        ("open", "ana", "the caller was rolled back"),
        ("closed", "ana", "int8-8 serves everywhere"),
    ]


async def test_an_incident_is_one_page_with_its_story(
    browser: Browser, postgres_dsn: str, record: asyncpg.Connection
) -> None:
    """From the overview and the alert: state, damage, people, what is not known with the command that tells, and what happened."""
    end = datetime.now(UTC)
    version, slices, alert = await write_history(record, n_slices=3, n_days=2, end=end)
    assert alert is not None
    await record.execute(
        "insert into alert (model_version_id, slice_id, severity, metric, onset_at, opened_at, details)"
        " select model_version_id, $2, 'warning', metric, onset_at, opened_at, $3 from alert where id = $1",
        alert,
        slices[0],
        f'{{"explained_by": "scanner=0001", "explained_by_id": {slices[1]}}}',
    )
    await record.execute(
        "insert into transition (model_version_id, slice_id, alert_id, from_verdict, to_verdict, at, fold_seq, details)"
        " select model_version_id, slice_id, id, 'ok', 'firing', opened_at, 1, '{\"reason\": \"the flip rate is above the budget\"}'"
        " from alert where id = $1",
        alert,
    )
    await record.execute("update fold set event_time = $1", end)
    async with Database(postgres_dsn) as database, database.begin() as connection:
        written = {"transitions": [], "fold_seq": 1, "webhook": False}
        await write_incidents(connection, versions={version}, now=end, **written)  # type: ignore[arg-type]
        await act(connection, alert, Act.ACK, f"looking {_NASTY.format(1)}", identity="ada")
        await add_finding(connection, alert, FindingKind.CAUSE, "Cause: the range of conv1 is too narrow", {})
        number = (await find_alert(connection, alert)).incident
        assert number is not None
        count = IncidentCount(
            id=number, until=end, n=3120, changed=1912.0, low=1710.0, high=2140.0, people=146
        )
        await store_count(connection, count)
    async with _served(postgres_dsn) as base:
        for width, scheme in ((390, "dark"), (1280, "light")):
            paths = [f"/incident/{number}", "/incidents", "/", f"/alert/{alert}"]
            seen = await _look(browser, base, paths, width, scheme)  # type: ignore[arg-type]
            page = seen[paths[0]]
            for words in (
                "scanner=0001",
                "Open since",
                "1,900",
                "1,700 to 2,100",
                "at least 146",
                "ada",
                "conv1",
            ):
                assert words in page, words
            assert "Labels of 50" in page or "50 labels would tell" in page
            assert f"quantdrift labels wanted --model digits --version int8-7 --slice {slices[1]}" in page
            assert f'quantdrift incidents mitigate {number} --reason "..."' in page
            assert "1 incident is open." in seen["/incidents"]
            assert f"Incident {number}" in seen["/"]
            assert f"Incident {number}" in seen[paths[3]]
        async with Database(postgres_dsn) as database, database.begin() as connection:
            await say(connection, number, Say.CLOSE, "int8-8 serves everywhere", identity="ada")
        seen = await _look(browser, base, [f"/incident/{number}", f"/alert/{alert}"], 1280, "light")
        assert "by ada: int8-8 serves everywhere" in seen[f"/incident/{number}"]
        assert "Say what quantdrift cannot see" not in seen[f"/incident/{number}"]


async def test_how_far_single_tokens_moved_is_drawn(
    browser: Browser, postgres_dsn: str, tmp_path: Path
) -> None:
    """On the page of a slice of generated text before and since the onset, and in the report beside all traffic; the query gives the numbers."""
    story = await write_short_story(postgres_dsn)
    faint = story.slice_ids[1]
    async with connected(postgres_dsn) as record:
        await record.execute(
            """
            update comparison set detail = jsonb_build_object('divergence_bins',
                case when $1 = any(slice_ids) and captured_at >= $2 then '25:199 37:1' else '1:40' end)
            """,
            faint,
            START + 50 * MINUTE,
        )
    text = Model(name="digits", task=Task.GENERATION, references=(Reference(path="a"),))
    config = Config(models=(text,))
    path = tmp_path / "report.html"
    period = Period(kind=PeriodKind.RANGE, begin=START, end=START + 95 * MINUTE)
    await write(config, Secrets(dsn=postgres_dsn), period, out=path, progress=lambda _: None)
    async with _served(postgres_dsn, config=config) as base:
        page, _, complaints = await _open(browser, 390, "dark")
        await page.goto(f"{base}/slice/{story.version_id}/{faint}")
        assert await page.evaluate(_CHECKS) == []
        said = await page.locator("main").inner_text()
        assert "Before: median 1.2e-06, 99 % 1.2e-06, 99.9 % 1.2e-06 nat over " in said
        assert "median 0.012, 99 % 0.012, 99.9 % 1.2 nat over " in said
        drawing = page.locator("svg[aria-label='Share of the tokens that moved at least so far']")
        assert await drawing.locator("polyline").count() == 2
        query = await page.locator("#tokens-query").text_content()
        async with connected(postgres_dsn) as record:
            rows = await record.fetch(query or "")
        assert {row["bin"] for row in rows} == {25, 37}
        await page.goto(path.as_uri())
        await page.locator("#tokens > summary").click()
        assert await page.locator("#tokens polyline").count() == 2
        assert "scanner=faint" in await page.locator("#tokens").inner_text()
    assert complaints == []
