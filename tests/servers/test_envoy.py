"""A real Envoy with the configuration that is there to be copied: what it tells, and that it never waits for us."""

import contextlib
import gzip
import http.client
import json
import re
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import yaml
from tritonclient.grpc import InferInput

from quantdrift.core.records import Protocol
from tests.servers.environment import environment
from tests.servers.server import Server, serving
from tests.support.sidecar.envoy_pod import FAINT, Pod, pod
from tests.support.sidecar.grpc_backend import running_grpc
from tests.support.sidecar.raw_exchanges import REQUEST, RESPONSE
from tests.support.sidecar.relay_process import DEADLINE_S, Backend, free_port, running_backend, wait

pytestmark = [pytest.mark.servers, pytest.mark.timeout(900)]

DEPLOYED = Path(__file__).resolve().parents[2] / "deploy"
ASKED, ANSWERED = json.dumps(REQUEST).encode(), json.dumps(RESPONSE).encode()
PATH = "/v2/models/digits/infer"
# Above what Envoy lets wait for a processor where its configuration does not say otherwise.
LARGE_BYTES = 40_000_000


class Envoy:
    """A running Envoy.

    Parameters
    ----------
    port
        Where clients connect.
    admin
        Port of its statistics.
    """

    def __init__(self, port: int, admin: int) -> None:
        self.port, self._admin = port, admin

    def ask(self, body: bytes, **headers: str) -> tuple[int, bytes]:
        """Ask, and return status and body of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        with contextlib.closing(connection):
            connection.request("POST", PATH, body, headers)
            response = connection.getresponse()
            return response.status, response.read()

    def count(self, name: str) -> int:
        """Return one of its counters."""
        url = f"http://127.0.0.1:{self._admin}/stats?format=json&filter=^{name}$"
        with urllib.request.urlopen(url, timeout=5) as response:
            return sum(stat["value"] for stat in json.load(response)["stats"])

    def told(self, name: str) -> int:
        """Return a counter of its filter."""
        return self.count(f"http.inference.ext_proc.{name}")

    def told_bytes(self) -> int:
        """Return how many bytes the processor was sent."""
        return self.count("cluster.quantdrift.upstream_cx_tx_bytes_total")


@contextlib.contextmanager
def envoy(directory: Path, configuration: dict[str, Any], backend: int, processor: int) -> Iterator[Envoy]:
    """Run Envoy with a configuration whose ports become those that are here."""
    port, admin = free_port(), free_port()
    ports = {8000: port, 9901: admin, 8001: backend, 9002: processor}
    directory.mkdir()
    path = directory / "envoy.yaml"
    path.write_text(json.dumps(moved(configuration, ports)))  # JSON is YAML
    made = environment("envoy")
    program = made.packages / "envoy" / "_bin" / "envoy"
    options = ["--concurrency", "1", "--use-dynamic-base-id", "--log-level", "warning"]
    server = Server(environment=made, http_port=admin)
    with serving(server, [program, "-c", path, *options], health="/ready", directory=directory):
        yield Envoy(port, admin)


def moved(value: Any, ports: dict[int, int]) -> Any:
    """Return a part of a configuration with other ports."""
    if isinstance(value, list):
        return [moved(each, ports) for each in value]
    if isinstance(value, dict):
        return {
            name: ports[each] if name == "port_value" else moved(each, ports) for name, each in value.items()
        }
    return value


def deployed() -> dict[str, Any]:
    """Return Envoy's configuration as it is there to be copied."""
    loaded: dict[str, Any] = yaml.safe_load((DEPLOYED / "envoy" / "envoy.yaml").read_text(encoding="utf-8"))
    return loaded


@contextlib.contextmanager
def stopped(told: Pod) -> Iterator[None]:
    """Stop the intake process inside the block."""
    intake = told.intake()
    intake.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        intake.send_signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    """Return a server behind Envoy; what asks for it is answered with much."""
    with running_backend() as running:
        running.reply = lambda body: bytes(LARGE_BYTES) if body == b"much" else ANSWERED
        yield running


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, nats_url: str) -> Iterator[Pod]:
    """Return the sidecar that Envoy tells."""
    with pod(tmp_path_factory.mktemp("sidecar"), nats_url) as made:
        yield made


@pytest.fixture(scope="module")
def proxy(backend: Backend, told: Pod, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Envoy]:
    """Return an Envoy before the backend."""
    directory = tmp_path_factory.mktemp("envoy") / "http"
    with envoy(directory, deployed(), backend.port, told.port) as running:
        told.begin(lambda: running.ask(ASKED, **FAINT))
        yield running


