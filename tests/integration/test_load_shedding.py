"""More traffic than the local limits allow, through a whole sidecar into a real NATS."""

import time
from pathlib import Path

import pytest

from tests.support.sidecar.flooding_client import CAP, REPLY, Flood, capped
from tests.support.sidecar.relay_process import Backend, sidecar, wait

pytestmark = pytest.mark.integration

SECONDS = 5.0


@pytest.fixture
def backend(backend: Backend) -> Backend:
    """Return a backend that answers as a model does."""
    backend.reply = lambda _: REPLY
    return backend


def test_a_flood_leaves_at_the_caps_rate_and_every_other_exchange_is_counted(
    tmp_path: Path, nats_url: str, backend: Backend
) -> None:
    """Published are the cap's; what was refused, early or late, is lost by its name, under its stratum and model."""
    with sidecar(tmp_path, backend.port, **capped(nats_url)) as running:
        before = time.monotonic()
        with Flood(running) as flood:
            wait(lambda: time.monotonic() - before > SECONDS, "some seconds")
        elapsed_s = time.monotonic() - before

        def count(name: str, **labels: str) -> float:
            return running.count(f"quantdrift_sidecar_{name}_total", stratum="faint", **labels)

        wait(lambda: count("published") + count("lost") == flood.n_asked, "every exchange has ended")
        assert flood.n_wrong == 0
        assert count("offered") == count("taken") == flood.n_asked
        assert 0.7 * CAP * elapsed_s <= count("published") <= CAP * (elapsed_s + 1) + 1
        assert count("lost") == count("lost", reason="rate_cap", model="digits") > count("published")
