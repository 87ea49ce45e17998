"""Verdicts of gates over HTTP, at the monitor's admin port, for programs that roll out a model.

| request | answer |
|---|---|
| `GET /gate/ID?candidate=sha256:...` | always 200, with the verdict: a program that takes any other status for a failure must not roll back for it |
| `POST /gate/ID/promote?candidate=sha256:...` | 200 where the gate has passed, else 403 with the reason |
| `POST /gate/ID/rollback?candidate=sha256:...` | 200 where the gate has failed, else 403 with the reason: there a 200 is the rollback |

A verdict is the answer about the candidate that is rolled out, by the options that the monitor has, for a day. About another candidate, of
other options, or later the answer is `insufficient`. So it is where something cannot be told: an unknown number, a database that does not
answer, a caller without a token. Nothing is changed.

The token is a bearer token. Flagger cannot send one, so both may be in the body of a POST, as Flagger writes it:
`{"metadata": {"candidate": "sha256:...", "token": "..."}}`.
"""

import asyncio
import contextlib
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import msgspec
from aiohttp import web

from quantdrift.core.config.address import is_loopback, read_address
from quantdrift.core.config.callers import Caller, TokenScope, find_caller, read_callers
from quantdrift.core.config.schema import Config
from quantdrift.core.config.state import changed_options, judged_by
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


class _Metadata(msgspec.Struct, frozen=True):
    candidate: str = ""
    token: str = ""


class _Body(msgspec.Struct, frozen=True):
    metadata: _Metadata | None = None


