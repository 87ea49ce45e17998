"""The sidecar's processes are killed and stopped: the port stays open and answers stay right."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Self

import psutil
import pytest

from quantdrift.cli.config_summary import (
    ADMIN_BYTES,
    CAPTURE_BYTES,
    SHARED_BYTES,
    SUPERVISOR_BYTES,
    WAITING_BYTES,
    WORKER_BYTES,
    memory_bytes,
)
from quantdrift.core.config import Config, Sidecar
from quantdrift.core.config.schema import KIB, MIB
from quantdrift.core.errors import OperatorError
from quantdrift.core.process import heartbeat
from quantdrift.core.process.kept_config import keep, load_or_kept
from tests.support.commands import started
from tests.support.exposed_secrets import exposed
from tests.support.sidecar.raw_exchanges import REQUEST, RESPONSE
from tests.support.sidecar.relay_process import Backend, SidecarProcess, alive, free_port, sidecar, wait
from tests.support.sidecar.relay_rig import answer, post
from tests.support.sidecar.time_slices import time_slice_ns

pytestmark = pytest.mark.fault

CLOSE = b"Connection: close\r\n"
MODELS = '[{"name": "digits"}]'


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
                except OSError:
                    pass  # its worker was killed: reset, or not connected any more
            got = got.replace(CLOSE, b"", 1)  # of a relay worker that drains
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
        assert running.count("quantdrift_sidecar_restarts_total", child="relay", reason="SIGKILL") == 2
    assert not clients.refused
    assert not clients.wrong
    assert clients.n_cut <= 2


@pytest.mark.release
def test_a_configuration_that_was_changed_meanwhile_keeps_no_worker_down(
    tmp_path: Path, backend: Backend
) -> None:
    """Whatever becomes of the file, a worker that is replaced serves as the one before."""
    with sidecar(tmp_path, backend.port) as running:
        (tmp_path / "config.toml").write_text("half of a line")
        victim = running.workers[0]
        victim.send_signal(signal.SIGKILL)
        wait(lambda: running.workers not in ([], [victim]), "another worker")
        wait(running.is_ready, "it is ready again")
        assert running.talk(post(b"x")) == answer(b"to x")


def test_a_stopped_worker_is_seen_and_replaced_without_the_port_closing(
    tmp_path: Path, backend: Backend
) -> None:
    """/livez and /readyz are red while no worker accepts; clients that connected meanwhile are served by the next one."""
    with sidecar(tmp_path, backend.port) as running:
        victim = running.workers[0]
        wait(lambda: running.talk(post(b"x")) == answer(b"to x"), "it serves")
        victim.suspend()
        with running.connect() as client:
            client.sendall(post(b"early"))
            wait(lambda: running.get("/livez")[0] == running.get("/readyz")[0] == 503, "both are red")
            assert running.workers == [victim]
            assert client.recv(1000) == answer(
                b"to early"
            )  # by the new worker, from the same listening socket
        assert not alive(victim)
        wait(lambda: running.get("/livez")[0] == 200, "it is live again")
        assert running.is_ready()
        assert running.count("quantdrift_sidecar_restarts_total", child="relay", reason="hung") == 1
        assert running.count("quantdrift_sidecar_restarts_total") == 1


@pytest.mark.release
def test_one_stopped_worker_of_two_leaves_the_sidecar_live(tmp_path: Path, backend: Backend) -> None:
    """Its clients wait until it is replaced, all others are served at once."""
    with (
        contextlib.ExitStack() as open_clients,
        sidecar(tmp_path, backend.port, SIDECAR__WORKERS=2) as running,
    ):
        wait(lambda: len(running.workers) == 2, "two workers")
        workers = running.workers

        def both_accept() -> bool:
            open_clients.enter_context(running.connect())
            return all(
                any(c.status == "ESTABLISHED" for c in each.net_connections("tcp")) for each in workers
            )

        wait(both_accept, "both workers accept")
        victim = workers[0]
        victim.suspend()

        def is_replaced() -> bool:
            assert running.get("/livez")[0] == 200
            return not alive(victim)

        with Clients(running) as clients:
            wait(is_replaced, "the stopped worker is replaced")
            wait(lambda: clients.n_good > 20, "clients are served")
        assert not clients.refused
        assert not clients.wrong


def test_a_busy_loop_is_a_hang_as_soon_as_it_has_used_processor_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that computes without a heartbeat is replaced; processor time shows that it was not merely waiting."""
    monkeypatch.setattr(heartbeat, "_LOOP_CPU_S", 0.5)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        watch = heartbeat.HangWatch(_Process(process), lambda: 1)

        def hangs() -> bool:
            return "of processor time" in watch.look(heartbeat.LOOK_S, hung_s=1.0)

        wait(hangs, "the loop is seen")
        process.kill()


