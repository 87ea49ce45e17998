"""What the head of an HTTP/1.1 message says about where the message ends. Nothing else of it is read.

Whatever two parsers might understand differently is refused (RFC 9112, 6.3 and 11.2): to follow a connection wrongly
is worse than not to follow it.
"""

import re

import msgspec

from quantdrift.core.errors import QuantdriftError

# Lengths of bodies that are no number.
CHUNKED = -1
UNTIL_CLOSE = -2

_REQUEST_LINE = re.compile(rb"([!-~]+) ([!-~\x80-\xff]+) HTTP/1\.([01])(?=\r\n)")
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?:[ ][^\r\n]*)?(?=\r\n)")
# The last alternative is a folded line. No part of it can backtrack: a hostile head costs linear time.
_FIELD = re.compile(
    rb"\r\n(?:(content-length|transfer-encoding|upgrade|expect)([ \t]*):([^\r\n]*)|[ \t])", re.IGNORECASE
)
_DIGITS = re.compile(rb"[0-9]{1,18}")


class FramingError(QuantdriftError):
    """The bytes of a connection can no longer be told apart into messages with certainty."""


class RequestHead(msgspec.Struct, frozen=True, gc=False):
    """A request's start line, and how long its body is.

    Parameters
    ----------
    method, target
        As on the wire.
    body
        Bytes, or `CHUNKED`.
    upgrade
        Whether what follows the request depends on the answer (`Upgrade`, CONNECT).
    expect
        Whether the body may be left out, depending on the answer.
    """

    method: bytes
    target: bytes
    body: int
    upgrade: bool
    expect: bool


class ResponseHead(msgspec.Struct, frozen=True, gc=False):
    """A response's status, and how long the body is that its fields announce.

    Parameters
    ----------
    status
        100 to 599.
    body
        Bytes, `CHUNKED` or `UNTIL_CLOSE`; not yet in the light of the status and of the request's method.
    """

    status: int
    body: int


def parse_request(data: bytes, start: int, stop: int) -> RequestHead:
    """Return the request head in `data[start:stop]`, which ends with its empty line.

    Raises
    ------
    FramingError
        It is none of HTTP/1, or what it says of its length is doubtful.
    """
    line = _REQUEST_LINE.match(data, start, stop)
    if line is None:
        raise FramingError("this is no HTTP/1 request")
    method, target, minor = line.groups()
    length, upgrade, expect = _fields(data, line.end(), stop, minor)
    return RequestHead(method, target, length or 0, upgrade or method == b"CONNECT", expect)


def parse_response(data: bytes, start: int, stop: int) -> ResponseHead:
    """Return the response head in `data[start:stop]`, which ends with its empty line.

    Raises
    ------
    FramingError
        It is none of HTTP/1, or what it says of its length is doubtful.
    """
    line = _STATUS_LINE.match(data, start, stop)
    if line is None:
        raise FramingError("this is no HTTP/1 response")
    minor, status = line.groups()
    length, _, _ = _fields(data, line.end(), stop, minor)
    return ResponseHead(int(status), UNTIL_CLOSE if length is None else length)


def _fields(data: bytes, start: int, stop: int, minor: bytes) -> tuple[int | None, bool, bool]:
    """Return the body's length (None where no field tells it), and whether there is an Upgrade, an Expect."""
    # A lone CR or LF is a line's end to some parsers and not to others.
    n_lines = data.count(b"\r\n", start, stop)
    if n_lines != data.count(b"\n", start, stop) or n_lines != data.count(b"\r", start, stop):
        raise FramingError("a line does not end in CR LF")
    length: int | None = None
    upgrade = expect = False
    for match in _FIELD.finditer(data, start, stop - 2):
        name, space, value = match.groups()
        if name is None or space:
            raise FramingError("a header field is folded, or has a space before its colon")
        name = name.lower()
        if name == b"upgrade":
            upgrade = True
        elif name == b"expect":
            expect = True
        elif length is not None:
            raise FramingError("the length of the body is told twice")
        elif name == b"content-length":
            digits = value.strip(b" \t")
            if _DIGITS.fullmatch(digits) is None:
                raise FramingError("Content-Length is no number")
            length = int(digits)
        elif minor == b"1" and value.strip(b" \t").lower() == b"chunked":
            length = CHUNKED
        else:
            raise FramingError("a Transfer-Encoding that is not followed")
    return length, upgrade, expect
