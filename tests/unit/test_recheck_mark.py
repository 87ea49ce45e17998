"""The mark of quantdrift's own requests: only its key makes one, for one request and for some minutes."""

import json
import secrets
import time
from pathlib import Path

import numpy as np
import pytest

from quantdrift.core.clock import SystemClock
from quantdrift.core.config import Config, Secrets
from quantdrift.core.config.schema import Model, Reference, Runtime, Stream
from quantdrift.core.recheck_mark import HEADER, VALID_S, RecheckMarks
from quantdrift.core.records import Tensor
from quantdrift.core.sampling.rates import policy_at
from quantdrift.models.runtimes.registry import RuntimeRequest
from quantdrift.models.runtimes.remote.oip_grpc import OipGrpcTransport
from quantdrift.models.runtimes.remote.oip_http import OipHttp
from quantdrift.sidecar.capture.pipeline import CapturePipeline
from quantdrift.sidecar.capture.process import identity_of
from quantdrift.sidecar.capture.publisher import Publisher
from quantdrift.sidecar.capture.recorder import Recorder
from quantdrift.sidecar.handoff.frame import RELAYED
from quantdrift.sidecar.intake.gateway import Gateway
from quantdrift.sidecar.relay.http1.observer import Http1Observer
from quantdrift.sidecar.state.config import LiveConfig
from quantdrift.sidecar.state.counters import Count, Counters, Gauge, Row
from tests.support.sidecar.grpc_backend import running_grpc
from tests.support.sidecar.raw_exchanges import REQUEST, RESPONSE, raw_exchange
from tests.support.sidecar.relay_process import running_backend, sidecar, wait
from tests.support.sidecar.relay_rig import Bench, answer, post

RUNTIMES = {"http": Runtime.OIP_HTTP, "grpc": Runtime.OIP_GRPC}
SALT = "0123456789abcdef"
X = Tensor(name="x", datatype="FP32", shape=(1, 2), data=np.array([1, 2], dtype="<f4").tobytes())
OTHER = Tensor(name="x", datatype="FP32", shape=(1, 2), data=bytes(8))
NOW_S = 1_700_000_000.0
MARKS = RecheckMarks(SALT.encode())


@pytest.mark.unit
def test_a_mark_is_valid_for_its_tensors_and_its_time_only() -> None:
    """With the same key: not for another request, not much later or earlier, and not for a part of it."""
    mark = MARKS.headers([X], NOW_S)[HEADER]
    assert MARKS.is_valid(mark, [X], NOW_S + VALID_S - 1)
    assert not MARKS.is_valid(mark, [X], NOW_S + VALID_S + 1)
    assert not MARKS.is_valid(mark, [X], NOW_S - VALID_S - 1)
    assert not MARKS.is_valid(mark, [OTHER], NOW_S)
    assert not MARKS.is_valid(mark, [X, OTHER], NOW_S)
    assert not MARKS.is_valid(mark.replace("1700", "1701"), [X], NOW_S)


@pytest.mark.unit
@pytest.mark.parametrize(
    "word", ["1", "", "1700000000", "1700000000-", "-", "९-a", "1e9-a", "9" * 5000 + "-a"]
)
def test_a_word_is_no_mark(word: str) -> None:
    """Whatever a client sends."""
    assert not MARKS.is_valid(word, [X], NOW_S)


@pytest.mark.unit
def test_without_a_key_there_is_no_mark_and_none_is_valid() -> None:
    """An empty key must not be one that everybody knows."""
    assert RecheckMarks(b"").headers([X], NOW_S) == {}
    assert not RecheckMarks(b"").is_valid(MARKS.headers([X], NOW_S)[HEADER], [X], NOW_S)
    assert not RecheckMarks(b"other").is_valid(MARKS.headers([X], NOW_S)[HEADER], [X], NOW_S)


@pytest.mark.unit
def test_no_header_keeps_a_request_from_being_counted_and_sampled() -> None:
    """Relay and intake do not look at the mark: the capture process checks it, off the serving path."""
    bench = Bench()
    observer = Http1Observer(bench.scope)
    for fields in (b"", HEADER.encode() + b": 1\r\n"):
        observer.request(post(b"in", fields=fields))
        observer.response(answer(b"out"))
    assert Gateway(bench.scope).sample("/v2/models/digits/infer", {HEADER: "1"}, origin=RELAYED) is not None
    assert bench.slot.count(0, Count.OFFERED) == bench.slot.count(0, Count.TAKEN) == 3
    assert len(bench.taken) == 2


