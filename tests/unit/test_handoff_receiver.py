"""Frames from relay workers, received in any pieces."""

import asyncio
import random

import pytest

from quantdrift.core.config import Sidecar
from quantdrift.core.config.schema import MIB
from quantdrift.sidecar.handoff.frame import RawMeta, frame
from quantdrift.sidecar.handoff.receiver import FrameReceiver

pytestmark = pytest.mark.unit


class Transport(asyncio.Transport):
    """Tells whether it was aborted."""

    aborted = False

    def abort(self) -> None:
        """Be aborted."""
        self.aborted = True


class Frames:
    """A reception, and what it handed on."""

    def __init__(self) -> None:
        self.taken: list[tuple[bytes, bytes]] = []
        reception = FrameReceiver(Sidecar(max_exchange_bytes=4 * MIB), self._handle)
        self.transport = Transport()
        self.reader = reception._accept()
        self.reader.connection_made(self.transport)

    def read(self, stream: bytes, sizes: random.Random) -> None:
        """Have the kernel fill in `stream`."""
        position = 0
        while position < len(stream) and not self.transport.aborted:
            buffer = memoryview(self.reader.get_buffer(-1))
            n_bytes = min(len(buffer), len(stream) - position, int(10 ** sizes.uniform(0.0, 6.3)))
            buffer[:n_bytes] = stream[position : position + n_bytes]
            self.reader.buffer_updated(n_bytes)
            position += n_bytes

    def _handle(self, meta: RawMeta, request: memoryview, response: memoryview) -> None:
        self.taken.append((bytes(request), bytes(response)))


def wire(request: bytes, response: bytes) -> bytes:
    """Return a frame."""
    meta = RawMeta(
        id="0" * 32,
        stratum=0,
        pi1=1.0,
        u1=0.5,
        epoch="e",
        captured_at_ns=1,
        request_head_bytes=1,
        request_bytes=len(request),
        response_head_bytes=1,
        response_bytes=len(response),
    )
    return b"".join(frame(meta, [request, response]))


@pytest.mark.parametrize("seed", range(8))
def test_frames_are_whole_however_they_come(seed: int) -> None:
    """Many in one piece or one in many, from nothing to more than the buffer, one after the other."""
    sizes = random.Random(seed)
    pairs = [
        (sizes.randbytes(int(10 ** sizes.uniform(0.0, 6.4))), sizes.randbytes(sizes.randrange(500)))
        for _ in range(30)
    ]
    frames = Frames()
    frames.read(b"".join(wire(*pair) for pair in pairs), sizes)
    assert frames.taken == pairs
    assert not frames.transport.aborted


@pytest.mark.parametrize("damage", [b"\xff" * 8, b"\0\0\0\4\0\0\0\5", b"\0\0\0\x20\0\0\0\x1cx" + b"x" * 40])
def test_frames_that_are_out_of_step_end_their_connection(damage: bytes) -> None:
    """What came before is handed on; what comes after is not read for frames."""
    frames = Frames()
    frames.read(wire(b"q", b"r") + damage + wire(b"q", b"r"), random.Random(1))
    assert frames.taken == [(b"q", b"r")]
    assert frames.transport.aborted


def test_a_lowered_limit_does_not_apply_to_a_worker_that_got_a_higher_one() -> None:
    """A relay worker hands over later what it held when the configuration was another."""
    frames, held = Frames(), FrameReceiver(Sidecar(max_exchange_bytes=1000), lambda *_: None)
    held.reconfigure(Sidecar(max_exchange_bytes=1_000_000))
    held.reconfigure(Sidecar(max_exchange_bytes=1000))
    reader = held._accept()
    reader.connection_made(frames.transport)
    buffer = memoryview(reader.get_buffer(-1))
    raw = wire(b"q" * 900_000, b"r")
    buffer[: len(raw)] = raw
    reader.buffer_updated(len(raw))
    assert not frames.transport.aborted
