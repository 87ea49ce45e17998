"""What every page takes from a request: its application, its query, and the person who sends it."""

from collections.abc import Awaitable, Callable, Iterable
from enum import StrEnum
from typing import Final, TypeVar
from urllib.parse import quote

import msgspec
from aiohttp import web

from quantdrift.core.config.callers import TokenScope
from quantdrift.core.config.schema import Config
from quantdrift.core.errors import QuantdriftError
from quantdrift.core.text import plain, plain_lines
from quantdrift.facts.status import Serving
from quantdrift.show.page.access import FORM_MARK, PERSON, Person
from quantdrift.show.page.exemplars import PageExemplars
from quantdrift.show.page.guard import form_problem
from quantdrift.show.page.rendering import render
from quantdrift.storage.database import Database
from quantdrift.storage.serving import servings
from quantdrift.storage.snapshot import Connection
from quantdrift.storage.versions import VersionNow

CONFIG: Final = web.AppKey("config", Config)
DATABASE: Final = web.AppKey("database", Database)
EXEMPLARS: Final = web.AppKey("exemplars", PageExemplars)
"""Reads texts and images of clients; missing unless `web.exemplars` asks for them."""
_ActionT = TypeVar("_ActionT", bound=StrEnum)
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


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """Why what a person asked for was not done, and the reason that they typed; empty: nothing was refused."""

    problem: str = ""
    typed: str = ""


NOT_REFUSED: Final = Refused()


async def act_by_form(
    request: web.Request,
    what: str,
    actions: Iterable[_ActionT],
    act: Callable[..., Awaitable[object]],
) -> web.Response | Refused:
    """Do what a form asks for, in the name of the person who has sent it.

    Parameters
    ----------
    what
        `alert` or `incident`: its number is in the address.
    act
        Called with the connection, that number, the action, the reason and the person as `identity`.
    """
    form = await request.post()
    problem, person = form_problem(request, str(form.get(FORM_MARK, ""))), who_may_act(request)
    if problem or not person:
        problem = problem or f"This {what} cannot be changed on this page."
        return render(request, "error.html", status=403, text=problem)
    action = next((action for action in actions if action.value == form.get("action")), None)
    if action is None:
        return render(request, "error.html", status=400, text=f"This form names no action of an {what}.")
    reason = plain_lines(str(form.get("reason", "")))
    try:
        async with request.app[OPERATOR].begin() as connection:
            await act(connection, int(request.match_info[what]), action, reason, identity=person)
    except QuantdriftError as error:
        return Refused(problem=str(error), typed=reason)
    return web.Response(status=303, headers={"Location": request.path})


def who_may_act(request: web.Request) -> str:
    """Return the name of the person who has logged in; empty: nobody has who may act, or the page has no operator's role."""
    person: Person | None = request.get(PERSON)
    may = person is not None and TokenScope.ACKNOWLEDGE in person.scopes and OPERATOR in request.app
    return person.name if person is not None and may else ""


async def serving_of(request: web.Request, connection: Connection, version: VersionNow) -> Serving:
    """Return whether a version serves, and is paused."""
    serving = await servings(connection, request.app[CONFIG].monitor.max_loss_ratio, model=version.model)
    return serving.get((version.model, version.version), Serving())
