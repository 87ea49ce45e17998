"""gRPC framing: length-prefixed messages, compressed or not, and a bound on their number of fields."""

import struct
from collections.abc import Mapping

from quantdrift.core.records import Loss
from quantdrift.sidecar.protocols.errors import LostError
from quantdrift.sidecar.protocols.http_message import Head, expand

_PREFIX = struct.Struct("!?I")  # whether it is compressed, and its length
# A field of two bytes on the wire takes up to 50 bytes in memory, so the length of a message is not a bound.
_MAX_FIELDS = 50_000
_MAX_VARINT_BYTES = 10

Nested = Mapping[int, "Nested"]
"""The fields that are messages themselves, by number, each with its own nested fields."""


def read_messages(head: Head, body: bytes, max_bytes: int) -> list[bytes]:
    """Return the messages in a body, decompressed.

    Parameters
    ----------
    head
        Its `grpc-encoding` is the compression of messages that are marked as compressed.
    body
        The content of the DATA frames.
    max_bytes
        Most bytes of all messages together.

    Raises
    ------
    LostError
        `decode`: the messages are malformed. `too_large`: above the limit.
    """
    messages: list[bytes] = []
    position, bytes_left = 0, max_bytes
    while position < len(body):
        stop = position + _PREFIX.size
        if stop > len(body):
            raise LostError(Loss.DECODE, "a message's prefix is cut short")
        compressed, n_bytes = _PREFIX.unpack_from(body, position)
        message = body[stop : stop + n_bytes]
        position = stop + n_bytes
        if len(message) != n_bytes:
            raise LostError(Loss.DECODE, "a message is cut short")
        if compressed:
            message = expand(head.headers.get("grpc-encoding", "identity"), message, bytes_left)
        bytes_left -= len(message)
        if bytes_left < 0:
            raise LostError(Loss.TOO_LARGE, f"messages of more than {max_bytes} bytes")
        messages.append(message)
        if len(messages) > _MAX_FIELDS:
            raise LostError(Loss.TOO_LARGE, f"more than {_MAX_FIELDS} messages")
    return messages


def check_fields(messages: list[bytes], nested: Nested) -> None:
    """Raise `too_large` if messages have too many fields, or `decode` if they are malformed.

    Parameters
    ----------
    messages
        Serialised.
    nested
        The fields whose messages are counted, too.
    """
    fields_left = _MAX_FIELDS
    for message in messages:
        try:
            fields_left = _count(message, 0, len(message), nested, fields_left)
        except IndexError as error:
            raise LostError(Loss.DECODE, "a message is cut short") from error


def _count(data: bytes, position: int, stop: int, nested: Nested, left: int) -> int:
    """Return the number of fields still allowed, of `left`, after those of `data[position:stop]`."""
    while position < stop:
        left -= 1
        if left < 0:
            raise LostError(Loss.TOO_LARGE, f"more than {_MAX_FIELDS} fields")
        tag, position = _varint(data, position)
        kind = tag & 7
        if kind == 0:
            _, position = _varint(data, position)
        elif kind == 2:
            n_bytes, position = _varint(data, position)
            inner = nested.get(tag >> 3)
            if inner is not None:
                left = _count(data, position, min(position + n_bytes, stop), inner, left)
            position += n_bytes
        elif kind in (1, 5):
            position += 8 if kind == 1 else 4
        else:
            raise LostError(Loss.DECODE, "a message has a malformed field")
    return left


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for n in range(_MAX_VARINT_BYTES):
        byte = data[position + n]
        value |= (byte & 0x7F) << (7 * n)
        if byte < 0x80:
            return value, position + n + 1
    raise LostError(Loss.DECODE, "a message has a malformed number")
