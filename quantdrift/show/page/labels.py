"""Labels over HTTP: a program sends a CSV of true labels, as `quantdrift labels load` reads it from a file."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec
from aiohttp import web

from quantdrift.core.config.schema import Config, Model
from quantdrift.core.errors import OperatorError
from quantdrift.report.label_rows import LABEL, TooManyRowsError, listed, rows_of_text
from quantdrift.show.page.access import PERSON
from quantdrift.show.page.guard import ProblemError
from quantdrift.show.page.request import CONFIG
from quantdrift.storage.database import Database
from quantdrift.storage.labels import LabelRow, load

MOST_BYTES: Final = 8 * 2**20
MOST_ROWS: Final = 100_000
STATEMENT_S: Final = 60.0
"""Limit of each statement of a load, which reads all comparisons that are kept."""
_TYPE: Final = "text/csv"
_BODY_S: Final = 60.0
_KNOWN: Final = {
    "by": "What the keys are: a recorded attribute such as header.x-request-id, `exchange` or `trace`.",
    "model": "The model; default: the only one of the configuration.",
    "key_column": "Column with the keys; default: the value of `by`, or `key`.",
    "label_column": "Column with the true class; default: `label`.",
}
_MOST_TEXT: Final = 500


class LabelStore:
    """Where labels are stored: a connection of their own, so that no load delays an acknowledgement.

    One load runs at a time, so that the bodies that are held stay within `MOST_BYTES`.

    Parameters
    ----------
    database
        With the rights of an operator.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        self.turn = asyncio.Lock()


LABELS: Final = web.AppKey("labels", LabelStore)
"""Missing where the page only reads."""


async def load_labels(request: web.Request) -> web.Response:
    """Store the labels of a CSV, and say what became of its rows."""
    person = request.get(PERSON)
    if LABELS not in request.app or person is None or not person.name:
        raise ProblemError(
            "not_allowed",
            "labels are taken from people and programs with a login, where web.operator_dsn_file is set",
            403,
        )
    config, query, store = request.app[CONFIG], _parameters(request), request.app[LABELS]
    model = _model(config, query.get("model", ""))
    by, label = query["by"], query.get("label_column") or LABEL
    if store.turn.locked():
        raise ProblemError("busy", "other labels are being loaded: send these again in a few seconds", 429)
    async with store.turn:
        rows, wrong = await _rows(request, model, query.get("key_column") or by, label)
        since = datetime.now(UTC) - timedelta(days=config.storage.retention_days)
        async with store.database.begin() as connection:
            loaded = await load(
                connection, rows, model=model.name, by=by, since=since, source="HTTP", identity=person.name
            )
    return web.Response(
        body=msgspec.json.encode({"loaded": loaded, "left_out": dict(wrong)}), content_type="application/json"
    )


def _parameters(request: web.Request) -> Mapping[str, str]:
    query = request.query
    for name in query:
        if name not in _KNOWN or len(query.getall(name)) > 1:
            raise ProblemError(
                "wrong_parameter", f"`{name[:60]}` is unknown or stands twice: {', '.join(_KNOWN)}"
            )
        if not query[name] or len(query[name]) > _MOST_TEXT or not query[name].isprintable():
            raise ProblemError(
                "wrong_text", f"`{name}` must be a printable text of 1 to {_MOST_TEXT} characters"
            )
    if "by" not in query:
        raise ProblemError(
            "wrong_parameter", "`by` is missing: what the keys are, such as header.x-request-id"
        )
    return query


def _model(config: Config, name: str) -> Model:
    if name or len(config.models) == 1:
        for model in config.models:
            if name in {"", model.name}:
                return model
    names = ", ".join(model.name for model in config.models)
    raise ProblemError("wrong_model", f"`model` must be one of {names}")


