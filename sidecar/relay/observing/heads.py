"""What the head of an HTTP/1.1 message says about where the message ends. Nothing else of it is read.

Whatever two parsers might understand differently is refused (RFC 9112, 6.3 and 11.2): to follow a connection wrongly
is worse than not to follow it.
"""

import re

import msgspec

from quantdrift.sidecar.relay.observing.errors import FramingError
from quantdrift.sidecar.relay.observing.head_cache import (
    CHUNKED,
    EXPECT,
    NOTHING,
    UPGRADE,
    WANTED,
    CachedHead,
    FieldCache,
)

__all__ = [
    "CHUNKED",
    "UNTIL_CLOSE",
    "FramingError",
    "RequestHead",
    "ResponseHead",
    "parse_request",
    "parse_response",
]

UNTIL_CLOSE = -2  # a body's length, as `CHUNKED` is

_REQUEST_LINE = re.compile(rb"([!-~]+) ([!-~\x80-\xff]+) HTTP/1\.([01])")
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?:[ ][^\r\n]*)?")


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
    wanted
        The lines of the fields that were asked for, in their order.
    """

    method: bytes
    target: bytes
    body: int
    upgrade: bool
    expect: bool
    wanted: tuple[bytes, ...] = ()


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


def parse_request(
    data: bytes,
    start: int,
    stop: int,
    lines: FieldCache | None = None,
    habit: CachedHead[RequestHead] | None = None,
) -> RequestHead:
    """Return the request head in `data[start:stop]`, which ends with its empty line.

    Parameters
    ----------
    data, start, stop
        Where it is.
    lines
        What was seen of heads so far.
    habit
        Of this client; the head may become it.

    Raises
    ------
    FramingError
        It is none of HTTP/1, or what it says of its length is doubtful.
    """
    text = data[start : stop - 4]
    first, length, others, wanted, varying = _fields(text, FieldCache() if lines is None else lines)
    line = _REQUEST_LINE.fullmatch(first)
    if line is None:
        raise FramingError("this is no HTTP/1 request")
    method, target, minor = line.groups()
    if length == CHUNKED and minor != b"1":
        raise FramingError("a Transfer-Encoding that is not followed")
    upgrade = method == b"CONNECT" or UPGRADE in others
    head = RequestHead(method, target, length or 0, upgrade, EXPECT in others, wanted)
    if habit is not None and varying:
        habit.keep(text, varying, head)
    return head


def parse_response(
    data: bytes,
    start: int,
    stop: int,
    lines: FieldCache | None = None,
    habit: CachedHead[ResponseHead] | None = None,
) -> ResponseHead:
    """Return the response head in `data[start:stop]`; parameters and errors as for a request."""
    text = data[start : stop - 4]
    first, length, _, _, varying = _fields(text, FieldCache() if lines is None else lines)
    line = _STATUS_LINE.fullmatch(first)
    if line is None:
        raise FramingError("this is no HTTP/1 response")
    minor, status = line.groups()
    if length == CHUNKED and minor != b"1":
        raise FramingError("a Transfer-Encoding that is not followed")
    head = ResponseHead(int(status), UNTIL_CLOSE if length is None else length)
    if habit is not None and varying:
        habit.keep(text, varying, head)
    return head


def _fields(text: bytes, lines: FieldCache) -> tuple[bytes, int | None, set[int], tuple[bytes, ...], bytes]:
    """Return what a head without its empty line tells.

    The start line; the body's length, or None where no field tells it; what else fields mean; the lines that are
    wanted; and the one field whose value may be another the next time, or nothing.
    """
    plain, meanings = lines.plain, lines.meanings
    told = text.split(b"\r\n")
    telling = [line for line in told if line not in plain]
    if told[0] in plain:
        raise FramingError("a head without a start line")
    length: int | None = None
    others: set[int] = set()
    wanted: list[bytes] = []  # a hostile head may repeat one field ten thousand times
    n_new, varying = 0, b""
    for line in telling[1:]:
        meaning = meanings.get(line)
        if meaning is None:
            meaning = lines.learn(line)
            n_new += 1
        if meaning >= CHUNKED:
            if length is not None:
                raise FramingError("the length of the body is told twice")
            length = meaning
        elif meaning == WANTED:
            wanted.append(line)
        elif meaning == NOTHING:
            varying = line
        else:
            others.add(meaning)
    if n_new == 0:
        varying = next((line for line in told[::-1] if line in plain), b"")
    elif n_new > 1:
        varying = b""
    return telling[0], length, others, tuple(wanted), varying
