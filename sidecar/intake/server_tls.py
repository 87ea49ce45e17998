"""TLS at the ports of the intake: their files are read again when they change.

Where callers may have certificates, one that the authorities did not sign, or that has expired, ends the handshake. A caller
without a certificate needs a token.
"""

import logging
import os
import ssl
from pathlib import Path

from quantdrift.core.config.serving import Intake
from quantdrift.core.errors import OperatorError

_LOG = logging.getLogger(__name__)


class ServerTls:
    """The certificate of the intake's ports, and the authorities of its callers.

    Parameters
    ----------
    certificate_file, key_file
        The certificate with those of its authorities, and its key, in PEM.
    client_ca_file
        The authorities that sign the certificates of callers, in PEM; empty: callers have none.
    protocols
        Names of the protocols that a port speaks, for clients that ask for one (ALPN).

    Raises
    ------
    OperatorError
        The files are no certificate with its key, or no authorities.
    """

    def __init__(self, certificate_file: str, key_file: str, client_ca_file: str, *protocols: str) -> None:
        self._files = (certificate_file, key_file)
        self._client_ca_file = client_ca_file
        self._protocols = protocols
        self._seen = self._times()
        self.context = self._current = self._read()
        # A server keeps its context: each handshake goes on with the one that has the newest files.
        self.context.sni_callback = self._use_current

    @classmethod
    def of(cls, intake: Intake, *protocols: str) -> "ServerTls | None":
        """Return the certificate that is configured, None if there is none; errors as above."""
        if not intake.certificate_file:
            return None
        return cls(intake.certificate_file, intake.key_file, intake.client_ca_file, *protocols)

    def refresh(self) -> None:
        """Use what the files contain now, for new connections; wrong files change nothing.

        Called about once a second.
        """
        seen = self._times()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._current = self._read()
        except OperatorError as error:
            _LOG.error("the changed certificates are refused, the previous ones stay in effect: %s", error)
        else:
            _LOG.info("reloaded the certificates of the intake")

    def _use_current(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self._current

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self._protocols:
            context.set_alpn_protocols(list(self._protocols))
        certificate, key = self._files
        try:
            context.load_cert_chain(certificate, key, password=_no_password)
        except (OSError, ssl.SSLError, ValueError) as error:
            why = error.strerror if type(error) is OSError else type(error).__name__
            for file in self._files:
                if not os.access(file, os.R_OK):
                    why = f"{file} cannot be read"
            raise OperatorError(
                f"intake.certificate_file {certificate} and intake.key_file {key} are no certificate with its key: {why}"
            ) from error
        if self._client_ca_file:
            self._trust_callers(context)
        return context

    def _trust_callers(self, context: ssl.SSLContext) -> None:
        context.verify_mode = ssl.CERT_OPTIONAL
        # Each connection verifies the certificate: TLS 1.2 could go on with an earlier session instead.
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0
        try:
            context.load_verify_locations(self._client_ca_file)
        except (OSError, ssl.SSLError) as error:
            why = error.strerror if type(error) is OSError else "it has no certificate in PEM"
            raise OperatorError(
                f"intake.client_ca_file {self._client_ca_file} cannot be used: {why}"
            ) from error

    def _times(self) -> tuple[int, ...]:
        """Return what changes with the content of the files."""
        times = []
        for file in (*self._files, *([self._client_ca_file] if self._client_ca_file else [])):
            try:
                status = Path(file).stat()
            except OSError:
                times.append(0)
            else:
                times += [status.st_mtime_ns, status.st_ino]
        return tuple(times)


def _no_password() -> str:
    raise ValueError("the key has a password")
