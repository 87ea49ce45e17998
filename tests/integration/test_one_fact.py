"""One fact, one place: every surface is asked about one fleet, and a figure of one name, window and subject is one number."""

import asyncio
import json
import re
from collections.abc import Mapping
from pathlib import Path

import aiohttp
import asyncpg
import msgspec
import pytest
from click.testing import CliRunner

from quantdrift.cli.main import main
from quantdrift.core.config.load import Secrets, load
from quantdrift.facts.figures import FigureName, WindowName
from quantdrift.show.page.server import page_port
from quantdrift.storage.database import Database
from tests.support.storage.fleet_story import CONFIG_TEXT, FleetStory, write_fleet
from tests.support.surfaces import Shown, differing, of_html, of_json, wrong_words

pytestmark = pytest.mark.integration
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


class Surfaces(msgspec.Struct, kw_only=True):
    """What every surface showed: figures by name, and texts by surface."""

    figures: list[Shown]
    texts: dict[str, str]


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
    surfaces = Surfaces(figures=[], texts={})
    for name, arguments in _commands(story).items():
        surfaces.texts[name] = await asyncio.to_thread(_typed, folder, arguments)
        document = json.loads(await asyncio.to_thread(_typed, folder, [*arguments, "--json"]))
        surfaces.figures += of_json(f"{name} --json", document)
    for kind in ("html", "json", "md"):
        path = folder / f"report.{kind}"
        await asyncio.to_thread(_typed, folder, [*_REPORT, str(path), "--format", kind])
        text = path.read_text(encoding="utf-8")
        if kind == "json":
            surfaces.figures += of_json("report --format json", json.loads(text))
        elif kind == "html":
            figures, surfaces.texts["report"] = of_html("report", text)
            surfaces.figures += figures
        else:
            surfaces.texts["report --format md"] = text
    port = page_port(load(folder / "config.toml"), Secrets(dsn=dsn), database)
    number = await port.open(("127.0.0.1", 0))
    try:
        await _open_pages(story, f"http://127.0.0.1:{number}", surfaces)
    finally:
        await port.close()
    return surfaces


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
                surfaces.figures += of_json(page, json.loads(text))
            else:
                figures, surfaces.texts[page] = of_html(page, text)
                surfaces.figures += figures


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
    assert {shown.key[1] for shown in surfaces.figures} <= set(WindowName)
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
    words = [
        word
        for surface, text in surfaces.texts.items()
        if not _OF_PROGRAMS.search(surface)
        for word in wrong_words(surface, text)
    ]
    assert words == []
