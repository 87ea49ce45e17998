"""The report in a real browser: Chromium from the system, driven by Playwright. Skipped where there is none."""

import asyncio
import re
import shutil
from pathlib import Path
from typing import Final, Literal

import pytest
from playwright.async_api import Browser, ConsoleMessage, Page, Request

from quantdrift.core.clock import ManualClock
from quantdrift.core.config.load import Secrets
from quantdrift.core.config.schema import Config, Model
from quantdrift.core.errors import OperatorError
from quantdrift.show.report.page import Period, write
from quantdrift.show.report.pdf import browser as chromium
from quantdrift.show.report.pdf import write_pdf
from tests.support.storage.report_rows import MINUTE, START, write_explained, write_short_story

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]

# The least contrast (WCAG 2) of any visible text on the page with the nearest background behind it.
_CONTRAST: Final = """() => {
  const parse = (text) => text.match(/[0-9.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b]
    .map((c) => c / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  let least = 21;
  for (const element of document.querySelectorAll("body *:not(svg):not(svg *)")) {
    if (![...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim())) continue;
    const [a, b] = [light(parse(getComputedStyle(element).color)), light(behind(element))];
    least = Math.min(least, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
  }
  return least;
}"""


@pytest.fixture
async def report(postgres_dsn: str, tmp_path: Path) -> Path:
    """Return a report on a slice that fired, and explains a ticket on all traffic."""
    await write_explained(postgres_dsn, await write_short_story(postgres_dsn))
    now = START + 90 * MINUTE
    out = tmp_path / "report.html"
    await write(
        Config(models=(Model(name="digits"),)),
        Secrets(dsn=postgres_dsn),
        Period.of(kind="week", end=now),
        out=out,
        progress=lambda _: None,
        clock=ManualClock(now),
    )
    return out


class Heard:
    """What a page asked for and complained of."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.complaints: list[str] = []

    def request(self, request: Request) -> None:
        """Note a request."""
        self.requests.append(request.url)

    def console(self, message: ConsoleMessage) -> None:
        """Note a message of the console."""
        self.complaints.append(f"{message.type}: {message.text}")

    def error(self, error: Exception) -> None:
        """Note an error that nobody caught."""
        self.complaints.append(str(error))


async def _open(
    browser: Browser, report: Path, *, width: int, scheme: Literal["light", "dark"]
) -> tuple[Page, Heard]:
    page = await browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    heard = Heard()
    page.on("request", heard.request)
    page.on("console", heard.console)
    page.on("pageerror", heard.error)
    await page.goto(report.as_uri())
    return page, heard


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (400, "dark")])
async def test_the_page_stands_alone_on_every_screen(
    browser: Browser, report: Path, width: int, scheme: Literal["light", "dark"]
) -> None:
    """On a desk and on a phone: nothing is fetched, nothing fails, nothing scrolls sideways.

    The culprit leads, and text keeps the contrast that WCAG 2 asks for, badges included.
    """
    page, heard = await _open(browser, report, width=width, scheme=scheme)
    assert heard.requests == [report.as_uri()]
    assert heard.complaints == []
    assert await page.evaluate("document.documentElement.scrollWidth") <= width
    assert await page.evaluate(_CONTRAST) >= 4.5
    dark = await page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 19, 24)"
    assert dark == (scheme == "dark")
    answer = page.locator(".model .answer").first
    assert "in scanner=faint more answers" in await answer.inner_text()
    assert " nat" not in await page.locator(".model").first.inner_text()
    box = await answer.bounding_box()
    assert box is not None
    assert box["y"] + box["height"] <= 900
    assert await page.evaluate("document.documentElement.scrollHeight") <= (
        6 * 800 if width > 1000 else 9 * 800
    )
    await page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    assert await page.evaluate("document.documentElement.scrollWidth") <= width
    assert await page.evaluate(_CONTRAST) >= 4.5
    for svg in await page.locator("svg.plot").all():
        size = await svg.bounding_box()
        assert size is not None
        assert 200 <= size["width"] <= width
        assert size["height"] >= 100


@pytest.mark.parametrize("width", [1200, pytest.param(400, marks=pytest.mark.release)])
async def test_an_alert_is_listed_under_the_one_that_explains_it(
    browser: Browser, report: Path, width: int
) -> None:
    """Each says why; the ticket stands below the page that explains it, moved in, and says by whom."""
    page, heard = await _open(browser, report, width=width, scheme="light")
    alerts = page.locator("article.episode")
    assert await alerts.count() == 2
    first, second = alerts.nth(0), alerts.nth(1)
    assert "numeric damage" in await first.inner_text()
    assert "Why: explained by scanner=faint" in await second.inner_text()
    step = "Look at the alert of scanner=faint: without its answers this one would not exist"
    assert step in await second.inner_text()
    one, two = await first.bounding_box(), await second.bounding_box()
    assert one is not None
    assert two is not None
    assert two["y"] >= one["y"] + one["height"]
    assert two["x"] > one["x"]
    assert two["x"] + two["width"] <= width
    assert heard.complaints == []


async def test_it_prints(browser: Browser, report: Path) -> None:
    """On paper, as wide as A4 within its margins, nothing is cut off at the side, and what is folded on a screen is open."""
    page, heard = await _open(browser, report, width=688, scheme="light")
    folded = page.locator("#method li").first
    assert not await folded.is_visible()
    await page.emulate_media(media="print")
    assert await folded.is_visible()
    assert await page.evaluate("document.documentElement.scrollWidth") <= 688
    assert (await page.pdf()).startswith(b"%PDF")
    assert heard.complaints == []


async def test_chromium_writes_the_pdf(report: Path) -> None:
    """It lies beside the page, and has what is folded there: it is longer than a page that has none of that."""
    pdf = await asyncio.to_thread(write_pdf, report, chromium())
    assert pdf == report.with_suffix(".pdf")
    content = pdf.read_bytes()
    assert content.startswith(b"%PDF")
    assert max(int(n) for n in re.findall(rb"/Count (\d+)", content)) >= 4


def test_without_chromium_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before anything is read from the database."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OperatorError, match="apt-get install chromium"):
        chromium()
