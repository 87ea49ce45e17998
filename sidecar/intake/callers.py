"""Authentication of callers by their tokens, in a header or, if they can send none, in the path."""

import logging
from pathlib import Path
from typing import Final

from quantdrift.core.clock import Clock
from quantdrift.core.config.callers import Caller, find_caller, read_callers
from quantdrift.core.errors import OperatorError
from quantdrift.core.records import Way
from quantdrift.sidecar.handoff.frame import Origin
from quantdrift.sidecar.intake.gateway import Gateway
from quantdrift.sidecar.state.counters import Denial

_LOG = logging.getLogger(__name__)
_READ_S: Final = 1.0
_ADVICE = {
    Denial.NO_TOKEN: "it has no token (send the header `Authorization: Bearer TOKEN`)",
    Denial.WRONG_TOKEN: "its token is not in intake.token_file, or has expired",
}


class Tokens:
    """The callers and their tokens, as the file contains them now; it is read at most once a second.

    Parameters
    ----------
    text
        The content that was read at the start.
    file
        The file; empty: the tokens never change.

    Raises
    ------
    OperatorError
        A line of `text` cannot be read.
    """

    def __init__(self, text: str, file: str, clock: Clock) -> None:
        self._callers = read_callers(text, f"intake.token_file {file}" if file else "QUANTDRIFT_INTAKE_TOKEN")
        self._text = text
        self._file = file
        self._clock = clock
        self._read_s = clock.monotonic_s()

    def find(self, token: str) -> Caller | None:
        """Return the caller whose token this is, or None."""
        now_s = self._clock.monotonic_s()
        if self._file and now_s - self._read_s >= _READ_S:
            self._read_s = now_s
            self._read()
        return find_caller(self._callers, token, self._clock.now())

    def _read(self) -> None:
        """Read the file again; one that is empty, unreadable or wrong leaves the tokens as they are."""
        try:
            text = Path(self._file).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return
        if not text or text == self._text:
            return
        self._text = text
        try:
            self._callers = read_callers(text, f"intake.token_file {self._file}")
        except OperatorError as error:
            _LOG.error("the changed tokens are refused, the previous ones stay in effect: %s", error)
        else:
            _LOG.info("the changed tokens of intake.token_file are in effect")


class Callers:
    """Checks the tokens of callers. Refused calls are counted and logged; callers are not told the reason.

    Parameters
    ----------
    tokens
        The valid tokens; without one every call is refused.
    gateway
        Counts refused calls.
    """

    def __init__(self, tokens: Tokens, gateway: Gateway) -> None:
        self._tokens = tokens
        self._gateway = gateway

    def by_header(self, way: Way, endpoint: str, authorization: str) -> Origin | None:
        """Return who calls with this `Authorization` header, or None if the call is refused.

        Parameters
        ----------
        way
            The way in.
        endpoint
            The called endpoint, for the log.
        authorization
            The value of the header; empty if it is missing.
        """
        scheme, _, token = authorization.partition(" ")
        return self.by_token(way, endpoint, token.strip() if scheme.lower() == "bearer" else "")

    def by_token(self, way: Way, endpoint: str, token: str) -> Origin | None:
        """Return who calls with this token, or None if the call is refused; otherwise as `by_header`.

        Parameters
        ----------
        token
            The token of the call; empty if there is none.
        """
        caller = self._tokens.find(token) if token else None
        if caller is None:
            self._refuse(endpoint, Denial.WRONG_TOKEN if token else Denial.NO_TOKEN)
            return None
        return Origin(way, caller.name, caller.models)

    def _refuse(self, endpoint: str, reason: Denial) -> None:
        self._gateway.count_denied(reason)
        _LOG.warning("the intake refuses a call of %s: %s", endpoint, _ADVICE[reason])
