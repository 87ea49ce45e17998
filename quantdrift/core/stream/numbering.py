"""The number that each exchange travels with: what is missing among them has left the stream unread.

A sidecar numbers what it sends in each row of its table of counts, from 1 on, and its tallies say how many the stream
has taken. The number is a header of the message, so that one that cannot be read is known all the same.
"""

import re
from collections.abc import Mapping
from typing import Self

import msgspec

HEADER = "Quantdrift-Number"
_FORM = re.compile(r"([0-9a-f]{32})\.(\d{1,9})\.(\d{1,18})")


class Numbered(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """One message among those of its publisher.

    Parameters
    ----------
    boot
        The start of the sidecar: 32 hexadecimal digits in lower case.
    row
        Row of the sidecar's table of counts: a header stratum and a model.
    number
        Within the row, from 1 on.
    """

    boot: str
    row: int
    number: int

    @property
    def header(self) -> str:
        """What the message's header holds."""
        return f"{self.boot}.{self.row}.{self.number}"

    @classmethod
    def read(cls, headers: Mapping[str, str] | None) -> Self | None:
        """Return what the headers of a message say; None where they say nothing that can be understood."""
        found = _FORM.fullmatch((headers or {}).get(HEADER, ""))
        if found is None or not int(found[3]):
            return None
        return cls(boot=found[1], row=int(found[2]), number=int(found[3]))
