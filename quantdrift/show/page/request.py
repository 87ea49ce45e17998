"""What every page takes from a request: its application, its query, and the person who sends it."""

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

from aiohttp import web

from quantdrift.core.config.schema import Config
from quantdrift.core.text import plain
from quantdrift.facts.status import Serving
from quantdrift.show.page.access import FORM_MARK, PERSON, Person
from quantdrift.show.page.guard import form_problem
from quantdrift.show.page.rendering import render
from quantdrift.storage.database import Database
from quantdrift.storage.page import now as present
from quantdrift.storage.serving import servings

CONFIG: Final = web.AppKey("config", Config)
DATABASE: Final = web.AppKey("database", Database)
OPERATOR: Final = web.AppKey("operator", Database)
"""With the rights of an operator; missing where the page only reads."""


def query_text(request: web.Request, name: str) -> str:
    """Return a text of the query; empty where it has none of this name."""
    return plain(request.query.get(name, "").strip(), 200)


def query_number(request: web.Request, name: str, otherwise: int = 0) -> int:
    """Return a number of the query, `otherwise` where it has none of this name."""
    written = request.query.get(name, "")
    return int(written) if written.isascii() and written.isdecimal() and len(written) < 9 else otherwise


def address(path: str, query: dict[str, object]) -> str:
    """Return a path with a query; what is empty is left out."""
    parts = "&".join(f"{name}={quote(str(value), safe='')}" for name, value in query.items() if value)
    return f"{path}?{parts}" if parts else path


def acting(request: web.Request, form: Mapping[str, Any], what: str) -> str | web.Response:
    """Return the name of the person who has sent a form, or the answer that says why the form changes nothing."""
    if problem := form_problem(request, str(form.get(FORM_MARK, ""))):
        return render(request, "error.html", status=403, text=problem)
    name = who_may_act(request)
    return name or render(request, "error.html", status=403, text=f"{what} cannot be changed on this page.")


def who_may_act(request: web.Request) -> str:
    """Return the name of the person who has logged in; empty: nobody has, or the page has no operator's role."""
    person: Person | None = request.get(PERSON)
    return person.name if person is not None and OPERATOR in request.app else ""


async def serving_of(
    request: web.Request, connection: present.Connection, version: present.VersionNow
) -> Serving:
    """Return whether a version serves, and is paused."""
    serving = await servings(connection, request.app[CONFIG].monitor.max_loss_ratio, model=version.model)
    return serving.get((version.model, version.version), Serving())
