"""Whatever the pieces that bytes come in: the same exchanges, and the same bytes on the other side."""

import itertools
from typing import cast

import h11
import httptools
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantdrift.core.config import SamplingOptions
from quantdrift.sidecar.relay.http1.framing import MessageFramer
from quantdrift.sidecar.relay.http1.observer import Http1Observer
from quantdrift.sidecar.relay.observing.heads import parse_request, parse_response
from quantdrift.sidecar.relay.observing.memory import ObserverMemory
from quantdrift.sidecar.state.counters import Count, Gauge
from tests.support.sidecar.relay_ends import check_forwarding, relayed
from tests.support.sidecar.relay_rig import INFER, Bench

pytestmark = pytest.mark.property


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One request with its responses, and what of them should be handed over."""

    method: bytes
    target: bytes
    request: bytes
    head_bytes: int
    interim: bytes
    response: bytes
    early: bool  # answered as soon as the head is there

    @property
    def is_inference(self) -> bool:
        """Whether it is to be taken."""
        return self.method == b"POST" and self.target.startswith(INFER)


BODIES = st.one_of(
    st.binary(max_size=40),
    st.binary(max_size=12).map(lambda b: b"\r\n\r\n" + b + b"\r\n"),
    st.just(b"HTTP/1.1 200 OK\r\n\r\nPOST / HTTP/1.1\r\n\r\n"),
    st.just(b"x" * 3000),
)
FIELDS = st.lists(
    st.sampled_from([b"X-A:  b c ", b"accept: */*", b"x-content-length: 4", b"Keep-Alive: 5"]),
    max_size=3,
).map(lambda fields: b"".join(field + b"\r\n" for field in fields))


@st.composite
def chunked(draw: st.DrawFn, body: bytes) -> bytes:
    """Return `body` in chunks, perhaps with extensions and trailers."""
    wire, pos = b"", 0
    while pos < len(body):
        n = draw(st.integers(1, len(body) - pos))
        size = draw(st.sampled_from([b"%x", b"%X", b"0%x"])) % n
        wire += (
            size
            + draw(st.sampled_from([b"", b";a=b", b';a="b c"']))
            + b"\r\n"
            + body[pos : pos + n]
            + b"\r\n"
        )
        pos += n
    return wire + b"0\r\n" + draw(st.sampled_from([b"", b"T: u\r\n", b"T: u\r\nV: w\r\n"])) + b"\r\n"


@st.composite
def message(draw: st.DrawFn, line: bytes) -> tuple[bytes, int]:
    """Return a message with a start line, and how long its head is."""
    body, fields = draw(BODIES), draw(FIELDS)
    if draw(st.booleans()):
        head, wire = line + fields + b"Transfer-Encoding: chunked\r\n\r\n", draw(chunked(body))
    else:
        head, wire = line + b"content-length: %d\r\n" % len(body) + fields + b"\r\n", body
    return head + wire, len(head)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    """Return a request and its response."""
    method = draw(st.sampled_from([b"POST", b"POST", b"GET", b"HEAD"]))
    target = draw(st.sampled_from([INFER, INFER + b"?a=b", b"/v2/models/digits", b"/"]))
    line = b"%s %s HTTP/1.1\r\nHost: h\r\n" % (method, target)
    if method == b"POST":
        request, head_bytes = draw(message(line))
    else:
        request = line + draw(FIELDS) + b"\r\n"
        head_bytes = len(request)
    bodiless = draw(st.sampled_from([b"", b"", b"", b"204 No", b"304 No"]))
    if method == b"HEAD":
        response = b"HTTP/1.1 200 OK\r\n" + draw(FIELDS) + b"Content-Length: 77\r\n\r\n"
    elif bodiless:
        response = b"HTTP/1.1 " + bodiless + b"\r\n" + draw(FIELDS) + b"\r\n"
    else:
        response, _ = draw(message(b"HTTP/1.1 200 OK\r\n"))
    interim = draw(
        st.sampled_from([b"", b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 H\r\nA: b\r\n\r\n"])
    )
    return Turn(
        method=method,
        target=target,
        request=request,
        head_bytes=head_bytes,
        interim=interim,
        response=response,
        early=draw(st.booleans()),
    )


TALKS = st.lists(turns(), min_size=1, max_size=5)


def interleave(draw: st.DrawFn, talk: list[Turn]) -> list[tuple[bool, bytes]]:
    """Cut both directions at random; a response begins no sooner than its request's head is there."""
    requests = b"".join(turn.request for turn in talk)
    responses = b""
    allowed: list[
        tuple[int, int]
    ] = []  # bytes of requests that must be there, bytes of responses that may come
    before = 0
    for turn in talk:
        due = before + (turn.head_bytes if turn.early else len(turn.request))
        before += len(turn.request)
        responses += turn.interim + turn.response
        allowed.append((due, len(responses)))
    steps: list[tuple[bool, bytes]] = []
    sent = received = 0
    while sent < len(requests) or received < len(responses):
        may = max((limit for due, limit in allowed if due <= sent), default=0)
        sizes = st.sampled_from([1, 2, 3, 17, 100, 10_000])
        if received < may and (sent == len(requests) or draw(st.booleans())):
            chunk = responses[received : min(may, received + draw(sizes))]
            received += len(chunk)
            steps.append((False, chunk))
        else:
            chunk = requests[sent : sent + draw(sizes)]
            sent += len(chunk)
            steps.append((True, chunk))
    return steps


