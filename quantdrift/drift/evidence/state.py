"""The binary form of a detector's state: named, versioned, checked, and the same bits when it comes back.

Layout, little-endian: `QD`, version (1 byte), length of the kind (1 byte), kind (ASCII), number of values (4 bytes),
CRC-32 of everything else (4 bytes), values (float64).

A state of the version before is read, too: where a kind has grown since, what it has at its end begins at 0, and what it has no more is left out.
"""

import struct
import zlib
from collections.abc import Sequence
from functools import cache

import numpy as np

from quantdrift.core.errors import OperatorError
from quantdrift.drift.evidence.observations import FloatArray

VERSION = 3
_BEFORE = 2
_SIZES_BEFORE = {"change": 483, "tail": 495}  # of the kinds that have grown since
_LEFT_OUT = {"tail": slice(454, 490)}  # a copy of the evidence for tickets
_MAGIC = b"QD"


def dump_state(kind: str, state: FloatArray) -> bytes:
    """Return the binary form of `state` of a detector of `kind`."""
    head, check = _head(kind, len(state))
    body = np.ascontiguousarray(state, dtype="<f8").data
    return b"".join((head, zlib.crc32(body, check).to_bytes(4, "little"), body))


def dump_rows(kind: str, states: FloatArray, rows: Sequence[int]) -> list[bytes]:
    """Return `dump_state` of some rows of `states`, (N, size) next to each other in memory."""
    n = states.shape[1]
    head, check = _head(kind, n)
    body, step, crc32 = np.asarray(states, dtype="<f8").data.cast("B"), 8 * n, zlib.crc32
    dumped = []
    for row in rows:
        part = body[row * step : (row + 1) * step]
        dumped.append(b"".join((head, crc32(part, check).to_bytes(4, "little"), part)))
    return dumped


@cache
def _head(kind: str, n: int) -> tuple[bytes, int]:
    """Return the bytes before the checksum, and their checksum."""
    name = kind.encode("ascii")
    head = _MAGIC + bytes((VERSION, len(name))) + name + struct.pack("<I", n)
    return head, zlib.crc32(head)


def load_state(kind: str, blob: bytes, size: int) -> FloatArray:
    """Return the state in `blob`; it may be written to.

    Raises
    ------
    OperatorError
        The blob is of another version or kind, or damaged: the message says which and what to do.
    """
    if blob[:2] != _MAGIC or len(blob) < 4:
        raise OperatorError("a detector state in the store is damaged (no header): restore it from a backup")
    if blob[2] not in {VERSION, _BEFORE}:
        raise OperatorError(
            f"a detector state in the store has version {blob[2]}, this program reads version {VERSION}: "
            "run the version that wrote it, or upgrade"
        )
    n_name = blob[3]
    name, rest = blob[4 : 4 + n_name], blob[4 + n_name :]
    if name != kind.encode("ascii"):
        raise OperatorError(f"a detector state in the store is of kind {name!r}, expected {kind!r}")
    stored = _SIZES_BEFORE.get(kind, size) if blob[2] == _BEFORE else size
    if len(rest) != 8 + 8 * stored:
        raise OperatorError(
            f"a {kind} state in the store is damaged: {len(rest)} bytes where {8 + 8 * stored} belong"
        )
    length, check = struct.unpack_from("<II", rest)
    if length != stored or check != zlib.crc32(rest[8:], zlib.crc32(blob[: 8 + n_name])):
        raise OperatorError(f"a {kind} state in the store is damaged: its checksum does not fit")
    values = np.frombuffer(rest, "<f8", offset=8)
    if blob[2] == _BEFORE and kind in _LEFT_OUT:
        values = np.delete(values, _LEFT_OUT[kind])
    state = np.zeros(size)
    state[: len(values)] = values
    return state
