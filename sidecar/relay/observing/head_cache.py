"""What the lines of a message's head mean for its length, remembered: clients and servers repeat themselves.

Mostly a head is that of the last request but for one value, or it is cut into lines and each is looked up; nothing is
parsed. What is kept is bounded in number and in length; values that may be credentials are not kept.
"""

import re
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from quantdrift.sidecar.relay.observing.errors import FramingError

# What a field says: the length of the body where it is >= 0, or one of these.
CHUNKED = -1
UPGRADE = -11
EXPECT = -12
WANTED = -13
NOTHING = -14

_FRAMING = frozenset({b"content-length", b"transfer-encoding", b"upgrade", b"expect"})
_SECRET = frozenset(
    b"api-key authorization cookie proxy-authorization set-cookie x-amz-security-token x-api-key x-auth-token "
    b"x-goog-api-key".split()
)
_DIGITS = re.compile(rb"[0-9]{1,18}")
# What a name is made of (RFC 9110, 5.6.2), and the space that may stand before a colon.
_OF_NAMES = b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyz \t"

_MOST = 1024  # lines of a kind
_LINE_BYTES = 256
_HEAD_BYTES = 1024
_MOST_TRIES = 16  # whoever has shown no habit by then has none

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class FieldCache:
    """What fields mean, shared by the connections of a relay worker.

    Parameters
    ----------
    wanted
        Names of fields, lower case, that somebody wants to see.

    Attributes
    ----------
    plain : set of bytes
        Fields that mean nothing here, as on the wire.
    meanings : dict
        What other fields mean.
    """

    __slots__ = ("_wanted", "meanings", "plain")

    def __init__(self, wanted: Iterable[bytes] = ()) -> None:
        self._wanted = frozenset(wanted)
        self.plain: set[bytes] = set()
        self.meanings: dict[bytes, int] = {}

    def learn(self, line: bytes) -> int:
        """Return what a field means that is not known yet.

        Raises
        ------
        FramingError
            It is none, or what it says of a length is doubtful.
        """
        if b"\n" in line or b"\r" in line:  # an end of a line to some parsers and not to others
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
        if len(line) <= _LINE_BYTES and name not in _SECRET:
            if meaning != NOTHING:
                remember(self.meanings, line, meaning)
            elif colon and b" " not in name:  # as in no start line, which must not be taken for a field
                if len(self.plain) >= _MOST:
                    self.plain.clear()
                self.plain.add(line)
        return meaning


class HeadCache(Generic[_Value]):
    """The habits of a worker's connections. Equal ones are one: thousands of connections need no more memory."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, bytes], tuple[bytes, bytes, _Value]] = {}

    def one(self, before: bytes, after: bytes, head: _Value) -> tuple[bytes, bytes, _Value]:
        """Return the habit that is equal to these three, which the first two tell."""
        found = self._known.get((before, after))
        if found is None:
            found = before, after, head
            remember(self._known, (before, after), found)
        return found


class CachedHead(Generic[_Value]):
    """How one side of a connection mostly begins its messages: byte for byte the same but for one field's value.

    Such a field is the id of a trace or of a request; it means nothing here.

    Parameters
    ----------
    habits
        Of all connections.
    """

    __slots__ = ("_after", "_before", "_habits", "_head", "_n_tries")

    def __init__(self, habits: HeadCache[_Value]) -> None:
        self._habits = habits
        self._before = self._after = b""
        self._head: _Value | None = None
        self._n_tries = 0

    def find(self, data: bytes, start: int, stop: int) -> _Value | None:
        """Return what the head `data[start:stop]`, its empty line included, says if it is the usual one."""
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

    def keep(self, text: bytes, line: bytes, head: _Value) -> None:
        """Take a head for the usual one.

        Parameters
        ----------
        text
            All of it, without its empty line.
        line
            The field of it, which means nothing, whose value may be another one the next time.
        head
            What it says.
        """
        self._n_tries += 1
        name, colon, _ = line.partition(b":")
        if not colon or len(text) > _HEAD_BYTES or self._n_tries > _MOST_TRIES:
            return
        at = text.find(b"\r\n" + line) + 2
        before, after = text[: at + len(name) + 1], text[at + len(line) :] + b"\r\n\r\n"
        self._before, self._after, self._head = self._habits.one(before, after, head)


def remember(memory: dict[_Key, _Value], key: _Key, value: _Value, most: int = _MOST) -> None:
    """Keep a value; a memory that is full forgets all others first."""
    if len(memory) >= most:
        memory.clear()
    memory[key] = value


def _check_name(name: bytes) -> None:
    if name.translate(None, _OF_NAMES):  # some parsers take a control character for a space
        raise FramingError("a header field's name is none")


def _framing(name: bytes, value: bytes) -> int:
    if name not in _FRAMING:
        raise FramingError("a header field has a space before its colon")
    if name == b"upgrade":
        return UPGRADE
    if name == b"expect":
        return EXPECT
    if name == b"content-length":
        if _DIGITS.fullmatch(value) is None:
            raise FramingError("Content-Length is no number")
        return int(value)
    if value.lower() != b"chunked":
        raise FramingError("a Transfer-Encoding that is not followed")
    return CHUNKED
