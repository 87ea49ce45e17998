"""Taps in real server processes: whatever the caller does, it is not held up, and what it told arrives."""

import asyncio
import contextlib
import json
import logging
import multiprocessing
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from quantdrift import Tap
from quantdrift.core.codec import decode_exchange
from quantdrift.core.config.schema import Stream
from quantdrift.core.records import Exchange, Tensor, Way
from quantdrift.core.stream.connection import Queue
from tests.support.sidecar.relay_process import SidecarProcess, sidecar, wait

pytestmark = pytest.mark.integration

_COUNTS = ("offered", "taken", "published")
_REASONS = ("decode", "capture_behind", "capture_down")
STRATA = '[{"name": "faint", "rate": 1.0, "headers": {"x-scanner": "faint"}}]'


class Pod:
    """A sidecar with a tap socket and without a relay."""

    def __init__(self, running: SidecarProcess, path: Path, stream: Stream) -> None:
        self.running, self.path, self._stream = running, path, stream
        self._stored: list[Exchange] = []
        self._before: dict[tuple[Any, ...], float] = {}

    def tap(self, **options: Any) -> Tap:
        """Return a tap that knows its rates."""
        made = Tap(str(self.path), model="digits", **options)
        wait(lambda: made.is_ready, "the tap hears its rates")
        return made

    def count(self, name: str, **labels: str) -> float:
        """Return by how much a counter of the sidecar has risen."""
        return self._read(name, **labels) - self._before.get((name, *sorted(labels.items())), 0)

    def begin(self) -> None:
        """Count from here on."""
        self.stored().clear()
        self._before = {
            (name, *sorted(labels.items())): self._read(name, **labels)
            for name, labels in (
                *((name, {"stratum": stratum}) for name in _COUNTS for stratum in ("faint", "default")),
                *(("lost", {"stratum": "faint", "reason": reason}) for reason in _REASONS),
                ("observer_errors", {}),
                ("tap_connections", {}),
            )
        }

    def counts(self, stratum: str) -> tuple[float, float, float]:
        """Return offered, taken and published of a stratum."""
        offered, taken, published = (self.count(name, stratum=stratum) for name in _COUNTS)
        return offered, taken, published

    def _read(self, name: str, **labels: str) -> float:
        return self.running.count(f"quantdrift_sidecar_{name}_total", **labels)

    def stored(self) -> list[Exchange]:
        """Return everything that the stream was given so far."""

        async def read() -> list[bytes]:
            queue = await Queue.connect(self._stream, client_name="test")
            consumer = await queue.consumer("exchange", ack_wait_s=60)
            found = await consumer.fetch(1000, max_bytes=10**7, timeout_s=0.5)
            await queue.close()
            return [delivery.data for delivery in found]

        self._stored += [decode_exchange(data) for data in asyncio.run(read())]
        return self._stored


@pytest.fixture(scope="module")
def running_pod(tmp_path_factory: pytest.TempPathFactory, nats_url: str) -> Iterator[Pod]:
    """Return a pod that takes everything of `faint` and nothing else."""
    stream = Stream(url=nats_url, name=f"t-{secrets.token_hex(6)}")
    with tempfile.TemporaryDirectory(prefix="qd-") as directory:
        path = Path(directory) / "tap"
        with sidecar(
            tmp_path_factory.mktemp("tap"),
            0,
            SIDECAR__LISTEN="",
            SIDECAR__BACKEND="127.0.0.1:1",
            STREAM__URL=nats_url,
            STREAM__NAME=stream.name,
            INTAKE__TAP=str(path),
            CAPTURE__HEADERS='["x-scanner"]',
            CAPTURE__PARAMETERS='["language"]',
            SAMPLING__RATE=0,
            SAMPLING__HEADER_STRATA=STRATA,
            SAMPLING__MAX_EXCHANGES_PER_S=100_000,
            MODELS='[{"name": "digits"}]',
        ) as running:
            yield Pod(running, path, stream)
        assert not path.exists()


@pytest.fixture
def pod(running_pod: Pod) -> Pod:
    """Return the pod, counting anew."""
    running_pod.begin()
    return running_pod


FAINT = {"x-scanner": "faint"}


