"""Who may read the page: everybody on this machine, whoever has a token, or whom a provider or a trusted proxy names.

A session is a cookie with a name, a number, an end and a mark that only this process can make, of the token too: it ends when the person
logs out, when the token is replaced, and with this process. A right token is never refused, however many wrong ones came from the
same address: behind a proxy everybody has one. That tokens cannot be guessed is the matter of their length.
"""

import base64
import hashlib
import hmac
import ipaddress
import logging
import secrets
from collections import OrderedDict
from pathlib import Path
from typing import Final

import msgspec
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from quantdrift.core.clock import Clock
from quantdrift.core.config.address import host_of, is_own_host, read_address
from quantdrift.core.config.callers import ALL_SCOPES, Caller, TokenScope, find_caller, read_callers
from quantdrift.core.config.web import Web
from quantdrift.core.errors import OperatorError
from quantdrift.core.text import plain
from quantdrift.show.page.oidc import LoginError, Provider

_LOG: Final = logging.getLogger(__name__)
SESSION_S: Final = 12 * 3600
"""Time after which a person logs in again: a shift."""
OIDC_SESSION_S: Final = 4 * 3600
"""The same after a login at a provider: whoever was removed there goes on for so long."""
MOST_FAILURES: Final = 10
"""Wrong tokens of one address within `WINDOW_S`; after more it is told to wait, and they are not logged any more."""
_MOST_ENDED: Final = 10_000
WINDOW_S: Final = 60.0
_MOST_ADDRESSES: Final = 1024
_MOST_NAME: Final = 200


class Person(msgspec.Struct, frozen=True, kw_only=True):
    """Who reads the page.

    Parameters
    ----------
    name
        As the token file or the proxy names the person; empty where nobody logs in.
    scopes
        What the person, or the program, may do.
    """

    name: str = ""
    scopes: frozenset[TokenScope] = ALL_SCOPES


