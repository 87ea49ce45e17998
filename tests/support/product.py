"""The product as a user runs it: a quantised model behind the sidecar, `quantdrift up`, real traffic."""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import asyncpg
import psutil
from prometheus_client.parser import text_string_to_metric_families

from quantdrift.demo.otlp_receiver import OtlpReceiver
from quantdrift.demo.scans import Scans
from quantdrift.demo.services import Services, services
from quantdrift.demo.traffic import DemoTraffic

ROOT = Path(__file__).resolve().parents[2]


class Product:
    """Everything that runs, and ways to look at it.

    Parameters
    ----------
    running
        Addresses and files.
    receiver
        The collector that alerts are sent to.
    """

    def __init__(self, running: Services, receiver: OtlpReceiver) -> None:
        self.running = running
        self.receiver = receiver

    async def query(self, sql: str) -> list[asyncpg.Record]:
        """Return the rows of one statement, on a connection of its own."""
        connection = await asyncpg.connect(self.running.dsn)
        try:
            rows: list[asyncpg.Record] = await connection.fetch(sql)
            return rows
        finally:
            await connection.close()

    async def counted(self, name: str) -> float:
        """Return the sum over all attribute sets of a counter on the sidecar's /metrics."""
        url = f"http://127.0.0.1:{self.running.ports.sidecar_admin}/metrics"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            text = await answer.text()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        )

    def process(self, *words: str) -> psutil.Process | None:
        """Return the process of this product whose command line has all `words`, the oldest first, or None.

        It is this product's where its command line, or that of one it descends from, names its files.
        """
        data, config = str(self.running.data), str(self.running.config)
        found = []
        for process in psutil.process_iter(["cmdline", "create_time", "status"]):
            line = process.info["cmdline"] or []
            if process.info["status"] == psutil.STATUS_ZOMBIE:
                continue
            if not all(any(word in part for part in line) for word in words):
                continue
            with contextlib.suppress(psutil.Error):  # it may end while it is looked at
                lines = [line, *(parent.cmdline() for parent in process.parents())]
                if any(data in part or config in part for of_one in lines for part in of_one):
                    found.append(process)
        return min(found, key=lambda process: float(process.info["create_time"])) if found else None

    async def until(self, condition: Callable[[], bool], what: str, within_s: float = 60.0) -> None:
        """Wait for a condition, or fail and say what was waited for."""
        try:
            async with asyncio.timeout(within_s):
                while not condition():
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"not within {within_s:g} s: {what}") from None

    async def until_row(self, sql: str, what: str, within_s: float = 60.0) -> asyncpg.Record:
        """Wait until a statement returns a row, which is returned; Postgres may be away meanwhile."""
        try:
            async with asyncio.timeout(within_s):
                while True:
                    try:
                        if rows := await self.query(sql):
                            return rows[0]
                    except (OSError, asyncpg.CannotConnectNowError, asyncpg.PostgresConnectionError):
                        pass
                    await asyncio.sleep(0.1)
        except TimeoutError:
            log = (self.running.data.parent / "logs" / "quantdrift.log").read_text()[-4000:]
            raise AssertionError(f"not within {within_s:g} s: {what}\n{log}") from None

    @asynccontextmanager
    async def traffic(
        self, *, rate_per_s: float, archive_share: float, seed: int = 1
    ) -> AsyncIterator[DemoTraffic]:
        """Send scans through the sidecar inside the block."""
        _, held_out = Scans.bundled()
        traffic = DemoTraffic(
            f"http://127.0.0.1:{self.running.ports.sidecar}",
            held_out,
            seed,
            rate_per_s=rate_per_s,
            archive_share=archive_share,
        )
        task = asyncio.create_task(traffic.run())
        try:
            yield traffic
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def started(models: Path, out: Path, replace: tuple[str, str] = ("", "")) -> AsyncIterator[Product]:
    """Run the demo's services in `out`, with one text in its configuration replaced by another."""
    shutil.copytree(models, out / "models", dirs_exist_ok=True)
    text = (ROOT / "quantdrift" / "demo" / "config.toml").read_text()
    assert replace[0] in text
    (out / "config.toml").write_text(text.replace(*replace))
    with OtlpReceiver() as receiver:
        async with services(out, receiver.endpoint) as running:
            yield Product(running, receiver)
