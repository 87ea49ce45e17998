"""What the pages show can be typed."""

import asyncio
import re
import shlex
import tomllib
from pathlib import Path

import asyncpg
import msgspec
import pytest
from click.testing import CliRunner, Result

from quantdrift.cli.main import main
from quantdrift.core import plugins
from quantdrift.core.config import load
from quantdrift.monitor.planning.fleet import Fleet
from tests.support.monitor.fold_stream import FAINT_ID, batches, store_batch, store_catalog
from tests.support.monitor.monitor_processes import running_monitor, until
from tests.support.plugin_packages import link_example

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])


def _blocks(language: str) -> list[tuple[Path, str]]:
    pattern = re.compile(rf"^```{language}\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return [(page, block) for page in PAGES for block in pattern.findall(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_file_leads_somewhere(page: Path) -> None:
    """Pages, pictures and folders that are linked exist."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_every_configuration_shown_is_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A TOML block that is copied into a file loads, with the plug-in of the examples installed."""
    link_example(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    blocks = _blocks("toml")
    assert blocks
    for _, block in blocks:
        if block.startswith("pods ="):  # the file of `plan --fleet`
            msgspec.convert(tomllib.loads(block), Fleet)
            continue
        path = tmp_path / "config.toml"
        path.write_text(block)
        load(path, {})
    plugins.use(())


async def test_every_query_shown_runs(postgres_dsn: str) -> None:
    """SQL blocks, and what is handed to psql or stands in the text."""
    queries = [sql for _, block in _blocks("sql") for sql in block.split(";") if sql.strip()]
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        queries += re.findall(r"-c '((?:select|table) [^']+)'", text)
        queries += re.findall(r"`(select \* from [^`]+)`", text)
    assert len(queries) >= 5
    connection = await asyncpg.connect(postgres_dsn)
    try:
        for query in queries:
            await connection.fetch(query)
    finally:
        await connection.close()


@pytest.mark.release
async def test_the_commands_of_the_first_hour_run_as_typed_with_two_models(
    postgres_dsn: str, record: asyncpg.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In their order, on a page of one of two models that have a slice of the same name; only the numbers of alert and incident differ."""
    await store_catalog(record)
    await record.execute("update slice set name = 'scanner=archive' where id = $1", FAINT_ID)
    await record.execute(
        "update model_version set candidate_version = 'int8-' || id, reference_digest = repeat('d', 64)"
    )
    await record.execute(
        "insert into model_version (id, model, candidate_version, reference_digest, first_seen_at) overriding system value"
        " select id + 100, 'letters', candidate_version, reference_digest, first_seen_at from model_version;"
        " insert into slice (id, model, predicate, name, definition) overriding system value"
        " select id + 100, 'letters', predicate, name, definition from slice"
    )
    for rows in (*batches(60, faint_flips=0.3), *batches(20, seed=2, version=2, tally_every=100)):
        await store_batch(record, rows)

    async def alert() -> int | None:
        found: int | None = await record.fetchval("select max(id) from alert where severity = 'firing'")
        return found

    async def has_paged() -> bool:
        return await alert() is not None

    async with running_monitor(postgres_dsn, tmp_path):
        await until(has_paged, "the drift is paged")
    with (tmp_path / "config.toml").open("a") as config:
        config.write('[[models]]\nname = "letters"\n')
    (tmp_path / "served.onnx").touch()
    (tmp_path / "recorded").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUANTDRIFT_DSN", postgres_dsn)
    page = (ROOT / "docs/how-to/first-hour.md").read_text(encoding="utf-8")

    async def typed(command: str) -> Result:
        number = await alert()
        incident = await record.fetchval("select incident_id from alert where id = $1", number)
        words = shlex.split(
            re.sub(
                r"^incidents (\w+) 3\b", rf"incidents \1 {incident}", re.sub(r"\b12\b", str(number), command)
            )
        )
        return await asyncio.to_thread(CliRunner().invoke, main, words)

    commands = re.findall(r"^\$ quantdrift (.+)$", page, flags=re.MULTILINE)
    assert len(commands) >= 7
    for command in commands:
        result = await typed(command)
        # NATS and the other processes are away, and `status` says so.
        assert result.exit_code == 0 or (command == "status" and result.exit_code == 1), result.output
    next_day = [
        command for command in re.findall(r"\| `quantdrift ([^`]+)` \|", page) if "..." not in command
    ]
    assert {command.split()[0] for command in next_day} == {"diagnose", "repair", "compare"}
    for command in next_day:
        assert "Usage:" not in (await typed(command)).output, command
    assert (await typed(next_day[-1])).exit_code == 0
