"""Attacks on the live page, over HTTP: without a login, by other sites, by addresses, and by what is too much."""

import asyncio
import io
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import aiohttp
import asyncpg
import pytest
from yarl import URL

from quantdrift.core.config.load import Secrets
from quantdrift.core.config.schema import Config, Model, Web
from quantdrift.core.process.http_port import HttpPort, PortLimits
from quantdrift.show.page.access import FORM_MARK
from quantdrift.show.page.events import MOST_FOLLOWERS
from quantdrift.show.page.server import application
from quantdrift.storage.database import Database
from quantdrift.storage.schema.roles import PAGE, READER
from tests.support.storage.logins import login_in

pytestmark = pytest.mark.integration

TOKEN: Final = "a-token-of-thirty-two-characters"
BEARER: Final = {"Authorization": f"Bearer {TOKEN}"}
PUBLIC: Final = {"/livez", "/readyz", "/login", "/login/oidc", "/login/oidc/end", "/static/{digest}/{name}"}


@pytest.fixture
async def served(postgres_dsn: str, tmp_path: Path) -> AsyncIterator[tuple[str, set[tuple[str, str]]]]:
    """Serve the page; yield its address, and method and path of each route."""
    operator = tmp_path / "page.dsn"
    operator.write_text(await login_in(postgres_dsn, PAGE))
    dsn = await login_in(postgres_dsn, READER)
    secrets = Secrets(dsn=dsn, web_token=TOKEN, operator_dsn_file=str(operator))
    async with Database(dsn) as database:
        app = application(Config(models=(Model(name="digits"),), web=Web()), secrets, database)
        routes = {
            (route.method, route.resource.canonical)
            for route in app.router.routes()
            if route.resource is not None
        }
        port = HttpPort(app, PortLimits(), handler_cancellation=True, shutdown_timeout=0.3)
        number = await port.open(("127.0.0.1", 0))
        try:
            yield f"http://127.0.0.1:{number}", routes
        finally:
            await port.close()


@asynccontextmanager
async def asked(
    method: str,
    url: str,
    headers: Mapping[str, str] | None = None,
    data: bytes | Mapping[str, str] | None = None,
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Send a request exactly as it is written, and follow no redirection."""
    body = io.BytesIO(data) if isinstance(data, bytes) else data
    async with (
        aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session,
        session.request(
            method, URL(url, encoded=True), headers=headers, data=body, allow_redirects=False
        ) as answer,
    ):
        yield answer


async def status_of(
    method: str,
    url: str,
    headers: Mapping[str, str] | None = None,
    data: bytes | Mapping[str, str] | None = None,
) -> int:
    """Return the status of an answer."""
    async with asked(method, url, headers, data) as answer:
        return answer.status


async def mark_of(url: str, headers: Mapping[str, str] | None = None) -> str:
    """Return the mark of the forms for whoever asks."""
    async with asked("GET", f"{url}/login", headers) as answer:
        match = re.search(f'name="{FORM_MARK}" value="([^"]+)"', await answer.text())
    assert match is not None
    return match[1]


async def test_no_address_of_the_page_answers_without_a_login(
    served: tuple[str, set[tuple[str, str]]],
) -> None:
    """Every route but login, probes and files: pages lead to the login, the API says 401, and nothing is changed."""
    url, routes = served
    assert len(routes) > 30
    for method, path in sorted(routes):
        if path in PUBLIC:
            continue
        address = url + re.sub(r"\{\w+\}", "1", path)
        async with asked(method, address, {"Origin": url}) as answer:
            if path.startswith("/api/"):
                assert answer.status == 401, (method, path)
            else:
                assert answer.status == 303, (method, path)
                assert answer.headers["Location"].startswith("/login?next="), (method, path)
            assert "set-cookie" not in answer.headers


async def test_only_a_form_of_this_page_logs_somebody_in(served: tuple[str, set[tuple[str, str]]]) -> None:
    """Without an Origin, from another site, from another port, or with somebody else's mark the right token is refused."""
    url, _ = served
    mark = await mark_of(url)
    form = {"token": TOKEN, "next": "/", FORM_MARK: mark}
    port = url.rpartition(":")[2]
    for origin in ("", "https://evil.example", "null", url.replace(port, "1"), f"{url}.evil.example"):
        assert await status_of("POST", f"{url}/login", {"Origin": origin} if origin else {}, form) == 403, (
            origin
        )
    for wrong in ("", "x", await mark_of(url, BEARER)):
        assert await status_of("POST", f"{url}/login", {"Origin": url}, {**form, FORM_MARK: wrong}) == 403, (
            wrong
        )
    assert await status_of("POST", f"{url}/login", {"Origin": url}, form) == 303


@pytest.mark.parametrize(
    "target",
    [
        *("https://evil.example", "//evil.example", "/\\evil.example", "\\\\evil.example", "evil.example"),
        *(
            "javascript:alert(1)",
            "/\t/evil.example",
            "/\r\nSet-Cookie: a=b",
            "/\u2028",
            "///evil.example",
            "",
            " /",
        ),
    ],
)
async def test_a_login_leads_to_no_other_site(served: tuple[str, set[tuple[str, str]]], target: str) -> None:
    """Whatever a link wrote behind `next`, the page goes on with a path of its own."""
    url, _ = served
    form = {"token": TOKEN, "next": target, FORM_MARK: await mark_of(url)}
    async with asked("POST", f"{url}/login", {"Origin": url}, form) as answer:
        assert (answer.status, answer.headers["Location"]) == (303, "/")


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/..%2f..%2fetc/passwd",
            "/static/../../etc/passwd",
            "/static/x/..%2f..%2fserver.py",
            "/%00",
            "/alert/1%00",
        ),
        *("/static/x/%2e%2e/%2e%2e/server.py", "/alert/9223372036854775808", f"/alert/{10**18}", "/alert/-1"),
        *(
            "/slice/2147483648/1",
            "/slice/1/99999999999",
            "/incident/1e3",
            "/api/v1/../../etc",
            "/api/v1/%2e%2e/login",
        ),
    ],
)
async def test_no_path_leads_out_of_the_page(served: tuple[str, set[tuple[str, str]]], path: str) -> None:
    """What is no page, and no number of one, is not found; nothing of the server's files is told."""
    url, _ = served
    async with asked("GET", url + path, BEARER) as answer:
        text = await answer.text()
        assert answer.status in {400, 404}, text
    assert "root:" not in text
    assert "import" not in text


