"""The admin port of every process: /livez, /readyz and /metrics, served by aiohttp."""

import os
import socket
from collections.abc import Callable, Iterable
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest

from quantdrift.core.config.address import is_loopback, is_own_host, read_address
from quantdrift.core.errors import OperatorError
from quantdrift.core.process.child import INSTANCE, INSTANCE_HEADER
from quantdrift.core.process.http_port import LIMITS, HttpPort, PortLimits

_BODY_BYTES: Final = 4096  # a gate's alone is read


def _own_host(listen: str) -> Middleware:
    """Return what refuses requests under a name that somebody else pointed to this machine, to read its ports by a browser.

    Elsewhere than on loopback a port has names that only the cluster knows.
    """

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        host = request.headers.get("Host", "")
        if host and is_loopback(listen) and not is_own_host(host, {listen.lower()}):
            return web.Response(
                status=421, text="This name is not one of this port: use localhost or the IP address.\n"
            )
        return await handler(request)

    return guarded


class Admin:
    """HTTP server for liveness, readiness and metrics.

    Parameters
    ----------
    option
        Name of the option with the address, for the error.
    address
        HOST:PORT; port 0 takes a free one, which `port` gives after `start`.
    ready
        Returns whether the process is ready; called at each request.
    live
        Returns whether the process does its work, so that it need not be restarted; called at each request.
    more
        Additional routes.
    listener
        A socket that listens at the address already; None: the port is opened here.
    limits
        Limits for callers, which are not trusted.
    """

    def __init__(
        self,
        option: str,
        address: str,
        ready: Callable[[], bool],
        more: Iterable[web.AbstractRouteDef] = (),
        *,
        live: Callable[[], bool] = lambda: True,
        listener: socket.socket | None = None,
        limits: PortLimits = LIMITS,
    ) -> None:
        self._live = live
        self._listener = listener
        self._shown = f"{option} {address}"
        where = read_address(address)
        self._host = where.host
        self.port = where.port
        self._ready = ready
        app = web.Application(client_max_size=_BODY_BYTES, middlewares=[_own_host(where.host)])
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
        """Open the port.

        Raises
        ------
        OperatorError
            It cannot be opened.
        """
        try:
            self.port = await self._http.open(self._listener or (self._host, self.port))
        except OSError as error:
            await self._http.close()
            code = error.errno or 0
            why = os.strerror(code).lower() if code > 0 else error.strerror
            raise OperatorError(f"{self._shown} cannot be opened: {why}") from error

    async def stop(self) -> None:
        """Close the port."""
        await self._http.close()

    async def _livez(self, _: web.Request) -> web.Response:
        live = self._live()
        return web.Response(status=200 if live else 503, text="ok\n" if live else "not working\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        ready = self._ready()
        return web.Response(
            status=200 if ready else 503,
            text="ok\n" if ready else "not ready\n",
            headers={INSTANCE_HEADER: os.environ[INSTANCE]} if INSTANCE in os.environ else None,
        )

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(REGISTRY), headers={"Content-Type": CONTENT_TYPE_LATEST})
