"""Each process is killed under traffic; then every request that was offered has exactly one count."""

import asyncio
import contextlib
import json
import secrets
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import psutil
import pytest

from quantdrift.core.codec import decode_tally
from quantdrift.core.config.schema import Stream
from quantdrift.core.process.nats_server import NatsServer
from quantdrift.core.records import Loss, Tally
from quantdrift.core.stream.connection import Queue
from quantdrift.sidecar.state import counts_file
from tests.support.sidecar.raw_exchanges import REQUEST, RESPONSE
from tests.support.sidecar.relay_process import (
    Backend,
    SidecarProcess,
    running_backend,
    sidecar,
    started,
    wait,
)
from tests.support.sidecar.relay_rig import post

pytestmark = pytest.mark.fault

ASK = post(json.dumps(REQUEST).encode())
MODELS = '[{"name": "digits"}]'


@pytest.fixture
def backend() -> Iterator[Backend]:
    """Run a server of the model `digits`."""
    with running_backend() as made:
        made.reply = lambda _: json.dumps(RESPONSE).encode()
        yield made


def options(stream: Stream) -> dict[str, object]:
    """Return the options of a sidecar that samples everything, and counts often."""
    return {
        "STREAM__URL": stream.url,
        "STREAM__NAME": stream.name,
        "SAMPLING__RATE": 1,
        "SAMPLING__MAX_EXCHANGES_PER_S": 1e6,
        "SIDECAR__TALLY_INTERVAL_S": 0.2,
        "MODELS": MODELS,
    }


def stream_of(url: str) -> Stream:
    """Return a stream of its own."""
    return Stream(url=url, name=f"t-{secrets.token_hex(6)}")


async def _tallies(stream: Stream) -> dict[str, Tally]:
    queue = await Queue.connect(stream, client_name="test")
    try:
        consumer = await queue.consumer("tally", ack_wait_s=60)
        found: dict[str, Tally] = {}
        for delivery in await consumer.fetch(64, max_bytes=10**7, timeout_s=0.5):
            tally = decode_tally(delivery.data)
            found[tally.boot] = tally
            await delivery.nak(0)
        return found
    finally:
        await queue.close()


def tallies(stream: Stream) -> dict[str, Tally]:
    """Return the newest tally of each start of the sidecars of a stream."""
    return asyncio.run(_tallies(stream))


def left(tally: Tally) -> int:
    """Return what a tally says of no taken request."""
    return sum(one.taken - one.thinned - one.published - sum(one.lost.values()) for one in tally.strata)


def total(tally: Tally, name: str) -> int:
    """Return a count of a tally over all strata."""
    return sum(getattr(one, name) for one in tally.strata)


def kill_all(running: SidecarProcess) -> None:
    """Kill every process of a sidecar at once."""
    family = [running.root, *running.root.children(recursive=True)]
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family, timeout=30)
    running.process.wait()


@pytest.mark.parametrize("tree", [False, True], ids=["supervisor", "all processes"])
def test_the_counts_of_a_killed_sidecar_are_published_by_the_next_one(
    tmp_path: Path, nats_url: str, backend: Backend, *, tree: bool
) -> None:
    """Nothing that it counted is missing, whether or not it had a tally: what it had in memory is lost with it."""
    stream = stream_of(nats_url)
    # No tally of its own comes before the kill.
    slow = {**options(stream), "SIDECAR__TALLY_INTERVAL_S": 60}
    with tempfile.TemporaryDirectory(prefix="qd-") as temporary:
        first = SidecarProcess(tmp_path, temporary, backend.port, **slow)
        with contextlib.suppress(AssertionError), started(first):
            for _ in range(25):
                first.talk(ASK)
            backend.reply = lambda _: b"{}"
            with first.connect() as client:
                client.sendall(post(b"wait"))  # it is in the memory of the relay
                wait(lambda: backend.n_waiting == 1, "the backend works")
                if tree:
                    kill_all(first)
                else:
                    first.process.kill()
                    first.process.wait()
    with sidecar(tmp_path, backend.port, **options(stream)):
        wait(lambda: any(one.final for one in tallies(stream).values()), "the last counts come")
        (tally,) = (one for one in tallies(stream).values() if one.final)
    assert total(tally, "offered") == total(tally, "taken") == 26
    assert left(tally) == 0
    n_lost = sum(one.lost.get(Loss.PROCESS_ENDED, 0) for one in tally.strata)
    assert n_lost >= 1
    assert total(tally, "published") + n_lost == 26


