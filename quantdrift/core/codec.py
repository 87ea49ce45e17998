"""The wire form of the records: MessagePack behind a two-byte header.

Byte 0 is the kind of the record, byte 1 the schema version. A reader refuses a version that it does not know, and the
error names it. Within a version, fields may be added with a default: old readers skip them, new readers fill them.
"""

from typing import Any

import msgspec

from quantdrift.core.errors import QuarantineError, QuarantineReason
from quantdrift.core.records import Exchange, Exemplar, Tally
from quantdrift.core.text import misfit

VERSION = 1
_KINDS: dict[type, bytes] = {Exchange: b"E", Tally: b"T", Exemplar: b"X"}
_ENCODER = msgspec.msgpack.Encoder()
_DECODERS: dict[type, msgspec.msgpack.Decoder[Any]] = {kind: msgspec.msgpack.Decoder(kind) for kind in _KINDS}


def encode(record: Exchange | Tally | Exemplar) -> bytes:
    """Return the record's wire form."""
    return _KINDS[type(record)] + bytes((VERSION,)) + _ENCODER.encode(record)


def decode_exchange(wire: bytes) -> Exchange:
    """Return the exchange in `wire`.

    Raises
    ------
    QuarantineError
        Reason `decode`: another kind, an unknown version, or invalid bytes.
    """
    exchange: Exchange = _decode(Exchange, wire)
    return exchange


def decode_tally(wire: bytes) -> Tally:
    """Return the tally in `wire`.

    Raises
    ------
    QuarantineError
        Reason `decode`: another kind, an unknown version, or invalid bytes.
    """
    tally: Tally = _decode(Tally, wire)
    return tally


def decode_exemplar(wire: bytes) -> Exemplar:
    """Return the exemplar in `wire`.

    Raises
    ------
    QuarantineError
        Reason `decode`: another kind, an unknown version, or invalid bytes.
    """
    exemplar: Exemplar = _decode(Exemplar, wire)
    return exemplar


def _decode(kind: type, wire: bytes) -> Any:
    if wire[:1] != _KINDS[kind]:
        raise QuarantineError(
            QuarantineReason.DECODE, f"not a {kind.__name__.lower()} (kind byte {wire[:1]!r})"
        )
    if wire[1:2] != bytes((VERSION,)):
        raise QuarantineError(
            QuarantineReason.DECODE,
            f"schema version {list(wire[1:2])} is not {VERSION}: upgrade the shadow workers before the sidecars",
        )
    try:
        return _DECODERS[kind].decode(memoryview(wire)[2:])
    except msgspec.MsgspecError as error:
        raise QuarantineError(QuarantineReason.DECODE, misfit(error)) from error
