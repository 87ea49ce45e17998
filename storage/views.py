"""The views as JSON, page by page: what programs read of the live page. The comments in the database describe every column."""

import base64
import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.errors import OperatorError

MOST: Final = 1000
"""Most rows of one page."""
DEFAULT_HOURS: Final = 24
MOST_HOURS: Final = 400 * 24
_MOST_NUMBER: Final = 2**63 - 1
_ALERTS: Final = """(
    select a.id, v.model, v.candidate_version, s.name as slice, a.severity, a.metric, a.onset_at, a.opened_at, a.resolved_at,
        a.ended, a.model_version_id, a.slice_id, a.incident_id
    from alert a join model_version v on v.id = a.model_version_id join slice s on s.id = a.slice_id
)"""
_DESCRIBED: Final = text(
    """
    select relation.relname as view, attname as name, format_type(atttypid, atttypmod) as type,
        col_description(attrelid, attnum) as comment
    from pg_attribute join pg_class relation on relation.oid = attrelid
    where relnamespace = 'public'::regnamespace and relname = any(:views) and attnum > 0 and not attisdropped
    order by relation.relname, attnum
""".replace("::", "\\:\\:")
)


class CursorError(Exception):
    """A cursor is not one that this resource gave."""


class Resource(msgspec.Struct, frozen=True, kw_only=True):
    """A table that programs read.

    Parameters
    ----------
    name
        In the address, and in the description.
    summary
        What a row is.
    view
        The view that has its columns and their comments; empty: `columns` has them.
    source
        What is read, if it is not the view.
    key
        Expressions of `t` that order the rows, each with the function that reads it from a cursor; together they are unique.
    newest_first
        Whether the order is descending.
    time
        Column that `start` and `end` bound; empty: none.
    longest
        Longest time from `start` to `end`.
    hours
        Whether `source` takes `:hours`, from so long ago until now.
    equal
        Columns that a parameter of their name may fix: text, or numbers where the name ends with `id`.
    columns
        Type and comment of each column, where there is no view; else of columns that whoever serves the rows adds.
    """

    name: str
    summary: str
    view: str = ""
    source: str = ""
    key: tuple[tuple[str, Callable[[str], Any]], ...]
    newest_first: bool = False
    time: str = ""
    longest: timedelta = timedelta(days=400)
    hours: bool = False
    equal: tuple[str, ...] = ()
    columns: Mapping[str, tuple[str, str]] = {}


class ViewColumn(msgspec.Struct, frozen=True, kw_only=True):
    """A column: its type in Postgres, and what it says."""

    name: str
    type: str
    comment: str


class RowPage(msgspec.Struct, frozen=True, kw_only=True):
    """Some rows, each a JSON object, and the cursor of the next page; empty: these are the last."""

    rows: tuple[str, ...]
    cursor: str


def _number(written: str) -> int:
    number = int(written)
    if abs(number) > _MOST_NUMBER:
        raise ValueError(written)
    return number


