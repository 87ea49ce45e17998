"""The sidecar's processes are killed and stopped: the port stays open and answers stay right."""

import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from tests.relay_process import Backend, SidecarProcess, running_backend, sidecar, wait
from tests.relay_rig import answer, post

pytestmark = pytest.mark.fault

KIB = 1024


@pytest.fixture
def backend() -> Iterator[Backend]:
    """Return a running backend."""
    with running_backend() as server:
        yield server


class Clients:
    """Clients that connect one after the other, until told to stop."""

    def __init__(self, running: SidecarProcess) -> None:
        self._running = running
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.n_good = 0
        self.n_cut = 0
        self.refused: list[OSError] = []
        self.wrong: list[bytes] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            body = b"%d" % number * 2000
            try:
                client = self._running.connect()
            except OSError as error:
                self.refused.append(error)
                return
            with client:
                got = b""
                try:
                    client.sendall(post(body))
                    client.shutdown(socket.SHUT_WR)
                    while data := client.recv(65_536):
                        got += data
                except ConnectionError:
                    pass  # its worker was killed
            if got == answer(b"to " + body):
                self.n_good += 1
            elif answer(b"to " + body).startswith(got):
                self.n_cut += 1
            else:
                self.wrong.append(got)


def test_a_killed_worker_is_replaced_without_the_port_closing(tmp_path: Path, backend: Backend) -> None:
    """New clients wait for the new worker; of the old one's only what was under way is cut, and nothing is garbled."""
    with sidecar(tmp_path, backend.port) as running, Clients(running) as clients:
        for _ in range(2):
            before = clients.n_good
            wait(lambda before=before: clients.n_good > before + 20, "clients are served")  # type: ignore[misc]
            victim = running.workers[0]
            victim.send_signal(signal.SIGKILL)
            wait(lambda victim=victim: running.workers not in ([], [victim]), "another worker")  # type: ignore[misc]
        before = clients.n_good
        wait(lambda: clients.n_good > before + 20, "clients are served again")
        wait(running.is_ready, "it is ready again")
        assert running.count("quantdrift_sidecar_restarts_total", child="relay") == 2
    assert not clients.refused
    assert not clients.wrong
    assert clients.n_cut <= 2


def test_a_stopped_capture_process_costs_samples_only(tmp_path: Path, backend: Backend) -> None:
    """It hangs: every byte still passes, readiness stays green, and what is not handed over is counted."""
    bounds = {"MAX_EXCHANGE_BYTES": 512 * KIB, "HANDOFF_BYTES": 512 * KIB}
    with sidecar(
        tmp_path,
        backend.port,
        SAMPLING__RATE=1,
        SIDECAR__GRACE_S=4,
        **{f"SIDECAR__{name}": value for name, value in bounds.items()},
    ) as running:
        capture = running.captures[0]
        capture.suspend()
        body = bytes(200 * KIB)
        for _ in range(20):
            assert running.talk(post(body)) == answer(b"to " + body)
        assert running.is_ready()
        assert running.count("quantdrift_sidecar_lost_total", reason="capture_behind") >= 10
        assert running.count("quantdrift_sidecar_queued_bytes") <= 512 * KIB
        assert running.count("quantdrift_sidecar_held_bytes") == 0
        began = time.monotonic()
        assert running.stop() == 0
        assert time.monotonic() - began < 4.5
        assert not capture.is_running()


def test_a_killed_capture_process_is_started_again(tmp_path: Path, backend: Backend) -> None:
    """Bytes pass all the while."""
    with sidecar(tmp_path, backend.port, SAMPLING__RATE=1) as running, Clients(running) as clients:
        wait(lambda: clients.n_good > 20, "clients are served")
        victim = running.captures[0]
        victim.kill()
        wait(
            lambda: running.count("quantdrift_sidecar_restarts_total", child="capture") == 1,
            "its death is seen",
        )
        before = clients.n_good
        wait(lambda: clients.n_good > before + 20, "clients are served")
        wait(lambda: running.captures not in ([], [victim]), "another capture process")
        assert running.is_ready()
    assert not clients.refused
    assert not clients.wrong
    assert clients.n_cut == 0


def test_no_child_outlives_a_killed_supervisor(tmp_path: Path, backend: Backend) -> None:
    """The port is free for the next one."""
    with sidecar(tmp_path, backend.port) as running:
        family = running.root.children()
        assert len(family) == 2
        running.process.kill()
        running.process.wait()
        wait(lambda: not any(child.is_running() for child in family), "all children have ended")
        with pytest.raises(ConnectionRefusedError):
            running.connect()
