"""HTTP/1.1 heads for exchanges that have none of their own, because the capture process reads only this form.

An HTTP/2 stream, a pair of CloudEvents, an Envoy stream and a call in a Python server each become a request
and a response of this form before the hand-off.
"""

import re
from collections.abc import Iterable

_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_NO_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")  # a line end in a value would begin another field
_NO_TARGET = re.compile(rb"[^!-~\x80-\xff]")

Fields = Iterable[tuple[bytes, bytes]]


def request_head(method: bytes, target: bytes, fields: Fields, version: bytes = b"HTTP/1.1") -> bytes:
    """Return the head of a request, its empty line included.

    Parameters
    ----------
    method, target
        Method and target of the start line; characters that a start line cannot contain are removed.
    fields
        Header names and values. A field with an invalid name is left out; control characters in values become
        spaces.
    version
        HTTP version in the start line.
    """
    start = b" ".join((_NO_TARGET.sub(b"", method), _NO_TARGET.sub(b"", target), version))
    return _head(start, fields)


def response_head(status: int, fields: Fields, version: bytes = b"HTTP/1.1") -> bytes:
    """Return the head of a response; parameters as for a request."""
    return _head(b"%b %d " % (version, status), fields)


def field_lines(fields: Fields) -> bytes:
    """Return the lines of header fields, each with its CR LF; parameter as for a request."""
    return b"".join(
        b"%b: %b\r\n" % (name, _NO_VALUE.sub(b" ", value)) for name, value in fields if _NAME.fullmatch(name)
    )


def _head(start: bytes, fields: Fields) -> bytes:
    return b"%b\r\n%b\r\n" % (start, field_lines(fields))
