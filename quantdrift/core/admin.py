"""The admin port of every role: /livez, /readyz and /metrics, served by aiohttp."""

from collections.abc import Callable, Iterable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest

from quantdrift.core.config.address import read_address
from quantdrift.core.http_port import LIMITS, HttpPort, Limits

_BODY_BYTES = 4096  # no route has content that is read


class Admin:
    """Serves liveness, readiness and metrics.

    Parameters
    ----------
    address
        HOST:PORT; port 0 takes a free one, told by `port` after `start`.
    ready
        Says whether the process does its work; asked at each request.
    more
        What else is served there.
    limits
        What callers may hold: whoever reaches the port may be anybody.
    """

    def __init__(
        self,
        address: str,
        ready: Callable[[], bool],
        more: Iterable[web.AbstractRouteDef] = (),
        *,
        limits: Limits = LIMITS,
    ) -> None:
        where = read_address(address)
        self._host = where.host
        self.port = where.port
        self._ready = ready
        app = web.Application(client_max_size=_BODY_BYTES)
        app.add_routes(
            [
                web.get("/livez", self._livez),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._metrics),
                *more,
            ]
        )
        self._http = HttpPort(app, limits)

    async def start(self) -> None:
        """Open the port."""
        self.port = await self._http.open((self._host, self.port))

    async def stop(self) -> None:
        """Close the port."""
        await self._http.close()

    async def _livez(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n") if self._ready() else web.Response(status=503, text="not ready\n")

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(REGISTRY), headers={"Content-Type": CONTENT_TYPE_LATEST})
