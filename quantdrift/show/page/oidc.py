"""Login with OpenID Connect at the page: the authorization code flow with PKCE, and ID tokens that the provider signed.

| step | what is checked |
|---|---|
| `/login/oidc` sends the browser to the provider | - |
| the provider sends it back with a code | the state, which only this browser has in its cookie; the issuer, where the provider says it (RFC 9207) |
| the page asks the provider for the ID token | TLS; the verifier of PKCE (RFC 7636), which only this browser's cookie has |
| the ID token | signature by a key of the provider, issuer, audience, authorized party, time, nonce (OpenID Connect Core, 3.1.3.7) |

A cookie keeps state, nonce and verifier for ten minutes, so that nobody who begins logins without end costs memory. It is marked by this
process, and sent back by its browser alone. Of algorithms the asymmetric ones are accepted: who has the client's secret, or none at all,
signs nobody in.

A proxy that has logged a person in passes the same ID token on in `web.identity_header`. It has no nonce of ours.
"""

import asyncio
import base64
import hashlib
import json
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar
from urllib.parse import quote_plus, urlencode

import aiohttp
import msgspec
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

from quantdrift.core.clock import Clock
from quantdrift.core.config.callers import TokenScope
from quantdrift.core.config.web import ANYBODY, Web, is_safe_url
from quantdrift.core.errors import OperatorError, QuantdriftError, RetryError
from quantdrift.core.text import plain
from quantdrift.core.tls import Tls

BEGIN: Final = "/login/oidc"
END: Final = "/login/oidc/end"
"""Where the provider sends people back: it is registered there."""
LOGIN_S: Final = 600
"""Time for a person to log in at the provider."""
_ALGORITHMS: Final = (
    "RS256",
    "RS384",
    "RS512",
    "PS256",
    "PS384",
    "PS512",
    "ES256",
    "ES384",
    "ES512",
    "Ed25519",
    "EdDSA",
)
_LEEWAY_S: Final = 60  # between the clocks of two machines
_TIMEOUT_S: Final = 10.0
_METADATA_S: Final = 3600.0
_KEYS_S: Final = 60.0  # at most so often are keys read for one that is not known
_MOST_BYTES: Final = 1 << 20
_MOST_NAME: Final = 200
T = TypeVar("T")


class LoginError(QuantdriftError):
    """Somebody is not logged in; the message says why, and has no secret."""


