"""Who may read the live page, and under which names."""

import hashlib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from multidict import CIMultiDict

from quantdrift.core.clock import ManualClock
from quantdrift.core.config.load import Role, load, load_secrets
from quantdrift.core.config.schema import Web
from quantdrift.core.errors import OperatorError
from quantdrift.show.charts import strip
from quantdrift.show.page.access import MOST_FAILURES, SESSION_S, WINDOW_S, Access, Person

pytestmark = pytest.mark.unit
NOW = datetime(2026, 11, 23, tzinfo=UTC)
TOKEN = "a-token-of-thirty-two-characters"


_OIDC = (
    'url = "https://drift.example.com"\n'
    'oidc = { issuer = "https://login.example.com", client_id = "page", groups = { oncall = ["read"] } }'
)


def _access(token: str = "", **options: object) -> tuple[Access, ManualClock]:
    clock = ManualClock(NOW)
    return Access(Web(**options), token, clock), clock  # type: ignore[arg-type]


async def test_without_a_login_everybody_on_this_machine_reads_it() -> None:
    """It listens on loopback by default, and nobody has a name."""
    access, _ = _access()
    assert await access.identify("127.0.0.1", CIMultiDict(), "") == Person()


def test_a_page_that_others_reach_without_a_login_is_refused(tmp_path: Path) -> None:
    """The error names the option and both ways out; with a token it starts."""
    file = tmp_path / "config.toml"
    file.write_text(
        '[sidecar]\nlisten = ""\n[intake]\nlisten = "127.0.0.1:1"\n[web]\nlisten = "0.0.0.0:9468"\n'
    )
    config = load(file, {})
    environment = {"QUANTDRIFT_DSN": "postgresql://x"}
    with pytest.raises(
        OperatorError, match=r"web.listen is `0.0.0.0:9468`.*web.token_file.*web.identity_header"
    ):
        load_secrets(config, Role.WEB, environment)
    assert load_secrets(config, Role.WEB, environment | {"QUANTDRIFT_WEB_TOKEN": TOKEN}).web_token == TOKEN


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ('identity_header = "X-Forwarded-Email"', "web.identity_header is set and web.proxies is not"),
        ('proxies = ["10.0.0.1"]', "web.proxies is set and web.identity_header is not"),
        ('identity_header = "X-A"\nproxies = ["nobody"]', "web.proxies names `nobody`"),
        ('url = "drift.example.com"', "web.url is not the address of a page"),
        ('listen = "9468"', "web.listen is `9468`"),
        (
            'identity_header = "X-A"\nproxies = ["10.0.0.0/8"]',
            "whoever gets an address of web.proxies could be anybody: set web.oidc",
        ),
        ('oidc = { client_id = "page" }', "web.oidc.client_id is set and web.oidc.issuer is not"),
        (
            f"{_OIDC.replace('https://login', 'http://login')}",
            "web.oidc.issuer is not the address of a provider",
        ),
        (_OIDC.replace('client_id = "page", ', ""), "web.oidc.client_id is missing"),
        (_OIDC.partition("\n")[2], "web.oidc needs web.url"),
        (_OIDC.replace("https://drift", "http://drift"), "web.oidc needs a web.url with https://"),
        (_OIDC.replace('["read"]', "[]"), "web.oidc.groups lets nobody in"),
        (_OIDC.replace('"read"', '"rule"'), "web.oidc.groups"),
    ],
)
def test_contradictions_of_the_section_are_named(tmp_path: Path, options: str, text: str) -> None:
    """Each error names the option that must change."""
    file = tmp_path / "config.toml"
    file.write_text(f'[sidecar]\nlisten = ""\n[intake]\nlisten = "127.0.0.1:1"\n[web]\n{options}\n')
    with pytest.raises(OperatorError) as caught:
        load(file, {})
    assert text in str(caught.value)


async def test_only_the_proxy_can_say_who_a_person_is() -> None:
    """The same header from anywhere else is ignored; its control characters never reach a page."""
    access, _ = _access(identity_header="X-Forwarded-Email", proxies=("10.0.0.0/24",))
    headers = CIMultiDict({"X-Forwarded-Email": "ann@example.com\u202e"})
    assert await access.identify("10.0.0.7", headers, "") == Person(name="ann@example.com\ufffd")
    assert await access.identify("::ffff:10.0.0.7", headers, "") is not None
    assert await access.identify("10.0.1.7", headers, "") is None
    assert await access.identify("10.0.0.7", CIMultiDict(), "") is None


async def test_a_session_ends_in_time_and_cannot_be_made_up() -> None:
    """Neither a changed mark nor the cookie of another process opens the page."""
    access, clock = _access("secret")
    cookie = access.log_in("secret", "10.0.0.1")
    assert cookie is not None
    assert await access.identify("10.0.0.1", CIMultiDict(), cookie) == Person(name="token")
    assert await access.identify("10.0.0.1", CIMultiDict(), cookie[:-1]) is None
    assert await access.identify("10.0.0.1", CIMultiDict(), "") is None
    assert await _access("secret")[0].identify("10.0.0.1", CIMultiDict(), cookie) is None
    clock.advance(SESSION_S + 1)
    assert await access.identify("10.0.0.1", CIMultiDict(), cookie) is None


