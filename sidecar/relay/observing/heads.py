"""Heads of HTTP/1.1 messages, read only as far as needed to find where the message ends.

A head that two parsers might understand differently is refused (RFC 9112, 6.3 and 11.2): following a
connection wrongly is worse than not following it.
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

UNTIL_CLOSE = -2  # a length of a body, like `CHUNKED`

_REQUEST_LINE = re.compile(rb"([!-~]+) ([!-~\x80-\xff]+) HTTP/1\.([01])")
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?:[ ][^\r\n]*)?")


class RequestHead(msgspec.Struct, frozen=True, gc=False):
    """The start line of a request and the length of its body.

    Parameters
    ----------
    method, target
        As on the wire.
    body
        Bytes, or `CHUNKED`.
    upgrade
        Whether the protocol after the request depends on the response (`Upgrade`, CONNECT).
    expect
        Whether the client may leave out the body, depending on the response (`Expect`).
    wanted
        The lines of the fields that sampling needs, in their order.
    """

    method: bytes
    target: bytes
    body: int
    upgrade: bool
    expect: bool
    wanted: tuple[bytes, ...] = ()


class ResponseHead(msgspec.Struct, frozen=True, gc=False):
    """The status of a response and the length of the body that its fields announce.

    Parameters
    ----------
    status
        100 to 599.
    body
        Bytes, `CHUNKED` or `UNTIL_CLOSE`, before the status and the method of the request are considered.
    """

    status: int
    body: int


def parse_request(
    data: bytes,
    start: int,
    stop: int,
    field_cache: FieldCache | None = None,
    cached_head: CachedHead[RequestHead] | None = None,
) -> RequestHead:
    """Return the request head in `data[start:stop]`, which ends with its empty line.

    Parameters
    ----------
    data, start, stop
        The buffer and the position of the head in it.
    field_cache
        Header lines seen so far.
    cached_head
        The usual head of this client; the head may become it.

    Raises
    ------
    FramingError
        It is not an HTTP/1 head, or its statement of the length is ambiguous.
    """
    text = data[start : stop - 4]
    first, length, others, wanted, varying = _fields(
        text, FieldCache() if field_cache is None else field_cache
    )
    line = _REQUEST_LINE.fullmatch(first)
    if line is None:
        raise FramingError("not an HTTP/1 request")
    method, target, minor = line.groups()
    if length == CHUNKED and minor != b"1":
        raise FramingError("an unsupported Transfer-Encoding")
    upgrade = method == b"CONNECT" or UPGRADE in others
    head = RequestHead(method, target, length or 0, upgrade, EXPECT in others, wanted)
    if cached_head is not None and varying:
        cached_head.store(text, varying, head)
    return head


def parse_response(
    data: bytes,
    start: int,
    stop: int,
    field_cache: FieldCache | None = None,
    cached_head: CachedHead[ResponseHead] | None = None,
) -> ResponseHead:
    """Return the response head in `data[start:stop]`; parameters and errors as for a request."""
    text = data[start : stop - 4]
    first, length, _, _, varying = _fields(text, FieldCache() if field_cache is None else field_cache)
    line = _STATUS_LINE.fullmatch(first)
    if line is None:
        raise FramingError("not an HTTP/1 response")
    minor, status = line.groups()
    if length == CHUNKED and minor != b"1":
        raise FramingError("an unsupported Transfer-Encoding")
    head = ResponseHead(int(status), UNTIL_CLOSE if length is None else length)
    if cached_head is not None and varying:
        cached_head.store(text, varying, head)
    return head


def _fields(
    text: bytes, field_cache: FieldCache
) -> tuple[bytes, int | None, set[int], tuple[bytes, ...], bytes]:
    """Parse a head without its empty line.

    Returns the start line; the length of the body, or None if no field states it; the other meanings of
    fields; the lines that sampling needs; and the one field whose value may differ the next time, or an empty
    one.
    """
    plain, meanings = field_cache.plain, field_cache.meanings
    lines = text.split(b"\r\n")
    relevant = [line for line in lines if line not in plain]
    if lines[0] in plain:
        raise FramingError("a head without a start line")
    length: int | None = None
    others: set[int] = set()
    wanted: list[bytes] = []  # a hostile head may repeat one field ten thousand times
    n_new, varying = 0, b""
    for line in relevant[1:]:
        meaning = meanings.get(line)
        if meaning is None:
            meaning = field_cache.learn(line)
            n_new += 1
        if meaning >= CHUNKED:
            if length is not None:
                raise FramingError("two header fields state the length of the body")
            length = meaning
        elif meaning == WANTED:
            wanted.append(line)
        elif meaning == NOTHING:
            varying = line
        else:
            others.add(meaning)
    if n_new == 0:
        varying = next((line for line in lines[::-1] if line in plain), b"")
    elif n_new > 1:
        varying = b""
    return relevant[0], length, others, tuple(wanted), varying
