"""Caches of parsed message heads: clients and servers repeat themselves.

Mostly a head differs from the last one in a single value, or each of its lines has been seen before; then
nothing is parsed. The caches are bounded in number and length of entries. Values that may be credentials are
not kept.
"""

import re
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from quantdrift.sidecar.relay.observing.errors import FramingError

# The meaning of a header field: the length of the body if it is >= 0, or one of these.
CHUNKED = -1
UPGRADE = -11
EXPECT = -12
WANTED = -13
NOTHING = -14

_FRAMING = frozenset({b"content-length", b"transfer-encoding", b"upgrade", b"expect"})
_CREDENTIALS = frozenset(
    b"api-key authorization cookie proxy-authorization set-cookie x-amz-security-token x-api-key x-auth-token "
    b"x-goog-api-key".split()
)
_DIGITS = re.compile(rb"[0-9]{1,18}")
# The characters of a field name (RFC 9110, 5.6.2), and the white space that may precede the colon.
_NAME_CHARACTERS = b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyz \t"

_MAX_LINES = 1024  # lines in each cache
_LINE_BYTES = 256
_HEAD_BYTES = 1024
_MAX_TRIES = 16  # a peer whose heads keep changing is not cached after so many attempts

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class FieldCache:
    """The meanings of header fields, shared by the connections of a relay worker.

    Parameters
    ----------
    wanted
        Lower-case names of the fields that sampling needs.

    Attributes
    ----------
    plain : set of bytes
        Whole lines without a meaning for framing or sampling, as on the wire.
    meanings : dict
        The meaning of each other line.
    """

    __slots__ = ("_wanted", "meanings", "plain")

    def __init__(self, wanted: Iterable[bytes] = ()) -> None:
        self._wanted = frozenset(wanted)
        self.plain: set[bytes] = set()
        self.meanings: dict[bytes, int] = {}

    def learn(self, line: bytes) -> int:
        """Return the meaning of a line that is not in the cache, and add it.

        Raises
        ------
        FramingError
            The line is not a header field, or its statement of a length is ambiguous.
        """
        if b"\n" in line or b"\r" in line:  # some parsers take it for the end of a line, others do not
            raise FramingError("a line does not end in CR LF")
        if line.startswith((b" ", b"\t")):
            raise FramingError("a header field is folded")
        name, colon, value = line.partition(b":")
        name = name.lower()
        meaning = NOTHING
        if colon:
            _check_name(name)
            if name.rstrip(b" \t") in _FRAMING:
                meaning = _framing(name, value.strip(b" \t"))
            elif name in self._wanted:
                meaning = WANTED
        if len(line) <= _LINE_BYTES and name not in _CREDENTIALS:
            if meaning != NOTHING:
                remember(self.meanings, line, meaning)
            elif colon and b" " not in name:  # unlike a start line, which must not be taken for a field
                if len(self.plain) >= _MAX_LINES:
                    self.plain.clear()
                self.plain.add(line)
        return meaning


class HeadCache(Generic[_Value]):
    """The cached heads of a worker. Connections with equal heads share one entry, which saves memory."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, bytes], tuple[bytes, bytes, _Value]] = {}

    def shared(self, before: bytes, after: bytes, head: _Value) -> tuple[bytes, bytes, _Value]:
        """Return the shared entry for these three; `before` and `after` determine `head`."""
        entry = self._known.get((before, after))
        if entry is None:
            entry = before, after, head
            remember(self._known, (before, after), entry)
        return entry


class CachedHead(Generic[_Value]):
    """The usual head of one direction of a connection, which only differs in the value of one field.

    Such a field is the id of a trace or of a request; it has no meaning for framing or sampling.

    Parameters
    ----------
    cache
        Shared by all connections of the worker.
    """

    __slots__ = ("_after", "_before", "_cache", "_head", "_n_tries")

    def __init__(self, cache: HeadCache[_Value]) -> None:
        self._cache = cache
        self._before = self._after = b""
        self._head: _Value | None = None
        self._n_tries = 0

    def find(self, data: bytes, start: int, stop: int) -> _Value | None:
        """Return the parsed head of `data[start:stop]`, with its empty line, if it is the usual one, else None."""
        begin, end = start + len(self._before), stop - len(self._after)
        if (
            begin <= end
            and data.startswith(self._before, start)
            and data.startswith(self._after, end)
            and data.find(b"\n", begin, end) < 0
            and data.find(b"\r", begin, end) < 0
        ):
            return self._head
        return None

    def store(self, text: bytes, line: bytes, head: _Value) -> None:
        """Make a head the usual one.

        Parameters
        ----------
        text
            The whole head, without its empty line.
        line
            The field in it whose value may differ the next time; it has no meaning for framing or sampling.
        head
            The parsed head.
        """
        self._n_tries += 1
        name, colon, _ = line.partition(b":")
        if not colon or len(text) > _HEAD_BYTES or self._n_tries > _MAX_TRIES:
            return
        at = text.find(b"\r\n" + line) + 2
        before, after = text[: at + len(name) + 1], text[at + len(line) :] + b"\r\n\r\n"
        self._before, self._after, self._head = self._cache.shared(before, after, head)


def remember(memory: dict[_Key, _Value], key: _Key, value: _Value, max_entries: int = _MAX_LINES) -> None:
    """Store a value; a full cache is emptied first."""
    if len(memory) >= max_entries:
        memory.clear()
    memory[key] = value


def _check_name(name: bytes) -> None:
    if name.translate(None, _NAME_CHARACTERS):  # some parsers take a control character for a space
        raise FramingError("the name of a header field has invalid characters")


def _framing(name: bytes, value: bytes) -> int:
    if name not in _FRAMING:
        raise FramingError("a header field has a space before its colon")
    if name == b"upgrade":
        return UPGRADE
    if name == b"expect":
        return EXPECT
    if name == b"content-length":
        if _DIGITS.fullmatch(value) is None:
            raise FramingError("Content-Length is not a number")
        return int(value)
    if value.lower() != b"chunked":
        raise FramingError("an unsupported Transfer-Encoding")
    return CHUNKED
