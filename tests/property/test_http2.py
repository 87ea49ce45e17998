"""HTTP/2 in whatever pieces: the same exchanges, and the same bytes on the other side; blocks as another decoder reads them."""

import itertools
import struct
from typing import cast

import msgspec
import pytest
from hpack import Decoder, Encoder
from hypothesis import given
from hypothesis import strategies as st

from quantdrift.sidecar.relay.http2.hpack import HeaderBlockDecoder, text
from quantdrift.sidecar.relay.http2.observer import Http2Observer
from quantdrift.sidecar.relay.observing.heads import FramingError
from quantdrift.sidecar.relay.observing.memory import ObserverMemory
from quantdrift.sidecar.state.counters import Gauge
from tests.support.examples import examples
from tests.support.sidecar.http2_wire import (
    ANSWER,
    GOAWAY,
    INFER,
    OPENING,
    PING,
    RST_STREAM,
    Ends,
    data,
    frame,
    headers,
)
from tests.support.sidecar.relay_ends import check_forwarding, relayed
from tests.support.sidecar.relay_rig import Bench

pytestmark = pytest.mark.property

NAMES = st.sampled_from(["x-a", "x-b", "traceparent", "grpc-timeout", "user-agent"])
VALUES = st.one_of(st.sampled_from(["1", "same", "gzip, deflate"]), st.text("0123456789abcdef-", max_size=60))
EXTRA = st.lists(st.tuples(NAMES, VALUES), max_size=3, unique_by=lambda field: field[0])
BODIES = st.one_of(st.binary(max_size=30), st.just(b"x" * 40_000))
NOISE = st.sampled_from(
    [
        b"",
        b"",
        frame(PING, 0, 0, b"8 bytes."),
        frame(8, 0, 0, struct.pack("!I", 9)),
        frame(0xBE, 0xFF, 3, b"?" * 300),
    ]
)
PADS = st.sampled_from([None, None, 0, 5, 255])


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """What one stream carries, and what of it should be handed over."""

    is_inference: bool
    asked: tuple[tuple[str, str], ...]
    request: bytes
    told: tuple[tuple[str, str], ...]
    response: bytes
    trailers: tuple[tuple[str, str], ...] | None

    @property
    def pair(self) -> tuple[bytes, bytes]:
        """The exchange as HTTP/1.1 has it."""
        sent = b"POST %b HTTP/2\r\nhost: h:1\r\ncontent-type: application/grpc\r\n" % INFER.encode()
        got = b"HTTP/2 200 \r\ncontent-type: application/grpc\r\n"
        ended = () if self.trailers is None else (("grpc-status", "0"), *self.trailers)
        return sent + _lines(self.asked) + b"\r\n" + self.request, (
            got + _lines(self.told) + _lines(ended) + b"\r\n" + self.response
        )


def _lines(fields: tuple[tuple[str, str], ...]) -> bytes:
    return "".join(f"{name}: {value}\r\n" for name, value in fields).encode()


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    """Return what one stream carries."""
    return Turn(
        is_inference=draw(st.booleans()),
        asked=tuple(draw(EXTRA)),
        request=draw(BODIES),
        told=tuple(draw(EXTRA)),
        response=draw(BODIES),
        trailers=draw(st.none() | EXTRA.map(tuple)),
    )


def blocked(draw: st.DrawFn, stream: int, block: bytes, *, ends: bool = False) -> list[bytes]:
    """Return the frames of a header block, cut and padded at random: nothing may come between them."""
    cuts = draw(st.lists(st.integers(0, len(block)), max_size=3))
    return [headers(stream, block, ends=ends, cuts=cuts, pad=draw(PADS), prioritised=draw(st.booleans()))]


def content(draw: st.DrawFn, stream: int, body: bytes, *, ends: bool) -> list[bytes]:
    """Return the frames of a content."""
    size = draw(st.sampled_from([7, 1000, 16_000])) if len(body) < 100 else 16_000
    parts = [body[pos : pos + size] for pos in range(0, len(body), size)] or [b""]
    return [
        draw(NOISE) + data(stream, part, ends=ends and index == len(parts) - 1, pad=draw(PADS))
        for index, part in enumerate(parts)
    ]


def merged(draw: st.DrawFn, queues: list[list[bytes]]) -> bytes:
    """Return the frames of several streams in one order, each stream's in its own."""
    wire = b""
    while queues := [queue for queue in queues if queue]:
        wire += draw(st.sampled_from(queues)).pop(0)
    return wire


def conversation(draw: st.DrawFn, talk: list[Turn]) -> list[tuple[bool, bytes]]:
    """Return what both ends send: all requests of a round, interleaved, then all responses of it."""
    ends = Ends()
    steps = [(True, OPENING), (False, ANSWER)]
    streams = list(enumerate(talk))
    while streams:
        n_round = draw(st.integers(1, len(streams)))
        now, streams = streams[:n_round], streams[n_round:]
        # Header blocks are encoded in the order in which they are sent: all of a round's first.
        sent = b""
        for index, turn in now:
            path = INFER if turn.is_inference else "/other"
            sent += b"".join(blocked(draw, 2 * index + 1, ends.request(*turn.asked, path=path)))
        sent += merged(draw, [content(draw, 2 * i + 1, turn.request, ends=True) for i, turn in now])
        got = b""
        for index, turn in now:
            got += b"".join(blocked(draw, 2 * index + 1, ends.response(*turn.told)))
        got += merged(
            draw, [content(draw, 2 * i + 1, turn.response, ends=turn.trailers is None) for i, turn in now]
        )
        for index, turn in now:
            if turn.trailers is not None:
                got += b"".join(blocked(draw, 2 * index + 1, ends.trailers("0", *turn.trailers), ends=True))
        steps += [(True, sent), (False, got)]
    return [step for whole in steps for step in cut(draw, whole)]