async def test_another_site_acts_for_nobody(served: tuple[str, set[tuple[str, str]]]) -> None:
    """Forms with a person's own cookie, sent from elsewhere or without the mark, change nothing and log nobody out."""
    url, _ = served
    form = {"token": TOKEN, "next": "/", FORM_MARK: await mark_of(url)}
    async with asked("POST", f"{url}/login", {"Origin": url}, form) as answer:
        cookie = answer.headers["Set-Cookie"].partition(";")[0]
    own = {"Cookie": cookie}
    action = {"action": "ack", "reason": "x"}
    for path in ("/alert/1", "/incident/1", "/logout"):
        mark = await mark_of(url, own)
        for headers in ({**own, "Origin": "https://evil.example"}, own, {**own, "Origin": "null"}):
            assert await status_of("POST", url + path, headers, {**action, FORM_MARK: mark}) == 403
        status = await status_of(
            "POST", url + path, {**own, "Origin": url}, {**action, FORM_MARK: form[FORM_MARK]}
        )
        assert status in {403, 409}, path  # a mark of before the login
    labels = b"key,candidate_right,reference_right\nr1,false,true\n"
    for kind in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
    ):  # what a form can send
        headers = {**own, "Origin": url, "Content-Type": kind}
        assert await status_of("POST", f"{url}/api/v1/labels?by=trace", headers, labels) == 415
    assert await status_of("GET", f"{url}/api/v1/slices", own) == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'key,label\n"' + b'""' * 1_000_000, 400),
        (b"key," + b"," * 2_000_000 + b"\n1\n", 400),
        (b"key,label\na,1\n" * 60_000, 400),
        (b"key,label\na," + b"9" * 400 + b"\n", 400),
        (b"key,label\n=cmd|'/c calc'!A1,1\n", 200),
    ],
    ids=["quotes", "columns", "headings", "number", "formula"],
)
async def test_a_csv_made_to_hurt_is_refused_at_once(
    served: tuple[str, set[tuple[str, str]]], body: bytes, status: int
) -> None:
    """Bombs of quotes and columns cost no memory that others need; a formula is a key like any other, and stays text."""
    url, _ = served
    headers = {**BEARER, "Content-Type": "text/csv"}
    async with asked("POST", f"{url}/api/v1/labels?by=trace", headers, body) as answer:
        assert answer.status in {status, 413}, await answer.text()
        assert answer.content_type in {"application/json", "application/problem+json"}


async def test_followers_without_end_leave_the_pages_to_others(
    served: tuple[str, set[tuple[str, str]]],
) -> None:
    """More event streams than allowed are refused, and a page is answered meanwhile."""
    url, _ = served
    async with AsyncExitStack() as stack:
        statuses = [
            (await stack.enter_async_context(asked("GET", f"{url}/events", BEARER))).status
            for _ in range(MOST_FOLLOWERS + 6)
        ]
        assert statuses == [200] * MOST_FOLLOWERS + [503] * 6
        assert await status_of("GET", f"{url}/", BEARER) == 200


async def test_sixteen_questions_that_take_for_ever_leave_the_port_to_others(
    served: tuple[str, set[tuple[str, str]]], postgres_dsn: str
) -> None:
    """While Postgres answers none of them, probes, the login and its style are answered; then each question is."""
    url, _ = served
    connection = await asyncpg.connect(postgres_dsn)
    waiting = "select count(*) from pg_locks where relation = 'alert'::regclass and not granted"
    try:
        async with asyncio.TaskGroup() as group:
            await connection.execute("begin; lock table alert in access exclusive mode")
            heavy = [group.create_task(status_of("GET", f"{url}/alerts", BEARER)) for _ in range(16)]
            async with asyncio.timeout(60):
                while not await connection.fetchval(waiting):
                    await asyncio.sleep(0.01)
            assert [await status_of("GET", f"{url}{path}") for path in ("/livez", "/login")] == [200, 200]
            await connection.execute("rollback")
    finally:
        await connection.close()
    assert {task.result() for task in heavy} <= {200, 503}


async def test_the_name_of_a_header_with_a_line_below_is_another_header(
    postgres_dsn: str,
) -> None:
    """A proxy that removes `X-Forwarded-Email` may leave `X_Forwarded_Email`: it names nobody; nor do an empty name and one of spaces."""
    dsn = await login_in(postgres_dsn, READER)
    web = Web(identity_header="X-Forwarded-Email", proxies=("127.0.0.1",))
    async with Database(dsn) as database:
        port = HttpPort(application(Config(web=web), Secrets(dsn=dsn), database), PortLimits())
        url = f"http://127.0.0.1:{await port.open(('127.0.0.1', 0))}/api/v1/slices"
        try:
            for headers in (
                {"X_Forwarded_Email": "ceo@bank"},
                {"X-Forwarded-Email": ""},
                {"X-Forwarded-Email": "   "},
            ):
                assert await status_of("GET", url, headers) == 401, headers
            assert await status_of("GET", url, {"X-Forwarded-Email": "ann@bank"}) == 200
        finally:
            await port.close()
