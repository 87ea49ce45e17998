"""Network addresses in options, HOST:PORT or the URL of a server, with one parser for all code that listens or connects."""

import ipaddress
import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Final
from urllib.parse import urlsplit

import msgspec

_MOST_PORT = 65_535
_LOCALHOST = frozenset({"127.0.0.1", "::1"})
_HOST = re.compile(r"[^\s/?#@,:\[\]`'\"\\]+")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_SECRET_PATHS = frozenset({"notify.webhook_url"})
_CREDENTIALS = re.compile(r"[^@/]*@")
_PORT = re.compile(r"[0-9]{1,9}")
PLAINTEXT: Final = "+plaintext"
"""Follows the scheme of an address where plaintext over a network is intended: `nats+plaintext://HOST:PORT`."""
_ENCRYPTED: Final[Mapping[str, str]] = MappingProxyType(
    {"nats": "tls", "ws": "wss", "http": "https", "grpc": "grpcs"}
)


def host_of(header: str) -> str:
    """Return the name in a Host header, in lower case, without port and brackets."""
    host = header.lower().partition("/")[0]
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def is_own_host(header: str, names: Collection[str]) -> bool:
    """Return whether a Host header has one of a server's names, `localhost` or an IP address.

    A page of somebody else whose name was made to point at the server (DNS rebinding) comes with its own name. An IP
    address is no name that can be made to point elsewhere.
    """
    name = host_of(header)
    if name in names or name == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Address(msgspec.Struct, frozen=True):
    """A host and a port.

    Parameters
    ----------
    host
        A name or an IP address; IPv6 without brackets.
    port
        From 0 to 65535; 0 lets the system choose one to listen on.
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether the host is a loopback address or `localhost`, which need no look-up."""
        return all(_ip(host).is_loopback for host in self._reached)

    def reaches(self, listener: "Address", *, is_own: bool = False) -> bool:
        """Return whether a connection to this address reaches a listener on `listener`.

        Only the texts are compared: another name than `localhost`, or a network address of this machine, can reach a
        listener on all interfaces although this returns False.

        Parameters
        ----------
        listener
            Address of a listener on this machine.
        is_own
            This host is known to be an address of this machine.
        """
        if self.port != listener.port or not self.port:
            return False
        if self.host.lower() == listener.host.lower():
            return True
        bound = _LOCALHOST if listener.host.lower() == "localhost" else {listener.host}
        return any(_takes(bound_host, host, is_own=is_own) for host in self._reached for bound_host in bound)

    @property
    def dialled(self) -> "Address":
        """The address that a client on the listener's machine connects to: a wildcard becomes loopback."""
        wild = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - listened on, not dialled
        return Address(wild.get(self.host, self.host), self.port)

    @property
    def _reached(self) -> frozenset[str]:
        """The loopback addresses that a local client reaches, or the host unchanged."""
        if self.host.lower() == "localhost":
            return _LOCALHOST
        return frozenset({self.dialled.host})


class AddressError(ValueError):
    """A text that is not a valid address.

    Parameters
    ----------
    why
        What is wrong with it.
    form
        A suggestion; kept in `instead` only if it is a valid address.
    """

    def __init__(self, why: str, form: str = "") -> None:
        super().__init__(why)
        self.instead = form if form and _is_one(form) else ""


class _Name:
    """A host that is not an IP address."""

    is_loopback = False


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | _Name:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return _Name()


def _takes(bound: str, host: str, *, is_own: bool) -> bool:
    """Return whether a listener bound to one address takes connections to a host."""
    bound_ip, host_ip = _ip(bound), _ip(host)
    if isinstance(bound_ip, _Name) or isinstance(host_ip, _Name):
        return False
    if bound_ip.is_unspecified:  # :: takes IPv4 too
        return (is_own or host_ip.is_loopback) and (bound_ip.version == 6 or host_ip.version == 4)
    return bound_ip == host_ip


def read_address(text: str) -> Address:
    """Return the address that `text` names.

    Raises
    ------
    AddressError
        It is not valid. The message says why, and `instead` has a correct form if there is an obvious one.
    """
    scheme = _SCHEME.match(text)
    if scheme:
        rest = _CREDENTIALS.sub("", text[scheme.end() :], count=1)
        raise AddressError("it is a URL, and it must be HOST:PORT", re.split(r"[/?#]", rest)[0])
    host, colon, port = text.rpartition(":")
    if not colon:
        raise AddressError("it must be HOST:PORT", f"127.0.0.1:{text}" if text.isdecimal() else "")
    if not host:
        raise AddressError("it must be HOST:PORT, and the host is missing", f"0.0.0.0:{port}")
    if not _PORT.fullmatch(port):
        raise AddressError("it must be HOST:PORT, and the port is not a number")
    if int(port) > _MOST_PORT:
        raise AddressError(f"it must be HOST:PORT, and the highest port is {_MOST_PORT}")
    return Address(_host(host, port), int(port))