def test_recorded_calls_arrive_and_every_call_is_counted(pod: Pod) -> None:
    """Arrays, torch tensors, BF16, text and numbers; exact counts of what was not taken, too."""
    tap = pod.tap(version="int8-7")
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    half = torch.tensor([1.0, -2.5], dtype=torch.bfloat16)
    for _ in range(500):
        tap.record({"x": values}, {"y": values})
    tap.record(
        {"x": values[:, ::-1], "text": ["ab", "ü"]},
        {"y": torch.from_numpy(values), "h": half, "n": 3},
        headers=FAINT | {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"},
        parameters={"language": "de"},
    )
    tap.close()
    wait(lambda: pod.counts("faint") == (1, 1, 1), "the taken one is published")
    wait(lambda: pod.counts("default") == (500, 0, 0), "the others are counted")
    wait(lambda: pod.count("tap_connections") == 1, "the connection of the tap is counted")
    (found,) = pod.stored()
    assert (found.model, found.version, found.sampling.pi, found.trace) == (
        "digits",
        "int8-7",
        1.0,
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    )
    assert found.attributes == {"header.x-scanner": "faint", "parameter.language": "de"}
    assert (found.way, found.caller) == (Way.TAP, f"uid {os.geteuid()}")
    assert found.inputs == (
        Tensor(name="x", datatype="FP32", shape=(2, 3), data=values[:, ::-1].tobytes()),
        Tensor(name="text", datatype="BYTES", shape=(2,), data=b"\2\0\0\0ab\2\0\0\0\xc3\xbc"),
    )
    assert [(one.name, one.datatype, one.shape) for one in found.outputs] == [
        ("y", "FP32", (2, 3)),
        ("h", "BF16", (2,)),
        ("n", "INT64", ()),
    ]
    assert found.outputs[1].data == b"\x80\x3f\x20\xc0"


def test_arrays_may_be_written_to_after_the_call(pod: Pod) -> None:
    """They were copied."""
    tap = pod.tap()
    values = np.zeros(1000, dtype=np.float32)
    for n in range(50):
        values[:] = n
        tap.record({"x": values}, {"y": [n]}, headers=FAINT)
    values[:] = -1
    tap.close()
    wait(lambda: pod.counts("faint") == (50, 50, 50), "all are published")
    for one in pod.stored():
        (n,) = np.frombuffer(one.outputs[0].data, "<i8")
        assert (np.frombuffer(one.inputs[0].data, "<f4") == n).all()


def test_threads_and_tasks_lose_nothing(pod: Pod) -> None:
    """Eight threads that end, and a loop: every call is counted once, and each taken one arrives once."""
    tap = pod.tap()

    def work(part: int) -> None:
        for n in range(500):
            tap.record({"x": [part * 1000 + n]}, {"y": [0]}, headers=FAINT if n % 10 == 0 else {})

    async def serve() -> None:
        await asyncio.gather(*(asyncio.to_thread(work, 8 + part) for part in range(2)))
        work(10)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    asyncio.run(serve())
    tap.close(5.0)
    wait(lambda: pod.counts("faint") == (550, 550, 550), "all are published")
    wait(lambda: pod.counts("default") == (4950, 0, 0), "all are counted")
    told = [int(np.frombuffer(one.inputs[0].data, "<i8")[0]) for one in pod.stored()]
    assert sorted(told) == sorted(part * 1000 + n for part in range(11) for n in range(0, 500, 10))


def _child(tap: Tap, n: int) -> None:
    until = time.monotonic() + 20
    while not tap.is_ready and time.monotonic() < until:
        tap.record({"x": [0]}, {"y": [0]})
        threading.Event().wait(0.01)
    for _ in range(n):
        tap.record({"x": [os.getpid()]}, {"y": [0]}, headers=FAINT)
    tap.close(5.0)
    os._exit(0)


def test_a_fork_goes_on_by_itself(pod: Pod) -> None:
    """Parent and two children tell over connections of their own; the ids are distinct."""
    tap = pod.tap()
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_child, args=(tap, 20)) for _ in range(2)]
    for child in children:
        child.start()
    for _ in range(20):
        tap.record({"x": [os.getpid()]}, {"y": [0]}, headers=FAINT)
    for child in children:
        child.join()
    tap.close(5.0)
    wait(lambda: pod.counts("faint") == (60, 60, 60), "all are published")
    found = pod.stored()
    assert len({one.id for one in found}) == len(found) == 60
    assert len({bytes(one.inputs[0].data) for one in found}) == 3


