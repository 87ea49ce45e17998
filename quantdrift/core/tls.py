"""TLS to a server: the certificates in use, and error messages for failed handshakes."""

import contextlib
import socket
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import msgspec

from quantdrift.core.config.schema import Config, Notify, Shadow, Stream, TelemetryOptions
from quantdrift.core.errors import OperatorError

if TYPE_CHECKING:
    import grpc

# How long closing a connection waits for the server's close_notify.
SHUTDOWN_S: Final = 1.0

_EXPIRED: Final = 10
_NOT_YET_VALID: Final = 9
_MISNAMED: Final = frozenset({62, 64})  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
_UNTRUSTED: Final = frozenset({2, 18, 19, 20, 21})  # an issuer is missing, or is not one of ours
_NO_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"})
_VERSION: Final = 0xA0  # tag of a field that may be missing
_VALIDITY: Final = 3  # after serial number, algorithm and issuer
_UTC_TIME: Final = 0x17
_LONG_FORM: Final = 0x80
_PROBE_S: Final = 2.0
_HTTPS: Final = 443
_WANTED: Final = ("CERTIFICATE_REQUIRED", "HANDSHAKE_FAILURE", "NO_CERTIFICATE")
_REFUSED: Final = ("UNKNOWN_CA", "BAD_CERTIFICATE", "CERTIFICATE_EXPIRED", "CERTIFICATE_UNKNOWN")


class ServerCertificate(msgspec.Struct, frozen=True, kw_only=True):
    """Files in PEM form: the authority that clients trust, and the server's certificate with its key."""

    authority: Path
    certificate: Path
    key: Path

    @classmethod
    def in_directory(cls, directory: Path) -> "ServerCertificate":
        """Return the names of the files in `directory`, whether they exist or not."""
        return cls(
            authority=directory / "ca.pem",
            certificate=directory / "server.pem",
            key=directory / "server.key",
        )


class Tls(msgspec.Struct, frozen=True, kw_only=True):
    """The certificates for connections to one kind of server, with their option names for messages.

    An empty string means no file. Without `ca_file` the system's authorities are trusted. The key may be in the file of
    its certificate.
    """

    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""
    ca_option: str
    certificate_option: str
    key_option: str
    verified: bool = True  # False: encrypt, but accept any certificate
    named: bool = True  # False: accept any name in a trusted certificate

    @classmethod
    def of_stream(cls, stream: Stream) -> "Tls":
        """Return the certificates of the connections to NATS."""
        return cls._of(stream, "stream")

    @classmethod
    def of_shadow(cls, shadow: Shadow) -> "Tls":
        """Return the certificates of the connections to the servers of references, copies and rechecks."""
        return cls._of(shadow, "shadow")

    @classmethod
    def of_telemetry(cls, telemetry: TelemetryOptions) -> "Tls":
        """Return the certificates of the connections to the collector."""
        return cls._of(telemetry, "telemetry")

    @classmethod
    def of_notify(cls, notify: Notify) -> "Tls":
        """Return the certificates of the connections to Alertmanager and the webhook."""
        return cls._of(notify, "notify")

    @classmethod
    def _of(cls, section: Stream | Shadow | TelemetryOptions | Notify, name: str) -> "Tls":
        return cls(
            ca_file=section.ca_file,
            certificate_file=section.certificate_file,
            key_file=section.key_file,
            ca_option=f"{name}.ca_file",
            certificate_option=f"{name}.certificate_file",
            key_option=f"{name}.key_file",
        )

    def context(self) -> ssl.SSLContext:
        """Read the files and return an SSL context; call it for each connection, so that renewed files are used.

        Raises
        ------
        OperatorError
            A file cannot be read or used; the message names its option.
        """
        for option, file in (
            (self.ca_option, self.ca_file),
            (self.certificate_option, self.certificate_file),
            (self.key_option, self.key_file),
        ):
            _check_readable(option, file)
        try:
            context = ssl.create_default_context(cafile=self.ca_file or None)
        except ssl.SSLError as error:
            raise OperatorError(
                f"{self.ca_option}: {self.ca_file} has no certificate in PEM format"
            ) from error
        context.check_hostname = self.verified and self.named
        if not self.verified:
            context.verify_mode = ssl.CERT_NONE
        if self.certificate_file:
            key = self.key_file or self.certificate_file
            try:
                # Without the empty passphrase, OpenSSL asks for one on the terminal and waits.
                context.load_cert_chain(self.certificate_file, key, password="")
            except (ssl.SSLError, ValueError) as error:
                raise OperatorError(
                    f"{self.certificate_option}: {self.certificate_file} with the key in {key} cannot be used: give a"
                    f" certificate in PEM form, and in {self.key_option} the key that belongs to it, without a passphrase"
                ) from error
        return context

    def grpc_credentials(self) -> "grpc.ChannelCredentials":
        """Read the files and return the credentials of a gRPC channel, which always checks the server's name.

        Without `ca_file` the authorities that the gRPC library contains are trusted.

        Raises
        ------
        OperatorError
            A file cannot be read or used; the message names its option.
        """
        import grpc  # noqa: PLC0415 - a sidecar does not need it

        self.context()  # the library would not say which file is wrong

        def read(file: str) -> bytes | None:
            return Path(file).read_bytes() if file else None

        key = self.key_file or self.certificate_file
        try:
            return grpc.ssl_channel_credentials(read(self.ca_file), read(key), read(self.certificate_file))
        except OSError as error:  # replaced just now
            raise OperatorError(f"{self.ca_option}, {self.certificate_option}: {error}") from error

    def grpc_problem(self, url: str, timeout_s: float = _PROBE_S) -> str:
        """Return why the TLS handshake with a gRPC server fails, in words; empty if it succeeds, or nobody answers.

        The gRPC library does not say it. Nothing but a handshake is sent.
        """
        where = urlsplit(url)
        host = where.hostname or ""
        try:
            context = self.context()
            context.set_alpn_protocols(["h2"])
            with (
                socket.create_connection((host, where.port or _HTTPS), timeout_s) as connection,
                context.wrap_socket(connection, server_hostname=host) as encrypted,
            ):
                encrypted.recv(1)  # in TLS 1.3 the server refuses a client's certificate after the handshake
        except ssl.SSLError as error:
            return self.in_words(error)
        except OperatorError as error:
            return str(error)
        except OSError:  # a timeout too
            return ""
        return ""

    def in_words(self, error: ssl.SSLError) -> str:
        """Return why a handshake failed and what to do, in words."""
        if isinstance(error.__cause__, ssl.SSLError):
            error = error.__cause__  # aiohttp, used for wss://, keeps the details there
        if isinstance(error, ssl.SSLCertVerificationError):
            return self._mistrust(error)
        reason = str(error.reason or "")
        if reason.endswith(_WANTED):
            return (
                f"the TLS handshake failed ({reason}): if the server asks for a client certificate, set"
                f" {self.certificate_option} and {self.key_option}"
            )
        if self.certificate_file and reason.endswith(_REFUSED):
            return (
                f"the server refuses our certificate ({reason}): {self.certificate_option} must name one that is valid"
                " and signed by an authority that the server trusts"
            )
        if reason in _NO_TLS:
            return f"the server does not answer in TLS ({reason}): set TLS up at the server"
        return f"the TLS handshake failed ({reason or type(error).__name__})"

    def _mistrust(self, error: ssl.SSLCertVerificationError) -> str:
        problem = str(error.verify_message).rstrip(".")
        if error.verify_code == _EXPIRED:
            return f"its certificate is not accepted ({problem}): renew it at the server"
        if error.verify_code == _NOT_YET_VALID:
            return f"its certificate is not accepted ({problem}): check the clocks of both machines"
        if error.verify_code in _MISNAMED:
            return (
                f"its certificate is not accepted ({problem}): connect with a name in the certificate, or add this"
                " name to it"
            )
        if error.verify_code in _UNTRUSTED and self.ca_file:
            return (
                f"its certificate is not accepted ({problem}): {self.ca_option} ({self.ca_file}) must contain the authority"
                " that signed it"
            )
        if error.verify_code in _UNTRUSTED:
            return f"its certificate is not accepted ({problem}): set {self.ca_option} to the authority that signed it"
        return f"its certificate is not accepted ({problem})"


