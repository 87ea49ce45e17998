"""Answers of the live page, and the files that belong to it."""

import hashlib
from functools import cache
from importlib.resources import files
from typing import Any, Final

import jinja2
from aiohttp import web

from quantdrift.facts.incidents import story_text
from quantdrift.facts.words.amount import class_name, scores
from quantdrift.facts.words.ending import ENDS
from quantdrift.facts.words.happened import ACTIONS, METRICS, ONSET, happened
from quantdrift.facts.words.speed import NOT_COMPARABLE, PARTS
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


@cache
def _environment() -> jinja2.Environment:
    environment = rendering.environment("page")
    environment.globals |= {
        "static": _static_url,
        "FORM_MARK": FORM_MARK,
        "PARTS": PARTS,
        "METRICS": METRICS,
        "ACTIONS": ACTIONS,
        "ENDS": ENDS,
        "NOT_COMPARABLE": NOT_COMPARABLE,
        "happened": happened,
        "scores": scores,
        "class_name": class_name,
        "story_text": story_text,
        "ONSET": ONSET,
    }
    return environment


def render(request: web.Request, template: str, *, status: int = 200, **values: Any) -> web.Response:
    """Return a page."""
    access = request.app[ACCESS]
    person = request.get(PERSON)
    text = (
        _environment()
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
