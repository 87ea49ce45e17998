"""The page that describes the database."""

import asyncio
from collections.abc import Iterable
from pathlib import Path

import asyncpg
import pytest

from quantdrift.storage.admin.database_docs import describe
from quantdrift.storage.admin.migrate import upgrade
from quantdrift.storage.server.postgres import PostgresServer, find_binaries

pytestmark = pytest.mark.integration

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"
PAGE = REFERENCE / "database.md"


def _stored(pages: Iterable[str]) -> dict[str, str]:
    """Return the pages as they are in the tree."""
    return {name: (REFERENCE / name).read_text(encoding="utf-8") for name in pages}


async def test_the_pages_say_what_the_database_says(postgres_dsn: str) -> None:
    """docs/reference/database.md, and that of the tables, are what the newest schema says of itself."""
    described = await describe(postgres_dsn)
    assert described == _stored(described), "stale: run `make docs`"


async def test_the_queries_on_the_page_run(postgres_dsn: str) -> None:
    """Each example can be pasted into psql; of a database without traffic only its own installation is known."""
    examples = [part.split("```")[0] for part in PAGE.read_text(encoding="utf-8").split("```sql")[1:]]
    connection = await asyncpg.connect(postgres_dsn)
    rows = [row for example in examples for row in await connection.fetch(example)]
    await connection.close()
    assert [row["what"] for row in rows] == ["db upgrade"]
    assert len(examples) == 12


@pytest.mark.release
def test_the_oldest_server_we_know_describes_itself_the_same(tmp_path: Path) -> None:
    """The schema and its views are the same on Postgres 16 as on the newest."""
    newest = find_binaries().directory
    older = newest.parent.parent / "pginstall" / "bin"
    if older == newest or not older.is_dir():
        pytest.skip("only one version of Postgres is installed")
    with PostgresServer(tmp_path / "server", binaries=older, durable=False) as server:
        asyncio.run(upgrade(server.dsn, progress=lambda _: None))
        described = asyncio.run(describe(server.dsn))
        assert described == _stored(described)
