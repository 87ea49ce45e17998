"""The read API of the live page, against the real server and database, as a reader."""

import asyncio
import hashlib
import io
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
import pytest
from sqlalchemy import text

from quantdrift.core.config.load import Secrets
from quantdrift.core.config.schema import Config, Model, Web
from quantdrift.core.process.http_port import HttpPort, PortLimits
from quantdrift.show.page.labels import MOST_BYTES, MOST_ROWS
from quantdrift.show.page.request import OPERATOR as OPERATOR_DATABASE
from quantdrift.show.page.server import application, page_port
from quantdrift.storage.database import Database
from quantdrift.storage.schema.roles import PAGE, READER
from quantdrift.storage.views import RESOURCES
from tests.support.monitor.monitor_processes import until
from tests.support.storage.comparisons import Comparison, make_partitions, store_comparisons
from tests.support.storage.logins import login_in
from tests.support.storage.page_rows import write_history

pytestmark = pytest.mark.integration

NOW = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
TOKEN = "a-token-of-a-program"
N_ITEMS = 25


@asynccontextmanager
async def served(dsn: str, token: str = "", operator_dsn_file: str = "") -> AsyncIterator[str]:
    """Serve the page on a database; yield the address of the API."""
    config = Config(models=(Model(name="digits", labels=("zero", "one")),), web=Web())
    async with Database(dsn) as database:
        secrets = Secrets(dsn=dsn, web_token=token, operator_dsn_file=operator_dsn_file)
        port = page_port(config, secrets, database)
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


@pytest.fixture
async def operator_file(postgres_dsn: str, tmp_path: Path) -> str:
    """Return a file with the address for an operator."""
    file = tmp_path / "operator.dsn"
    file.write_text(await login_in(postgres_dsn, PAGE))
    return str(file)


async def fetch(url: str, **headers: str) -> tuple[int, str, Any]:
    """Return status, type and document of an answer."""
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
        return answer.status, answer.content_type, json.loads(await answer.read())


@pytest.mark.release
async def test_the_server_answers_as_its_description_says(
    dsn: str, operator_file: str, tmp_path: Path
) -> None:
    """Schemathesis makes requests of the description and breaks them: no status, type or body is undescribed.

    What a schema cannot say is left out: which cursor a table gave, that `end` is later than `start`, which columns a CSV
    needs, and that a login is needed only where one is configured.
    """
    async with served(dsn, TOKEN, operator_file) as url:
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--checks", "all"]
        command += [
            "--exclude-checks",
            "ignored_auth,positive_data_acceptance",
            "--max-examples",
            "8",
            "--seed",
            "1",
            "--no-color",
            "--warnings",
            "missing_auth,missing_test_data",
            "--header",
            f"Authorization: Bearer {TOKEN}",
        ]
        process = await asyncio.create_subprocess_exec(
            *command, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        printed, _ = await process.communicate()
    assert "No issues found" in printed.decode(), printed.decode()[-4000:]


async def test_every_table_has_the_columns_that_its_description_names(dsn: str) -> None:
    """Each with a description, and each row is valid; infinity is a text."""
    import jsonschema  # 3 s of processor time

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
        ("slices?hours=24", "unknown_parameter", "`hours` is no parameter"),
        ("not-observed?hours=0", "wrong_number", "`hours` must be a whole number from 1 to 9600"),
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


async def test_what_nobody_looked_at_is_told_of_the_hours_that_are_asked_for(
    dsn: str, record: asyncpg.Connection
) -> None:
    """Requests of the day before yesterday are in the last 100 hours, and not in the last 24."""
    batch = await record.fetchval(
        "insert into batch (kind, worker, captured_from, captured_to, n_rows)"
        " values ('tally', 'shadow-0', now(), now(), 1) returning id"
    )
    for sequence, (days, offered) in enumerate(((3, 0), (2, 600))):
        await record.execute(
            "insert into tally (source, boot, stratum, sequence, at, batch_id, offered, taken, thinned, published, lost,"
            " blind_connections, models) values ('pod-9', $1, 'asked', $2, now() - $3 * interval '1 day', $4, $5, 0, 0, 0, '{}', 0, '{}')",
            "00000000-0000-0000-0000-0000000000b0",
            sequence,
            float(days),
            batch,
            offered,
        )

    async with served(dsn) as url:
        found = [
            (await fetch(f"{url}/not-observed?stratum=asked{hours}"))[2]["rows"]
            for hours in ("", "&hours=24", "&hours=100")
        ]
    assert found[:2] == [[], []]
    assert [row["requests"] for row in found[2]] == [600]


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


async def send(url: str, body: bytes, **headers: str) -> tuple[int, Any]:
    """Send a CSV; return status and document of the answer."""
    headers = {"Content-Type": "text/csv", **headers}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, data=io.BytesIO(body), headers=headers) as answer,
    ):
        return answer.status, json.loads(await answer.read())


