"""Draws by an exchange's id: the same wherever, and however often, it is replayed."""

import hashlib
from typing import Final

_U64: Final = 2.0**64


def draw(exchange_id: str, key: bytes) -> float:
    """Return a number in [0, 1); each `key` draws for itself."""
    return number(exchange_id, key) / _U64


def number(exchange_id: str, key: bytes) -> int:
    """Return a number of 64 bits."""
    digest = hashlib.blake2b(exchange_id.encode(), digest_size=8, key=key).digest()
    return int.from_bytes(digest, "little")
