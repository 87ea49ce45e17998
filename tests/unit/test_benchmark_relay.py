"""What `python -m benchmarks.relay` reads from load generators and the kernel, and what it sends."""

import os
import struct
import time

import numpy as np
import psutil
import pytest

from benchmarks.load import Load, LoadError, parse_h2load, parse_wrk
from benchmarks.payload import JSON_LENGTH, Payload, Size, Wire, path, request, response
from benchmarks.rounds import Case, Round, Run, median, ratio
from benchmarks.ways import cpu_s
from quantdrift.core.records import Protocol, Tensor
from quantdrift.sidecar.protocols import DECODERS
from quantdrift.sidecar.protocols.decoder import DecodedRequest
from quantdrift.sidecar.protocols.decoder import WireContext as Told
from quantdrift.sidecar.protocols.http_message import Head

pytestmark = pytest.mark.unit

WRK = """\
Running 2s test @ http://127.0.0.1:9100/v2/models/json/infer
  1 threads and 16 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency     1.28ms    1.57ms  15.65ms   87.17%
    Req/Sec    18.71k     9.73k   38.88k    80.00%
  Latency Distribution
     50%  445.00us
     75%    1.69ms
     90%    3.26ms
     99%    {p99}
  37519 requests in 2.02s, 11.02MB read
{errors}Requests/sec:  18535.04
Transfer/sec:      5.44MB
"""
H2LOAD = """\
starting benchmark...
finished in 2.00s, 9641.00 req/s, 1.40MB/s
requests: 19298 total, 19298 started, 19282 done, 19280 succeeded, 2 failed, 0 errored, 0 timeout
status codes: 19280 2xx, 0 3xx, 0 4xx, 2 5xx
"""


@pytest.mark.parametrize(("told", "p99_ms"), [("7.16ms", 7.16), ("1.25s", 1250.0), ("990.00us", 0.99)])
def test_requests_and_latency_of_wrk_are_read_in_any_unit(told: str, p99_ms: float) -> None:
    """Percentiles are of the latency, not of the lines above it that look alike."""
    load = parse_wrk(WRK.format(p99=told, errors=""))
    assert (load.requests, load.per_s, load.failed) == (37_519, 18_535.04, 0)
    assert (load.p50_ms, load.p99_ms) == pytest.approx((0.445, p99_ms))


def test_what_wrk_calls_errors_is_counted() -> None:
    """Wrong statuses and broken connections: a way that fails must not pass for a quick one."""
    errors = "  Socket errors: connect 1, read 2, write 3, timeout 4\n  Non-2xx or 3xx responses: 500\n"
    assert parse_wrk(WRK.format(p99="1.00ms", errors=errors)).failed == 510


def test_requests_of_h2load_and_the_latency_in_its_log_are_read() -> None:
    """A line of the log is the start, the status and the time taken, in microseconds."""
    log = "".join(f"1795276340000000\t200\t{1000 * i}\n" for i in range(1, 101))
    load = parse_h2load(H2LOAD, log)
    assert (load.requests, load.per_s, load.failed) == (19_280, 9641.0, 2)
    assert (load.p50_ms, load.p99_ms) == pytest.approx((50.5, 99.01))


@pytest.mark.parametrize("text", ["", "unable to connect to 127.0.0.1:1 Connection refused\n", WRK[:300]])
def test_text_that_is_no_result_is_refused(text: str) -> None:
    """Nothing is taken for zero."""
    with pytest.raises(LoadError):
        parse_wrk(text)
    with pytest.raises(LoadError):
        parse_h2load(text, "")


def decoded(payload: Payload, *, is_request: bool, wire: Wire) -> tuple[Tensor, ...]:
    """Return the tensors of a payload, as the sidecar's decoder of REST reads them."""
    decoder, told = DECODERS[Protocol.OIP_REST], Told(max_bytes=10**7)
    head = Head(start=("POST", path(wire), "HTTP/1.1"), headers=payload.headers)
    if is_request:
        return decoder.request(head, payload.body, told).inputs
    return decoder.response(head, payload.body, DecodedRequest(inputs=()), told).outputs


@pytest.mark.parametrize(("size", "n_bytes"), [(Size.SMALL, 3_000), (Size.LARGE, 602_112)])
@pytest.mark.parametrize("wire", [Wire.JSON, Wire.BINARY])
def test_what_is_sent_decodes_and_is_as_long_as_it_says(size: Size, n_bytes: int, wire: Wire) -> None:
    """Both wires carry the same image; the answer has ten logits."""
    payload = request(size, wire)
    assert len(payload.body) == pytest.approx(n_bytes, rel=0.02)
    (image,) = decoded(payload, is_request=True, wire=wire)
    (other,) = decoded(request(size, Wire.BINARY), is_request=True, wire=Wire.BINARY)
    assert (image.shape, image.data) == (other.shape, other.data)
    (logits,) = decoded(response(wire), is_request=False, wire=wire)
    assert np.frombuffer(logits.data, "<f4").tolist() == np.linspace(-1, 1.25, 10, dtype="f4").tolist()


def test_a_grpc_message_has_its_prefix_and_the_tensor() -> None:
    """One byte that says it is not compressed, four of length, and the content uncopied in it."""
    body = request(Size.LARGE, Wire.GRPC).body
    compressed, length = struct.unpack("!BI", body[:5])
    assert (compressed, length) == (0, len(body) - 5)
    image = request(Size.LARGE, Wire.BINARY)
    assert image.body[int(image.headers[JSON_LENGTH]) :] in body


def run(per_request_us: float, *, captured_us: float = 0.0, published: float = 0.0) -> Run:
    """Return a run of 1,000 requests."""
    return Run(
        load=Load(requests=1000, per_s=1.0, p50_ms=1.0, p99_ms=1.0, failed=0),
        serving_s=per_request_us / 1e3,
        capturing_s=captured_us / 1e3,
        n_offered=1000.0,
        n_published=1000 * published,
    )


def test_a_sampled_request_costs_what_its_publishing_costs() -> None:
    """What the capture process drops makes what it publishes no cheaper."""
    dropped = run(40.0, captured_us=100.0, published=0.25)
    assert (dropped.cpu_us, dropped.capture_us, dropped.whole_us) == pytest.approx((40.0, 400.0, 440.0))
    assert dropped.mean_us == pytest.approx(140.0)
    assert run(40.0).capture_us == 0.0
    assert run(40.0, captured_us=2000.0).capture_us == float("inf")


def test_ratios_are_of_the_same_round() -> None:
    """A machine that is slow for a round is slow for both."""
    case = Case(size=Size.SMALL, wire=Wire.JSON, connections=16)
    costs = [(20.0, 10.0), (200.0, 100.0), (33.0, 11.0)]
    rounds: list[Round] = [{(case, "ours"): run(a), (case, "theirs"): run(b)} for a, b in costs]
    assert ratio(rounds, case, "ours", "theirs", lambda one: one.cpu_us) == pytest.approx(2.0)
    assert median(rounds, case, "ours", lambda one: one.cpu_us) == pytest.approx(33.0)


def test_processor_time_is_that_of_the_process() -> None:
    """Some tenths of a second of work are seen, up to the kernel's hundredths."""
    process = psutil.Process(os.getpid())
    before, began = cpu_s([process]), time.process_time()
    while time.process_time() - began < 0.2:
        sum(range(10_000))
    assert cpu_s([process]) - before == pytest.approx(time.process_time() - began, abs=0.05)