class Access:
    """Decides who may read the page.

    Parameters
    ----------
    token
        Content of the token file or variable at the start; empty: none.
    clock
        Ends sessions and windows of attempts.
    oidc_secret
        Of the page as a client of the provider; empty: none.

    Attributes
    ----------
    provider : Provider | None
        Where people log in with OpenID Connect; None: nowhere.
    """

    def __init__(self, web: Web, token: str, clock: Clock, oidc_secret: str = "") -> None:
        self._web = web
        self.provider: Provider | None = None
        if web.oidc.issuer:
            self.provider = Provider(web, oidc_secret, clock)
        self._token = token
        self._clock = clock
        self._networks = [ipaddress.ip_network(proxy) for proxy in web.proxies]
        self._key = secrets.token_bytes(32)
        self._failures: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._ended: dict[str, float] = {}  # marks of sessions that were logged out, until their end
        self._hosts = {read_address(web.listen).host.lower()}
        if web.url:
            self._hosts.add(host_of(web.url.partition("://")[2]))

    @property
    def has_login(self) -> bool:
        """Whether people log in with a token."""
        return bool(self._token)

    @property
    def has_oidc(self) -> bool:
        """Whether people log in at a provider, from the page."""
        return self.provider is not None and not self._web.identity_header

    @property
    def is_encrypted(self) -> bool:
        """Whether people reach the page by https, so that the cookie is for https alone."""
        return self._web.url.startswith("https://")

    @property
    def cookie(self) -> str:
        """Name of the cookie: over https one that no other host of the domain can set."""
        return "__Host-quantdrift_session" if self.is_encrypted else "quantdrift_session"

    @property
    def login_cookie(self) -> str:
        """Name of the cookie of a login that has begun."""
        return "__Host-quantdrift_login" if self.is_encrypted else "quantdrift_login"

    def allows_host(self, host: str) -> bool:
        """Return whether a request's Host is a name of this page."""
        return is_own_host(host, self._hosts)

    def allows_origin(self, origin: str, host: str) -> bool:
        """Return whether a form was sent by a page of this server: its Origin has the same host and port."""
        scheme, separator, rest = origin.partition("://")
        return bool(separator) and scheme in {"http", "https"} and rest.lower() == host.lower()

    async def identify(
        self, peer: str, headers: CIMultiDictProxy[str] | CIMultiDict[str], cookie: str
    ) -> Person | None:
        """Return who sent a request, None if the person must log in, or has two names.

        Parameters
        ----------
        peer
            IP address of the sender.
        cookie
            Of the session; empty: none.
        """
        if self._web.identity_header and self._is_proxy(peer):
            names = headers.getall(self._web.identity_header, [])
            if len(names) > 1:
                return None  # one of them is the client's
            if names and self.provider is not None:
                return await self._by_id_token(names[0], peer)
            name = plain(names[0], _MOST_NAME) if names else ""
            if name:
                return Person(name=name)
        kind, _, token = headers.get("Authorization", "").partition(" ")
        if self._token and kind.lower() == "bearer" and token:
            return self._by_token(token.strip(), peer)
        if self._token or self.has_oidc:
            return self._by_cookie(cookie)
        return None if self._web.identity_header else Person()

    def log_in(self, token: str, peer: str) -> str | None:
        """Return the cookie of a new session, None if the token is wrong."""
        caller = self._caller(token, peer)
        if caller is None:
            return None
        body = self._session(caller.name, SESSION_S)
        return f"{body}.{self._session_mark(body, caller)}"

    def sign_in(self, person: Person) -> str:
        """Return the cookie of a new session of somebody whom the provider has named."""
        scopes = ",".join(sorted(person.scopes))
        body = self._session(f"{scopes}\n{person.name}", OIDC_SESSION_S)
        return f"{body}.{self.mark('session of the provider', body)}"

    def _session(self, name: str, length_s: int) -> str:
        until = int(self._clock.now().timestamp()) + length_s
        return f"{base64.urlsafe_b64encode(name.encode()).decode()}.{secrets.token_hex(8)}.{until}"

    def log_out(self, cookie: str) -> None:
        """End a session, whoever has its cookie."""
        now_s = self._clock.now().timestamp()
        if self._by_cookie(cookie) is None:
            return
        self._ended = {mark: until for mark, until in self._ended.items() if until > now_s}
        while len(self._ended) >= _MOST_ENDED:
            del self._ended[min(self._ended, key=self._ended.__getitem__)]
        body, _, mark = cookie.rpartition(".")
        self._ended[mark] = int(body.rpartition(".")[2])

    def is_limited(self, peer: str) -> bool:
        """Return whether an address has sent too many wrong tokens."""
        since, n = self._failures.get(_address_of(peer), (0.0, 0))
        return n >= MOST_FAILURES and self._clock.monotonic_s() - since < WINDOW_S

    def form_mark(self, person: Person | None) -> str:
        """Return the hidden value of a form for a person: no other site can read it."""
        return self.mark("form", person.name if person else "")

    def is_form_of(self, person: Person | None, mark: str) -> bool:
        """Return whether a form was made for this person."""
        return hmac.compare_digest(self.form_mark(person).encode(), mark.encode(errors="replace"))

    def _by_token(self, token: str, peer: str) -> Person | None:
        caller = self._caller(token, peer)
        return None if caller is None else Person(name=caller.name, scopes=caller.scopes)

    async def _by_id_token(self, token: str, peer: str) -> Person | None:
        """Return whom the provider's signature names; a proxy may send it as a bearer token."""
        assert self.provider is not None
        kind, _, rest = token.partition(" ")
        try:
            signed = await self.provider.signed_in(rest if kind.lower() == "bearer" else token)
        except LoginError as error:
            if not self.is_limited(peer):
                _LOG.warning("%s passes a person on who is not let in: %s", peer, error)
            self._count_failure(peer)
            return None
        return Person(name=signed.name, scopes=signed.scopes)

    def _caller(self, token: str, peer: str) -> Caller | None:
        caller = find_caller(self._callers(), token, self._clock.now())
        if caller is None:
            self._count_failure(peer)
        return caller

    def _by_cookie(self, cookie: str) -> Person | None:
        body, _, mark = cookie.rpartition(".")
        name, _, rest = body.partition(".")
        until = rest.rpartition(".")[2]
        now = self._clock.now()
        if not until.isdecimal() or int(until) <= now.timestamp() or mark in self._ended:
            return None
        if self.has_oidc and hmac.compare_digest(
            self.mark("session of the provider", body).encode(), mark.encode(errors="replace")
        ):
            scopes, _, person = base64.urlsafe_b64decode(name).decode().partition("\n")
            return Person(name=person, scopes=frozenset(map(TokenScope, scopes.split(","))))
        for caller in self._callers():
            is_valid = caller.until is None or now < caller.until
            is_of = hmac.compare_digest(
                self._session_mark(body, caller).encode(), mark.encode(errors="replace")
            )
            if is_valid and is_of:
                return Person(name=base64.urlsafe_b64decode(name).decode(), scopes=caller.scopes)
        return None

    def _session_mark(self, body: str, caller: Caller) -> str:
        return self.mark("session", f"{body}\n{caller.name}\n{caller.token_hash.hex()}")

    def _callers(self) -> tuple[Caller, ...]:
        """Return the callers that the file names now, so that a line that is removed or gets another token ends the sessions of its person."""
        text = self._token
        if self._web.token_file:
            try:
                text = Path(self._web.token_file).read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError):
                text = self._token  # a mount that is being replaced
        try:
            return read_callers(text, "web.token_file")
        except OperatorError:
            return ()

    def mark(self, purpose: str, text: str) -> str:
        """Return what only this process can make of a text, for one purpose."""
        mark = hmac.digest(self._key, f"{purpose}\n{text}".encode(errors="replace"), hashlib.sha256)
        return base64.urlsafe_b64encode(mark).rstrip(b"=").decode()

    def _is_proxy(self, peer: str) -> bool:
        try:
            address = ipaddress.ip_address(peer.partition("%")[0])
        except ValueError:
            return False
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
            address = address.ipv4_mapped
        return any(address in network for network in self._networks)

    def _count_failure(self, peer: str) -> None:
        name, now_s = _address_of(peer), self._clock.monotonic_s()
        since, n = self._failures.pop(name, (now_s, 0))
        if now_s - since >= WINDOW_S:
            since, n = now_s, 0
        self._failures[name] = (since, n + 1)
        while len(self._failures) > _MOST_ADDRESSES:
            self._failures.popitem(last=False)


def _address_of(peer: str) -> str:
    """Return an IPv4 address, or the network of an IPv6 address, of which one sender has many."""
    try:
        address = ipaddress.ip_address(peer.partition("%")[0])
    except ValueError:
        return peer
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.ip_network(f"{address}/64", strict=False))
    return peer


ACCESS: Final = web.AppKey("access", Access)
PERSON: Final = web.RequestKey("person", Person)
"""Who sent a request; missing before the login."""
FORM_MARK: Final = "form_mark"
"""Name of the hidden field of every form."""
