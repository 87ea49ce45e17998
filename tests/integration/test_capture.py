"""The capture process as its supervisor starts it, with a real stream behind it."""

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from quantdrift.core.codec import decode_exchange, decode_tally
from quantdrift.core.config.load import load
from quantdrift.core.config.schema import Stream
from quantdrift.core.keys import Key, KeyRing, write_keys
from quantdrift.core.records import Exchange, Loss, ProcessState, Tally
from quantdrift.core.sampling.pause import Order, Pause
from quantdrift.core.sealing import envelope_of, unseal
from quantdrift.core.stream.connection import Delivery, Queue
from quantdrift.core.stream.numbering import Numbered
from quantdrift.sidecar.handoff.frame import frame
from quantdrift.sidecar.state.config import LiveConfig, write_live_config
from quantdrift.sidecar.state.counters import MAX_ROWS, Count, Counters, Gauge, Row
from quantdrift.sidecar.state.pause import PauseSource, write_pause
from quantdrift.sidecar.state.process_start import ProcessStart
from tests.support.sidecar.raw_exchanges import raw_exchange

pytestmark = pytest.mark.integration

CONFIG = """
models = [{{ name = "digits" }}]
[stream]
url = "{url}"
name = "{name}"
payload_key_file = "{key_file}"
[sidecar]
tally_interval_s = 0.2
grace_s = 8
drain_delay_s = 1
[capture]
headers = ["x-user"]
hmac = ["header.x-user"]
[[sampling.header_strata]]
name = "faint"
rate = 1.0
headers = {{ x-scanner = "faint" }}
"""


class Capture:
    """A running capture process with everything that its supervisor gives it."""

    def __init__(self, directory: Path, url: str, key_file: str = "") -> None:
        self.directory = directory
        self.stream = Stream(url=url, name=f"t-{secrets.token_hex(6)}")
        written = directory / "config.toml"
        written.write_text(CONFIG.format(url=url, name=self.stream.name, key_file=key_file))
        settled = LiveConfig.of(load(written))
        self.rows = settled.rows
        self._config = write_live_config(settled, directory)
        self.counters = Counters.create(2, MAX_ROWS)
        self.slot = self.counters.slot(1)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(directory / "s"))
        self._listener.listen()
        self._log = (directory / "log").open("wb")
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        """Start a process."""
        start = ProcessStart(
            name="capture",
            config=str(self._config),
            counters_fd=self.counters.fd,
            n_slots=2,
            slot=1,
            handoff=self._listener.getsockname(),
            listen_fd=self._listener.fileno(),
            boot="b" * 32,
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", "quantdrift.sidecar.capture.process", start.argument],
            pass_fds=start.fds,
            env={**os.environ, "QUANTDRIFT_HMAC_KEY": "a-key-of-sixteen-characters", "POD_NAME": "pod-1"},
            stderr=self._log,
        )
        return self.process

    @property
    def published(self) -> int:
        """What the stream has acknowledged, of any stratum and model."""
        return sum(self.slot.count(row, Count.PUBLISHED) for row in range(8))

    @property
    def without_key(self) -> int:
        """What was lost because it could not be encrypted."""
        return sum(self.slot.lost_count(row, Loss.NO_KEY) for row in range(8))

    def connect(self) -> socket.socket:
        """Return a connection as a relay worker has it."""
        made = socket.socket(socket.AF_UNIX)
        made.connect(self._listener.getsockname())
        return made

    def close(self) -> None:
        """End what is still there."""
        self.process.kill()
        self.process.wait()
        self._listener.close()
        self._log.close()
        os.close(self.counters.fd)


@pytest.fixture
def capture(tmp_path: Path, nats_url: str) -> Iterator[Capture]:
    """Return a running capture process."""
    made = Capture(tmp_path, nats_url)
    yield made
    made.close()