class _Process:
    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.pid: int | None = process.pid


def test_a_stopped_capture_process_costs_samples_only(tmp_path: Path, backend: Backend) -> None:
    """It hangs: every byte still passes, readiness stays green, and what is not handed over is counted."""
    bounds = {"MAX_EXCHANGE_BYTES": 512 * KIB, "MAX_HELD_BYTES": 2 * 512 * KIB}
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
        assert time.monotonic() - began < 8  # without the bound it would wait for ever
        assert not alive(capture)


@pytest.mark.release
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


def test_what_a_killed_capture_process_had_in_hand_is_counted_as_lost(
    tmp_path: Path, backend: Backend
) -> None:
    """Its queue dies with it: a process that is killed again and again must not look like one that loses nothing."""
    backend.reply = lambda _: json.dumps(RESPONSE).encode()
    with sidecar(tmp_path, backend.port, SAMPLING__RATE=1, MODELS=MODELS) as running:
        ask = post(json.dumps(REQUEST).encode())
        running.talk(ask)
        wait(lambda: running.count("quantdrift_sidecar_queued_bytes") > 0, "the first waits for the stream")
        one_bytes = running.count("quantdrift_sidecar_queued_bytes")
        for _ in range(6):
            running.talk(ask)
        wait(lambda: running.count("quantdrift_sidecar_queued_bytes") > 6.5 * one_bytes, "all wait")
        running.captures[0].kill()
        wait(lambda: running.count("quantdrift_sidecar_lost_total") > 0, "its successor counts them")
        assert running.count("quantdrift_sidecar_lost_total", reason="process_ended") == 7
        assert running.count("quantdrift_sidecar_taken_total") == 7


@pytest.mark.release
def test_what_a_killed_worker_had_in_hand_is_counted_as_lost(tmp_path: Path, backend: Backend) -> None:
    """Its connections are cut, and with them the exchanges under way."""
    with sidecar(tmp_path, backend.port, SAMPLING__RATE=1) as running, running.connect() as client:
        client.sendall(post(b"wait"))
        wait(lambda: backend.n_waiting == 1, "the backend works")
        victim = running.workers[0]
        victim.kill()
        wait(lambda: running.workers not in ([], [victim]), "another worker")
        wait(running.is_ready, "it is ready")
        assert running.count("quantdrift_sidecar_lost_total", reason="process_ended") == 1
        assert running.count("quantdrift_sidecar_taken_total") == 1


def test_a_flood_stays_within_the_memory_limit_that_config_check_prints(
    tmp_path: Path, backend: Backend
) -> None:
    """Large sampled requests of the costliest kind, no stream anywhere, and the capture process stopped for a while; at the defaults."""
    bounds = Sidecar()
    backend.reply = lambda _: json.dumps(RESPONSE).encode()
    n_values = 250_000
    tensor = {"name": "x", "shape": [n_values], "datatype": "BYTES", "data": ["abc"] * n_values}
    request = post(json.dumps({"inputs": [tensor]}, separators=(",", ":")).encode())
    assert bounds.max_exchange_bytes // 2 < len(request) < bounds.max_exchange_bytes
    with sidecar(tmp_path, backend.port, SAMPLING__RATE=1, MODELS=MODELS) as running:
        wait(lambda: len(running.captures) == len(running.admins) == 1, "all processes run")
        family = [running.root, running.workers[0], running.captures[0], running.admins[0]]

        def flood(n_each: int) -> None:
            clients = [
                threading.Thread(target=lambda: [running.talk(request) for _ in range(n_each)])
                for _ in range(16)
            ]
            for client in clients:
                client.start()
            for client in clients:
                client.join()

        flood(4)
        running.captures[0].suspend()
        flood(2)
        running.captures[0].resume()
        flood(4)
        wait(
            lambda: running.count("quantdrift_sidecar_lost_total", reason="queue_full") > 0, "it was a flood"
        )
        peaks = [_peak_bytes(process.pid) for process in family]
        files = _mapped_bytes(family)
        assert [*running.workers, *running.captures, *running.admins] == family[1:]
        assert running.count("quantdrift_sidecar_taken_total") == 160
    limit_bytes = memory_bytes(Config(sidecar=bounds))
    supervisor_bytes, relay_bytes, capture_bytes, admin_bytes = peaks
    assert limit_bytes <= 256 * MIB
    assert sum(peaks) + files < limit_bytes
    assert files < SHARED_BYTES
    assert supervisor_bytes < SUPERVISOR_BYTES
    assert admin_bytes < ADMIN_BYTES
    assert relay_bytes < WORKER_BYTES + WAITING_BYTES + bounds.held_bytes + bounds.handoff_bytes
    assert capture_bytes < CAPTURE_BYTES + bounds.queue_bytes + 20 * bounds.max_exchange_bytes


