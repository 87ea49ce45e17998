"""Taps whose sidecar restarts or changes: counts stay with their stratum."""

import asyncio
import gc
import resource
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from quantdrift import Tap
from quantdrift.core.clock import SystemClock
from quantdrift.core.config import Config, Model
from quantdrift.core.config.schema import SamplingOptions
from quantdrift.core.records import HeaderStratum, Loss
from quantdrift.core.sampling.rates import policy_of
from quantdrift.sidecar.intake.callers import CallersFile
from quantdrift.sidecar.intake.gateway import Gateway
from quantdrift.sidecar.intake.tap_server import TapServer
from quantdrift.sidecar.relay.observing.observer import CaptureScope
from quantdrift.sidecar.sampling.first_phase import ExchangeIds, Sampler
from quantdrift.sidecar.state.config import LiveConfig
from quantdrift.sidecar.state.counters import Count, Counters, Gauge, Row
from quantdrift.sidecar.state.routes import Routes
from quantdrift.sidecar.tap.client import TapClient
from quantdrift.sidecar.tap.wire import HEAD, MessageKind, Rates
from tests.support.sidecar.relay_process import wait

pytestmark = pytest.mark.integration

NOBODY = CallersFile("", "", SystemClock())


def config_of(*names: str, rate: float = 0.0) -> Config:
    """Return a configuration with a stratum for each value of a header."""
    strata = tuple(HeaderStratum(name=name, rate=rate, headers={"x-kind": name}) for name in names)
    return Config(models=(Model(name="digits"),), sampling=SamplingOptions(rate=0.0, header_strata=strata))


class End:
    """The taps' end of a sidecar, and what it was told."""

    def __init__(self, config: Config, before: tuple[Row, ...] = ()) -> None:
        self.settled = LiveConfig.of(config, before)
        self.slot = Counters.create(1, 16).slot(0)
        self.taken: list[int] = []
        self._config = config

    def serve(self, path: Path, ready: threading.Event, ended: threading.Event) -> None:
        """Serve until `ended`."""
        path.unlink(missing_ok=True)
        asyncio.run(self._serve(path, ready, ended))

    def count(self, stratum: str, count: Count = Count.OFFERED) -> int:
        """Return a count of a stratum."""
        return self.slot.count(self.settled.rows.index(Row(stratum)), count)

    async def _serve(self, path: Path, ready: threading.Event, ended: threading.Event) -> None:
        config = self._config
        scope = CaptureScope(
            config.sidecar,
            routes=Routes(config.capture.protocols),
            sampler=Sampler(config.sampling, b"s", ExchangeIds(), 0.0),
            send_frame=lambda stratum, _: self.taken.append(stratum),
            slot=self.slot,
            clock=SystemClock(),
        )
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
            listener.setblocking(False)
            async with TapServer(Gateway(scope), listener, NOBODY, self._rates, self.settled):
                ready.set()
                await asyncio.to_thread(ended.wait)

    def _rates(self) -> Rates:
        return Rates(
            epoch="e",
            salt=b"s",
            sticky="",
            strata=policy_of(self._config.sampling, "e").header_strata,
            rows=self.settled.rows_by_model[""],
            max_exchange_bytes=10_000,
        )


@contextmanager
def serving(path: Path, end: End) -> Iterator[End]:
    """Serve taps in a thread."""
    ready, ended = threading.Event(), threading.Event()
    thread = threading.Thread(target=end.serve, args=(path, ready, ended))
    thread.start()
    try:
        assert ready.wait(10)
        yield end
    finally:
        ended.set()
        thread.join()


def tap_at(path: Path) -> Tap:
    """Return a tap that knows its rates."""
    tap = Tap(str(path), model="digits")
    wait(lambda: tap.is_ready, "the tap hears its rates")
    return tap


def call(tap: Tap, kind: str, n: int = 1) -> None:
    """Have calls recorded."""
    for _ in range(n):
        tap.record({"x": [1]}, {"y": [1]}, headers={"x-kind": kind})


def test_counts_stay_with_their_stratum_over_sidecars(tmp_path: Path) -> None:
    """Rows are another sidecar's: fewer, and in another order. What a stratum is not there for is told apart."""
    path = tmp_path / "tap"
    with serving(path, End(config_of("a", "b", "c"))) as first:
        tap = tap_at(path)
        call(tap, "a", 2)
        wait(lambda: first.count("a") == 2, "the first counts")
    call(tap, "a", 3)
    call(tap, "b", 5)
    call(tap, "c", 7)
    with serving(path, End(config_of("c", "a"))) as second:
        wait(lambda: second.count("c") == 7, "the second counts what the first did not hear of")
        assert (second.count("a"), second.slot.gauge(Gauge.EARLY)) == (3, 5)
        call(tap, "b")
        wait(lambda: second.count("default") == 1, "the second's strata hold")
        tap.close()


