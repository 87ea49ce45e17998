"""What every answer of the page goes through: names of this host, who asks, forms of our own, and security headers."""

import logging
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from quantdrift.core.config.callers import TokenScope
from quantdrift.core.errors import OperatorError, QuantdriftError
from quantdrift.show.page.access import ACCESS, PERSON
from quantdrift.show.page.rendering import render

_LOG = logging.getLogger(__name__)
_PUBLIC: Final = frozenset({"/livez", "/readyz", "/login", "/login/oidc", "/login/oidc/end"})
_STATIC: Final = "/static/"
_API: Final = "/api/"
_CODES: Final = {404: "not_found", 405: "method_not_allowed", 503: "not_available"}
_HEADERS: Final = {
    # Files of this server alone: no inline script or style, no other host, no frame around the page.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # with no-referrer, a form of our own would have the Origin `null`
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=()",
}


class ProblemError(Exception):
    """A request of a program that cannot be answered, with a code that stays the same and a text for people."""

    def __init__(self, code: str, detail: str, status: int = 400) -> None:
        super().__init__(detail)
        self.code, self.detail, self.status = code, detail, status


def form_problem(request: web.Request, mark: str) -> str:
    """Return why a form must be refused, empty if it is one of ours."""
    access = request.app[ACCESS]
    if not access.is_form_of(request.get(PERSON), mark):
        return "this form is too old, or not from this page: go back, load the page again, and send it again"
    return ""


def _refusal(request: web.Request) -> web.Response | None:
    """Return the answer to a request that comes under a wrong name or from another site, None if it does not."""
    access = request.app[ACCESS]
    host = request.headers.get("Host", "")
    if not access.allows_host(host):
        return web.Response(
            status=421,
            text="This name is not one of this page. Set web.url to the address that people open, or use the IP address.\n",
        )
    if request.method not in {"GET", "HEAD"}:
        origin = request.headers.get("Origin", "")
        has_token = request.headers.get("Authorization", "")
        if not (access.allows_origin(origin, host) or (not origin and has_token)):
            if request.path.startswith(_API):
                return problem(
                    403, "other_site", "send `Authorization: Bearer TOKEN`, or the Origin of this page"
                )
            return web.Response(status=403, text="This request comes from another site.\n")
    return None


def _scope(request: web.Request) -> TokenScope | None:
    """Return what a login must be for to send a request; None: every one may."""
    if request.path in _PUBLIC or request.path == "/logout" or request.path.startswith(_STATIC):
        return None
    if request.method in {"GET", "HEAD"}:
        return TokenScope.READ
    return TokenScope.LABELS if request.path.startswith(_API) else TokenScope.ACKNOWLEDGE


def _log_in_first(request: web.Request) -> web.StreamResponse:
    if request.path.startswith(_API):
        return problem(
            401, "not_logged_in", "send `Authorization: Bearer TOKEN`", {"WWW-Authenticate": "Bearer"}
        )
    if not (request.app[ACCESS].has_login or request.app[ACCESS].has_oidc):
        return web.Response(status=403, text="Open this page through the proxy that logs you in.\n")
    if (
        request.headers.get("Sec-Fetch-Site") == "cross-site"
        and request.app[ACCESS].cookie not in request.cookies
    ):
        # From a link in a mail or chat the browser sends no cookie of SameSite=Strict; after a reload by our own page it does.
        return web.Response(
            text='<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0"><title>quantdrift</title>',
            content_type="text/html",
        )
    raise web.HTTPSeeOther(f"/login?next={quote(request.path_qs, safe='')}")


async def secure(_: web.Request, answer: web.StreamResponse) -> None:
    """Set the security headers of an answer, of a stream too."""
    for name, value in _HEADERS.items():
        answer.headers.setdefault(name, value)
    answer.headers.setdefault("Cache-Control", "no-store")


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse what may not be answered, and answer the rest."""
    if refusal := _refusal(request):
        return refusal
    access = request.app[ACCESS]
    try:
        person = await access.identify(
            request.remote or "", request.headers, request.cookies.get(access.cookie, "")
        )
        if person is not None:
            request[PERSON] = person
        if person is None and request.path not in _PUBLIC and not request.path.startswith(_STATIC):
            return _log_in_first(request)
        if person is not None and (scope := _scope(request)) not in {None, *person.scopes}:
            why = f"This login is not for `{scope}`: see may= in its line of web.token_file, or web.oidc.groups."
            return await _said(request, 403, why, code="not_allowed")
        answer = await handler(request)
    except ProblemError as error:
        answer = await _said(request, error.status, error.detail, code=error.code)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        answer = await _said(request, error.status, error.reason or "", error.headers.get("Allow", ""))
    except OperatorError as error:
        _LOG.error("%s cannot be shown: %s", request.path, error)
        answer = await _said(request, 503, str(error))
    except QuantdriftError as error:
        _LOG.warning("%s cannot be shown: %s", request.path, error)
        answer = await _said(request, 503, f"{error}. The page tries again by itself.")
    return answer


async def _said(
    request: web.Request, status: int, text: str, allowed: str = "", *, code: str = ""
) -> web.StreamResponse:
    """Return an error as a page, or as a problem document where a program asked."""
    headers = {"Allow": allowed} if allowed else {}
    if request.path.startswith(_API):
        return problem(status, code or _CODES.get(status, f"http_{status}"), text, headers)
    answer = render(request, "error.html", status=status, text=text)
    answer.headers.update(headers)
    return answer


def problem(status: int, code: str, detail: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return an error as a problem document (RFC 9457)."""
    body = {"type": "about:blank", "status": status, "code": code, "detail": detail}
    return web.Response(
        status=status,
        body=msgspec.json.encode(body),
        headers={"Content-Type": "application/problem+json", **(headers or {})},
    )
