"""The observer of an HTTP/1.1 connection: what it pairs, keeps, counts and releases."""

from datetime import UTC, datetime

import pytest

from quantdrift.core.clock import ManualClock
from quantdrift.core.config import SamplingOptions
from quantdrift.core.records import HeaderStratum, Loss
from quantdrift.sidecar.relay.http1.observer import Http1Observer, with_close
from quantdrift.sidecar.relay.observing.heads import parse_request
from quantdrift.sidecar.state.counters import Count, Gauge
from tests.support.sidecar.relay_rig import INFER, Bench, answer, post

pytestmark = pytest.mark.unit


def follow(bench: Bench, *steps: tuple[str, bytes]) -> Http1Observer:
    """Show an observer what client (`>`) and backend (`<`) sent."""
    observer = Http1Observer(bench.scope)
    for direction, chunk in steps:
        (observer.request if direction == ">" else observer.response)(chunk)
    return observer


def test_an_exchange_is_handed_over_as_it_was_on_the_wire() -> None:
    """Bytes, lengths of heads, probability and stratum are told; the memory is given back."""
    bench = Bench(
        SamplingOptions(rate=1.0, header_strata=(HeaderStratum(name="a", rate=1.0, headers={"a": "b"}),))
    )
    request, response = post(b"in", fields=b"A: b\r\n"), answer(b"out")
    observer = follow(bench, (">", request), ("<", response))
    assert bench.pairs == [(request, response)]
    meta = bench.taken[0].meta
    assert (meta.request_head_bytes, meta.response_head_bytes) == (len(request) - 2, len(response) - 3)
    assert (meta.stratum, meta.pi1, len(meta.id)) == (0, 1.0, 32)
    assert bench.slot.gauge(Gauge.HELD_BYTES) == bench.scope.held_bytes == 0
    assert observer.is_idle


@pytest.mark.parametrize(
    ("request_", "n_unknown"),
    [
        (post(b"", b"/predict"), 1),
        (b"GET /predict HTTP/1.1\r\n\r\n", 0),
        (post(b""), 0),
    ],
)
def test_what_may_have_been_meant_as_inference_is_counted_apart(request_: bytes, n_unknown: int) -> None:
    """Probes are none of it, so that a hint can be given early."""
    bench = Bench()
    follow(bench, (">", request_), ("<", answer(b"")))
    assert bench.slot.gauge(Gauge.UNKNOWN_POSTS) == n_unknown


@pytest.mark.parametrize(
    ("request_", "offered"),
    [
        (post(b""), 1),
        (post(b"", INFER + b"?a=/b"), 1),
        (post(b"", b"/v2/models/a.b%20c/versions/7/infer"), 1),
        (post(b"", b"/v2/models/a%2Fb/infer"), 1),
        (post(b"", b"http://h:80/v2/models/a/infer?x"), 1),
        (post(b"", b"http://h/x/v2/models/a/infer"), 0),
        (b"GET /v2/models/digits/infer HTTP/1.1\r\n\r\n", 0),
        (post(b"", b"/v2/models/digits"), 0),
        (post(b"", b"/v2/models//infer"), 0),
        (post(b"", b"/v2/models/a/b/infer"), 0),
        (post(b"", b"/v2/models/a/versions/infer"), 0),
        (post(b"", b"/v2/models/a/infer/"), 0),
        (post(b"", b"/v2/models/a?b/infer"), 0),
        (post(b"", b"/x/v2/models/a/infer"), 0),
    ],
)
def test_inference_is_recognised_by_method_and_path(request_: bytes, offered: int) -> None:
    """Everything else is counted as ignored and never held."""
    bench = Bench()
    follow(bench, (">", request_), ("<", answer(b"")))
    assert bench.slot.count(0, Count.OFFERED) == len(bench.taken) == offered
    assert bench.slot.gauge(Gauge.IGNORED) == 1 - offered


@pytest.mark.parametrize("step", [1, 1000])
def test_an_empty_line_before_a_request_belongs_to_no_message(step: int) -> None:
    """Some clients end a body with one: it comes with the next head, or before it."""
    bench = Bench()
    observer = Http1Observer(bench.scope)
    for body in (b"one", b"two"):
        late = b"\r\n" + post(body)
        for pos in range(0, len(late), step):
            observer.request(late[pos : pos + step])
        observer.response(answer(body))
    assert bench.pairs == [(post(body), answer(body)) for body in (b"one", b"two")]


