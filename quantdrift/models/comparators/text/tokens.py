"""The comparison of token spellings, in which servers differ, above all for parts of characters."""

from collections.abc import Sequence
from typing import Final

_REPLACED: Final = "\N{REPLACEMENT CHARACTER}".encode()


def is_part(token: bytes) -> bool:
    """Return whether a token is spelt as part of a character, or not at all."""
    return not token or _REPLACED in token


def spelt_alike(tokens: Sequence[bytes], others: Sequence[bytes]) -> bool:
    """Return whether tokens of the same ids are spelt alike; if not, lists cannot be matched by spelling."""
    return all(a == b or is_part(a) or is_part(b) for a, b in zip(tokens, others, strict=True))


def same_tokens(tokens: Sequence[bytes], others: Sequence[bytes]) -> bool:
    """Return whether tokens are the same by their spelling, for sides without ids.

    vLLM spells a character completely at its last part, and its earlier parts as nothing; a tokenizer marks each part.
    """
    after = (False, False)  # whether a part came before, on either side
    for a, b in zip(tokens, others, strict=True):
        parts = (is_part(a), is_part(b))
        is_end = any(parts) and not all(parts) and after[parts.index(False)]
        if a != b and not all(parts) and not is_end:
            return False
        after = parts
    return True