def _peak_bytes(pid: int) -> int:
    """Return the most memory that a process ever had resident, without the pages of files."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    kib = {
        name: int(value.split()[0])
        for name, _, value in (line.partition(":") for line in lines)
        if value.endswith("kB")
    }
    return (kib["VmHWM"] - kib["RssFile"] - kib["RssShmem"]) * KIB


def _mapped_bytes(processes: list[psutil.Process]) -> int:
    """Return the memory of the files that processes have mapped, each page once: what is resident in any of them."""
    most: dict[tuple[str, str], int] = {}
    for process in processes:
        where, resident = None, 0
        for line in Path(f"/proc/{process.pid}/smaps").read_text().splitlines():
            name, *values = line.split()
            if not name.endswith(":"):
                where = (values[4], values[1]) if len(values) > 4 and values[4].startswith("/") else None
            elif name == "Rss:":
                resident = int(values[0])
            elif name == "Anonymous:" and where is not None:
                most[where] = max(most.get(where, 0), resident - int(values[0]))
    return sum(most.values()) * KIB


def test_relay_workers_alone_outlive_a_killed_supervisor(tmp_path: Path, backend: Backend) -> None:
    """They serve, new clients too; a SIGTERM ends them as ever, and then the port is free."""
    with sidecar(tmp_path, backend.port) as running:
        (worker,) = running.workers
        others = [child for child in running.root.children() if child != worker]
        assert len(others) == 2
        running.process.kill()
        running.process.wait()
        wait(lambda: not any(map(alive, others)), "all others have ended")
        assert running.talk(post(b"x")) == answer(b"to x")
        worker.terminate()
        wait(lambda: not alive(worker), "the worker has ended")
        with pytest.raises(ConnectionRefusedError):
            running.connect()


@pytest.mark.release
def test_a_secret_file_that_cannot_be_read_stops_capture_and_not_the_relay(
    tmp_path: Path, backend: Backend
) -> None:
    """As while a secret is mounted or rotated: what needs it starts once it can be read."""
    token = tmp_path / "token"
    options = {"INTAKE__LISTEN": f"127.0.0.1:{free_port()}", "INTAKE__TOKEN_FILE": str(token)}
    with sidecar(tmp_path, backend.port, **options) as running:
        assert running.talk(post(b"x")) == answer(b"to x")
        assert running.captures == []
        token.write_text("a-token-of-sixteen")
        wait(lambda: len(running.captures) == 1, "the capture process")
        wait(lambda: len(running.root.children()) == 4, "the intake process")
        assert running.talk(post(b"y")) == answer(b"to y")


@pytest.mark.release
def test_a_killed_supervisor_costs_no_request(tmp_path: Path, backend: Backend) -> None:
    """Clients are served all the time; the next supervisor takes the port over, and what has begun is answered."""
    options = {"SIDECAR__WORKERS": 2, "SIDECAR__DRAIN_DELAY_S": 2}
    with sidecar(tmp_path, backend.port, **options) as running, Clients(running) as clients:

        def served(n: int) -> None:
            before = clients.n_good
            wait(lambda: clients.n_good > before + n, "clients are served")

        for _ in range(2):
            old = running.workers
            backend.go_on.clear()
            backend.n_waiting = 0
            with running.connect() as waiting:
                waiting.sendall(post(b"wait"))
                wait(lambda: backend.n_waiting == 1, "a request is at the backend")
                running.process.kill()
                running.process.wait()
                served(50)
                running.start()
                wait(running.is_ready, "the next one is ready")
                served(50)
                backend.go_on.set()
                # Its worker may have begun to drain, and then says that the connection ends.
                assert waiting.recv(KIB).replace(b"Connection: close\r\n", b"") == answer(b"to wait")
            wait(lambda old=old: not any(map(alive, old)), "the old workers have ended")  # type: ignore[misc]
            served(50)
    assert not clients.refused
    assert not clients.wrong
    assert clients.n_cut == 0


BROKEN = '[sampling]\nrate = "often"\n'


def test_a_broken_configuration_closes_no_port(tmp_path: Path, backend: Backend) -> None:
    """It is refused while the sidecar runs, and after its supervisor was killed: the last accepted one goes on.

    So does one without its file; a mended one takes effect.
    """
    with (
        (tmp_path / "log").open("w+") as log,
        sidecar(tmp_path, backend.port, SIDECAR__WORKERS=2, stderr=log.fileno()) as running,
        Clients(running) as clients,
    ):

        def refuses(n: float) -> bool:
            return running.count("quantdrift_sidecar_config_refused") == n

        def restarted() -> None:
            before = clients.n_good
            running.process.kill()
            running.process.wait()
            wait(lambda: clients.n_good > before + 50, "clients are served")
            running.start()
            wait(running.is_ready, "the next one is ready")

        running.config.write_text("[sampling]\nrate = 0.5\n")
        wait(
            lambda: running.count("quantdrift_sidecar_reloads_total", result="taken_over") == 1, "it is taken"
        )
        running.config.write_text(BROKEN)
        wait(lambda: refuses(1), "it is refused")
        for _ in range(2):
            restarted()
            wait(lambda: refuses(1), "it is still refused")
        running.config.unlink()
        restarted()
        running.config.write_text("[sampling]\nrate = 0.25\n")
        wait(lambda: refuses(0), "the mended one is in effect")
    assert not clients.refused
    assert not clients.wrong
    said = (tmp_path / "log").read_text()
    assert said.count("The last one that was accepted is used instead, that of") == 3
    assert "sampling.rate" in said


def test_what_is_kept_of_a_configuration_is_its_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the environment, where credentials may be; nobody else can read it, and the environment of today counts."""
    monkeypatch.setenv("QUANTDRIFT_STATE_DIRECTORY", str(tmp_path / "state"))
    monkeypatch.setenv("QUANTDRIFT__STREAM__URL", "nats://user:secret@127.0.0.1:1")
    path = tmp_path / "config.toml"
    path.write_text("[sampling]\nrate = 0.5\n")
    keep(path)
    (file,) = (tmp_path / "state").iterdir()
    assert "secret" not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    path.write_text("[")
    monkeypatch.setenv("QUANTDRIFT__STREAM__URL", "nats://127.0.0.1:2")
    config, why = load_or_kept(path)
    assert (config.sampling.rate, config.stream.url) == (0.5, "nats://127.0.0.1:2")
    assert "cannot be read" in why
    file.write_text("{}")
    with pytest.raises(OperatorError, match="cannot be read"):
        load_or_kept(path)