def test_requests_pass_and_are_told(proxy: Envoy, told: Pod) -> None:
    """Plain, compressed and chunked: the client gets its answer, and the stream has what was sent and got."""
    before = proxy.told("streams_started")
    assert proxy.ask(ASKED, **FAINT) == (200, ANSWERED)
    assert proxy.ask(gzip.compress(ASKED), **FAINT, **{"Content-Encoding": "gzip"}) == (200, ANSWERED)
    stored = told.stored(2)
    assert {one.inputs[0].data for one in stored} == {b"\0\0\x80?\0\0\0@"}
    assert {one.outputs[0].name for one in stored} == {"y"}
    assert {tuple(one.attributes.items()) for one in stored} == {(("header.x-scanner", "faint"),)}
    assert proxy.told("streams_started") == before + 2
    assert (proxy.told("streams_failed"), proxy.told("failure_mode_allowed")) == (0, 0)


@pytest.mark.usefixtures("proxy")
def test_grpc_passes_and_is_told(told: Pod, tmp_path: Path) -> None:
    """Triton's client library through Envoy: one call, and one that fails."""
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    given = InferInput("x", list(values.shape), "FP32")
    given.set_data_from_numpy(values)
    errors = told.lost("error_status")
    with running_grpc() as (_, port), envoy(tmp_path / "grpc", deployed(), port, told.port) as running:
        with triton_grpc.InferenceServerClient(f"127.0.0.1:{running.port}") as client:
            got = client.infer("digits", [given], headers=FAINT)
            with pytest.raises(triton_grpc.InferenceServerException):
                client.infer("digits", [given], headers=FAINT, parameters={"fail": True})
        wait(lambda: told.lost("error_status") == errors + 1, "the failed one is counted")
    (one,) = told.stored(1)
    assert one.protocol == Protocol.OIP_GRPC
    assert one.inputs[0].data == values.tobytes()
    assert one.outputs[0].data == got.as_numpy("y_x").tobytes()


def test_what_is_not_taken_is_hardly_told(proxy: Envoy, told: Pod) -> None:
    """The stream is closed while a large body is still on its way; Envoy sees no error in that."""
    offered, sent = told.count("offered", stratum="default"), proxy.told_bytes()
    assert proxy.ask(bytes(LARGE_BYTES))[0] == 200
    wait(lambda: told.count("offered", stratum="default") == offered + 1, "it is counted")
    assert proxy.told_bytes() - sent < LARGE_BYTES / 2
    assert (proxy.told("streams_failed"), proxy.told("failure_mode_allowed")) == (0, 0)


def test_what_is_too_large_is_told_no_further(proxy: Envoy, told: Pod) -> None:
    """The bound of one exchange ends the stream; the client notices nothing."""
    before = told.lost("too_large")
    assert proxy.ask(bytes(LARGE_BYTES), **FAINT)[0] == 200
    assert proxy.ask(b"much", **FAINT) == (200, bytes(LARGE_BYTES))
    wait(lambda: told.lost("too_large") == before + 2, "both are counted")


def test_a_client_that_goes_away_is_counted(proxy: Envoy, told: Pod, backend: Backend) -> None:
    """Envoy ends its stream some seconds later."""
    before, waiting = told.lost("truncated"), backend.n_waiting
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=DEADLINE_S)
    connection.request("POST", PATH, b"wait", FAINT)
    wait(lambda: backend.n_waiting == waiting + 1, "the backend is asked")
    connection.close()
    wait(lambda: told.lost("truncated") == before + 1, "it is counted")
    backend.go_on.set()


@pytest.mark.parametrize("left", ["initial_stream_window_size", "connection_keepalive"])
def test_a_processor_that_hangs_holds_nobody_up(
    backend: Backend, told: Pod, tmp_path: Path, left: str
) -> None:
    """Neither small nor large bodies, by either of the two options: without both, large ones would wait for ever."""
    configuration = deployed()
    options = cluster_of(configuration)["typed_extension_protocol_options"]
    (http,) = options.values()
    http2 = http["explicit_http_config"]["http2_protocol_options"]
    http["explicit_http_config"]["http2_protocol_options"] = {left: http2[left]}
    with envoy(tmp_path / left, configuration, backend.port, told.port) as running, stopped(told):
        assert running.ask(ASKED, **FAINT) == (200, ANSWERED)
        assert running.ask(bytes(LARGE_BYTES), **FAINT)[0] == 200
        assert running.ask(b"much", **FAINT) == (200, bytes(LARGE_BYTES))
    wait(lambda: told.balance() == 0, "everything is accounted for")


