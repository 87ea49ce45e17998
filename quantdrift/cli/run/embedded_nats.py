"""Access to the embedded NATS server: certificates for the loopback addresses, and a key for each process of `quantdrift up`."""

import asyncio
import contextlib
import ipaddress
import shutil
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from quantdrift.cli.run.setup import configuration, keys
from quantdrift.core.config.schema import MIB, Stream
from quantdrift.core.data_directory import at_server, authority, certificates, key, key_directory
from quantdrift.core.errors import OperatorError, QuantdriftError
from quantdrift.core.process.nats_server import ENCRYPTION, ServerAccess, server_url
from quantdrift.core.stream.rights import NatsRole
from quantdrift.core.tls import ServerCertificate

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from quantdrift.core.stream.connection import Queue

LEAST_FREE_BYTES: Final = 64 * MIB
"""Free disk below which an embedded server keeps no exemplars: twice what it needs to be started again after a full disk."""
_CHANGE_S: Final = 5.0
Done = TypeVar("Done")
_VALID: Final = timedelta(days=3650)
_RENEWED_BEFORE: Final = timedelta(days=90)


def access(directory: Path, name: str) -> ServerAccess:
    """Return who may do what at the server; keys and certificate are made if they are missing.

    Parameters
    ----------
    directory
        The server's.
    name
        `stream.name`.

    Raises
    ------
    OperatorError
        The keys cannot be written or read, or a package is missing.
    OSError
        The certificate cannot be written.
    """
    return ServerAccess(
        users=configuration(name, keys(key_directory(directory))),
        certificate=server_certificate(certificates(directory)),
    )


def nats_variables(directory: Path, url: str, role: NatsRole | None = None) -> dict[str, str]:
    """Return the environment variables of a process that uses the server.

    Parameters
    ----------
    role
        Whose key it gets; None: no key.
    """
    variables = {
        "QUANTDRIFT__STREAM__URL": url,
        "QUANTDRIFT__STREAM__CA_FILE": str(authority(directory).absolute()),
    }
    if role is not None:
        variables["QUANTDRIFT__STREAM__CREDENTIALS_FILE"] = str(key(directory, role).absolute())
    return variables


class ExemplarRoom:
    """Keeps exemplars off a disk that is almost full: exchanges, and so comparisons, need it more.

    A server whose disk is full stores nothing until it is started again. Exemplars are the only part of it that nobody misses
    at once, so they go first.

    Parameters
    ----------
    directory, name
        The directory of the server, and `stream.name`.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = name
        self._mark = directory / "exemplars-refused"  # also for the next process of this server

    def look(self, port: int, free_bytes: int) -> str:
        """Delete exemplars if the disk is almost full, and accept new ones once there is room again; say what was done, if anything."""
        if not (self._directory / ENCRYPTION).exists():  # no model has ever kept exemplars
            return ""
        if free_bytes < LEAST_FREE_BYTES:
            return self._refuse(port, free_bytes)
        if self._mark.exists():
            return self._accept(port, free_bytes)
        return ""

    def _refuse(self, port: int, free_bytes: int) -> str:
        deleted = self._at_server(port, lambda queue: queue.refuse_exemplars())
        if deleted is None:
            return ""
        n, limit = deleted
        with contextlib.suppress(OSError):
            self._mark.write_text(str(limit), "ascii")
        return (
            f"{n:,} exemplars were deleted, and none is kept: the disk of {self._directory} has {free_bytes // MIB} MiB left, and"
            f" exchanges need it more. Exemplars are kept again once {(LEAST_FREE_BYTES + limit) // MIB} MiB are free"
        )

    def _accept(self, port: int, free_bytes: int) -> str:
        text = self._mark.read_text("ascii")
        limit = int(text) if text.isdecimal() else Stream().exemplar_bytes

        async def accept(queue: "Queue") -> bool:
            await queue.ensure_exemplars()
            return True

        if free_bytes < LEAST_FREE_BYTES + limit or not self._at_server(port, accept, limit):
            return ""
        self._mark.unlink(missing_ok=True)
        return "exemplars are kept again"

    def _at_server(
        self, port: int, change: "Callable[[Queue], Awaitable[Done]]", limit: int | None = None
    ) -> "Done | None":
        """Change the stream as the administrator; return None if the server does not answer: the next look tries it again."""
        from quantdrift.core.stream.connection import Queue

        wanted = Stream(name=self._name, exemplar_bytes=limit or Stream().exemplar_bytes)
        stream = at_server(wanted, self._directory, server_url(port), NatsRole.ADMIN)

        async def done() -> Done:
            async with asyncio.timeout(_CHANGE_S):
                queue = await Queue.connect(stream, client_name="quantdrift exemplars", role=NatsRole.ADMIN)
                try:
                    return await change(queue)
                finally:
                    await queue.close()

        try:
            return asyncio.run(done())
        except (QuantdriftError, TimeoutError):
            return None


def server_certificate(directory: Path) -> ServerCertificate:
    """Return the certificate of a server on 127.0.0.1; it is made if it is missing or ends within 90 days.

    The key of the authority is thrown away once it has signed: nobody can make another certificate that clients accept.

    Parameters
    ----------
    directory
        Where the files are; only its owner can read it.

    Raises
    ------
    OperatorError
        The package `cryptography` is missing.
    OSError
        The files cannot be written.
    """
    files = ServerCertificate.in_directory(directory)
    if not _is_valid(files):
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f"{directory.name}-", dir=directory.parent))
        try:
            _make(ServerCertificate.in_directory(temporary))
            shutil.rmtree(directory, ignore_errors=True)
            temporary.rename(directory)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return files


def _is_valid(files: ServerCertificate) -> bool:
    try:
        from cryptography import x509
    except ImportError as error:
        raise OperatorError("cryptography is missing: install quantdrift[embedded]") from error
    try:
        certificates = [
            x509.load_pem_x509_certificate(path.read_bytes()) for path in (files.authority, files.certificate)
        ]
        return files.key.stat().st_size > 0 and all(
            certificate.not_valid_after_utc > datetime.now(UTC) + _RENEWED_BEFORE
            for certificate in certificates
        )
    except (OSError, ValueError):
        return False


def _make(files: ServerCertificate) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    now = datetime.now(UTC)
    authority_key, server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority, server = (
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        for name in ("quantdrift up on this host", "an embedded server of quantdrift up")
    )

    def unsigned(subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .issuer_name(authority)
            .subject_name(subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))  # clocks are set back, too
            .not_valid_after(now + _VALID)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
            )
        )

    names = [
        x509.DNSName("localhost"),
        *(x509.IPAddress(ipaddress.ip_address(address)) for address in ("127.0.0.1", "::1")),
    ]
    signed = {
        files.authority: unsigned(authority, authority_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(authority_key, hashes.SHA256()),
        files.certificate: unsigned(server, server_key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(authority_key, hashes.SHA256()),
    }
    for path, certificate in signed.items():
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    files.key.touch(mode=0o600)
    files.key.write_bytes(
        server_key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
