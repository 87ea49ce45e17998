"""The sidecar's processes: started, asked, drained and ended as in a pod."""

import contextlib
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.sidecar.relay_process import Backend, free_port, sidecar, wait
from tests.support.sidecar.relay_rig import answer, post

pytestmark = pytest.mark.integration


def test_a_sidecar_serves_and_logs_it(tmp_path: Path, backend: Backend) -> None:
    """Bytes pass, /livez and /readyz are well without a stream, and /metrics has the counts by stratum."""
    strata = '[{"name": "faint", "rate": 1.0, "headers": {"x-scanner": "faint"}}]'
    with sidecar(
        tmp_path,
        backend.port,
        SAMPLING__RATE=0,
        SAMPLING__HEADER_STRATA=strata,
        SIDECAR__WORKERS=2,
    ) as running:
        for n in range(10):
            assert running.talk(post(b"%d" % n)) == answer(b"to %d" % n)
        assert running.talk(post(b"f", fields=b"X-Scanner: faint\r\n")) == answer(b"to f")
        assert running.talk(b"GET / HTTP/1.1\r\n\r\n") == answer(b"to ")
        assert len(running.workers) == 2
        assert running.get("/livez")[0] == running.get("/readyz")[0] == 200
        wait(lambda: running.count("quantdrift_sidecar_forwarded_bytes_total") > 0, "bytes are counted")
        wait(lambda: running.count("quantdrift_sidecar_relay_cpu_seconds_total") > 0, "its time is counted")
        assert running.count("quantdrift_sidecar_offered_total", stratum="default") == 10
        assert running.count("quantdrift_sidecar_offered_total", stratum="faint") == 1
        assert running.count("quantdrift_sidecar_taken_total", stratum="default") == 0
        assert running.count("quantdrift_sidecar_taken_total", stratum="faint") == 1
        assert running.count("quantdrift_sidecar_ignored_total") == 1
        assert running.count("quantdrift_sidecar_connections_total") == 12
        assert running.count("quantdrift_sidecar_open_connections") == 0
        assert running.count("quantdrift_sidecar_queue_limit_bytes") > 0


def test_sigterm_drains_and_frees_the_port(tmp_path: Path, backend: Backend) -> None:
    """Not ready at once; new clients are served during the delay, the exchange under way ends, then the port is free."""
    with sidecar(tmp_path, backend.port, SIDECAR__DRAIN_DELAY_S=1.5) as running:
        idle, busy = running.connect(), running.connect()
        busy.sendall(post(b"wait"))
        wait(lambda: backend.n_waiting == 1, "the backend works")
        running.process.terminate()
        wait(lambda: not running.is_ready(), "it is not ready any more")
        assert running.talk(post(b"late")) == answer(b"to late")
        assert idle.recv(100) == b""
        backend.go_on.set()
        assert busy.recv(1000) == answer(b"to wait", fields=b"Connection: close\r\n")
        assert busy.recv(1000) == b""
        assert running.process.wait(15) == 0
        with pytest.raises(ConnectionRefusedError):
            running.connect()
        idle.close()
        busy.close()


@pytest.mark.release
def test_without_its_backend_a_sidecar_is_ready(tmp_path: Path) -> None:
    """Readiness speaks of the listener alone: a backend that is away must not take all pods out at once."""
    with sidecar(tmp_path, free_port()) as running:
        with running.connect() as client:
            client.settimeout(10)
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(10) == b""
        assert running.is_ready()
        assert running.count("quantdrift_sidecar_backend_failures_total") == 1