def test_a_processor_that_goes_on_is_told_again(proxy: Envoy, told: Pod) -> None:
    """Envoy gives it up while it hangs, lets go of what waited for it, and comes back by itself."""
    given_up = proxy.count("cluster.quantdrift.upstream_cx_destroy_local")
    with stopped(told):
        assert proxy.ask(bytes(LARGE_BYTES), **FAINT)[0] == 200
        wait(lambda: proxy.count("cluster.quantdrift.upstream_cx_destroy_local") > given_up, "it is given up")
        assert proxy.ask(ASKED, **FAINT) == (200, ANSWERED)
    told.begin(lambda: proxy.ask(ASKED, **FAINT))


def test_a_processor_that_dies_is_found_again(proxy: Envoy, told: Pod) -> None:
    """Requests pass meanwhile, untold."""
    told.intake().kill()
    for _ in range(5):
        assert proxy.ask(ASKED, **FAINT) == (200, ANSWERED)
    told.begin(lambda: proxy.ask(ASKED, **FAINT))


def test_an_envoy_that_waits_for_answers_is_not_held_up(backend: Backend, told: Pod, tmp_path: Path) -> None:
    """Who forgets observability mode loses the exchanges, and nothing else."""
    before = told.lost("framing")
    configuration = deployed()
    filter_of(configuration)["observability_mode"] = False
    with envoy(tmp_path / "waits", configuration, backend.port, told.port) as running:
        assert running.ask(ASKED, **FAINT) == (200, ANSWERED)
        assert running.told("message_timeouts") == 0
    wait(lambda: told.lost("framing") == before + 1, "it is counted")


@pytest.mark.parametrize("fails_open", [True, False])
def test_a_token_is_sent_and_asked_for(
    backend: Backend, nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, fails_open: bool
) -> None:
    """By the page's few lines; with a wrong token requests pass, and are told to nobody."""
    page = (DEPLOYED.parent / "docs" / "how-to" / "envoy.md").read_text(encoding="utf-8")
    (written,) = re.findall(r"^```yaml\n(grpc_service:.*?)^```", page, re.DOTALL | re.MULTILINE)
    configuration = deployed()
    filter_of(configuration).update(yaml.safe_load(written), failure_mode_allow=fails_open)
    token = tmp_path / "token"
    token.write_text("a-token-of-sixteen")
    with pod(tmp_path, nats_url, INTAKE__TOKEN_FILE=token) as asking:
        monkeypatch.setenv("QUANTDRIFT_INTAKE_TOKEN", "a-token-of-sixteen")
        with envoy(tmp_path / "knows", configuration, backend.port, asking.port) as running:
            asking.begin(lambda: running.ask(ASKED, **FAINT))
        offered = asking.count("offered")
        monkeypatch.setenv("QUANTDRIFT_INTAKE_TOKEN", "another-token-of-it")
        with envoy(tmp_path / "guesses", configuration, backend.port, asking.port) as running:
            assert running.ask(ASKED, **FAINT) == (200, ANSWERED)
            wait(lambda: asking.count("intake_refused", reason="wrong_token") == 1, "it is counted")
            assert running.ask(ASKED, **FAINT) == (200, ANSWERED)
        assert asking.count("offered") == offered


def test_istio_is_told_to_do_the_same(backend: Backend, told: Pod, tmp_path: Path) -> None:
    """Filter and cluster of its EnvoyFilter, in a real Envoy."""
    text = (DEPLOYED / "kubernetes" / "envoy" / "envoyfilter.yaml").read_text(encoding="utf-8")
    patches = {
        patch["applyTo"]: patch["patch"]["value"] for patch in yaml.safe_load(text)["spec"]["configPatches"]
    }
    configuration = deployed()
    filter_of(configuration).clear()
    filter_of(configuration).update(patches["HTTP_FILTER"]["typed_config"])
    cluster_of(configuration).clear()
    cluster_of(configuration).update(patches["CLUSTER"])
    with envoy(tmp_path / "istio", configuration, backend.port, told.port) as running:
        assert running.ask(ASKED, **FAINT) == (200, ANSWERED)
        told.begin(lambda: running.ask(ASKED, **FAINT))


def cluster_of(configuration: dict[str, Any]) -> dict[str, Any]:
    """Return the processor's cluster."""
    clusters: list[dict[str, Any]] = configuration["static_resources"]["clusters"]
    return clusters[1]


def filter_of(configuration: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the processing filter."""
    (listener,) = configuration["static_resources"]["listeners"]
    options = listener["filter_chains"][0]["filters"][0]["typed_config"]
    found: dict[str, Any] = options["http_filters"][0]["typed_config"]
    return found