def _host(host: str, port: str) -> str:
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if isinstance(_ip(bare.partition("%")[0]), ipaddress.IPv6Address):
        if bare == host:
            raise AddressError("it must be HOST:PORT, and an IPv6 address needs brackets", f"[{host}]:{port}")
        return bare
    if bare != host or not _HOST.fullmatch(host):
        raise AddressError("it must be HOST:PORT, and the host is neither a name nor an IP address")
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise AddressError("it must be HOST:PORT, and the host is not a valid name") from error
    return host


def _is_one(form: str) -> bool:
    try:
        read_address(form)
    except AddressError:
        return False
    return True


class ServerUrl(msgspec.Struct, frozen=True, kw_only=True):
    """The URL of a server that quantdrift connects to.

    Plaintext is allowed to this machine, and where the scheme says so (`http+plaintext://`). Everything else is encrypted.

    Parameters
    ----------
    url
        The URL as libraries understand it, with its credentials and without `+plaintext`.
    scheme
        Such as `tls` or `http`, in lower case and without `+plaintext`.
    host
        A name or an IP address; IPv6 without brackets.
    is_plaintext_by_name
        Whether the scheme ends with `+plaintext`.
    """

    url: str
    scheme: str
    host: str
    is_plaintext_by_name: bool

    @property
    def is_encrypted(self) -> bool:
        """Whether the scheme requires TLS."""
        return self.scheme in _ENCRYPTED.values()

    @property
    def is_loopback(self) -> bool:
        """Whether the host is `localhost` or a loopback address."""
        return is_loopback(self.host)

    @property
    def may_be_plaintext(self) -> bool:
        """Whether a connection without TLS is allowed."""
        return not self.is_encrypted and (self.is_plaintext_by_name or self.is_loopback)

    @property
    def shown(self) -> str:
        """The URL as it was written, without credentials: for logs and messages."""
        scheme, _, rest = self.url.partition("://")
        mark = PLAINTEXT if self.is_plaintext_by_name else ""
        return f"{scheme}{mark}://{_CREDENTIALS.sub('', rest, count=1)}"

    def shown_in(self, option: str) -> str:
        """Return the URL as `shown`, without its path where that may be a secret."""
        scheme, separator, rest = self.shown.partition("://")
        return f"{scheme}{separator}{rest.partition('/')[0]}" if option in _SECRET_PATHS else self.shown

    def problem(self, option: str) -> str:
        """Return what is wrong with the URL in `option` and what to write; empty if it is allowed."""
        shown = self.shown_in(option)
        rest = shown.partition("://")[2]
        if self.is_encrypted and self.is_plaintext_by_name:
            return f"{option} is `{shown}`, which contradicts itself: write {self.scheme}://{rest}"
        if self.is_encrypted or self.may_be_plaintext:
            return ""
        return (
            f"{option} is `{shown}`, which is plaintext over a network: write {_ENCRYPTED[self.scheme]}://{rest}, or "
            f"{self.scheme}{PLAINTEXT}://{rest} if something else encrypts this connection, such as a service mesh"
        )


def read_server_url(text: str, *schemes: str) -> ServerUrl:
    """Return the URL that `text` names.

    Parameters
    ----------
    schemes
        Those that are allowed, without `+plaintext`; a text without a scheme has the first of them.

    Raises
    ------
    AddressError
        It has another scheme, or no host. The message shows no credentials.
    """
    scheme, separator, rest = text.strip().partition("://")
    if not separator:
        scheme, rest = schemes[0], scheme
    name = scheme.lower().removesuffix(PLAINTEXT)
    if name not in schemes:
        raise AddressError(
            f"it must begin with {' or '.join(f'{allowed_scheme}://' for allowed_scheme in schemes)}"
        )
    url = f"{name}://{rest}"
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise AddressError(f"it must be {name}://HOST:PORT") from error
    if not host:
        raise AddressError(f"it must be {name}://HOST:PORT, and the host is missing")
    return ServerUrl(url=url, scheme=name, host=host, is_plaintext_by_name=scheme.lower().endswith(PLAINTEXT))


def without_mark(url: str) -> str:
    """Return a URL without `+plaintext`: the mark says how the server is reached, and not which one it is."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme.removesuffix(PLAINTEXT)}{separator}{rest}"


def is_loopback(host: str) -> bool:
    """Return whether a host is a loopback address or `localhost`. Other names count as remote, whatever they resolve to."""
    return host.lower() == "localhost" or _ip(host).is_loopback
