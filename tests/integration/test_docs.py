"""What the pages show can be typed."""

import re
from pathlib import Path

import asyncpg
import pytest

from quantdrift.core.config import load

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


def test_every_configuration_shown_is_sound(tmp_path: Path) -> None:
    """A TOML block that is copied into a file loads."""
    blocks = _blocks("toml")
    assert blocks
    for _, block in blocks:
        path = tmp_path / "config.toml"
        path.write_text(block)
        load(path, {})


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
