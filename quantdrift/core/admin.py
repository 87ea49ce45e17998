"""The admin port of every role: /livez, /readyz and /metrics, served by aiohttp."""

from collections.abc import Callable, Iterable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest

from quantdrift.core.config.address import read_address


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
    """

    def __init__(
        self, address: str, ready: Callable[[], bool], more: Iterable[web.AbstractRouteDef] = ()
    ) -> None:
        where = read_address(address)
        self._host = where.host
        self.port = where.port
        self._ready = ready
        app = web.Application()
        app.add_routes(
            [
                web.get("/livez", self._livez),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._metrics),
                *more,
            ]
        )
        self._runner = web.AppRunner(app, access_log=None)

    async def start(self) -> None:
        """Open the port."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Close the port."""
        await self._runner.cleanup()

    async def _livez(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n") if self._ready() else web.Response(status=503, text="not ready\n")

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(REGISTRY), headers={"Content-Type": CONTENT_TYPE_LATEST})
