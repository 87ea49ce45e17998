"""Authentication of callers by the intake's token, in a header or, if they can send none, in the path."""

import hmac
import logging

from quantdrift.sidecar.intake.gateway import Gateway
from quantdrift.sidecar.state.counters import Denial

_LOG = logging.getLogger(__name__)
_ADVICE = {
    Denial.NO_TOKEN: "it has no token (send the header `Authorization: Bearer TOKEN`)",
    Denial.WRONG_TOKEN: "its token differs from that in intake.token_file",
    Denial.OFF: "this endpoint is off (set intake.kserve_logger to turn it on)",
}


class Callers:
    """Checks the token of callers. Refused calls are counted and logged; callers are not told the reason.

    Parameters
    ----------
    token
        The intake's token; empty: every call is refused.
    gateway
        Counts refused calls.
    """

    def __init__(self, token: str, gateway: Gateway) -> None:
        self._token = token.encode()
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
        is_valid = hmac.compare_digest(token.encode(errors="replace"), self._token) and bool(self._token)
        if not is_valid:
            self.refuse(endpoint, Denial.WRONG_TOKEN if token else Denial.NO_TOKEN)
        return is_valid

    def refuse(self, endpoint: str, reason: Denial) -> None:
        """Count and log a refused call."""
        self._gateway.count_denied(reason)
        _LOG.warning("the intake refuses a call of %s: %s", endpoint, _ADVICE[reason])
