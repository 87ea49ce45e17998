"""The HTTP ports of the intake, served by aiohttp; and the one for batches of exchanges.

A token is checked before any content is read. Every response says whether the message was understood, but not
whether the exchange was sampled or lost, because that does not concern the caller.
"""

import asyncio
import base64
import binascii
import socket
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from types import TracebackType
from typing import Annotated, Self

import msgspec
from aiohttp import ClientPayloadError, web
from aiohttp.http_exceptions import ContentEncodingError
from aiohttp.typedefs import Handler
from aiohttp.web import RequestPayloadError

from quantdrift.core.clock import SystemClock
from quantdrift.core.config import Config
from quantdrift.core.errors import QuantdriftError
from quantdrift.core.process.http_port import HttpPort, PortLimits
from quantdrift.core.records import Way
from quantdrift.sidecar.handoff.frame import Origin
from quantdrift.sidecar.intake.callers import Callers, CallersFile
from quantdrift.sidecar.intake.gateway import Gateway
from quantdrift.sidecar.intake.kserve_events import METADATA_BYTES
from quantdrift.sidecar.intake.server_tls import ServerTls
from quantdrift.sidecar.state.config import LiveConfig
from quantdrift.sidecar.state.routes import model_in

_JSON = "application/json"
_PIECE_BYTES = 100  # memory of a piece of a body in addition to its content
_READ_S = 60.0  # after this time the sender of a batch is considered stuck
_END_S = 1.0  # at shutdown, to receive the rest of a body
# The logger sends all headers of the client in one field.
_LIMITS = PortLimits(head_bytes=METADATA_BYTES + 16 * 1024)
NO_TOKEN = "give the intake's token: Authorization: Bearer TOKEN"  # noqa: S105 - an explanation, not a secret
_CONTENT_ENCODINGS = frozenset({"identity", "gzip", "deflate"})  # which the server decodes
MAX_EXCHANGES = 1000
_MAX_AGE = timedelta(days=1)
_MAX_AHEAD = timedelta(minutes=5)
_NONE = msgspec.Raw()


class _NoMemoryError(Exception):
    """The memory that all intakes share is in use."""


class IntakePort:
    """A port of the intake: it checks who sends each call, and speaks TLS if a certificate is configured.

    Parameters
    ----------
    config
        Configuration of the sidecar.
    token
        The tokens of which callers must give one, as they were at the start; empty: every call is refused.
    gateway
        Receives the exchanges.
    listener
        Listening socket.
    routes
        What it serves.

    Raises
    ------
    OperatorError
        The certificate or the tokens cannot be read.
    """

    def __init__(
        self,
        config: Config,
        token: str,
        gateway: Gateway,
        listener: socket.socket,
        routes: Iterable[web.RouteDef],
    ) -> None:
        self._callers = Callers(CallersFile(token, config.intake.token_file, SystemClock()), gateway)
        self._gateway = gateway
        self._listener = listener
        self._tls = ServerTls.of(config.intake)
        app = web.Application(
            client_max_size=config.sidecar.max_exchange_bytes, middlewares=[_errors_as_json]
        )
        app.add_routes(routes)
        self._port = HttpPort(app, _LIMITS, shutdown_timeout=_END_S)

    async def __aenter__(self) -> Self:
        await self._port.open(self._listener, None if self._tls is None else self._tls.context)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._port.close()

    def tick(self) -> None:
        """Use a changed certificate. Called about once a second."""
        if self._tls is not None:
            self._tls.refresh()

    def _origin(self, request: web.Request, way: Way, endpoint: str) -> Origin | None:
        certificate = None if request.transport is None else request.transport.get_extra_info("peercert")
        return self._callers.by_header(way, endpoint, request.headers.get("Authorization", ""), certificate)