def test_a_first_start_with_a_broken_configuration_is_refused(tmp_path: Path) -> None:
    """There is nothing to go on with."""
    (tmp_path / "config.toml").write_text(BROKEN)
    done = started("sidecar", directory=tmp_path, QUANTDRIFT_STATE_DIRECTORY=str(tmp_path / "state"))
    assert done.returncode == 2
    assert "sampling.rate" in done.stderr


@pytest.mark.release
def test_a_stopped_worker_of_a_killed_supervisor_is_killed(tmp_path: Path, backend: Backend) -> None:
    """It would keep the port in use for ever."""
    with sidecar(tmp_path, backend.port) as running:
        (worker,) = running.workers
        worker.suspend()
        running.process.kill()
        running.process.wait()
        running.start()
        wait(running.is_ready, "the next one is ready")
        assert running.talk(post(b"x")) == answer(b"to x")
        wait(lambda: not alive(worker), "the stopped worker has ended")


def test_the_end_of_the_admin_process_costs_no_request_and_no_count(tmp_path: Path, backend: Backend) -> None:
    """Killed while traffic passes: every request is answered, probes too, and the metrics are the same afterwards."""
    probes = free_port()
    with sidecar(tmp_path, backend.port, SIDECAR__PROBES=f"127.0.0.1:{probes}") as running:
        (worker,) = running.workers
        for n in range(5):
            assert running.talk(post(b"%d" % n)) == answer(b"to %d" % n)
        assert running.get("/pause")[0] == 200
        assert running.switch("pause").returncode == 0
        for n in range(3):
            (admin,) = running.admins
            admin.kill()
            assert running.talk(post(b"%d" % n)) == answer(b"to %d" % n)
            with urllib.request.urlopen(f"http://127.0.0.1:{probes}/readyz", timeout=10) as said:
                assert said.status == 200
            wait(lambda: running.get("/metrics")[0] == 200, "the admin port answers again")
        assert running.count("quantdrift_sidecar_offered_total") == 8
        assert running.count("quantdrift_sidecar_restarts_total", child="admin") == 3
        assert running.count("quantdrift_sidecar_paused", model="*") == 1
        assert running.workers == [worker]
        done = running.switch("resume")  # the socket is that of the new process
        assert done.returncode == 0, done.stderr
        assert running.count("quantdrift_sidecar_paused", model="*") == 0


