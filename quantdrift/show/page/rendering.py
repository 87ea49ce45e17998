"""Answers of the live page, and the files that belong to it."""

import hashlib
from functools import cache
from importlib.resources import files
from typing import Any, Final

from aiohttp import web

from quantdrift.show import rendering
from quantdrift.show.page.access import ACCESS, FORM_MARK, PERSON

STATIC: Final = (rendering.STYLE, "live.js", "icon.svg")
"""The files of the page, all its own."""


@cache
def static_file(name: str) -> tuple[bytes, str]:
    """Return the content of a file of the page, and its digest."""
    path = name if name == rendering.STYLE else f"page/static/{name}"
    content = files(rendering.PACKAGE).joinpath(path).read_bytes()
    return content, hashlib.sha256(content).hexdigest()[:16]


def _static_url(name: str) -> str:
    return f"/static/{static_file(name)[1]}/{name}"


def render(request: web.Request, template: str, *, status: int = 200, **values: Any) -> web.Response:
    """Return a page."""
    access, person = request.app[ACCESS], request.get(PERSON)
    text = (
        rendering.environment("page")
        .get_template(template)
        .render(
            person=person,
            path=request.path,
            has_login=access.has_login,
            has_oidc=access.has_oidc,
            form_mark=access.form_mark(person),
            FORM_MARK=FORM_MARK,
            static=_static_url,
            status=status,
            **values,
        )
    )
    return web.Response(status=status, text=text, content_type="text/html")