def wait(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    """Wait until `condition` holds."""
    deadline = time.monotonic() + timeout_s
    tick = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        tick.wait(0.01)


def send(relay: socket.socket, n: int, **given: object) -> None:
    """Hand `n` exchanges over."""
    for _ in range(n):
        meta, request, response = raw_exchange(exchange_id=secrets.token_hex(16), **given)  # type: ignore[arg-type]
        relay.sendall(b"".join(frame(meta, [request, response])))


def stored(stream: Stream) -> tuple[list[Exchange], list[Tally]]:
    """Return everything that the streams hold."""
    exchanges, tallies = delivered(stream)
    return [decode_exchange(d.data) for d in exchanges], [decode_tally(d.data) for d in tallies]


def delivered(stream: Stream) -> tuple[list[Delivery], list[Delivery]]:
    """Take everything that the streams hold."""

    async def read() -> tuple[list[Delivery], list[Delivery]]:
        queue = await Queue.connect(stream, client_name="test")
        found: list[list[Delivery]] = []
        for kind in ("exchange", "tally"):
            consumer = await queue.consumer(kind, ack_wait_s=30)
            found.append(await consumer.fetch(1000, max_bytes=10**7, timeout_s=0.5))
        await queue.close()
        return found[0], found[1]

    return asyncio.run(read())


def test_frames_become_exchanges_and_tallies(capture: Capture) -> None:
    """Two relay workers' frames end in the stream; after SIGTERM the last tally accounts for each of them."""
    capture.counters.slot(0).add(1, Count.OFFERED, 500)
    capture.counters.slot(0).add(0, Count.TAKEN, 30)
    capture.counters.slot(0).add(1, Count.TAKEN, 46)
    with capture.connect() as first, capture.connect() as second:
        send(first, 30, stratum=0, headers={"X-Scanner": "faint", "X-User": "ann"})
        send(second, 40, stratum=1)
        send(second, 5, stratum=1, request=b"{")
        wait(lambda: capture.slot.gauge(Gauge.SEQUENCE) >= 2)
        capture.process.send_signal(signal.SIGINT)  # the terminal's Ctrl-C is for the supervisor
        send(second, 1, stratum=1, status="500 Oops")
        digits = capture.rows.index(Row("default", "digits"))  # the path names it
        wait(lambda: capture.slot.lost_count(digits, Loss.ERROR_STATUS) == 1)
        capture.process.send_signal(signal.SIGTERM)
        assert capture.process.wait(10) == 0
    exchanges, tallies = stored(capture.stream)
    assert len({exchange.id for exchange in exchanges}) == 70
    faint = [exchange for exchange in exchanges if exchange.sampling.header_stratum == "faint"]
    assert len(faint) == 30
    assert {exchange.attributes["header.x-user"] for exchange in faint} != {"ann"}
    (tally,) = tallies
    assert (tally.source, tally.boot) == ("pod-1", "b" * 32)
    assert tally.sequence == capture.slot.gauge(Gauge.SEQUENCE)
    losses: tuple[dict[Loss, int], ...] = ({}, {Loss.ERROR_STATUS: 1, Loss.DECODE: 5})
    for stratum, published, lost in zip(tally.strata, (30, 40), losses, strict=True):
        assert (stratum.published, stratum.lost) == (published, lost)
        assert stratum.taken == published + sum(lost.values())


def test_its_tallies_say_what_is_configured_and_paused_here(capture: Capture) -> None:
    """For the audit: the options without contents of files, a pause by the admin port or its file, and a reload."""
    order = Order(by="the admin port", at=datetime.now(UTC))
    write_pause(capture.directory, PauseSource.HERE, Pause(models={"digits": order}))
    before = load(capture.directory / "config.toml")
    after = msgspec.structs.replace(before, sampling=msgspec.structs.replace(before.sampling, rate=0.25))
    found: list[ProcessState] = []

    def reported() -> ProcessState:
        found.extend(tally.state for tally in stored(capture.stream)[1] if tally.state is not None)
        return found[-1] if found else ProcessState(digest="", options={})

    wait(lambda: reported().pause is not None)
    assert found[-1].pause is not None
    assert found[-1].pause["models"]["digits"]["by"] == "the admin port"
    assert found[-1].options["capture.headers"] == ["x-user"]
    write_live_config(LiveConfig.of(after, capture.rows), capture.directory)
    write_pause(capture.directory, PauseSource.HERE, Pause())
    wait(lambda: reported().options.get("sampling.rate") == 0.25 and reported().pause is None)
    assert found[-1].digest != found[0].digest


def test_a_killed_process_is_started_again_and_goes_on(capture: Capture) -> None:
    """The socket and the counters stay: a new process publishes on and continues the sequence."""
    with capture.connect() as relay:
        send(relay, 5)
        wait(lambda: capture.published == 5 and capture.slot.gauge(Gauge.SEQUENCE) > 0)
        capture.process.kill()
        capture.process.wait()
    reached = capture.slot.gauge(Gauge.SEQUENCE)
    capture.start()
    with capture.connect() as relay:
        send(relay, 5)
        wait(lambda: capture.published == 10)
    wait(lambda: capture.slot.gauge(Gauge.SEQUENCE) > reached)
    exchanges, tallies = stored(capture.stream)
    assert len(exchanges) == 10
    assert tallies[-1].sequence > reached


def test_every_exchange_has_a_number_of_its_own(capture: Capture) -> None:
    """A new process goes on with the numbers of the one that was killed, and the tally knows the last one."""
    for n_published in (5, 10):
        digits = capture.rows.index(Row("faint", "digits"))
        capture.counters.slot(0).add(digits, Count.TAKEN, 5)
        with capture.connect() as relay:
            send(relay, 5, stratum=digits)
            wait(lambda n=n_published: capture.published == n)  # type: ignore[misc]
        if n_published == 5:
            capture.process.kill()
            capture.process.wait()
            capture.start()
    before = capture.slot.gauge(Gauge.SEQUENCE)
    wait(lambda: capture.slot.gauge(Gauge.SEQUENCE) >= before + 2)
    exchanges, tallies = delivered(capture.stream)
    assert {one.numbered for one in exchanges} == {
        Numbered(boot="b" * 32, row=digits, number=number) for number in range(1, 11)
    }
    counts = decode_tally(tallies[-1].data).strata[0].models["digits"]
    assert (counts.row, counts.published, counts.numbered) == (digits, 10, 10)


def test_frames_out_of_step_cost_one_connection(capture: Capture) -> None:
    """Garbage closes the connection that it came on; others and later ones are served."""
    good, bad, lying, unknown = (capture.connect() for _ in range(4))
    with good, bad, lying, unknown:
        bad.sendall(b"\xff" * 4096)
        meta, request, response = raw_exchange()
        short = msgspec.structs.replace(meta, request_bytes=meta.request_bytes - 1)
        lying.sendall(b"".join(frame(short, [request[:-1], response]))[:-1] + b"\0")
        lying.sendall(b"\0\0\0\x08\0\0\0\x04\xff\xff\xff\xff")
        meta, request, response = raw_exchange(stratum=99)
        unknown.sendall(b"".join(frame(meta, [request, response])))
        for broken in (bad, lying, unknown):
            broken.settimeout(10)
            assert broken.recv(1) == b""
        send(good, 3)
        wait(lambda: capture.published >= 3)


def test_a_large_exchange_passes_in_many_reads(capture: Capture) -> None:
    """Megabytes of binary tensor arrive whole."""
    n = 500_000
    part = (
        b'{"inputs":[{"name":"x","shape":[1,%d],"datatype":"FP32",'
        b'"parameters":{"binary_data_size":%d}}]}' % (n, 4 * n)
    )
    length = {"Inference-Header-Content-Length": str(len(part))}
    with capture.connect() as relay:
        send(relay, 2, request=part + secrets.token_bytes(4 * n), headers=length)
        wait(lambda: capture.published == 2)
    exchanges, _ = stored(capture.stream)
    assert [len(exchange.inputs[0].data) for exchange in exchanges] == [4 * n, 4 * n]


def test_with_a_key_nothing_of_an_exchange_can_be_read_in_the_stream(tmp_path: Path, nats_url: str) -> None:
    """While the key cannot be read exchanges are lost and counted, and none is sent as it is; another key needs no restart."""
    path = tmp_path / "keys.json"
    capture = Capture(tmp_path, nats_url, str(path))
    secret = "CANARY-OF-A-PERSON"
    try:
        with capture.connect() as relay:
            send(relay, 5, headers={"X-Request-Id": secret, "X-User": "ann"})
            wait(lambda: capture.without_key == 5)
            first = Key.create(datetime.now(UTC))
            write_keys(path, KeyRing(keys=(first,)), is_new=True)
            wait(lambda: _sent_one(relay, capture, secret))
            second = Key.create(datetime.now(UTC))
            write_keys(path, KeyRing(keys=(first, second)))
            wait(lambda: second.id in (tmp_path / "log").read_text() or not _sent_one(relay, capture, secret))
            wait(lambda: _sent_one(relay, capture, secret))
            capture.process.send_signal(signal.SIGTERM)
            assert capture.process.wait(10) == 0
        deliveries, _ = delivered(capture.stream)
    finally:
        capture.close()
    envelopes = [envelope_of(delivery.data) for delivery in deliveries]
    assert len(envelopes) == capture.published
    assert {envelope.model for envelope in envelopes} == {"digits"}
    assert {envelope.key_id for envelope in envelopes} == {first.id, second.id}
    for delivery in deliveries:
        assert b"CANARY" not in delivery.data
        assert b"inputs" not in delivery.data
    ring = KeyRing(keys=(first, second))
    opened = [decode_exchange(unseal(delivery.data, ring, "digits")) for delivery in deliveries]
    assert {exchange.id for exchange in opened} == {envelope.exchange_id for envelope in envelopes}
    assert "stream.payload_key_file" in (tmp_path / "log").read_text()
    assert secret not in (tmp_path / "log").read_text()


def _sent_one(relay: socket.socket, capture: Capture, secret: str) -> bool:
    """Hand one exchange over, and return whether it was published in the end, not lost."""
    before, lost = capture.published, capture.without_key
    send(relay, 1, headers={"X-Request-Id": secret, "X-User": "ann"})
    wait(lambda: capture.published + capture.without_key > before + lost)
    return capture.published > before
