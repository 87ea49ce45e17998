"""Templates: everything that they show is escaped, and characters that change how text around them is shown are replaced."""

import hashlib
from datetime import UTC, datetime, timedelta
from functools import cache
from importlib.resources import files
from typing import Any, Final

import jinja2
from aiohttp import web
from markupsafe import Markup

from quantdrift.core.notation import count_of, duration, number, percent
from quantdrift.core.text import plain_lines
from quantdrift.facts import status
from quantdrift.facts.cost import money_of
from quantdrift.show.page import words
from quantdrift.show.page.access import ACCESS, FORM_MARK, PERSON

_PACKAGE: Final = "quantdrift.show.page"
STYLE: Final = "style.css"
"""The style sheet, which the report has, too."""
STATIC: Final = (STYLE, "live.js", "icon.svg")
"""The files of the page, all its own."""


@cache
def static_file(name: str) -> tuple[bytes, str]:
    """Return the content of a file of the page, and its digest."""
    path = (
        files("quantdrift.show").joinpath(name) if name == STYLE else files(_PACKAGE).joinpath("static", name)
    )
    content = path.read_bytes()
    return content, hashlib.sha256(content).hexdigest()[:16]


def _static_url(name: str) -> str:
    return f"/static/{static_file(name)[1]}/{name}"


def _shown(value: Any) -> Any:
    """Return what a template shows for a value."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return plain_lines(value)
    return "" if value is None else value


def _moment(at: datetime | None) -> Markup:
    """Return a time as an element: the script shows it in the reader's time zone in its title."""
    if at is None:
        return Markup("not known")
    utc = at.astimezone(UTC)
    return Markup('<time datetime="{}">{}</time>').format(
        utc.isoformat(), utc.strftime("%d %b %Y, %H:%M UTC")
    )


@cache
def environment() -> jinja2.Environment:
    """Return the templates."""
    found = jinja2.Environment(
        loader=jinja2.PackageLoader(_PACKAGE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    found.filters |= {
        "moment": _moment,
        "number": number,
        "percent": percent,
        "count": lambda n: f"{round(n):,}",
        "count_of": count_of,
        "duration": duration,
        "money": money_of,
    }
    found.globals |= {
        "static": _static_url,
        "words": words,
        "said": status.said,
        "statuses": status.STATUSES,
        "timedelta": timedelta,
        "FORM_MARK": FORM_MARK,
    }
    return found


def render(request: web.Request, template: str, *, status: int = 200, **values: Any) -> web.Response:
    """Return a page."""
    access = request.app[ACCESS]
    person = request.get(PERSON)
    text = (
        environment()
        .get_template(template)
        .render(
            person=person,
            path=request.path,
            has_login=access.has_login,
            form_mark=access.form_mark(person),
            status=status,
            **values,
        )
    )
    return web.Response(status=status, text=text, content_type="text/html")
