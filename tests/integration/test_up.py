"""`quantdrift up`: every role on one host, from the first line to an orderly end."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple, TextIO
from urllib.parse import urlsplit

import asyncpg
import msgspec
import numpy as np
import onnx
import onnx.helper as oh
import psutil
import pytest

from quantdrift.core.config.load import load
from quantdrift.core.data_directory import at_data
from quantdrift.core.errors import QuantdriftError
from quantdrift.core.process.child import INSTANCE_HEADER
from quantdrift.core.process.states import STATES
from quantdrift.core.stream.connection import Queue
from quantdrift.core.stream.rights import NatsRole
from tests.support.commands import invoked
from tests.support.exposed_secrets import exposed
from tests.support.in_memory import memory_directory

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]


_ROOT = Path(__file__).resolve().parents[2]


def _ports(n: int) -> list[int]:
    """Return ports that nobody used a moment ago."""
    with ExitStack() as held:
        listeners = [held.enter_context(socket.socket()) for _ in range(n)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in listeners]


def _config(directory: Path, *, has_page: bool = False) -> Path:
    listen, backend, *admins = (f'"127.0.0.1:{port}"' for port in _ports(6))
    path = directory / "config.toml"
    path.write_text(
        f"[sidecar]\nlisten = {listen}\nbackend = {backend}\nadmin = {admins[0]}\ndrain_delay_s = 0\n"
        f"[shadow]\nadmin = {admins[1]}\n[monitor]\nadmin = {admins[2]}\n"
        f"[web]\nlisten = {admins[3] if has_page else repr('')}\n"
    )
    return path


@contextmanager
def _up(
    config: Path, data: Path, *more: str, stderr: TextIO | None = None, **given: str
) -> Iterator[subprocess.Popen[str]]:
    """Run it inside the block, from its ready line on."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QUANTDRIFT")}
    command = [sys.executable, "-m", "quantdrift", "up", "-c", str(config), "--data", str(data), *more]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=stderr, text=True, env={**environment, **given}
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            while line and not line.startswith("quantdrift is up"):
                line = process.stdout.readline()
            assert line, f"ended with {process.wait()}"
            yield process
        finally:
            process.terminate()


def _run(config: Path, data: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run it until it ends by itself."""
    command = [sys.executable, "-m", "quantdrift", "up", "-c", str(config), "--data", str(data), *more]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def _wait_page(address: str, states: Path, token: str = "") -> None:
    """Wait until the page works and says that it knows no model; it reads with the rights of a reader."""
    deadline = time.monotonic() + 60
    while not json.loads(states.read_text()).get("web", {}).get("works"):
        assert time.monotonic() < deadline, states.read_text()
        time.sleep(0.1)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    page = urllib.request.Request(f"http://{address}/", headers=headers)
    with urllib.request.urlopen(page, timeout=30) as answer:
        assert b"No model yet" in answer.read()


def _connections(pid: int) -> list[Any]:
    return list(psutil.Process(pid).net_connections("tcp4"))


def _server_ports(data: Path) -> set[int]:
    """Return the ports of the embedded servers."""
    addresses = [(data / name).read_text() for name in ("dsn", "nats.url")]
    return {urlsplit(address.strip()).port or 0 for address in addresses}


def _wait_ready(address: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until /readyz of a process that was started says yes."""
    until_s = time.monotonic() + 90
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{address}/readyz", timeout=5):
            return
        assert process.poll() is None, "it has ended"
        assert time.monotonic() < until_s, "it is not ready in time"
        time.sleep(0.1)


def _family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


class _Running(NamedTuple):
    """A `quantdrift up` with its page, and the secrets in its environment."""

    directory: Path
    config: Path
    data: Path
    process: subprocess.Popen[str]
    secrets: dict[str, str]


@pytest.fixture(scope="module")
def running() -> Iterator[_Running]:
    """Return one that several tests look at; in the end SIGTERM ends every role and server of it with exit code 0."""
    secrets = {
        "QUANTDRIFT_HMAC_KEY": "canary-of-hashes",
        "QUANTDRIFT_INTAKE_TOKEN": "canary-of-the-intake",
        "QUANTDRIFT_REFERENCE_TOKEN": "canary-of-a-reference",
        "QUANTDRIFT_SAMPLING_SALT": "canary-of-the-salt",
        "QUANTDRIFT_WEB_TOKEN": "canary-of-whoever-reads-the-page",
    }
    with memory_directory() as parent:
        directory = parent / "up"
        directory.mkdir(mode=0o700)
        config, data = _config(directory, has_page=True), directory / "data"
        with _up(config, data, stderr=None, **secrets) as process:
            yield _Running(directory, config, data, process, secrets)
            children = _family(process)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        assert psutil.wait_procs(children, timeout=10)[1] == []


def test_it_gets_ready_and_no_secret_is_in_an_environment(running: _Running) -> None:
    """No secret is in the environment of a process that it started.

    `quantdrift status` says that every process works, and what is missing. It asks the ports that the processes
    have, whatever its own configuration says.
    """
    listen = tomllib.loads(running.config.read_text())["web"]["listen"]
    _wait_page(listen, running.data / STATES, running.secrets["QUANTDRIFT_WEB_TOKEN"])
    children = _family(running.process)
    addresses = [(running.data / name).read_text().strip() for name in ("dsn", "shadow.dsn", "monitor.dsn")]
    passwords = {password for address in addresses if (password := urlsplit(address).password)}
    assert len(passwords) == 3
    assert exposed(children, [*running.secrets.values(), *passwords]) == []
    names = ""
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):  # a command of the start has ended meanwhile
            names += " ".join(child.cmdline()) + " "
    for part in (
        "quantdrift.sidecar.relay.worker",
        "quantdrift.sidecar.capture.process",
        "shadow",
        "monitor",
        "nats-server",
        "postgres",
    ):
        assert part in names
    assert (running.data / "dsn").stat().st_mode & 0o077 == 0
    other = {f"QUANTDRIFT__{role}__ADMIN": "127.0.0.1:1" for role in ("SIDECAR", "SHADOW", "MONITOR")}
    done = invoked(
        "status",
        "-c",
        str(running.config),
        "--data",
        "data",
        "--json",
        directory=running.directory,
        **other,
    )
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert {name for name, state in found["processes"].items() if state["works"]} == {
        "postgres",
        "nats",
        "db upgrade",
        "setup nats",
        "setup postgres",
        "sidecar",
        "shadow",
        "monitor",
        "web",
    }
    assert [found["ports"][role]["ready"] for role in ("sidecar", "shadow", "monitor")] == [True] * 3
    assert found["blockers"][0].startswith("no sidecar has seen an inference request: send the traffic to ")
    assert found["blockers"][1] == "no model is configured: add a [[models]]"