def test_only_short_heads_are_remembered() -> None:
    """What decides on a request is known again, but a thousand long targets would be many megabytes."""
    bench = Bench()
    short, long = (
        parse_request(head, 0, len(head)) for head in (post(b""), post(b"", INFER + b"?" + b"x" * 5000))
    )
    places = [bench.scope.sampling_key(head, b"", 0, 0) for head in (short, short, long, long)]
    assert places[0] is places[1]
    assert places[2] is not places[3]
    assert places[2] == places[3]


def test_exchanges_that_are_not_sampled_are_counted_and_not_buffered() -> None:
    """The offered count is exact whatever the rate."""
    bench = Bench(SamplingOptions(rate=0.0))
    follow(bench, (">", post(b"x" * 10)[:-1]))
    assert bench.slot.count(0, Count.OFFERED) == 1
    assert bench.slot.count(0, Count.TAKEN) == 0
    assert bench.scope.held_bytes == 0


def test_pipelined_requests_get_their_own_responses() -> None:
    """The order is the pairing, whatever lies between them; HEAD, 204 and 304 have no body, interim responses none at all."""
    bench = Bench()
    requests = [post(b"one"), b"HEAD /x HTTP/1.1\r\n\r\n", post(b"two"), post(b"three"), post(b"four")]
    responses = [
        answer(b"1"),
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n",
        b"HTTP/1.1 204 No\r\nContent-Length: 5\r\n\r\n",
        b"HTTP/1.1 304 No\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nA: b\r\n\r\n" + answer(b"4"),
    ]
    observer = follow(bench, (">", b"".join(requests)), ("<", b"".join(responses)))
    assert [request for request, _ in bench.pairs] == [requests[i] for i in (0, 2, 3, 4)]
    assert [response for _, response in bench.pairs] == [*responses[:1], *responses[2:4], answer(b"4")]
    assert observer.is_idle


def test_a_response_may_come_before_its_request_is_complete() -> None:
    """The exchange is complete when both are, and its time is that of the response."""
    bench = Bench()
    request, response = post(b"abcdef"), answer(b"no", b"413 No")
    observer = follow(bench, (">", request[:-3]), ("<", response))
    assert bench.pairs == []
    assert not observer.is_idle
    observer.request(request[-3:])
    assert bench.pairs == [(request, response)]


def test_the_end_of_the_connection_ends_a_response_without_length() -> None:
    """HTTP/1.0 style responses are held until the backend closes."""
    bench = Bench()
    observer = follow(bench, (">", post(b"")), ("<", b"HTTP/1.0 200 OK\r\n\r\nsome"), ("<", b"thing"))
    assert bench.pairs == []
    observer.response_eof()
    assert bench.pairs[0][1] == b"HTTP/1.0 200 OK\r\n\r\nsomething"


def test_what_was_cut_is_lost() -> None:
    """A peer that closes in the middle costs the exchanges under way, counted."""
    bench = Bench()
    observer = follow(bench, (">", post(b"1") + post(b"2")), ("<", answer(b"a") + answer(b"b")[:-1]))
    observer.response_eof()
    observer.close()
    assert len(bench.pairs) == 1
    assert bench.lost(Loss.TRUNCATED) == 1
    assert bench.balance() == bench.scope.held_bytes == 0


@pytest.mark.parametrize(
    "steps",
    [
        ((">", b"\x16\x03\x01"),),
        (("<", answer(b"")),),
        ((">", post(b"")), ("<", b"\x00\x00")),
        ((">", post(b"")), ("<", b"HTTP/1.1 101 Switching\r\n\r\n")),
        ((">", post(b"", fields=b"Transfer-Encoding: chunked\r\n")),),
        ((">", post(b"", fields=b"A" * 70_000)),),
        ((">", post(b"12", fields=b"Expect: 100-continue\r\n")[:-2]), ("<", answer(b"", b"417 No"))),
        ((">", b"GET / HTTP/1.1\r\n\r\n" * 1001),),
    ],
)
def test_a_connection_that_cannot_be_followed_is_left_alone(steps: tuple[tuple[str, bytes], ...]) -> None:
    """It is counted once as blind, what was held of it is lost, and everything after is ignored."""
    bench = Bench()
    observer = follow(bench, *steps, (">", post(b"later")), ("<", answer(b"later")))
    assert not observer.is_active
    assert not observer.is_idle
    assert bench.slot.gauge(Gauge.BLIND) == 1
    assert bench.pairs == []
    assert bench.balance() == bench.scope.held_bytes == 0


