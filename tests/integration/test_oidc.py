"""Login with OpenID Connect at the page, with a real provider: who is let in, as whom, and what is refused."""

import base64
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Final
from urllib.parse import parse_qs, urlencode, urlsplit

import aiohttp
import msgspec
import pytest
from joserfc import jwt
from joserfc.jwk import OctKey, RSAKey

from quantdrift.core.clock import SystemClock
from quantdrift.core.config.callers import TokenScope
from quantdrift.core.config.load import Secrets
from quantdrift.core.config.schema import Config, Web
from quantdrift.core.config.web import Oidc
from quantdrift.core.errors import OperatorError
from quantdrift.show.page.oidc import BEGIN, END, LoginError, Provider
from quantdrift.show.page.server import page_port
from quantdrift.storage.database import Database
from quantdrift.storage.schema.roles import READER
from tests.support.oidc_provider import OidcProvider, oidc_provider
from tests.support.sidecar.relay_process import free_port
from tests.support.storage.logins import login_in

pytestmark = pytest.mark.integration

GROUPS: Final = {"oncall": (TokenScope.READ, TokenScope.ACKNOWLEDGE), "readers": (TokenScope.READ,)}
PEOPLE: Final[Mapping[str, Mapping[str, object]]] = {
    "ann": {"email": "ann@bank.example", "groups": ["staff", "oncall"]},
    "rob": {"email": "rob@bank.example", "groups": "readers"},
    "eve": {"email": "eve@bank.example", "groups": ["*", "staff"]},
    "mal": {"email": "ann@bank.example", "email_verified": False, "groups": ["oncall"]},
    "nix": {"groups": ["oncall"]},
}


@pytest.fixture(scope="module")
def provider() -> Iterator[OidcProvider]:
    """Return a provider that knows some people."""
    with oidc_provider() as running:
        for name, claims in PEOPLE.items():
            running.add_person(name, **claims)
        yield running


class Page:
    """A page that is a client of the provider."""

    def __init__(self, web: Web, secret: str) -> None:
        self.web, self.secret, self.url = web, secret, web.url


@asynccontextmanager
async def served(dsn: str, provider: OidcProvider, **options: object) -> AsyncIterator[Page]:
    """Serve the page inside the block."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    client, secret = provider.register(f"{url}{END}")
    oidc = Oidc(issuer=provider.issuer, client_id=client, groups=GROUPS)
    web = Web(url=url, oidc=oidc, **options)  # type: ignore[arg-type]
    async with Database(dsn) as database:
        served = page_port(Config(web=web), Secrets(dsn=dsn, oidc_secret=secret), database)
        await served.open(("127.0.0.1", port))
        try:
            yield Page(web, secret)
        finally:
            await served.close()


@pytest.fixture
async def page(postgres_dsn: str, provider: OidcProvider) -> AsyncIterator[Page]:
    """Return a page with this login alone."""
    async with served(await login_in(postgres_dsn, READER), provider) as running:
        yield running


def browser() -> aiohttp.ClientSession:
    """Return what keeps cookies as a browser does."""
    return aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True))


async def sent_back(session: aiohttp.ClientSession, url: str, person: str, target: str = "/") -> str:
    """Begin a login at the page and say at the provider who one is; return where the provider sends the browser."""
    query = urlencode({"next": target})
    async with session.get(f"{url}{BEGIN}?{query}", allow_redirects=False) as answer:
        assert answer.status == 303
        there = answer.headers["Location"]
    async with session.post(there, data={"sub": person}, allow_redirects=False) as answer:
        assert answer.status == 302, await answer.text()
        return answer.headers["Location"]


async def log_in(session: aiohttp.ClientSession, url: str, person: str, target: str = "/") -> tuple[int, str]:
    """Log in; return status and text of the page's answer."""
    async with session.get(await sent_back(session, url, person, target)) as answer:
        return answer.status, await answer.text()


