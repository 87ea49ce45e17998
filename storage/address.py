"""The Postgres address: its parts, its TLS settings, and the one function that opens a connection."""

import os
import ssl
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import quote, urlencode

import asyncpg
import msgspec
from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from quantdrift.core.config.address import is_loopback
from quantdrift.core.config.connections import encrypted_words
from quantdrift.core.errors import OperatorError, RetryError, os_error_text
from quantdrift.core.tls import Tls

_FORM: Final = "postgresql://user:password@host:port/name"
# Other parameters that may follow the name; the driver understands them on every connection.
_PASSED_ON: Final = frozenset(
    {
        "database",
        "gsslib",
        "host",
        "krbsrvname",
        "passfile",
        "password",
        "port",
        "prepared_statement_cache_size",
        "target_session_attrs",
        "user",
    }
)
_TLS: Final = ("sslmode", "sslrootcert", "sslcert", "sslkey")
_MODES: Final = ("disable", "require", "verify-ca", "verify-full")
_FALL_BACK: Final = ("allow", "prefer")
_SYSTEM: Final = "system"
_LIBPQ: Final = {"database": "dbname"}  # names of the driver that libpq calls otherwise


Dsn = str | Callable[[], str]
"""The text `postgresql://user:password@host:port/name`, or a function that reads it again, such as `Secrets.current_dsn`."""


class PostgresAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The address of Postgres and the TLS settings of its connections. Its `repr` shows nothing.

    Every connection is opened by `connect`, through a `Connector`: those of the engine's pool, which COPY uses too, the
    leader's and those of the migrations.
    """

    url: URL  # without what concerns TLS, for the driver that we use
    tls: Tls | None  # None: plaintext may be used
    plaintext: bool  # TLS is not even tried

    @classmethod
    def of(cls, dsn: str) -> "PostgresAddress":
        """Read an address; `sslmode`, `sslrootcert`, `sslcert` and `sslkey` mean what they mean to libpq.

        Where one of the three files is given without `sslmode`, the mode is `verify-full`. Without any of the four, the
        server must be on this machine; then the driver tries TLS, unchecked, and falls back to plaintext.

        Raises
        ------
        OperatorError
            It is not of the form `postgresql://user:password@host:port/name`, has unknown parameters, its `sslmode` would
            fall back to plaintext, or it has none and the server is not on this machine.
        """
        try:
            url = make_url(dsn, keep_blank_values=True)
        except (ArgumentError, ValueError) as error:
            # Not chained: the parser's message repeats the address, including the password.
            raise OperatorError(
                f"the Postgres address cannot be read ({type(error).__name__}): it has the form {_FORM}"
            ) from None
        if url.drivername not in {"postgresql", "postgres"}:
            raise OperatorError("the Postgres address must begin with postgresql://")
        _refuse_unknown(url.query)
        asked = {name: _single(url.query, name) for name in _TLS if name in url.query}
        mode = _mode(asked)
        address = cls(
            url=url.difference_update_query(_TLS).set(drivername="postgresql+asyncpg"),
            tls=_tls(mode, asked) if mode not in {"", "disable"} else None,
            plaintext=mode == "disable",
        )
        if not mode and not address.is_local:
            raise OperatorError(
                f"the Postgres address has no sslmode, and {address.where} is not this machine: write sslmode=verify-full and"
                " sslrootcert=FILE, or sslmode=disable if something else encrypts this connection, such as a service mesh"
            )
        return address

    def __repr__(self) -> str:
        return "Address(...)"

    @property
    def arguments(self) -> dict[str, Any]:
        """The driver's arguments for server, database and user."""
        (_, arguments) = self.url.get_dialect()().create_connect_args(self.url)
        arguments.pop("prepared_statement_cache_size", None)  # of the engine, not of the driver
        return dict(arguments)

    @property
    def is_local(self) -> bool:
        """Whether every server is on this machine: a Unix socket, `localhost` or a loopback address."""
        return all(host.startswith("/") or is_loopback(host) for host in self._hosts)

    @property
    def protection(self) -> str:
        """How the connection is protected, in words."""
        if self.tls is None:
            return (
                "plaintext on this machine"
                if self.is_local
                else "PLAINTEXT over a network, as sslmode=disable says"
            )
        if not self.tls.verified:
            return "encrypted, server NOT VERIFIED: sslmode=require names no sslrootcert"
        words = encrypted_words(ca_file=self.tls.ca_file, certificate_file=self.tls.certificate_file)
        return words if self.tls.named else f"{words}, its name is not checked (sslmode=verify-ca)"

    async def connect(self, **options: Any) -> asyncpg.Connection:
        """Connect the driver; certificates are read for each connection, so that renewed ones are used.

        Parameters
        ----------
        options
            For `asyncpg.connect`: `arguments`, and whatever else a caller needs.

        Raises
        ------
        OperatorError
            TLS is required, and the server offers none, its certificate is not accepted, or a file cannot be used. Nothing
            but the request for TLS was sent.
        RetryError
            The server cannot be reached.
        """
        try:
            return await self._connect(options)
        except (OSError, TimeoutError) as error:
            raise RetryError(f"Postgres at {self.where} is not available: {os_error_text(error)}") from error

    async def _connect(self, options: dict[str, Any]) -> asyncpg.Connection:
        if self.plaintext:
            options["ssl"] = False
        if self.tls is None:
            return await asyncpg.connect(**options)
        try:
            return await asyncpg.connect(ssl=self.tls.context(), **options)
        except ssl.SSLError as error:
            raise OperatorError(f"Postgres at {self.where}: {self.tls.in_words(error)}") from error
        except ConnectionError as error:
            if "rejected SSL upgrade" not in str(error):
                raise
            raise OperatorError(
                f"Postgres at {self.where}: TLS is asked for, and the server offers none; no user name or password was"
                " sent to it. Set `ssl = on` at the server; for plaintext write sslmode=disable in the address and set no"
                " certificate files"
            ) from error

    @property
    def where(self) -> str:
        """HOST:PORT of the server, or what the driver makes of an address without them."""
        arguments = self.arguments
        hosts, ports = arguments.get("host", ", ".join(self._hosts)), arguments.get("port", 5432)
        if isinstance(hosts, list) and isinstance(ports, list):  # the driver tries one after the other
            return ", ".join(f"{host}:{port}" for host, port in zip(hosts, ports, strict=False))
        return f"{hosts}:{ports}"

    @property
    def servers(self) -> list[tuple[str, int]]:
        """Host and port of each server that is reached by TCP."""
        arguments = self.arguments
        ports = arguments.get("port") or 5432
        each = ports if isinstance(ports, list) else [ports] * len(self._hosts)
        return [
            (host, int(port))
            for host, port in zip(self._hosts, each, strict=False)
            if not host.startswith("/")
        ]

    @property
    def libpq(self) -> str:
        """The address for libpq, with the password: the same servers, and TLS that is checked as by `connect`."""
        arguments = self.arguments
        parts = {"host": ",".join(self._hosts)}
        for name, value in arguments.items():
            parts[_LIBPQ.get(name, name)] = (
                ",".join(map(str, value)) if isinstance(value, list) else str(value)
            )
        if self.plaintext:
            parts["sslmode"] = "disable"
        elif (tls := self.tls) is not None:
            parts["sslmode"] = "require" if not tls.verified else "verify-full" if tls.named else "verify-ca"
            files = {
                "sslrootcert": (tls.ca_file or _SYSTEM) if tls.verified else "",
                "sslcert": tls.certificate_file,
                "sslkey": tls.key_file or tls.certificate_file,
            }
            parts |= {name: path for name, path in files.items() if path}
        return f"postgresql://?{urlencode(parts, quote_via=quote)}"

    @property
    def _hosts(self) -> list[str]:
        """The hosts that the driver connects to; without one in the address, those of PGHOST."""
        hosts = self.arguments.get("host") or os.environ.get("PGHOST") or "localhost"
        return hosts if isinstance(hosts, list) else hosts.split(",")


