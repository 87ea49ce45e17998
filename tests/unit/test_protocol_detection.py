"""The protocol of a connection, detected from the client's first bytes."""

from collections.abc import Callable

import pytest

from quantdrift.sidecar.relay.http1.observer import Http1Observer
from quantdrift.sidecar.relay.http2.observer import Http2Observer
from quantdrift.sidecar.relay.observing.observer import CaptureScope, ExchangeObserver
from quantdrift.sidecar.relay.protocol_detection import ProtocolDetector
from quantdrift.sidecar.state.counters import Gauge
from tests.support.sidecar.http2_wire import ANSWER, OPENING, Ends, data, headers
from tests.support.sidecar.relay_rig import Bench, answer, post

pytestmark = pytest.mark.unit


def opened(bench: Bench, *steps: tuple[str, bytes]) -> ExchangeObserver:
    """Return who follows a connection in the end on which client (`>`) and backend (`<`) sent."""
    now: list[ExchangeObserver] = []

    def observe(kind: Callable[[CaptureScope], ExchangeObserver]) -> ExchangeObserver:
        now.append(kind(bench.scope))
        return now[-1]

    now.append(ProtocolDetector(bench.scope, observe))
    for direction, chunk in steps:
        (now[-1].request if direction == ">" else now[-1].response)(chunk)
    return now[-1]


@pytest.mark.parametrize("cut", [1, 3, 18, 23, 24, 30, 1000])
def test_the_preface_means_http2(cut: int) -> None:
    """In whatever pieces, and although the server has spoken first."""
    bench, ends = Bench(), Ends()
    sent = OPENING + headers(1, ends.request()) + data(1, b"in", ends=True)
    got = headers(1, ends.response()) + data(1, b"out", ends=True)
    observer = opened(
        bench, ("<", ANSWER[:5]), (">", sent[:cut]), ("<", ANSWER[5:]), (">", sent[cut:]), ("<", got)
    )
    assert isinstance(observer, Http2Observer)
    assert [(request[-2:], response[-3:]) for request, response in bench.pairs] == [(b"in", b"out")]


@pytest.mark.parametrize("cut", [1, 2, 1000])
def test_anything_else_is_taken_for_http1(cut: int) -> None:
    """Also a method that begins like the preface."""
    bench = Bench()
    sent = post(b"in")
    observer = opened(bench, (">", sent[:cut]), (">", sent[cut:]), ("<", answer(b"out")))
    assert isinstance(observer, Http1Observer)
    assert bench.pairs == [(sent, answer(b"out"))]
    patch = b"PRINT / HTTP/1.1\r\n\r\n"
    assert isinstance(opened(bench, (">", patch[:4]), (">", patch[4:])), Http1Observer)
    assert bench.slot.gauge(Gauge.IGNORED) == 1


@pytest.mark.parametrize("cut", [1, 2, 100])
def test_tls_passes_blind_and_is_counted_once(cut: int) -> None:
    """It is never idle: nobody knows what is in it."""
    bench = Bench()
    hello = b"\x16\x03\x01\x02\x00" + bytes(200)
    observer = opened(bench, (">", hello[:cut]), (">", hello[cut:]), ("<", b"\x16\x03\x03"), (">", hello))
    assert bench.slot.gauge(Gauge.BLIND) == 1
    assert not observer.is_idle
    assert not observer.is_active


def test_a_server_that_sends_before_an_http1_client_is_not_observed() -> None:
    """There is no request that it answers."""
    bench = Bench()
    observer = opened(bench, ("<", answer(b"?")), (">", post(b"in")))
    assert bench.slot.gauge(Gauge.BLIND) == 1
    assert not observer.is_active


def test_what_a_server_says_first_is_bounded() -> None:
    """Held until the client speaks, no longer than a head may be."""
    bench = Bench()
    observer = opened(bench, *(("<", bytes(1000)) for _ in range(100)), (">", OPENING))
    assert bench.slot.gauge(Gauge.BLIND) == 1
    assert not observer.is_active


def test_before_the_first_byte_it_is_idle() -> None:
    """Draining may close it."""
    bench = Bench()
    assert opened(bench, ("<", ANSWER)).is_idle
    assert not opened(bench, (">", OPENING[:5])).is_idle
    closed = opened(bench)
    closed.response_eof()
    closed.close()
    assert not closed.is_active


def test_an_upgrade_to_http2_goes_on_unseen_and_is_counted() -> None:
    """Exchanges go on there, other than in a tunnel."""
    bench = Bench()
    request = post(
        b"1", fields=b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: \r\n"
    )
    switch = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    opened(bench, (">", request), ("<", switch + ANSWER), (">", OPENING))
    assert bench.slot.gauge(Gauge.BLIND) == 1
    assert bench.balance() == 0