def _write_classifier(path: Path) -> None:
    """Write a model for images of 8 x 8 numbers with ten logits."""
    weights = np.random.default_rng(3).normal(size=(64, 10)).astype(np.float32)
    graph = oh.make_graph(
        [
            oh.make_node("Flatten", ["image"], ["flat"]),
            oh.make_node("MatMul", ["flat", "weights"], ["logits"]),
        ],
        "digits",
        [oh.make_tensor_value_info("image", onnx.TensorProto.FLOAT, ["n", 1, 8, 8])],
        [oh.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["n", 10])],
        [onnx.numpy_helper.from_array(weights, "weights")],
    )
    onnx.save(oh.make_model(graph, opset_imports=[oh.make_opsetid("", 18)], ir_version=10), path)


def _answers(port: int) -> bool:
    """Return whether something accepts connections on a port of this host."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_the_quick_start_works_as_typed(memory_path: Path) -> None:
    """Its configuration and its commands in their order, in a folder of one's own; only ports, the model file and the minute of traffic differ.

    Installing and the demo's models are left out. No command is told where configuration and data are.
    """
    page = (_ROOT / "docs/quick-start.md").read_text(encoding="utf-8")
    listen, backend, *admins = _ports(6)
    (toml,) = re.findall(r"^```toml\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)

    def moved(text: str) -> str:
        text = text.replace("--watch 60", "--watch 2")
        return re.sub(r"(?<=:)8000\b", str(listen), re.sub(r"(?<=:)8001\b", str(backend), text))

    (memory_path / "config.toml").write_text(moved(toml))
    _write_classifier(memory_path / "digits-fp32.onnx")
    blocks = re.findall(r"^```console\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    commands = [
        command
        for block in blocks
        for command in re.findall(r"^\$ (.*?)(?=\n\$ |\n\S|\n*\Z)", block, flags=re.DOTALL | re.MULTILINE)
    ]
    typed = [command for command in commands if command.startswith(("quantdrift ", "curl ", "psql "))]
    assert [command.split()[0] for command in typed].count("quantdrift") >= 6
    names = ("SIDECAR", "SHADOW", "MONITOR", "WEB")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QUANTDRIFT")} | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        **{
            f"QUANTDRIFT__{name}__ADMIN": f"127.0.0.1:{port}"
            for name, port in zip(names[:3], admins, strict=False)
        },
        "QUANTDRIFT__WEB__LISTEN": f"127.0.0.1:{admins[3]}",
    }

    def run(command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", command],
            cwd=memory_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    server = [
        sys.executable,
        "-m",
        "quantdrift.demo.oip_server",
        "--version",
        "int8-1",
        "--listen",
        f"127.0.0.1:{backend}",
    ]
    with ExitStack() as ends:
        serving = ends.enter_context(
            subprocess.Popen([*server, "--model", f"digits={memory_path}/digits-fp32.onnx"], cwd=_ROOT)
        )
        ends.callback(serving.terminate)
        while not _answers(backend):  # the model server starts
            assert serving.poll() is None
            time.sleep(0.05)
        for command in typed:
            if command == "quantdrift up":
                running = ends.enter_context(
                    subprocess.Popen(
                        command.split(), cwd=memory_path, env=environment, stdout=subprocess.PIPE, text=True
                    )
                )
                ends.callback(running.terminate)
                assert running.stdout is not None
                assert any(line.startswith("quantdrift is up") for line in running.stdout)
            elif command.split()[0] != "psql" or shutil.which("psql"):
                done = run(moved(command))
                assert done.returncode == 0, (command, done.stdout, done.stderr)
                if command.startswith("curl"):
                    assert '"outputs"' in done.stdout
                    deadline = time.monotonic() + 90
                    while "scanner=archive" not in run("quantdrift slices list").stdout:
                        assert time.monotonic() < deadline
        assert "scanner=archive" in run("quantdrift slices show scanner=archive").stdout
        assert list(memory_path.glob("reports/*.html"))


def test_a_second_one_on_the_same_data_is_refused(running: _Running) -> None:
    """Two supervisors would fight for one database."""
    second = _run(running.config, running.data)
    assert second.returncode == 2
    assert "another `quantdrift up` uses" in second.stderr


@pytest.mark.release
def test_another_worker_finds_its_servers_in_the_data_directory(memory_path: Path) -> None:
    """With `--data` a second shadow uses Postgres and NATS of a running `quantdrift up`, and those of the next one elsewhere."""
    config, data = _config(memory_path), memory_path / "data"

    def is_connected(process: subprocess.Popen[bytes]) -> bool:
        used = {connection.raddr.port for connection in _connections(process.pid) if connection.raddr}
        return _server_ports(data) <= used

    with contextlib.ExitStack() as worker, contextlib.ExitStack() as taken:
        with _up(config, data, "--only", "monitor") as process:
            names = " ".join(" ".join(child.cmdline()) for child in _family(process))
            assert "sidecar" not in names
            command = [sys.executable, "-m", "quantdrift", "shadow", "-c", str(config), "--data", str(data)]
            second = worker.enter_context(subprocess.Popen(command))
            worker.callback(second.terminate)
            _wait_ready(tomllib.loads(config.read_text())["shadow"]["admin"], second)
            assert is_connected(second)
            first = _server_ports(data)
        for port in first:
            taken.enter_context(socket.create_server(("127.0.0.1", port)))
        with _up(config, data, "--only", "monitor"):
            assert not _server_ports(data) & first
            until_s = time.monotonic() + 90
            while not is_connected(second):
                assert second.poll() is None, "it has ended"
                assert time.monotonic() < until_s, "it does not find the servers"
                time.sleep(0.1)


@pytest.mark.release
def test_killed_it_leaves_nothing_but_relay_workers_and_can_be_started_again(memory_path: Path) -> None:
    """Nothing else holds a port or the data. The next one takes the relay's port from the workers, and they end.

    Its servers have the ports that they had.
    """
    config = _config(memory_path)
    with _up(config, memory_path / "data") as process:
        ports = _server_ports(memory_path / "data")
        children = _family(process)
        workers = {child for child in children if "quantdrift.sidecar.relay.worker" in child.cmdline()}
        process.kill()
        assert psutil.wait_procs(set(children) - workers, timeout=60)[1] == []
        assert all(worker.is_running() for worker in workers)
    with _up(config, memory_path / "data") as process:
        assert _server_ports(memory_path / "data") == ports
        assert psutil.wait_procs(workers, timeout=60)[1] == []
        process.terminate()
        assert process.wait(60) == 0


def test_a_port_that_the_sidecar_cannot_open_ends_it_with_2(memory_path: Path) -> None:
    """Its own configuration is all that ends it: in one line, with the option and the address."""
    config = _config(memory_path)
    address = tomllib.loads(config.read_text())["sidecar"]["listen"]
    with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
        done = _run(config, memory_path / "data", "--only", "sidecar")
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if "cannot be opened" in line]
    assert lines == [f"quantdrift: sidecar.listen {address} cannot be opened: Address already in use"]


class _Anyone(BaseHTTPRequestHandler):
    """Answers whatever is asked, as another quantdrift would."""

    n_asked = 0

    def do_GET(self) -> None:  # the name that the library asks for
        type(self).n_asked += 1
        self.send_response(200)
        self.send_header(INSTANCE_HEADER, "another")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.mark.release
def test_the_answer_of_another_process_is_not_taken_for_its_own(
    memory_path: Path, postgres_dsn: str, nats_url: str
) -> None:
    """It is up once its own roles answer, and says which port another has; then the port is free, and it is up."""
    config = _config(memory_path)
    address = tomllib.loads(config.read_text())["monitor"]["admin"]
    environment = {"QUANTDRIFT_DSN": postgres_dsn, "QUANTDRIFT__STREAM__URL": nats_url}
    command = [
        sys.executable,
        "-m",
        "quantdrift",
        "up",
        "-c",
        str(config),
        "--data",
        str(memory_path / "data"),
    ]
    other = ThreadingHTTPServer(("127.0.0.1", int(address.rpartition(":")[2])), _Anyone)
    answering = threading.Thread(target=other.serve_forever, kwargs={"poll_interval": 0.05})
    answering.start()
    with subprocess.Popen(
        [*command, "--only", "monitor"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
    ) as process:
        try:
            assert process.stdout is not None
            read = []
            for line in process.stdout:
                read.append(line)
                assert not line.startswith("quantdrift is up"), read
                if "monitor is down since" in line:
                    assert f"monitor.admin {address} cannot be opened: address already in use" in line
                    break
            assert _Anyone.n_asked > 0
            other.shutdown()
            other.server_close()
            assert any(line.startswith("quantdrift is up") for line in process.stdout)
            process.terminate()
            process.stdout.read()
            assert process.wait(60) == 0
        finally:
            process.kill()
            other.shutdown()
            answering.join()


@pytest.mark.release
def test_the_detectors_are_compiled_before_it_is_up_and_that_is_said(
    memory_path: Path, postgres_dsn: str, nats_url: str
) -> None:
    """Once on a machine: not when it is started again."""
    environment = {
        "QUANTDRIFT_DSN": postgres_dsn,
        "QUANTDRIFT__STREAM__URL": nats_url,
        "NUMBA_CACHE_DIR": str(memory_path / "code"),
    }

    def lines() -> list[str]:
        log = memory_path / "log"
        with (
            log.open("w") as stderr,
            _up(
                _config(memory_path), memory_path / "data", "--only", "monitor", stderr=stderr, **environment
            ),
        ):
            return [line for line in log.read_text().splitlines() if "compil" in line]

    begun, ended = lines()
    assert "compiling the detectors' loops (once per machine and release" in begun
    assert "compiled in " in ended
    assert lines() == []


async def test_each_process_has_only_the_rights_of_its_role(
    running: _Running, caplog: pytest.LogCaptureFixture
) -> None:
    """At NATS, where nothing is plaintext and nobody gets in without a key, and at Postgres."""
    directory = running.data / "nats"
    users = (directory / "nats.conf").read_text()
    assert users.count("nkey:") == len(NatsRole)
    assert "user: " not in users.replace('user: "watcher"', "")
    assert {file.stat().st_mode & 0o777 for file in (directory / "keys").iterdir()} == {0o600}
    assert (directory / "tls" / "server.key").stat().st_mode & 0o777 == 0o600
    found = at_data(load(running.config), running.data, NatsRole.SIDECAR).stream
    assert found.url.startswith("tls://")
    sidecar = await Queue.connect(found, client_name="test", role=NatsRole.SIDECAR)
    with pytest.raises(QuantdriftError):
        await sidecar.consumer("exchange", ack_wait_s=30)
    assert "permissions violation" in caplog.text
    await sidecar.close()
    for change in ({"credentials_file": ""}, {"ca_file": ""}):
        with pytest.raises(QuantdriftError):
            await Queue.connect(msgspec.structs.replace(found, **change), client_name="test")
    owner = await asyncpg.connect((running.data / "dsn").read_text().strip())
    sessions = await owner.fetch(
        "select usename from pg_stat_activity where backend_type = 'client backend' and pid <> pg_backend_pid()"
    )
    await owner.close()
    # The page, which only reads, has a session while somebody looks at it.
    assert {row["usename"] for row in sessions} - {None, "quantdrift_reader_user"} == {
        "quantdrift_shadow_user",
        "quantdrift_monitor_user",
    }