async def test_a_program_sends_labels_and_is_told_what_became_of_them(
    dsn: str, operator_file: str, record: asyncpg.Connection
) -> None:
    """As `quantdrift labels load` does, in the name of the program, which the audit has."""
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    rows = b"key,candidate_right,reference_right\nr1,false,true\nr2,true,true\nr999,true,true\n,true,true\n"
    async with served(dsn, TOKEN, operator_file) as url:
        status, told = await send(f"{url}/labels?by=header.x-request-id", rows, **bearer)
        assert (status, told["left_out"]) == (200, {"without a key": 1})
        assert told["loaded"] == {
            "rows": 3,
            "labelled": 2,
            "undecided": 0,
            "unmatched": 1,
            "unmatched_keys": ["r999"],
        }
        stored = await record.fetch("select candidate_right, reference_right from label order by exchange_id")
        assert [tuple(row) for row in stored] == [(False, True), (True, True)]
        entry = await record.fetchrow("select actor, after from audit where action = 'labels load'")
        assert entry is not None
        after = json.loads(entry["after"])
        assert (after["file"], after["identity"], after["labelled"]) == ("HTTP", "token", 2)
        assert entry["actor"].startswith(PAGE)
        for query, body, code in (
            ("", rows, "wrong_parameter"),
            ("?by=trace&of=3", rows, "wrong_parameter"),
            ("?by=trace&model=other", rows, "wrong_model"),
            ("?by=trace", b"\xff\xfe", "wrong_csv"),
            ("?by=trace", b"id,answer\n1,2\n", "wrong_csv"),
            ("?by=trace", b"key,label\n,\n", "wrong_csv"),
            ("?by=trace", b"key,label\na\0b,1\n", "wrong_csv"),
            ("?by=trace", b"key,label\na," + b"1" * 5_000 + b"\n", "wrong_csv"),
        ):
            status, told = await send(f"{url}/labels{query}", body, **bearer)
            assert (status, told["code"]) == (400, code), told
        status, told = await send(f"{url}/labels?by=trace", b"x" * (MOST_BYTES + 1), **bearer)
        assert (status, told["code"]) == (413, "too_large")
        status, told = await send(
            f"{url}/labels?by=trace", b"key,label\n" + b"a,1\n" * (MOST_ROWS + 1), **bearer
        )
        assert (status, told["code"]) == (413, "too_large")
        status, told = await send(f"{url}/labels?by=trace", rows, **bearer, **{"Content-Type": "text/plain"})
        assert (status, told["code"]) == (415, "wrong_type")
    assert await record.fetchval("select count(*) from label") == 2


async def test_nobody_without_a_login_sends_labels(
    dsn: str, operator_file: str, record: asyncpg.Connection
) -> None:
    """Neither where a login is needed, nor from another site, nor where nobody logs in, nor where the page may only read."""
    rows, path = b"key,candidate_right,reference_right\nr1,false,true\n", "labels?by=header.x-request-id"
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    async with served(dsn, TOKEN, operator_file) as url:
        own = url.removesuffix("/api/v1")
        assert (await send(f"{url}/{path}", rows, Origin=own))[0] == 401
        assert (await send(f"{url}/{path}", rows, Origin=own, Authorization="Bearer wrong"))[0] == 401
        for headers in (
            {},
            {"Origin": "https://elsewhere.example"},
            {**bearer, "Origin": "https://elsewhere.example"},
        ):
            status, told = await send(f"{url}/{path}", rows, **headers)
            assert (status, told["code"]) == (403, "other_site")
    for token, file in (("", operator_file), (TOKEN, "")):
        async with served(dsn, token, file) as url:
            headers = {**bearer} if token else {"Origin": url.removesuffix("/api/v1")}
            status, told = await send(f"{url}/{path}", rows, **headers)
            assert (status, told["code"]) == (403, "not_allowed")
    assert await record.fetchval("select count(*) from label") == 0


