"""Decoder of the header blocks (HPACK, RFC 7541) of one direction of an HTTP/2 connection.

Every block must be read, sampled or not, or the state of the table is lost. Reading takes only the prefixes
of the representations: Huffman-coded text stays coded until it is needed, and a block that was read before in
the same state is looked up. In gRPC that is nearly every block after the first one.

The dynamic table is a superset of the sender's: the decoded length of an entry is unknown, so entries are
evicted by their least possible length. Indices count from the newest entry, so an entry that stays too long
is never referred to.
"""

from collections import deque
from functools import lru_cache

from hpack.exceptions import HPACKDecodingError
from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable

from quantdrift.sidecar.relay.observing.heads import FramingError
from quantdrift.sidecar.relay.observing.memory import MemoryShare, ObserverMemory

Text = bytes | tuple[bytes]
"""Plain, or in a tuple if Huffman-coded."""
Field = tuple[Text, Text, int]
"""Name, value, and the number of their bytes in the coding that they have."""

_STATIC: tuple[Field, ...] = tuple(
    (name, value, len(name) + len(value)) for name, value in HeaderTable.STATIC_TABLE
)
_N_STATIC = len(_STATIC)
_ENTRY_BYTES = 32  # the overhead of an entry (RFC 7541, 4.1)
_TABLE_BYTES = 4096  # initial size of a table
_MAX_TABLE_BYTES = 64 * 1024
_MAX_INTEGER_BYTES = 4  # after the prefix; no length or index needs more
_LONGEST_CODE_BITS = 30
_MEMO_BLOCKS = 32
_MEMO_BYTES = 512  # longest block that is cached
_FIELD_BYTES = 250  # memory of a stored field in addition to its text
_CACHED_BYTES = 128  # longest coded text whose decoding is cached


class HeaderBlock:
    """One header block.

    Attributes
    ----------
    fields : list of Field
        In their order, pseudo-header fields first.
    digest : object
        For the reader to store what it derives from a block, which may be returned again; None at first.
    """

    __slots__ = ("digest", "fields")

    def __init__(self, fields: list[Field]) -> None:
        self.fields = fields
        self.digest: object = None


