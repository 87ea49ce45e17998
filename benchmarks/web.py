"""First paint of the overview with 1,000 slices and 90 days, beside a bare aiohttp page with the same bytes.

    python -m benchmarks.web [--quick]

Real Chromium, a real Postgres filled with COPY, and the server with the guard that people meet. The medians are of several
loads of a fresh page each; the first load, in which Postgres reads its tables, is printed beside them.
"""

import argparse
import asyncio
import shutil
import statistics
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import asyncpg
from aiohttp import web
from playwright.async_api import Browser, async_playwright

from benchmarks.result import Goal, finish
from quantdrift.core.config.load import Secrets
from quantdrift.core.config.schema import Config
from quantdrift.core.process.http_port import HttpPort
from quantdrift.show.page.server import page_port
from quantdrift.storage.admin.migrate import upgrade
from quantdrift.storage.database import Database
from quantdrift.storage.server.postgres import PostgresServer
from tests.support.storage.page_rows import write_history

_PAINT = """() => new Promise((done) => new PerformanceObserver((list) => {
  const found = list.getEntriesByName("first-contentful-paint")[0];
  if (found) done(found.startTime);
}).observe({ type: "paint", buffered: true }))"""


async def _loads(browser: Browser, url: str, n: int) -> list[float]:
    """Return the seconds from the start of the navigation to the first paint, of `n` fresh pages."""
    found = []
    for _ in range(n):
        context = await browser.new_context(viewport={"width": 1280, "height": 900})
        page = await context.new_page()
        await page.goto(url)
        found.append(float(await page.evaluate(_PAINT)) / 1000)
        await context.close()
    return found


async def _measure(dsn: str, n_loads: int, n_slices: int) -> dict[str, float]:
    await upgrade(dsn, progress=lambda _: None)
    db = await asyncpg.connect(dsn)
    try:
        await write_history(db, n_slices=n_slices, n_days=90, end=datetime.now(UTC))
        await db.execute("analyze")
    finally:
        await db.close()
    body = b""

    async def bare(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type="text/html")

    plain = web.Application()
    plain.add_routes([web.get("/", bare)])
    async with Database(dsn) as database, async_playwright() as playwright:
        port = page_port(Config(), Secrets(dsn=dsn), database)
        other = HttpPort(plain)
        url = f"http://127.0.0.1:{await port.open(('127.0.0.1', 0))}/"
        bare_url = f"http://127.0.0.1:{await other.open(('127.0.0.1', 0))}/"
        browser = await playwright.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
        )
        try:
            first = (await _loads(browser, url, 1))[0]
            ours = await _loads(browser, url, n_loads)
            context = await browser.new_context()
            body = await (await context.request.get(url)).body()
            theirs = await _loads(browser, bare_url, n_loads)
        finally:
            await browser.close()
            await port.close()
            await other.close()
    overview_s, bare_s = statistics.median(ours), statistics.median(theirs)
    return {
        "overview_s": overview_s,
        "worst_s": max(ours),
        "first_s": first,
        "bare_s": bare_s,
        "overview_ratio": overview_s / bare_s,
        "page_bytes": float(len(body)),
        "n_slices": float(n_slices),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="three loads instead of fifteen")
    quick = parser.parse_args().quick
    with TemporaryDirectory() as parent, PostgresServer(Path(parent) / "postgres") as server:
        figures = asyncio.run(_measure(server.dsn, 3 if quick else 15, 1000))
    for name, value in figures.items():
        print(f"{name:16} {value:,.3f}")
    goal = Goal(name="overview_s", value=figures["overview_s"], bound=1.0, unit="s", at_most=True)
    finish("web", dict(figures), [goal])


if __name__ == "__main__":
    main()
