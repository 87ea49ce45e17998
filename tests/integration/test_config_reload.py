"""A configuration that changes under a running sidecar: capture follows, and connections stay."""

import secrets
from pathlib import Path

import pytest

from quantdrift.core.config.schema import Stream
from tests.support.sidecar.relay_process import Backend, SidecarProcess, sidecar, wait
from tests.support.sidecar.relay_rig import answer, post

pytestmark = pytest.mark.integration

FAINT = '[[sampling.header_strata]]\nname = "faint"\nrate = 1.0\nheaders = { x-scanner = "faint" }\n'


def taken(running: SidecarProcess, stratum: str) -> float:
    """Return how many of a stratum were taken."""
    return running.count("quantdrift_sidecar_taken_total", stratum=stratum)


def offered(running: SidecarProcess, stratum: str) -> float:
    """Return how many of a stratum were offered."""
    return running.count("quantdrift_sidecar_offered_total", stratum=stratum)


def test_rates_and_strata_follow_on_an_open_connection(
    tmp_path: Path, backend: Backend, nats_url: str
) -> None:
    """One connection outlives five configurations, two refused ones among them; counts keep their names."""
    path = tmp_path / "config.toml"
    with sidecar(
        tmp_path, backend.port, STREAM__URL=nats_url, STREAM__NAME=f"t-{secrets.token_hex(6)}"
    ) as running:
        connection = running.connect()

        def ask() -> None:
            connection.sendall(post(b"a", fields=b"X-Scanner: faint\r\n"))
            assert connection.recv(1000) == answer(b"to a")

        def is_taken() -> bool:
            before = taken(running, "default")
            ask()
            return taken(running, "default") > before

        path.write_text("[sampling]\nrate = 1.0")
        # Five in a row: by the rate of 1 % that held before it would be so once in 10^10 times.
        wait(lambda: all(is_taken() for _ in range(5)), "rate 1 holds")
        path.write_text("[sampling]\nrate = 0.0")
        wait(lambda: not is_taken(), "rate 0 holds")
        assert not any(is_taken() for _ in range(20))
        path.write_text("[sampling]\nrate = 0.0\n" + FAINT)

        def faint() -> bool:
            ask()
            return taken(running, "faint") > 0

        wait(faint, "the new stratum is drawn")
        path.write_text("broken")
        wait(
            lambda: running.count("quantdrift_sidecar_reloads_total", result="refused") == 1, "it is refused"
        )
        path.write_text('[telemetry]\notlp_endpoint = "http://collector.example:4317"\n')
        wait(
            lambda: running.count("quantdrift_sidecar_reloads_total", result="refused") == 2,
            "plaintext to another machine is refused too",
        )
        n_faint = offered(running, "faint")
        ask()
        assert offered(running, "faint") == n_faint + 1
        assert running.count("quantdrift_sidecar_connections_total") == 1
        assert running.is_ready()
        connection.close()


@pytest.mark.release
def test_a_model_that_is_added_is_captured(tmp_path: Path, backend: Backend, nats_url: str) -> None:
    """From a file in models.d, through the links of a mounted ConfigMap."""
    body = b'{"outputs":[],"inputs":[]}'
    backend.reply = lambda asked: asked
    stream = Stream(url=nats_url, name=f"t-{secrets.token_hex(6)}")
    (tmp_path / "models.d").mkdir()
    with sidecar(
        tmp_path, backend.port, STREAM__URL=nats_url, STREAM__NAME=stream.name, SAMPLING__RATE=1
    ) as running:

        def lost() -> bool:
            running.talk(post(body))
            return running.count("quantdrift_sidecar_lost_total", reason="unknown_model") > 0

        wait(lost, "the model is not known")
        (tmp_path / "models.d" / "..1").mkdir()
        (tmp_path / "models.d" / "..1" / "m.toml").write_text('[[models]]\nname = "digits"')
        (tmp_path / "models.d" / "..data").symlink_to("..1")
        (tmp_path / "models.d" / "m.toml").symlink_to("..data/m.toml")

        def published() -> bool:
            running.talk(post(body))
            return running.count("quantdrift_sidecar_published_total", stratum="default") > 0

        wait(published, "it is captured")


@pytest.mark.release
def test_the_log_names_what_changed_without_its_value(tmp_path: Path, backend: Backend) -> None:
    """The digest of all options, and the names of those that differ: enough to find the change that was applied."""
    path = tmp_path / "config.toml"
    with (
        (tmp_path / "log").open("wb") as log,
        sidecar(tmp_path, backend.port, stderr=log.fileno()) as running,
    ):
        wait(running.is_ready, "it is ready")
        path.write_text("[sampling]\nrate = 0.5")
        wait(lambda: "changed options: sampling.rate" in (tmp_path / "log").read_text(), "it is logged")