@pytest.mark.parametrize(
    ("request_", "response"),
    [
        (
            b"GET /x HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
            b"HTTP/1.1 101 Switching\r\n\r\n",
        ),
        (b"CONNECT h:443 HTTP/1.1\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n"),
    ],
)
def test_a_tunnel_is_not_observed_and_not_blind(request_: bytes, response: bytes) -> None:
    """A change of protocol that was agreed on is no loss: whatever follows is ignored, early bytes included."""
    bench = Bench()
    observer = follow(bench, (">", request_ + b"\x81\x00"), ("<", response + b"\x81\x00"), (">", b"\x00" * 9))
    assert not observer.is_active
    assert bench.slot.gauge(Gauge.BLIND) == 0


def test_an_upgrade_that_is_declined_changes_nothing() -> None:
    """Requests that were sent meanwhile are read once the answer is there."""
    bench = Bench()
    first, second = post(b"1", fields=b"Upgrade: h2c\r\n"), post(b"2")
    observer = follow(
        bench, (">", first + second[:5]), (">", second[5:]), ("<", answer(b"a")), ("<", answer(b"b"))
    )
    assert bench.pairs == [(first, answer(b"a")), (second, answer(b"b"))]
    assert observer.is_idle


def test_a_sampled_request_that_becomes_a_tunnel_is_lost() -> None:
    """There will be no response to it."""
    bench = Bench()
    follow(bench, (">", post(b"1", fields=b"Upgrade: h2c\r\n")), ("<", b"HTTP/1.1 101 Switching\r\n\r\n"))
    assert bench.lost(Loss.FRAMING) == 1
    assert bench.scope.held_bytes == 0


def test_an_exchange_above_its_limit_is_dropped() -> None:
    """Its bytes are freed at once, the connection is still followed, and the next one is taken."""
    bench = Bench(max_exchange_bytes=1024)
    large, small = post(b"x" * 1000), post(b"y")
    observer = follow(bench, (">", large), ("<", answer(b"z" * 100)[:50]))
    assert bench.lost(Loss.TOO_LARGE) == 1
    assert bench.scope.held_bytes == 0
    observer.response(answer(b"z" * 100)[50:])
    observer.request(small)
    observer.response(answer(b"z"))
    assert bench.pairs == [(small, answer(b"z"))]
    assert bench.balance() == 0


def test_the_worker_holds_no_more_than_its_bound() -> None:
    """What does not fit beside other connections' exchanges is lost; when they are done there is room again."""
    bench = Bench(max_held_bytes=2000)
    first, second = Http1Observer(bench.scope), Http1Observer(bench.scope)
    first.request(post(b"x" * 800))
    second.request(post(b"y" * 800))
    assert bench.lost(Loss.HELD_BYTES) == 1
    assert 800 < bench.slot.gauge(Gauge.HELD_BYTES) <= 2000
    first.response(answer(b""))
    second.response(answer(b""))
    second.request(post(b"z" * 800))
    second.response(answer(b""))
    assert len(bench.pairs) == 2
    assert bench.balance() == bench.scope.held_bytes == 0


def test_many_small_pieces_count_for_what_they_cost() -> None:
    """A client that sends single bytes cannot make the worker hold many times its bound."""
    bench = Bench(max_held_bytes=4096)
    observer = Http1Observer(bench.scope)
    for byte in post(b"x" * 1000):
        observer.request(bytes((byte,)))
    assert bench.lost(Loss.HELD_BYTES) == 1


def test_large_chunks_are_kept_without_a_copy_and_small_parts_of_them_are_copied() -> None:
    """A part keeps no buffer of more than twice its size alive."""
    buffers: list[bytes | memoryview] = []
    bench = Bench(send_frame=lambda _, frame: buffers.extend(frame))
    head, body = post(b"x" * 10_000)[:-10_000], b"x" * 10_000
    observer = follow(bench, (">", head), (">", body))
    observer.response(answer(b"y" * 10) + answer(b"z" * 9_000)[:1])
    assert any(buffer is body for buffer in buffers)
    views = [buffer for buffer in buffers if isinstance(buffer, memoryview)]
    assert all(len(bytes(view.obj)) <= 2 * len(view) for view in views)


