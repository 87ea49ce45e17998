"""One fact, one place: every surface is asked about one fleet.

A figure of one name, window and subject is one number, and every number has a name: its surface names it, or the record that the
surface shows. `NAMELESS` lists the kinds that need none.
"""

import ast
import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import msgspec
import pytest
from click.testing import CliRunner

from quantdrift.cli.main import main
from quantdrift.core.config.load import Secrets, load
from quantdrift.facts.figures import FigureName, WindowName
from quantdrift.monitor.notify.webhook import document
from quantdrift.show.page import compare as compare_page
from quantdrift.show.page.server import page_port
from quantdrift.storage.alerts.alerts import due_deliveries
from quantdrift.storage.database import Database
from tests.support.storage.fleet_story import CONFIG, CONFIG_TEXT, FleetStory, write_fleet
from tests.support.surfaces import (
    Number,
    Shown,
    differing,
    nameless,
    numbers_of,
    of_html,
    of_json,
    of_rows,
    wrong_words,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
_REPORT = ("report", "--week", "--out")
_API = (
    "slices",
    "slice-days",
    "slice-hours",
    "alerts",
    "incidents",
    "releases",
    "coverage",
    "not-observed",
    "changes",
)
# What people copy from a table of raw values into SQL or a program, where the words of programs stand.
_OF_PROGRAMS = re.compile(r"/api/|compare\?")


# Which table of the API a question of the notebook is about, by the number of the question.
_ASKED: Mapping[str, str] = {"1": "slices", "2": "slices", "3": "slice-days", "10": "releases"}
NOTEBOOK = Path(__file__).parents[2] / "examples" / "questions.ipynb"


class Surfaces(msgspec.Struct, kw_only=True):
    """What every surface showed: figures by name, texts by surface, the numbers that pages and records name, and what is wrong."""

    figures: list[Shown]
    texts: dict[str, str]
    lines: dict[str, str]
    named: dict[str, list[Number]]
    wrong: list[str]

    def text(self, surface: str, text: str) -> None:
        """Add what a surface says."""
        self.texts[surface] = self.lines[surface] = text

    def record(self, surface: str, document: Any) -> None:
        """Add a document, in which each number has a name."""
        self.figures += of_json(surface, document)
        self.named[surface] = list(numbers_of(document))

    def page(self, surface: str, html: str) -> None:
        """Add a page."""
        page = of_html(surface, html)
        self.figures += page.figures
        self.texts[surface], self.lines[surface] = page.text, page.lines
        self.named[surface], self.wrong = page.named, [*self.wrong, *page.wrong]

    def records_of(self, surface: str, story: FleetStory) -> list[Number]:
        """Return the numbers that a surface names, and those of the records that it shows."""
        alerts = [f"alerts show {number} --json" for number in story.alerts.values()]
        of_alert = re.fullmatch(r"(?:/alert/|webhook )(\d+).*", surface)
        of_incident = re.fullmatch(r"/incident/(\d+)", surface)
        records = [surface, f"{surface} --json"]
        if of_alert:
            records.append(f"alerts show {of_alert[1]} --json")
        elif of_incident:
            records.append(f"incidents show {of_incident[1]} --json")
        elif surface in {"/incidents", "/alerts"}:
            records.append(f"{surface[1:]} list --json")
        elif surface.startswith("/compare"):
            records.append("compare --json")
        elif surface.startswith("report"):
            records += ["report --format json", *alerts]
        elif surface == "triage":
            records += alerts
        return list({number for record in records for number in self.named.get(record, ())})


def _commands(story: FleetStory) -> Mapping[str, list[str]]:
    """Return what is typed, by name; each prints JSON and, without the option, text."""
    shown = {f"alerts show {number}": ["alerts", "show", str(number)] for number in story.alerts.values()}
    incidents = {f"incidents show {n}": ["incidents", "show", str(n)] for n in story.incidents}
    return {
        **shown,
        **incidents,
        "alerts list": ["alerts", "list"],
        "incidents list": ["incidents", "list", "--all"],
        "slices list": ["slices", "list", "--model", "digits"],
        "slices show": ["slices", "show", "scanner=faint", "--model", "digits"],
        "status": ["status"],
        "triage": ["triage"],
        "compare": ["compare", "--model", "digits", "--from", "int8-1", "--to", "int8-2"],
    }


def _typed(folder: Path, arguments: list[str]) -> str:
    result = CliRunner().invoke(main, [*arguments, "-c", str(folder / "config.toml")])
    assert result.exit_code in {0, 1}, (arguments, result.output, result.exception)
    return result.output


async def _asked(story: FleetStory, database: Database, dsn: str, folder: Path) -> Surfaces:
    """Ask every command, report, page and answer of the API."""
    surfaces = Surfaces(figures=[], texts={}, lines={}, named={}, wrong=[])
    for name, arguments in _commands(story).items():
        before = json.loads(await asyncio.to_thread(_typed, folder, [*arguments, "--json"]))
        surfaces.text(name, await asyncio.to_thread(_typed, folder, arguments))
        surfaces.record(f"{name} --json", before)
        if name == "status":  # its counts are of the last hour, which goes on while it is asked
            answer = await asyncio.to_thread(_typed, folder, [*arguments, "--json"])
            surfaces.named[name] = _between(before, json.loads(answer))
        if name == "compare":
            surfaces.figures += of_rows(name, "releases", _releases(before))
    for kind in ("html", "json", "md"):
        path = folder / f"report.{kind}"
        await asyncio.to_thread(_typed, folder, [*_REPORT, str(path), "--format", kind])
        text = path.read_text(encoding="utf-8")
        if kind == "json":
            surfaces.record("report --format json", json.loads(text))
        elif kind == "html":
            surfaces.page("report", text)
        else:
            surfaces.text("report --format md", text)
    async with database.begin() as connection:
        for delivery in await due_deliveries(connection, 1000):
            body = json.loads(document(delivery, CONFIG))
            name = f"webhook {delivery.alert.id}, event {delivery.id}"
            surfaces.record(name, body)
            surfaces.text(name, body["text"])
    port = page_port(load(folder / "config.toml"), Secrets(dsn=dsn), database)
    number = await port.open(("127.0.0.1", 0))
    try:
        await _open_pages(story, f"http://127.0.0.1:{number}", surfaces)
    finally:
        await port.close()
    surfaces.figures += await asyncio.to_thread(_run_notebook)
    return surfaces


def _between(before: Any, after: Any) -> list[Number]:
    """Return the counts that a document had between two times."""
    return [
        Number(one.name, float(n))
        for one, other in zip(numbers_of(before), numbers_of(after), strict=True)
        if one != other
        for n in range(int(min(one.value, other.value)), int(max(one.value, other.value)) + 1)[:100]
    ]


def _releases(compared: Any) -> Iterator[dict[str, Any]]:
    """Yield what `compare` says of each slice as the view of releases has it."""
    for of in (compared["aggregate"], *compared["slices"]):
        yield {
            "model": compared["model"],
            "version": compared["new"]["version"],
            "before_version": compared["old"]["version"],
            "slice": of["name"],
            "n_before": of["old"]["n_exchanges"],
            "n": of["new"]["n_exchanges"],
            "flip_before": _sum(of["old"]["flip"]["value"]),
            "flip": _sum(of["new"]["flip"]["value"]),
            "flip_difference": _sum(of["flip"]["mean"]),
        }


def _sum(value: float) -> float:
    """Return a number whose sum was added in another order than that of roll-ups."""
    return float(f"{value:.12g}")


def _run_notebook() -> list[Shown]:
    """Run the cells of the notebook, and return the numbers of its tables that the API has, too."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    shown: list[Shown] = []
    question = ""
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            heading = re.match(r"## (\d+)\.", source)
            question = heading[1] if heading else question
            continue
        body = ast.parse(source).body
        last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
        # Question 10 needs a model with two versions: that of `compare`.
        scope = {**names, "model": "digits"} if question == "10" else names
        exec(compile(ast.Module(body=body, type_ignores=[]), "cell", "exec"), scope)
        if last is None:
            continue
        assert isinstance(last, ast.Expr)
        output = eval(compile(ast.Expression(body=last.value), "cell", "eval"), scope)
        if question in _ASKED:
            rows = output.reset_index().to_dict(orient="records")
            fixed = {"model": names["model"], "candidate_version": names["version"]}
            if question == "3":
                fixed["slice"] = names["slice_name"]
            if question == "10":
                fixed = {"model": scope["model"]}
                rows = [
                    {name: _sum(value) if "flip" in name else value for name, value in row.items()}
                    for row in rows
                ]
            shown += of_rows("notebook", _ASKED[question], [fixed | row for row in rows])
    return shown


async def _open_pages(story: FleetStory, base: str, surfaces: Surfaces) -> None:
    slices = [
        f"/slice/{story.versions[model, version]}/{number}?span=7d"
        for model, version in story.versions
        for (of_model, _), number in story.slices.items()
        if of_model == model
    ]
    pages = [
        "/",
        "/alerts",
        "/incidents",
        "/system",
        "/compare?model=digits",
        *(f"/alert/{number}" for number in story.alerts.values()),
        *(f"/incident/{number}" for number in story.incidents),
        *slices,
        *(f"/api/v1/{name}" for name in _API),
    ]
    async with aiohttp.ClientSession() as session:
        for page in pages:
            async with session.get(base + page) as answer:
                text = await answer.text()
                assert answer.status == 200, (page, text[:500])
            if page.startswith("/api/"):
                surfaces.record(page, json.loads(text))
                table = page.rpartition("/")[2]
                if table in _ASKED.values() and table != "releases":
                    surfaces.figures += of_rows(page, table, json.loads(text)["rows"])
            else:
                surfaces.page(page, text)


async def test_a_figure_is_one_number_on_every_surface(
    database: Database,
    record: asyncpg.Connection,
    postgres_dsn: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two versions with people and without, of alerts that are open, over, replaced and closed, and of a model that is new.

    People read the words of the status table, and not those of programs.
    """
    monkeypatch.setenv("QUANTDRIFT_DSN", postgres_dsn)
    monkeypatch.chdir(tmp_path)  # the notebook writes files there
    monkeypatch.setattr(compare_page, "_COMPARING_S", 100.0)  # a busy machine would compare by roll-ups
    (tmp_path / "config.toml").write_text(CONFIG_TEXT, encoding="utf-8")
    story = await write_fleet(record, database)
    surfaces = await _asked(story, database, postgres_dsn, tmp_path)

    assert differing(surfaces.figures) == []
    named, unnamed = (
        surfaces.texts[f"alerts show {story.alerts[of]}"]
        for of in (("digits", "int8-1", "scanner=faint"), ("letters", "q4-a", "lang=fr"))
    )
    assert re.search(r"answers of \d+ people", named)
    assert not re.search(r"\d+ (people|person)\b", unnamed)
    names = {shown.key[0] for shown in surfaces.figures}
    assert names >= {FigureName.CHANGED_SHARE, FigureName.PEOPLE_AFFECTED}
    tables = set(_ASKED.values())
    assert {shown.key[1] for shown in surfaces.figures} <= {*WindowName, *tables}
    in_notebook = [shown.key[:2] for shown in surfaces.figures if shown.surface == "notebook"]
    assert {table for _, table in in_notebook} == tables
    compared = [shown.key for shown in surfaces.figures if shown.surface == "compare"]
    assert {shown.key for shown in surfaces.figures if shown.surface == "notebook"} >= set(compared)
    assert {slice_ for *_, slice_ in compared} == {"slice=all", "slice=scanner=faint", "slice=scanner=clear"}
    on = {shown.key: set[str]() for shown in surfaces.figures}
    for shown in surfaces.figures:
        on[shown.key].add(shown.surface)
    of_alert, of_version = story.alerts["letters", "q4-a", "lang=de"], story.versions["letters", "q4-a"]
    for surface, window in (
        (f"/alert/{of_alert}", WindowName.WHEN_PAGED),
        (f"/alert/{of_alert}", WindowName.NOW),
        (f"alerts show {of_alert} --json", WindowName.WHEN_PAGED),
        (f"alerts show {of_alert} --json", WindowName.NOW),
        ("report", WindowName.WHEN_PAGED),
        ("report", WindowName.PERIOD),
        ("report --format json", WindowName.NOW),
        ("/compare?model=digits", WindowName.PERIOD),
        ("slices show --json", WindowName.DAY),
        ("/", WindowName.DAY),
    ):
        assert any(
            seen.surface == surface
            and seen.key[:2] == (FigureName.CHANGED_SHARE, window)
            and seen.value is not None
            for seen in surfaces.figures
        ), (surface, window)
    old = f"/slice/{story.versions['digits', 'int8-1']}/2?span=7d"
    for surface in ("report", "report --format md", old):
        assert "int8-1: replaced by int8-2" in surfaces.texts[surface].replace("\\", ""), surface
    assert "q4-a: serving" in surfaces.texts[f"/slice/{of_version}/5?span=7d"]
    assert sum(len(seen) > 1 for seen in on.values()) >= 10, "figures are shown on one surface alone"
    assert sum("notebook" in seen and len(seen) > 1 for seen in on.values()) >= 20, "the notebook is alone"
    assert {surface.partition(" ")[0] for surface in surfaces.lines} >= {"webhook", "report", "/", "triage"}
    assert surfaces.wrong == [], "the text of a figure is not its number"
    assert [
        f"{surface}: {number}"
        for surface, lines in surfaces.lines.items()
        for number in nameless(lines, surfaces.records_of(surface, story))
    ] == []
    words = [
        word
        for surface, text in surfaces.texts.items()
        if not _OF_PROGRAMS.search(surface)
        for word in wrong_words(surface, text)
    ]
    assert words == []
