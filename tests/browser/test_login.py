"""Login at the live page in Chromium, by a provider in which people have passwords and agree: it shares no code with the one of `test_oidc`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import pytest
from playwright.async_api import Browser, Page

from quantdrift.core.config.callers import TokenScope
from quantdrift.core.config.load import Secrets
from quantdrift.core.config.schema import Config, Web
from quantdrift.core.config.web import Oidc
from quantdrift.show.page.oidc import END
from quantdrift.show.page.server import page_port
from quantdrift.storage.database import Database
from quantdrift.storage.schema.roles import READER
from tests.support.django_provider import PASSWORD, Registered, django_provider
from tests.support.sidecar.relay_process import free_port
from tests.support.storage.logins import login_in

pytest.importorskip("oauth2_provider", reason="needs django-oauth-toolkit: make setup")
pytestmark = pytest.mark.browser

GROUPS: Final[dict[str, tuple[TokenScope, ...]]] = {"oncall": (TokenScope.READ, TokenScope.ACKNOWLEDGE)}
PEOPLE: Final = {"ann": ["staff", "oncall"], "eve": ["staff"]}


@asynccontextmanager
async def _served(dsn: str, url: str, registered: Registered) -> AsyncIterator[None]:
    oidc = Oidc(
        issuer=registered.issuer, client_id=registered.client_id, scopes=("openid", "email"), groups=GROUPS
    )
    async with Database(dsn) as database:
        secrets = Secrets(dsn=dsn, oidc_secret=registered.secret)
        port = page_port(Config(web=Web(url=url, oidc=oidc)), secrets, database)
        await port.open(("127.0.0.1", int(url.rpartition(":")[2])))
        try:
            yield
        finally:
            await port.close()


async def _log_in(page: Page, url: str, name: str, password: str = PASSWORD) -> None:
    """Begin at the page, and fill in the form of the provider."""
    await page.goto(f"{url}/system")
    await page.get_by_role("link", name="Log in").click()
    await page.get_by_label("Username").fill(name)
    await page.get_by_label("Password").fill(password)
    await page.get_by_role("button", name="Log in here").click()


async def test_people_log_in_with_a_browser_at_a_provider_with_passwords(
    browser: Browser, postgres_dsn: str
) -> None:
    """Who agrees comes back to where they were, under their name; a wrong password, a refusal, and no group let nobody in."""
    url = f"http://127.0.0.1:{free_port()}"
    dsn = await login_in(postgres_dsn, READER)
    with django_provider(f"{url}{END}", PEOPLE) as registered:
        async with _served(dsn, url, registered):
            context = await browser.new_context()
            page = await context.new_page()
            await _log_in(page, url, "ann", "wrong")
            await page.get_by_text("Please enter a correct username and password").wait_for()
            await page.get_by_label("Password").fill(PASSWORD)
            await page.get_by_role("button", name="Log in here").click()
            await page.get_by_role("button", name="Cancel").click()
            await page.get_by_text("the provider says access_denied").wait_for()
            assert await context.cookies(url) == []
            await page.goto(f"{url}/system")
            await page.get_by_role("link", name="Log in").click()
            await page.get_by_role("button", name="Authorize").click()
            await page.wait_for_url(f"{url}/system")
            await page.get_by_text("ann@bank.example").first.wait_for()
            cookie = next(each for each in await context.cookies(url) if each["value"])
            assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
            await page.get_by_role("button", name="Log out").click()
            await page.get_by_role("link", name="Log in").wait_for()
            await context.add_cookies([{"name": cookie["name"], "value": cookie["value"], "url": url}])
            await page.goto(f"{url}/system")
            assert page.url.startswith(f"{url}/login")
            await context.close()

            context = await browser.new_context()
            page = await context.new_page()
            await _log_in(page, url, "eve")
            await page.get_by_role("button", name="Authorize").click()
            await page.get_by_text("in none of the groups").wait_for()
            await page.goto(f"{url}/system")
            assert page.url.startswith(f"{url}/login")
            await context.close()