_ID: Final = _number
_NAMES: Final = ("model", "candidate_version", "slice")
_SLICE_KEY: Final = (("t.model_version_id", _ID), ("t.slice_id", _ID))
RESOURCES: Final = (
    Resource(
        name="slices",
        summary="The state of each slice now.",
        view="slice_now",
        key=_SLICE_KEY,
        equal=(*_NAMES, "verdict", "model_version_id", "slice_id"),
    ),
    Resource(
        name="signals",
        summary="The signals of each slice now, with their budgets; those of plug-ins too.",
        view="signal_now",
        key=(*_SLICE_KEY, ("t.metric", str)),
        equal=(*_NAMES, "metric", "model_version_id", "slice_id"),
    ),
    Resource(
        name="slice-days",
        summary="Each slice by day.",
        view="slice_day",
        key=(("t.day", datetime.fromisoformat), *_SLICE_KEY),
        time="day",
        equal=(*_NAMES, "model_version_id", "slice_id"),
    ),
    Resource(
        name="slice-hours",
        summary="Each slice by hour.",
        view="slice_history",
        key=(("t.hour", datetime.fromisoformat), *_SLICE_KEY),
        time="hour",
        longest=timedelta(days=31),
        equal=(*_NAMES, "model_version_id", "slice_id"),
    ),
    Resource(
        name="items",
        summary="Every compared item in each of its slices, with its weight.",
        view="item",
        key=(
            ("t.captured_at", datetime.fromisoformat),
            ("t.exchange_id", UUID),
            ("t.item", _ID),
            ("t.slice_id", _ID),
        ),
        time="captured_at",
        longest=timedelta(days=31),
        equal=(*_NAMES, "request_id", "trace_id", "model_version_id", "slice_id"),
    ),
    Resource(
        name="alerts",
        summary="Alerts, the newest first.",
        source=_ALERTS,
        key=(("t.id", _ID),),
        newest_first=True,
        equal=(*_NAMES, "severity", "model_version_id", "slice_id", "incident_id"),
        columns={
            "id": ("bigint", "Number of the alert."),
            "model": ("text", "Model name, as in requests."),
            "candidate_version": ("text", "Version of the quantised model in production."),
            "slice": ("text", "Short name of the slice; `all` is the aggregate."),
            "severity": ("text", "Highest so far: warning opens a ticket, firing pages."),
            "metric": ("text", "Metric with the most evidence when it opened."),
            "onset_at": ("timestamp with time zone", "Estimated start of the drift."),
            "opened_at": ("timestamp with time zone", "Time of the first warning or page."),
            "resolved_at": ("timestamp with time zone", "Time of the resolution; null while it lasts."),
            "ended": (
                "text",
                "Why it is over: recovered, replaced (its version serves no more), retired or closed (by a person).",
            ),
            "model_version_id": ("integer", "Key of the version."),
            "slice_id": ("integer", "Key of the slice."),
            "incident_id": ("bigint", "Incident that it belongs to; null: the monitor has not looked yet."),
        },
    ),
    Resource(
        name="incidents",
        summary="Incidents, the newest first: the alerts of one cause, with a state.",
        view="incidents",
        key=(("t.id", _ID),),
        newest_first=True,
        equal=("model", "candidate_version", "severity", "state", "model_version_id"),
        columns={
            "cost": (
                "double precision",
                "What its changed answers cost, so far while it is open; null without a price in the server's configuration.",
            ),
            "cost_low": ("double precision", "Lower end of the 95 % interval of cost."),
            "cost_high": ("double precision", "Upper end of the same."),
            "currency": ("text", "Of cost; null without one."),
        },
    ),
    Resource(
        name="releases",
        summary="Each version beside the one before it, slice by slice.",
        view="release_compare",
        key=_SLICE_KEY,
        equal=("model", "version", "before_version", "slice"),
    ),
    Resource(
        name="coverage",
        summary="What the sidecars saw by hour, and what became of it.",
        view="coverage_hour",
        key=(("t.hour", datetime.fromisoformat), ("t.source", str), ("t.stratum", str)),
        time="hour",
        longest=timedelta(days=31),
        equal=("source", "stratum"),
    ),
    Resource(
        name="not-observed",
        summary="What nobody looked at in the last `hours`.",
        view="not_observed",
        source="not_observed_in(make_interval(hours => :hours))",
        hours=True,
        key=(("t.what", str), ("md5(t::text)", str)),
        equal=("model", "slice", "stratum", "what"),
    ),
    Resource(
        name="changes",
        summary="Who changed what, when and why, the newest first.",
        view="change_log",
        key=(("t.at", datetime.fromisoformat), ("md5(t::text)", str)),
        newest_first=True,
        time="at",
        equal=("who", "what", "model"),
    ),
)
"""Every table that programs read."""


