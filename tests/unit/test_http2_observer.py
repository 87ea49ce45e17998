"""The observer of an HTTP/2 connection: what it pairs by stream, keeps, counts and releases."""

import struct
from datetime import UTC, datetime

import pytest
from hpack import Encoder

from quantdrift.core.clock import ManualClock
from quantdrift.core.config import SamplingOptions
from quantdrift.core.records import HeaderStratum, Loss, Protocol
from quantdrift.sidecar.relay.http2.frames import PREFACE
from quantdrift.sidecar.relay.http2.observer import Http2Observer
from quantdrift.sidecar.sampling.first_phase import ExchangeIds, Sampler
from quantdrift.sidecar.state.counters import Count, Gauge
from quantdrift.sidecar.state.routes import Routes
from tests.support.sidecar.http2_wire import (
    ACK,
    ANSWER,
    CONTINUATION,
    DATA,
    GOAWAY,
    HEADERS,
    OPENING,
    PADDED,
    PING,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    Ends,
    data,
    frame,
    goaway,
    headers,
    reset,
    settings,
)
from tests.support.sidecar.relay_rig import Bench

pytestmark = pytest.mark.unit

REQUEST_HEAD = b"POST /inference.GRPCInferenceService/ModelInfer HTTP/2\r\nhost: h:1\r\ncontent-type: application/grpc\r\n"
RESPONSE_HEAD = b"HTTP/2 200 \r\ncontent-type: application/grpc\r\n"
ENDED = RESPONSE_HEAD + b"grpc-status: 0\r\n\r\n"


def follow(bench: Bench, *steps: tuple[str, bytes]) -> Http2Observer:
    """Show an observer both openings, then what client (`>`) and backend (`<`) sent."""
    observer = Http2Observer(bench.scope)
    for direction, chunk in ((">", OPENING), ("<", ANSWER), *steps):
        (observer.request if direction == ">" else observer.response)(chunk)
    return observer


def asked(ends: Ends, stream: int, body: bytes = b"in", *extra: tuple[str, str]) -> bytes:
    """Return a whole request."""
    return headers(stream, ends.request(*extra)) + data(stream, body, ends=True)


def answered(ends: Ends, stream: int, body: bytes = b"out", *extra: tuple[str, str]) -> bytes:
    """Return a whole response, trailers at its end."""
    return (
        headers(stream, ends.response(*extra))
        + data(stream, body)
        + headers(stream, ends.trailers(), ends=True)
    )


def test_an_exchange_is_handed_over_as_http1_would_have_it() -> None:
    """Heads without pseudo-headers, trailers among the response's, contents without frames; the memory is given back."""
    sampling = SamplingOptions(
        rate=1.0, header_strata=(HeaderStratum(name="a", rate=1.0, headers={"x-a": "b"}),)
    )
    bench, ends = Bench(sampling), Ends()
    observer = follow(bench, (">", asked(ends, 1, b"in", ("x-a", "b"))), ("<", answered(ends, 1)))
    assert bench.pairs == [(REQUEST_HEAD + b"x-a: b\r\n\r\nin", ENDED + b"out")]
    meta = bench.taken[0].meta
    assert (meta.request_bytes - meta.request_head_bytes, meta.response_bytes - meta.response_head_bytes) == (
        2,
        3,
    )
    assert (meta.stratum, meta.pi1, len(meta.id)) == (0, 1.0, 32)
    assert bench.slot.gauge(Gauge.HELD_BYTES) == bench.scope.held_bytes == 0
    assert observer.is_idle


def test_streams_are_paired_however_they_are_interleaved() -> None:
    """Responses come in another order than requests, a frame of one between two of another."""
    bench, ends = Bench(), Ends()
    observer = follow(
        bench,
        (">", headers(1, ends.request()) + data(1, b"a")),
        (">", headers(3, ends.request()) + data(3, b"c")),
        (">", data(1, b"A", ends=True) + data(3, b"C", ends=True)),
        ("<", headers(3, ends.response()) + data(3, b"3")),
        ("<", headers(1, ends.response()) + data(1, b"1")),
        ("<", data(3, b"33") + headers(3, ends.trailers(), ends=True)),
        ("<", data(1, b"11") + headers(1, ends.trailers(), ends=True)),
    )
    assert [(request[-2:], response[-3:]) for request, response in bench.pairs] == [
        (b"cC", b"333"),
        (b"aA", b"111"),
    ]
    assert observer.is_idle