async def status_of(session: aiohttp.ClientSession, method: str, url: str) -> int:
    """Return the status of an answer, with the Origin of the page."""
    origin = "://".join(urlsplit(url)[:2])
    async with session.request(method, url, headers={"Origin": origin}, allow_redirects=False) as answer:
        return answer.status


async def test_people_log_in_at_their_provider_and_may_do_what_their_groups_may(page: Page) -> None:
    """The page goes on where they were; a reader acknowledges nothing; nobody without a group is let in."""
    async with browser() as session:
        async with session.get(f"{page.url}/system") as answer:
            assert answer.url.path == "/login"
            assert f'href="{BEGIN}?next=/system"' in await answer.text()
        status, text = await log_in(session, page.url, "ann", "/system")
        assert (status, 'content="0; url=/system"' in text) == (200, True)
        async with session.get(f"{page.url}/system") as answer:
            assert (answer.url.path, "ann@bank.example" in await answer.text()) == ("/system", True)
        assert await status_of(session, "GET", f"{page.url}/api/v1/slices") == 200
        cookies = {cookie.key: cookie for cookie in session.cookie_jar}
        assert cookies.keys() == {"quantdrift_session", "session"} or cookies.keys() == {"quantdrift_session"}
        assert (cookies["quantdrift_session"]["samesite"], cookies["quantdrift_session"]["httponly"]) == (
            "Strict",
            True,
        )
    async with browser() as session:
        assert (await log_in(session, page.url, "rob"))[0] == 200
        assert await status_of(session, "GET", f"{page.url}/") == 200
        assert await status_of(session, "POST", f"{page.url}/alert/1") == 403
    for person, words in (
        ("eve", "in none of the groups"),
        ("mal", "has not verified this address"),
        ("nix", "has no name in the claim email"),
    ):
        async with browser() as session:
            status, text = await log_in(session, page.url, person)
            assert (status, words in text) == (403, True), text
            assert await status_of(session, "GET", f"{page.url}/api/v1/slices") == 401


async def test_an_answer_of_the_provider_is_for_the_browser_that_asked(page: Page) -> None:
    """Neither another state, nor another browser, nor a stolen code in a login of one's own opens the page; no code counts twice."""
    async with browser() as victim, browser() as attacker:
        stolen = await sent_back(victim, page.url, "ann")
        own = await sent_back(attacker, page.url, "rob")
        code = {
            name: parse_qs(urlsplit(url).query)["code"][0] for name, url in (("ann", stolen), ("rob", own))
        }
        for address in (
            stolen,  # in the browser of somebody else: the login of another person forced on them, too
            own.replace(code["rob"], code["ann"]),  # PKCE: the code was asked for with another verifier
            own.replace("state=", "state=x"),
            f"{page.url}{END}?code={code['ann']}",
        ):
            assert await status_of(attacker, "GET", address) == 403, address
            assert await status_of(attacker, "GET", f"{page.url}/api/v1/slices") == 401
        again = await sent_back(victim, page.url, "ann")
        assert await status_of(victim, "GET", again) == 200
        assert await status_of(victim, "GET", again) == 403
        assert await status_of(victim, "GET", f"{page.url}/api/v1/slices") == 200
        denied = f"{page.url}{END}?error=access_denied&error_description=<b>no</b>"
        assert await status_of(attacker, "GET", denied) == 403


async def id_token(provider: OidcProvider, client: tuple[str, str], return_to: str, person: str) -> str:
    """Return the ID token that a client gets for a person, as a proxy does."""
    web = Web(
        url=return_to.removesuffix(END), oidc=Oidc(issuer=provider.issuer, client_id=client[0], groups=GROUPS)
    )
    address, begun = await Provider(web, client[1], SystemClock()).begin("/")
    async with (
        browser() as session,
        session.post(address, data={"sub": person}, allow_redirects=False) as answer,
    ):
        code = parse_qs(urlsplit(answer.headers["Location"]).query)["code"][0]
    form = {
        "grant_type": "authorization_code",
        "code": code,
        "redirect_uri": return_to,
        "code_verifier": begun.verifier,
    }
    login = base64.b64encode(":".join(client).encode()).decode()
    headers = {"Authorization": f"Basic {login}"}
    async with (
        browser() as session,
        session.post(f"{provider.issuer}/oauth2/token", data=form, headers=headers) as answer,
    ):
        token: str = (await answer.json())["id_token"]
    return token


