"""`quantdrift load` as typed, against real servers of this host, and `gate --load` on what it wrote."""

import asyncio
import contextlib
import itertools
import json
import re
import signal
import ssl
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

import quantdrift
from benchmarks.serial_server import SerialServer
from quantdrift.core.codec import encode
from quantdrift.core.config.schema import Stream
from quantdrift.core.stream.connection import Queue
from quantdrift.release.load_test.load import LoadResult
from tests.support.certificates import Authority
from tests.support.commands import invoked
from tests.support.shadow.onnx_models import exchange_of, inputs_of
from tests.support.sidecar.grpc_backend import running_grpc

pytestmark = pytest.mark.integration

SERVICE_S = 0.004
SHORT = ("--step", "0.2", "--sustain", "0.5")


class _Server(SerialServer):
    """A server that answers one request at a time, in a thread of the test; it can answer otherwise, or break off after a number of requests."""

    def __init__(self, most_waiting: int = sys.maxsize) -> None:
        super().__init__(SERVICE_S, most_waiting)
        self.n_served, self.status, self.most_served, self.token = 0, 200, sys.maxsize, ""
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def takes(self, headers: Message) -> bool:
        """Return whether a request has the token that is asked for."""
        return not self.token or headers["Authorization"] == f"Bearer {self.token}"

    def serve(self) -> int:
        """Count the request, and answer it."""
        self.n_served += 1
        if self.n_served > self.most_served:
            self.socket.close()  # of those that would connect
            raise ConnectionAbortedError
        return super().serve() if self.status == 200 else self.status

    def handle_error(self, request: object, client_address: object) -> None:
        """Write nothing where a connection ends."""

    def end(self) -> None:
        """Answer no request any more."""
        self.shutdown()
        self.server_close()
        self._thread.join()


@pytest.fixture
def served() -> Iterator[_Server]:
    """Return a server that answers one request at a time."""
    server = _Server()
    yield server
    server.end()


