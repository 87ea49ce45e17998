"""`examples/tabular` with the whole product: from the first request to the page, and from the page to its cause."""

import asyncio
import contextlib
import json
from pathlib import Path

import asyncpg
import pytest

from examples.tabular.make import ROUNDED, make
from examples.tabular.traffic import send
from quantdrift.demo.services import Ports, child
from tests.support.commands import started

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.release,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
BAD = "income>=90000"


async def test_the_rich_page_and_their_column_is_the_note_of_the_alert(tmp_path: Path) -> None:
    """Nothing else pages; the diagnosis by the number of the alert names the column."""
    make(tmp_path)
    ports = Ports.free()
    variables = ports.overrides("")
    server = [
        *("quantdrift.demo.oip_server", "--model", f"credit={tmp_path / ROUNDED}"),
        *("--version", "rounded-1", "--listen", f"127.0.0.1:{ports.model}"),
    ]
    up = ["quantdrift", "up", "--config", str(tmp_path / "config.toml"), "--data", str(tmp_path / "data")]
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(child("the server", server, tmp_path / "server.log"))
        log = tmp_path / "up.log"
        await stack.enter_async_context(child("quantdrift", up, log, variables))
        while "quantdrift is up" not in log.read_text(encoding="utf-8", errors="replace"):
            await asyncio.sleep(0.2)
        url = f"http://127.0.0.1:{ports.sidecar}/v2/models/credit/infer"
        traffic = asyncio.create_task(send(url, 60.0, 0.0, 7))
        firing = await _firing((tmp_path / "data" / "dsn").read_text().strip())
        traffic.cancel()
        assert firing == {BAD}
        options = ("--candidate", ROUNDED, "--inputs", "recorded.npz", "--data", "data")
        done = await asyncio.to_thread(started, "diagnose", "1", *options, directory=tmp_path, **variables)
        assert done.returncode == 0, done.stderr
        assert "T:income" in done.stdout
        shown = await asyncio.to_thread(
            started, "alerts", "show", "1", "--data", "data", "--json", directory=tmp_path, **variables
        )
        assert "Cause: thresholds at T:income" in json.dumps(json.loads(shown.stdout))


async def _firing(dsn: str) -> set[str]:
    """Wait for a page, and return the slices that fire."""
    connection = await asyncpg.connect(dsn)
    try:
        while not (rows := await connection.fetch("select slice from slice_now where verdict = 'firing'")):
            await asyncio.sleep(0.2)
        return {row["slice"] for row in rows}
    finally:
        await connection.close()
