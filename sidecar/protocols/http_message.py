"""Parser of complete HTTP/1.1 messages: it reads heads, and de-chunks and decompresses bodies within a limit.

The relay has found the boundaries of the messages already.
"""

import zlib
from collections.abc import Mapping

import msgspec

from quantdrift.core.records import Loss
from quantdrift.sidecar.protocols.cost import check
from quantdrift.sidecar.protocols.errors import LostError

_CHUNK_HEAD_BYTES = 4096  # a chunk's size line, extensions included
_GZIP = 16 + zlib.MAX_WBITS
# Each coding may expand to the limit again, and each gzip member copies the data after it: both cost time.
_MAX_CODINGS = 4
_MAX_MEMBERS = 64


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The start line and header fields of a message.

    Parameters
    ----------
    start
        The start line's parts: method, target and version, or version, status and reason.
    headers
        Lower-case names; values of repeated fields are joined with `, `.
    """

    start: tuple[str, str, str]
    headers: Mapping[str, str]

    @property
    def method(self) -> str:
        """The request's method."""
        return self.start[0]

    @property
    def path(self) -> str:
        """The request's path, still percent-encoded, without query and authority."""
        target = self.start[1].partition("?")[0]
        if target.startswith("/"):
            return target
        return "/" + target.partition("://")[2].partition("/")[2]

    @property
    def status(self) -> int:
        """The response's status code."""
        return int(self.start[1]) if self.start[1].isdecimal() else 0


def parse_head(raw: bytes) -> Head:
    """Parse a head that ends with its empty line.

    Raises
    ------
    LostError
        `decode`: it is malformed.
    """
    lines = raw.removesuffix(b"\r\n\r\n").split(b"\r\n")
    start = _text(lines[0]).split(" ", 2)
    if len(start) < 2:
        raise LostError(Loss.DECODE, "the start line has no parts")
    fields: dict[str, list[str]] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(b":")
        if not colon or not name or name[:1] in b" \t":
            raise LostError(Loss.DECODE, "a header line is malformed")
        fields.setdefault(_text(name).lower(), []).append(_text(value.strip(b" \t")))
    headers = {name: ", ".join(values) for name, values in fields.items()}
    return Head(start=(start[0], start[1], start[2] if len(start) > 2 else ""), headers=headers)


def read_body(head: Head, raw: bytes, limit_bytes: int) -> bytes:
    """Return the decoded body of a message.

    Parameters
    ----------
    head
        Its Transfer-Encoding (chunked) and Content-Encoding (gzip, deflate) are decoded.
    raw
        The bytes after the head, as on the wire.
    limit_bytes
        Longest decoded body, since a small compressed body may expand to a very long one.

    Raises
    ------
    LostError
        `decode`: the body does not fit the head, or the coding is unknown. `too_large`: above the limit.
    """
    codings = _codings(head, "transfer-encoding")
    if codings:
        if codings != ["chunked"]:
            raise LostError(Loss.DECODE, "an unknown transfer coding")
        raw = _dechunk(raw)
    encodings = _codings(head, "content-encoding")
    if len(encodings) > _MAX_CODINGS:
        raise LostError(Loss.DECODE, f"more than {_MAX_CODINGS} content codings")
    for coding in reversed(encodings):
        raw = expand(coding, raw, limit_bytes)
    if len(raw) > limit_bytes:
        raise LostError(Loss.TOO_LARGE, f"a body of {len(raw)} bytes")
    return raw


def _codings(head: Head, name: str) -> list[str]:
    parts = (part.strip().lower() for part in head.headers.get(name, "").split(","))
    return [part for part in parts if part not in ("", "identity")]


def _dechunk(raw: bytes) -> bytes:
    parts: list[bytes] = []
    position = 0
    while True:
        end = raw.find(b"\r\n", position, position + _CHUNK_HEAD_BYTES)
        digits = raw[position:end].partition(b";")[0].strip(b" \t") if end >= 0 else b""
        if not digits or digits.strip(b"0123456789abcdefABCDEF"):
            raise LostError(Loss.DECODE, "a chunk has no size")
        size = int(digits, 16)
        position = end + 2
        if size == 0:
            return b"".join(parts)  # trailers are not used
        chunk = raw[position : position + size]
        position += size + 2
        if len(chunk) != size or raw[position - 2 : position] != b"\r\n":
            raise LostError(Loss.DECODE, "a chunk is cut short")
        parts.append(chunk)


def expand(coding: str, raw: bytes, limit_bytes: int) -> bytes:
    """Decompress `raw`; errors as for a body.

    Parameters
    ----------
    coding
        `gzip` or `deflate`.
    raw
        The whole compressed body.
    limit_bytes
        Longest result.
    """
    if coding in ("gzip", "x-gzip"):
        windows = [_GZIP]
    elif coding == "deflate":
        windows = [zlib.MAX_WBITS, -zlib.MAX_WBITS]  # some send it without the zlib header
    else:
        raise LostError(Loss.DECODE, "an unknown content coding")
    for window in windows:
        try:
            return _inflate(raw, window, limit_bytes)
        except zlib.error as error:
            problem = error
    raise LostError(Loss.DECODE, f"the body is not {coding}") from problem


def _inflate(raw: bytes, window: int, limit_bytes: int) -> bytes:
    parts: list[bytes] = []
    bytes_left = limit_bytes
    while raw:  # gzip may hold several members
        if len(parts) == _MAX_MEMBERS:
            raise LostError(Loss.DECODE, f"a compressed body of more than {_MAX_MEMBERS} members")
        check()
        inflater = zlib.decompressobj(window)
        part = inflater.decompress(raw, bytes_left + 1)
        if len(part) > bytes_left:
            raise LostError(Loss.TOO_LARGE, f"the body expands to more than {limit_bytes} bytes")
        if not inflater.eof:
            raise LostError(Loss.DECODE, "the compressed body is cut short")
        parts.append(part)
        bytes_left -= len(part)
        raw = inflater.unused_data if window == _GZIP else b""
    return b"".join(parts)


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")
