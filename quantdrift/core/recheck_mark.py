"""The mark of requests that quantdrift itself sends to a candidate, so that no sidecar records them as traffic.

A header carries the time and an HMAC over the time and the tensors of the request. A client that does not have the key
cannot hide its traffic with it, and a mark that somebody has seen is of no use for another request or at a later time.
Shadow and sidecar derive the key from `QUANTDRIFT_SAMPLING_SALT`.
"""

import hashlib
import hmac
from collections.abc import Iterable
from typing import Final

from quantdrift.core.records import Tensor

HEADER: Final = "x-quantdrift-recheck"
"""The header with the mark."""
VALID_S: Final = 300.0
"""How far the time of a mark may be from the clock of the sidecar: clocks differ, and a request may have to wait."""
_PURPOSE: Final = b"quantdrift recheck mark"
_MOST_DIGITS: Final = 12


class RecheckMarks:
    """Makes and checks marks.

    Parameters
    ----------
    salt
        The sampling salt. Empty: no mark is made, and none is valid.
    """

    def __init__(self, salt: bytes) -> None:
        self._key = hmac.digest(salt, _PURPOSE, "sha256") if salt else b""

    def headers(self, inputs: Iterable[Tensor], now_s: float) -> dict[str, str]:
        """Return the header for a request with these tensors; nothing without a key.

        Parameters
        ----------
        inputs
            The tensors of the request, in any order.
        now_s
            Seconds since 1970, UTC.
        """
        if not self._key:
            return {}
        time = str(int(now_s))
        return {HEADER: f"{time}-{self._digest(time, inputs)}"}

    def is_valid(self, mark: str, inputs: Iterable[Tensor], now_s: float) -> bool:
        """Return whether a mark was made with the key, for these tensors, at about this time.

        The comparison takes the same time for every wrong mark.

        Parameters
        ----------
        mark
            Value of the header.
        inputs, now_s
            As for `headers`.
        """
        time, _, digest = mark.partition("-")
        if not (self._key and time.isascii() and time.isdecimal() and len(time) <= _MOST_DIGITS):
            return False
        if abs(int(time) - now_s) > VALID_S:
            return False
        return hmac.compare_digest(digest.encode(errors="replace"), self._digest(time, inputs).encode())

    def _digest(self, time: str, inputs: Iterable[Tensor]) -> str:
        content = hashlib.sha256()
        for tensor in sorted(inputs, key=lambda tensor: tensor.name):
            shape = ",".join(map(str, tensor.shape))
            # Lengths, so that no two different lists of tensors give the same bytes.
            for part in (tensor.name.encode(), tensor.datatype.encode(), shape.encode(), tensor.data):
                content.update(len(part).to_bytes(8, "big"))
                content.update(part)
        return hmac.digest(self._key, time.encode() + content.digest(), "sha256").hex()