def with_user(dsn: str, user: str, password: str) -> str:
    """Return an address with another user, without the client certificate of the first one.

    Raises
    ------
    OperatorError
        The address cannot be read.
    """
    PostgresAddress.of(dsn)
    url = make_url(dsn, keep_blank_values=True)
    url = url.difference_update_query(("user", "password", "passfile", "sslcert", "sslkey"))
    return url.set(username=user, password=password).render_as_string(hide_password=False)


class Connector:
    """Opens connections. It reads the address for each of them, so that a new password needs no restart.

    Parameters
    ----------
    dsn
        The address, or a function that reads it.

    Attributes
    ----------
    address : Address
        The address that was read last.

    Raises
    ------
    OperatorError
        The address cannot be read.
    """

    def __init__(self, dsn: Dsn) -> None:
        self._dsn = dsn
        self.address = self._read()
        self._first = frozenset(self.address.arguments)

    async def connect(self, **options: Any) -> asyncpg.Connection:
        """Connect to the server that the address names now; parameters and errors are those of `PostgresAddress.connect`.

        Parameters
        ----------
        options
            For `asyncpg.connect`; server, database and user in it are replaced by those of the address.
        """
        self.address = self._read()
        others = {name: value for name, value in options.items() if name not in self._first}
        return await self.address.connect(**self.address.arguments, **others)

    def _read(self) -> PostgresAddress:
        return PostgresAddress.of(self._dsn if isinstance(self._dsn, str) else self._dsn())


def _refuse_unknown(query: Mapping[str, Any]) -> None:
    if "ssl" in query:
        raise OperatorError(
            f"`ssl` in the Postgres address is not understood: write sslmode={'|'.join(_MODES)}"
        )
    for name in sorted(set(query) - _PASSED_ON - set(_TLS)):
        raise OperatorError(
            f"`{name}` in the Postgres address is not understood: remove it. Understood are"
            f" {', '.join(sorted(_PASSED_ON | set(_TLS)))}"
        )


def _single(query: Mapping[str, Any], name: str) -> str:
    value = query[name]
    if not isinstance(value, str):
        raise OperatorError(f"`{name}` is given twice for the Postgres address: name it there once")
    if not value:
        raise OperatorError(f"`{name}` in the Postgres address is empty: give it a value, or remove it")
    return value


def _mode(asked: Mapping[str, str]) -> str:
    """Return the mode; empty where neither a mode nor a file is given."""
    mode = asked.get("sslmode", "verify-full" if asked else "")
    if mode in _FALL_BACK:
        raise OperatorError(
            f"sslmode={mode} in the Postgres address falls back to plaintext: write sslmode=verify-full, or"
            " sslmode=disable where plaintext is acceptable"
        )
    if mode and mode not in _MODES:
        raise OperatorError(f"sslmode in the Postgres address must be one of {', '.join(_MODES)}")
    if mode == "disable" and len(asked) > 1:
        files = ", ".join(name for name in asked if name != "sslmode")
        raise OperatorError(
            f"sslmode=disable in the Postgres address contradicts {files}: write sslmode=verify-full, or"
            " remove the files"
        )
    return mode


def _tls(mode: str, asked: Mapping[str, str]) -> Tls:
    authorities = asked.get("sslrootcert", "")
    if "sslkey" in asked and "sslcert" not in asked:
        raise OperatorError(
            "sslkey in the Postgres address is without sslcert: name the certificate of this key"
        )
    if mode == "verify-ca" and not authorities:
        raise OperatorError(
            "sslmode=verify-ca in the Postgres address needs sslrootcert: the file of the authority to trust"
        )
    if authorities == _SYSTEM and mode != "verify-full":
        raise OperatorError("sslrootcert=system in the Postgres address needs sslmode=verify-full")
    return Tls(
        ca_file="" if authorities == _SYSTEM else authorities,
        certificate_file=asked.get("sslcert", ""),
        key_file=asked.get("sslkey", ""),
        ca_option="sslrootcert in the Postgres address",
        certificate_option="sslcert in the Postgres address",
        key_option="sslkey in the Postgres address",
        # As libpq has it: `require` checks the authority only where one is named.
        verified=mode != "require" or bool(authorities),
        named=mode == "verify-full",
    )