@pytest.mark.parametrize(
    "value",
    [object(), np.array([object()]), {"a": 1}, np.zeros(2, dtype="c16"), np.zeros(2, dtype="M8[s]"), None],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_tensor_is_counted_and_nothing_else(pod: Pod, value: Any) -> None:
    """The caller sees no error, and the next call is taken in."""
    tap = pod.tap()
    tap.record({"x": value}, {"y": [1]}, headers=FAINT)
    tap.record({"x": [1]}, {"y": [1]}, headers=FAINT)
    tap.close()
    wait(lambda: pod.counts("faint") == (2, 2, 1), "one arrives")
    wait(lambda: pod.count("lost", stratum="faint", reason="decode") == 1, "the other is counted")


def test_nonsense_never_reaches_the_caller(pod: Pod, caplog: pytest.LogCaptureFixture) -> None:
    """Arguments of every wrong kind are errors of the tap's own, counted; what has no names is called so."""
    tap = pod.tap()
    wrong: Any = object()
    with caplog.at_level(logging.WARNING):
        tap.record(wrong, wrong, headers=FAINT)
    assert "inputs are no dictionary of tensors by name" in caplog.text
    tap.record({}, {}, headers=wrong)
    tap.close()
    wait(lambda: pod.count("observer_errors") >= 1, "it is counted")


def test_a_sidecar_that_is_not_there_costs_nothing(tmp_path: Path) -> None:
    """No socket, or none configured: calls return, memory does not grow, and closing does not wait."""
    for path in (str(tmp_path / "none"), ""):
        tap = Tap(path, model="digits")
        values = np.zeros(100_000)
        before = psutil.Process().memory_info().rss
        for _ in range(2000):
            tap.record({"x": values}, {"y": values}, headers=FAINT)
        assert psutil.Process().memory_info().rss - before < 20 << 20
        begin = time.monotonic()
        tap.close(10.0)
        assert time.monotonic() - begin < 8
        tap.record({"x": values}, {"y": values})


def test_a_tap_that_reaches_no_sidecar_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its socket and the reason; without a path it says that it records nothing."""
    monkeypatch.setattr("quantdrift.sidecar.tap.client._WARN_S", 0.2)
    monkeypatch.setattr("quantdrift.sidecar.tap.client._MAX_RETRY_S", 0.1)
    monkeypatch.delenv("QUANTDRIFT_TAP", raising=False)
    absent = tmp_path / "absent"
    away = f"no sidecar answers at the tap's socket {absent} (No such file or directory): nothing is recorded until one does"
    unset = "no socket was given and QUANTDRIFT_TAP is not set: the tap records nothing"
    with contextlib.closing(Tap(str(absent), model="digits")):
        wait(lambda: bool(caplog.messages), "it warns")
        with contextlib.closing(Tap(model="digits")):
            assert caplog.messages == [f"{away}; see intake.tap", unset]


def test_a_stopped_sidecar_holds_nobody_up_and_bounds_memory(pod: Pod) -> None:
    """What does not fit is lost, counted as `capture_behind` once the sidecar goes on."""
    tap = pod.tap(limit_bytes=4 << 20)
    intake = next(
        c for c in pod.running.root.children() if "quantdrift.sidecar.intake.process" in c.cmdline()
    )
    intake.send_signal(signal.SIGSTOP)
    try:
        values = np.zeros(100_000, dtype=np.float32)
        before = psutil.Process().memory_info().rss
        for _ in range(200):
            tap.record({"x": values}, {"y": [0]}, headers=FAINT)
        assert psutil.Process().memory_info().rss - before < 16 << 20
    finally:
        intake.send_signal(signal.SIGCONT)
    wait(lambda: pod.count("offered", stratum="faint") == 200, "all are counted")
    tap.close(5.0)

    def accounted() -> bool:
        lost = sum(
            pod.count("lost", stratum="faint", reason=reason) for reason in ("capture_behind", "capture_down")
        )
        return lost > 100 and lost + pod.count("published", stratum="faint") == 200

    wait(accounted, "each is published or lost")


def test_a_killed_intake_is_found_again(pod: Pod) -> None:
    """Its successor is told of everything that was not acknowledged; the tap takes calls in again."""
    tap = pod.tap()
    tap.record({"x": [1]}, {"y": [1]}, headers=FAINT)
    wait(lambda: pod.counts("faint") == (1, 1, 1), "the first arrives")
    intake = next(
        c for c in pod.running.root.children() if "quantdrift.sidecar.intake.process" in c.cmdline()
    )
    intake.kill()
    intake.wait()
    n_calls = 1

    def arrives() -> bool:
        nonlocal n_calls
        n_calls += 1
        tap.record({"x": [1]}, {"y": [1]}, headers=FAINT)
        return pod.count("published", stratum="faint") >= 2

    wait(arrives, "another arrives")
    tap.close(5.0)
    wait(lambda: pod.count("offered", stratum="faint") == n_calls, "all calls are counted")


def test_a_server_may_end_without_closing(pod: Pod) -> None:
    """What it told of last is sent as the interpreter ends."""
    program = (
        "import sys, time\nfrom quantdrift import Tap\n"
        "tap = Tap(sys.argv[1], model='digits')\n"
        "while not tap.is_ready: time.sleep(0.01)\n"
        "for n in range(30): tap.record({'x': [n]}, {'y': [n]}, headers={'x-scanner': 'faint'})\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(pod.path)], check=True, timeout=60)
    assert ended.returncode == 0
    wait(lambda: pod.counts("faint") == (30, 30, 30), "all arrive")


def test_a_tap_needs_neither_numpy_nor_torch() -> None:
    """A server pays for what it uses."""
    program = "import sys; from quantdrift import Tap; print(json.dumps(list(sys.modules)))"
    output = subprocess.run(
        [sys.executable, "-c", f"import json; {program}"], capture_output=True, text=True, check=True
    ).stdout
    loaded = {name.partition(".")[0] for name in json.loads(output)}
    assert not loaded & {"numpy", "torch", "aiohttp", "nats", "opentelemetry", "asyncio", "scipy"}