def test_a_stratum_that_was_taken_away_keeps_its_row(tmp_path: Path) -> None:
    """An intake that is started anew after a reload is told of it by taps all the same."""
    path = tmp_path / "tap"
    rows = LiveConfig.of(config_of("a", "b")).rows
    with serving(path, End(config_of("a", "b"))):
        tap = tap_at(path)
    call(tap, "b", 4)
    with serving(path, End(config_of(), rows)) as end:
        wait(lambda: end.count("b") == 4, "it is counted")
        tap.close()


def test_what_is_drawn_by_another_sidecars_rates_is_not_sent(tmp_path: Path) -> None:
    """A call that began before, or comes before the rates do, would be told under a row that is not its own."""
    path = tmp_path / "tap"
    with serving(path, End(config_of("a", rate=1.0))):
        tap = tap_at(path)
        chooser = tap._sampler
    with serving(path, End(config_of("b", "a", rate=1.0))) as end:
        wait(lambda: tap._sampler is not chooser, "the tap hears the second's rates")
        now, tap._sampler = tap._sampler, chooser
        call(tap, "a")
        tap._sampler = now
        call(tap, "a", 2)
        wait(lambda: end.count("a", Count.TAKEN) == 3, "all are accounted for")
        row = end.settled.rows.index(Row("a"))
        assert end.taken == [row, row]
        assert end.slot.lost_count(row, Loss.CAPTURE_DOWN) == 1
        tap.close()


def test_a_call_that_is_chosen_and_fails_is_missed_by_its_stratum(tmp_path: Path) -> None:
    """Whatever the failure: a share of a stratum that is gone makes its slices unknown."""
    path, wrong = tmp_path / "tap", {"x": object()}
    bad: Any = 3
    with serving(path, End(config_of("a", rate=1.0))) as end:
        tap = tap_at(path)
        tap.record(wrong, {"y": [1]}, headers={"x-kind": "a"})
        tap.record({"x": [1]}, bad, headers={"x-kind": "a"})
        tap.record({"x": [[1], [1, 2]]}, {"y": [1]}, headers={"x-kind": "a"})
        wait(lambda: end.count("a", Count.TAKEN) == 3, "all are accounted for")
        row = end.settled.rows.index(Row("a"))
        # What has no names is as unreadable as what is no tensor.
        assert end.slot.lost_count(row, Loss.DECODE) == 2
        assert end.slot.lost_count(row, Loss.CAPTURE_ERROR) == 1
        tap.close()


def test_a_server_with_many_open_files_is_heard(tmp_path: Path) -> None:
    """The tap's file may have any number."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < 1200:
        pytest.skip("too few files are allowed here")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 1200), most))
    path = tmp_path / "tap"
    try:
        with serving(path, End(config_of("a"))) as end, ExitStack() as files:
            for _ in range(1050):
                files.enter_context(Path("/dev/null").open("rb"))
            tap = tap_at(path)
            call(tap, "a")
            wait(lambda: end.count("a") == 1, "it is counted")
            tap.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("content", [b"", b"\0\0\0"])
def test_a_frame_that_is_none_ends_its_connection(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """With a word in the log, and nothing else."""
    path = tmp_path / "tap"
    with serving(path, End(config_of("a"))), socket.socket(socket.AF_UNIX) as made:
        made.connect(str(path))
        made.settimeout(10)
        made.sendall(HEAD.pack(1 + len(content), MessageKind.EXCHANGE) + content)
        while made.recv(1 << 16):
            pass
    assert "out of step" in caplog.text
    assert "Traceback" not in caplog.text
    assert struct.error.__name__ not in caplog.text


def test_threads_that_end_leave_nothing_but_their_counts() -> None:
    """Also where nobody listens: a server may have a thread for each request, for months."""
    sender = TapClient("", 1000, lambda *_: None)

    def work() -> None:
        sender.thread_counts().offered["a"] += 1

    for _ in range(100):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    gc.collect()
    assert len(sender._counts) + sender._finished.qsize() <= 3
    assert sender._totals().offered == {"a": 100}


def test_threads_that_end_while_they_are_counted_are_counted_once() -> None:
    """Sums never go back, and end at the truth."""
    sender = TapClient("", 1000, lambda *_: None)
    seen = [0]

    def work() -> None:
        sender.thread_counts().offered["a"] += 1

    for _ in range(300):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        seen.append(sender._totals().offered["a"])
        for thread in threads:
            thread.join()
    assert seen == sorted(seen)
    assert sender._totals().offered == {"a": 1200}


def test_a_tap_that_is_dropped_leaves_no_thread_and_no_connection(tmp_path: Path) -> None:
    """A server that loads a model anew makes another tap; what the first one told arrives."""
    path = tmp_path / "tap"
    with serving(path, End(config_of("a"))) as end:
        tap = tap_at(path)
        thread = tap._sender._thread
        assert thread is not None
        call(tap, "a", 3)
        del tap
        gc.collect()
        wait(lambda: not thread.is_alive(), "its thread ends")
        assert end.count("a") == 3


def test_a_tap_that_is_closed_stays_so_in_a_child(tmp_path: Path) -> None:
    """Neither thread nor connection comes back with a fork."""
    tap = Tap(str(tmp_path / "none"), model="digits")
    tap.close()
    tap._restart_after_fork()
    call(tap, "a")
    assert tap._sender._thread is None
