"""Access to the embedded NATS server: TLS, and a key with rights of its own for each process of `quantdrift up`."""

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quantdrift.cli.certificates import server_certificate
from quantdrift.cli.options import embedded_address
from quantdrift.cli.setup import SUFFIX, configuration, keys
from quantdrift.core.process.nats_server import Access
from quantdrift.core.stream.rights import NatsRole
from quantdrift.core.tls import ServerCertificate

if TYPE_CHECKING:
    from quantdrift.core.config.schema import Config, Stream


def access(directory: Path, name: str) -> Access:
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
    return Access(
        users=configuration(name, keys(key_directory(directory))),
        certificate=server_certificate(_certificates(directory)),
    )


def key_directory(directory: Path) -> Path:
    """Return where the keys of the server in `directory` are, one file for each role."""
    return directory / "keys"


def nats_variables(directory: Path, url: str, role: NatsRole | None = None) -> dict[str, str]:
    """Return the environment variables of a process that uses the server.

    Parameters
    ----------
    role
        Whose key it gets; None: no key.
    """
    found = {
        "QUANTDRIFT__STREAM__URL": url,
        "QUANTDRIFT__STREAM__CA_FILE": str(_authority(directory).absolute()),
    }
    if role is not None:
        found["QUANTDRIFT__STREAM__CREDENTIALS_FILE"] = str(_key(directory, role).absolute())
    return found


def at_data(config: "Config", data: Path | None, role: NatsRole = NatsRole.OPERATOR) -> "Config":
    """Return the configuration with the embedded NATS server of a running `quantdrift up`, if it has one.

    Parameters
    ----------
    data
        Data directory of `quantdrift up`; None: leave the configuration as it is.
    role
        Whose rights are needed.

    Raises
    ------
    OperatorError
        It is not the data directory of a running `quantdrift up`.
    """
    if data is None:
        return config
    if not (data / "nats.url").exists() and (data / "dsn").exists():
        return config
    stream = at_server(config.stream, data / "nats", embedded_address(data, "nats.url"), role)
    return msgspec.structs.replace(config, stream=stream)


def at_server(stream: "Stream", directory: Path, url: str, role: NatsRole) -> "Stream":
    """Return the options of the connection to the server in `directory`, with the key of a role."""
    return msgspec.structs.replace(
        stream, url=url, ca_file=str(_authority(directory)), credentials_file=str(_key(directory, role))
    )


def _key(directory: Path, role: NatsRole) -> Path:
    return key_directory(directory) / f"{role}{SUFFIX}"


def _certificates(directory: Path) -> Path:
    return directory / "tls"


def _authority(directory: Path) -> Path:
    return ServerCertificate.in_directory(_certificates(directory)).authority
