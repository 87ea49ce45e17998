"""Authentication of callers by the intake's token, in a header or, if they can send none, in the path."""

import contextlib
import hmac
import logging
from pathlib import Path
from typing import Final

from quantdrift.core.clock import Clock
from quantdrift.sidecar.intake.gateway import Gateway
from quantdrift.sidecar.state.counters import Denial

_LOG = logging.getLogger(__name__)
_READ_S: Final = 1.0
_ADVICE = {
    Denial.NO_TOKEN: "it has no token (send the header `Authorization: Bearer TOKEN`)",
    Denial.WRONG_TOKEN: "its token differs from that in intake.token_file",
    Denial.OFF: "this endpoint is off (set intake.kserve_logger to turn it on)",
}


class Token:
    """The intake's token, as its file contains it now; the file is read at most once a second.

    Parameters
    ----------
    text
        The token that was read at the start. It stays in effect while the file cannot be read.
    file
        Its file; empty: the token never changes.
    """

    def __init__(self, text: str, file: str, clock: Clock) -> None:
        self._text = text.encode()
        self._file = file
        self._clock = clock
        self._read_s = clock.monotonic_s()

    def current(self) -> bytes:
        """Return the token; empty if there is none."""
        now_s = self._clock.monotonic_s()
        if self._file and now_s - self._read_s >= _READ_S:
            self._read_s = now_s
            with contextlib.suppress(OSError):
                self._text = Path(self._file).read_bytes().strip() or self._text
        return self._text


class Callers:
    """Checks the token of callers. Refused calls are counted and logged; callers are not told the reason.

    Parameters
    ----------
    token
        The intake's token; without one every call is refused.
    gateway
        Counts refused calls.
    """

    def __init__(self, token: Token, gateway: Gateway) -> None:
        self._token = token
        self._gateway = gateway

    def has_token(self, endpoint: str, authorization: str) -> bool:
        """Return whether a call has the token in its `Authorization` header.

        Parameters
        ----------
        endpoint
            The called endpoint, for the log.
        authorization
            The value of the header; empty if it is missing.
        """
        scheme, _, token = authorization.partition(" ")
        return self.is_token(endpoint, token.strip() if scheme.lower() == "bearer" else "")

    def is_token(self, endpoint: str, token: str) -> bool:
        """Return whether a call gives the token, in constant time.

        Parameters
        ----------
        endpoint
            The called endpoint, for the log.
        token
            The token of the call; empty if there is none.
        """
        expected = self._token.current()
        is_valid = hmac.compare_digest(token.encode(errors="replace"), expected) and bool(expected)
        if not is_valid:
            self.refuse(endpoint, Denial.WRONG_TOKEN if token else Denial.NO_TOKEN)
        return is_valid

    def refuse(self, endpoint: str, reason: Denial) -> None:
        """Count and log a refused call."""
        self._gateway.count_denied(reason)
        _LOG.warning("the intake refuses a call of %s: %s", endpoint, _ADVICE[reason])
