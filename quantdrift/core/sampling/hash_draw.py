"""Pseudo-random numbers from an exchange id, which are the same in every worker and at every replay."""

import hashlib
from typing import Final

_U64: Final = 2.0**64


def draw(exchange_id: str, key: bytes) -> float:
    """Return a number in [0, 1); different keys give independent numbers."""
    return number(exchange_id, key) / _U64


def number(exchange_id: str, key: bytes) -> int:
    """Return a 64-bit number; different keys give independent numbers."""
    digest = hashlib.blake2b(exchange_id.encode(), digest_size=8, key=key).digest()
    return int.from_bytes(digest, "little")