async def test_a_load_that_waits_delays_no_acknowledgement_and_no_second_load_waits_behind_it(
    dsn: str, operator_file: str, postgres_dsn: str, record: asyncpg.Connection
) -> None:
    """The actions of people have a connection of their own; a second program is asked to send its labels again."""
    rows, path = b"key,candidate_right,reference_right\nr1,false,true\n", "labels?by=header.x-request-id"
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    config = Config(models=(Model(name="digits", labels=("zero", "one")),), web=Web())
    secrets = Secrets(dsn=dsn, web_token=TOKEN, operator_dsn_file=operator_file)
    holder = await asyncpg.connect(postgres_dsn)

    async def waits() -> bool:
        n = await holder.fetchval(
            "select count(*) from pg_locks where relation = 'label'::regclass and not granted"
        )
        return bool(n)

    try:
        async with Database(dsn) as database:
            app = application(config, secrets, database)
            port = HttpPort(app, PortLimits(), handler_cancellation=True, shutdown_timeout=1.0)
            url = f"http://127.0.0.1:{await port.open(('127.0.0.1', 0))}/api/v1"
            try:
                async with holder.transaction():
                    await holder.execute("lock table label in access exclusive mode")
                    first = asyncio.create_task(send(f"{url}/{path}", rows, **bearer))
                    await until(waits, "the load waits for the table")
                    async with asyncio.timeout(5), app[OPERATOR_DATABASE].begin() as connection:
                        assert (await connection.execute(text("select 1"))).scalar_one() == 1
                    status, told = await send(f"{url}/{path}", rows, **bearer)
                    assert (status, told["code"]) == (429, "busy")
                status, told = await first
                assert (status, told["loaded"]["labelled"]) == (200, 1)
            finally:
                await port.close()
    finally:
        await holder.close()
    assert await record.fetchval("select count(*) from label") == 1


async def test_the_token_of_a_program_that_sends_labels_acknowledges_and_reads_nothing(
    dsn: str, operator_file: str, record: asyncpg.Connection, tmp_path: Path
) -> None:
    """It gets no form whose mark it could send, and no other action than its own; a reader's token changes nothing."""
    lines = [
        f"{name} sha256:{hashlib.sha256(f'token of {name}'.encode()).hexdigest()} may={scope}"
        for name, scope in (("labels", "labels"), ("wall", "read"))
    ]
    file = tmp_path / "tokens"
    file.write_text("\n".join(lines))
    rows, path = b"key,candidate_right,reference_right\nr1,false,true\n", "labels?by=header.x-request-id"
    async with served(dsn, file.read_text(), operator_file) as url, aiohttp.ClientSession() as session:
        alert = f"{url.removesuffix('/api/v1')}/alert/1"
        for name, statuses in (("labels", (403, 403, 403, 200)), ("wall", (200, 200, 403, 403))):
            bearer = {"Authorization": f"Bearer token of {name}"}
            async with session.get(f"{url}/slices?limit=1", headers=bearer) as answer:
                read = answer.status
            async with session.get(alert, headers=bearer) as answer:
                page = answer.status
            async with session.post(alert, data={"action": "ack", "reason": "x"}, headers=bearer) as answer:
                acknowledged = answer.status
            sent, _ = await send(f"{url}/{path}", rows, **bearer)
            assert (read, page, acknowledged, sent) == statuses, name
    assert (
        await record.fetchval("select count(*) from alert_action where identity in ('labels', 'wall')") == 0
    )
