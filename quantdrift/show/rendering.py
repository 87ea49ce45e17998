"""Templates: all that they show is escaped, and characters that change how text around them is shown are replaced.

Live page and report are made of the same components (`templates/parts.html`) and have the same style sheet.
"""

from datetime import UTC, datetime, timedelta
from functools import cache
from importlib.resources import files
from typing import Any, Final

import jinja2
from markupsafe import Markup

from quantdrift.core.notation import about, capital, count_of, duration, moment, number, percent
from quantdrift.core.records import Metric, Verdict
from quantdrift.core.tasks import MEASURES
from quantdrift.core.text import plain_lines
from quantdrift.facts import status
from quantdrift.facts.cost import money_of
from quantdrift.facts.figures import shown
from quantdrift.facts.words import amount, first_screen
from quantdrift.facts.words.ending import ENDS
from quantdrift.facts.words.happened import ACTIONS, METRICS, ONSET, SINCE, happened
from quantdrift.facts.words.incident import story_text
from quantdrift.facts.words.losses import REASONS, from_standby, lowered
from quantdrift.facts.words.speed import NOT_COMPARABLE, PARTS
from quantdrift.storage.figures.periods import Grain

PACKAGE: Final = "quantdrift.show"
STYLE: Final = "style.css"


@cache
def environment(surface: str) -> jinja2.Environment:
    """Return the templates of `page` or `report`, with the components of both."""
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(
            [jinja2.PackageLoader(PACKAGE, folder) for folder in (f"{surface}/templates", "templates")]
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
        "capital": capital,
        "count": lambda n: f"{round(n):,}",
        "count_of": count_of,
        "duration": duration,
        "about": about,
        "money": money_of,
        "detail": amount.detail,
        "reason": lambda name: REASONS.get(name, ""),
        "tidy": lambda text: text.replace(" %", "\u00a0%").replace(" nat", "\u00a0nat"),
    }
    words = (
        *(
            status.said,
            status.alert_kind,
            first_screen.name_of,
            first_screen.over,
            happened,
            story_text,
            shown,
            lowered,
            from_standby,
        ),
        *(
            amount.amount,
            amount.class_name,
            amount.points,
            amount.rate_of,
            amount.scores,
            amount.signed,
            Metric,
            Verdict,
            Grain,
        ),
    )
    environment.globals |= {word.__name__: word for word in words} | {
        "statuses": status.STATUSES,
        "measures": MEASURES,
        "timedelta": timedelta,
        "PARTS": PARTS,
        "METRICS": METRICS,
        "ACTIONS": ACTIONS,
        "ENDS": ENDS,
        "ONSET": ONSET,
        "SINCE": SINCE,
        "NOT_COMPARABLE": NOT_COMPARABLE,
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
    return Markup('<time datetime="{}">{}</time>').format(at.astimezone(UTC).isoformat(), moment(at))
