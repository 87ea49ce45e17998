"""`quantdrift up`: every role on one host, from the first line to an orderly end."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


def _config(directory: Path) -> Path:
    """Return a configuration on ports that nobody used a moment ago."""
    with ExitStack() as held:
        ports = []
        for _ in range(5):
            listener = held.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            ports.append(listener.getsockname()[1])
    listen, backend, *admins = (f'"127.0.0.1:{port}"' for port in ports)
    path = directory / "config.toml"
    path.write_text(
        f"[sidecar]\nlisten = {listen}\nbackend = {backend}\nadmin = {admins[0]}\ndrain_delay_s = 0\n"
        f"[shadow]\nadmin = {admins[1]}\n[monitor]\nadmin = {admins[2]}\n"
    )
    return path


@contextmanager
def _up(config: Path, data: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """Run it inside the block, from its ready line on."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QUANTDRIFT")}
    command = [sys.executable, "-m", "quantdrift", "up", "-c", str(config), "--data", str(data), *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            while line and not line.startswith("quantdrift is up"):
                line = process.stdout.readline()
            assert line, f"ended with {process.wait()}"
            yield process
        finally:
            process.terminate()


def _family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def test_it_gets_ready_and_ends_in_order(tmp_path: Path) -> None:
    """SIGTERM ends every role and server with exit code 0; a sidecar never saw the database's address."""
    with _up(_config(tmp_path), tmp_path / "data") as process:
        children = _family(process)
        names = " ".join(" ".join(child.cmdline()) for child in children)
        for part in (
            "sidecar.relay.worker",
            "sidecar.capture.process",
            "shadow",
            "monitor",
            "nats-server",
            "postgres",
        ):
            assert part in names
        for child in children:
            if any(part.startswith("sidecar") for part in child.cmdline()):
                assert "QUANTDRIFT_DSN" not in child.environ()
        assert (tmp_path / "data" / "dsn").stat().st_mode & 0o077 == 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert psutil.wait_procs(children, timeout=10)[1] == []


def test_a_second_one_on_the_same_data_is_refused(tmp_path: Path) -> None:
    """Two supervisors would fight for one database."""
    config = _config(tmp_path)
    with _up(config, tmp_path / "data", "--only", "monitor") as process:
        names = " ".join(" ".join(child.cmdline()) for child in _family(process))
        assert "sidecar" not in names
        second = subprocess.run(
            [sys.executable, "-m", "quantdrift", "up", "-c", str(config), "--data", str(tmp_path / "data")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert second.returncode == 2
        assert "another `quantdrift up` uses" in second.stderr


def test_killed_it_takes_everything_along_and_can_be_started_again(tmp_path: Path) -> None:
    """Nothing is left behind that would hold a port or the data."""
    config = _config(tmp_path)
    with _up(config, tmp_path / "data") as process:
        children = _family(process)
        process.kill()
        assert psutil.wait_procs(children, timeout=60)[1] == []
    with _up(config, tmp_path / "data") as process:
        process.terminate()
        assert process.wait(60) == 0


def test_what_a_person_must_mend_ends_it_with_2(tmp_path: Path) -> None:
    """A reference that is not there: the shadow says so, and all ends instead of going round for ever."""
    config = _config(tmp_path)
    config.write_text(
        config.read_text() + '[[models]]\nname = "m"\n[[models.references]]\npath = "missing.onnx"\n'
    )
    done = subprocess.run(
        [sys.executable, "-m", "quantdrift", "up", "-c", str(config), "--data", str(tmp_path / "data")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 2
    assert "missing.onnx" in done.stderr