async def _rows(
    request: web.Request, model: Model, key_column: str, label_column: str
) -> tuple[list[LabelRow], Counter[str]]:
    """Return the rows of the body that can be used, and how many others there are by reason."""
    if request.content_type != _TYPE:
        raise ProblemError("wrong_type", f"send a CSV with a header line, and `Content-Type: {_TYPE}`", 415)
    try:
        text = (await asyncio.wait_for(_body(request), _BODY_S)).decode("utf-8-sig")
        # In another thread: the page answers others meanwhile.
        rows, wrong = await asyncio.to_thread(
            rows_of_text, text, model, key_column, label_column, most=MOST_ROWS
        )
    except TimeoutError as error:
        raise ProblemError("too_slow", f"the body did not arrive within {_BODY_S:g} s", 408) from error
    except UnicodeDecodeError as error:
        raise ProblemError("wrong_csv", "the body is not UTF-8") from error
    except TooManyRowsError as error:
        raise ProblemError("too_large", f"{error}, or use `quantdrift labels load`", 413) from error
    except OperatorError as error:
        raise ProblemError("wrong_csv", str(error)) from error
    if not rows:
        raise ProblemError("wrong_csv", f"no row can be used: {listed(wrong) or 'there is none'}")
    return rows, wrong


async def _body(request: web.Request) -> bytes:
    body = bytearray()
    async for piece in request.content.iter_any():
        body += piece
        if len(body) > MOST_BYTES:
            raise ProblemError(
                "too_large",
                f"send at most {MOST_BYTES // 2**20} MiB at once, or use `quantdrift labels load`",
                413,
            )
    return bytes(body)


def described() -> dict[str, Any]:
    """Return the operation for the OpenAPI document, and the schema of its answer."""
    wrong = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/problem"}}}
    count = {"type": "integer", "minimum": 0}
    loaded = {
        "type": "object",
        "required": ["rows", "labelled", "undecided", "unmatched", "unmatched_keys"],
        "properties": {
            "rows": {**count, "description": "That could be read."},
            "labelled": {**count, "description": "Items that have a label now."},
            "undecided": {**count, "description": "Items that were found and have no top class."},
            "unmatched": {**count, "description": "Rows that found no compared item."},
            "unmatched_keys": {
                "type": "array",
                "items": {"type": "string"},
                "description": "Some of their keys.",
            },
        },
    }
    answer = {
        "type": "object",
        "required": ["loaded", "left_out"],
        "properties": {
            "loaded": loaded,
            "left_out": {
                "type": "object",
                "additionalProperties": count,
                "description": "Rows that could not be used, by reason.",
            },
        },
    }
    problems = {
        "400": "A parameter or the CSV is wrong.",
        "401": "No token, or a wrong one.",
        "403": "Without a login, or with one that is not for this, or from another site, or this server may not write.",
        "408": "The body came too slowly.",
        "413": f"More than {MOST_BYTES // 2**20} MiB, or more than {MOST_ROWS:,} rows.",
        "415": "The body is no CSV.",
        "429": "Other labels are being loaded.",
        "503": "The database does not answer, or not in time.",
    }
    return {
        "summary": "Load true labels, as `quantdrift labels load` does.",
        "operationId": "labels",
        "parameters": [
            {
                "name": name,
                "in": "query",
                "required": name == "by",
                "description": text,
                "schema": {"type": "string", "minLength": 1, "maxLength": _MOST_TEXT},
                **({"example": "header.x-request-id"} if name == "by" else {}),
            }
            for name, text in _KNOWN.items()
        ],
        "requestBody": {
            "required": True,
            "description": f"At most {MOST_ROWS:,} rows, with a header line: key, label, and perhaps item.",
            "content": {
                _TYPE: {"schema": {"type": "string", "minLength": 1}, "example": "key,label\nreq-81f3,3\n"}
            },
        },
        "responses": {
            "200": {
                "description": "What became of the rows.",
                "content": {"application/json": {"schema": answer}},
            },
            **{status: {"description": text, "content": wrong} for status, text in problems.items()},
        },
    }
