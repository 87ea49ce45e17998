"""The site of the pages, as `make docs-site` builds it, in a real browser."""

import contextlib
import functools
import http.server
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.async_api import async_playwright

from docs.site import build, list_versions

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.release,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]


@contextlib.contextmanager
def _served(folder: Path) -> Iterator[str]:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


async def test_it_is_built_strictly_and_its_search_finds_tabular_models(tmp_path: Path) -> None:
    """No link, heading or page is missing, nothing is loaded from elsewhere, the menu has the four doors, and each version leads to the others."""
    build(tmp_path / "site", "1.2.0")
    shutil.copytree(tmp_path / "site" / "1.2.0", tmp_path / "site" / "1.10.0")
    shutil.copytree(tmp_path / "site" / "1.2.0", tmp_path / "site" / "2.0.0rc1")
    list_versions(tmp_path / "site")
    requested: list[str] = []
    with _served(tmp_path / "site") as address:
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            page = await browser.new_page(viewport={"width": 1280, "height": 900})
            page.on("request", lambda request: requested.append(request.url))
            await page.goto(f"{address}/index.html")
            await page.wait_for_url(f"{address}/1.10.0/index.html")  # the newest release
            await page.wait_for_selector(".md-version__item", state="attached")
            versions = await page.locator(".md-version__item").all_inner_texts()
            menu = await page.locator(".md-tabs__link").all_inner_texts()
            await page.fill("input.md-search__input", "LightGBM")
            await page.wait_for_selector(".md-search-result__item")
            found = await page.locator(".md-search-result__item h1").all_inner_texts()
            await browser.close()
    assert [name.strip() for name in versions] == ["2.0.0rc1", "1.10.0", "1.2.0"]
    assert menu[1:5] == ["Platform", "On call", "Data science", "Model owner"]
    assert any(title.startswith("Tables and trees") for title in found), found
    assert [url for url in requested if not url.startswith((address, "data:", "blob:"))] == []
