"""The port of KServe's logger, which is off unless it has an address of its own.

The logger can only be given a URL, so its token may be in the path.
"""

import socket
from types import TracebackType

from aiohttp import web

from quantdrift.core.config import Config
from quantdrift.core.records import Way
from quantdrift.sidecar.intake.gateway import Gateway
from quantdrift.sidecar.intake.http import NO_TOKEN, IntakePort, error_response
from quantdrift.sidecar.intake.kserve_logger import KserveLogger
from quantdrift.sidecar.state.config import LiveConfig


class KserveSink(IntakePort):
    """Serves `POST /kserve/TOKEN`, and `POST /` with a bearer token, while it is entered.

    Parameters and errors as of `IntakePort`.
    """

    def __init__(self, config: Config, token: str, gateway: Gateway, listener: socket.socket) -> None:
        routes = [web.post("/", self._event), web.post("/kserve/{token}", self._event_by_path)]
        super().__init__(config, token, gateway, listener, routes)
        self._logger = KserveLogger(config, gateway)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, trace)
        self._logger.close()

    def reconfigure(self, live_config: LiveConfig) -> None:
        """Apply another window and other limits."""
        self._logger.reconfigure(live_config.config)

    def tick(self) -> None:
        """Drop halves that have waited too long, and use a changed certificate. Called about once a second."""
        super().tick()
        self._logger.tick()

    async def _event(self, request: web.Request) -> web.Response:
        if (origin := self._origin(request, Way.KSERVE_LOGGER, "POST /")) is None:
            return error_response(NO_TOKEN, 401)
        return await self._logger.handle(request, origin)

    async def _event_by_path(self, request: web.Request) -> web.Response:
        origin = self._callers.by_token(Way.KSERVE_LOGGER, "POST /kserve/", request.match_info["token"])
        if origin is None:
            raise web.HTTPNotFound
        return await self._logger.handle(request, origin)
