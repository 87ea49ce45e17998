"""Base class of the configuration's sections, and the description that each option carries."""

from typing import Any

import msgspec
from msgspec import Meta

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


def about(text: str, unit: str = "", **bounds: Any) -> Meta:
    """Return the description of an option: what it does, its unit (UCUM or a word), and its bounds."""
    return Meta(description=text, extra={"unit": unit}, **bounds)


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section of the configuration; it refuses unknown keys."""