async def test_a_proxy_says_who_a_person_is_with_the_providers_signature(
    postgres_dsn: str, provider: OidcProvider
) -> None:
    """A name is not enough, nor a token that somebody else signed, or that is for another client, or changed."""
    dsn = await login_in(postgres_dsn, READER)
    header, proxies = "X-Forwarded-Id-Token", ("127.0.0.0/8",)
    async with served(dsn, provider, identity_header=header, proxies=proxies) as page:
        oidc = page.web.oidc
        token = await id_token(provider, (oidc.client_id, page.secret), f"{page.url}{END}", "ann")
        other = await id_token(
            provider,
            provider.register("https://other.example/login/oidc/end"),
            "https://other.example/login/oidc/end",
            "ann",
        )
        claims = json.loads(base64.urlsafe_b64decode(token.split(".")[1] + "=="))
        rsa = RSAKey.generate_key(2048, {"kid": "mine"})
        unsigned = base64.urlsafe_b64encode(b'{"alg":"none"}').rstrip(b"=").decode()
        changed = base64.urlsafe_b64encode(json.dumps({**claims, "groups": ["oncall"]}).encode())
        forged = {
            "a name": "ann@bank.example",
            "another client's": other,
            "another key's": jwt.encode({"alg": "RS256", "kid": "mine"}, claims, rsa),
            "the secret's": jwt.encode({"alg": "HS256"}, claims, OctKey.import_key(page.secret)),
            "unsigned": f"{unsigned}.{token.split('.')[1]}.",
            "changed": ".".join((token.split(".")[0], changed.rstrip(b"=").decode(), token.split(".")[2])),
        }
        async with aiohttp.ClientSession() as session:

            async def ask(value: str) -> int:
                async with session.get(f"{page.url}/api/v1/slices", headers={header: value}) as answer:
                    return answer.status

            assert await ask(token) == 200
            assert await ask(f"Bearer {token}") == 200
            for what, value in forged.items():
                assert await ask(value) == 401, what


async def test_an_id_token_is_for_this_page_at_this_time(provider: OidcProvider) -> None:
    """An old one, another issuer's and one with another nonce are refused; a provider that is somebody else is named."""
    client = provider.register("https://drift.example.com/login/oidc/end")
    token = await id_token(provider, client, "https://drift.example.com/login/oidc/end", "ann")
    oidc = Oidc(issuer=provider.issuer, client_id=client[0], groups={"*": (TokenScope.READ,)})
    web = Web(url="https://drift.example.com", oidc=oidc)

    class Later(SystemClock):
        def now(self) -> datetime:
            return super().now() + timedelta(hours=2)

    now = Provider(web, "", SystemClock())
    signed = await now.signed_in(token)
    assert (signed.name, signed.scopes) == ("ann@bank.example", frozenset({TokenScope.READ}))
    with pytest.raises(LoginError, match="belongs to another login"):
        await now.signed_in(token, "another nonce")
    with pytest.raises(LoginError, match="ExpiredTokenError"):
        await Provider(web, "", Later()).signed_in(token)
    renamed = msgspec.structs.replace(
        web, oidc=msgspec.structs.replace(oidc, issuer=provider.issuer.replace("localhost", "127.0.0.1"))
    )
    with pytest.raises((OperatorError, LoginError)):
        await Provider(renamed, "", SystemClock()).signed_in(token)