def test_every_form_of_frame_says_the_same() -> None:
    """Padding, priorities, CONTINUATION, frames of no interest and of unknown kinds; an interim response; trailers of a request."""
    bench, ends = Bench(), Ends()
    noise = frame(PING, 0, 0, b"8 bytes.") + frame(PRIORITY, 0, 1, bytes(5)) + frame(0xBE, 0xFF, 7, b"?")
    request = (
        headers(1, ends.request(), cuts=(0, 3, 3, 20), pad=5, prioritised=True)
        + noise
        + data(1, b"in", pad=0)
        + data(1, b"", pad=255)
        + headers(1, ends.client.encode([("x-checksum", "1")]), ends=True)
    )
    response = (
        headers(1, ends.server.encode([(":status", "103"), ("link", "a")]))
        + noise
        + headers(1, ends.response(), pad=0, cuts=(2,))
        + data(1, b"out", pad=7)
        + headers(1, ends.trailers(), ends=True)
    )
    follow(bench, (">", request), ("<", response))
    assert bench.pairs == [(REQUEST_HEAD + b"\r\nin", ENDED + b"out")]


def test_a_response_without_trailers_or_without_content_is_one() -> None:
    """REST over HTTP/2 ends in DATA, an error of gRPC in its first headers."""
    bench, ends = Bench(), Ends()
    plain = headers(1, ends.response()) + data(1, b"out", ends=True)
    alone = headers(3, ends.response(("grpc-status", "13")), ends=True)
    follow(bench, (">", asked(ends, 1)), ("<", plain), (">", asked(ends, 3)), ("<", alone))
    assert [response for _, response in bench.pairs] == [
        RESPONSE_HEAD + b"\r\nout",
        RESPONSE_HEAD + b"grpc-status: 13\r\n\r\n",
    ]


def test_a_response_may_come_before_its_request_is_complete() -> None:
    """The exchange is complete when both are."""
    bench, ends = Bench(), Ends()
    observer = follow(bench, (">", headers(1, ends.request()) + data(1, b"a")), ("<", answered(ends, 1)))
    assert bench.pairs == []
    assert not observer.is_idle
    observer.request(data(1, b"b", ends=True))
    assert bench.pairs == [(REQUEST_HEAD + b"\r\nab", ENDED + b"out")]


@pytest.mark.parametrize(
    ("path", "method", "offered"),
    [
        ("/inference.GRPCInferenceService/ModelInfer", "POST", 1),
        ("/inference.GRPCInferenceService/ModelStreamInfer", "POST", 1),
        ("/v2/models/digits/infer?x=y", "POST", 1),
        ("/inference.GRPCInferenceService/ModelReady", "POST", 0),
        ("/inference.GRPCInferenceService/ModelInfer", "GET", 0),
        ("/v2/models/di gits/infer", "POST", 0),
        ("/grpc.health.v1.Health/Check", "POST", 0),
    ],
)
def test_inference_is_recognised_by_method_and_path(path: str, method: str, offered: int) -> None:
    """Everything else is counted as ignored and never held."""
    bench, ends = Bench(), Ends()
    request = headers(1, ends.request(path=path, method=method), ends=True)
    follow(bench, (">", request), ("<", answered(ends, 1)))
    assert bench.slot.count(0, Count.OFFERED) == len(bench.taken) == offered
    assert bench.slot.gauge(Gauge.IGNORED) == 1 - offered


