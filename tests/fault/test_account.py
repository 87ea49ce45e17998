"""Each process is killed under traffic; then every request that was offered has exactly one count."""

import asyncio
import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import psutil
import pytest
from sqlalchemy import text

from quantdrift.core.codec import decode_tally
from quantdrift.core.config.schema import Stream
from quantdrift.core.errors import RetryError
from quantdrift.core.process.nats_server import NatsServer
from quantdrift.core.records import Loss, Tally
from quantdrift.core.stream.backlog import read_waiting
from quantdrift.core.stream.connection import Queue
from quantdrift.sidecar.state import counts_file
from quantdrift.storage.account.account import Account, accounts
from quantdrift.storage.database import Database
from quantdrift.storage.server.postgres import PostgresServer
from tests.support.sidecar.raw_exchanges import REQUEST, RESPONSE
from tests.support.sidecar.relay_process import (
    DEADLINE_S,
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
N_CLIENTS = 4
N_IN_FLIGHT = 16
"""Exchanges that a capture process sends to the stream at the same time."""


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


@pytest.mark.parametrize(
    "tree", [pytest.param(False, marks=pytest.mark.release), True], ids=["supervisor", "all processes"]
)
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

    def __init__(
        self, running: SidecarProcess, asked: list[int] | None = None, answered: list[int] | None = None
    ) -> None:
        self._running = running
        # One entry for each request: appending is safe in any thread.
        self._asked = [] if asked is None else asked
        self._answered = [] if answered is None else answered
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(N_CLIENTS)]

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
            with contextlib.suppress(OSError), self._running.connect() as client:
                self._asked.append(1)
                client.sendall(ASK)
                client.shutdown(socket.SHUT_WR)
                answer = b""
                while data := client.recv(65_536):
                    answer += data
                self._answered += [1] if answer else []


def counted(running: SidecarProcess, name: str) -> int:
    """Return a counter of a sidecar, over all labels."""
    return int(running.count(f"quantdrift_sidecar_{name}_total"))


def rest(running: SidecarProcess) -> int:
    """Return what a sidecar has taken and neither thinned, published nor lost."""
    taken = counted(running, "taken")
    return taken - sum(counted(running, name) for name in ("thinned", "published", "lost"))


@pytest.mark.release
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


def kill_one(running: SidecarProcess, name: str) -> None:
    """Kill the capture process, or the relay worker, while exchanges flow, and wait for its successor."""
    before = counted(running, "published")
    wait(lambda: counted(running, "published") > before + 20, "traffic flows")
    victim = getattr(running, name)[0]
    victim.kill()
    wait(lambda: getattr(running, name) not in ([], [victim]), "a successor")


def test_every_request_is_counted_once_although_processes_are_killed_under_traffic(
    tmp_path: Path, nats_url: str, backend: Backend
) -> None:
    """A kill in the moment between an exchange and its count changes the sum by what one write or one step takes."""
    n_kills = 2
    stream = stream_of(nats_url)
    with sidecar(tmp_path, backend.port, **options(stream)) as running:
        with Traffic(running):
            for name in ("captures", "workers") * n_kills:
                kill_one(running, name)
        wait(lambda: abs(rest(running)) <= n_kills * (N_CLIENTS + 1), "all are accounted for")
    (tally,) = tallies(stream).values()
    assert tally.final
    assert abs(left(tally)) <= n_kills * (N_CLIENTS + 1)
    assert total(tally, "taken") > 80


@pytest.mark.release
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


