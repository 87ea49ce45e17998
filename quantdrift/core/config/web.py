"""The options of the live page, and their checks."""

import ipaddress
from collections.abc import Iterator
from typing import Annotated, Final
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from quantdrift.core.config.address import AddressError, is_loopback, read_address
from quantdrift.core.config.callers import TokenScope
from quantdrift.core.config.section import Section, about

TOKEN_VARIABLE: Final = "QUANTDRIFT_WEB_TOKEN"  # noqa: S105 - the name of a variable


ANYBODY: Final = "*"
"""In `web.oidc.groups`: everybody whom the provider lets in."""


class Oidc(Section, frozen=True, kw_only=True):
    """Login with OpenID Connect: at the page itself, or by a proxy that passes the signed ID token on."""

    issuer: Annotated[
        str,
        about(
            "Address of the provider, as in its ID tokens, e.g. https://login.example.com/realms/bank. Its endpoints are "
            "read from /.well-known/openid-configuration below it. Empty: no such login."
        ),
    ] = ""
    client_id: Annotated[
        str, about("Id of this page at the provider; ID tokens for any other client are refused.")
    ] = ""
    client_secret_file: Annotated[
        str, about("File with the client's secret. Empty: a public client, which PKCE alone protects.")
    ] = ""
    ca_file: Annotated[
        str,
        about(
            "File with the authorities that the provider's certificate is checked with. Empty: the system's."
        ),
    ] = ""
    scopes: Annotated[
        tuple[str, ...], about("What is asked for beside `openid`; some providers tell groups only if asked.")
    ] = ("email",)
    name_claim: Annotated[
        str,
        about("Claim of the ID token with the person's name, as acknowledgements and the audit show it."),
        Meta(min_length=1),
    ] = "email"
    groups_claim: Annotated[
        str, about("Claim of the ID token with the person's groups: a list, or one word."), Meta(min_length=1)
    ] = "groups"
    groups: Annotated[
        dict[str, tuple[TokenScope, ...]],
        about(
            'What the members of each group may do: e.g. { drift-readers = ["read"], oncall = ["read", "acknowledge"] }. '
            f"`{ANYBODY}` is everybody whom the provider lets in. Who is in none of them is refused."
        ),
    ] = {}  # noqa: RUF012 - msgspec copies it


class Web(Section, frozen=True, kw_only=True):
    """The live page: what people look at. `quantdrift up` and `quantdrift web` serve it."""

    listen: Annotated[
        str,
        about(
            "Address of the page, HOST:PORT. Another host than this machine's loopback address needs token_file or "
            "identity_header. Empty: no page."
        ),
    ] = "127.0.0.1:9468"
    url: Annotated[
        str,
        about(
            "Address of the page as people open it, e.g. https://drift.example.com, if a proxy is in front of it. "
            "Requests under other host names are refused. Empty: only IP addresses and localhost."
        ),
    ] = ""
    token_file: Annotated[
        str,
        about(
            "File with one token, or one `NAME sha256:HEX [until=TIME]` a line, with which people log in. Empty: "
            f"{TOKEN_VARIABLE}, or no login."
        ),
    ] = ""
    identity_header: Annotated[
        str,
        about(
            "Header in which a proxy that has logged a person in says who it is. It needs proxies: with addresses of this "
            "machine alone the name itself, e.g. X-Forwarded-Email; with any other, and web.oidc, the ID token that "
            "the provider signed. Empty: none."
        ),
        Meta(pattern=r"^([A-Za-z0-9!#$%&'*+.^_|~-]+)?$"),
    ] = ""
    proxies: Annotated[
        tuple[str, ...],
        about("Addresses or networks of that proxy: identity_header of any other sender is ignored."),
    ] = ()
    oidc: Oidc = Oidc()
    operator_dsn_file: Annotated[
        str,
        about(
            "File with the Postgres address of a user in the role quantdrift_page, with which people who have logged "
            "in acknowledge alerts and write notes on the page. Empty: the page shows the command instead."
        ),
    ] = ""
    exemplars: Annotated[
        bool,
        about(
            "Show on the pages of incidents and learned slices what exemplars are like, WITH TEXT AND IMAGES OF CLIENTS, to everybody who "
            "may read the page. It needs models.exemplars, and the key `page.nk` at NATS."
        ),
    ] = False


def web_problems(web: Web) -> Iterator[str]:
    """Return the contradictions in the section, each as a sentence that says what to change."""
    if web.url:
        try:
            parts = urlsplit(web.url)
            is_one = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_one = False
        if not is_one or parts.path not in {"", "/"} or parts.query or parts.fragment or parts.username:
            yield (
                "web.url is not the address of a page: write scheme and host without a path, e.g. https://drift.example.com"
            )
    for proxy in web.proxies:
        try:
            ipaddress.ip_network(proxy)
        except ValueError:
            yield f"web.proxies names `{proxy[:64]}`: write an IP address or a network such as 10.0.0.0/24"
    if bool(web.identity_header) != bool(web.proxies):
        set_option, other = (
            ("identity_header", "proxies") if web.identity_header else ("proxies", "identity_header")
        )
        yield (
            f"web.{set_option} is set and web.{other} is not: set both, so that only the proxy can say who a person is"
        )
    elif web.identity_header and not web.oidc.issuer and not all(map(_is_of_this_machine, web.proxies)):
        yield (
            "web.identity_header comes from other machines, where whoever gets an address of web.proxies could be anybody: set web.oidc,"
            " and let the proxy pass the ID token that the provider signed, or run the proxy beside the page with web.proxies ="
            ' ["127.0.0.1"]'
        )
    yield from _oidc_problems(web)


def _oidc_problems(web: Web) -> Iterator[str]:
    oidc = web.oidc
    if not oidc.issuer:
        if others := [
            name for name, value in msgspec.structs.asdict(oidc).items() if value != getattr(Oidc(), name)
        ]:
            yield f"web.oidc.{others[0]} is set and web.oidc.issuer is not: set issuer to the address of the provider"
        return
    if not is_safe_url(oidc.issuer):
        yield (
            "web.oidc.issuer is not the address of a provider: write https:// and a host, without a query, e.g."
            " https://login.example.com"
        )
    if not oidc.client_id:
        yield "web.oidc.client_id is missing: register the page at the provider, and write its id"
    if not web.url:
        yield (
            "web.oidc needs web.url, the address to which the provider sends people back: register its /login/oidc at the provider"
        )
    elif not is_safe_url(web.url):
        yield "web.oidc needs a web.url with https://, so that nobody on the network reads what the provider sends back"
    if not any(oidc.groups.values()):
        yield (
            "web.oidc.groups lets nobody in: say what the members of a group may do, e.g."
            ' groups = { oncall = ["read", "acknowledge"] }'
        )


def is_safe_url(url: str) -> bool:
    """Return whether an address is one of https, or of this machine, and has nothing but a host, a port and a path."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return False
    is_safe = parts.scheme == "https" or (parts.scheme == "http" and is_loopback(host))
    return bool(is_safe and host and port != 0 and not (parts.query or parts.fragment or parts.username))


def _is_of_this_machine(proxy: str) -> bool:
    try:
        return ipaddress.ip_network(proxy).is_loopback
    except ValueError:
        return True  # reported already


def is_open(web: Web, token: str) -> bool:
    """Return whether anybody who reaches the address could read the page without a login.

    Parameters
    ----------
    token
        The content of the token file; empty: none.
    """
    if token or web.identity_header or web.oidc.issuer:
        return False
    try:
        return not is_loopback(read_address(web.listen).host)
    except AddressError:
        return False