def certificate_ends(config: Config) -> Iterator[tuple[str, datetime]]:
    """Yield when the certificates of a configuration end, with their options; files that cannot be read are left out.

    Of a file with our own certificate it is the first one, of a file of authorities the one that lasts longest: during a
    replacement it has both.
    """
    intake = config.intake
    files = [
        ("intake.certificate_file", intake.certificate_file),
        ("intake.client_ca_file", intake.client_ca_file),
    ]
    for tls in (
        Tls.of_stream(config.stream),
        Tls.of_shadow(config.shadow),
        Tls.of_telemetry(config.telemetry),
        Tls.of_notify(config.notify),
    ):
        files += [(tls.ca_option, tls.ca_file), (tls.certificate_option, tls.certificate_file)]
    for option, file in files:
        with contextlib.suppress(OSError, ValueError, IndexError):
            ends = [end_of(der) for der in _certificates(file)] if file else []
            if ends:
                yield option, max(ends) if option.endswith("ca_file") else ends[0]


def _certificates(file: str) -> Iterator[bytes]:
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    for part in Path(file).read_text(encoding="ascii", errors="replace").split(begin)[1:]:
        yield ssl.PEM_cert_to_DER_cert(f"{begin}{part.partition(end)[0]}{end}")


def end_of(der: bytes) -> datetime:
    """Return `notAfter` of a certificate (RFC 5280): Python's ssl tells it of a peer's certificate only."""
    signed = _elements(_elements(der)[0][1])[0][1]
    fields = [content for tag, content in _elements(signed) if tag != _VERSION]
    tag, text = _elements(fields[_VALIDITY])[1]
    form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
    return datetime.strptime(text.decode("ascii"), form).replace(tzinfo=UTC)


def _elements(der: bytes) -> list[tuple[int, bytes]]:
    """Return tag and content of the elements of a DER sequence."""
    elements, at = [], 0
    while at < len(der):
        tag, length, at = der[at], der[at + 1], at + 2
        if length & _LONG_FORM:
            n = length ^ _LONG_FORM
            length, at = int.from_bytes(der[at : at + n]), at + n
        elements.append((tag, der[at : at + length]))
        at += length
    return elements


def _check_readable(option: str, file: str) -> None:
    if not file:
        return
    try:
        with Path(file).open("rb"):
            pass
    except OSError as error:
        raise OperatorError(f"{option}: {file} cannot be read: {error.strerror}") from error
