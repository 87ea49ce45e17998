"""Requests that quantdrift sends to a candidate carry a mark: they are forwarded, and not counted as traffic."""

from pathlib import Path

import pytest

from quantdrift import Tap
from quantdrift.core.config import Sampling
from quantdrift.core.records import MARK, HeaderStratum
from quantdrift.sidecar.intake.gateway import Gateway
from quantdrift.sidecar.relay.http1.observer import Http1Observer
from quantdrift.sidecar.relay.http2.observer import Http2Observer
from quantdrift.sidecar.state.counters import Count, Gauge
from tests.support.sidecar.http2_wire import ANSWER, OPENING, Ends, data, headers
from tests.support.sidecar.relay_process import wait
from tests.support.sidecar.relay_rig import Bench, answer, post
from tests.unit.test_tap_connections import End, config_of, serving

STRATA = Sampling(rate=1.0, header_strata=(HeaderStratum(name="a", rate=1.0, headers={"x-kind": "a"}),))


def counts(bench: Bench, sampling: Sampling) -> tuple[int, int, int]:
    """Return what was offered, in all strata, handed over, and ignored."""
    rows = range(1 + len(sampling.header_strata))
    offered = sum(bench.slot.count(row, Count.OFFERED) for row in rows)
    return offered, len(bench.taken), bench.slot.gauge(Gauge.IGNORED)


@pytest.mark.unit
@pytest.mark.parametrize("sampling", [Sampling(rate=1.0), STRATA], ids=["one stratum", "strata by header"])
@pytest.mark.parametrize(
    "line", [b"x-quantdrift-recheck: 1", b"X-Quantdrift-Recheck:", b"x-quantdrift-recheck:0"]
)
def test_a_marked_request_over_http1_is_not_captured(sampling: Sampling, line: bytes) -> None:
    """Whatever the value and the case of the name; the requests around it on the same connection are."""
    bench = Bench(sampling)
    observer = Http1Observer(bench.scope)
    for fields in (b"x-kind: a\r\n", line + b"\r\n", b"x-kind: a\r\n" + line + b"\r\n", b"x-kind: a\r\n"):
        observer.request(post(b"in", fields=fields))
        observer.response(answer(b"out"))
    assert counts(bench, sampling) == (2, 2, 2)
    assert observer.is_idle


@pytest.mark.unit
@pytest.mark.parametrize("sampling", [Sampling(rate=1.0), STRATA], ids=["one stratum", "strata by header"])
def test_a_marked_request_over_http2_is_not_captured(sampling: Sampling) -> None:
    """Nor is it in the counts; the other stream is."""
    bench, ends = Bench(sampling), Ends()
    observer = Http2Observer(bench.scope)
    observer.request(OPENING)
    observer.response(ANSWER)
    for stream, extra in ((1, ((MARK, "1"),)), (3, ())):
        observer.request(headers(stream, ends.request(*extra)) + data(stream, b"in", ends=True))
        observer.response(headers(stream, ends.response()) + data(stream, b"out", ends=True))
    assert counts(bench, sampling) == (1, 1, 1)


@pytest.mark.unit
@pytest.mark.parametrize("name", [MARK, MARK.title()])
def test_a_marked_request_comes_in_by_no_way(name: str) -> None:
    """Events of loggers, of Envoy and batches all go through one door."""
    sampling = Sampling(rate=1.0)
    bench = Bench(sampling)
    assert Gateway(bench.scope).sample("/v2/models/digits/infer", {name: "1"}) is None
    assert Gateway(bench.scope).sample("/v2/models/digits/infer", {}) is not None
    assert counts(bench, sampling) == (1, 0, 1)


@pytest.mark.unit
def test_the_example_of_a_kserve_logger_lets_the_mark_arrive() -> None:
    """A logger forwards the headers that it is told, and no other."""
    told = (Path(__file__).parents[2] / "deploy/kubernetes/kserve/logger.yaml").read_text()
    (line,) = (line for line in told.splitlines() if "metadataHeaders" in line)
    assert MARK in line


@pytest.mark.integration
def test_a_tap_does_not_report_a_marked_call(tmp_path: Path) -> None:
    """It neither counts nor takes it."""
    path = tmp_path / "tap"
    with serving(path, End(config_of("a", rate=1.0))) as end:
        tap = Tap(str(path), model="digits")
        wait(lambda: tap.is_ready, "the tap hears its rates")
        for more in ({MARK: "1"}, {}):
            tap.record({"x": [1]}, {"y": [1]}, headers={"x-kind": "a", **more})
        wait(lambda: end.count("a", Count.TAKEN) == 1, "the call that is not marked")
        tap.close()
        assert end.count("a") == 1