def cut(draw: st.DrawFn, whole: tuple[bool, bytes]) -> list[tuple[bool, bytes]]:
    """Cut what one end sends at once at random places."""
    from_client, wire = whole
    size = draw(st.sampled_from([1, 5, 10, 100, 16_384, 65_536])) if len(wire) < 3000 else 16_391
    places = draw(st.lists(st.integers(1, max(1, len(wire) - 1)), max_size=8))
    edges = sorted({0, len(wire), *range(0, len(wire), size), *places})
    return [(from_client, wire[start:stop]) for start, stop in itertools.pairwise(edges)]


@pytest.mark.slow
@given(data_=st.data(), talk=st.lists(turns(), min_size=1, max_size=6), connected_at=st.integers(0, 10))
def test_the_same_exchanges_however_they_are_cut(
    data_: st.DataObject, talk: list[Turn], connected_at: int
) -> None:
    """Every inference is taken once, byte for byte; nothing else is; both sides get every byte."""
    bench = Bench()
    steps = conversation(cast("st.DrawFn", data_.draw), talk)
    to_backend, to_client, connection = relayed(bench, steps, connected_at)
    assert to_backend == b"".join(chunk for from_client, chunk in steps if from_client)
    assert to_client == b"".join(chunk for from_client, chunk in steps if not from_client)
    assert sorted(bench.pairs) == sorted(turn.pair for turn in talk if turn.is_inference)
    assert bench.slot.gauge(Gauge.BLIND) == bench.slot.gauge(Gauge.OBSERVER_ERRORS) == 0
    assert bench.slot.gauge(Gauge.HELD_BYTES) == bench.balance() == 0
    assert connection._observer is not None
    assert connection._observer.is_idle


PIECES = st.one_of(
    st.binary(min_size=1, max_size=40),
    st.sampled_from(
        [
            headers(1, Ends().request()),
            headers(3, Ends().request(), ends=True),
            headers(1, Ends().response()),
            headers(1, Ends().trailers(), ends=True),
            headers(1, Ends().request())[:20],
            data(1, b"content"),
            data(1, b"content", ends=True, pad=3),
            data(3, b""),
            frame(RST_STREAM, 0, 1, bytes(4)),
            frame(GOAWAY, 0, 0, bytes(8)),
            frame(PING, 0, 0, bytes(8)),
            frame(1, 0, 5, b"\x82"),
            frame(9, 4, 5, b"\x84"),
            OPENING,
            ANSWER,
        ]
    ),
)


@pytest.mark.slow
@examples(2)
@given(steps=st.lists(st.tuples(st.booleans(), PIECES), max_size=40), connected_at=st.integers(0, 10))
def test_garbage_is_forwarded_as_it_came(steps: list[tuple[bool, bytes]], connected_at: int) -> None:
    """No bytes after the preface, however strange, change, get lost or make the observer fail; memory is given back."""
    check_forwarding([(True, OPENING), *steps], connected_at)


FIELDS = st.lists(
    st.tuples(
        st.sampled_from([":path", ":status", "x-a", "x-b", "cookie", "content-length"])
        | st.text("abc-", min_size=1),
        VALUES,
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.slow
@examples(2)
@given(
    blocks=st.lists(
        st.tuples(FIELDS, st.booleans(), st.sampled_from([None, 4096, 100, 0])), min_size=1, max_size=30
    )
)
def test_blocks_say_what_another_decoder_reads(
    blocks: list[tuple[list[tuple[str, str]], bool, int | None]],
) -> None:
    """Whatever the table holds, Huffman-coded or not, resized at any time."""
    encoder, decoder, ours = Encoder(), Decoder(), HeaderBlockDecoder(65_536, ObserverMemory(1 << 24))
    for fields, huffman, size in blocks:
        if size is not None:
            encoder.header_table_size = size
        wire = encoder.encode(fields, huffman=huffman)
        theirs = [(name, value) for name, value in decoder.decode(wire, raw=True)]
        assert [(text(name), text(value)) for name, value, _ in ours.read(wire).fields] == theirs


@pytest.mark.slow
@examples(3)
@given(wires=st.lists(st.binary(max_size=60), max_size=5))
def test_no_block_breaks_the_reader(wires: list[bytes]) -> None:
    """Random bytes are read or refused, nothing else."""
    ours = HeaderBlockDecoder(1024, ObserverMemory(1 << 24))
    try:
        for wire in wires:
            for name, value, _ in ours.read(wire).fields:
                text(name)
                text(value)
    except FramingError:
        return


@given(wire=st.binary(max_size=200), size=st.integers(1, 40))
def test_what_is_refused_does_not_depend_on_the_pieces(wire: bytes, size: int) -> None:
    """Blind at once, byte by byte or in any other pieces."""
    benches = []
    for step in (size, len(wire) or 1):
        bench = Bench()
        observer = Http2Observer(bench.scope)
        observer.request(OPENING)
        for pos in range(0, len(wire), step):
            observer.request(wire[pos : pos + step])
        benches.append((observer.is_active, bench.slot.gauge(Gauge.BLIND), bench.slot.gauge(Gauge.IGNORED)))
    assert benches[0] == benches[1]