@pytest.mark.parametrize(
    ("path", "n_unknown"),
    [
        ("/my.Predictor/Predict", 1),
        ("/grpc.health.v1.Health/Check", 0),
        ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", 0),
        ("/inference.GRPCInferenceService/ServerReady", 0),
        ("/inference.GRPCInferenceService/ModelMetadata", 0),
        ("/inference.GRPCInferenceService/ModelInfer", 0),
    ],
)
def test_a_call_that_may_have_been_meant_as_inference_is_counted_apart(path: str, n_unknown: int) -> None:
    """Every call of gRPC is a POST: those that ask for health and metadata are none of it."""
    bench, ends = Bench(), Ends()
    follow(bench, (">", headers(1, ends.request(path=path), ends=True)), ("<", answered(ends, 1)))
    assert bench.slot.gauge(Gauge.UNKNOWN_POSTS) == n_unknown


def test_exchanges_that_are_not_sampled_are_counted_and_not_buffered() -> None:
    """Its headers are followed all the same: the state of the next ones depends on them."""
    strata = (HeaderStratum(name="a", rate=1.0, headers={"x-a": "b"}),)
    bench, ends = Bench(SamplingOptions(rate=0.0, header_strata=strata)), Ends()
    observer = follow(bench)
    for stream in range(1, 9, 2):
        observer.request(asked(ends, stream, b"x" * 100, ("x-a", "c"), ("x-n", str(stream))))
        assert bench.scope.held_bytes == 0
        observer.response(answered(ends, stream))
    observer.request(asked(ends, 9, b"in", ("x-a", "b"), ("x-n", "7")))
    observer.response(answered(ends, 9, b"out", ("x-n", "7")))
    assert bench.slot.count(1, Count.OFFERED) == 4
    assert bench.slot.count(0, Count.OFFERED) == len(bench.taken) == 1
    assert b"x-a: b\r\nx-n: 7\r\n" in bench.taken[0].request


def test_another_configuration_holds_from_the_next_request_on() -> None:
    """Also for headers that were met before it."""
    bench, ends = Bench(), Ends()
    observer = follow(bench, (">", asked(ends, 1)), ("<", answered(ends, 1)), (">", asked(ends, 3)))
    sampler = Sampler(SamplingOptions(rate=0.0), b"secret", ExchangeIds(), 0.0)
    bench.scope.reconfigure(bench.sidecar, Routes(Protocol), sampler)
    observer.request(asked(ends, 5))
    bench.scope.reconfigure(bench.sidecar, Routes([]), sampler)
    observer.request(asked(ends, 7))
    assert bench.slot.count(0, Count.OFFERED) == 3
    assert bench.slot.count(0, Count.TAKEN) == 2
    assert bench.slot.gauge(Gauge.IGNORED) == 1


def test_the_sampler_sees_the_authority_as_host() -> None:
    """A stratum by host holds in both versions of HTTP."""
    strata = (HeaderStratum(name="a", rate=1.0, headers={"host": "h:1"}),)
    bench, ends = Bench(SamplingOptions(rate=0.0, header_strata=strata)), Ends()
    follow(
        bench,
        (">", asked(ends, 1)),
        (">", asked(ends, 3, b"in", ("host", "another"))),
        ("<", answered(ends, 3)),
    )
    assert bench.slot.count(0, Count.TAKEN) == 2
    assert bench.taken[0].request.count(b"host: ") == 1  # the capture process sees no other


def test_a_head_cannot_be_forged_by_a_value() -> None:
    """A line's end in a value, a name that is none and fields of another version of HTTP reach no head."""
    bench, ends = Bench(), Ends()
    bad = [
        ("x-a", "b\r\ngrpc-status: 7"),
        ("x b", "c"),
        ("transfer-encoding", "chunked"),
        ("host", "other"),
        ("grpc-trace-bin", "\x00\x01\n"),
    ]
    request = headers(1, ends.request(*bad)) + data(1, b"in", ends=True)
    follow(bench, (">", request), ("<", answered(ends, 1, b"out", ("x-a", "b\r\n\r\nmore"))))
    ((sent, got),) = bench.pairs
    assert sent == REQUEST_HEAD + b"x-a: b  grpc-status: 7\r\ngrpc-trace-bin:    \r\n\r\nin"
    assert got == RESPONSE_HEAD + b"x-a: b    more\r\ngrpc-status: 0\r\n\r\nout"


