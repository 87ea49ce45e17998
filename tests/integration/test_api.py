"""The read API of the live page, against the real server and database, as a reader."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import asyncpg
import jsonschema
import pytest

from quantdrift.core.config.load import Secrets
from quantdrift.core.config.schema import Config, Model, Web
from quantdrift.storage.database import Database
from quantdrift.storage.page.tables import RESOURCES
from quantdrift.storage.schema.roles import READER
from quantdrift.web.server import page_port
from tests.support.storage.comparisons import Comparison, make_partitions, store_comparisons
from tests.support.storage.logins import login_in
from tests.support.storage.page_rows import write_history

pytestmark = pytest.mark.integration

NOW = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
TOKEN = "a-token-of-a-program"
N_ITEMS = 25


@asynccontextmanager
async def served(dsn: str, token: str = "") -> AsyncIterator[str]:
    """Serve the page on a database; yield the address of the API."""
    config = Config(models=(Model(name="digits"),), web=Web())
    async with Database(dsn) as database:
        port = page_port(config, Secrets(dsn=dsn, web_token=token), database)
        number = await port.open(("127.0.0.1", 0))
        try:
            yield f"http://127.0.0.1:{number}/api/v1"
        finally:
            await port.close()


@pytest.fixture
async def dsn(record: asyncpg.Connection, postgres_dsn: str) -> str:
    """Return the address, for a reader, of a database with thirty slices over four days, and items of one hour."""
    version, slices, _ = await write_history(record, n_slices=30, n_days=4, end=NOW)
    await make_partitions(record, [NOW.date(), (NOW - timedelta(hours=1)).date()])
    rows = [
        Comparison(
            captured_at=NOW - timedelta(minutes=number // 2),
            exchange_id=f"00000000-0000-0000-0000-{number:012d}",
            batch_id=1,
            model_version_id=version,
            slice_ids=(slices[0],),
            flip=True,
            divergence=float("inf") if number == 3 else 0.5,
            attributes=json.dumps({"header.x-request-id": f"r{number}"}),
        )
        for number in range(N_ITEMS)
    ]
    await store_comparisons(record, rows)
    return await login_in(postgres_dsn, READER)


async def fetch(url: str, **headers: str) -> tuple[int, str, Any]:
    """Return status, type and document of an answer."""
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
        return answer.status, answer.content_type, json.loads(await answer.read())


async def test_the_server_answers_as_its_description_says(dsn: str, tmp_path: Path) -> None:
    """Schemathesis makes requests of the description and breaks them: no status, type or body is undescribed.

    What a schema cannot say is left out: which cursor a table gave, that `end` is later than `start`, and that a login is
    needed only where one is configured.
    """
    async with served(dsn) as url:
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--checks", "all"]
        command += [
            "--exclude-checks",
            "ignored_auth,positive_data_acceptance",
            "--max-examples",
            "8",
            "--seed",
            "1",
            "--no-color",
        ]
        process = await asyncio.create_subprocess_exec(
            *command, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        printed, _ = await process.communicate()
    assert "No issues found" in printed.decode(), printed.decode()[-4000:]


async def test_every_table_has_the_columns_that_its_description_names(dsn: str) -> None:
    """Each with a description, and each row is valid; infinity is a text."""
    async with served(dsn) as url:
        _, _, document = await fetch(f"{url}/openapi.json")
        for resource in RESOURCES:
            status, kind, page = await fetch(f"{url}/{resource.name}?limit=1000")
            assert (status, kind) == (200, "application/json"), (resource.name, page)
            schema = document["components"]["schemas"][resource.name]
            assert all(column["description"] for column in schema["properties"].values())
            validator = jsonschema.Draft202012Validator(schema)
            for row in page["rows"]:
                validator.validate(row)
            if resource.name in {"slices", "slice-days", "slice-hours", "items", "alerts", "changes"}:
                assert page["rows"], resource.name
        _, _, page = await fetch(f"{url}/items?request_id=r3")
        assert [row["divergence"] for row in page["rows"]] == ["Infinity"]


@pytest.mark.parametrize(
    ("table", "key", "n"),
    [
        ("slices", ("model_version_id", "slice_id"), 30),
        ("items", ("exchange_id",), N_ITEMS),
        ("slice-days?slice=all", ("day",), 4),
        ("changes", ("at", "what", "subject"), None),
    ],
)
async def test_the_pages_of_a_table_have_each_row_once(
    dsn: str, table: str, key: tuple[str, ...], n: int | None
) -> None:
    """By the cursor of the page before, whatever the size of a page; several rows have the same time."""
    mark = "&" if "?" in table else "?"
    async with served(dsn) as url:
        _, _, whole = await fetch(f"{url}/{table}{mark}limit=1000")
        found, cursor = [], ""
        while True:
            more = f"&cursor={quote(cursor)}" if cursor else ""
            _, _, page = await fetch(f"{url}/{table}{mark}limit=4{more}")
            assert len(page["rows"]) <= 4
            found += page["rows"]
            if (cursor := page["cursor"]) is None:
                break
    assert found == whole["rows"]
    assert len({tuple(row[name] for name in key) for row in found}) == len(found)
    assert n is None or len(found) in {n, n + 1}  # of days that the hours touch


@pytest.mark.parametrize(
    ("query", "code", "words"),
    [
        (
            "slices?tippo=1",
            "unknown_parameter",
            "`tippo` is no parameter of this table: candidate_version, cursor",
        ),
        ("slices?model=a&model=b", "repeated_parameter", "`model` stands twice"),
        ("slices?limit=1001", "wrong_number", "from 1 to 1000"),
        ("slices?slice_id=-1", "wrong_number", "`slice_id` must be a whole number"),
        ("slices?model=%00", "wrong_text", "printable"),
        ("slices?cursor=abc", "wrong_cursor", "not one that this table gave"),
        ("slice-days?start=yesterday", "wrong_time", "2026-11-22T08:00:00Z"),
        (
            "slice-days?start=2026-11-22T08:00:00Z&end=2026-11-22T08:00:00Z",
            "wrong_time",
            "later than `start`",
        ),
        ("items?start=2026-01-01T00:00:00Z&end=2026-11-22T08:00:00Z", "wrong_time", "at most 31 days"),
    ],
)
async def test_a_wrong_parameter_is_a_problem_document(dsn: str, query: str, code: str, words: str) -> None:
    """With a code that programs can rely on, and a sentence for people."""
    async with served(dsn) as url:
        status, kind, body = await fetch(f"{url}/{query}")
    assert (status, kind, body["code"]) == (400, "application/problem+json", code)
    assert words in body["detail"]


async def test_without_a_token_nothing_is_told(dsn: str) -> None:
    """A wrong one neither; the right one reads. What is not there, and other methods, are problem documents too."""
    async with served(dsn, TOKEN) as url:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            status, kind, body = await fetch(f"{url}/slices", **headers)
            assert (status, kind, body["code"]) == (401, "application/problem+json", "not_logged_in")
        right = {"Authorization": f"Bearer {TOKEN}"}
        assert (await fetch(f"{url}/slices", **right))[0] == 200
        assert (await fetch(f"{url}/tippo", **right))[2]["code"] == "not_found"
        async with (
            aiohttp.ClientSession() as session,
            session.delete(f"{url}/slices", headers=right) as answer,
        ):
            assert (answer.status, answer.headers["Allow"]) == (405, "GET,HEAD")