class HeaderBlockDecoder:
    """Reads the header blocks of one direction.

    Parameters
    ----------
    max_bytes
        Longest block, encoded and decoded.
    memory
        Shared bound on tables and cached blocks.
    """

    __slots__ = (
        "_max_bytes",
        "_max_table_bytes",
        "_memo",
        "_memo_bytes",
        "_n_changes",
        "_share",
        "_table",
        "_table_bytes",
    )

    def __init__(self, max_bytes: int, memory: ObserverMemory) -> None:
        self._share = MemoryShare(memory)
        self._max_bytes = max_bytes
        self._table: deque[Field] = deque()  # newest first
        self._table_bytes = 0
        self._max_table_bytes = _TABLE_BYTES
        self._n_changes = 0
        self._memo: dict[bytes, HeaderBlock] = {}
        self._memo_bytes = 0

    def forget(self) -> None:
        """Discard everything; no more blocks may be read."""
        self._table.clear()
        self._memo.clear()
        self._share.resize(0)

    def read(self, data: bytes) -> HeaderBlock:
        """Return the next block of the direction.

        Raises
        ------
        FramingError
            It is malformed or too long: the state is lost, and no more blocks may be read.
        """
        memoized = self._memo.get(data)
        if memoized is not None:
            return memoized
        before = self._n_changes
        try:
            block = HeaderBlock(self._fields(data))
        except IndexError as error:
            raise FramingError("a header block is cut short, or refers to a missing table entry") from error
        if self._n_changes != before:
            self._clear_memo()  # the same bytes have another meaning in the new state
        elif len(data) <= _MEMO_BYTES:
            if len(self._memo) >= _MEMO_BLOCKS:
                self._clear_memo()
            self._memo[data] = block
            self._memo_bytes += len(data) + _FIELD_BYTES * len(block.fields)
        self._share.resize(_FIELD_BYTES * len(self._table) + self._table_bytes + self._memo_bytes)
        return block

    def _clear_memo(self) -> None:
        self._memo.clear()
        self._memo_bytes = 0

    def _fields(self, data: bytes) -> list[Field]:
        fields: list[Field] = []
        total = 0
        pos, size = 0, len(data)
        while pos < size:
            first = data[pos]
            pos += 1
            if first >= 0x80:
                index = first & 0x7F
                if index == 0x7F:
                    index, pos = _integer(data, pos, index)
                field = self._field(index)
            elif 0x20 <= first < 0x40:
                if fields:
                    raise FramingError("a header table changes its size in the middle of a block")
                pos = self._resize(data, pos, first & 0x1F)
                continue
            else:
                field, pos = self._literal(data, pos, first)
            fields.append(field)
            # Servers count like this (RFC 9113, 6.5.2), so that the number of empty fields is bounded, too.
            total += field[2] + _ENTRY_BYTES
            if total > self._max_bytes:
                raise FramingError(f"a head is longer than {self._max_bytes} bytes")
        return fields

    def _field(self, index: int) -> Field:
        if index > _N_STATIC:
            return self._table[index - _N_STATIC - 1]
        if index == 0:
            raise FramingError("a header field without an index")
        return _STATIC[index - 1]

    def _literal(self, data: bytes, pos: int, first: int) -> tuple[Field, int]:
        is_kept = first >= 0x40
        prefix = 0x3F if is_kept else 0x0F
        index = first & prefix
        name: Text
        if index == 0:
            name, pos = _string(data, pos)
        else:
            if index == prefix:
                index, pos = _integer(data, pos, index)
            name = self._field(index)[0]
        value, pos = _string(data, pos)
        field = name, value, _length(name) + _length(value)
        if is_kept:
            self._insert(field)
        return field, pos

    def _insert(self, field: Field) -> None:
        self._n_changes += 1
        self._table.appendleft(field)
        self._table_bytes += _least_bytes(field)
        if self._table_bytes > self._max_table_bytes:
            self._evict()

    def _resize(self, data: bytes, pos: int, n_bytes: int) -> int:
        if n_bytes == 0x1F:
            n_bytes, pos = _integer(data, pos, n_bytes)
        if n_bytes > _MAX_TABLE_BYTES:
            raise FramingError("a header table is too large")
        self._n_changes += 1
        self._max_table_bytes = n_bytes
        self._evict()
        return pos

    def _evict(self) -> None:
        while self._table_bytes > self._max_table_bytes:
            self._table_bytes -= _least_bytes(self._table.pop())


def text(value: Text) -> bytes:
    """Return a name or a value, decoded.

    Raises
    ------
    FramingError
        It is not a valid Huffman code.
    """
    if isinstance(value, bytes):
        return value
    coded = value[0]
    return _decode_cached(coded) if len(coded) <= _CACHED_BYTES else _decode(coded)


def _length(value: Text) -> int:
    return len(value) if isinstance(value, bytes) else len(value[0])


def _decode(coded: bytes) -> bytes:
    try:
        return decode_huffman(coded)
    except HPACKDecodingError as error:
        raise FramingError("a header text is not a valid Huffman code") from error


_decode_cached = lru_cache(maxsize=1024)(_decode)


def _least_bytes(field: Field) -> int:
    return _ENTRY_BYTES + _least_length(field[0]) + _least_length(field[1])


def _least_length(value: Text) -> int:
    """Return the least possible number of characters of a text."""
    return len(value) if isinstance(value, bytes) else len(value[0]) * 8 // _LONGEST_CODE_BITS


def _integer(data: bytes, pos: int, prefix: int) -> tuple[int, int]:
    """Return an integer that does not fit its prefix, and the position after it."""
    value = prefix
    for n in range(_MAX_INTEGER_BYTES):
        byte = data[pos + n]
        value += (byte & 0x7F) << (7 * n)
        if byte < 0x80:
            return value, pos + n + 1
    raise FramingError("an integer in a header block is too long")


def _string(data: bytes, pos: int) -> tuple[Text, int]:
    first = data[pos]
    pos += 1
    n_bytes = first & 0x7F
    if n_bytes == 0x7F:
        n_bytes, pos = _integer(data, pos, n_bytes)
    stop = pos + n_bytes
    if stop > len(data):
        raise FramingError("a header text is cut short")
    piece = data[pos:stop]
    return ((piece,) if first >= 0x80 else piece), stop