@pytest.mark.parametrize("by", [">", "<"])
def test_a_stream_that_is_reset_is_lost_alone(by: str) -> None:
    """Its memory is freed at once; frames of it that were under way are passed over; the others go on."""
    bench, ends = Bench(), Ends()
    observer = follow(bench, (">", asked(ends, 1)), (">", asked(ends, 3)), (by, reset(1)))
    assert bench.lost(Loss.CLIENT_ABORT if by == ">" else Loss.TRUNCATED) == 1
    observer.response(answered(ends, 1))
    observer.request(headers(1, ends.client.encode([("late", "1")]), ends=True))
    observer.response(answered(ends, 3))
    assert len(bench.pairs) == 1
    assert bench.balance() == bench.scope.held_bytes == bench.slot.gauge(Gauge.BLIND) == 0
    assert observer.is_idle


def test_a_reset_after_the_response_of_a_request_that_is_not_needed_any_more() -> None:
    """A server may answer without the whole request: half of an exchange is none."""
    bench, ends = Bench(), Ends()
    observer = follow(
        bench, (">", headers(1, ends.request())), ("<", answered(ends, 1) + reset(1, 0)), ("<", reset(99))
    )
    assert bench.lost(Loss.TRUNCATED) == 1
    assert observer.is_idle


def test_a_farewell_gives_up_what_is_newer() -> None:
    """Its client asks again on another connection; what is older is still answered."""
    bench, ends = Bench(), Ends()
    observer = follow(bench, *((">", asked(ends, stream)) for stream in (1, 3, 5)), ("<", goaway(1)))
    assert bench.lost(Loss.TRUNCATED) == 2
    assert not observer.is_idle
    observer.response(answered(ends, 1))
    assert len(bench.pairs) == 1
    assert observer.is_idle


def test_what_was_cut_is_lost() -> None:
    """A peer that closes in the middle costs the exchanges under way, counted."""
    bench, ends = Bench(), Ends()
    observer = follow(
        bench, (">", asked(ends, 1) + asked(ends, 3)), ("<", answered(ends, 1) + answered(ends, 3)[:-1])
    )
    observer.response_eof()
    observer.close()
    assert len(bench.pairs) == 1
    assert bench.lost(Loss.TRUNCATED) == 1
    assert bench.balance() == bench.scope.held_bytes == 0


def test_a_malformed_response_costs_its_stream() -> None:
    """Content before any head, or an end without one."""
    bench, ends = Bench(), Ends()
    observer = follow(
        bench,
        (">", asked(ends, 1) + asked(ends, 3) + asked(ends, 5)),
        ("<", data(1, b"out") + answered(ends, 1)),
        ("<", data(3, b"", ends=True) + answered(ends, 5)),
    )
    assert bench.lost(Loss.FRAMING) == 2
    assert len(bench.pairs) == 1
    assert observer.is_idle


def test_what_a_server_pushes_is_passed_over() -> None:
    """Its headers are followed, its content is not."""
    bench, ends = Bench(), Ends()
    promised = ends.server.encode([(":method", "GET"), (":path", "/x"), ("x-a", "b")])
    push = frame(PUSH_PROMISE, 0x4, 1, struct.pack("!I", 2) + promised)
    pushed = headers(2, ends.response()) + data(2, b"pushed", ends=True)
    follow(bench, (">", asked(ends, 1)), ("<", push + pushed + answered(ends, 1, b"out", ("x-a", "b"))))
    assert bench.pairs == [(REQUEST_HEAD + b"\r\nin", RESPONSE_HEAD + b"x-a: b\r\ngrpc-status: 0\r\n\r\nout")]


def test_longer_frames_are_taken_once_they_are_agreed_on() -> None:
    """What one side says holds for what the other sends, also after it has said less again."""
    body = b"x" * 40_000
    for speaks, sends in (("<", ">"), (">", "<")):
        bench, ends = Bench(), Ends()
        allow = (speaks, settings((5, 50_000)) + settings((5, 16_384)))
        steps = {
            ">": headers(1, ends.request())
            + data(1, body if sends == ">" else b"in", ends=True, size=50_000),
            "<": headers(1, ends.response()) + data(1, body, ends=True, size=50_000 if sends == "<" else 9),
        }
        follow(bench, allow, (">", steps[">"]), ("<", steps["<"]))
        assert len(bench.pairs) == 1
        bench = Bench()
        follow(bench, (">", steps[">"]), ("<", steps["<"]))
        assert bench.slot.gauge(Gauge.BLIND) == 1


