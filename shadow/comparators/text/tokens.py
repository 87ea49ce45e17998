"""How servers spell tokens, parts of characters above all: each in its own way."""

from collections.abc import Sequence
from typing import Final

_REPLACED: Final = "\N{REPLACEMENT CHARACTER}".encode()


def is_part(token: bytes) -> bool:
    """Return whether a token is spelt as part of a character, or not at all."""
    return not token or _REPLACED in token


def spelt_alike(one: Sequence[bytes], other: Sequence[bytes]) -> bool:
    """Return whether tokens of the same ids are spelt alike; else nothing in the lists can be found by its spelling."""
    return all(a == b or is_part(a) or is_part(b) for a, b in zip(one, other, strict=True))


def same_tokens(one: Sequence[bytes], other: Sequence[bytes]) -> bool:
    """Return whether tokens of which one side tells no ids are the same, as far as their spelling shows.

    vLLM spells a character whole where its last part comes, and nothing at those before; a tokenizer marks each of them.
    """
    after = (False, False)  # whether a part came before, on either side
    for a, b in zip(one, other, strict=True):
        parts = (is_part(a), is_part(b))
        is_end = any(parts) and not all(parts) and after[parts.index(False)]
        if a != b and not all(parts) and not is_end:
            return False
        after = parts
    return True