@pytest.mark.slow
@given(data=st.data(), talk=TALKS)
def test_the_same_exchanges_however_they_are_cut(data: st.DataObject, talk: list[Turn]) -> None:
    """Every inference is taken once, in order, byte for byte; nothing else is."""
    bench = Bench()
    observer = Http1Observer(bench.scope)
    for from_client, chunk in interleave(cast("st.DrawFn", data.draw), talk):
        (observer.request if from_client else observer.response)(chunk)
    assert bench.pairs == [(turn.request, turn.response) for turn in talk if turn.is_inference]
    assert bench.slot.gauge(Gauge.BLIND) == bench.slot.gauge(Gauge.HELD_BYTES) == 0
    assert observer.is_idle


@pytest.mark.slow
@given(data=st.data(), talk=TALKS, rate=st.sampled_from([0.0, 1.0]))
def test_what_need_not_be_seen_changes_nothing(data: st.DataObject, talk: list[Turn], rate: float) -> None:
    """An observer that is told of bytes by their number alone, where it says so, sees the same exchanges."""
    bench = Bench(SamplingOptions(rate=rate))
    observer = Http1Observer(bench.scope)
    n_skipped = 0
    for from_client, chunk in interleave(cast("st.DrawFn", data.draw), talk):
        n = (observer.skip_request if from_client else observer.skip_response)(len(chunk))
        assert 0 <= n <= len(chunk)
        n_skipped += n
        if n < len(chunk):
            (observer.request if from_client else observer.response)(chunk[n:])
    wanted = [(turn.request, turn.response) for turn in talk if turn.is_inference]
    assert bench.pairs == (wanted if rate else [])
    assert bench.slot.count(0, Count.OFFERED) == len(wanted)
    assert n_skipped <= sum(len(turn.request) - turn.head_bytes + len(turn.response) for turn in talk)
    assert bench.slot.gauge(Gauge.BLIND) == 0
    assert observer.is_idle


@given(
    steps=st.lists(
        st.tuples(
            st.booleans(),
            st.one_of(
                st.binary(min_size=1, max_size=50),
                st.sampled_from(
                    [
                        b"POST /v2/models/digits/infer HTTP/1.1\r\n",
                        b"HTTP/1.1 200 OK\r\n",
                        b"HTTP/1.1 101 S\r\n\r\n",
                        b"HTTP/1.1 100 C\r\n\r\n",
                        b"Content-Length: 5\r\n",
                        b"Transfer-Encoding: chunked\r\n",
                        b"Upgrade: x\r\n",
                        b"Expect: y\r\n",
                        b"\r\n",
                        b"5\r\n",
                        b"0\r\n\r\n",
                        b"\n",
                    ]
                ),
            ),
        ),
        max_size=60,
    ),
    connected_at=st.integers(0, 10),
)
def test_garbage_is_forwarded_as_it_came(steps: list[tuple[bool, bytes]], connected_at: int) -> None:
    """No bytes, however strange, change, get lost or make the observer fail; what was held is given back."""
    check_forwarding(steps, connected_at)


