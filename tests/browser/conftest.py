"""One headless Chromium for all browser tests of a process: to start it takes longer than most of what they look at."""

import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from playwright.async_api import Browser, async_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_START_S = 60.0
_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-quic",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of Chromium's debugging port."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    profile = tmp_path_factory.mktemp("chromium")
    port = profile / "DevToolsActivePort"
    with (profile / "log").open("wb") as log:
        process = subprocess.Popen(
            [CHROMIUM, *_OPTIONS, f"--user-data-dir={profile}"], stdout=log, stderr=log
        )
    try:
        until_s = time.monotonic() + _START_S
        while not _is_written(port):
            assert process.poll() is None, (profile / "log").read_text(errors="replace")
            assert time.monotonic() < until_s, "Chromium does not listen"
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port.read_text().split()[0]}"
    finally:
        process.terminate()
        process.wait()


def _is_written(port: Path) -> bool:
    return port.exists() and len(port.read_text().split()) == 2


@pytest.fixture
async def browser(chromium: str) -> AsyncIterator[Browser]:
    """Return that Chromium, with nothing in it that another test has opened."""
    async with async_playwright() as playwright:
        connected = await playwright.chromium.connect_over_cdp(chromium)
        yield connected
        await connected.close()
