"""What a fault may cost: every part is killed once in the middle of a run."""

import asyncio
import signal
from pathlib import Path

import pytest

from quantdrift.demo.otlp_receiver import OtlpReceiver
from tests.support.product import Product, started

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(400)]

PUBLISHED = "quantdrift_sidecar_published_total"
ERROR = 17  # OpenTelemetry's severity number
PARTS = {
    "capture process": ("quantdrift.sidecar.capture.process",),
    "shadow": ("quantdrift", "shadow", "--config"),
    "monitor": ("quantdrift", "monitor", "--config"),
    "nats": ("nats-server", "nats.conf"),
    "postgres": ("bin/postgres", "-D"),
}


async def _kill(product: Product, part: str) -> None:
    """Kill -9, and wait until another one runs in its place."""
    victim = product.process(*PARTS[part])
    assert victim is not None, f"{part} does not run"
    victim.send_signal(signal.SIGKILL)

    def replaced() -> bool:
        process = product.process(*PARTS[part])
        return process is not None and process.pid != victim.pid

    await product.until(replaced, f"another {part}")


@pytest.mark.release
async def test_each_part_killed_once_loses_and_doubles_nothing_and_the_alert_still_comes(
    models: Path, tmp_path: Path
) -> None:
    """What JetStream acknowledged is stored once and folded once, clients see no error, and the slice fires.

    The drifted slice flips on some 5 % against a budget of 1 %: that it does not fire within 120 s at 20 replays/s
    has a probability far below 1e-9; that another one fires falsely, one below 1e-4 (0.1 in 30 days).
    """
    async with started(models, tmp_path) as product:
        async with product.traffic(rate_per_s=250, archive_share=0.08) as traffic:
            for part in PARTS:
                before = await product.counted(PUBLISHED)
                await _kill(product, part)
                await _publishing_again(product, before + 100)
            await product.until_row(
                "select 1 from transition join slice on slice.id = slice_id"
                " where to_verdict = 'firing' and slice.name = 'scanner=archive'",
                "the archive fires",
                within_s=120,
            )
        assert traffic.failed.total() == 0, "clients noticed"
        published = int(await product.counted(PUBLISHED))
        row = await product.until_row(
            "select count(*) stored, count(distinct exchange_id) exchanges from comparison"
            f" having count(*) >= {published}",
            f"{published} acknowledged exchanges are stored",
        )
        assert row["stored"] == row["exchanges"]
        await product.until_row(
            "select 1 from rollup_day join slice on slice.id = slice_id where slice.name = 'all'"
            f" having sum(n_items) = {row['stored']}",
            "every comparison is folded exactly once",
        )
        firing = await product.query(
            "select distinct slice.name from transition join slice on slice.id = slice_id where to_verdict = 'firing'"
        )
        assert [row["name"] for row in firing] == ["scanner=archive"]
        product.receiver.wait_for(_paged, 30)


def _paged(receiver: OtlpReceiver) -> bool:
    return any(event.severity == ERROR for event in receiver.events)


async def _publishing_again(product: Product, enough: float) -> None:
    async with asyncio.timeout(60):
        while await product.counted(PUBLISHED) < enough:
            await asyncio.sleep(0.1)


@pytest.mark.release
async def test_a_version_without_a_reference_is_unknown_and_never_fires(models: Path, tmp_path: Path) -> None:
    """A rollout does not page, however much its answers flip: it is said that nobody watches it."""
    (tmp_path / "out").mkdir()
    other = 'versions = ["fp8-*"]'
    async with started(models, tmp_path / "out", replace=('versions = ["int8-*"]', other)) as product:
        async with product.traffic(rate_per_s=150, archive_share=0.5) as traffic:
            row = await product.until_row(
                "select * from slice_now where verdict = 'unknown' and reason like '%no reference%'",
                "it is unknown",
            )
            assert row["candidate_version"] == "int8-1"
            await product.until(lambda: sum(traffic.sent.values()) > 1500, "enough traffic to fire on")
        assert await product.query("select 1 from transition where to_verdict in ('firing', 'warning')") == []
        assert await product.query("select 1 from comparison") == []
        assert not _paged(product.receiver)
