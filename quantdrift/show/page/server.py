"""The server of the live page: its routes, its login, and its life."""

import html
import logging
import os
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Final

from aiohttp import web

from quantdrift.core.clock import SystemClock
from quantdrift.core.config.address import read_address
from quantdrift.core.config.load import Secrets
from quantdrift.core.config.schema import Config
from quantdrift.core.errors import OperatorError
from quantdrift.core.process.child import INSTANCE, INSTANCE_HEADER
from quantdrift.core.process.http_port import HttpPort, PortLimits
from quantdrift.core.process.run import Stop
from quantdrift.show.page import oidc
from quantdrift.show.page.access import ACCESS, FORM_MARK, OIDC_SESSION_S, SESSION_S, Access, Person
from quantdrift.show.page.alert import act_on_alert, alert_page, alerts
from quantdrift.show.page.api import api_routes
from quantdrift.show.page.compare import compare
from quantdrift.show.page.events import FEED, Feed, events
from quantdrift.show.page.exemplars import PageExemplars
from quantdrift.show.page.guard import form_problem, guard, secure
from quantdrift.show.page.incident import act_on_incident, incident_page, incidents
from quantdrift.show.page.labels import LABELS, STATEMENT_S, LabelStore
from quantdrift.show.page.overview import overview
from quantdrift.show.page.rendering import STATIC, render, static_file
from quantdrift.show.page.request import CONFIG, DATABASE, EXEMPLARS, OPERATOR
from quantdrift.show.page.slice import slice_notebook, slice_page
from quantdrift.show.page.system import system
from quantdrift.storage.database import Database

_LOG = logging.getLogger(__name__)
_BODY_BYTES: Final = 32 * 1024  # of a form: the longest reason in any script, encoded for a form
_POOL_SIZE: Final = 4  # of the ten connections that the reader's user may have
_OPERATOR_POOL_SIZE: Final = 1
_STATEMENT_S: Final = 10.0
_SHUTDOWN_S: Final = 0.3
_YEAR_S: Final = int(timedelta(days=365).total_seconds())
_TYPES: Final = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


async def serve(config: Config, secrets: Secrets, stop: Stop) -> int:
    """Serve the page until `stop`; return the exit code.

    Raises
    ------
    OperatorError
        The port cannot be opened, or the address of Postgres is wrong.
    """
    dsn = secrets.current_dsn if secrets.dsn_file else secrets.dsn
    async with Database(dsn, pool_size=_POOL_SIZE, statement_timeout_s=_STATEMENT_S) as database:
        port = page_port(config, secrets, database)
        address = read_address(config.web.listen)
        try:
            number = await port.open((address.host, address.port))
        except OSError as error:
            await port.close()
            why = os.strerror(error.errno).lower() if error.errno and error.errno > 0 else str(error.strerror)
            raise OperatorError(
                f"web.listen {config.web.listen} cannot be opened: {why}. Set web.listen to a free address"
            ) from error
        _LOG.info("the live page is at %s, port %d", config.web.url or f"http://{address.dialled}", number)
        try:
            await stop.wait()
        finally:
            await port.close()
    return 0


def page_port(config: Config, secrets: Secrets, database: Database) -> HttpPort:
    """Return the port of the page, not open yet; pages that follow it do not hold up its end."""
    app = application(config, secrets, database)
    return HttpPort(app, PortLimits(), handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S)


def application(config: Config, secrets: Secrets, database: Database) -> web.Application:
    """Return the application: pages, login and files, behind the guard."""
    app = web.Application(client_max_size=_BODY_BYTES, middlewares=[guard])
    app.on_response_prepare.append(secure)
    app[ACCESS] = Access(config.web, secrets.web_token, SystemClock(), secrets.oidc_secret)
    app[CONFIG] = config
    app[DATABASE] = database
    app[FEED] = Feed(database)
    if config.web.exemplars:
        app[EXEMPLARS] = PageExemplars(config.stream)
    if secrets.operator_dsn_file:
        app[OPERATOR] = Database(
            secrets.operator_dsn, pool_size=_OPERATOR_POOL_SIZE, statement_timeout_s=_STATEMENT_S
        )
        app[LABELS] = LabelStore(
            Database(secrets.operator_dsn, pool_size=_OPERATOR_POOL_SIZE, statement_timeout_s=STATEMENT_S)
        )
        app.cleanup_ctx.append(_closing)
    app.add_routes(
        [
            web.get("/livez", _lives),
            web.get("/readyz", _lives),
            web.get("/login", _login_page),
            web.post("/login", _log_in),
            web.get("/login/oidc", _go_to_provider),
            web.get("/login/oidc/end", _come_from_provider),
            web.post("/logout", _log_out),
            web.get("/static/{digest}/{name}", _static),
            web.get("/", overview),
            web.get("/slice/{version:\\d{1,10}}/{slice:\\d{1,10}}", slice_page),
            web.get("/slice/{version:\\d{1,10}}/{slice:\\d{1,10}}/notebook", slice_notebook),
            web.get("/incidents", incidents),
            web.get("/incident/{incident:\\d{1,18}}", incident_page),
            web.post("/incident/{incident:\\d{1,18}}", act_on_incident),
            web.get("/alerts", alerts),
            web.get("/alert/{alert:\\d{1,18}}", alert_page),
            web.post("/alert/{alert:\\d{1,18}}", act_on_alert),
            web.get("/compare", compare),
            web.get("/system", system),
            web.get("/events", events),
            *api_routes(),
        ]
    )
    return app


