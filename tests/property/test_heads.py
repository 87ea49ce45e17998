"""Whatever was remembered of earlier heads: a head says what it says by itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantdrift.sidecar.relay.observing.head_cache import CachedHead, FieldCache, HeadCache
from quantdrift.sidecar.relay.observing.heads import (
    FramingError,
    RequestHead,
    ResponseHead,
    parse_request,
    parse_response,
)
from tests.support.examples import examples

pytestmark = pytest.mark.property

WANTED = (b"x-scanner",)
LINES = st.one_of(
    st.sampled_from(
        [
            b"Host: h",
            b"Accept: */*",
            b"Authorization: Bearer t",
            b"X-Scanner: mobile",
            b"x-scanner: office",
            b"Content-Length: 12",
            b"content-length:012",
            b"Content-Length : 12",
            b"Transfer-Encoding: chunked",
            b"Transfer-Encoding: gzip",
            b"Upgrade: h2c",
            b"Expect: 100-continue",
            b" folded: yes",
            b"no colon",
            b"POST /x HTTP/1.1",
            b"HTTP/1.1 200 OK",
            b"a\nContent-Length: 5",
            b"a: b\rContent-Length: 5",
        ]
    ),
    st.integers(0, 99).map(lambda length: b"Content-Length: %d" % length),
)
# A trace's id, and what somebody may put in its place.
VALUES = st.sampled_from(
    [b"1", b"22", b"1\r", b"1\n", b"\r\n 1", b"", b"1\r\nX-Scanner: archive", b"1\r\nContent-Length: 7"]
)
REQUEST_LINES = st.sampled_from(
    [
        b"POST /x HTTP/1.1",
        b"POST /y HTTP/1.1",
        b"CONNECT h:1 HTTP/1.1",
        b"POST /x HTTP/1.0",
        b"PRI * HTTP/2.0",
    ]
)
STATUS_LINES = st.sampled_from([b"HTTP/1.1 200 OK", b"HTTP/1.1 204 No", b"HTTP/1.0 200 OK", b"ICY 200"])


def heads(first: st.SearchStrategy[bytes]) -> st.SearchStrategy[list[bytes]]:
    """Return heads of one connection: a few kinds, each again and again but for one value."""
    kind = st.tuples(first, st.lists(LINES, max_size=3), st.lists(LINES, max_size=3))
    return st.lists(kind, min_size=1, max_size=2).flatmap(
        lambda kinds: st.lists(st.builds(written, st.sampled_from(kinds), VALUES), min_size=1, max_size=12)
    )


def written(kind: tuple[bytes, list[bytes], list[bytes]], value: bytes) -> bytes:
    """Return a head of some kind, with this value."""
    first, before, after = kind
    return b"\r\n".join((first, *before, b"traceparent: " + value, *after)) + b"\r\n\r\n"


def said_of_request(data: bytes, lines: FieldCache, habit: CachedHead[RequestHead]) -> RequestHead | None:
    """Return what an observer learns of a request, or None where it lets go."""
    start, stop = 3, len(data) + 3
    data = b"..." + data + b"..."
    try:
        return habit.find(data, start, stop) or parse_request(data, start, stop, lines, habit)
    except FramingError:
        return None


def said_of_response(data: bytes, lines: FieldCache, habit: CachedHead[ResponseHead]) -> ResponseHead | None:
    """Return the same of a response."""
    try:
        return habit.find(data, 0, len(data)) or parse_response(data, 0, len(data), lines, habit)
    except FramingError:
        return None


@pytest.mark.slow
@examples(3)
@given(heads(REQUEST_LINES))
def test_what_was_remembered_changes_no_request(connection: list[bytes]) -> None:
    """Known lines, and a habit, tell the same of a head as reading it for the first time does."""
    lines, habit = FieldCache(WANTED), CachedHead[RequestHead](HeadCache())
    for head in connection:
        fresh = said_of_request(head, FieldCache(WANTED), CachedHead(HeadCache()))
        assert said_of_request(head, lines, habit) == fresh


@pytest.mark.slow
@examples(2)
@given(heads(STATUS_LINES))
def test_what_was_remembered_changes_no_response(connection: list[bytes]) -> None:
    """The same of responses."""
    lines, habit = FieldCache(WANTED), CachedHead[ResponseHead](HeadCache())
    for head in connection:
        fresh = said_of_response(head, FieldCache(WANTED), CachedHead(HeadCache()))
        assert said_of_response(head, lines, habit) == fresh