async def test_a_person_whose_line_is_removed_is_logged_out(tmp_path: Path) -> None:
    """The file is read again with each request."""
    file = tmp_path / "token"
    line = f"{{}} sha256:{hashlib.sha256(b'one').hexdigest()}"
    file.write_text(line.format("ann"))
    access, _ = _access(line.format("ann"), token_file=str(file))
    cookie = access.log_in("one", "10.0.0.1") or ""
    assert await access.identify("10.0.0.1", CIMultiDict(), cookie) == Person(name="ann")
    assert await access.identify("10.0.0.1", CIMultiDict({"Authorization": "Bearer one"}), "") == Person(
        name="ann"
    )
    file.write_text(line.format("bob"))
    assert await access.identify("10.0.0.1", CIMultiDict(), cookie) is None


async def test_two_identity_headers_name_nobody() -> None:
    """The first is the client's where the proxy appends its own."""
    access, _ = _access(identity_header="X-Forwarded-Email", proxies=("10.0.0.0/24",))
    headers = CIMultiDict([("X-Forwarded-Email", "ceo@bank"), ("x-forwarded-email", "mallory@bank")])
    assert await access.identify("10.0.0.7", headers, "") is None


async def test_a_session_ends_when_its_person_logs_out() -> None:
    """Whoever has a copy of the cookie is out as well; another session of the same person goes on."""
    access, _ = _access("secret")
    stolen, other = (access.log_in("secret", "10.0.0.1") or "" for _ in range(2))
    access.log_out(stolen)
    assert await access.identify("10.0.0.9", CIMultiDict(), stolen) is None
    assert await access.identify("10.0.0.1", CIMultiDict(), other) == Person(name="token")


async def test_a_session_ends_when_its_token_is_replaced(tmp_path: Path) -> None:
    """The person's line is still there, with another token: what was made with the stolen one ends at once."""
    file = tmp_path / "token"
    line = f"ann sha256:{hashlib.sha256(b'stolen').hexdigest()}"
    file.write_text(line)
    access, _ = _access(line, token_file=str(file))
    cookie = access.log_in("stolen", "10.0.0.1") or ""
    assert await access.identify("10.0.0.1", CIMultiDict(), cookie) == Person(name="ann")
    file.write_text(f"ann sha256:{hashlib.sha256(b'new').hexdigest()}")
    assert await access.identify("10.0.0.1", CIMultiDict(), cookie) is None


def test_the_cookie_belongs_to_one_host_over_https() -> None:
    """The browser refuses one of that name from another host, without TLS, or for a part of the page."""
    assert _access("secret", url="https://drift.example.com")[0].cookie.startswith("__Host-")
    assert not _access("secret")[0].cookie.startswith("__Host-")


async def test_wrong_tokens_lock_nobody_out_and_the_table_is_bounded() -> None:
    """Behind a proxy everybody has one address: the right token is never refused, whoever sent wrong ones before."""
    access, clock = _access("secret")
    for number in range(2000):
        access.log_in("wrong", f"10.1.{number // 256}.{number % 256}")
    for _ in range(MOST_FAILURES):
        assert access.log_in("wrong", "2001:db8::1") is None
    assert access.is_limited("2001:db8::2")
    assert access.log_in("secret", "2001:db8::2") is not None
    bearer = CIMultiDict({"Authorization": "Bearer secret"})
    assert await access.identify("2001:db8::1", bearer, "") == Person(name="token")
    assert not access.is_limited("10.0.0.2")
    assert len(access._failures) <= 1024
    clock.advance(WINDOW_S + 1)
    assert not access.is_limited("2001:db8::2")


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("127.0.0.1:9468", True),
        ("localhost:1", True),
        ("[::1]:9468", True),
        ("10.0.0.7", True),
        ("drift.example.com", True),
        ("evil.example.com:9468", False),
        ("", False),
    ],
)
def test_names_that_somebody_else_pointed_here_are_refused(host: str, *, allowed: bool) -> None:
    """IP addresses, localhost and the host of web.url are names of the page."""
    assert _access(url="https://drift.example.com")[0].allows_host(host) is allowed


def test_forms_of_other_sites_and_other_people_are_refused() -> None:
    """Host and port must be the same, and the mark is of one person."""
    access, _ = _access("secret")
    assert access.allows_origin("http://localhost:1", "localhost:1")
    assert not access.allows_origin("null", "localhost:1")
    assert not access.allows_origin("http://localhost:2", "localhost:1")
    assert access.is_form_of(Person(name="ann"), access.form_mark(Person(name="ann")))
    assert not access.is_form_of(Person(name="bob"), access.form_mark(Person(name="ann")))


def test_a_strip_shows_the_worst_verdict_of_each_day() -> None:
    """Nothing before anything was known, then one path for each verdict: the last day is the worst."""
    begin = NOW - timedelta(days=10)
    changes = [(NOW - timedelta(days=5), "unknown", "ok"), (NOW - timedelta(hours=1), "ok", "firing")]
    drawn = strip(changes, "firing", NOW - timedelta(days=8), (begin, NOW), n=10)
    assert 'class="unknown" d="M2 6h3v6h-3z"' in drawn
    assert 'class="ok" d="M5 8h4v4h-4z"' in drawn
    assert 'class="firing" d="M9 0h1v12h-1z"' in drawn
