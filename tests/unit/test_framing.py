"""The delimiter of one direction."""

import pytest

from quantdrift.sidecar.relay.http1.framing import TUNNEL, MessageFramer
from quantdrift.sidecar.relay.observing.heads import CHUNKED, UNTIL_CLOSE, FramingError
from quantdrift.sidecar.relay.observing.memory import ObserverMemory

pytestmark = pytest.mark.unit

LIMIT = 64


class Log:
    """Follows one direction: heads say the length of their body in words of their own."""

    def __init__(self, *bodies: int) -> None:
        self.bodies = list(bodies)
        self.messages: list[bytes] = []
        self.now = b""
        self.delimiter = MessageFramer(self.on_head, self.on_piece, self.on_end, LIMIT, ObserverMemory(1000))

    def feed(self, stream: bytes, step: int) -> None:
        """Feed `stream` in pieces of `step` bytes."""
        for pos in range(0, len(stream), step):
            self.delimiter.feed(stream[pos : pos + step])

    def on_head(self, data: bytes, start: int, stop: int) -> int:
        """Begin a message."""
        self.now = data[start:stop]
        self.delimiter.keep = True
        return self.bodies.pop(0)

    def on_piece(self, data: bytes, start: int, stop: int) -> None:
        """Add to it."""
        self.now += data[start:stop]

    def on_end(self) -> None:
        """End it."""
        self.messages.append(self.now)


HEAD = b"A\r\nb: c\r\n\r\n"
CHUNKS = b"3;x=y\r\nabc\r\n0a\r\n0123456789\r\n0\r\nT: u\r\n\r\n"


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_messages_are_separated_however_they_are_cut(step: int) -> None:
    """Empty, counted and chunked bodies, one after the other, in pieces of any size."""
    wire = [HEAD, HEAD + b"12345", HEAD + CHUNKS, HEAD]
    log = Log(0, 5, CHUNKED, 0)
    log.feed(b"".join(wire), step)
    assert log.messages == wire
    assert log.delimiter.is_between_messages


def test_a_body_may_last_until_the_end() -> None:
    """Only the end of the direction completes it."""
    log = Log(UNTIL_CLOSE)
    log.delimiter.feed(HEAD + b"some")
    log.delimiter.feed(b"thing")
    assert log.messages == []
    log.delimiter.eof()
    assert log.messages == [HEAD + b"something"]


def test_an_end_in_the_middle_completes_nothing() -> None:
    """A counted body that is cut short is no message."""
    log = Log(5)
    log.delimiter.feed(HEAD + b"1234")
    log.delimiter.eof()
    assert log.messages == []
    assert not log.delimiter.is_between_messages


@pytest.mark.parametrize("step", [1, 100])
def test_empty_lines_before_a_head_are_passed_over(step: int) -> None:
    """Some clients send one after a body; it belongs to no message."""
    log = Log(0, 0)
    log.feed(HEAD + b"\r\n\r\n" + HEAD, step)
    assert log.messages == [HEAD, HEAD]


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize(
    "stream",
    [
        b"\rX: y",
        b"\x16\x03\x01\x02\x00",
        b"A" * (LIMIT + 1),
        b"A" * (LIMIT - 3) + b"\r\n\r\n",
        HEAD + b"x\r\n",
        HEAD + b"-1\r\n",
        HEAD + b"\r\n",
        HEAD + b"3\nabc\r\n",
        HEAD + b"3\r\nabcd\r\n",
        HEAD + b"3\r\nabc\n",
        HEAD + b"3\r\r\nabc",
        HEAD + b"1" * 16 + b"\r\n",
        HEAD + b"0" * (LIMIT + 1),
        HEAD + b"0\r\n" + b"T: uuuuuuuuuu\r\n" * 5,
    ],
)
def test_what_cannot_be_followed_is_refused(stream: bytes, step: int) -> None:
    """Heads and lines beyond the bound, lone line ends and chunks without a length lose the framing."""
    log = Log(CHUNKED, CHUNKED)
    with pytest.raises(FramingError):
        log.feed(stream, step)


def test_a_head_as_long_as_the_bound_is_followed() -> None:
    """The bound is inclusive."""
    log = Log(0)
    log.delimiter.feed(b"A" * (LIMIT - 4) + b"\r\n\r\n")
    assert len(log.messages) == 1


def test_a_body_costs_nothing_per_byte() -> None:
    """Of a body that nobody asked for no part is looked at."""
    log = Log(10**15)
    log.delimiter.feed(HEAD)
    log.delimiter.keep = False
    log.delimiter.feed(b"x" * 1000)
    assert log.now == HEAD
    assert not log.delimiter.is_between_messages


def test_a_tunnel_is_followed_no_more() -> None:
    """Whatever comes after a change of protocol is passed over."""
    log = Log(TUNNEL)
    log.delimiter.feed(HEAD + b"\x00\x01")
    log.delimiter.feed(b"\x00" * 1000)
    assert log.messages == []


def test_delayed_bytes_are_processed_in_order() -> None:
    """Bytes that came while their meaning was open are read once it is known."""
    log = Log(0, 3, 0)
    delimiter = log.delimiter
    delimiter.pause()
    delimiter.feed(HEAD)
    delimiter.feed(HEAD + b"ab")
    assert log.messages == []
    delimiter.resume()
    assert log.messages == [HEAD]
    delimiter.feed(b"c" + HEAD)
    assert log.messages == [HEAD, HEAD + b"abc", HEAD]


def test_delayed_bytes_are_limited() -> None:
    """A client that goes on without waiting for the answer is not followed."""
    log = Log()
    log.delimiter.pause()
    with pytest.raises(FramingError):
        log.delimiter.feed(b"x" * (LIMIT + 1))
