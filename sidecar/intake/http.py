"""The HTTP ways in: the capture intake and the KServe logger's sink on one port, served by aiohttp.

Both ask for the intake's token before they read any content. KServe's logger can be given a URL and nothing else, so
its token may be in the path. Every answer says whether the message was understood, never what became of the exchange: sampling, losses and the
stream are nobody's business who serves models.
"""

import asyncio
import socket
from importlib.resources import files
from types import TracebackType
from typing import Self

from aiohttp import ClientPayloadError, web
from aiohttp.http_exceptions import ContentEncodingError
from aiohttp.typedefs import Handler
from aiohttp.web import RequestPayloadError

from quantdrift.core.config import Config
from quantdrift.core.process.http_port import HttpPort, Limits
from quantdrift.core.process.run import Stop, supervise
from quantdrift.sidecar.intake.batch import Batch, BatchError, read_batch
from quantdrift.sidecar.intake.callers import Callers
from quantdrift.sidecar.intake.gateway import Gateway
from quantdrift.sidecar.intake.kserve_events import METADATA_BYTES
from quantdrift.sidecar.intake.kserve_logger import KserveLogger
from quantdrift.sidecar.state.config import LiveConfig
from quantdrift.sidecar.state.counters import Denial

_JSON = "application/json"
_TICK_S = 1.0
_READ_S = 60.0  # a batch has come by then, or its sender is stuck
_END_S = 1.0  # at the end: whoever has not sent its body by then has lost it
# A logger sends the client's headers as one field.
_LIMITS = Limits(head_bytes=METADATA_BYTES + 16 * 1024)
_NO_TOKEN = "give the intake's token: Authorization: Bearer TOKEN"  # noqa: S105 - says how
_CODINGS = frozenset({"identity", "gzip", "deflate"})  # undone by the server


class HttpIntake:
    """Serves `POST /v1/exchanges`, and `POST /` and `POST /kserve/TOKEN` for the logger, while it is entered.

    Parameters
    ----------
    config
        Of the sidecar.
    token
        That callers must give; empty: nobody is let in.
    entrance
        Where exchanges go.
    listener
        Listening socket.
    """

    def __init__(self, config: Config, token: str, entrance: Gateway, listener: socket.socket) -> None:
        self._callers = Callers(token, entrance)
        self._has_logger = config.intake.kserve_logger
        self._entrance = entrance
        self._listener = listener
        self._logger = KserveLogger(config, entrance)
        self._ended = Stop()
        self._ticking: asyncio.Task[None] | None = None
        app = web.Application(client_max_size=config.sidecar.max_exchange_bytes, middlewares=[_in_json])
        app.add_routes(
            [
                web.post("/", self._event),
                web.post("/kserve/{token}", self._event_by_path),
                web.post("/v1/exchanges", self._exchanges),
                web.get("/openapi.json", self._openapi),
            ]
        )
        self._port = HttpPort(app, _LIMITS, shutdown_timeout=_END_S)

    async def __aenter__(self) -> Self:
        await self._port.open(self._listener)
        self._ticking = asyncio.create_task(supervise("the pairs' tick", self._tick, self._ended))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._port.close()
        self._ended.set()
        if self._ticking is not None:
            await self._ticking
        self._logger.close()

    def reconfigure(self, live_config: LiveConfig) -> None:
        """Go over to other bounds; the longest body that is read stays."""
        self._logger.reconfigure(live_config.config)

    async def _tick(self) -> None:
        await self._ended.wait(_TICK_S)
        self._logger.tick()

    async def _event(self, request: web.Request) -> web.Response:
        if not self._has_token(request, "POST /"):
            return _told(_NO_TOKEN, 401)
        if not self._has_logger:
            self._callers.refuse("POST /", Denial.OFF)
            raise web.HTTPNotFound
        return await self._logger.handle(request)

    async def _event_by_path(self, request: web.Request) -> web.Response:
        way = "POST /kserve/"
        if not self._callers.is_token(way, request.match_info["token"]):
            raise web.HTTPNotFound
        if not self._has_logger:
            self._callers.refuse(way, Denial.OFF)
            raise web.HTTPNotFound
        return await self._logger.handle(request)

    async def _exchanges(self, request: web.Request) -> web.Response:
        if not self._has_token(request, "POST /v1/exchanges"):
            return _told(_NO_TOKEN, 401)
        if request.content_type != _JSON:
            return _told("a batch is application/json", 415)
        if request.headers.get("Content-Encoding", "identity").lower() not in _CODINGS:
            return _told("a batch may be compressed by gzip or deflate", 415)
        try:
            async with asyncio.timeout(_READ_S):
                body = await request.read()
            batch: Batch = read_batch(body)
        except TimeoutError:
            return _told("the body has not come", 400)
        except BatchError as error:
            return _told(str(error), 400)
        for one in batch.exchanges:
            ticket = self._entrance.offer(one.target, one.headers)
            if ticket is not None:
                self._entrance.hand_over(
                    ticket,
                    one.request,
                    one.response,
                    status=one.status,
                    headers=one.response_headers,
                    captured_at=one.captured_at,
                )
        return web.json_response(
            {
                "accepted": len(batch.exchanges),
                "rejected": [{"index": index, "error": error} for index, error in batch.rejected],
            }
        )

    async def _openapi(self, _: web.Request) -> web.Response:
        text = (files("quantdrift.sidecar.intake") / "openapi.json").read_text(encoding="utf-8")
        return web.Response(text=text, content_type=_JSON)

    def _has_token(self, request: web.Request, way: str) -> bool:
        return self._callers.has_token(way, request.headers.get("Authorization", ""))


@web.middleware
async def _in_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:  # too long, no such path, another method
        told = _told(error.text or error.reason, error.status)
        if "Allow" in error.headers:
            told.headers["Allow"] = error.headers["Allow"]
        return told
    except (ClientPayloadError, ContentEncodingError, RequestPayloadError) as error:
        return _told(f"the body cannot be read: {error}", 400)


def _told(error: str, status: int) -> web.Response:
    return web.json_response({"error": error}, status=status)