class Begun(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A login that a browser has begun, as its cookie has it.

    Parameters
    ----------
    state, nonce, verifier
        Random texts: of this login, of its ID token, and of PKCE.
    next
        Path to go on with.
    until
        Second since 1970 from which on it is too late.
    """

    state: str
    nonce: str
    verifier: str
    next: str
    until: int


class SignedIn(msgspec.Struct, frozen=True, kw_only=True):
    """Who an ID token says that somebody is, and what that person may do."""

    name: str
    scopes: frozenset[TokenScope]


class _Metadata(msgspec.Struct, frozen=True):
    """What the provider says of itself (OpenID Connect Discovery 1.0)."""

    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str
    token_endpoint_auth_methods_supported: tuple[str, ...] = ("client_secret_basic",)
    authorization_response_iss_parameter_supported: bool = False


class _Token(msgspec.Struct, frozen=True):
    id_token: str = ""


class Provider:
    """The provider, and what it told.

    Parameters
    ----------
    secret
        Of the client; empty: a public one.
    """

    def __init__(self, web: Web, secret: str, clock: Clock) -> None:
        self._oidc = web.oidc
        self._return_to = f"{web.url.rstrip('/')}{END}"
        self._secret = secret
        self._clock = clock
        self._metadata: _Metadata | None = None
        self._keys: KeySet | None = None
        self._metadata_read_s = self._keys_read_s = 0.0
        self._reading = asyncio.Lock()

    async def begin(self, target: str) -> tuple[str, Begun]:
        """Return the address at the provider, and what the browser's cookie has to keep.

        Raises
        ------
        RetryError, OperatorError
            The provider does not answer, or does not do what OpenID Connect asks of it.
        """
        begun = Begun(
            state=secrets.token_urlsafe(32),
            nonce=secrets.token_urlsafe(32),
            verifier=secrets.token_urlsafe(48),
            next=target,
            until=int(self._clock.now().timestamp()) + LOGIN_S,
        )
        challenge = hashlib.sha256(begun.verifier.encode()).digest()
        query = {
            "response_type": "code",
            "client_id": self._oidc.client_id,
            "redirect_uri": self._return_to,
            "scope": " ".join(dict.fromkeys(("openid", *self._oidc.scopes))),
            "state": begun.state,
            "nonce": begun.nonce,
            "code_challenge": base64.urlsafe_b64encode(challenge).rstrip(b"=").decode(),
            "code_challenge_method": "S256",
        }
        endpoint = (await self._described()).authorization_endpoint
        return f"{endpoint}{'&' if '?' in endpoint else '?'}{urlencode(query)}", begun

    async def end(self, begun: Begun | None, query: Mapping[str, str]) -> SignedIn:
        """Return who has logged in.

        Parameters
        ----------
        begun
            What the browser's cookie kept; None: it has none, or not one of this process.
        query
            What the provider sent the browser back with.

        Raises
        ------
        LoginError
            Something does not belong to this login, or the provider refuses it.
        RetryError, OperatorError
            As `begin`.
        """
        if begun is None or begun.until <= self._clock.now().timestamp():
            raise LoginError("this login was begun too long ago, or in another browser")
        if not secrets.compare_digest(begun.state.encode(), query.get("state", "").encode(errors="replace")):
            raise LoginError("this answer belongs to another login")
        described = await self._described()
        issuer = query.get("iss", "")
        if (
            issuer or described.authorization_response_iss_parameter_supported
        ) and issuer != self._oidc.issuer:
            raise LoginError("this answer comes from another provider")
        if error := query.get("error", ""):
            raise LoginError(
                f"the provider says {plain(error, 64)}: {plain(query.get('error_description', ''), 200)}"
            )
        token = await self._token(described, query.get("code", ""), begun.verifier)
        return await self.signed_in(token, begun.nonce)

    async def signed_in(self, token: str, nonce: str | None = None) -> SignedIn:
        """Return who an ID token names.

        Parameters
        ----------
        nonce
            That it must have; None: the login was begun by somebody else, such as a proxy.

        Raises
        ------
        LoginError
            The provider has not signed it, it is not for this page, it is too old, or its person may do nothing here.
        RetryError, OperatorError
            As `begin`.
        """
        claims = await self._verified(token)
        if nonce is not None and claims.get("nonce") != nonce:
            raise LoginError("its ID token belongs to another login")
        audience = claims["aud"]
        if isinstance(audience, list) and len(audience) > 1 and claims.get("azp") != self._oidc.client_id:
            raise LoginError("its ID token was made for another client")
        name = claims.get(self._oidc.name_claim)
        if self._oidc.name_claim == "email" and claims.get("email_verified") is False:
            raise LoginError("the provider has not verified this address of e-mail")
        if not isinstance(name, str) or not plain(name, _MOST_NAME).strip():
            raise LoginError(f"its ID token has no name in the claim {self._oidc.name_claim}")
        scopes = self._scopes(claims.get(self._oidc.groups_claim))
        if not scopes:
            raise LoginError("you are in none of the groups that web.oidc.groups lets in")
        return SignedIn(name=plain(name, _MOST_NAME), scopes=scopes)

    def _scopes(self, groups: object) -> frozenset[TokenScope]:
        """Return what the members of groups may do; anything but a text or a list of texts is no group."""
        names = [groups] if isinstance(groups, str) else groups if isinstance(groups, list) else []
        allowed = [
            self._oidc.groups.get(name, ()) for name in names if isinstance(name, str) and name != ANYBODY
        ]
        return frozenset().union(self._oidc.groups.get(ANYBODY, ()), *allowed)

    async def _verified(self, token: str) -> dict[str, Any]:
        """Return the claims of an ID token that the provider signed for this page, and that is valid now."""
        registry = jwt.JWTClaimsRegistry(
            now=lambda: int(self._clock.now().timestamp()),
            leeway=_LEEWAY_S,
            iss={"essential": True, "value": self._oidc.issuer},
            aud={"essential": True, "value": self._oidc.client_id},
            sub={"essential": True, "allow_blank": False},
            exp={"essential": True},
            iat={"essential": True},
        )
        keys = await self._key_set()
        try:
            try:
                decoded = jwt.decode(token, keys, algorithms=list(_ALGORITHMS))
            except (JoseError, ValueError):
                # Perhaps by a key that is newer than what we have.
                decoded = jwt.decode(token, await self._key_set(again=True), algorithms=list(_ALGORITHMS))
            registry.validate(decoded.claims)
        except (JoseError, ValueError, TypeError, KeyError) as error:
            raise LoginError(f"its ID token is not valid ({type(error).__name__})") from error
        return decoded.claims

    async def _token(self, described: _Metadata, code: str, verifier: str) -> str:
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self._return_to,
            "client_id": self._oidc.client_id,
            "code_verifier": verifier,
        }
        headers = {}
        if self._secret and "client_secret_basic" in described.token_endpoint_auth_methods_supported:
            login = f"{quote_plus(self._oidc.client_id)}:{quote_plus(self._secret)}"  # RFC 6749, 2.3.1
            headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
        elif self._secret:
            form["client_secret"] = self._secret
        status, body = await self._ask("POST", described.token_endpoint, data=form, headers=headers)
        if status in {400, 401, 403}:
            raise LoginError("the provider refuses the code, or web.oidc.client_id and its secret")
        if status != 200:
            raise RetryError(f"the provider of web.oidc answers HTTP {status} at its token endpoint")
        return _read(body, _Token, "its token endpoint").id_token

    async def _described(self) -> _Metadata:
        """Return what the provider says of itself, at most an hour old."""
        async with self._reading:
            now_s = self._clock.monotonic_s()
            if self._metadata is None or now_s - self._metadata_read_s > _METADATA_S:
                url = f"{self._oidc.issuer.rstrip('/')}/.well-known/openid-configuration"
                described = _read(await self._document(url), _Metadata, url)
                if described.issuer != self._oidc.issuer:
                    raise OperatorError(
                        f"web.oidc.issuer is {self._oidc.issuer}, but the provider calls itself {plain(described.issuer, 200)}:"
                        " write it as the provider does"
                    )
                for endpoint in (
                    described.authorization_endpoint,
                    described.token_endpoint,
                    described.jwks_uri,
                ):
                    if not is_safe_url(endpoint.partition("?")[0]):
                        raise OperatorError(
                            f"the provider of web.oidc names an address without TLS: {plain(endpoint, 200)}"
                        )
                self._metadata, self._metadata_read_s = described, now_s
            return self._metadata

    async def _key_set(self, *, again: bool = False) -> KeySet:
        described = await self._described()
        async with self._reading:
            now_s = self._clock.monotonic_s()
            age_s = now_s - self._keys_read_s
            if self._keys is None or age_s > (_KEYS_S if again else _METADATA_S):
                document = await self._document(described.jwks_uri)
                try:
                    self._keys = KeySet.import_key_set(json.loads(document))
                except (JoseError, ValueError, KeyError, TypeError) as error:
                    raise OperatorError("the keys of the provider of web.oidc cannot be read") from error
                self._keys_read_s = now_s
            return self._keys

    async def _document(self, url: str) -> bytes:
        status, body = await self._ask("GET", url)
        if status != 200:
            raise RetryError(f"the provider of web.oidc answers HTTP {status} at {url}")
        return body

    async def _ask(self, method: str, url: str, **more: Any) -> tuple[int, bytes]:
        """Ask the provider; no redirection is followed, and no proxy of the environment is used."""
        tls = Tls(
            ca_file=self._oidc.ca_file,
            ca_option="web.oidc.ca_file",
            certificate_option="",
            key_option="",
        )
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        context: Any = tls.context() if url.startswith("https://") else True
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()) as session,
                session.request(method, url, ssl=context, allow_redirects=False, **more) as answer,
            ):
                body = await answer.content.read(_MOST_BYTES)
                while not answer.content.at_eof() and len(body) < _MOST_BYTES:
                    body += await answer.content.read(_MOST_BYTES - len(body))
                return answer.status, body
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise RetryError(
                f"the provider of web.oidc does not answer at {url} ({type(error).__name__}): try again"
            ) from error


def written(begun: Begun, mark: Callable[[str], str]) -> str:
    """Return a cookie with a login; `mark` makes what only this process can."""
    body = base64.urlsafe_b64encode(msgspec.json.encode(begun)).decode()
    return f"{body}.{mark(body)}"


def read(cookie: str, mark: Callable[[str], str]) -> Begun | None:
    """Return the login in a cookie; None if this process has not written it."""
    body, _, proof = cookie.rpartition(".")
    if not body or not secrets.compare_digest(mark(body).encode(), proof.encode(errors="replace")):
        return None
    return msgspec.json.decode(base64.urlsafe_b64decode(body), type=Begun)


def _read(body: bytes, kind: type[T], where: str) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise OperatorError(
            f"the provider of web.oidc answers at {where} with something else: {error}"
        ) from error