class HttpIntake(IntakePort):
    """Serves `POST /v1/exchanges` while it is entered; parameters and errors as of `IntakePort`."""

    def __init__(self, config: Config, token: str, gateway: Gateway, listener: socket.socket) -> None:
        routes = [web.post("/v1/exchanges", self._exchanges), web.get("/openapi.json", self._openapi)]
        super().__init__(config, token, gateway, listener, routes)
        self._max_batch_bytes = config.sidecar.max_exchange_bytes
        self._limit_bytes = config.intake.max_pending_bytes

    def reconfigure(self, live_config: LiveConfig) -> None:
        """Apply another limit; the longest body that is read stays."""
        self._limit_bytes = live_config.config.intake.max_pending_bytes

    async def _exchanges(self, request: web.Request) -> web.Response:
        if (origin := self._origin(request, Way.INTAKE, "POST /v1/exchanges")) is None:
            return error_response(NO_TOKEN, 401)
        if request.content_type != _JSON:
            return error_response("send a batch as application/json", 415)
        if request.headers.get("Content-Encoding", "identity").lower() not in _CONTENT_ENCODINGS:
            return error_response("compress a batch with gzip or deflate only", 415)
        try:
            batch: Batch = read_batch(await self._read(request))
        except _NoMemoryError:
            return error_response("there is no memory for the batch now: send it again later", 503)
        except (BatchError, TimeoutError) as error:
            return error_response(str(error) or "the body did not arrive in time", 400)
        rejected = list(batch.rejected)
        for exchange in batch.exchanges:
            model = exchange.model
            if model and not origin.allows(model):
                self._gateway.refuse_model(origin)
                rejected.append((exchange.index, f"this caller may not report on model {model[:64]}"))
                continue
            sampled = self._gateway.sample(exchange.target, exchange.headers, origin=origin)
            if sampled is not None:
                self._gateway.hand_over(
                    sampled,
                    exchange.request,
                    exchange.response,
                    status=exchange.status,
                    headers=exchange.response_headers,
                    captured_at=exchange.captured_at,
                )
        return web.json_response(
            {
                "accepted": len(batch.exchanges) + len(batch.rejected) - len(rejected),
                "rejected": [{"index": index, "error": error} for index, error in sorted(rejected)],
            }
        )

    async def _read(self, request: web.Request) -> bytes:
        """Return the body of a batch; while it arrives it counts for the memory that all intakes share.

        Raises
        ------
        TimeoutError
            It does not arrive in time.
        HTTPRequestEntityTooLarge
            It is longer than an exchange may be.
        _NoMemoryError
            The memory is in use.
        """
        parts: list[bytes] = []
        n_bytes = 0
        try:
            async with asyncio.timeout(_READ_S):
                async for part in request.content.iter_any():
                    if n_bytes + len(part) > self._max_batch_bytes:
                        raise web.HTTPRequestEntityTooLarge(self._max_batch_bytes, n_bytes + len(part))
                    if not self._gateway.reserve(len(part) + _PIECE_BYTES, self._limit_bytes):
                        raise _NoMemoryError
                    n_bytes += len(part)
                    parts.append(part)
            return b"".join(parts)
        finally:
            self._gateway.add_held_bytes(-n_bytes - len(parts) * _PIECE_BYTES)

    async def _openapi(self, _: web.Request) -> web.Response:
        text = (files("quantdrift.sidecar.intake") / "openapi.json").read_text(encoding="utf-8")
        return web.Response(text=text, content_type=_JSON)


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:  # body too long, unknown path or wrong method
        response = error_response(error.text or error.reason, error.status)
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except (ClientPayloadError, ContentEncodingError, RequestPayloadError) as error:
        return error_response(f"the body cannot be read: {error}", 400)


def error_response(error: str, status: int) -> web.Response:
    """Return an answer with an error, as JSON."""
    return web.json_response({"error": error}, status=status)


class BatchError(QuantdriftError):
    """The body is not a batch."""


