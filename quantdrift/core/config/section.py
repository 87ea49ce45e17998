"""What every part of the configuration is built from."""

from typing import Any

import msgspec
from msgspec import Meta

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


def about(text: str, unit: str = "", **bounds: Any) -> Meta:
    """Return what an option is for, in what unit, and within which bounds."""
    return Meta(description=text, extra={"unit": unit}, **bounds)


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the configuration: unknown keys are refused."""
