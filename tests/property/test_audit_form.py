"""The bytes of an audit entry that are hashed: no two different entries have the same."""

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quantdrift.storage.audit import ChainRow, canonical

pytestmark = pytest.mark.property

_TEXT = st.text(st.sampled_from("0123456789:-a\x00é"), max_size=6)
_ROWS = st.builds(
    ChainRow,
    seq=st.integers(1, 30),
    at_us=st.integers(0, 30),
    actor=_TEXT,
    action=_TEXT,
    model=_TEXT,
    subject=_TEXT,
    before=st.none() | _TEXT,
    after=st.none() | _TEXT,
    note=_TEXT,
    hash=st.just(b""),
)
_PREVIOUS = st.binary(max_size=3)
_ROW = ChainRow(
    seq=1, at_us=1, actor="", action="", model="", subject="", before=None, after=None, note="", hash=b""
)


def _fields(written: bytes) -> list[bytes | None]:
    """Return the fields that are written, which proves that nothing else can be written in the same way."""
    fields: list[bytes | None] = []
    while written:
        if written.startswith(b"-"):
            fields.append(None)
            written = written[1:]
            continue
        length, _, rest = written.partition(b":")
        fields.append(rest[: int(length)])
        written = rest[int(length) :]
    return fields


@given(_ROWS, _PREVIOUS, _ROWS, _PREVIOUS)
@example(_ROW, b"", msgspec.structs.replace(_ROW, before=""), b"")
@example(
    msgspec.structs.replace(_ROW, actor="a1:", action="b"),
    b"",
    msgspec.structs.replace(_ROW, actor="a", action="1:b"),
    b"",
)
def test_different_entries_or_predecessors_have_different_bytes(
    one: ChainRow, previous: bytes, other: ChainRow, other_previous: bytes
) -> None:
    """Also where texts contain the signs that separate fields, and where null stands beside an empty text."""
    is_same = one == other and previous == other_previous
    assert (canonical(one, previous) == canonical(other, other_previous)) == is_same


@given(_ROWS, _PREVIOUS)
def test_every_field_can_be_read_back(row: ChainRow, previous: bytes) -> None:
    """Each field and the predecessor's hash stand there unchanged, and in their order."""
    values = [previous.hex(), row.seq, row.at_us, *msgspec.structs.astuple(row)[2:9]]
    expected = [None if value is None else str(value).encode() for value in values]
    assert _fields(canonical(row, previous)) == expected
