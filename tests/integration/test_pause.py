"""Sampling that is stopped: in the fleet by a command, in a pod by its admin port or a file; requests go on."""

import json
import secrets
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import invoked
from tests.support.sidecar.relay_process import (
    Backend,
    SidecarProcess,
    free_port,
    running_backend,
    sidecar,
    wait,
)
from tests.support.sidecar.relay_rig import post

pytestmark = pytest.mark.integration

BODY = b'{"outputs":[],"inputs":[]}'
OTHER = b"/v2/models/other/infer"


class Pod:
    """A sidecar that takes everything of two models."""

    def __init__(self, running: SidecarProcess, config: Path) -> None:
        self.running, self.config = running, config

    def count(self, name: str) -> float:
        """Return a counter of the sidecar."""
        return self.running.count(f"quantdrift_sidecar_{name}_total", stratum="default")

    def rises(self, name: str, target: bytes = b"/v2/models/digits/infer") -> bool:
        """Send a request; return whether a count rises with it: what is published, once it is acknowledged."""
        before, taken, ended = self.count(name), self.count("taken"), self._ended()
        self.running.talk(post(BODY, target))
        if self.count("taken") > taken:
            wait(lambda: self._ended() > ended, "the request is dealt with")
        return self.count(name) > before

    def _ended(self) -> float:
        return self.count("published") + self.count("thinned")

    def quantdrift(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command against its stream."""
        return invoked(*arguments, "-c", str(self.config), directory=self.config.parent)

    def switch(self, path: str) -> Any:
        """Ask the admin port to change something."""
        url = f"http://127.0.0.1:{self.running.admin_port}{path}"
        with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=5) as response:
            return json.load(response)


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    """Return a backend that answers with what it was asked."""
    with running_backend() as server:
        server.reply = lambda asked: asked
        yield server


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory, backend: Backend, nats_url: str) -> Iterator[Pod]:
    """Return a running pod."""
    directory = tmp_path_factory.mktemp("pause")
    stream = f"t-{secrets.token_hex(6)}"
    with sidecar(
        directory,
        backend.port,
        STREAM__URL=nats_url,
        STREAM__NAME=stream,
        SAMPLING__RATE=1,
        SIDECAR__PAUSE_FILE=str(directory / "pause"),
        MODELS='[{"name": "digits"}, {"name": "other"}]',
    ) as running:
        config = directory / "command.toml"
        config.write_text(
            f'[stream]\nurl = "{nats_url}"\nname = "{stream}"\n[[models]]\nname = "digits"\n[[models]]\nname = "other"'
        )
        made = Pod(running, config)
        wait(lambda: made.rises("published"), "it captures")
        yield made


def within_5_s(condition: Callable[[], bool]) -> None:
    """Check that `condition` comes true in the time that is promised, and a little for this test."""
    begin = time.monotonic()
    wait(condition, "it holds")
    assert time.monotonic() - begin < 7


def test_a_command_stops_the_fleet_and_lets_it_go_on(pod: Pod) -> None:
    """Requests are counted on and answered; who, until when and why is shown."""
    done = pod.quantdrift("pause", "--for", "2h", "--reason", "load test")
    assert done.returncode == 0, done.stderr
    assert "everything" in done.stdout
    assert "load test" in done.stdout
    within_5_s(lambda: not pod.rises("taken"))
    offered = pod.count("offered")
    assert not pod.rises("taken")
    assert pod.count("offered") == offered + 1
    assert pod.running.count("quantdrift_sidecar_paused", model="*") == 1
    shown = json.loads(pod.quantdrift("pause", "--show", "--json").stdout)
    assert shown["everything"]["by"] == "NATS user quantdrift"
    assert pod.quantdrift("resume").stdout.startswith("Nothing is paused")
    within_5_s(lambda: pod.rises("published"))


def test_one_model_is_paused_by_its_name(pod: Pod) -> None:
    """The other one is captured on."""
    assert pod.quantdrift("pause", "--model", "other").returncode == 0
    within_5_s(lambda: pod.rises("thinned", OTHER))
    assert pod.rises("published")
    assert pod.quantdrift("resume", "--model", "other").returncode == 0
    within_5_s(lambda: pod.rises("published", OTHER))


def test_a_pause_ends_by_itself(pod: Pod) -> None:
    """When its time is over."""
    assert pod.quantdrift("pause", "--for", "4s").returncode == 0
    within_5_s(lambda: not pod.rises("taken"))
    within_5_s(lambda: pod.rises("published"))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["pause", "--model", "nope"], "known are: digits, other"),
        (["pause", "--for", "soon"], "write 30m"),
        (["pause", "--for", "0s"], "up to a year"),
        (["resume", "--model", "other"], "is not paused"),
    ],
)
def test_what_cannot_be_is_refused(pod: Pod, arguments: list[str], told: str) -> None:
    """With what to do instead."""
    done = pod.quantdrift(*arguments)
    assert done.returncode == 2
    assert told in done.stderr


def test_the_admin_port_stops_a_pod_without_nats(tmp_path: Path, backend: Backend) -> None:
    """From within the pod, with no stream anywhere."""
    with sidecar(
        tmp_path,
        backend.port,
        STREAM__URL=f"nats://127.0.0.1:{free_port()}",
        SAMPLING__RATE=1,
        MODELS='[{"name": "digits"}]',
    ) as running:
        pod = Pod(running, tmp_path)

        def is_taken() -> bool:
            before = pod.count("taken")
            running.talk(post(BODY))
            return pod.count("taken") > before

        wait(is_taken, "it takes")
        assert pod.switch("/pause")["here"]["everything"]["by"] == "the admin port"
        within_5_s(lambda: not is_taken())
        pod.switch("/resume")
        within_5_s(is_taken)


def test_a_file_stops_a_pod_or_a_model(pod: Pod) -> None:
    """While it is there; its lines name models, an empty one means everything."""
    file = pod.config.parent / "pause"
    file.write_text("# not this one for now\nother\n")
    within_5_s(lambda: pod.rises("thinned", OTHER))
    assert pod.rises("published")
    file.write_text("")
    within_5_s(lambda: not pod.rises("taken"))
    file.unlink()
    within_5_s(lambda: pod.rises("published"))