@pytest.mark.release
def test_strangers_at_the_admin_port_cost_the_supervisor_nothing(tmp_path: Path, backend: Backend) -> None:
    """Unfinished heads, and requests that are never read: its memory stays, and it uses no processor time for them."""
    probes = free_port()
    with sidecar(tmp_path, backend.port, SIDECAR__PROBES=f"127.0.0.1:{probes}") as running:
        before = running.root.memory_info().rss
        busy_s = sum(running.root.cpu_times()[:2])
        for port, sent in (
            (running.admin_port, b"GET /livez HTTP/1.1\r\nX: " + bytes(15_000)),
            (running.admin_port, b"GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n" * 400),
            (probes, b"GET /livez HTTP/1.1\r\nX: " + bytes(1000)),
        ):
            with contextlib.ExitStack() as stack:
                for _ in range(150):
                    client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
                    client.settimeout(0.1)
                    with contextlib.suppress(OSError):
                        client.sendall(sent)
                with urllib.request.urlopen(f"http://127.0.0.1:{probes}/readyz", timeout=10) as said:
                    assert said.status == 200
        assert running.root.memory_info().rss - before < 4 * 2**20
        assert sum(running.root.cpu_times()[:2]) - busy_s < 1


@pytest.mark.release
def test_logs_that_nobody_reads_hold_nobody_up(tmp_path: Path, backend: Backend) -> None:
    """The pipe of its logs is full from the start, as where a container's log reader has stopped."""
    reader, writer = os.pipe()
    try:
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, bytes(1 << 12))
        os.set_blocking(writer, True)
        with sidecar(tmp_path, backend.port, stderr=writer, TELEMETRY__LOG_LEVEL="debug") as running:
            for _ in range(3):
                assert running.talk(post(b"x")) == answer(b"to x")
            (worker,) = running.workers
            worker.kill()
            wait(lambda: running.workers not in ([], [worker]), "a new worker")
            assert running.talk(post(b"y")) == answer(b"to y")
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.release
def test_no_secret_is_in_the_environment_of_a_process_that_the_sidecar_starts(
    tmp_path: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each child gets what it needs by a descriptor, also after `kill -9`; what the supervisor was given reaches no other.

    All that is not on the serving path gives way to it where processors are scarce.
    """
    secrets = {
        "QUANTDRIFT_DSN": "postgresql://u:canary-of-postgres@127.0.0.1/d",
        "QUANTDRIFT_HMAC_KEY": "canary-of-hashes",
        "QUANTDRIFT_INTAKE_TOKEN": "canary-of-the-intake",
        "QUANTDRIFT_REFERENCE_TOKEN": "canary-of-a-reference",
        "QUANTDRIFT_SAMPLING_SALT": "canary-of-the-salt",
    }
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    port = free_port()
    url = f"nats://u:canary-of-nats@127.0.0.1:{free_port()}"
    canaries = [*secrets.values(), "canary-of-nats", "canary-of-postgres"]

    def answer_of_intake(token: str) -> int:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/exchanges", b"{}", {"Authorization": f"Bearer {token}"}
        )
        with contextlib.suppress(OSError):
            try:
                with urllib.request.urlopen(request, timeout=5) as response:
                    return int(response.status)
            except urllib.error.HTTPError as error:
                with error:
                    return error.code
        return 0

    with sidecar(tmp_path, backend.port, INTAKE__LISTEN=f"127.0.0.1:{port}", STREAM__URL=url) as running:
        for _ in range(2):
            wait(lambda: len(running.root.children()) == 4, "all processes")
            wait(
                lambda: answer_of_intake("canary-of-the-intake") not in {0, 401}, "the intake knows its token"
            )
            assert answer_of_intake("another") == 401
            wait(lambda: not exposed(running.root.children(recursive=True), canaries), "no secret is exposed")
            killed = running.root.children()
            for child in killed:
                child.kill()
            psutil.wait_procs(killed, timeout=10)
        wait(lambda: len(running.captures) == len(running.admins) == len(running.workers) == 1, "all")
        (worker,), (admin,), (capture,) = running.workers, running.admins, running.captures
        wait(lambda: running.root.nice() < admin.nice() == capture.nice(), "the processes behind give way")
        assert worker.nice() == running.root.nice()
        if (usual_ns := time_slice_ns(capture.pid)) and os.sched_getscheduler(worker.pid) == os.SCHED_OTHER:
            assert (time_slice_ns(worker.pid) or 0) < usual_ns, "the worker runs soon after it wakes up"
