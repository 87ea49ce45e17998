"""The read API under /api/v1: the views as JSON, with an OpenAPI document that the comments in the database describe."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec
from aiohttp import web

from quantdrift.core.config.schema import Config
from quantdrift.show.page.events import events
from quantdrift.show.page.guard import ProblemError
from quantdrift.show.page.labels import described as labels_described
from quantdrift.show.page.labels import load_labels
from quantdrift.show.page.request import CONFIG, DATABASE
from quantdrift.storage.incidents.incidents import list_incidents, with_costs
from quantdrift.storage.snapshot import Connection, reading
from quantdrift.storage.views import (
    DEFAULT_HOURS,
    MOST,
    MOST_HOURS,
    RESOURCES,
    CursorError,
    Resource,
    ViewColumn,
    described,
    read,
)

_BASE: Final = "/api/v1"
_DAYS: Final = 7
_LIMIT: Final = 100
_MOST_TEXT: Final = 500
_MOST_ID: Final = 2**31 - 1
_TIME_PARTS: Final = ("start", "end")
_HOURS: Final = "hours"
_PAGE_PARTS: Final = ("limit", "cursor")
_TYPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "text": {"type": ["string", "null"]},
    "integer": {"type": ["integer", "null"]},
    "bigint": {"type": ["integer", "null"]},
    "smallint": {"type": ["integer", "null"]},
    "boolean": {"type": ["boolean", "null"]},
    # JSON has no infinity: it stands as a text.
    "double precision": {"anyOf": [{"type": ["number", "null"]}, {"enum": ["Infinity", "-Infinity", "NaN"]}]},
    "timestamp with time zone": {"type": ["string", "null"], "format": "date-time"},
    "uuid": {"type": ["string", "null"], "format": "uuid"},
    "text[]": {"type": ["array", "null"], "items": {"type": "string"}},
    "bigint[]": {"type": ["array", "null"], "items": {"type": "integer"}},
    "integer[]": {"type": ["array", "null"], "items": {"type": "integer"}},
}


def api_routes() -> Iterable[web.AbstractRouteDef]:
    """Return the routes of the API."""
    return [
        web.get(f"{_BASE}/openapi.json", _document),
        web.get(f"{_BASE}/events", events),
        web.post(f"{_BASE}/labels", load_labels),
        *(web.get(f"{_BASE}/{resource.name}", _ResourceReader(resource).answer) for resource in RESOURCES),
    ]


class _ResourceReader:
    """Answers requests for the rows of one resource."""

    def __init__(self, resource: Resource) -> None:
        self._resource = resource
        self._known = {
            *resource.equal,
            *_PAGE_PARTS,
            *(_TIME_PARTS if resource.time else ()),
            *((_HOURS,) if resource.hours else ()),
        }

    async def answer(self, request: web.Request) -> web.Response:
        """Answer a request for a page of rows."""
        query = request.query
        for name in query:
            if name not in self._known:
                listed = ", ".join(sorted(self._known))
                raise ProblemError(
                    "unknown_parameter", f"`{name[:60]}` is no parameter of this table: {listed}"
                )
            if len(query.getall(name)) > 1:
                raise ProblemError("repeated_parameter", f"`{name}` stands twice")
        limit = _number("limit", query.get("limit", str(_LIMIT)), 1, MOST)
        hours = _number(_HOURS, query.get(_HOURS, str(DEFAULT_HOURS)), 1, MOST_HOURS)
        async with reading(request.app[DATABASE]) as connection:
            try:
                page = await read(
                    connection,
                    self._resource,
                    {name: self._fixed(name, query[name]) for name in self._resource.equal if name in query},
                    self._period(query),
                    cursor=_text("cursor", query["cursor"], 2_000) if "cursor" in query else "",
                    limit=limit,
                    hours=hours,
                )
            except CursorError as error:
                raise ProblemError("wrong_cursor", "`cursor` is not one that this table gave") from error
            rows: Sequence[str] = page.rows
            if self._resource.name == "incidents":
                rows = await _with_costs(connection, rows, request.app[CONFIG])
        after = msgspec.json.encode(page.cursor or None).decode()
        return web.Response(
            text=f'{{"rows":[{",".join(rows)}],"cursor":{after}}}', content_type="application/json"
        )

    def _fixed(self, name: str, given: str) -> str | int:
        return (
            _number(name, given, 0, _MOST_ID)
            if name.endswith("_id") and name not in _TEXT_IDS
            else _text(name, given)
        )

    def _period(self, query: Mapping[str, str]) -> tuple[datetime, datetime] | None:
        """Return begin and end: the last week if nothing is given."""
        if not self._resource.time:
            return None
        end = _time("end", query["end"]) if "end" in query else datetime.now(UTC)
        try:
            begin = _time("start", query["start"]) if "start" in query else end - timedelta(days=_DAYS)
            length = end - begin
        except OverflowError as error:
            raise ProblemError("wrong_time", "`end` is out of range") from error
        if not timedelta() < length <= self._resource.longest:
            raise ProblemError(
                "wrong_time",
                f"`end` must be later than `start`, by at most {self._resource.longest.days} days",
            )
        return begin, end


async def _with_costs(connection: Connection, rows: Sequence[str], config: Config) -> list[str]:
    """Return rows of incidents with what they cost, as pages and commands have it."""
    records = [msgspec.json.decode(row) for row in rows]
    listed = await list_incidents(connection, ids=[record["id"] for record in records], with_ended=True)
    costs = {incident.id: incident.cost for incident in await with_costs(connection, listed, config)}
    for record in records:
        cost = costs.get(record["id"])
        record |= {
            "cost": cost and cost.value,
            "cost_low": cost and cost.low,
            "cost_high": cost and cost.high,
            "currency": cost and cost.unit,
        }
    return [msgspec.json.encode(record).decode() for record in records]


_TEXT_IDS: Final = frozenset({"request_id", "trace_id"})


def _number(name: str, given: str, least: int, most: int) -> int:
    if not (given.isascii() and given.isdigit() and len(given) <= 20 and least <= int(given) <= most):
        raise ProblemError("wrong_number", f"`{name}` must be a whole number from {least} to {most}")
    return int(given)


def _text(name: str, given: str, most: int = _MOST_TEXT) -> str:
    if not given or len(given) > most or "\0" in given or not given.isprintable():
        raise ProblemError("wrong_text", f"`{name}` must be a printable text of 1 to {most} characters")
    return given


def _time(name: str, given: str) -> datetime:
    try:
        time = datetime.fromisoformat(given)
        in_utc = time.astimezone(UTC) if time.tzinfo and "T" in given else None
    except (ValueError, OverflowError):
        in_utc = None
    if in_utc is None:
        raise ProblemError(
            "wrong_time", f"`{name}` must be a time with its zone (RFC 3339), such as 2026-11-22T08:00:00Z"
        )
    return in_utc


async def _document(request: web.Request) -> web.Response:
    """Return the description of the API."""
    async with reading(request.app[DATABASE]) as connection:
        columns = await described(connection)
    return web.Response(body=msgspec.json.encode(_description(columns)), content_type="application/json")


def _description(columns: Mapping[str, list[ViewColumn]]) -> dict[str, Any]:
    schemas: dict[str, Any] = {
        "problem": {
            "type": "object",
            "required": ["type", "status", "code", "detail"],
            "properties": {
                "type": {"type": "string"},
                "status": {"type": "integer"},
                "code": {"type": "string", "description": "What is wrong; it stays the same."},
                "detail": {"type": "string", "description": "For people."},
            },
        }
    }
    paths: dict[str, Any] = {}
    for resource in RESOURCES:
        schemas[resource.name] = {
            "type": "object",
            "required": [column.name for column in columns[resource.name]],
            "properties": {column.name: _schema(column) for column in columns[resource.name]},
        }
        paths[f"{_BASE}/{resource.name}"] = {"get": _operation(resource)}
    paths[f"{_BASE}/labels"] = {"post": labels_described()}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "quantdrift",
            "version": "1",
            "description": (
                f"The tables of the live page, read-only, and a way to send labels. {_BASE}/events sends a server-sent event whenever something"
                " changes."
            ),
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _operation(resource: Resource) -> dict[str, Any]:
    parameters = [_parameter(name, _parameter_schema(name)) for name in resource.equal]
    if resource.time:
        at = {"type": "string", "format": "date-time"}
        parameters += [
            _parameter("start", at, f"From this `{resource.time}` on; default: a week before `end`."),
            _parameter("end", at, f"Before this `{resource.time}`; default: now."),
        ]
    if resource.hours:
        number = {"type": "integer", "minimum": 1, "maximum": MOST_HOURS, "default": DEFAULT_HOURS}
        parameters.append(_parameter(_HOURS, number, "From so many hours ago until now."))
    parameters += [
        _parameter(
            "limit", {"type": "integer", "minimum": 1, "maximum": MOST, "default": _LIMIT}, "Rows of a page."
        ),
        _parameter("cursor", {"type": "string", "minLength": 1}, "`cursor` of the page before."),
    ]
    rows = {"type": "array", "items": {"$ref": f"#/components/schemas/{resource.name}"}}
    page = {
        "type": "object",
        "required": ["rows", "cursor"],
        "properties": {
            "rows": rows,
            "cursor": {
                "type": ["string", "null"],
                "description": "Of the next page; null: these rows are the last.",
            },
        },
    }
    wrong = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/problem"}}}
    return {
        "summary": resource.summary,
        "operationId": resource.name,
        "parameters": parameters,
        "responses": {
            "200": {"description": resource.summary, "content": {"application/json": {"schema": page}}},
            "400": {"description": "A parameter is wrong.", "content": wrong},
            "401": {"description": "No token, or a wrong one.", "content": wrong},
            "403": {"description": "The token is not for this.", "content": wrong},
            "503": {"description": "The database does not answer, or not in time.", "content": wrong},
        },
    }


def _parameter(
    name: str, schema: Mapping[str, Any], text: str = "Only rows with this value."
) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "description": text, "schema": schema}


def _parameter_schema(name: str) -> dict[str, Any]:
    if name.endswith("_id") and name not in _TEXT_IDS:
        return {"type": "integer", "minimum": 0, "maximum": _MOST_ID}
    return {"type": "string", "minLength": 1, "maxLength": _MOST_TEXT}


def _schema(column: ViewColumn) -> dict[str, Any]:
    return {**_TYPES.get(column.type, {}), "description": column.comment}
