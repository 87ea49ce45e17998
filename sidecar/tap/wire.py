"""The messages between tap and intake process over a Unix stream socket.

Every message is `u32 length | u8 kind | content`, big-endian, the length counting what follows itself. The
tap sends exchanges and counts; the intake sends the rates in effect, whenever they change, and acknowledges
counts. Contents are MessagePack, except for an exchange, which is a frame of the hand-off, as a relay worker
makes it.
"""

import struct
from enum import IntEnum

import msgspec

from quantdrift.core.records import HeaderStratum, Loss

HEAD = struct.Struct("!IB")
LENGTH_BYTES = 4


class MessageKind(IntEnum):
    """The kind of a message."""

    EXCHANGE = 1  # from the tap: a frame of the hand-off
    COUNTS = 2  # from the tap
    RATES = 3  # from the intake
    ACK = 4  # from the intake: the number of the counts that it has added to the shared table


class Counts(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The counts of a tap since those that were acknowledged last.

    Parameters
    ----------
    number
        Rises by one.
    offered
        Calls, by name of header stratum, since they may have been counted under another sidecar with other
        rows.
    lost
        Sampled calls that were lost, by name of header stratum and reason.
    errors
        Calls that could not be recorded: values that are not tensors, or internal errors.
    early
        Calls before any rates were received.
    """

    number: int
    offered: dict[str, int] = {}
    lost: dict[str, dict[Loss, int]] = {}
    errors: int = 0
    early: int = 0


class Rates(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The rates of the first sampling phase in effect.

    Parameters
    ----------
    epoch
        Identifies rates and salt.
    salt
        Key of the hash of the sticky header.
    sticky
        Name of the sticky header in lower case, or empty.
    strata
        In order; the first one that matches counts; the last one matches every call.
    rows
        Row of each stratum in the table of counts, which exchanges refer to.
    max_exchange_bytes
        Longest exchange that the intake accepts.
    """

    epoch: str
    salt: bytes
    sticky: str
    strata: tuple[HeaderStratum, ...]
    rows: tuple[int, ...]
    max_exchange_bytes: int


def message(kind: MessageKind, content: object) -> bytes:
    """Return a message whose content is MessagePack."""
    body = msgspec.msgpack.encode(content)
    return HEAD.pack(1 + len(body), kind) + body


def exchange_head(n_bytes: int) -> bytes:
    """Return the head of an exchange message whose frame has `n_bytes`."""
    return HEAD.pack(1 + n_bytes, MessageKind.EXCHANGE)