class _Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asks: the candidate that is rolled out, and the token of the program that rolls it out."""

    candidate: str
    token: str


def gate_routes(database: Database, config: Config, token: str = "") -> Iterable[web.AbstractRouteDef]:
    """Return the routes; they read the gates from `database`.

    Parameters
    ----------
    config
        What the monitor watches by. A verdict by other options is none.
    token
        Content of `monitor.gate_token_file` at the start; empty: there is no file.
    """
    callers = _Callers(config, token)

    async def answer(request: web.Request) -> GateBody:
        try:
            async with asyncio.timeout(_ANSWER_S):
                asked = await _asked(request)
                caller = callers.find(asked.token)
                if isinstance(caller, str):
                    return GateBody(verdict=_INSUFFICIENT, reason=caller)
                number = int(request.match_info["id"])
                run = await read(database, number) if number <= _MOST_ID else None
        except (RetryError, OperatorError, TimeoutError):
            return GateBody(verdict=_INSUFFICIENT, reason="the database does not answer: ask again")
        if run is None or not _may_ask(caller, run.model):
            return GateBody(
                verdict=_INSUFFICIENT,
                reason=f"there is no gate {number}: `quantdrift gate --live` makes one",
            )
        return body_of(run, _unfit(run, asked.candidate, config))

    async def show(request: web.Request) -> web.Response:
        return _response(200, await answer(request))

    async def promote(request: web.Request) -> web.Response:
        body = await answer(request)
        return _response(200 if body.verdict == _PASS else 403, body)

    async def rollback(request: web.Request) -> web.Response:
        body = await answer(request)
        return _response(200 if body.verdict == _FAIL else 403, body)

    path = r"/gate/{id:\d{1,19}}"
    return [web.get(path, show), web.post(f"{path}/promote", promote), web.post(f"{path}/rollback", rollback)]


def body_of(run: GateRun, unfit: str = "") -> GateBody:
    """Return the answer about a gate.

    Parameters
    ----------
    unfit
        Why its verdict is not the answer to what was asked; empty: it is.
    """
    return GateBody(
        verdict=_INSUFFICIENT if unfit else run.verdict,
        reason=unfit or _reason(run),
        candidate=run.candidate,
        slices=run.answers,
        more=run.more,
        checked_at=run.checked_at,
        ended_at=run.ended_at,
    )


_ANYBODY: Final = Caller(name="anybody")


class _Callers:
    """The programs that may ask for verdicts: whoever has a token; without a file everybody on this machine."""

    def __init__(self, config: Config, token: str) -> None:
        self._file, self._token = config.monitor.gate_token_file, token
        self._is_local = is_loopback(read_address(config.monitor.admin).host)

    def find(self, token: str) -> Caller | str:
        """Return the program with this token, or why it is refused."""
        if not self._token and self._is_local:
            return _ANYBODY
        if not self._token:
            return (
                "this port can be reached by others, and nobody would be checked: set monitor.gate_token_file"
            )
        text = self._token
        with contextlib.suppress(OSError, UnicodeDecodeError):  # a mount that is being replaced
            text = Path(self._file).read_text(encoding="utf-8").strip() or text
        try:
            callers = read_callers(text, "monitor.gate_token_file")
        except OperatorError as error:
            return f"nobody can be checked: {error}"
        caller = find_caller(callers, token, datetime.now(UTC)) if token else None
        if caller is not None and TokenScope.GATE not in caller.scopes:
            return "this token is not for `gate`: see may= in its line of monitor.gate_token_file"
        return (
            caller
            or "the token is missing or wrong: send `Authorization: Bearer TOKEN` with one of monitor.gate_token_file"
        )


def _may_ask(caller: Caller, model: str) -> bool:
    return not caller.models or any(fnmatchcase(model, pattern) for pattern in caller.models)


async def _asked(request: web.Request) -> _Asked:
    """Return what a request asks, by its address and header or else in its body."""
    kind, _, credentials = request.headers.get("Authorization", "").partition(" ")
    metadata = _Metadata()
    if request.method == "POST":
        try:
            body = msgspec.json.decode(await request.read(), type=_Body)
            metadata = body.metadata or metadata
        except msgspec.DecodeError:
            pass  # it is not Flagger's
    return _Asked(
        candidate=request.query.get("candidate", "") or metadata.candidate,
        token=credentials.strip() if kind.lower() == "bearer" else metadata.token,
    )


def _unfit(run: GateRun, candidate: str, config: Config) -> str:
    """Return why the verdict of a gate is no answer about a candidate that is rolled out now; empty: it is one."""
    return next(_misfits(run, candidate, config), "")


def _misfits(run: GateRun, candidate: str, config: Config) -> Iterator[str]:
    if not candidate:
        yield f"the candidate is missing: ask with ?candidate= and the digest of what is rolled out; gate {run.id} judges {run.candidate}"
    if candidate != run.candidate:
        yield f"gate {run.id} judges another candidate: {run.candidate}"
    if run.verdict == _INSUFFICIENT:
        return
    if run.age_s > (longest_s := config.monitor.gate_max_age_s):
        yield (
            f"the verdict is {_span(run.age_s)} old, and monitor.gate_max_age_s allows {_span(longest_s)}: run the gate again"
        )
    if run.slice:
        yield f"gate {run.id} judged {run.slice} alone: run it without --alert"
    model = config.model(run.model)
    if model is None:
        yield f"the monitor's configuration has no model `{run.model}`: run the gate with the monitor's configuration"
    elif changed := changed_options(run.configuration, judged_by(config, model)):
        yield f"it was judged by other options than the monitor's ({', '.join(changed)}): run the gate again with the monitor's"


def _span(seconds: float) -> str:
    for unit, length_s in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds / length_s:.3g} {unit}"
    return f"{seconds:.3g} s"


def _reason(run: GateRun) -> str:
    if run.verdict == _PASS:
        return "every slice passes"
    if run.verdict == _FAIL:
        slices = _named(run, _FAIL)
        load = [
            answer["question"] if answer["slice"] == ALL else f"{answer['question']} of {answer['slice']}"
            for answer in run.answers
            if answer["verdict"] == _FAIL and answer.get("question") in _OF_LOAD
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
            answer["slice"]
            for answer in run.answers
            if answer["verdict"] == verdict and answer.get("question") not in _OF_LOAD
        )
    )


def _response(status: int, body: GateBody) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")
