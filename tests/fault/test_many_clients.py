"""Thousands of idle clients, and more clients than a worker has file descriptors."""

import contextlib
import logging
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from quantdrift.core.config import Sidecar
from tests.support.sidecar.relay_process import SidecarProcess, sidecar, wait
from tests.support.sidecar.relay_rig import answer, post

pytestmark = pytest.mark.fault

_LOG = logging.getLogger(__name__)

KIB = 1024
WANTED = 10_000
FEWEST = 1000
SPARE_FILES = 200  # of the relay worker, which needs two for each client
IDLE_BYTES = 12 * KIB
"""Most that an idle connection may cost the relay worker."""

# In a process of its own: this one's files are needed for the clients.
BACKEND = """
import asyncio, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)

class Backend(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
    def data_received(self, data):
        self.transport.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\nok")

async def main():
    server = await asyncio.get_running_loop().create_server(Backend, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


@pytest.fixture
def n_clients() -> Iterator[int]:
    """Return how many clients this machine's limit on open files allows, and have as many files for them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    n = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, (hard - SPARE_FILES) // 2)
    if n < FEWEST:
        pytest.skip(f"only {hard} files may be open here: {WANTED} idle connections need {2 * WANTED}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield n
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def backend() -> Iterator[int]:
    """Return the port of a backend that says ok."""
    with subprocess.Popen([sys.executable, "-c", BACKEND], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.kill()


def ask(client: socket.socket) -> bytes:
    """Send a request; return what comes."""
    client.sendall(post(b"x"))
    return client.recv(KIB)


def opened(running: SidecarProcess) -> float:
    """Return how many connections are open now."""
    return running.count("quantdrift_sidecar_open_connections")


@pytest.mark.release
def test_ten_thousand_idle_clients_cost_little_and_keep_nobody_out(
    tmp_path: Path, n_clients: int, backend: int
) -> None:
    """Each has been served once. A new request is answered, observed or not, and all of them are let go again."""
    with (
        sidecar(tmp_path, backend, SAMPLING__RATE=0) as running,
        contextlib.ExitStack() as stack,
    ):
        (worker,) = running.workers
        before = worker.memory_info().rss
        clients: list[socket.socket] = []
        while len(clients) < n_clients - 1:
            asking = [
                stack.enter_context(running.connect()) for _ in range(min(400, n_clients - 1 - len(clients)))
            ]
            for client in asking:
                client.sendall(post(b"x"))
            # More than `sidecar.max_connections` of them must not be busy at once, however slow the backend is here.
            for client in asking:
                assert client.recv(KIB) == answer(b"ok")
            clients.extend(asking)
            wait(lambda: opened(running) == len(clients), "they are in")
        each_bytes = (worker.memory_info().rss - before) / n_clients
        _LOG.info("%d connections, %.0f bytes each", n_clients, each_bytes)
        assert each_bytes < IDLE_BYTES
        late = stack.enter_context(running.connect())
        assert ask(late) == ask(clients[0]) == ask(clients[-1]) == answer(b"ok")
        assert running.count("quantdrift_sidecar_unobserved_connections_total") == 0
        wait(lambda: running.count("quantdrift_sidecar_offered_total") == n_clients + 2, "all are observed")
        assert running.is_ready()
        assert running.count("quantdrift_sidecar_accept_pauses_total") == 0
        stack.close()
        wait(lambda: opened(running) == 0, "all are gone")
        assert running.workers == [worker]


def test_idle_connections_do_not_keep_requests_from_being_observed(
    tmp_path: Path, n_clients: int, backend: int
) -> None:
    """More idle clients than `sidecar.max_connections`, some of which have never spoken: every later request is observed."""
    n_idle = min(Sidecar().max_connections + 2, n_clients - 10)
    with (
        sidecar(
            tmp_path, backend, SIDECAR__MAX_CONNECTIONS=min(n_idle - 2, Sidecar().max_connections)
        ) as running,
        contextlib.ExitStack() as stack,
    ):
        idle = [stack.enter_context(running.connect()) for _ in range(n_idle)]
        wait(lambda: opened(running) == n_idle, "they are in")
        for client in idle[::2]:
            assert ask(client) == answer(b"ok")
        n_before = len(idle[::2])
        clients = [stack.enter_context(running.connect()) for _ in range(5)]
        for _ in range(40):
            for client in clients:
                assert ask(client) == answer(b"ok")
        wait(lambda: running.count("quantdrift_sidecar_offered_total") == n_before + 200, "all are observed")
        for name in ("unobserved_connections", "unobserved_requests", "blind_connections"):
            assert running.count(f"quantdrift_sidecar_{name}_total") == 0


@pytest.mark.release
def test_a_worker_without_files_lets_clients_wait(tmp_path: Path, backend: int) -> None:
    """It neither dies nor cuts anybody off; once others have gone, all are served."""
    with sidecar(tmp_path, backend) as running, contextlib.ExitStack() as stack:
        (worker,) = running.workers
        clients = [stack.enter_context(running.connect()) for _ in range(20)]
        for client in clients:
            assert ask(client) == answer(b"ok")
        # Fewer than it reckons with: as where the whole system has none left.
        worker.rlimit(psutil.RLIMIT_NOFILE, (worker.num_fds(), worker.num_fds()))
        waiting = [stack.enter_context(running.connect()) for _ in range(5)]
        for client in waiting:
            client.sendall(post(b"x"))
        wait(lambda: running.count("quantdrift_sidecar_accept_pauses_total") > 0, "they wait")
        for _ in range(20):
            assert ask(clients[0]) == answer(b"ok")
            assert running.is_ready()
        for client in waiting:
            client.setblocking(False)
            with pytest.raises(BlockingIOError):
                client.recv(KIB)
        for client in clients[:15]:
            client.close()
        for client in waiting:
            client.settimeout(30)
            assert client.recv(KIB) == answer(b"ok")
        assert ask(clients[-1]) == answer(b"ok")
        assert running.workers == [worker]
