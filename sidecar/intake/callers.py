"""Authentication of callers: by a token in a header or in the path, by their certificate, or by the user of a tap."""

import logging
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from quantdrift.core.clock import Clock
from quantdrift.core.config.callers import (
    Caller,
    find_caller,
    find_certificate,
    find_user,
    read_callers,
)
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
    Denial.WRONG_CERTIFICATE: "no name of its certificate is in intake.token_file as cert:IDENTITY, or it has expired",
}
Certificate = Mapping[str, Any]
"""A verified certificate, in the form of `ssl.SSLSocket.getpeercert`."""


class CallersFile:
    """The callers as the file contains them now; it is read at most once a second.

    Parameters
    ----------
    text
        The content that was read at the start.
    file
        The file; empty: the callers never change.

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
        return find_caller(self._current(), token, self._clock.now())

    def find_certificate(self, certificate: Certificate) -> Caller | None:
        """Return the caller whose certificate this is, or None; it must have been verified, and must be valid still."""
        now = self._clock.now()
        if (
            ssl.cert_time_to_seconds(certificate.get("notAfter", "Jan  1 00:00:00 1970 GMT"))
            <= now.timestamp()
        ):
            return None  # a connection may outlive the certificate that opened it
        return find_certificate(self._current(), _names(certificate), now)

    def find_user(self, user: int) -> Caller | None:
        """Return the caller whose tap runs as this user, or None."""
        return find_user(self._current(), user, self._clock.now())

    def names_user(self, user: int) -> bool:
        """Return whether a line names this user, valid or not."""
        return any(caller.user == user for caller in self._current())

    def _current(self) -> tuple[Caller, ...]:
        now_s = self._clock.monotonic_s()
        if self._file and now_s - self._read_s >= _READ_S:
            self._read_s = now_s
            self._read()
        return self._callers

    def _read(self) -> None:
        """Read the file again; one that is empty, unreadable or wrong changes nothing."""
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
            _LOG.error("the changed callers are refused, the previous ones stay in effect: %s", error)
        else:
            _LOG.info("reloaded intake.token_file")


class Callers:
    """Checks who calls a port. Refused calls are counted and logged; callers are not told the reason.

    Parameters
    ----------
    file
        The callers; without one every call is refused.
    gateway
        Counts refused calls.
    """

    def __init__(self, file: CallersFile, gateway: Gateway) -> None:
        self._file = file
        self._gateway = gateway

    def by_header(
        self, way: Way, endpoint: str, authorization: str, certificate: Certificate | None = None
    ) -> Origin | None:
        """Return who calls with this `Authorization` header or certificate, or None if the call is refused.

        A call with a token counts for the token's caller, whatever its certificate says.

        Parameters
        ----------
        endpoint
            The called endpoint, for the log.
        authorization
            The value of the header; empty if it is missing.
        certificate
            The verified certificate of the connection; None or empty: it has none.
        """
        scheme, _, token = authorization.partition(" ")
        if not certificate or token:
            return self.by_token(way, endpoint, token.strip() if scheme.lower() == "bearer" else "")
        caller = self._file.find_certificate(certificate)
        if caller is None:
            self._refuse(endpoint, Denial.WRONG_CERTIFICATE)
            return None
        return Origin(way, caller.name, caller.models)

    def by_token(self, way: Way, endpoint: str, token: str) -> Origin | None:
        """Return who calls with this token, or None if the call is refused; otherwise as `by_header`.

        Parameters
        ----------
        token
            The token of the call; empty if there is none.
        """
        caller = self._file.find(token) if token else None
        if caller is None:
            self._refuse(endpoint, Denial.WRONG_TOKEN if token else Denial.NO_TOKEN)
            return None
        return Origin(way, caller.name, caller.models)

    def _refuse(self, endpoint: str, reason: Denial) -> None:
        self._gateway.count_denied(reason)
        _LOG.warning("the intake refuses a call of %s: %s", endpoint, _ADVICE[reason])


def _names(certificate: Certificate) -> frozenset[str]:
    """Return the names of a certificate: its alternative names, or its common name where it has none."""
    names = {value for kind, value in certificate.get("subjectAltName", ()) if kind in {"DNS", "URI"}}
    if not names:
        subject = certificate.get("subject", ())
        names = {value for parts in subject for kind, value in parts if kind == "commonName"}
    return frozenset(names)
