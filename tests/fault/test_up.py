"""`quantdrift up` while what stands behind the sidecar is away, refuses, or hangs: requests are answered all the time."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quantdrift.core.config.load import load
from quantdrift.core.config.state import shared_digest
from quantdrift.core.process.states import STATES, PartState, read_states
from quantdrift.storage.server.postgres import PostgresServer
from tests.support.commands import invoked, started
from tests.support.shadow.onnx_models import linear_model, saved
from tests.support.sidecar.relay_process import Backend, free_port, running_backend
from tests.support.sidecar.relay_rig import answer, post

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

DEADLINE_S = 90.0
END_S = 60.0
"""Below the sum of the grace periods of the roles, here 1 s each, and of the servers, with room for a busy machine."""


# `quantdrift up`, with seconds for the minutes after which it replaces a process that hangs, while a file exists.
IMPATIENT = """
import os
from quantdrift.cli.run import up

class Impatient(dict):
    def get(self, name):
        is_short = name in ("monitor", "postgres", "sidecar") and os.path.exists(os.environ["IMPATIENT"])
        return 5.0 if is_short else super().get(name)

up.SILENT_S = Impatient(up.SILENT_S)
from quantdrift.cli.main import main
main()
"""


class Up:
    """A running `quantdrift up` with a client that never stops asking."""

    def __init__(
        self,
        directory: Path,
        backend: Backend,
        config: str,
        *,
        program: tuple[str, ...] = ("-m", "quantdrift"),
        stdout: int | None = None,
        **environment: str,
    ) -> None:
        self.data = directory / "data"
        self.config = directory / "config.toml"
        self._port = free_port()
        self._output = directory / "output"
        admins = [free_port() for _ in range(3)]
        self.admins = dict(zip(("sidecar", "shadow", "monitor"), admins, strict=True))
        self.config.write_text(
            f'[sidecar]\nlisten = "127.0.0.1:{self._port}"\nbackend = "127.0.0.1:{backend.port}"\n'
            f'admin = "127.0.0.1:{admins[0]}"\ndrain_delay_s = 0\ngrace_s = 1\n'
            f'[shadow]\nadmin = "127.0.0.1:{admins[1]}"\n'
            f'[monitor]\nadmin = "127.0.0.1:{admins[2]}"\n[web]\nlisten = ""\n{config}'
        )
        kept = {name: value for name, value in os.environ.items() if not name.startswith("QUANTDRIFT")}
        self._program, self._stdout, self._environment = program, stdout, {**kept, **environment}
        self.process = self._started()
        self._asked = threading.Thread(target=self._ask)
        self._over = threading.Event()
        self.n_answered = 0
        self.refused: list[str] = []

    def _started(self) -> subprocess.Popen[bytes]:
        with self._output.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, *self._program, "up", "-c", self.config, "--data", self.data],
                stdout=output if self._stdout is None else self._stdout,
                stderr=output,
                env=self._environment,
            )

    def kill(self) -> None:
        """Kill it, and start it again after some more requests have been answered."""
        self.process.kill()
        self.process.wait()
        before, until = self.n_answered, time.monotonic() + DEADLINE_S
        while self.n_answered < before + 20 and not self.refused and time.monotonic() < until:
            time.sleep(0.01)
        self.process = self._started()

    def said(self) -> str:
        """Return everything that it and its children have written."""
        return self._output.read_text()

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition."""
        until = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.process.poll() is None, f"it has ended: {self.said()}"
            assert time.monotonic() < until, f"not within {DEADLINE_S:g} s: {what}\n{self.said()}"
            time.sleep(0.05)

    def wait_for_line(self, *words: str, n: int = 1) -> None:
        """Wait until `n` lines hold all `words`."""
        self.wait(
            lambda: sum(all(word in line for word in words) for line in self.said().splitlines()) >= n,
            f"a line with {words}",
        )

    def serves(self) -> None:
        """Wait until more requests have been answered."""
        before = self.n_answered
        self.wait(lambda: self.n_answered > before + 20, "requests are answered")
        assert not self.refused

    def begin(self) -> None:
        """Wait until the first request is answered, and ask without a break from then on."""
        self.wait(lambda: self._answer(b"first") == answer(b"to first"), "it serves")
        self._asked.start()

    def child(self, *words: str) -> psutil.Process:
        """Return the process below it whose command has all `words`."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                line = process.cmdline()
                if all(any(word in part for part in line) for word in words):
                    return process
        raise AssertionError(f"no process {words}")

    def n_children(self, *words: str) -> int:
        """Return how many processes below it have a command with all `words`."""
        n = 0
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                line = process.cmdline()
                n += all(any(word in part for part in line) for word in words)
        return n

    def states(self) -> dict[str, PartState]:
        """Return the states that it writes for other commands."""
        return read_states(self.data / STATES)

    def metric(self, name: str, *, port: int | None = None, **labels: str) -> float:
        """Return the sum of a metric of the sidecar, or of the part at `port`, over the series with these labels; 0 if there is none."""
        url = f"http://127.0.0.1:{port or self.admins['sidecar']}/metrics"
        try:
            with urllib.request.urlopen(url, timeout=10) as response:
                text = response.read().decode()
        except OSError:  # it is being started
            return 0.0
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def stop(self) -> int:
        """Ask it to end, and return its exit code."""
        self._over.set()
        if self._asked.is_alive():
            self._asked.join()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(END_S)

    def _ask(self) -> None:
        while not self._over.is_set():
            body = b"%d" % self.n_answered
            # A worker that is relieved says in its last answer that the connection ends.
            if (got := self._answer(body)).replace(b"Connection: close\r\n", b"") != answer(b"to " + body):
                self.refused.append(repr(got))
                return
            self.n_answered += 1
            self._over.wait(0.01)

    def _answer(self, body: bytes) -> bytes:
        got = b""
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 30) as client:
            client.sendall(post(body))
            client.shutdown(socket.SHUT_WR)
            while part := client.recv(65_536):
                got += part
        return got


@contextlib.contextmanager
def _up(directory: Path, config: str, **how: Any) -> Iterator[Up]:
    with running_backend() as backend:
        up = Up(directory, backend, config, **how)
        family: list[psutil.Process] = []
        try:
            up.begin()
            yield up
            up.serves()
            family = psutil.Process(up.process.pid).children(recursive=True)
            assert up.stop() == 0
            assert psutil.wait_procs(family, timeout=END_S)[1] == []
        finally:
            up.process.kill()
            up.process.wait()
            up._over.set()
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


@pytest.mark.release
def test_nothing_that_happens_behind_it_ends_the_serving_path(memory_path: Path) -> None:
    """A reference that is gone, a database that cannot start, one that hangs: each is told, and mends by itself."""
    reference = saved(linear_model(), memory_path / "reference.onnx")
    models = f'[[models]]\nname = "m"\n[[models.references]]\npath = "{reference}"\n'
    with _up(memory_path, models) as up:
        up.wait_for_line("quantdrift is up")

        away = reference.rename(memory_path / "away")
        up.child("quantdrift", "shadow", "--config").kill()
        up.wait_for_line("shadow is down since", str(reference))
        up.serves()
        away.rename(reference)
        up.wait_for_line("shadow runs again")
        up.serves()

        files = up.data / "postgres" / "data"
        mode = files.stat().st_mode
        files.chmod(0)  # as a full disk: it can neither be read by the server nor written to
        up.child("bin/postgres", "-D").kill()
        up.wait_for_line("postgres is down since", "Postgres does not start", "ermission")
        up.serves()
        files.chmod(mode)
        up.wait_for_line("postgres runs again")
        up.serves()

        postmaster = up.child("bin/postgres", "-D")
        for process in (postmaster, *postmaster.children(recursive=True)):
            process.suspend()
        up.child("quantdrift", "shadow", "--config").kill()
        up.serves()
        # Its end is asked for while the database hangs.


@pytest.mark.release
def test_killed_and_started_again_it_has_answered_every_request(memory_path: Path) -> None:
    """Its relay workers go on without it, and the next one takes the port from them while requests arrive.

    With `telemetry.log_json` every line of it and its processes is JSON, names its module, and says at no start what it did not do.
    """
    with _up(memory_path, "", QUANTDRIFT__TELEMETRY__LOG_JSON="true") as up:
        for n in (1, 2):
            up.wait_for_line("quantdrift is up", n=n)
            up.kill()
            up.wait_for_line("took over 127.0.0.1", n=n)
            up.serves()
        lines = [json.loads(line) for line in up.said().splitlines()]
    assert sum("applied the schema revisions" in line["message"] for line in lines) == 1
    assert not [line for line in lines if line["logger"] == "__main__"]
    relays = [line["message"] for line in lines if line["role"].startswith("relay")]
    assert [message for message in relays if message.startswith("a new supervisor's workers have the port: ")]
    assert not [message for message in relays if "SIGTERM" in message]


@pytest.mark.release
def test_a_broken_configuration_ends_nothing(memory_path: Path) -> None:
    """Killed and started again beside it, every part goes on with the one that was accepted last."""
    with _up(memory_path, "") as up:
        up.wait_for_line("quantdrift is up")
        good = up.config.read_text()
        up.config.write_text(good + "[sampling\n")
        up.wait_for_line("the changed configuration is refused")
        up.kill()
        up.wait_for_line("quantdrift is up", n=2)
        up.wait_for_line("The last one that was accepted is used instead")
        up.child("quantdrift", "monitor").kill()
        up.wait_for_line("monitor runs again")
        up.serves()
        done = invoked(
            "status", "-c", str(up.config), "--data", str(up.data), "--json", directory=memory_path
        )
        (note,) = json.loads(done.stdout)["notes"]
        assert "config.toml cannot be read" in note
        assert "The last one that was accepted is used instead" in note
        up.config.write_text(good + "[sampling]\nrate = 0.5\n")
        up.wait_for_line("the changed configuration is in effect")


def _parts_with(up: Up, config: Path, *roles: str) -> bool:
    """Return whether these parts answer, and say that they have the configuration in the file."""
    digest = shared_digest(load(config))
    return all(up.metric("quantdrift_config", port=up.admins[role], digest=digest) == 1 for role in roles)


@pytest.mark.release
def test_a_changed_configuration_reaches_every_part(memory_path: Path) -> None:
    """The sidecar takes it at once, the others are restarted; what the sidecar takes at its next start, it gets without losing a request."""
    reference = saved(linear_model(), memory_path / "reference.onnx")
    page = free_port()
    with _up(memory_path, "") as up:
        up.wait_for_line("quantdrift is up")
        first = up.config.read_text()
        up.config.write_text(f'{first}[[models]]\nname = "m"\n[[models.references]]\npath = "{reference}"\n')
        up.wait(
            lambda: _parts_with(up, up.config, "sidecar", "shadow", "monitor"), "every part has the model"
        )
        up.wait_for_line("shadow and monitor are restarted with the changed configuration: models.m")
        up.wait_for_line("shadow runs with the changed configuration")
        up.wait_for_line("monitor runs with the changed configuration")
        up.wait(lambda: up.metric("quantdrift_up_running", process="monitor") == 1, "the monitor works")
        assert up.metric("quantdrift_up_restarts_total") == 0
        assert "is down since" not in up.said()
        up.serves()

        config = up.config.read_text()
        up.config.write_text(config.replace('[web]\nlisten = ""', f'[web]\nlisten = "127.0.0.1:{page}"'))
        up.wait_for_line(f"the live page is at http://127.0.0.1:{page}")
        up.config.write_text(config)
        up.wait(lambda: "web" not in up.states(), "the page has ended")

        up.config.write_text(config.replace("drain_delay_s = 0\n", "drain_delay_s = 0\nworkers = 2\n"))
        up.wait_for_line("sidecar.workers: the sidecar takes this at its next start", "up --restart sidecar")
        done = started("up", "--restart", "sidecar", "--data", str(up.data), directory=memory_path)
        assert done.returncode == 0, done.stderr
        up.wait_for_line("sidecar runs again, as asked")
        up.wait(lambda: up.n_children("quantdrift.sidecar.relay.worker") == 2, "two relay workers serve")
        up.serves()

        refused = started("up", "--restart", "web", "--data", str(up.data), directory=memory_path)
        assert refused.returncode == 2
        assert "runs no web; it runs sidecar, shadow, monitor" in refused.stderr
    refused = started("up", "--restart", "web", "--data", str(up.data), directory=memory_path)
    assert refused.returncode == 2
    assert "no `quantdrift up` runs with the data directory" in refused.stderr


@pytest.mark.release
def test_other_servers_wait_for_a_restart(memory_path: Path) -> None:
    """Of `quantdrift up` itself: a part at another database than the others would be worse than an old option."""
    with _up(memory_path, "") as up:
        up.wait_for_line("quantdrift is up")
        config = up.config.read_text()
        up.config.write_text(f'{config}[storage]\ndsn_file = "dsn"\n[sampling]\nrate = 0.5\n')
        up.wait_for_line("reaches no part but the sidecar", "because of storage.dsn_file")
        up.config.write_text(f"{config}[sampling]\nrate = 0.5\n")
        up.wait_for_line("shadow and monitor are restarted with the changed configuration: sampling.rate")
        up.wait_for_line("monitor runs with the changed configuration")


@pytest.mark.release
def test_a_configuration_that_the_sidecar_refuses_is_not_kept(memory_path: Path) -> None:
    """Its file is sound and a key is missing: the next start uses the configuration before it, as the sidecar did."""
    with _up(memory_path, "") as up:
        up.wait_for_line("quantdrift is up")
        good = up.config.read_text()
        up.config.write_text(good + '[capture]\nheaders = ["x-user"]\nhmac = ["header.x-user"]\n')
        up.wait_for_line("the changed configuration is refused", "capture.hmac needs a key")
        for n in (2, 3):
            up.kill()
            up.wait_for_line("quantdrift is up", n=n)
            up.serves()


@pytest.mark.release
async def test_it_serves_before_its_database_is_there_and_while_nats_refuses_the_stream(
    memory_path: Path,
) -> None:
    """The rest comes up when the database does, and the stream is made once the configuration asks for less."""
    dsn = f"postgresql://quantdrift:away@127.0.0.1:{free_port()}/quantdrift"
    (memory_path / "dsn").write_text(dsn)
    large = "max_bytes = 90000000000000000"
    with _up(memory_path, f'[storage]\ndsn_file = "dsn"\n[stream]\n{large}\n') as up:
        up.wait_for_line(
            "db upgrade is down since", "Postgres at 127.0.0.1", "is not available: connection refused"
        )
        up.serves()
        with PostgresServer(memory_path / "postgres", durable=False) as postgres:
            (memory_path / "dsn").write_text(postgres.dsn)
            up.wait_for_line("db upgrade runs again")
            up.wait_for_line("shadow is down since", "NATS refuses the stream", "stream.max_bytes")
            up.serves()
            assert "quantdrift is up" not in up.said()
            up.config.write_text(up.config.read_text().replace(large, "max_bytes = 100000000"))
            up.wait_for_line("quantdrift is up")
            up.serves()
            assert up.said().count("shadow is down since") == 1, "what repeats is told once"


@pytest.mark.release
def test_restarts_of_every_process_are_shown_with_their_reason(memory_path: Path) -> None:
    """The sidecar exports what `up` restarts, servers included, and which of its processes work."""
    with _up(memory_path, "") as up:
        up.wait_for_line("postgres is up")
        up.child("quantdrift.cli.run.embedded", "nats").kill()
        up.wait(
            lambda: up.metric("quantdrift_up_restarts_total", process="nats") == 1, "a restart is counted"
        )
        assert up.metric("quantdrift_up_restarts_total", process="nats", reason="SIGKILL") == 1
        up.wait(lambda: up.metric("quantdrift_up_running", process="nats") == 1, "the server works again")
        assert up.metric("quantdrift_up_running", process="postgres") == 1
        up.serves()


@pytest.mark.release
def test_a_process_that_hangs_is_replaced_and_a_sidecar_that_hangs_is_left_to_serve(
    memory_path: Path,
) -> None:
    """Each is stopped in the middle of its work. The relay workers of a sidecar serve without its first process."""
    impatient = memory_path / "impatient"
    with _up(memory_path, "", program=("-c", IMPATIENT), IMPATIENT=str(impatient)) as up:
        up.wait_for_line("quantdrift is up")
        monitor = up.child("quantdrift", "monitor", "--config")
        around_postgres = up.child("quantdrift.cli.run.embedded", "postgres")
        sidecar = up.child("quantdrift", "sidecar", "--config")
        for process in (monitor, around_postgres, sidecar):
            process.suspend()
        impatient.touch()
        up.wait_for_line(
            "monitor is down since",
            "it was stopped by a signal",
            "gave no heartbeat for",
            "and was killed; it is restarted",
        )
        up.wait_for_line("postgres is down since", "gave no heartbeat for")
        up.wait_for_line("sidecar is down since", "its first process was stopped by a signal", "left alone")
        impatient.unlink()  # a start may take longer on a busy machine
        up.wait_for_line("monitor runs again")
        up.wait_for_line("postgres runs again")
        up.serves()
        assert sidecar.status() == psutil.STATUS_STOPPED
        sidecar.resume()
        up.wait_for_line("sidecar runs again")


@pytest.mark.release
def test_it_goes_on_when_nobody_reads_its_output_any_more(memory_path: Path) -> None:
    """As in `quantdrift up | head`: what the migration prints must not end it, or shadow and monitor never start."""
    reader, writer = os.pipe()
    os.close(reader)
    with _up(memory_path, "", stdout=writer) as up:
        os.close(writer)

        def works() -> bool:
            with contextlib.suppress(OSError, KeyError, ValueError):
                return bool(json.loads((up.data / "processes.json").read_text())["monitor"]["works"])
            return False

        up.wait(works, "the monitor works")
