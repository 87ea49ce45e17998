"""What tap and intake process say to each other over a Unix stream socket.

Every message is `u32 length | u8 kind | content`, big-endian, the length counting what follows itself. The tap sends
exchanges and counts; the intake sends the rates that hold, whenever they change, and acknowledges counts. Contents are
MessagePack, but for an exchange: there it is the hand-off's frame, as a relay worker makes it.
"""

import struct
from enum import IntEnum

import msgspec

from quantdrift.core.records import HeaderStratum, Loss

HEAD = struct.Struct("!IB")
LENGTH_BYTES = 4


class Kind(IntEnum):
    """What a message is."""

    EXCHANGE = 1  # from the tap: a frame of the hand-off
    COUNTS = 2  # from the tap
    RATES = 3  # from the intake
    ACK = 4  # from the intake: the number of the counts that are in the shared table now


class Counts(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a tap has seen since the counts that were acknowledged last.

    Parameters
    ----------
    number
        Rises by one.
    offered
        Calls, by name of header stratum: they may have been counted while another sidecar was there, whose rows are
        not this one's.
    lost
        Calls that were chosen and then lost, by name of header stratum and reason.
    errors
        Calls that could not be understood: no tensors, or an error of our own.
    early
        Calls before any rates were known.
    """

    number: int
    offered: dict[str, int] = {}
    lost: dict[str, dict[Loss, int]] = {}
    errors: int = 0
    early: int = 0


class Rates(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The first sampling phase in force.

    Parameters
    ----------
    epoch
        Names rates and salt.
    salt
        Key of the hash that decides where a sticky header does.
    sticky
        Header whose value decides, in lower case, or empty.
    strata
        In order; the first that matches decides; the last takes everything.
    places
        Row of each stratum in the table of counts: what exchanges are told by.
    max_exchange_bytes
        Longest exchange that is taken in.
    """

    epoch: str
    salt: bytes
    sticky: str
    strata: tuple[HeaderStratum, ...]
    places: tuple[int, ...]
    max_exchange_bytes: int


def message(kind: Kind, content: object) -> bytes:
    """Return a message whose content is MessagePack."""
    body = msgspec.msgpack.encode(content)
    return HEAD.pack(1 + len(body), kind) + body


def exchange_head(n_bytes: int) -> bytes:
    """Return what goes before an exchange whose frame has `n_bytes`."""
    return HEAD.pack(1 + n_bytes, Kind.EXCHANGE)
