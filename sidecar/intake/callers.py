"""Who may tell of exchanges: whoever has the intake's token, in a header or, where a caller can send none, in a path."""

import hmac
import logging

from quantdrift.sidecar.intake.gateway import Gateway
from quantdrift.sidecar.state.counters import Denial

_LOG = logging.getLogger(__name__)
_ADVICE = {
    Denial.NO_TOKEN: "it gives no token (header `Authorization: Bearer TOKEN`)",
    Denial.WRONG_TOKEN: "its token is not that of intake.token_file",
    Denial.OFF: "this way in is off (intake.kserve_logger)",
}


class Callers:
    """Knows callers by the token. What it refuses is counted and logged; no caller is told the reason.

    Parameters
    ----------
    token
        Of the intake; empty: nobody is known.
    entrance
        Keeps the count.
    """

    def __init__(self, token: str, entrance: Gateway) -> None:
        self._token = token.encode()
        self._entrance = entrance

    def has_token(self, way: str, authorization: str) -> bool:
        """Return whether a call has the token in its header `Authorization`.

        Parameters
        ----------
        way
            What is called, for the log.
        authorization
            The header; empty where there is none.
        """
        scheme, _, given = authorization.partition(" ")
        return self.is_token(way, given.strip() if scheme.lower() == "bearer" else "")

    def is_token(self, way: str, given: str) -> bool:
        """Return whether what a call gives is the token; the time that it takes does not tell how much of it is right.

        Parameters
        ----------
        way
            What is called, for the log.
        given
            Empty where it gives none.
        """
        is_known = hmac.compare_digest(given.encode(errors="replace"), self._token) and bool(self._token)
        if not is_known:
            self.refuse(way, Denial.WRONG_TOKEN if given else Denial.NO_TOKEN)
        return is_known

    def refuse(self, way: str, why: Denial) -> None:
        """Count and log a call that is refused."""
        self._entrance.deny(why)
        _LOG.warning("the intake refuses a call of %s: %s", way, _ADVICE[why])
