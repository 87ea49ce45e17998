"""HPACK header blocks: the same result as another decoder, cached blocks, and refused bombs."""

import pytest
from hpack import Encoder

from quantdrift.sidecar.relay.http2.hpack import HeaderBlock, HeaderBlockDecoder, text
from quantdrift.sidecar.relay.observing.heads import FramingError
from quantdrift.sidecar.relay.observing.memory import ObserverMemory

pytestmark = pytest.mark.unit

LIMIT = 65_536


def pairs(block: HeaderBlock) -> list[tuple[bytes, bytes]]:
    """Return the decoded fields of a block."""
    return [(text(name), text(value)) for name, value, _ in block.fields]


@pytest.mark.parametrize(
    ("wire", "fields"),
    [  # RFC 7541, C.2 and C.4.1
        ("400a637573746f6d2d6b65790d637573746f6d2d686561646572", [(b"custom-key", b"custom-header")]),
        ("040c2f73616d706c652f70617468", [(b":path", b"/sample/path")]),
        ("100870617373776f726406736563726574", [(b"password", b"secret")]),
        ("82", [(b":method", b"GET")]),
        (
            "828684418cf1e3c2e5f23a6ba0ab90f4ff",
            [
                (b":method", b"GET"),
                (b":scheme", b"http"),
                (b":path", b"/"),
                (b":authority", b"www.example.com"),
            ],
        ),
    ],
)
def test_blocks_of_the_specification(wire: str, fields: list[tuple[bytes, bytes]]) -> None:
    """Every representation, plain and Huffman-coded."""
    assert pairs(HeaderBlockDecoder(LIMIT, ObserverMemory(1 << 24)).read(bytes.fromhex(wire))) == fields


def test_a_block_that_inserts_nothing_is_looked_up() -> None:
    """The very same block comes back, with what its reader has left on it."""
    encoder, blocks = Encoder(), HeaderBlockDecoder(LIMIT, ObserverMemory(1 << 24))
    fields = [(":method", "POST"), ("x-a", "b")]
    blocks.read(encoder.encode(fields))
    again = encoder.encode(fields)
    block = blocks.read(again)
    block.digest = "kept"
    assert blocks.read(again) is block


def test_an_insertion_changes_what_the_same_bytes_say() -> None:
    """What was looked up before is read anew."""
    encoder, blocks = Encoder(), HeaderBlockDecoder(LIMIT, ObserverMemory(1 << 24))
    blocks.read(encoder.encode([("x-a", "1")]))
    newest = bytes([0x80 | 62])
    assert pairs(blocks.read(newest)) == [(b"x-a", b"1")]
    blocks.read(encoder.encode([("x-b", "2")]))
    assert pairs(blocks.read(newest)) == [(b"x-b", b"2")]


def test_the_memo_is_bounded() -> None:
    """A sender of ever new blocks that insert nothing does not fill it."""
    blocks = HeaderBlockDecoder(LIMIT, ObserverMemory(1 << 24))
    for n in range(1000):
        blocks.read(b"\x00\x01a\x05%05d" % n)
    blocks.read(b"\x00\x01a\x7f\x81\x07" + b"b" * 1024)
    assert len(blocks._memo) <= 32
    assert all(len(key) <= 512 for key in blocks._memo)


@pytest.mark.parametrize("huffman", [True, False])
def test_the_table_is_evicted_no_earlier_than_the_senders(*, huffman: bool) -> None:
    """Coded entries are longer than they look: nothing that may still be named is gone, and it stays bounded."""
    encoder, blocks = Encoder(), HeaderBlockDecoder(LIMIT, ObserverMemory(1 << 24))
    for n in range(400):
        fields = [(f"x-{n % 37}", str(n) * (n % 9)), ("same", "value" * 8), (f"y-{n % 5}", "e" * 60)]
        assert pairs(blocks.read(encoder.encode(fields, huffman=huffman))) == [
            (name.encode(), value.encode()) for name, value in fields
        ]
    assert 0 < len(blocks._table) <= 4096 // 32


def test_the_table_changes_its_size() -> None:
    """Larger, smaller and emptied, as the sender says at the beginning of a block."""
    encoder, blocks = Encoder(), HeaderBlockDecoder(LIMIT, ObserverMemory(1 << 24))
    for size in (8192, 256, 0, 4096):
        encoder.header_table_size = size
        for n in range(20):
            fields = [(f"x-{n % 7}", "v" * 30), ("x-same", "v")]
            assert pairs(blocks.read(encoder.encode(fields))) == [
                (name.encode(), value.encode()) for name, value in fields
            ]
        assert len(blocks._table) <= size // 32


@pytest.mark.parametrize(
    "wire",
    [
        b"\x80",  # an index of zero
        bytes([0x80 | 62]),  # an entry that is not there
        b"\xff\x80\x80\x80\x80\x01",  # an integer without an end
        b"\x7f\xff\xff\xff\xff\xff\xff\xff\xff\x0f",
        b"\x00\x05ab",  # a name that is cut short
        b"\x00\x01a\x7f\xff\xff\xff\x07b",  # a value of 16 MB in three bytes
        b"\x40",
        b"\x00\x01a",
        b"\x82\x20",  # a change of size that is not at the beginning
        b"\x3f\xe1\xff\x1f",  # a table of half a megabyte
    ],
)
def test_what_is_no_block_is_refused(wire: bytes) -> None:
    """State is lost there: whoever reads on reads nonsense."""
    with pytest.raises(FramingError):
        HeaderBlockDecoder(LIMIT, ObserverMemory(1 << 24)).read(wire)


def test_a_block_that_expands_is_refused() -> None:
    """Sixty thousand references to one long entry are a quarter of a gigabyte."""
    blocks = HeaderBlockDecoder(LIMIT, ObserverMemory(1 << 24))
    blocks.read(b"\x40\x01a\x7f\x81\x1e" + b"b" * 3968)
    with pytest.raises(FramingError, match="a head is longer than"):
        blocks.read(bytes([0x80 | 62]) * 60_000)


def test_many_fields_are_refused_however_short() -> None:
    """Each counts for 32 bytes beside its text: sixty thousand empty ones would keep a relay busy."""
    blocks = HeaderBlockDecoder(LIMIT, ObserverMemory(1 << 24))
    blocks.read(b"\x40\x00\x00")
    with pytest.raises(FramingError, match="a head is longer than"):
        blocks.read(bytes([0x80 | 62]) * 60_000)


def test_what_is_no_huffman_code_is_refused_when_it_is_read() -> None:
    """A sender may write what it likes as long as nobody asks."""
    block = HeaderBlockDecoder(LIMIT, ObserverMemory(1 << 24)).read(b"\x00\x01a\x84\xff\xff\xff\xff")
    with pytest.raises(FramingError, match="Huffman"):
        text(block.fields[0][1])