async def _closing(app: web.Application) -> AsyncIterator[None]:
    """Close the operator's connections at the end; the first action opens one."""
    async with app[OPERATOR], app[LABELS].database:
        yield


async def _lives(_: web.Request) -> web.Response:
    headers = {INSTANCE_HEADER: os.environ[INSTANCE]} if INSTANCE in os.environ else None
    return web.Response(text="ok\n", headers=headers)


async def _static(request: web.Request) -> web.Response:
    name = request.match_info["name"]
    if name not in STATIC:
        raise web.HTTPNotFound
    content, digest = static_file(name)
    is_current = request.match_info["digest"] == digest
    cache = f"public, max-age={_YEAR_S}, immutable" if is_current else "no-cache"
    kind = _TYPES[name[name.rindex(".") :]]
    return web.Response(body=content, content_type=kind, charset="utf-8", headers={"Cache-Control": cache})


async def _login_page(request: web.Request) -> web.Response:
    return render(request, "login.html", next=_own_path(request.query.get("next", "/")), problem="")


async def _log_in(request: web.Request) -> web.Response:
    access = request.app[ACCESS]
    form = await request.post()
    target = _own_path(str(form.get("next", "/")))
    peer = request.remote or ""
    problem = form_problem(request, str(form.get(FORM_MARK, "")))
    cookie = None if problem else access.log_in(str(form.get("token", "")).strip(), peer)
    if cookie is None:
        if not problem:
            problem = (
                "too many wrong tokens came from your address: wait a minute"
                if access.is_limited(peer)
                else "this token is wrong, or has expired"
            )
            if not access.is_limited(peer):
                _LOG.warning("a login from %s failed", peer)
        status = 429 if access.is_limited(peer) else 403
        return render(request, "login.html", status=status, next=target, problem=problem)
    answer = web.Response(status=303, headers={"Location": target})
    _set_cookie(answer, access, access.cookie, cookie, max_age=SESSION_S)
    return answer


def _set_cookie(
    answer: web.Response, access: Access, name: str, value: str, *, max_age: int, samesite: str = "Strict"
) -> None:
    answer.set_cookie(
        name,
        value,
        max_age=max_age,
        httponly=True,
        samesite=samesite,
        secure=access.is_encrypted,
        path="/",
    )


async def _go_to_provider(request: web.Request) -> web.Response:
    """Begin a login at the provider; what belongs to it is in a cookie, which comes back with the browser alone."""
    access = request.app[ACCESS]
    if access.provider is None or not access.has_oidc:
        raise web.HTTPNotFound
    address, begun = await access.provider.begin(_own_path(request.query.get("next", "/")))
    answer = web.Response(status=303, headers={"Location": address})
    cookie = oidc.written(begun, lambda body: access.mark("login", body))
    # Strict would keep it from the request with which the provider sends the browser back.
    _set_cookie(answer, access, access.login_cookie, cookie, max_age=oidc.LOGIN_S, samesite="Lax")
    return answer


async def _come_from_provider(request: web.Request) -> web.Response:
    """End a login at the provider, and begin a session."""
    access = request.app[ACCESS]
    if access.provider is None or not access.has_oidc:
        raise web.HTTPNotFound
    begun = oidc.read(request.cookies.get(access.login_cookie, ""), lambda body: access.mark("login", body))
    try:
        signed = await access.provider.end(begun, request.query)
    except oidc.LoginError as error:
        _LOG.warning("a login from %s failed: %s", request.remote or "", error)
        answer = render(request, "login.html", status=403, next="/", problem=str(error))
    else:
        # The browser came from another site, and would not send a cookie of SameSite=Strict with a redirection.
        target = html.escape(begun.next if begun else "/")
        answer = web.Response(
            text=f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={target}"><title>quantdrift</title>',
            content_type="text/html",
        )
        session = access.sign_in(Person(name=signed.name, scopes=signed.scopes))
        _set_cookie(answer, access, access.cookie, session, max_age=OIDC_SESSION_S)
    answer.del_cookie(
        access.login_cookie, path="/", secure=access.is_encrypted, httponly=True, samesite="Lax"
    )
    return answer


async def _log_out(request: web.Request) -> web.Response:
    form = await request.post()
    if problem := form_problem(request, str(form.get(FORM_MARK, ""))):
        return render(request, "error.html", status=403, text=problem)
    access = request.app[ACCESS]
    access.log_out(request.cookies.get(access.cookie, ""))
    answer = web.Response(status=303, headers={"Location": "/login"})
    answer.del_cookie(access.cookie, path="/", secure=access.is_encrypted, httponly=True, samesite="Strict")
    return answer


def _own_path(path: str) -> str:
    """Return a path of this page, `/` for anything that could lead elsewhere."""
    is_own = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if is_own else "/"
