"""The hand-off from a relay worker to the capture process, over a real Unix socket."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from quantdrift.core.records import Loss
from quantdrift.sidecar.handoff.frame import HEAD_BYTES, RawMeta, frame, lengths
from quantdrift.sidecar.handoff.sender import FrameSender
from quantdrift.sidecar.state.counters import Counters, Gauge, Slot
from tests.support.sidecar.relay_rig import DEADLINE_S, Taken, on_both_loops, unframe, until

pytestmark = pytest.mark.integration

MIB = 1 << 20


class Peer:
    """What the capture process would be."""

    def __init__(self, path: Path) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(path))
        self.listener.listen()
        self.listener.setblocking(False)
        self.end: socket.socket | None = None

    async def accept(self) -> asyncio.StreamReader:
        """Return what a relay worker sends."""
        async with asyncio.timeout(DEADLINE_S):
            self.end, _ = await asyncio.get_running_loop().sock_accept(self.listener)
        reader, self.writer = await asyncio.open_unix_connection(sock=self.end, limit=MIB)
        return reader

    async def close(self) -> None:
        """Die, the listening socket excepted."""
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


async def receive(reader: asyncio.StreamReader) -> Taken:
    """Return the next frame."""
    async with asyncio.timeout(DEADLINE_S):
        head = await reader.readexactly(HEAD_BYTES)
        return unframe(head + await reader.readexactly(lengths(head)[0]))


def wire(request: bytes, response: bytes = b"a") -> list[bytes | memoryview]:
    """Return the frame of an exchange."""
    meta = RawMeta(
        id="0" * 32,
        stratum=0,
        pi1=1.0,
        u1=0.5,
        epoch="e",
        captured_at_ns=1,
        request_head_bytes=0,
        request_bytes=len(request),
        response_head_bytes=0,
        response_bytes=len(response),
    )
    return frame(meta, [request, response])


@contextlib.asynccontextmanager
async def handing_out(path: Path, limit_bytes: int = 4 * MIB) -> AsyncIterator[tuple[FrameSender, Slot]]:
    """Yield a hand-out to `path` and its counts."""
    slot = Counters.create(1, 1).slot(0)
    handout = FrameSender(str(path), limit_bytes, slot, asyncio.get_running_loop())
    handout.connect()
    try:
        yield handout, slot
    finally:
        await handout.finish(0.0)
    assert slot.gauge(Gauge.QUEUE_BYTES) == 0


@on_both_loops
async def test_frames_arrive_whole_and_in_order(tmp_path: Path) -> None:
    """Small and large, more than the socket's buffer takes at once."""
    peer = Peer(tmp_path / "s")
    async with handing_out(tmp_path / "s") as (handout, slot):
        reader = await peer.accept()
        requests = [b"%d" % n * size for n, size in enumerate([1, 700_000, 5, 1_300_000, 0, 900_000])]
        for request in requests:
            handout.send(0, wire(request))
        assert [(await receive(reader)).request for _ in requests] == requests
        await until(lambda: slot.gauge(Gauge.QUEUE_BYTES) == 0)
    assert all(slot.lost_count(0, loss) == 0 for loss in Loss)
    await peer.close()
    peer.listener.close()


@on_both_loops
async def test_without_a_capture_process_exchanges_are_counted_as_lost(tmp_path: Path) -> None:
    """They are not kept for one that may never come; once it is there, they are handed over."""
    async with handing_out(tmp_path / "s") as (handout, slot):
        handout.send(0, wire(b"lost"))
        assert slot.lost_count(0, Loss.CAPTURE_DOWN) == 1
        peer = Peer(tmp_path / "s")
        reader = await peer.accept()
        handout.send(0, wire(b"kept"))
        assert (await receive(reader)).request == b"kept"
        await peer.close()
        peer.listener.close()


@on_both_loops
async def test_a_capture_process_that_does_not_read_costs_a_bounded_amount(tmp_path: Path) -> None:
    """What would wait beyond the bound is counted as lost; what was accepted arrives when it reads again."""
    peer = Peer(tmp_path / "s")
    async with handing_out(tmp_path / "s", limit_bytes=MIB) as (handout, slot):
        for n in range(40):
            handout.send(0, wire(b"%02d" % n * 50_000))
            assert slot.gauge(Gauge.QUEUE_BYTES) <= MIB
        behind = slot.lost_count(0, Loss.CAPTURE_BEHIND)
        assert 0 < behind < 40
        reader = await peer.accept()
        for n in range(40 - behind):
            assert (await receive(reader)).request == b"%02d" % n * 50_000
        await peer.close()
        peer.listener.close()


@on_both_loops
async def test_another_bound_takes_effect_at_once(tmp_path: Path) -> None:
    """A reloaded configuration may raise it: an exchange that did not fit before is then accepted."""
    peer = Peer(tmp_path / "s")
    async with handing_out(tmp_path / "s", limit_bytes=MIB) as (handout, slot):
        handout.send(0, wire(b"a" * (2 * MIB)))
        assert slot.lost_count(0, Loss.CAPTURE_BEHIND) == 1
        handout.limit_bytes = 4 * MIB
        handout.send(0, wire(b"a" * (2 * MIB)))
        assert slot.lost_count(0, Loss.CAPTURE_BEHIND) == 1
        reader = await peer.accept()
        assert len((await receive(reader)).request) == 2 * MIB
        await peer.close()
        peer.listener.close()


@on_both_loops
async def test_a_capture_process_that_dies_costs_what_was_under_way(tmp_path: Path) -> None:
    """Frames not sent whole are counted; the next one goes over a new connection, from its beginning."""
    peer = Peer(tmp_path / "s")
    async with handing_out(tmp_path / "s", limit_bytes=16 * MIB) as (handout, slot):
        await peer.accept()
        for _ in range(3):
            handout.send(0, wire(bytes(2 * MIB)))
        await peer.close()
        await until(lambda: slot.lost_count(0, Loss.CAPTURE_DOWN) > 0)
        assert slot.lost_count(0, Loss.CAPTURE_DOWN) == 3
        reader = await peer.accept()
        handout.send(0, wire(b"next"))
        assert (await receive(reader)).request == b"next"
        await peer.close()
        peer.listener.close()


@on_both_loops
async def test_at_the_end_what_waits_is_sent_or_counted(tmp_path: Path) -> None:
    """A reading peer gets all of it; one that does not read costs the given time and no more."""
    peer = Peer(tmp_path / "s")
    async with handing_out(tmp_path / "s", limit_bytes=16 * MIB) as (handout, slot):
        reader = await peer.accept()
        for _ in range(3):
            handout.send(0, wire(bytes(2 * MIB)))
        finishing = asyncio.create_task(handout.finish(DEADLINE_S))
        for _ in range(3):
            await receive(reader)
        await finishing
        assert slot.lost_count(0, Loss.CAPTURE_BEHIND) == 0
        handout.send(0, wire(b"late"))
        assert slot.lost_count(0, Loss.CAPTURE_DOWN) == 1
        await peer.close()
    async with handing_out(tmp_path / "s", limit_bytes=16 * MIB) as (handout, slot):
        for _ in range(3):
            handout.send(0, wire(bytes(2 * MIB)))
        await handout.finish(0.05)
        assert slot.lost_count(0, Loss.CAPTURE_BEHIND) == 3
    peer.listener.close()
