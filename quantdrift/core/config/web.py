"""The options of the live page, and their checks."""

import ipaddress
from collections.abc import Iterator
from typing import Annotated, Final
from urllib.parse import urlsplit

from msgspec import Meta

from quantdrift.core.config.address import AddressError, is_loopback, read_address
from quantdrift.core.config.section import Section, about

TOKEN_VARIABLE: Final = "QUANTDRIFT_WEB_TOKEN"  # noqa: S105 - the name of a variable


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
            "Header in which a proxy that logs people in with OpenID Connect names the person, e.g. "
            "X-Forwarded-Email. It needs proxies. Empty: none."
        ),
        Meta(pattern=r"^([A-Za-z0-9!#$%&'*+.^_|~-]+)?$"),
    ] = ""
    proxies: Annotated[
        tuple[str, ...],
        about("Addresses or networks of that proxy: identity_header of any other sender is ignored."),
    ] = ()
    operator_dsn_file: Annotated[
        str,
        about(
            "File with the Postgres address of a user in the role quantdrift_page, with which people who have logged "
            "in acknowledge alerts and write notes on the page. Empty: the page shows the command instead."
        ),
    ] = ""


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


def is_open(web: Web, token: str) -> bool:
    """Return whether anybody who reaches the address could read the page without a login.

    Parameters
    ----------
    token
        The content of the token file; empty: none.
    """
    if token or web.identity_header:
        return False
    try:
        return not is_loopback(read_address(web.listen).host)
    except AddressError:
        return False
