"""The capture process is killed while it makes the relay workers refuse requests."""

from pathlib import Path

import pytest

from tests.support.sidecar.flooding_client import REPLY, Flood, capped
from tests.support.sidecar.relay_process import Backend, sidecar, wait

pytestmark = pytest.mark.fault

N_KILLED = 2


@pytest.fixture
def backend(backend: Backend) -> Backend:
    """Return a backend that answers as a model does."""
    backend.reply = lambda _: REPLY
    return backend


@pytest.mark.release
def test_a_capture_process_that_dies_while_it_refuses_refuses_nothing_for_ever(
    tmp_path: Path, nats_url: str, backend: Backend
) -> None:
    """Its successor publishes; clients see nothing; and none is counted twice. What a killed process had not read yet nobody can tell of."""
    with sidecar(tmp_path, backend.port, **capped(nats_url)) as running:

        def count(name: str) -> float:
            return running.count(f"quantdrift_sidecar_{name}_total", stratum="faint")

        with Flood(running) as flood:
            for _ in range(N_KILLED):
                lost = count("lost")
                wait(lambda lost=lost: count("lost") > lost + 500, "a flood is refused")  # type: ignore[misc]
                victim = running.captures[0]
                victim.kill()
                wait(lambda victim=victim: running.captures not in ([], [victim]), "a successor")  # type: ignore[misc]
                published = count("published")
                wait(lambda published=published: count("published") > published + 20, "it publishes")  # type: ignore[misc]
        assert flood.n_wrong == 0
        assert count("published") + count("lost") <= count("taken") == flood.n_asked