class Log:
    """What the processes of a sidecar have written so far."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd
        self._lines: list[str] = []

    def lines(self, text: str) -> list[str]:
        """Return the lines that hold `text`."""
        self._lines += self._capfd.readouterr().err.splitlines()
        return [line for line in self._lines if text in line]

    def wait(self, text: str) -> None:
        """Wait for a line that holds `text`."""
        wait(lambda: bool(self.lines(text)), f"a line with {text!r}")


@pytest.fixture
def log(capfd: pytest.CaptureFixture[str]) -> Log:
    """Return what sidecars write during this test."""
    return Log(capfd)


@pytest.mark.release
def test_a_backend_that_is_away_is_said_in_the_log_and_when_it_is_back(tmp_path: Path, log: Log) -> None:
    """By name, with the option, once for all clients; an empty reply alone tells nobody anything."""
    port = free_port()
    with sidecar(tmp_path, port, SIDECAR__WORKERS=2) as running:
        for _ in range(20):
            with contextlib.suppress(OSError):  # it may be closed before all was written, or half closed
                assert running.talk(post(b"x")) == b""
        log.wait(f"the backend 127.0.0.1:{port} (sidecar.backend) did not accept")
        assert running.count("quantdrift_sidecar_backend_failures_total") == 20
        with socket.create_server(("127.0.0.1", port)):

            def is_back() -> bool:
                running.connect().close()
                return bool(log.lines("accepts connections again"))

            wait(is_back, "the backend is back")
    assert len(log.lines("did not accept")) == 1
    assert "refused" in log.lines("did not accept")[0]


@pytest.mark.release
def test_a_misspelt_model_is_said_in_the_log(tmp_path: Path, backend: Backend, log: Log) -> None:
    """With the name that was seen, how often, and the one that was meant."""
    with sidecar(tmp_path, backend.port, SAMPLING__RATE=1, MODELS='[{"name": "wines"}]') as running:
        for _ in range(3):
            assert running.talk(post(b"{}", b"/v2/models/wine/infer")) == answer(b"to {}")
        log.wait("(did you mean `wines`?)")
        assert "no such model is configured: saw model `wine` " in log.lines("did you mean")[0]
        wait(
            lambda: running.count("quantdrift_sidecar_lost_total", reason="unknown_model") == 3,
            "all are counted",
        )


@pytest.mark.release
def test_traffic_in_which_nothing_is_a_prediction_is_said_in_the_log(
    tmp_path: Path, backend: Backend, log: Log
) -> None:
    """With the requests that would be one."""
    with sidecar(tmp_path, backend.port) as running:
        for _ in range(10):
            assert running.talk(post(b"{}", b"/predict")) == answer(b"to {}")
        log.wait("nothing is sampled: 10 POST requests have passed, and none is a prediction")
    assert "/v2/models/NAME/infer" in log.lines("nothing is sampled")[0]


def test_a_port_that_is_taken_is_said_so(tmp_path: Path) -> None:
    """The operator is told which option to change, with exit code 2 and without a traceback."""
    path = tmp_path / "config.toml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        path.write_text(f'[sidecar]\nlisten = "127.0.0.1:{taken.getsockname()[1]}"\n')
        ended = subprocess.run(
            [sys.executable, "-m", "quantdrift", "sidecar", "-c", str(path)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert ended.returncode == 2
    assert "sidecar.listen" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_backend_that_turns_out_to_be_the_sidecar_is_refused_at_the_start(tmp_path: Path) -> None:
    """What a name stands for, the check of the file cannot know."""
    path = tmp_path / "config.toml"
    port = free_port()
    path.write_text(
        f'[sidecar]\nlisten = "0.0.0.0:{port}"\nbackend = "127.1:{port}"\nadmin = "127.0.0.1:{free_port()}"\n'
    )
    ended = subprocess.run(
        [sys.executable, "-m", "quantdrift", "sidecar", "-c", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert f"sidecar.backend 127.1:{port} is this machine's own 127.0.0.1" in ended.stderr


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        (
            "quantdrift.sidecar.relay.worker",
            {"aiohttp", "nats", "numpy", "opentelemetry", "prometheus_client", "ctypes", "google", "grpc"},
        ),
        ("quantdrift.sidecar.supervisor", {"aiohttp", "nats", "numpy", "opentelemetry", "prometheus_client"}),
        ("quantdrift.sidecar.admin", {"nats", "numpy", "grpc"}),
        ("quantdrift.sidecar.intake.process", {"nats", "numpy", "opentelemetry", "prometheus_client"}),
        ("quantdrift.sidecar.capture.process", set()),
    ],
)
def test_the_sidecars_processes_need_little_memory(module: str, unwanted: set[str]) -> None:
    """None loads a runtime, scipy or SQLAlchemy; a relay worker nothing but what it relays with."""
    program = f"import {module}, sys; print(*sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    loaded = {name.partition(".")[0] for name in output.split()}
    assert not loaded & (unwanted | {"torch", "onnxruntime", "onnx", "scipy", "sqlalchemy", "asyncpg"})
