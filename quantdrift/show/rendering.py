"""Templates: all that they show is escaped, and characters that change how text around them is shown are replaced.

Live page and report are made of the same components (`templates/parts.html`) and have the same style sheet.
"""

from datetime import UTC, datetime, timedelta
from functools import cache
from importlib.resources import files
from typing import Any, Final

import jinja2
from markupsafe import Markup

from quantdrift.core.notation import about, count_of, duration, number, percent
from quantdrift.core.records import Metric
from quantdrift.core.text import plain_lines
from quantdrift.facts import status
from quantdrift.facts.cost import money_of
from quantdrift.facts.figures import shown
from quantdrift.facts.words.amount import signed
from quantdrift.facts.words.first_screen import name_of

PACKAGE: Final = "quantdrift.show"
STYLE: Final = "style.css"


@cache
def environment(surface: str) -> jinja2.Environment:
    """Return the templates of `page` or `report`, with the components of both."""
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(
            [jinja2.PackageLoader(PACKAGE, place) for place in (f"{surface}/templates", "templates")]
        ),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_finalized,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters |= {
        "moment": _moment,
        "number": number,
        "percent": percent,
        "count": lambda n: f"{round(n):,}",
        "count_of": count_of,
        "duration": duration,
        "about": about,
        "money": money_of,
        "tidy": lambda text: text.replace(" %", "\u00a0%").replace(" nat", "\u00a0nat"),
    }
    environment.globals |= {
        "said": status.said,
        "statuses": status.STATUSES,
        "shown": shown,
        "signed": signed,
        "name_of": name_of,
        "Metric": Metric,
        "timedelta": timedelta,
    }
    return environment


@cache
def style() -> str:
    """Return the style sheet."""
    return files(PACKAGE).joinpath(STYLE).read_text(encoding="utf-8")


def _finalized(value: Any) -> Any:
    """Return what a template shows for a value."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return plain_lines(value)
    return "" if value is None else value


def _moment(at: datetime | None) -> Markup:
    """Return a time as an element: the page's script shows it in the reader's time zone in its title."""
    if at is None:
        return Markup("not known")
    utc = at.astimezone(UTC)
    return Markup('<time datetime="{}">{}</time>').format(
        utc.isoformat(), utc.strftime("%d %b %Y, %H:%M UTC")
    )
