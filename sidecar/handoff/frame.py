"""The frame that carries a raw exchange to the capture process over a Unix stream socket.

`frame = u32 length | u32 length of meta | meta (MessagePack) | request bytes | response bytes`, lengths
big-endian; the first counts everything after itself. The bytes are those on the wire, message heads and
chunked framing included: the relay decodes nothing.

A connection begins with an introduction: a frame without meta, whose content is the sender's slot in the shared
counters.
"""

import struct
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Final

import msgspec

from quantdrift.core.config.schema import KIB
from quantdrift.core.records import Loss, Way

_HEAD = struct.Struct("!II")
_INTRODUCTION = struct.Struct("!III")
HEAD_BYTES = _HEAD.size

MAX_HEADER_BYTES = 64 * KIB
"""Longest message head that is observed. By default gRPC accepts 16 KiB of metadata, and nginx 32 KiB of headers."""


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """How an exchange came in, and what its sender may report.

    Parameters
    ----------
    way
        How it came in.
    caller
        The sender, as it was checked; empty: it was not.
    models
        Names or patterns of the models that the sender may report on; none: all models.
    """

    way: Way = Way.RELAY
    caller: str = ""
    models: tuple[str, ...] = ()

    def allows(self, model: str) -> bool:
        """Return whether the sender may report on a model."""
        return not self.models or any(fnmatchcase(model, pattern) for pattern in self.models)


RELAYED: Final = Origin()


class RawMeta(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The metadata of an exchange.

    Parameters
    ----------
    id
        32 hexadecimal digits.
    stratum
        Row of its header stratum in the table of counts.
    pi1
        First-phase inclusion probability.
    u1
        The first phase's draw.
    epoch
        The epoch whose rates and salt were used.
    captured_at_ns
        Time when the response was complete, nanoseconds since 1970, UTC.
    request_head_bytes, request_bytes
        Length of the request's head, its empty line included, and of the whole request.
    response_head_bytes, response_bytes
        The same of the final response; interim 1xx responses are left out.
    origin
        How it came in. What a tap writes here is replaced by the intake.
    latency_s, first_byte_s
        Seconds from the end of the request to the last byte of the response, and to the first byte of its content, as the relay
        measured them. None: it did not, as for every other way in, or the answer began before the request was complete.
    lost
        Why the exchange is lost already. Only its request is in the frame, whose body names the model that loses it. None:
        it is whole.
    """

    id: str
    stratum: int
    pi1: float
    u1: float
    epoch: str
    captured_at_ns: int
    request_head_bytes: int
    request_bytes: int
    response_head_bytes: int
    response_bytes: int
    origin: Origin = RELAYED
    latency_s: float | None = None
    first_byte_s: float | None = None
    lost: Loss | None = None


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(RawMeta)


def frame(meta: RawMeta, chunks: Iterable[bytes | memoryview]) -> list[bytes | memoryview]:
    """Return the buffers of one frame; the chunks are not copied.

    Parameters
    ----------
    meta
        Lengths in it must add up to those of the chunks.
    chunks
        The request's bytes, then the response's.
    """
    body = _ENCODER.encode(meta)
    total = 4 + len(body) + meta.request_bytes + meta.response_bytes
    return [_HEAD.pack(total, len(body)) + body, *chunks]


def introduction(slot: int) -> bytes:
    """Return the first bytes of a connection: the sender's slot in the shared counters."""
    return _INTRODUCTION.pack(8, 0, slot)


def introduced(rest: bytes | memoryview) -> int:
    """Return the sender's slot from the `rest` of an introduction.

    Raises
    ------
    ValueError
        It is no introduction: the stream is out of step and must be closed.
    """
    if len(rest) != _INTRODUCTION.size - HEAD_BYTES:
        raise ValueError("a frame without meta is no introduction")
    return int.from_bytes(rest, "big")


def lengths(head: bytes | memoryview) -> tuple[int, int]:
    """Return the number of bytes after the 8 bytes of `head`, and how many of them are meta."""
    total, meta = _HEAD.unpack(head)
    return total - 4, meta


def parse(meta_bytes: int, rest: bytes | memoryview) -> tuple[RawMeta, memoryview, memoryview]:
    """Return meta, request and response in the `rest` of a frame; they are not copied.

    Raises
    ------
    ValueError
        The lengths do not add up: the stream is out of step and must be closed.
    """
    view = memoryview(rest)
    meta = parse_meta(view[:meta_bytes])
    body = view[meta_bytes:]
    if len(body) != meta.request_bytes + meta.response_bytes:
        raise ValueError("the frame's lengths do not add up")
    return meta, body[: meta.request_bytes], body[meta.request_bytes :]


def parse_meta(meta: bytes | memoryview) -> RawMeta:
    """Return the metadata of a frame.

    Raises
    ------
    ValueError
        It is unreadable.
    """
    try:
        return _DECODER.decode(meta)
    except msgspec.MsgspecError as error:
        raise ValueError("the frame's meta is unreadable") from error


PIECE_BYTES = 100  # memory of a buffer in addition to its content