class SubmittedExchange(msgspec.Struct, frozen=True, kw_only=True):
    """One exchange of a batch.

    Parameters
    ----------
    index
        Its position in the batch.
    target
        The path that the client requested.
    model
        The model that the path or else the request names; empty: neither does.
    headers
        Headers of the request, names in lower case.
    request, response
        Contents.
    status, response_headers
        Status and headers of the response.
    captured_at
        Time when the response was complete; aware.
    """

    index: int
    target: str
    model: str
    headers: Mapping[str, str]
    request: bytes
    response: bytes
    status: int
    response_headers: Mapping[str, str]
    captured_at: datetime


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed batch.

    Parameters
    ----------
    exchanges
        The valid exchanges.
    rejected
        Index and error of each of the others.
    """

    exchanges: list[SubmittedExchange]
    rejected: list[tuple[int, str]]


class _WireExchange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An exchange on the wire; a content is a JSON document, or any bytes as base64."""

    target: Annotated[str, msgspec.Meta(pattern="^/", max_length=4096)]
    headers: dict[str, str] = {}
    request: msgspec.Raw = _NONE
    request_base64: str | msgspec.UnsetType = msgspec.UNSET
    response: msgspec.Raw = _NONE
    response_base64: str | msgspec.UnsetType = msgspec.UNSET
    status: Annotated[int, msgspec.Meta(ge=100, le=599)] = 200
    response_headers: dict[str, str] = {}
    captured_at: Annotated[datetime, msgspec.Meta(tz=True)] | msgspec.UnsetType = msgspec.UNSET


class _Envelope(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    exchanges: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_EXCHANGES)]


class _Named(msgspec.Struct, frozen=True):
    model: str = ""


_NAMED = msgspec.json.Decoder(_Named)
_ENVELOPE = msgspec.json.Decoder(_Envelope)
_EXCHANGE = msgspec.json.Decoder(_WireExchange)


def read_batch(body: bytes, now: datetime | None = None) -> Batch:
    """Return the batch in `body`; an invalid exchange does not affect the others.

    Parameters
    ----------
    body
        JSON.
    now
        Aware. It is the time of exchanges without one; a given time must be at most a day before or five
        minutes after.

    Raises
    ------
    BatchError
        It is not JSON, or not a batch.
    """
    try:
        envelope = _ENVELOPE.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BatchError(str(error)) from error
    at = now or datetime.now(UTC)
    batch = Batch(exchanges=[], rejected=[])
    for index, raw in enumerate(envelope.exchanges):
        try:
            batch.exchanges.append(_checked(index, _EXCHANGE.decode(raw), at))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
            batch.rejected.append((index, str(error)))
    return batch


def _checked(index: int, wire: _WireExchange, now: datetime) -> SubmittedExchange:
    at = now if isinstance(wire.captured_at, msgspec.UnsetType) else wire.captured_at
    if not now - _MAX_AGE <= at <= now + _MAX_AHEAD:
        raise ValueError("captured_at is more than a day in the past, or in the future")
    request = _content("request", wire.request, wire.request_base64)
    path = wire.target.partition("?")[0].encode(errors="replace")
    return SubmittedExchange(
        index=index,
        target=wire.target,
        model=model_in(path) or _model_of(request),
        headers={name.lower(): value for name, value in wire.headers.items()},
        request=request,
        response=_content("response", wire.response, wire.response_base64),
        status=wire.status,
        response_headers={name.lower(): value for name, value in wire.response_headers.items()},
        captured_at=at,
    )


def _model_of(request: bytes) -> str:
    """Return the member `model` of a JSON request, as of the OpenAI protocol; empty if there is none.

    The capture process checks again, for all protocols and encodings.
    """
    try:
        return _NAMED.decode(request).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


def _content(name: str, document: msgspec.Raw, text: str | msgspec.UnsetType) -> bytes:
    body = bytes(document)
    if bool(body) == isinstance(text, str):
        raise ValueError(f"give either {name} or {name}_base64")
    if isinstance(text, msgspec.UnsetType):
        return body
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{name}_base64 is not base64") from error
