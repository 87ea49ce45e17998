"""The load test without an endpoint: the knee, the arrivals, what is read of a recording, and Triton's counters."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from quantdrift.core import open_inference_pb2 as wire
from quantdrift.core.config.schema import Config, LoadOptions, Model, Sidecar, Slice
from quantdrift.core.errors import OperatorError
from quantdrift.core.records import Protocol, Tensor
from quantdrift.drift.evidence.observations import FloatArray
from quantdrift.facts.load_test import Arrival, LoadStep
from quantdrift.release.load_test.arrivals import arrivals_of
from quantdrift.release.load_test.drive import Driven
from quantdrift.release.load_test.figures import step_of, sustained_of
from quantdrift.release.load_test.knee import Waited, knee_of
from quantdrift.release.load_test.load import _target
from quantdrift.release.load_test.recording import read_traffic
from quantdrift.release.load_test.requests import NotRebuiltError, as_grpc, request_of
from quantdrift.release.load_test.server_time import of_metrics, of_statistics
from quantdrift.sidecar.protocols.decoder import WireContext
from quantdrift.sidecar.protocols.http_message import Head
from quantdrift.sidecar.protocols.oip import OipRest
from tests.support.shadow.onnx_models import exchange_of, inputs_of
from tests.support.shadow.openai_exchanges import chat, exchange

pytestmark = pytest.mark.unit

SERVICE_S = 0.01
AROUND = (0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4)


def _served(due_s: FloatArray, service_s: FloatArray) -> FloatArray:
    """Return the latencies of a server that does one request at a time."""
    free, latencies = 0.0, []
    for at, takes in zip(due_s.tolist(), service_s.tolist(), strict=True):
        free = max(free, at) + takes
        latencies.append(free - at)
    return np.array(latencies)


def _steps(knee_per_s: float, rng: np.random.Generator, *, exponential: bool = False) -> list[Waited]:
    arrivals = arrivals_of(None, 1.0)
    steps = []
    for ratio in AROUND:
        n = round(ratio * knee_per_s * 10)
        service = rng.exponential(SERVICE_S, n) if exponential else np.full(n, SERVICE_S)
        due, _ = arrivals.due(n, ratio * knee_per_s, rng)
        steps.append(Waited(offered_per_s=ratio * knee_per_s, latency_s=_served(due, service)))
    return steps


@pytest.mark.parametrize("seed", range(5))
def test_the_knee_of_a_queue_is_where_theory_puts_it(seed: int) -> None:
    """M/D/1 has it at two thirds of the capacity; the error of 2 % (standard deviation) stays below 10 %, though the loads are 10 % off."""
    rng = np.random.default_rng(seed)
    theory = 2 / 3 / SERVICE_S
    found = knee_of(np.full(200, SERVICE_S), _steps(theory * rng.uniform(0.9, 1.1), rng), rng).per_s
    assert found is not None
    assert abs(found.value / theory - 1) <= 0.1
    assert found.low <= found.value <= found.high < 1.3 * found.value


def test_uneven_service_queues_earlier() -> None:
    """M/M/1 has its knee at half of the capacity."""
    rng = np.random.default_rng(1)
    theory = 1 / 2 / SERVICE_S
    alone = rng.exponential(SERVICE_S, 4000)
    parts = [_steps(theory, rng, exponential=True) for _ in range(8)]  # eighty seconds of each load
    steps = [
        Waited(offered_per_s=of[0].offered_per_s, latency_s=np.concatenate([each.latency_s for each in of]))
        for of in zip(*parts, strict=True)
    ]
    found = knee_of(alone, steps, rng).per_s
    assert found is not None
    assert abs(found.value / theory - 1) <= 0.15


def test_without_a_knee_the_reason_is_told() -> None:
    """It is above or below all loads, requests are refused first, or the client was late."""
    rng = np.random.default_rng(2)
    alone = np.full(50, SERVICE_S)

    def why(*steps: Waited) -> str:
        knee = knee_of(alone, steps, rng)
        assert knee.per_s is None
        return knee.why

    fine = Waited(offered_per_s=10.0, latency_s=alone)
    slow = Waited(offered_per_s=5.0, latency_s=9 * alone)
    refused = Waited(offered_per_s=20.0, latency_s=alone, error_share=0.3)
    late = Waited(offered_per_s=20.0, latency_s=9 * alone, is_on_schedule=False)
    assert why(fine) == "it is above 10 requests per second, the highest load that was offered"
    assert why(slow) == "it is below 5 requests per second, the lowest load that was offered"
    assert "refuses requests before they wait" in why(fine, refused)
    assert "beyond that this client cannot keep its schedule" in why(fine, late)
    assert why(refused) == "requests fail at every load"
    assert why(late).startswith("this client kept its schedule at no load")


def test_a_client_that_sent_late_says_so() -> None:
    """By a tenth of the latency in the mean: then the step is not judged, and tells no knee."""

    def step(late_s: float) -> LoadStep:
        n = 1000
        return step_of(
            Driven(
                due_s=np.arange(n) / 100,
                latency_s=np.full(n, 0.02),
                late_s=np.full(n, late_s),
                in_flight=np.ones(n, dtype=np.intp),
                chosen=np.zeros(n, dtype=np.intp),
                errors={},
                took_s=10.0,
            ),
            100.0,
            None,
        )

    assert step(0.0005).is_on_schedule
    assert step(0.0019).is_on_schedule
    assert not step(0.0025).is_on_schedule
    assert step(0.0).throughput_per_s == 100.0


def test_few_requests_have_no_interval_of_the_p99() -> None:
    """Nor a share of errors that is surely none."""
    n = 200
    latency = np.linspace(0.01, 0.02, n)
    driven = Driven(
        due_s=np.arange(n) / 100,
        latency_s=latency,
        late_s=np.zeros(n),
        in_flight=np.ones(n, dtype=np.intp),
        chosen=np.zeros(n, dtype=np.intp),
        errors={},
        took_s=2.0,
    )
    found = sustained_of(driven, step_of(driven, 100.0, None), (), np.random.default_rng(0))
    assert found.p99_s is None
    assert found.p95_s is not None
    assert found.p95_s.low <= found.p95_s.value <= found.p95_s.high
    assert found.error_share.high == pytest.approx(1 - 0.025 ** (1 / n))


def test_recorded_gaps_are_stretched_to_the_load() -> None:
    """The mean rate is that of the load, and the bursts stay."""
    rng = np.random.default_rng(3)
    at = np.sort(np.concatenate([start + np.arange(10) * 1e-4 for start in range(50)]))
    arrivals = arrivals_of(at, 1.0)
    due, chosen = arrivals.due(1000, 200.0, rng)
    assert arrivals.kind is Arrival.RECORDED
    assert arrivals.gap_cv is not None
    assert arrivals.gap_cv > 2
    assert chosen is not None
    assert np.array_equal(np.diff(chosen) % 500, np.ones(999))
    assert due[0] == 0
    assert due[-1] == pytest.approx(999 / 200, rel=0.01)
    assert np.mean(np.diff(due) < 1e-3) == pytest.approx(0.9, abs=0.01)


def test_of_a_part_of_the_traffic_the_rate_is_known_and_not_the_gaps() -> None:
    """Captured at 2 %, a rate that doubles and halves stays, and one that is constant is not made uneven by chance."""
    rng = np.random.default_rng(4)
    fast, slow = rng.uniform(0, 50, 800), rng.uniform(50, 100, 200)
    arrivals = arrivals_of(np.sort(np.concatenate([fast, slow])), 0.02)
    assert arrivals.kind is Arrival.RATES
    assert arrivals.per_span == pytest.approx(20 / 0.02, rel=0.01)
    half = len(arrivals.rates) // 2
    assert arrivals.rates[:half].mean() / arrivals.rates[half:].mean() == pytest.approx(4, rel=0.35)
    due, _ = arrivals.due(5000, 100.0, rng)
    assert due[-1] == pytest.approx(50, rel=0.01)
    few, _ = arrivals.due(2000, 100.0, rng)  # of a quiet part of the recording, too, none are crowded
    assert np.diff(few).max() < 1.0
    assert (np.diff(few) > 0).all()
    steady = arrivals_of(np.sort(rng.uniform(0, 100, 1000)), 0.02)
    assert steady.rates.std() < 0.15  # 0.22 by chance alone
    assert arrivals_of(np.sort(rng.uniform(0, 100, 100)), 0.02).kind is Arrival.POISSON


def test_requests_are_read_line_by_line(tmp_path: Path) -> None:
    """In the order of their times, with their weights, and without headers of the connection."""
    lines = [
        {
            "path": "/b",
            "body": {"x": 1},
            "at_s": 2.0,
            "probability": 0.1,
            "headers": {"Host": "x", "X-A": "1"},
        },
        {"path": "/a", "body": "text", "at_s": 1.0, "slices": ["scanner=a"], "latency_s": 0.1},
        {"body_base64": "AAE=", "at_s": 3.0, "method": "put"},
    ]
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    found = read_traffic(path, Config(), None)
    a, b, raw = found.requests
    assert (a.path, a.body, a.slices, a.headers) == ("/a", b"text", ("scanner=a",), {})
    assert (b.body, b.headers) == (b'{"x":1}', {"x-a": "1", "content-type": "application/json"})
    assert (raw.method, raw.path, raw.body) == ("PUT", "/", b"\0\1")
    assert found.shares == pytest.approx([1 / 12, 10 / 12, 1 / 12])
    traffic = found.traffic(found.arrivals())
    assert traffic.rate_per_s == pytest.approx(12 / 3)
    assert traffic.in_flight == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 1 is no request"),
        ('{"pfad": "/"}', "line 1 is no request: .*pfad"),
        ('{"path": "predict"}', "begins with /"),
        ('{"probability": 2}', "above 0 and at most 1"),
        ('{"headers": {"a b": "c"}}', "header `a b` cannot be sent"),
        ('{"body_base64": "?"}', "body_base64 is no Base64"),
        ('{"at_s": 1}\n{}', "give `at_s` to all, or to none"),
        ('{"messages": []}', "no configuration names the model"),
        ("", "has no request"),
    ],
)
def test_a_wrong_line_is_refused_with_its_number(tmp_path: Path, line: str, words: str) -> None:
    """And it says what to write."""
    path = tmp_path / "requests.jsonl"
    path.write_text(line, encoding="utf-8")
    with pytest.raises(OperatorError, match=words):
        read_traffic(path, Config(), None)


def test_recorded_inputs_become_requests_of_the_protocol(tmp_path: Path) -> None:
    """With the header of their slice, read again by the decoder of the sidecar."""
    path = tmp_path / "inputs.npz"
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    np.savez(path, x=x, scanner=np.array(["a", "b"]))
    config = Config(models=(Model(name="m"),), slices=(Slice(name="scanner", header="x-scanner"),))
    _, second = read_traffic(path, config, config.models[0]).requests
    assert (second.path, second.slices) == ("/v2/models/m/infer", ("scanner=b",))
    assert second.headers["x-scanner"] == "b"
    head = Head(start=("POST", second.path, "HTTP/1.1"), headers=second.headers)
    (sent,) = OipRest().request(head, second.body, WireContext(max_bytes=10_000)).inputs
    assert sent == Tensor(name="x", datatype="FP32", shape=(1, 4), data=x[1].tobytes())


def test_only_named_endpoints_are_driven() -> None:
    """By scheme, host and port; and never the sidecar, which would sample the load."""
    config = Config(
        load=LoadOptions(targets=("http://127.0.0.1:8000",)), sidecar=Sidecar(listen="0.0.0.0:9000")
    )
    assert _target("http://127.0.0.1:8000/v2/models/m/infer", config, ()).host == "127.0.0.1"
    assert _target("http://LOCALHOST:80/x", config, ("http://localhost",)).host == "localhost"
    for url, allow, words in (
        (
            "http://127.0.0.1:8001",
            (),
            r'load.targets = \["http://127.0.0.1:8001"\], or give --allow http://127.0.0.1:8001',
        ),
        ("https://127.0.0.1:8000", (), "may not be driven"),
        ("http://127.0.0.1:9000", ("http://127.0.0.1:9000",), "is the sidecar"),
        ("http://candidate:8000", ("http://candidate:8000",), "plaintext over a network"),
        ("ftp://candidate", (), "must begin with http:// or https://"),
    ):
        with pytest.raises(OperatorError, match=words):
            _target(url, config, allow)


def test_tritons_counters_are_read_both_ways() -> None:
    """The metrics and the statistics extension say the same of two requests in one execution."""
    metrics = "\n".join(
        f'nv_inference_{name}{{model="m",version="{version}"}} {value}'
        for name, value in (
            ("request_success", 1),
            ("queue_duration_us", 1500),
            ("compute_input_duration_us", 100),
            ("compute_infer_duration_us", 4000),
            ("compute_output_duration_us", 100),
            ("count", 1),
            ("exec_count", 0.5),
        )
        for version in "12"
    )
    counted = of_metrics(metrics, "m")
    assert counted is not None
    assert of_metrics(metrics, "other") is None
    one = {"count": 1}
    stats = {
        "success": {"count": 2},
        "queue": one | {"ns": 3_000_000},
        "compute_input": one | {"ns": 200_000},
        "compute_infer": one | {"ns": 8_000_000},
        "compute_output": one | {"ns": 200_000},
    }
    body = {"model_stats": [{"inference_stats": stats, "inference_count": 2, "execution_count": 1}]}
    assert of_statistics(json.dumps(body).encode()) == counted
    assert of_statistics(b"{}") is None
    server = counted.since(type(counted)(n=0, queue_s=0.0, compute_s=0.0, items=0, executions=0))
    assert server is not None
    assert (server.n, server.queue_s, server.compute_s, server.batch) == (2, 0.0015, 0.0042, 2.0)


def test_a_captured_chat_is_asked_again() -> None:
    """With its options, and the headers that were captured."""
    asked = {
        "model": "small",
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0,
        "stream": False,
    }
    captured = msgspec.structs.replace(
        exchange("/v1/chat/completions", asked, chat()), attributes={"header.x-team": "a", "json.kind": "b"}
    )
    request = request_of(captured, ())
    assert request.path == "/v1/chat/completions"
    assert json.loads(request.body) == asked
    assert request.headers == {"x-team": "a", "content-type": "application/json"}


def test_a_captured_inference_is_asked_again() -> None:
    """The tensors go as binary, and rows as JSON where the protocol has no tensors."""
    x = inputs_of(2)
    captured = exchange_of(x, attributes={"header.x-scanner": "a", "parameter.kind": "b"})
    request = request_of(captured, ("scanner=a",))
    head = Head(start=("POST", request.path, "HTTP/1.1"), headers=request.headers)
    read = OipRest().request(head, request.body, WireContext(max_bytes=100_000))
    assert read.inputs == captured.inputs
    assert read.parameters["kind"] == "b"
    assert (request.headers["x-scanner"], request.slices) == ("a", ("scanner=a",))
    rows = request_of(msgspec.structs.replace(captured, protocol=Protocol.KSERVE_V1), ())
    assert (rows.path, json.loads(rows.body)) == ("/v1/models/digits:predict", {"instances": x.tolist()})
    with pytest.raises(NotRebuiltError, match="came by torchserve"):
        request_of(msgspec.structs.replace(captured, protocol=Protocol.TORCHSERVE), ())


def test_a_request_over_http_is_the_same_over_grpc() -> None:
    """Tensors, parameters, version and headers that gRPC can have; what is not of the protocol is refused with its reason."""
    exchange = exchange_of(inputs_of(2), attributes={"header.x-site": "a", "parameter.mode": "fast"})
    asked = request_of(exchange, ("site=a",))
    sent = as_grpc(msgspec.structs.replace(asked, path="/v2/models/a%20b/versions/3/infer"))
    message = wire.InferRequest.FromString(sent.body)
    assert (message.model_name, message.model_version) == ("a b", "3")
    assert message.parameters["mode"].string_param == "fast"
    assert "binary_data_output" not in message.parameters
    assert [(each.name, each.datatype, tuple(each.shape)) for each in message.inputs] == [
        (each.name, each.datatype, each.shape) for each in exchange.inputs
    ]
    assert list(message.raw_input_contents) == [bytes(each.data) for each in exchange.inputs]
    assert sent.headers == {"x-site": "a"}
    assert sent.slices == ("site=a",)
    with pytest.raises(NotRebuiltError, match="is none of the Open Inference Protocol"):
        as_grpc(msgspec.structs.replace(asked, path="/predict"))
    with pytest.raises(NotRebuiltError, match="does not follow"):
        as_grpc(msgspec.structs.replace(asked, body=b"{", headers={}))
