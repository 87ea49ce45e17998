"""Heads of HTTP messages: where the message ends."""

import contextlib
import time
from collections.abc import Callable

import pytest

from quantdrift.sidecar.relay.observing.head_cache import FieldCache
from quantdrift.sidecar.relay.observing.heads import (
    CHUNKED,
    UNTIL_CLOSE,
    FramingError,
    parse_request,
    parse_response,
)

pytestmark = pytest.mark.unit


def request(fields: bytes, line: bytes = b"POST /x HTTP/1.1") -> bytes:
    """Return a request head."""
    return line + b"\r\n" + fields + b"\r\n"


@pytest.mark.parametrize(
    ("fields", "body"),
    [
        (b"", 0),
        (b"Host: h\r\n", 0),
        (b"Content-Length: 12\r\n", 12),
        (b"content-LENGTH:12\r\n", 12),
        (b"Host: h\r\nContent-Length: \t 0012 \t\r\nA: b\r\n", 12),
        (b"Transfer-Encoding: chunked\r\n", CHUNKED),
        (b"transfer-encoding:Chunked\t\r\n", CHUNKED),
        (b"X-Content-Length: 5\r\n", 0),
        (b"X: y\r\nNot-Content-Length: 5\r\n", 0),
    ],
)
def test_a_request_says_how_long_its_body_is(fields: bytes, body: int) -> None:
    """Names and values are read without regard to case and surrounding space; other fields are passed over."""
    data = b"..." + request(fields) + b"..."
    head = parse_request(data, 3, len(data) - 3)
    assert (head.method, head.target, head.body) == (b"POST", b"/x", body)
    assert not head.upgrade
    assert not head.expect


@pytest.mark.parametrize(
    "fields",
    [
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Content-Length: 5\r\nContent-Length: 5\r\n",
        b"Content-Length: 5, 5\r\n",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
        b"Transfer-Encoding: gzip, chunked\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Content-Length: -1\r\n",
        b"Content-Length: +1\r\n",
        b"Content-Length: 1e3\r\n",
        b"Content-Length: 0x10\r\n",
        b"Content-Length:\r\n",
        b"Content-Length: 9999999999999999999999\r\n",
        b"Content-Length : 5\r\n",
        b"Content-Length\x0b: 5\r\n",
        b"Content-Length\x00: 5\r\n",
        b"\x0bTransfer-Encoding: chunked\r\n",
        b"Content-Length\xa0: 5\r\n",
        b"A: b\r\n Content-Length: 5\r\n",
        b"A: b\nContent-Length: 5\r\n",
        b"A: b\rContent-Length: 5\r\n",
    ],
)
def test_a_doubtful_length_is_refused(fields: bytes) -> None:
    """Whatever two parsers might read differently ends the observation, in requests and in responses."""
    head = request(fields)
    with pytest.raises(FramingError):
        parse_request(head, 0, len(head))
    head = b"HTTP/1.1 200 OK\r\n" + fields + b"\r\n"
    with pytest.raises(FramingError):
        parse_response(head, 0, len(head))


@pytest.mark.parametrize(
    "line",
    [
        b"PRI * HTTP/2.0",
        b"POST /x",
        b"POST  /x HTTP/1.1",
        b"POST /a b HTTP/1.1",
        b"POST /x HTTP/1.2",
        b" POST /x HTTP/1.1",
        b"\x16\x03\x01",
        b"",
    ],
)
def test_what_is_no_http_1_request_is_refused(line: bytes) -> None:
    """HTTP/2, HTTP/0.9, TLS and garbage are not followed."""
    head = request(b"", line)
    with pytest.raises(FramingError):
        parse_request(head, 0, len(head))


def test_transfer_encoding_of_http_1_0_is_refused() -> None:
    """HTTP/1.0 knows no chunks; who sends them all the same is not followed."""
    head = request(b"Transfer-Encoding: chunked\r\n", b"POST /x HTTP/1.0")
    with pytest.raises(FramingError):
        parse_request(head, 0, len(head))


@pytest.mark.parametrize(
    ("head", "upgrade", "expect"),
    [
        (b"GET /x HTTP/1.1\r\nConnection: Upgrade\r\nupgrade: websocket\r\n\r\n", True, False),
        (b"CONNECT h:443 HTTP/1.1\r\n\r\n", True, False),
        (b"POST /x HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n", False, True),
    ],
)
def test_requests_whose_answer_decides_are_known(head: bytes, *, upgrade: bool, expect: bool) -> None:
    """Upgrade, CONNECT and Expect are told."""
    parsed = parse_request(head, 0, len(head))
    assert (parsed.upgrade, parsed.expect) == (upgrade, expect)


@pytest.mark.parametrize(
    ("head", "status", "body"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", 200, UNTIL_CLOSE),
        (b"HTTP/1.0 200\r\n\r\n", 200, UNTIL_CLOSE),
        (b"HTTP/1.1 404 \r\nContent-Length: 0\r\n\r\n", 404, 0),
        (b"HTTP/1.1 200 Tr\xc3\xa8s bien\r\nTransfer-Encoding: chunked\r\n\r\n", 200, CHUNKED),
        (b"HTTP/1.1 503 No\r\nContent-Length: 7\r\n\r\n", 503, 7),
    ],
)
def test_a_response_says_its_status_and_length(head: bytes, status: int, body: int) -> None:
    """Without a length a response lasts until the connection ends."""
    parsed = parse_response(head, 0, len(head))
    assert (parsed.status, parsed.body) == (status, body)


@pytest.mark.parametrize(
    "line", [b"HTTP/1.1 099 No", b"HTTP/1.1 2000 OK", b"HTTP/2 200", b"ICY 200 OK", b"200 OK"]
)
def test_what_is_no_http_1_response_is_refused(line: bytes) -> None:
    """A status line has a version and three digits."""
    head = line + b"\r\n\r\n"
    with pytest.raises(FramingError):
        parse_response(head, 0, len(head))


@pytest.mark.parametrize(
    "filler", [b" ", b"\t", b"content-length", b"a:", b"A: b\r\n", b"\r\n ", b"\r\nw:", b"\r\nexpect:"]
)
def test_a_hostile_head_costs_linear_time(filler: bytes) -> None:
    """64 KiB of what an expression might backtrack over take no second of this thread; with their square they take many."""
    head = request(b"X: " + filler * (65_536 // len(filler)) + b"\r\n")
    lines = FieldCache([b"w"])
    began = time.thread_time()
    with contextlib.suppress(FramingError):
        parse_request(head, 0, len(head), lines)
    assert time.thread_time() - began < 1.0


@pytest.mark.parametrize("parse", [parse_request, parse_response])
@pytest.mark.parametrize(
    "head",
    [
        b"X-A: b\r\n\r\n",
        b"X-A: b\r\nHTTP/1.1 200 OK\r\n\r\n",
        b"X-A: b\r\nPOST /x HTTP/1.1\r\n\r\n",
        b"\r\n\r\n",
    ],
)
def test_a_field_in_the_place_of_the_start_line_is_refused(
    parse: Callable[[bytes, int, int, FieldCache], object], head: bytes
) -> None:
    """Also one that is known from earlier heads: neither an error of ours nor a line behind it makes it a head."""
    lines = FieldCache()
    for line in (b"POST /x HTTP/1.1", b"HTTP/1.1 200 OK"):
        known = line + b"\r\nX-A: b\r\n\r\n"
        (parse_request if line.startswith(b"POST") else parse_response)(known, 0, len(known), lines)
    with pytest.raises(FramingError):
        parse(head, 0, len(head), lines)