@pytest.fixture
def stream(nats_url: str) -> Stream:
    """Return a stream of this test."""
    return Stream(url=nats_url, name=f"load-{uuid.uuid4().hex[:8]}")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return a folder with recorded requests of two slices, and a configuration with a model."""
    lines = [{"path": "/predict", "body": {"x": n}, "slices": [f"scanner={'ab'[n % 2]}"]} for n in range(20)]
    (tmp_path / "requests.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    (tmp_path / "config.toml").write_text('[[models]]\nname = "digits"\n', encoding="utf-8")
    return tmp_path


def _load(directory: Path, url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return invoked("load", url, "--from", "requests.jsonl", "--allow", url, *arguments, directory=directory)


def _called(directory: Path, url: str, **options: Any) -> LoadResult:
    """Return a load test with loads that are shorter than a person can ask for."""
    return quantdrift.load(
        url,
        source=directory / "requests.jsonl",
        config=directory / "config.toml",
        allow=[url],
        step_s=0.2,
        sustain_s=0.2,
        **options,
    )


def test_a_load_test_is_judged_by_the_gate(directory: Path, served: _Server) -> None:
    """It goes past the knee, and what it wrote passes wide budgets and fails narrow ones; with budgets of the model, too."""
    files = ("--out", "load.json", "--picture", "load.svg", "--json")
    done = _load(directory, served.url, "--step", "0.2", "--sustain", "1", "--sustain-at", "150", *files)
    assert done.returncode == 0, done.stderr
    test: dict[str, Any] = json.loads(done.stdout)
    assert json.loads((directory / "load.json").read_text(encoding="utf-8")) == test
    assert (directory / "load.svg").read_bytes().startswith(b"<?xml")
    assert test["alone"]["p50_s"] >= SERVICE_S
    assert [step["offered_per_s"] for step in test["steps"]] == sorted(
        step["offered_per_s"] for step in test["steps"]
    )
    assert test["sustained"]["error_share"]["value"] == 0
    assert {each["slice"] for each in test["sustained"]["slices"]} == {"scanner=a", "scanner=b"}
    assert test["burst"]["answered_at_once"] == test["burst"]["n"] > 0
    test["sustained"]["step"]["is_on_schedule"] = True  # the machine of a test may be busy
    (directory / "load.json").write_text(json.dumps(test), encoding="utf-8")

    def gate(*arguments: str) -> subprocess.CompletedProcess[str]:
        return invoked("gate", served.url, "--load", "load.json", *arguments, directory=directory)

    wide = ("--latency-p95", "50", "--throughput", "1")
    passed = gate(*wide, "--error-share", "0.5", "--json")
    assert passed.returncode == 0, passed.stderr
    decision = json.loads(passed.stdout)
    assert [answer["question"] for answer in decision["slices"]] == ["latency-p95", "throughput", "errors"]
    assert decision["not_judged"] == ["the answers of every slice: neither --inputs nor --live was given"]
    failed = gate("--latency-p95", "0.001")
    assert failed.returncode == 3
    assert failed.stdout.endswith("fail: the load run does not keep its budget: latency p95\n")
    unknown = gate("--error-share", "0.00001")
    assert unknown.returncode == 4
    assert "give it a longer --sustain" in unknown.stdout
    without = gate()
    assert without.returncode == 2
    assert "or models.budget.latency_p95_s" in without.stderr
    with (directory / "config.toml").open("a", encoding="utf-8") as config:
        config.write("budget = { throughput_per_s = 1e6 }\n")
    assert gate().returncode == 3
    other = invoked("gate", "http://127.0.0.1:1", "--load", "load.json", *wide, directory=directory)
    assert other.returncode == 2
    assert re.search("is of http://127.0.0.1:[0-9]+, and not of http://127.0.0.1:1", other.stderr)


def test_refused_requests_are_errors_and_are_sent_again_in_a_burst(directory: Path) -> None:
    """A server that lets four requests wait refuses the rest: the loads say so, and a test that accepts no errors ends there."""
    served = _Server(most_waiting=4)
    try:
        test = _called(directory, served.url, most_errors=1.0, timeout_s=1.0, sustain_at=100.0).load_test
        stopped = _called(directory, served.url, most_errors=0.0, sustain_at=2000.0)
    finally:
        served.end()
    assert not test.stopped
    assert test.sustained is not None
    assert test.burst is not None
    assert test.burst.retries > 0
    assert test.burst.errors.keys() <= {"503"}
    assert not stopped.finished
    assert "more than --most-errors 0" in stopped.load_test.stopped


def test_what_may_not_be_driven_is_not_asked(directory: Path, served: _Server) -> None:
    """No request reaches an endpoint that nobody named; one that is named and answers nothing is an error that may pass."""
    refused = invoked("load", served.url, "--from", "requests.jsonl", directory=directory)
    assert refused.returncode == 2
    assert f"give --allow {served.url}" in refused.stderr
    assert served.n_served == 0
    (directory / "config.toml").write_text(f'[load]\ntargets = ["{served.url}/"]\n', encoding="utf-8")
    bounded = invoked(
        "load",
        served.url,
        "--from",
        "requests.jsonl",
        "--most-requests",
        "250",
        "--json",
        directory=directory,
    )
    assert bounded.returncode == 1
    assert "more than --most-requests 250" in json.loads(bounded.stdout)["stopped"]
    assert 0 < served.n_served <= 250
    served.status = 404
    wrong = _load(directory, served.url)
    assert wrong.returncode == 2
    assert "answers a recorded request (POST /predict) with 404" in wrong.stderr
    served.status = 200
    free = SerialServer(SERVICE_S)
    free.server_close()
    away = _load(directory, free.url)
    assert away.returncode == 1
    assert "cannot be reached (try again)" in away.stderr


def test_tls_and_a_token(directory: Path, served: _Server) -> None:
    """The server's certificate must be of an authority that this host trusts; the token is sent, and shown nowhere."""
    authority = Authority(directory / "authority")
    pair = authority.sign("server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    served.socket = context.wrap_socket(served.socket, server_side=True)
    url, served.token = served.url.replace("http", "https"), "a-token-of-the-test"
    (directory / "token").write_text(f"{served.token}\n", encoding="utf-8")
    short = ("load", url, "--from", "requests.jsonl", "--allow", url, "--most-requests", "250", "--json")
    unknown = invoked(*short, directory=directory)
    assert unknown.returncode == 2
    assert "set shadow.ca_file to the authority that signed it" in unknown.stderr
    with (directory / "config.toml").open("a", encoding="utf-8") as config:
        config.write(f'[shadow]\nca_file = "{authority.file}"\n')
    without = invoked(*short, directory=directory)
    assert without.returncode == 2
    assert "with 401" in without.stderr
    assert served.n_served == 0
    done = invoked(*short, "--token-file", "token", directory=directory)
    assert json.loads(done.stdout)["alone"]["n"] > 0
    assert served.n_served > 0
    assert served.token not in done.stdout + done.stderr


def test_an_endpoint_that_dies_ends_the_test(directory: Path, served: _Server) -> None:
    """What was measured until then is written, and the gate judges nothing by it."""
    served.most_served = 300
    result = _called(directory, served.url, timeout_s=0.5, out=directory / "load.json")
    assert not result.finished
    test = json.loads((directory / "load.json").read_text(encoding="utf-8"))
    assert test["alone"]["n"] > 0
    assert re.search("requests had no answer|did not recover", test["stopped"])
    judged = invoked("gate", served.url, "--load", "load.json", "--latency-p99", "1", directory=directory)
    assert judged.returncode == 2
    assert "has no sustained load: it was stopped before" in judged.stderr


def test_a_file_that_cannot_be_written_does_not_cost_the_result(directory: Path, served: _Server) -> None:
    """The result is printed, and then why the file is missing; here no file may have a byte, as on a full disk."""
    command = [sys.executable, "-m", "quantdrift", "load", served.url, "--from", "requests.jsonl"]
    command += ["--allow", served.url, "--step", "0.2", "--most-requests", "250", "--out", "load.json"]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 0; exec "$@"', "-", *command],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "Single requests: mean" in done.stdout
    assert "--out load.json cannot be written: File too large" in done.stderr
    assert not (directory / "load.json").exists()


def test_ctrl_c_ends_it_with_what_was_measured(directory: Path, served: _Server) -> None:
    """Exit code 130, and the file."""
    command = [
        sys.executable,
        "-m",
        "quantdrift",
        "load",
        served.url,
        "--from",
        "requests.jsonl",
        "--allow",
        served.url,
    ]
    with subprocess.Popen(
        [*command, "--out", "load.json"],
        cwd=directory,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("searching for the knee"):
                break
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Stopped before its end: it was stopped." in output
    assert json.loads((directory / "load.json").read_text(encoding="utf-8"))["alone"]["n"] > 0


def test_live_traffic_is_recorded_and_sent(directory: Path, served: _Server, stream: Stream) -> None:
    """Requests are made of what is captured meanwhile; the file that is written is read again."""
    with (directory / "config.toml").open("a", encoding="utf-8") as config:
        config.write(
            f'[stream]\nurl = "{stream.url}"\nname = "{stream.name}"\n[capture]\nheaders = ["x-scanner"]\n'
            f'[load]\ntargets = ["{served.url}"]\n[[slices]]\nname = "scanner"\nheader = "x-scanner"\n'
        )
    asked = ("load", served.url, *SHORT, "--most-requests", "250", "--json")
    with _published(stream):
        done = invoked(
            *asked, "--from", "live", "--window", "2s", "--record", "live.jsonl", directory=directory
        )
    assert done.returncode == 1, done.stderr
    test = json.loads(done.stdout)
    assert "more than --most-requests 250" in test["stopped"]
    assert test["traffic"]["source"] == "live"
    assert test["traffic"]["captured_share"] == pytest.approx(0.5)
    assert test["alone"]["n"] > 0
    assert "were captured" in done.stderr
    text = (directory / "live.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    assert len(lines) == test["traffic"]["n"]
    assert {line["path"] for line in lines} == {"/v2/models/digits/infer"}
    assert {name for line in lines for name in line["slices"]} <= {"scanner=a", "scanner=b"}
    assert (directory / "live.jsonl").stat().st_mode & 0o077 == 0
    again = invoked(*asked, "--from", "live.jsonl", directory=directory)
    of_file = json.loads(again.stdout)["traffic"]
    assert of_file["rate_per_s"] == pytest.approx(test["traffic"]["rate_per_s"], rel=1e-6)


def test_a_grpc_server_gets_the_tensors_of_http_requests(directory: Path) -> None:
    """Recorded requests of the Open Inference Protocol go over gRPC; a request of another protocol is left out, and a status of gRPC is told by its name."""
    body: dict[str, Any] = {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]}]
    }
    line = {"path": "/v2/models/digits/infer", "body": body, "headers": {"x-scanner": "a"}}
    (directory / "requests.jsonl").write_text(
        f"{json.dumps(line)}\n{json.dumps({'path': '/predict', 'body': 1})}\n", encoding="utf-8"
    )
    with running_grpc() as (_, port):
        url = f"grpc://127.0.0.1:{port}"
        assert (
            "may not be driven"
            in invoked("load", url, "--from", "requests.jsonl", directory=directory).stderr
        )
        assert "must be grpc://HOST:PORT" in _load(directory, f"{url}/predict").stderr
        done = _load(directory, url, *SHORT, "--sustain-at", "100", "--most-requests", "2000", "--json")
        body["parameters"] = {"fail": True}
        (directory / "requests.jsonl").write_text(f"{json.dumps(line)}\n", encoding="utf-8")
        failed = _load(directory, url)
    test = json.loads(done.stdout)
    assert test["traffic"]["n"] == 1
    assert list(test["traffic"]["unusable"].values()) == [1]
    assert 0 < test["alone"]["n"] <= 200  # fewer where the machine is slow
    assert all(step["error_share"] == 0 for step in test["steps"])
    assert failed.returncode == 2
    assert "(POST /inference.GRPCInferenceService/ModelInfer) with INVALID_ARGUMENT" in failed.stderr
    away = _load(directory, url)
    assert away.returncode == 1
    assert "cannot be reached" in away.stderr


@contextlib.contextmanager
def _published(stream: Stream) -> Iterator[None]:
    """Publish exchanges, captured at a half of the traffic, until the block ends."""
    is_over = threading.Event()

    async def publish() -> None:
        queue = await Queue.connect(stream, client_name="test")
        try:
            await queue.ensure()
            for number in itertools.count():
                if is_over.is_set():
                    return
                exchange = exchange_of(inputs_of(1), attributes={"header.x-scanner": "ab"[number % 2]})
                await queue.publish_exchange(exchange.model, exchange.id, encode(exchange))
        finally:
            await queue.close()

    thread = threading.Thread(target=asyncio.run, args=(publish(),))
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