LONG = Encoder().encode([("x", "y" * 70_000)], huffman=False)


@pytest.mark.parametrize(
    "steps",
    [
        (("<", b"HTTP/1.1 400 Bad Request\r\n\r\n"),),
        ((">", b"\xff" * 9),),
        ((">", frame(DATA, PADDED, 1, b"\x05abc")),),
        ((">", frame(HEADERS, PADDED | 4, 1, b"\x05abc")),),
        ((">", frame(HEADERS, PADDED | 4, 1)),),
        ((">", frame(HEADERS, 4 | 0x20, 1, b"abc")),),
        ((">", frame(HEADERS, 4, 0, b"\x82")),),
        ((">", frame(HEADERS, 4, 2, b"\x82")),),
        ((">", frame(HEADERS, 0, 1, b"\x82") + frame(DATA, 0, 1)),),
        ((">", frame(HEADERS, 0, 1, b"\x82") + frame(CONTINUATION, 4, 3)),),
        ((">", frame(CONTINUATION, 4, 1, b"\x82")),),
        ((">", frame(HEADERS, 4, 1, b"\xff\xff\xff\xff\xff\xff")),),
        ((">", frame(RST_STREAM, 0, 1, b"abc")),),
        ((">", frame(RST_STREAM, 0, 0, bytes(4))),),
        ((">", frame(SETTINGS, 0, 1)),),
        ((">", frame(SETTINGS, 0, 0, b"abc")),),
        ((">", frame(SETTINGS, ACK, 0, bytes(6))),),
        (("<", frame(GOAWAY, 0, 0, bytes(7))),),
        (("<", headers(1, b"\x88")),),
        (("<", frame(PUSH_PROMISE, 4, 1, bytes(3))),),
        ((">", headers(1, LONG, cuts=range(10_000, 70_000, 10_000))),),
        ((">", b"".join(headers(stream, b"\x82") for stream in range(1, 20_003, 2))),),
    ],
)
def test_a_connection_that_cannot_be_followed_is_left_alone(steps: tuple[tuple[str, bytes], ...]) -> None:
    """It is counted once as blind, what was held of it is lost, and everything after is ignored."""
    bench, ends = Bench(), Ends()
    observer = Http2Observer(bench.scope)
    opening = steps[0][0] == "<" and steps[0][1].startswith(b"HTTP/1")
    for direction, chunk in (
        (">", OPENING),
        *((("<", ANSWER),) if not opening else ()),
        *steps,
        (">", asked(ends, 30_001)),
        ("<", answered(ends, 30_001)),
    ):
        (observer.request if direction == ">" else observer.response)(chunk)
    assert not observer.is_active
    assert not observer.is_idle
    assert bench.slot.gauge(Gauge.BLIND) == 1
    assert bench.pairs == []
    assert bench.balance() == bench.scope.held_bytes == 0


def test_headers_that_never_end_are_given_up() -> None:
    """Empty CONTINUATION frames cost nothing to send; who follows them without an end follows nothing else."""
    bench = Bench()
    observer = follow(bench, (">", frame(HEADERS, 0, 1) + frame(CONTINUATION, 0, 1) * 8000))
    assert not observer.is_active
    assert bench.slot.gauge(Gauge.BLIND) == 1


def test_a_client_must_begin_with_settings() -> None:
    """What follows the preface and is none was written by nobody who speaks HTTP/2."""
    bench, ends = Bench(), Ends()
    observer = Http2Observer(bench.scope)
    observer.request(PREFACE + asked(ends, 1))
    assert bench.slot.gauge(Gauge.BLIND) == 1


