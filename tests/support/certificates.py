"""Certificates of authorities that nobody knows, made for one test run by the `openssl` program."""

import subprocess
from pathlib import Path

import msgspec


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """A certificate and its key, as files in PEM form."""

    certificate: Path
    key: Path


class Authority:
    """An authority that signs for 127.0.0.1 and localhost, and for whatever else is asked for.

    Parameters
    ----------
    directory
        Where its files are; made when absent.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._own = Pair(certificate=directory / "ca.pem", key=directory / "ca.key")
        openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", str(self._own.key), "-out", str(self._own.certificate), "-days", "2"),
            *("-subj", f"/CN=authority {directory.name}", "-addext", "keyUsage=critical,keyCertSign,cRLSign"),
        )

    @property
    def file(self) -> Path:
        """Its own certificate: what a client trusts."""
        return self._own.certificate

    def sign(self, name: str, *, names: str = "IP:127.0.0.1,DNS:localhost", expired: bool = False) -> Pair:
        """Return a new certificate for server and client.

        Parameters
        ----------
        name
            Of its files.
        names
            Its subject's alternative names.
        expired
            Whether it ran out yesterday.
        """
        made = Pair(certificate=self._directory / f"{name}.pem", key=self._directory / f"{name}.key")
        request, extensions = self._directory / f"{name}.csr", self._directory / f"{name}.ext"
        extensions.write_text(
            f"subjectAltName={names}\nextendedKeyUsage=serverAuth,clientAuth\nbasicConstraints=CA:FALSE\n"
            "authorityKeyIdentifier=keyid\nsubjectKeyIdentifier=hash\n"
        )
        openssl(
            *("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", str(made.key), "-out", str(request), "-subj", f"/CN={name}"),
        )
        openssl(
            *(
                "x509",
                "-req",
                "-in",
                str(request),
                "-CA",
                str(self._own.certificate),
                "-CAkey",
                str(self._own.key),
            ),
            *("-CAcreateserial", "-days", "-1" if expired else "2", "-extfile", str(extensions)),
            *("-out", str(made.certificate)),
        )
        return made


def openssl(*arguments: str) -> None:
    """Run the program; it must succeed."""
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