async def described(connection: AsyncConnection) -> dict[str, list[ViewColumn]]:
    """Return the columns of each resource by its name, as the comments in the database say.

    Raises
    ------
    OperatorError
        A view is missing: the schema is older than this release.
    """
    views = [resource.view for resource in RESOURCES if resource.view]
    by_view: dict[str, list[ViewColumn]] = {}
    for row in (await connection.execute(_DESCRIBED, {"views": views})).mappings():
        column = ViewColumn(name=row["name"], type=row["type"], comment=row["comment"] or "")
        by_view.setdefault(row["view"], []).append(column)
    if missing := sorted(set(views) - by_view.keys()):
        raise OperatorError(f"the database has no view {', '.join(missing)}: run `quantdrift db upgrade`")
    return {
        resource.name: [
            *by_view.get(resource.view, ()),
            *(
                ViewColumn(name=name, type=kind, comment=comment)
                for name, (kind, comment) in resource.columns.items()
            ),
        ]
        for resource in RESOURCES
    }


async def read(
    connection: AsyncConnection,
    resource: Resource,
    fixed: Mapping[str, str | int],
    period: tuple[datetime, datetime] | None,
    *,
    cursor: str = "",
    limit: int = 100,
    hours: int = DEFAULT_HOURS,
) -> RowPage:
    """Return the rows after a cursor, at most `limit`.

    Parameters
    ----------
    fixed
        Values of columns in `resource.equal`.
    period
        Begin and end of `resource.time`, which the end does not belong to; None where it has none.
    hours
        As `resource.hours` says.

    Raises
    ------
    CursorError
        The cursor is not one of this resource.
    RetryError, OperatorError
        As `Database.begin`.
    """
    conditions = [f"t.{name} = :f_{name}" for name in fixed]
    values: dict[str, Any] = {f"f_{name}": value for name, value in fixed.items()}
    if period:
        conditions += [f"t.{resource.time} >= :begin", f"t.{resource.time} < :end"]
        values |= {"begin": period[0], "end": period[1]}
    if resource.hours:
        values["hours"] = hours
    names = [expression for expression, _ in resource.key]
    if cursor:
        places = [f":k{number}" for number in range(len(names))]
        sign = "<" if resource.newest_first else ">"
        conditions.append(f"({', '.join(names)}) {sign} ({', '.join(places)})")
        values |= {f"k{number}": value for number, value in enumerate(_opened(cursor, resource))}
    order = ", ".join(f"{name} desc" if resource.newest_first else name for name in names)
    keys = ", ".join(f"({name})::text" for name in names)
    where = f"where {' and '.join(conditions)}" if conditions else ""
    query = (
        f"select row_to_json(t)::text as row, array[{keys}] as key from {resource.source or resource.view} t {where}"  # noqa: S608
        f" order by {order} limit {int(limit) + 1}"
    )  # names of this module alone; values are parameters
    rows = (await connection.execute(text(query.replace("::", "\\:\\:")), values)).all()
    shown = rows[:limit]
    return RowPage(
        rows=tuple(row.row for row in shown), cursor=_closed(shown[-1].key) if len(rows) > len(shown) else ""
    )


def _closed(key: Sequence[str]) -> str:
    return base64.urlsafe_b64encode(json.dumps(list(key)).encode()).decode().rstrip("=")


def _opened(cursor: str, resource: Resource) -> list[Any]:
    """Return the values of a cursor."""
    try:
        written = msgspec.json.decode(
            base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True), type=list[str]
        )
        values = [read(written_value) for (_, read), written_value in zip(resource.key, written, strict=True)]
    except (ValueError, binascii.Error, msgspec.MsgspecError) as error:
        raise CursorError from error
    if any(isinstance(value, datetime) and value.tzinfo is None for value in values):
        raise CursorError
    if any(isinstance(value, str) and "\0" in value for value in values):
        raise CursorError
    return values
