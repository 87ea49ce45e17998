"""A sidecar that loses a worker, or is told to end, while clients keep their connections busy."""

import logging
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sidecar.keepalive_clients import Load
from tests.support.sidecar.relay_process import Backend, running_backend, sidecar, wait

pytestmark = pytest.mark.fault

_LOG = logging.getLogger(__name__)

N_CLIENTS = 8
N_KILLS = 2


class Ledger:
    """How often the backend was asked each thing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.asked: Counter[bytes] = Counter()

    def reply(self, body: bytes) -> bytes:
        """Take note, and answer."""
        with self._lock:
            self.asked[body] += 1
        return b"to " + body


@pytest.fixture
def ledger() -> Ledger:
    """Return an empty ledger."""
    return Ledger()


@pytest.fixture
def backend(ledger: Ledger) -> Iterator[Backend]:
    """Return a running backend that keeps the ledger."""
    with running_backend() as server:
        server.reply = ledger.reply
        yield server


@pytest.mark.release
def test_a_worker_killed_under_load_costs_its_own_connections(tmp_path: Path, backend: Backend) -> None:
    """At most one request of each of them, which succeeds when it is sent again: the port is never away."""
    (tmp_path / "one").mkdir()
    with (
        sidecar(tmp_path / "one", backend.port, SIDECAR__WORKERS=2, SAMPLING__RATE=0) as running,
        Load(lambda: [running.port], N_CLIENTS) as load,
    ):
        for _ in range(N_KILLS):
            before = load.n_good
            wait(lambda before=before: load.n_good > before + 100, "clients are served")  # type: ignore[misc]
            victim = running.workers[0]
            victim.send_signal(signal.SIGKILL)
            wait(lambda victim=victim: not victim.is_running(), "it is dead")  # type: ignore[misc]
            wait(lambda: len(running.workers) == 2, "there is another")
        before = load.n_good
        wait(lambda: load.n_good > before + 100, "clients are served again")
        wait(lambda: len(running.workers) == 2, "both workers are there")
        load.stop()
    failed = load.n_untouched + load.n_cut
    _LOG.info("%d requests, %d failed with %d workers killed", load.n_good, failed, N_KILLS)
    assert 0 < failed <= N_KILLS * N_CLIENTS
    assert load.n_failed_twice <= N_KILLS - 1  # the other worker was killed as well, just then
    assert load.n_refused == 0
    assert not load.wrong


def test_a_sidecar_that_ends_under_load_fails_no_request(
    tmp_path: Path, backend: Backend, ledger: Ledger
) -> None:
    """The last response on each connection announces its end, and the client goes on at another instance."""
    for name in ("ending", "other"):
        (tmp_path / name).mkdir()
    options = {"SIDECAR__DRAIN_DELAY_S": 0.6, "SIDECAR__GRACE_S": 6, "SAMPLING__RATE": 0}
    with (
        sidecar(tmp_path / "other", backend.port, **options) as other,
        sidecar(tmp_path / "ending", backend.port, **options) as ending,
        Load(lambda: [ending.port, other.port], N_CLIENTS) as load,
    ):
        wait(lambda: load.n_good > 500, "clients are served")
        ending.process.send_signal(signal.SIGTERM)
        wait(lambda: not ending.is_ready(), "it is not ready any more")
        before = load.n_good
        assert load.n_refused == 0
        wait(lambda: load.n_good > before + 100, "clients are served on")
        assert load.n_untouched == 0, "during the delay nobody is sent away"
        assert ending.process.wait(30) == 0
        before = load.n_good
        wait(lambda: load.n_good > before + 100, "clients are served by the other")
        assert other.count("quantdrift_sidecar_offered_total") > 100
        load.stop()
    assert load.n_untouched == load.n_cut == load.n_failed_twice == 0
    assert not load.wrong
    assert 0 < load.n_told <= N_CLIENTS
    assert set(ledger.asked.values()) == {1}
    assert len(ledger.asked) == load.n_good
