"""What is counted of gRPC messages that have not arrived whole, however their bytes are cut."""

import struct
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantdrift.sidecar.intake.envoy_port import UnfinishedMessages
from quantdrift.sidecar.relay.http2.frames import PREFACE

pytestmark = pytest.mark.property

END, RST = 0x1, 3


def frame(kind: int, stream: int, content: bytes, flags: int = 0) -> bytes:
    """Return a frame of HTTP/2."""
    return struct.pack("!IBI", len(content) << 8 | kind, flags, stream) + content


def message(n_bytes: int) -> bytes:
    """Return a gRPC message of this length."""
    return b"\0" + n_bytes.to_bytes(4, "big") + bytes(n_bytes)


@given(seed=st.integers(0, 2**32))
def test_exactly_the_bytes_of_unfinished_messages_are_counted(seed: int) -> None:
    """Of several streams in turns, with frames and pieces of any length, and other frames in between."""
    random = Random(seed)
    left = {
        2 * number + 1: b"".join(message(random.randrange(40)) for _ in range(random.randint(1, 4)))
        for number in range(random.randint(1, 4))
    }
    ends = {stream: {0} for stream in left}
    for stream, content in left.items():
        end = 0
        while end < len(content):
            end += 5 + int.from_bytes(content[end + 1 : end + 5], "big")
            ends[stream].add(end)
    sent = dict.fromkeys(left, 0)
    messages = UnfinishedMessages()
    messages.feed(PREFACE + frame(4, 0, b""))
    while any(left.values()):
        stream = random.choice([stream for stream, rest in left.items() if rest])
        n_bytes = random.randint(0, len(left[stream]))
        piece, left[stream] = left[stream][:n_bytes], left[stream][n_bytes:]
        sent[stream] += n_bytes
        data = frame(0, stream, piece) + frame(8, stream, b"\0\0\0\1")
        while data:
            n_bytes = random.randint(1, 60)
            messages.feed(data[:n_bytes])
            data = data[n_bytes:]
        begun = sum(sent[one] - max(end for end in ends[one] if end <= sent[one]) for one in sent)
        assert messages.n_bytes == begun
    assert messages.n_bytes == 0, "all of them are whole in the end"


@pytest.mark.parametrize("end", [frame(0, 1, b"", END), frame(RST, 1, b"\0\0\0\0")])
def test_a_stream_that_ends_within_a_message_counts_no_more(end: bytes) -> None:
    """Whether its sender ends it or resets it."""
    messages = UnfinishedMessages()
    messages.feed(PREFACE + frame(0, 1, message(1000)[:600]) + frame(0, 3, message(50)[:20]))
    assert messages.n_bytes == 620
    messages.feed(end)
    assert messages.n_bytes == 20


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", PREFACE + frame(0, 1, b"\3abc", 0x8)])
def test_what_no_grpc_client_sends_ends_the_connection(data: bytes) -> None:
    """It could not be counted."""
    with pytest.raises(ValueError, match=r"HTTP/2|padded"):
        UnfinishedMessages().feed(data)