@pytest.mark.unit
@pytest.mark.parametrize(
    ("salt", "request_", "is_traffic", "gauge"),
    [
        (SALT, REQUEST, False, Gauge.RECHECKS),
        ("other", REQUEST, True, Gauge.FORGED_MARKS),
        ("", REQUEST, True, Gauge.FORGED_MARKS),
        (SALT, {"inputs": [{**REQUEST["inputs"][0], "data": [3, 4]}]}, True, Gauge.FORGED_MARKS),
    ],
    ids=["valid", "of another key", "without a key", "of another request"],
)
def test_a_request_with_a_valid_mark_is_no_traffic_and_one_with_a_forged_mark_is(
    salt: str, request_: object, gauge: Gauge, *, is_traffic: bool
) -> None:
    """A recheck leaves the counts of its stratum; a forged mark is counted, and the exchange is recorded."""
    config = Config(models=(Model(name="digits"),))
    counters = Counters.create(2, 1)
    for count in (Count.OFFERED, Count.TAKEN):
        counters.slot(0).add(0, count)
    slot = counters.slot(1)
    recorder = Recorder(LiveConfig.of(config), identity_of(Secrets(salt=salt.encode()), "b" * 32, {}))
    pipeline = CapturePipeline(recorder, Publisher(config, slot, SystemClock()), slot, (Row("default"),))
    meta, request, response = raw_exchange(
        request=request_,
        headers=MARKS.headers([X], time.time()),
        epoch=policy_at(config.sampling, time.time()).epoch,
    )
    pipeline.handle(meta, memoryview(request), memoryview(response))
    gauges = {one: slot.gauge(one) for one in (Gauge.RECHECKS, Gauge.FORGED_MARKS)}
    assert gauges == {one: int(one is gauge) for one in gauges}
    assert (slot.gauge(Gauge.QUEUE_BYTES) > 0) is is_traffic
    (stratum,) = counters.strata((Row("default"),))
    assert (stratum.offered, stratum.taken, stratum.lost) == (is_traffic, is_traffic, {})


@pytest.mark.integration
@pytest.mark.parametrize("kind", [OipHttp, OipGrpcTransport])
def test_a_recheck_through_the_relay_is_no_traffic_and_the_word_of_a_client_is(
    kind: type[OipHttp | OipGrpcTransport], tmp_path: Path, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shadow's own client, a whole sidecar and a stream: what is in the stream in the end is the client's request."""
    monkeypatch.setenv("QUANTDRIFT_SAMPLING_SALT", SALT)
    stream = Stream(url=nats_url, name=f"t-{secrets.token_hex(6)}")
    with running_grpc() as (_, grpc_port), running_backend() as backend:
        backend.reply = lambda _: json.dumps(RESPONSE).encode()
        options = {
            "STREAM__URL": nats_url,
            "STREAM__NAME": stream.name,
            "SAMPLING__RATE": 1,
            "MODELS": '[{"name": "digits"}]',
        }
        port = backend.port if kind is OipHttp else grpc_port
        with sidecar(tmp_path, port, **options) as running:
            scheme = "http" if kind is OipHttp else "grpc"
            where = Reference(
                runtime=RUNTIMES[scheme], url=f"{scheme}://127.0.0.1:{running.port}", model="digits"
            )
            client = kind(RuntimeRequest(model=Model(name="digits"), reference=where))
            for headers in (
                MARKS.headers([X], time.time()),
                {HEADER: "1"},
                MARKS.headers([OTHER], time.time()),
            ):
                client.infer([X], (), headers)
            client.close()
            wait(lambda: running.count("quantdrift_sidecar_published_total") == 2, "what is traffic")
            assert running.count("quantdrift_sidecar_rechecks_total") == 1
            assert running.count("quantdrift_sidecar_forged_marks_total") == 2
            assert running.count("quantdrift_sidecar_offered_total") == 2


@pytest.mark.unit
def test_the_example_of_a_kserve_logger_lets_the_mark_arrive() -> None:
    """A logger forwards the headers that it is given, and no other."""
    example = (Path(__file__).parents[2] / "deploy/kubernetes/kserve/logger.yaml").read_text()
    (line,) = (line for line in example.splitlines() if "metadataHeaders" in line)
    assert HEADER in line
