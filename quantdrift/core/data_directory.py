"""The data directory of a running `quantdrift up`: the addresses of its servers, and the keys of each role."""

import os
import socket
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from quantdrift.core.config.load import Role, Secrets, load, load_secrets
from quantdrift.core.config.schema import Config, Stream
from quantdrift.core.errors import OperatorError, QuantdriftError
from quantdrift.core.passed_secrets import variables
from quantdrift.core.stream.rights import NatsRole
from quantdrift.core.tls import ServerCertificate

UP_DATA: Final = Path(".quantdrift")
"""Where `quantdrift up` keeps its data, in the folder in which it is started."""
SUFFIX: Final = ".nk"
"""Of a file with a key of NATS."""
_ANSWER_S: Final = 2.0


def default_data(config_path: Path) -> Path | None:
    """Return the data directory that `quantdrift up` has made in this folder; None: there is none, or a Postgres is configured."""
    if os.environ.get("QUANTDRIFT_DSN") or not any((UP_DATA / name).exists() for name in ("dsn", "nats.url")):
        return None
    try:
        config = load(config_path)
    except QuantdriftError:
        return None  # who loads it next says what is wrong
    return None if config.storage.dsn_file else UP_DATA


def secrets_at(config: Config, role: Role, data: Path | None = None, *, address: str = "dsn") -> Secrets:
    """Return the secrets of `role`.

    Parameters
    ----------
    data
        Data directory of a running `quantdrift up` whose Postgres is used, unless another one is configured.
    address
        The file in it with the address of Postgres.
    """
    environment = variables()
    if data is not None and role is not Role.SIDECAR and not environment.get("QUANTDRIFT_DSN"):
        embedded_address(data, address)
        # The file, not what is in it now: a server that outlives `quantdrift up` finds the next one at another port.
        storage = msgspec.structs.replace(config.storage, dsn_file=str((data / address).absolute()))
        config = msgspec.structs.replace(config, storage=storage)
    return load_secrets(config, role, environment)


def embedded_address(data: Path, name: str) -> str:
    """Return the address of an embedded server from the file `name` of a data directory of `quantdrift up`.

    Raises
    ------
    OperatorError
        There is no such file, or nothing answers at the address.
    """
    try:
        address = (data / name).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise OperatorError(f"{data} has no file `{name}`: start `quantdrift up --data {data}`") from error
    url = urlsplit(address)
    try:
        socket.create_connection((url.hostname, url.port), timeout=_ANSWER_S).close()
    except OSError as error:
        raise OperatorError(
            f"no server answers at {url.hostname}:{url.port}, the address in {data / name}: start"
            f" `quantdrift up --data {data}`, or wait until it is up"
        ) from error
    return address


def at_data(config: Config, data: Path | None, role: NatsRole = NatsRole.OPERATOR) -> Config:
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
    # The file, not what is in it now: a server that outlives `quantdrift up` finds the next one at another port.
    stream = msgspec.structs.replace(stream, url_file=str((data / "nats.url").absolute()))
    return msgspec.structs.replace(config, stream=stream)


def at_server(stream: Stream, directory: Path, url: str, role: NatsRole) -> Stream:
    """Return the options of the connection to the server in `directory`, with the key of a role."""
    return msgspec.structs.replace(
        stream, url=url, ca_file=str(authority(directory)), credentials_file=str(key(directory, role))
    )


def key_directory(directory: Path) -> Path:
    """Return where the keys of the server in `directory` are, one file for each role."""
    return directory / "keys"


def key(directory: Path, role: NatsRole) -> Path:
    """Return the file with the key of a role at the server in `directory`."""
    return key_directory(directory) / f"{role}{SUFFIX}"


def certificates(directory: Path) -> Path:
    """Return where the certificate of the server in `directory` is."""
    return directory / "tls"


def authority(directory: Path) -> Path:
    """Return the file with which clients check that certificate."""
    return ServerCertificate.in_directory(certificates(directory)).authority