class Shadow:
    """A shadow worker in a process of its own, which has no reference: it counts each exchange as skipped."""

    def __init__(self, directory: Path, stream: Stream, dsn: str) -> None:
        self._path = directory / "shadow.toml"
        self._path.write_text(
            f'[stream]\nurl = "{stream.url}"\nname = "{stream.name}"\n[shadow]\nadmin = "127.0.0.1:0"\n'
            'ack_wait_s = 2.0\nprovider = "cpu"\nthreads = 1\n[[models]]\nname = "digits"\n'
        )
        self._environment = {**os.environ, "QUANTDRIFT_DSN": dsn}
        self.start()

    def start(self) -> None:
        """Start it."""
        command = [sys.executable, "-m", "quantdrift", "shadow", "-c", str(self._path)]
        self._process = subprocess.Popen(command, env=self._environment)

    def kill(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()


async def _account(dsn: str, stream: Stream) -> tuple[Account, int, int]:
    queue = await Queue.connect(stream, client_name="test")
    try:
        async with Database(dsn) as database, database.begin() as connection:
            by_model = await accounts(connection)
            offered = await connection.scalar(text("select sum(offered) from account"))
        waiting = await read_waiting(queue, ["digits"])
    finally:
        await queue.close()
    total_of_all = sum((one for strata in by_model.values() for one in strata.values()), Account())
    return total_of_all, sum(one.n_messages for one in waiting.values()), int(offered or 0)


def account(dsn: str, stream: Stream) -> tuple[Account, int, int]:
    """Return the account of all samples, what waits in the stream, and what was offered; nothing while a server is away."""
    try:
        return asyncio.run(_account(dsn, stream))
    except RetryError:
        return Account(), 0, 0


def settled(found: Account, n_waiting: int, _: int) -> bool:
    """Return whether everything has reached its end."""
    return found.in_sidecar == 0 and n_waiting == 0 and abs(found.in_stream) <= N_IN_FLIGHT


@pytest.mark.release
def test_the_equation_is_true_after_every_part_was_killed(
    tmp_path: Path, backend: Backend, postgres_server: PostgresServer
) -> None:
    """Shadow, NATS, Postgres and the whole sidecar, under traffic: in the end nothing is left over."""
    requests: tuple[list[int], list[int]] = ([], [])
    with NatsServer(tmp_path / "nats") as nats:
        stream, dsn = stream_of(nats.url), postgres_server.dsn

        def finished() -> int:
            return account(dsn, stream)[0].finished

        def flows() -> None:
            before = finished()
            wait(lambda: finished() > before + 10, "exchanges are finished")

        shadow = Shadow(tmp_path, stream, dsn)
        try:
            with tempfile.TemporaryDirectory(prefix="qd-") as temporary:
                first = SidecarProcess(tmp_path, temporary, backend.port, **options(stream))
                with contextlib.suppress(AssertionError), started(first), Traffic(first, *requests):
                    flows()
                    shadow.kill()
                    shadow.start()
                    flows()
                    nats.kill()
                    nats.start()
                    flows()
                    postgres_server.kill()
                    postgres_server.start()
                    flows()
                    kill_all(first)
            with (
                sidecar(tmp_path, backend.port, **options(stream)) as second,
                Traffic(second, *requests),
            ):
                wait(lambda: counted(second, "published") > 10, "the second one publishes")
                wait(lambda: not list(counts_file.ended(stream)), "the counts of the first one are published")

            # How long the shadow needs for what waits is the machine's affair: it must get on.
            before, moved_at = account(dsn, stream), time.monotonic()
            while not settled(*before):
                if (now := account(dsn, stream)) != before:
                    before, moved_at = now, time.monotonic()
                assert time.monotonic() < moved_at + DEADLINE_S, f"it gets on no more: {before}"
            # What moved between the two readings of one account is in the next one.
            found, n_waiting, offered = account(dsn, stream)
        finally:
            shadow.kill()
    assert found.unaccounted == 0
    assert found.expired == found.thinned == 0
    # What the stream had acknowledged and the killed process had not counted yet is counted twice.
    assert -N_IN_FLIGHT <= found.missing(n_waiting) <= 0
    assert found.taken == found.lost + found.finished + found.in_stream == offered
    asked, answered = requests  # a request that was cut by the kill may or may not have been seen
    assert len(answered) <= offered <= len(asked)