def test_buffered_exchanges_are_lost_when_the_framing_is() -> None:
    """The reason is told apart from a peer that closed."""
    bench, ends = Bench(), Ends()
    follow(bench, (">", asked(ends, 1)), ("<", b"\xff" * 9))
    assert bench.lost(Loss.FRAMING) == 1
    assert bench.balance() == bench.scope.held_bytes == 0


def test_an_exchange_above_its_limit_is_dropped() -> None:
    """Its bytes are freed at once, the connection is still followed, and the next one is taken."""
    bench, ends = Bench(max_exchange_bytes=1024), Ends()
    observer = follow(bench, (">", asked(ends, 1, b"x" * 1000)))
    assert bench.lost(Loss.TOO_LARGE) == 1
    assert bench.scope.held_bytes == 0
    observer.response(answered(ends, 1))
    observer.request(asked(ends, 3))
    observer.response(answered(ends, 3, b"z" * 2000))
    assert bench.lost(Loss.TOO_LARGE) == 2
    observer.request(asked(ends, 5))
    observer.response(answered(ends, 5))
    assert len(bench.pairs) == 1
    assert bench.balance() == 0
    assert observer.is_idle


def test_many_small_frames_count_for_what_they_cost() -> None:
    """A client that sends single bytes cannot make the worker hold many times its bound."""
    bench, ends = Bench(max_held_bytes=4096), Ends()
    follow(bench, (">", headers(1, ends.request()) + data(1, b"x" * 1000, size=1)))
    assert bench.lost(Loss.HELD_BYTES) == 1


def test_trailers_count_for_what_they_cost() -> None:
    """They are held like any content."""
    bench, ends = Bench(max_exchange_bytes=1024), Ends()
    wire = headers(1, ends.response()) + headers(1, ends.trailers("0", ("x-a", "b" * 2000)), ends=True)
    observer = follow(bench, (">", asked(ends, 1)), ("<", wire))
    assert bench.lost(Loss.TOO_LARGE) == 1
    assert observer.is_idle


def test_idle_is_between_streams_and_between_frames() -> None:
    """Not within a frame of the client's, nor before its settings."""
    bench, ends = Bench(), Ends()
    observer = Http2Observer(bench.scope)
    assert not observer.is_idle
    observer.request(OPENING)
    assert observer.is_idle
    ping = frame(PING, 0, 0, b"8 bytes.")
    observer.request(ping[:12])
    assert not observer.is_idle
    observer.request(ping[12:])
    assert observer.is_idle
    observer.request(headers(1, ends.request()))
    assert not observer.is_idle


def test_open_streams_and_header_tables_share_a_bound() -> None:
    """Many streams at once are followed where there is room; where there is none the connection is let go."""
    for max_connections, is_active in ((20, True), (2, False)):
        bench, ends = Bench(SamplingOptions(rate=0.0), max_connections=max_connections), Ends()
        observer = follow(bench, *((">", asked(ends, 2 * n + 1)) for n in range(250)))
        assert observer.is_active is is_active
        assert bench.slot.gauge(Gauge.BLIND) == (not is_active)
        assert (bench.scope.memory.n_bytes > 0) is is_active
        observer.close()
        assert bench.scope.memory.n_bytes == 0


def test_each_stream_has_a_time_of_its_own() -> None:
    """Two requests of one connection that overlap: from the end of each to the end of its answer."""
    bench, ends, clock = Bench(), Ends(), ManualClock(datetime(2026, 3, 1, tzinfo=UTC))
    bench.scope.clock = clock
    observer = Http2Observer(bench.scope)
    observer.request(OPENING)
    observer.response(ANSWER)
    observer.request(asked(ends, 1))
    clock.advance(1)
    observer.request(asked(ends, 3))
    clock.advance(2)
    observer.response(headers(3, ends.response()) + data(3, b"o"))
    clock.advance(4)
    observer.response(data(3, b"ut") + headers(3, ends.trailers(), ends=True))
    observer.response(answered(ends, 1))
    assert [(taken.meta.first_byte_s, taken.meta.latency_s) for taken in bench.taken] == [(2, 6), (7, 7)]