class Traffic:
    """Clients in threads, each asking again and again on connections of its own; a failed request is no error here."""

    def __init__(self, running: SidecarProcess, n_clients: int = 4) -> None:
        self._running = running
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(n_clients)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(OSError):
                self._running.talk(ASK)


def counted(running: SidecarProcess, name: str) -> int:
    """Return a counter of a sidecar, over all labels."""
    return int(running.count(f"quantdrift_sidecar_{name}_total"))


def rest(running: SidecarProcess) -> int:
    """Return what a sidecar has taken and neither thinned, published nor lost."""
    taken = counted(running, "taken")
    return taken - sum(counted(running, name) for name in ("thinned", "published", "lost"))


def test_what_lies_in_the_socket_of_a_killed_capture_process_is_lost(
    tmp_path: Path, nats_url: str, backend: Backend
) -> None:
    """It was handed over whole and never received: the relay worker counts it once the socket is closed."""
    with sidecar(tmp_path, backend.port, **options(stream_of(nats_url))) as running:
        running.talk(ASK)
        wait(lambda: counted(running, "published") == 1, "the first one is published")
        running.captures[0].suspend()
        for _ in range(20):
            running.talk(ASK)
        running.captures[0].kill()
        wait(lambda: counted(running, "taken") == 21 and rest(running) == 0, "all are accounted for")
        assert running.count("quantdrift_sidecar_lost_total", reason="process_ended") == 20
        running.talk(ASK)
        wait(lambda: counted(running, "published") == 2, "the next one is published")


def test_every_request_is_counted_once_although_processes_are_killed_under_traffic(
    tmp_path: Path, nats_url: str, backend: Backend
) -> None:
    """A kill in the moment between an exchange and its count changes the sum by what one write or one step takes."""
    n_kills, n_clients = 2, 4
    stream = stream_of(nats_url)
    with sidecar(tmp_path, backend.port, **options(stream)) as running:
        with Traffic(running, n_clients):
            for _ in range(n_kills):
                for victims in (lambda: running.captures, lambda: running.workers):
                    before = counted(running, "published")
                    wait(lambda before=before: counted(running, "published") > before + 20, "traffic flows")  # type: ignore[misc]
                    (victim, *_) = victims()
                    victim.kill()
                    wait(
                        lambda victims=victims, victim=victim: victims() not in ([], [victim]), "a successor"
                    )  # type: ignore[misc]
        wait(lambda: abs(rest(running)) <= n_kills * (n_clients + 1), "all are accounted for")
    (tally,) = tallies(stream).values()
    assert tally.final
    assert abs(left(tally)) <= n_kills * (n_clients + 1)
    assert total(tally, "taken") > 80


def test_the_counts_of_kills_during_an_outage_of_the_stream_are_published_after_it(
    tmp_path: Path, backend: Backend
) -> None:
    """However long it lasts: each start of the sidecar has its last tally in the end, and nothing is left over."""
    with NatsServer(tmp_path / "nats") as server:
        stream = stream_of(server.url)
        server.kill()
        for _ in range(2):
            with tempfile.TemporaryDirectory(prefix="qd-") as temporary:
                killed = SidecarProcess(tmp_path, temporary, backend.port, **options(stream))
                with contextlib.suppress(AssertionError), started(killed):
                    for _ in range(10):
                        killed.talk(ASK)
                    kill_all(killed)
        server.start()
        with sidecar(tmp_path, backend.port, **options(stream)):
            wait(lambda: sum(one.final for one in tallies(stream).values()) == 2, "both come")
            found = [one for one in tallies(stream).values() if one.final]
        assert [total(one, "taken") for one in found] == [10, 10]
        assert [one.strata[0].lost for one in found] == [{Loss.PROCESS_ENDED: 10}] * 2
        wait(lambda: not list(counts_file.ended(stream)), "no file is left")
