"""A reverse proxy as one writes it with aiohttp: the handler of its server asks its client."""

import aiohttp
from aiohttp import web

_HOP = frozenset({"connection", "content-length", "host", "keep-alive", "transfer-encoding"})
_BACKEND = web.AppKey("backend", aiohttp.ClientSession)
_MAX_BODY_BYTES = 16 * 1024 * 1024


async def _relay(request: web.Request) -> web.StreamResponse:
    headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP}
    body = await request.read()
    async with request.app[_BACKEND].request(
        request.method, request.path_qs, headers=headers, data=body
    ) as answer:
        content = await answer.read()
        kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP}
        return web.Response(status=answer.status, body=content, headers=kept)


def main(port: int, backend: str) -> None:
    """Serve until SIGTERM."""

    async def connect(app: web.Application) -> None:
        app[_BACKEND] = aiohttp.ClientSession(
            backend, connector=aiohttp.TCPConnector(limit=0), auto_decompress=False
        )

    async def disconnect(app: web.Application) -> None:
        await app[_BACKEND].close()

    app = web.Application(client_max_size=_MAX_BODY_BYTES)
    app.router.add_route("*", "/{path:.*}", _relay)
    app.on_startup.append(connect)
    app.on_cleanup.append(disconnect)
    web.run_app(app, host="127.0.0.1", port=port, access_log=None, print=lambda *_: None)
