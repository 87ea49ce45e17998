"""Traffic that cannot be observed: it is served, counted as lost, and makes verdicts `unknown`."""

import asyncio
from asyncio import StreamReader, StreamWriter
from datetime import UTC, datetime

import pytest

from quantdrift.core.config import SamplingOptions
from quantdrift.core.config.schema import Monitor
from quantdrift.core.records import HeaderStratum, Loss, Verdict
from quantdrift.drift.watch import Phase
from quantdrift.monitor.fold.loss import LossCounts
from quantdrift.monitor.fold.verdict import SliceStatus, judge
from quantdrift.sidecar.state.counters import Count, Gauge, Row
from quantdrift.storage.fold_rows import TallyRow
from tests.support.sidecar.relay_rig import Bench, answer, end, on_both_loops, post, rig

pytestmark = pytest.mark.fault

HELLO = b"\x16\x03\x01\x02\x00" + bytes(200)
RECORD = b"\x17\x03\x03\x00\x20" + bytes(32)
SCANNER = SamplingOptions(
    rate=1.0, header_strata=(HeaderStratum(name="scanner", headers={"x-scanner": "1"}, rate=1.0),)
)
ROWS = (Row("scanner"), Row("default"))


async def serve(reader: StreamReader, writer: StreamWriter) -> None:
    """Answer HTTP requests without a look at their bodies, TLS with TLS, and anything else with 400."""
    while data := await reader.read(65_536):
        if data.startswith(b"POST"):
            writer.write(answer(b"ok"))
        elif data.startswith((b"\x16", b"\x17")):
            writer.write(RECORD)
        else:
            writer.write(answer(b"", b"400 Bad Request"))


async def send(at_port: int, *chunks: bytes) -> None:
    """Send each chunk once the one before has its answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", at_port)
    for chunk in chunks:
        writer.write(chunk)
        assert await reader.read(65_536)
    await end(writer)


def verdict(bench: Bench, stratum: str) -> tuple[Verdict, str]:
    """Return the verdict of the monitor on a slice of a stratum, from what the sidecar tells it."""
    losses = LossCounts()
    now = datetime.now(UTC)
    for count in bench.counters.strata(ROWS):
        losses.add(
            TallyRow(
                source="pod",
                boot="b",
                stratum=count.stratum,
                sequence=1,
                at_us=int(now.timestamp() * 1e6),
                offered=count.offered,
                taken=count.taken,
                lost=sum(count.lost.values()),
            )
        )
    status = SliceStatus(
        phase=Phase.WATCHING,
        evidence_ratio=0.0,
        n_groups=1_000_000,
        silent_s=0.0,
        counts=losses.recent((stratum,), "digits"),
    )
    return judge(status, Monitor())


@on_both_loops
async def test_verdicts_are_unknown_where_much_of_the_traffic_is_encrypted() -> None:
    """Each of its requests is counted, not the handshake; without them the verdict is `ok`."""
    bench = Bench(SCANNER)
    seen = post(b"x", fields=b"x-scanner: 1\r\n")
    async with rig(bench, serve) as at:
        await send(at.port, *[seen] * 40)
        assert verdict(bench, "scanner")[0] is Verdict.OK
        await send(at.port, HELLO, *[RECORD] * 10)
        await at.quiet()
    assert bench.slot.gauge(Gauge.UNSEEN_REQUESTS) == bench.lost(Loss.UNOBSERVED) == 10
    assert bench.slot.count(0, Count.OFFERED) == 50  # in the stratum of all that was observed
    assert verdict(bench, "scanner") == (
        Verdict.UNKNOWN,
        "loss: too many of its samples were lost or not observed in the last hour: see `quantdrift status`",
    )


@on_both_loops
async def test_a_connection_that_loses_its_framing_counts_for_its_model_and_stratum() -> None:
    """What was observed of it before says which."""
    bench = Bench(SCANNER)
    scanner = post(b"x", fields=b"x-scanner: 1\r\n")
    ambiguous = post(b"x", fields=b"Content-Length: 2\r\n")
    async with rig(bench, serve) as at:
        await send(at.port, *[post(b"x")] * 100)
        await send(at.port, scanner, ambiguous, *[post(b"x")] * 5)
        await at.quiet()
    assert bench.slot.gauge(Gauge.BLIND) == 1
    assert bench.lost(Loss.UNOBSERVED) == 6
    assert bench.slot.count(0, Count.OFFERED) == 7
    assert bench.slot.count(1, Count.OFFERED) == 100


@on_both_loops
async def test_rubbish_that_the_backend_refuses_is_no_request() -> None:
    """Who sends it cannot make verdicts `unknown`."""
    bench = Bench(SCANNER)
    async with rig(bench, serve) as at:
        for _ in range(20):
            await send(at.port, b"\x00rubbish\r\n\r\n", b"more")
        await send(at.port, HELLO)
        await at.quiet()
    assert bench.slot.gauge(Gauge.BLIND) == 21
    assert bench.slot.gauge(Gauge.UNSEEN_REQUESTS) == 0


@on_both_loops
async def test_of_unobserved_requests_the_same_share_is_lost_as_is_sampled_of_others() -> None:
    """A rate of 0 takes none of them."""
    bench = Bench(SamplingOptions(rate=0.0))
    async with rig(bench, serve) as at:
        await send(at.port, HELLO, *[RECORD] * 10)
        await at.quiet()
    assert bench.slot.gauge(Gauge.UNSEEN_REQUESTS) == bench.slot.count(0, Count.OFFERED) == 10
    assert bench.slot.count(0, Count.TAKEN) == bench.lost(Loss.UNOBSERVED) == 0