@pytest.mark.slow
@given(data=st.data(), talk=TALKS, connected_at=st.integers(0, 10))
def test_traffic_is_forwarded_as_it_came(data: st.DataObject, talk: list[Turn], connected_at: int) -> None:
    """Valid traffic passes unchanged in any pieces, and the exchanges are those of the observer alone."""
    bench = Bench()
    steps = interleave(cast("st.DrawFn", data.draw), talk)
    to_backend, to_client, _ = relayed(bench, steps, connected_at)
    assert to_backend == b"".join(turn.request for turn in talk)
    assert to_client == b"".join(turn.interim + turn.response for turn in talk)
    assert bench.pairs == [(turn.request, turn.response) for turn in talk if turn.is_inference]


def delimit(stream: bytes, *, responses: bool) -> list[bytes]:
    """Return the messages that our delimiter finds."""
    found: list[bytes] = []
    now = b""

    def on_head(data: bytes, start: int, stop: int) -> int:
        nonlocal now
        now = data[start:stop]
        delimiter.keep = True
        if not responses:
            return parse_request(data, start, stop).body
        head = parse_response(data, start, stop)
        return 0 if head.status in (204, 304) else head.body

    def on_piece(data: bytes, start: int, stop: int) -> None:
        nonlocal now
        now += data[start:stop]

    def on_end() -> None:
        found.append(now)

    delimiter = MessageFramer(on_head, on_piece, on_end, 65_536, ObserverMemory(1 << 24))
    delimiter.feed(stream)
    assert delimiter.is_between_messages
    return found


def h11_sees(stream: bytes, *, responses: bool) -> list[tuple[int, bytes]]:
    """Return where h11 sees each message end, and its body."""
    found: list[tuple[int, bytes]] = []
    pos = 0
    while pos < len(stream):
        parser = h11.Connection(h11.CLIENT if responses else h11.SERVER)
        if responses:
            parser.send(h11.Request(method="GET", target="/", headers=[("Host", "h")]))
            parser.send(h11.EndOfMessage())
        parser.receive_data(stream[pos:])
        body = b""
        while not isinstance(event := parser.next_event(), h11.EndOfMessage):
            assert event is not h11.NEED_DATA
            if isinstance(event, h11.Data):
                body += event.data
        pos = len(stream) - len(parser.trailing_data[0])
        found.append((pos, body))
    return found


class Bodies:
    """What httptools makes of a stream."""

    def __init__(self, stream: bytes, *, responses: bool) -> None:
        self.bodies: list[bytes] = []
        kind = httptools.HttpResponseParser if responses else httptools.HttpRequestParser
        kind(self).feed_data(stream)

    def on_message_begin(self) -> None:
        """Begin a body."""
        self.bodies.append(b"")

    def on_body(self, body: bytes) -> None:
        """Add to it."""
        self.bodies[-1] += body


@pytest.mark.slow
@given(talk=TALKS, responses=st.booleans())
def test_messages_end_where_h11_and_llhttp_see_them_end(talk: list[Turn], *, responses: bool) -> None:
    """Three parsers agree on every boundary and body. HEAD is left out: a response alone does not tell of it."""
    wire = [
        turn.response if responses else turn.request
        for turn in talk
        if turn.method != b"HEAD" or not responses
    ]
    stream = b"".join(wire)
    assert delimit(stream, responses=responses) == wire
    seen = h11_sees(stream, responses=responses)
    assert [end for end, _ in seen] == list(itertools.accumulate(map(len, wire)))
    assert Bodies(stream, responses=responses).bodies == [body for _, body in seen]
