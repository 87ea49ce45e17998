"""Certificates of the embedded servers: made here, for this host, and valid for the loopback addresses alone."""

import ipaddress
import shutil
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from quantdrift.core.errors import OperatorError
from quantdrift.core.tls import ServerCertificate

_VALID: Final = timedelta(days=3650)
_RENEWED_BEFORE: Final = timedelta(days=90)


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