def test_a_body_that_was_not_taken_is_followed_by_its_length_alone() -> None:
    """Most of a large body need not be copied to be seen; one that was taken is asked for whole."""
    request = post(b"x" * 100)
    for rate, expected in ((0.0, 90), (1.0, 0)):
        bench = Bench(SamplingOptions(rate=rate))
        observer = Http1Observer(bench.scope)
        observer.request(request[:-90])
        assert observer.skip_request(40) + observer.skip_request(200) == expected
        assert observer.skip_response(10) == 0


@pytest.mark.parametrize(
    ("chunk", "announced"),
    [
        (b"HTTP/1.1 200 OK\r\nA: b\r\n\r\nx", b"HTTP/1.1 200 OK\r\nConnection: close\r\nA: b\r\n\r\nx"),
        (b"HTTP/1.1 204\r\n\r\n", b"HTTP/1.1 204\r\nConnection: close\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\nconnection:Keep-Alive\r\n\r\n", b"HTTP/1.1 200 OK\r\nconnection:close\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", None),
        (b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\n\r\n", None),
        (b"HTTP/1.1 426 No\r\nConnection: upgrade\r\n\r\n", None),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n\r\n", None),
        (b"HTTP/1.0 200 OK\r\n\r\n", None),
        (b"HTTP/1.1 200 OK\r\nContent-Le", None),
        (b"HTTP/1.1 200 OK\r\nA: b\r", None),
        (b"HTTP/1.1 2x0 OK\r\n\r\n", None),
        (b"", None),
    ],
)
def test_the_end_of_the_connection_is_announced_where_the_head_is_whole(
    chunk: bytes, announced: bytes | None
) -> None:
    """No other byte changes; where anything is unusual, none does."""
    assert with_close(chunk) == (chunk if announced is None else announced)


def test_only_the_response_that_ends_the_connection_announces_it() -> None:
    """Not the first of two that are due, none in the middle of a body, and none while a request is not complete."""
    whole = answer(b"out")
    bench = Bench()
    assert follow(bench, (">", post(b"in"))).closing(whole) != whole
    assert follow(bench).closing(whole) == whole
    assert follow(bench, (">", post(b"in") * 2)).closing(whole) == whole
    assert follow(bench, (">", post(b"in")[:-1])).closing(whole) == whole
    assert follow(bench, (">", post(b"in")), ("<", answer(b"HTTP/1.1 ")[:-3])).closing(whole) == whole
    lost = follow(bench, (">", post(b"in")))
    lost.abandon(Loss.FRAMING)
    assert lost.closing(whole) == whole


def test_the_time_of_an_answer_begins_with_the_end_of_the_request() -> None:
    """Slow sending is not the candidate's time; the first byte of content and the last have times of their own."""
    bench, clock = Bench(), ManualClock(datetime(2026, 3, 1, tzinfo=UTC))
    bench.scope.clock = clock
    observer = Http1Observer(bench.scope)
    request, response = post(b"in"), answer(b"out")
    observer.request(request[:-1])
    clock.advance(8)
    observer.request(request[-1:])
    clock.advance(1)
    observer.response(response[:-3])
    clock.advance(2)
    observer.response(response[-3:-1])
    clock.advance(4)
    observer.response(response[-1:])
    meta = bench.taken[0].meta
    assert (meta.first_byte_s, meta.latency_s) == (3.0, 7.0)


def test_an_answer_before_the_end_of_its_request_has_no_time() -> None:
    """A refusal that comes while the client still sends says nothing of how long the candidate takes."""
    bench, clock = Bench(), ManualClock(datetime(2026, 3, 1, tzinfo=UTC))
    bench.scope.clock = clock
    observer = Http1Observer(bench.scope)
    request = post(b"in")
    observer.request(request[:-1])
    clock.advance(1)
    observer.response(answer(b"out"))
    clock.advance(1)
    observer.request(request[-1:])
    meta = bench.taken[0].meta
    assert (meta.first_byte_s, meta.latency_s) == (None, None)
