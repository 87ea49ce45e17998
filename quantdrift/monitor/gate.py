"""Verdicts of gates over HTTP, at the monitor's admin port, for programs that roll out a model.

| request | answer |
|---|---|
| `GET /gate/ID` | always 200, with the verdict: a program that takes any other status for a failure must not roll back for it |
| `POST /gate/ID/promote` | 200 where the gate has passed, else 403 with the reason |
| `POST /gate/ID/rollback` | 200 where the gate has failed, else 403 with the reason: there a 200 is the rollback |

What cannot be told, an unknown number or a database that does not answer, is `insufficient`, never a verdict. Nothing is changed, and no
body of a request is read.
"""

import asyncio
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec
from aiohttp import web

from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.core.slices import ALL
from quantdrift.storage.database import Database
from quantdrift.storage.gate import GateRun, read

_ANSWER_S: Final = 5.0  # both programs wait ten seconds by default
_MOST_ID: Final = 2**63 - 1
_PASS: Final = "pass"  # noqa: S105 - no password
_FAIL: Final = "fail"
_INSUFFICIENT: Final = "insufficient"
_OF_LOAD: Final = ("latency", "throughput")
_SILENT: Final = timedelta(minutes=2)  # a gate that runs records something every five seconds


class GateBody(msgspec.Struct, frozen=True, kw_only=True):
    """The answer about a gate.

    Parameters
    ----------
    verdict
        `pass`, `fail` or `insufficient`.
    reason
        The verdict in a sentence.
    candidate
        Digest of the candidate; empty where there is no such gate.
    slices
        The answer to each question about each slice, as in `gate_run.answers`.
    more
        About how many exchanges are missing to the slice that lacks most; None: unknown.
    checked_at
        When it was judged; None: not yet.
    ended_at
        When the command ended; None: it runs, or was killed. `insufficient` stays so from then on.
    """

    verdict: str
    reason: str
    candidate: str = ""
    slices: list[dict[str, Any]] = []
    more: int | None = None
    checked_at: datetime | None = None
    ended_at: datetime | None = None


def gate_routes(database: Database) -> Iterable[web.AbstractRouteDef]:
    """Return the routes; they read the gates from `database`."""

    async def show(request: web.Request) -> web.Response:
        return _response(200, await _found(database, request))

    async def promote(request: web.Request) -> web.Response:
        body = await _found(database, request)
        return _response(200 if body.verdict == _PASS else 403, body)

    async def rollback(request: web.Request) -> web.Response:
        body = await _found(database, request)
        return _response(200 if body.verdict == _FAIL else 403, body)

    one = r"/gate/{id:\d{1,19}}"
    return [web.get(one, show), web.post(f"{one}/promote", promote), web.post(f"{one}/rollback", rollback)]


def body_of(run: GateRun) -> GateBody:
    """Return the answer about a gate."""
    return GateBody(
        verdict=run.verdict,
        reason=_reason(run),
        candidate=run.candidate,
        slices=run.answers,
        more=run.more,
        checked_at=run.checked_at,
        ended_at=run.ended_at,
    )


async def _found(database: Database, request: web.Request) -> GateBody:
    number = int(request.match_info["id"])
    try:
        async with asyncio.timeout(_ANSWER_S):
            run = await read(database, number) if number <= _MOST_ID else None
    except (RetryError, OperatorError, TimeoutError):
        return GateBody(verdict=_INSUFFICIENT, reason="the database does not answer: ask again")
    if run is None:
        return GateBody(
            verdict=_INSUFFICIENT, reason=f"there is no gate {number}: `quantdrift gate --live` makes one"
        )
    return body_of(run)


def _reason(run: GateRun) -> str:
    if run.verdict == _PASS:
        return "every slice passes"
    if run.verdict == _FAIL:
        slices = _named(run, _FAIL)
        load = [
            one["question"] if one["slice"] == ALL else f"{one['question']} of {one['slice']}"
            for one in run.answers
            if one["verdict"] == _FAIL and one.get("question") in _OF_LOAD
        ]
        parts = [f"above the limit: {slices}"] if slices else []
        parts += [f"the load run does not keep its budget: {', '.join(load)}"] if load else []
        return "; ".join(parts)
    if not run.answers:
        return f"nothing was judged yet{_end_of(run)}"
    missing = (
        "more exchanges than anybody can wait for" if run.more is None else f"about {run.more} more exchanges"
    )
    return f"not enough evidence: {_named(run, _INSUFFICIENT)}; the slice that lacks most needs {missing}{_end_of(run)}"


def _end_of(run: GateRun) -> str:
    """Return what is known of the end of a gate without a verdict; nothing while it runs."""
    if run.ended_at is not None:
        return "; the gate has ended: start another one"
    last_at = run.checked_at or run.begun_at
    if datetime.now(UTC) - last_at > _SILENT:
        return f"; nothing was recorded since {last_at:%Y-%m-%d %H:%M} UTC: if the command does not run any more, start another one"
    return ""


def _named(run: GateRun, verdict: str) -> str:
    return ", ".join(
        dict.fromkeys(
            one["slice"]
            for one in run.answers
            if one["verdict"] == verdict and one.get("question") not in _OF_LOAD
        )
    )


def _response(status: int, body: GateBody) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")
