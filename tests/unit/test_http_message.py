"""HTTP/1.1 messages, parsed from the bytes on the wire."""

import functools
import gzip
import zlib

import pytest

from quantdrift.core.records import Loss
from quantdrift.sidecar.protocols.errors import LostError
from quantdrift.sidecar.protocols.http_message import Head, parse_head, read_body

pytestmark = pytest.mark.unit

LIMIT = 1000
squeezed = functools.partial(gzip.compress, mtime=0)


def head(**headers: str) -> Head:
    """Return a head with these fields, `_` for `-`."""
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    return Head(start=("POST", "/", "HTTP/1.1"), headers=fields)


def raw_deflate(data: bytes) -> bytes:
    """Return `data` deflated without the zlib header."""
    deflater = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return deflater.compress(data) + deflater.flush()


def test_a_head_is_read_with_lower_case_names_and_joined_repeats() -> None:
    """Names are lower case, repeated fields are joined, the query is no part of the path."""
    found = parse_head(b"POST /v2/a?b=/c HTTP/1.1\r\nX-A: 1\r\nx-a:  2\t\r\nX-\xc3\xa9:\xe9\r\n\r\n")
    assert (found.method, found.path) == ("POST", "/v2/a")
    assert found.headers == {"x-a": "1, 2", "x-é": "é"}
    assert parse_head(b"HTTP/1.1 204\r\n\r\n").status == 204
    assert parse_head(b"HTTP/1.1 2x4 Odd\r\n\r\n").status == 0
    assert parse_head(b"POST http://h:1/v2/a?b HTTP/1.1\r\n\r\n").path == "/v2/a"


@pytest.mark.parametrize(
    "raw", [b"POST\r\n\r\n", b"GET / HTTP/1.1\r\nno colon\r\n\r\n", b"A B\r\n C: d\r\n\r\n"]
)
def test_what_is_no_head_is_lost_as_decode(raw: bytes) -> None:
    """A start line without parts, a line without a colon and a folded line are refused."""
    with pytest.raises(LostError) as caught:
        parse_head(raw)
    assert caught.value.loss is Loss.DECODE


@pytest.mark.parametrize(
    ("fields", "raw"),
    [
        (head(), b"hello"),
        (head(transfer_encoding="Chunked"), b"3;x=y\r\nhel\r\n2 \r\nlo\r\n0\r\nTrailer: 1\r\n\r\n"),
        (head(content_encoding="gzip"), squeezed(b"hello")),
        (head(content_encoding="x-gzip"), squeezed(b"he") + squeezed(b"llo")),
        (head(content_encoding="deflate"), zlib.compress(b"hello")),
        (head(content_encoding="deflate"), raw_deflate(b"hello")),
        (head(content_encoding="deflate, identity, gzip"), squeezed(zlib.compress(b"hello"))),
        (
            head(content_encoding="gzip,gzip,gzip, GZIP"),
            functools.reduce(lambda x, _: squeezed(x), range(4), b"hello"),
        ),
        (head(content_encoding="gzip"), squeezed(b"hello") + squeezed(b"") * 63),
    ],
    ids=lambda _: "case",
)
def test_codings_are_undone(fields: Head, raw: bytes) -> None:
    """Chunked framing, gzip with several members, and both spellings of deflate give the content."""
    assert read_body(fields, raw, LIMIT) == b"hello"


@pytest.mark.parametrize(
    ("fields", "raw"),
    [
        (head(transfer_encoding="chunked"), b"5\r\nhel"),
        (head(transfer_encoding="chunked"), b"-1\r\nx\r\n0\r\n\r\n"),
        (head(transfer_encoding="chunked"), b"1_0\r\n" + b"x" * 16 + b"\r\n0\r\n\r\n"),
        (head(transfer_encoding="chunked"), b"3\r\nhello\r\n0\r\n\r\n"),
        (head(transfer_encoding="chunked"), b"3\r\nhel\r\n"),
        (head(transfer_encoding="gzip, chunked"), b"0\r\n\r\n"),
        (head(content_encoding="br"), b"hello"),
        (head(content_encoding="gzip"), b"hello"),
        (head(content_encoding="gzip"), squeezed(b"hello")[:-9]),
        (head(content_encoding="deflate"), b"hello"),
        (
            head(content_encoding="gzip, gzip, gzip, gzip, gzip"),
            functools.reduce(lambda x, _: squeezed(x), range(5), b"x"),
        ),
        (head(content_encoding="gzip"), squeezed(b"") * 65),
    ],
    ids=lambda _: "case",
)
def test_a_body_that_is_not_what_its_head_says_is_lost_as_decode(fields: Head, raw: bytes) -> None:
    """Cut, malformed, unknown and too many codings are refused."""
    with pytest.raises(LostError) as caught:
        read_body(fields, raw, LIMIT)
    assert caught.value.loss is Loss.DECODE


@pytest.mark.parametrize(
    ("fields", "raw"),
    [
        (head(), b"x" * (LIMIT + 1)),
        (head(content_encoding="gzip"), squeezed(b"x" * (LIMIT + 1))),
        (head(content_encoding="gzip"), squeezed(b"x" * LIMIT) + squeezed(b"x")),
        (head(content_encoding="deflate"), raw_deflate(bytes(10_000_000))),
    ],
    ids=lambda _: "case",
)
def test_a_body_above_the_limit_is_lost_as_too_large(fields: Head, raw: bytes) -> None:
    """What a small compressed body expands to is bounded, over all its members."""
    with pytest.raises(LostError) as caught:
        read_body(fields, raw, LIMIT)
    assert caught.value.loss is Loss.TOO_LARGE
