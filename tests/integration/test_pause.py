"""Sampling that is stopped: in the fleet or in one sidecar by a command, in a pod by a file; requests go on."""

import http.client
import json
import os
import pwd
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

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


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, backend: Backend) -> Iterator[SidecarProcess]:
    """Return a sidecar with no stream anywhere."""
    with sidecar(
        tmp_path_factory.mktemp("alone"),
        backend.port,
        STREAM__URL=f"nats://127.0.0.1:{free_port()}",
        SAMPLING__RATE=1,
        MODELS='[{"name": "digits"}, {"name": "other"}]',
    ) as running:
        wait(lambda: takes(running), "it takes")
        yield running


def takes(running: SidecarProcess, target: bytes = b"/v2/models/digits/infer") -> bool:
    """Send a request, and return whether it is taken."""

    def taken() -> float:
        return running.count("quantdrift_sidecar_taken_total", stratum="default")

    before = taken()
    running.talk(post(BODY, target))
    return taken() > before


def test_a_command_in_its_container_stops_a_sidecar_without_nats(alone: SidecarProcess) -> None:
    """Who it was is what the kernel says; the reason is shown; it ends by a command, or by itself."""
    done = alone.switch("pause", "--reason", "NATS is away", "--json")
    assert done.returncode == 0, done.stderr
    order = json.loads(done.stdout)["everything"]
    assert (order["by"], order["reason"]) == (
        f"user {pwd.getpwuid(os.getuid()).pw_name} at the sidecar",
        "NATS is away",
    )
    within_5_s(lambda: not takes(alone))
    assert "NATS is away" in alone.switch("pause", "--show").stdout
    assert alone.switch("resume").stdout.startswith("Nothing is paused")
    within_5_s(lambda: takes(alone))
    assert alone.switch("pause", "--for", "4s").returncode == 0
    within_5_s(lambda: not takes(alone))
    within_5_s(lambda: takes(alone))
    done = alone.switch("pause", "--model", "nope")
    assert (done.returncode, "there is no model `nope`" in done.stderr) == (2, True)


def asked(running: SidecarProcess, method: str, path: str, **headers: str) -> int:
    """Return the status that the admin port answers with."""
    connection = http.client.HTTPConnection("127.0.0.1", running.admin_port, timeout=10)
    try:
        connection.putrequest(method, path, skip_host=True)
        for name, value in {"Host": f"127.0.0.1:{running.admin_port}", **headers}.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.putheader("Content-Length", "0")
        connection.endheaders()
        return connection.getresponse().status
    finally:
        connection.close()


def test_who_only_reaches_the_admin_port_pauses_nothing(alone: SidecarProcess) -> None:
    """Not another container of the pod, and no page in the browser of somebody who forwards the port."""
    page = {"Origin": "https://evil.example", "Content_Type": "text/plain"}
    for headers in ({}, {"Host": "localhost"}, page, {**page, "Host": "evil.example"}):
        for path in ("/pause", "/pause?model=digits", "/resume"):
            # For another name than ours the port refuses every request, whatever it asks for.
            refused = 421 if headers.get("Host") == "evil.example" else 403
            assert asked(alone, "POST", path, **headers) == refused
    # Nor does a page learn who paused: a name that was made to point here is not ours.
    assert asked(alone, "GET", "/pause") == 200
    assert asked(alone, "GET", "/pause", Host=f"localhost:{alone.admin_port}") == 200
    assert asked(alone, "GET", "/pause", Host=f"evil.example:{alone.admin_port}") == 421
    assert asked(alone, "GET", "/pause", Origin="https://evil.example") == 403
    assert alone.count("quantdrift_sidecar_paused", model="*") == 0
    assert takes(alone)


def test_another_user_cannot_use_the_socket(alone: SidecarProcess) -> None:
    """Its directory and itself are of the sidecar's user alone; the command says what to do."""
    path = Path(json.loads(alone.get("/pause")[1])["socket"])
    assert (path.parent.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)
    if os.getuid() != 0:
        pytest.skip("to be another user takes root")
    connect = f"import os, socket; os.setuid(65534); socket.socket(socket.AF_UNIX).connect({str(path)!r})"
    done = subprocess.run([sys.executable, "-c", connect], capture_output=True, text=True, check=False)
    assert "PermissionError" in done.stderr


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
