"""Server-sent events, by the standard's own rules."""

import itertools

import pytest

from quantdrift.core.records import Loss
from quantdrift.sidecar.protocols import openai
from quantdrift.sidecar.protocols.openai import ServerSentEvent, read_events
from tests.support.sidecar.decode import lost

pytestmark = pytest.mark.unit

STREAM = (
    b": a comment\n\n"
    b"data: one\n\n"
    b"event: tick\ndata:two\ndata:  lines\nid: 7\nretry: 3\nunknown\n\n"
    b"event: nothing\n\n"
    b"data\n\n"
    b": cut"
)
EVENTS = [
    ServerSentEvent(kind=b"", data=b"one"),
    ServerSentEvent(kind=b"tick", data=b"two\n lines"),
    ServerSentEvent(kind=b"", data=b""),
]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_events_are_read_whatever_ends_their_lines(end: bytes, mark: bytes) -> None:
    """Comments, ids and unknown fields say nothing; data of several lines is one."""
    assert list(read_events(mark + STREAM.replace(b"\n", end), b"end")) == EVENTS


@pytest.mark.parametrize("tail", [b"", b"\n", b"\n\n", b"\n\ndata: more\n\n"])
def test_the_last_event_needs_no_empty_line(tail: bytes) -> None:
    """Only that one: any other may have been cut in its middle."""
    found = list(read_events(b"data: 1\n\ndata: end" + tail, b"end"))
    assert [event.data for event in found][:2] == [b"1", b"end"]


@pytest.mark.parametrize("tail", [b"data: more", b"data: more\n", b"da", b"data: en"])
def test_a_stream_that_ends_within_an_event_is_truncated(tail: bytes) -> None:
    """What came of it is not taken for all of it."""
    assert lost(lambda: list(read_events(b"data: 1\n\n" + tail, b"end"))) is Loss.TRUNCATED


def test_events_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above a bound, of events or of lines, the stream is too large."""
    monkeypatch.setattr(openai, "_MAX_EVENTS", 3)
    body = b"data: x\n\n" * 4
    assert len(list(itertools.islice(read_events(body, b""), 3))) == 3
    assert lost(lambda: list(read_events(body, b""))) is Loss.TOO_LARGE
    monkeypatch.setattr(openai, "_MAX_LINES", 3)
    assert lost(lambda: list(read_events(b"\r\n" * 4, b""))) is Loss.TOO_LARGE
