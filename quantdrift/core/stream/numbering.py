"""The number of each exchange at its sidecar; a missing number means that the exchange left the stream unread.

A sidecar numbers its exchanges from 1 in each row of its table of counts, and its tallies say how many the stream has
stored. The number is a header of the message, so that it is known even if the message cannot be read.
"""

import re
from collections.abc import Mapping
from typing import Self

import msgspec

HEADER = "Quantdrift-Number"
_FORM = re.compile(r"([0-9a-f]{32})\.(\d{1,9})\.(\d{1,18})")


class Numbered(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """The number of one message of a sidecar.

    Parameters
    ----------
    boot
        Id of this start of the sidecar: 32 hexadecimal digits in lower case.
    row
        Row of the sidecar's table of counts: a header stratum and a model.
    number
        Number within the row, from 1.
    """

    boot: str
    row: int
    number: int

    @property
    def header(self) -> str:
        """The value of the message header."""
        return f"{self.boot}.{self.row}.{self.number}"

    @classmethod
    def read(cls, headers: Mapping[str, str] | None) -> Self | None:
        """Return the number in the headers of a message; None if there is no valid one."""
        match = _FORM.fullmatch((headers or {}).get(HEADER, ""))
        if match is None or not int(match[3]):
            return None
        return cls(boot=match[1], row=int(match[2]), number=int(match[3]))
