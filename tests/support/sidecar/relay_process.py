"""A whole sidecar in processes of its own, started as a user starts it."""

import contextlib
import os
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

from quantdrift.sidecar.state.orphans import orphans
from tests.support.commands import invoked
from tests.support.sidecar.relay_rig import answer

DEADLINE_S = 30.0
_given_ports: set[int] = set()


def free_port() -> int:
    """Return a port that nobody listens on, and that was not returned before."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as unused:
            port = int(unused.getsockname()[1])
        if port not in _given_ports:
            _given_ports.add(port)
            return port


def wait(condition: Callable[[], bool], what: str) -> None:
    """Wait until `condition` holds."""
    until = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until, f"not within {DEADLINE_S:g} s: {what}"
        time.sleep(0.02)


def alive(process: psutil.Process) -> bool:
    """Return whether a process runs; one that has ended and that nobody has waited for does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


class Backend(socketserver.ThreadingTCPServer):
    """Answers requests whose body is `wait` when it is told to, all others at once."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128  # with fewer it resets connections itself under load

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.go_on = threading.Event()
        self.n_waiting = 0
        self.reply: Callable[[bytes], bytes] = lambda body: b"to " + body

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.server_address[1])


class Answer(socketserver.StreamRequestHandler):
    """One connection of it."""

    def handle(self) -> None:
        """Answer every request on it."""
        while line := self.rfile.readline():
            length = 0
            while line.strip():
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
                line = self.rfile.readline()
            body = self.rfile.read(length)
            assert isinstance(self.server, Backend)
            if body == b"wait":
                self.server.n_waiting += 1
                self.server.go_on.wait(30)
            self.wfile.write(answer(self.server.reply(body)))


@contextlib.contextmanager
def running_backend() -> Iterator[Backend]:
    """Run a backend in threads of this process."""
    with Backend() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.go_on.set()
            server.shutdown()
            thread.join()


class SidecarProcess:
    """A running `quantdrift sidecar`, with no NATS server anywhere; its options, and `stderr` for a file of its logs."""

    def __init__(self, directory: Path, temporary: str, backend_port: int, **options: object) -> None:
        stderr = options.pop("stderr", None)
        assert stderr is None or isinstance(stderr, int)
        self._stderr = stderr
        self.port, self.admin_port = free_port(), free_port()
        self.temporary = temporary
        path = self.config = directory / "config.toml"
        self.directory = directory
        path.write_text("")
        settings: dict[str, object] = {
            "SIDECAR__LISTEN": f"127.0.0.1:{self.port}",
            "SIDECAR__BACKEND": f"127.0.0.1:{backend_port}",
            "SIDECAR__ADMIN": f"127.0.0.1:{self.admin_port}",
            "SIDECAR__DRAIN_DELAY_S": 0.3,
            "SIDECAR__GRACE_S": 12,
            "STREAM__URL": f"nats://127.0.0.1:{free_port()}",
            **options,
        }
        self._command = [sys.executable, "-m", "quantdrift", "sidecar", "-c", str(path)]
        self._environment = {
            **os.environ,
            "TMPDIR": temporary,
            **{f"QUANTDRIFT__{name}": str(value) for name, value in settings.items()},
        }
        self.start()

    def start(self) -> None:
        """Start it, also again."""
        self.process = subprocess.Popen(self._command, env=self._environment, stderr=self._stderr)
        self.root = psutil.Process(self.process.pid)

    @property
    def workers(self) -> list[psutil.Process]:
        """The relay workers that run now."""
        return self._children("quantdrift.sidecar.relay.worker")

    @property
    def captures(self) -> list[psutil.Process]:
        """The capture process that runs now, if one does."""
        return self._children("quantdrift.sidecar.capture.process")

    @property
    def admins(self) -> list[psutil.Process]:
        """The process of the admin port that runs now, if one does."""
        return self._children("quantdrift.sidecar.admin")

    def get(self, path: str) -> tuple[int, str]:
        """Return what the admin port answers; status 0 where it does not."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}{path}", timeout=5) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def switch(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `quantdrift pause` or `resume` for this sidecar alone, as in its container."""
        admin = f"127.0.0.1:{self.admin_port}"
        return invoked(*arguments, "--local", directory=self.directory, QUANTDRIFT__SIDECAR__ADMIN=admin)

    def is_ready(self) -> bool:
        """Return what /readyz says."""
        return self.get("/readyz")[0] == 200

    def count(self, name: str, **labels: str) -> float:
        """Return the sum of a metric over the series with these labels."""
        return sum(
            sample.value
            for family in text_string_to_metric_families(self.get("/metrics")[1])
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def connect(self) -> socket.socket:
        """Return a new connection to the relay."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE_S)

    def talk(self, request: bytes) -> bytes:
        """Send a request on a connection of its own, and return everything that comes back."""
        with self.connect() as client:
            client.sendall(request)
            client.shutdown(socket.SHUT_WR)
            answer = b""
            while data := client.recv(65_536):
                answer += data
        return answer

    def stop(self) -> int:
        """Ask it to end, and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_S)

    def _children(self, module: str) -> list[psutil.Process]:
        found = []
        for child in self.root.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if module in child.cmdline():
                    found.append(child)
        return found


@contextlib.contextmanager
def sidecar(directory: Path, backend_port: int, **options: object) -> Iterator[SidecarProcess]:
    """Run a sidecar until it is ready, and end it; none of its processes is left."""
    # Its hand-off socket would outlive it where it is killed; the path of such a socket must be short.
    with (
        tempfile.TemporaryDirectory(prefix="qd-") as temporary,
        started(SidecarProcess(directory, temporary, backend_port, **options)) as running,
    ):
        yield running


@contextlib.contextmanager
def started(running: SidecarProcess) -> Iterator[SidecarProcess]:
    """Wait until a sidecar is ready, and end it in the end; none of its processes is left."""
    family: list[psutil.Process] = []
    try:
        wait(running.is_ready, "the sidecar is ready")
        yield running
        family = running.root.children() if running.process.poll() is None else []
        if running.process.poll() is None:
            assert running.stop() == 0
    finally:
        running.process.kill()
        running.process.wait()
        for pid in orphans(f"127.0.0.1:{running.port}"):
            os.kill(pid, signal.SIGKILL)
    wait(lambda: not any(map(alive, family)), "all children have ended")
