"""TLS at the ports of the intake: their certificate is read again when its file changes."""

import logging
import os
import ssl
from pathlib import Path

from quantdrift.core.config.serving import Intake
from quantdrift.core.errors import OperatorError

_LOG = logging.getLogger(__name__)


class ServerTls:
    """The certificate of the intake's ports.

    Parameters
    ----------
    certificate_file, key_file
        The certificate with those of its authorities, and its key, in PEM.
    protocols
        Names of the protocols that a port speaks, for clients that ask for one (ALPN).

    Raises
    ------
    OperatorError
        The files are no certificate with its key.
    """

    def __init__(self, certificate_file: str, key_file: str, *protocols: str) -> None:
        self._files = (certificate_file, key_file)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        if protocols:
            self.context.set_alpn_protocols(list(protocols))
        self._seen = self._times()
        self._read(self.context)

    @classmethod
    def of(cls, intake: Intake, *protocols: str) -> "ServerTls | None":
        """Return the certificate that is configured, None if there is none; errors as above."""
        if not intake.certificate_file:
            return None
        return cls(intake.certificate_file, intake.key_file, *protocols)

    def refresh(self) -> None:
        """Use the certificate that the files contain now, for new connections; wrong files change nothing.

        Called about once a second.
        """
        seen = self._times()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._read(
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            )  # a pair that does not fit must not be half in effect
            self._read(self.context)
        except OperatorError as error:
            _LOG.error("the changed certificate is refused, the previous one stays in effect: %s", error)
        else:
            _LOG.info("the changed certificate of the intake is in effect")

    def _read(self, context: ssl.SSLContext) -> None:
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

    def _times(self) -> tuple[int, ...]:
        """Return what changes with the content of the files."""
        times = []
        for file in self._files:
            try:
                found = Path(file).stat()
            except OSError:
                times.append(0)
            else:
                times += [found.st_mtime_ns, found.st_ino]
        return tuple(times)


def _no_password() -> str:
    raise ValueError("the key has a password")
