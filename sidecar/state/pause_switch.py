"""The local pause switch: a Unix socket and the polled pause file. It works without NATS.

The socket is in the sidecar's own directory, which no other user and no other container has, so whoever reaches it may pause; the kernel
says which user it was. The admin port only shows what is paused: other containers of the pod reach it, and so does each page in the
browser of somebody who forwards it.

It is apart from `pause` because relay workers must not import aiohttp and OpenTelemetry.
"""

import asyncio
import pwd
import socket
import struct
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec
from aiohttp import web

from quantdrift.core.config.address import is_own_host, read_address
from quantdrift.core.process.http_port import HttpPort
from quantdrift.core.process.run import Stop, supervise
from quantdrift.core.sampling.pause import MAX_BYTES, LocalPause, Order, Pause, PauseError, encode
from quantdrift.core.telemetry import Labels
from quantdrift.sidecar.state.pause import PauseFiles, PauseSource, read_pause_file, write_pause
from quantdrift.sidecar.state.state_file import StateFile

_POLL_S = 1.0
_ORDERS = "paused-by-hand"
_SOCKET: Final = "switch"
_CREDENTIALS: Final = struct.Struct("3i")  # process, user, group


class PauseSwitch:
    """The local pause.

    It joins the orders that come through the socket with the pause file, and writes them for all processes.

    Parameters
    ----------
    directory
        Where the pause files are, and the socket is made: of this user alone.
    file
        `sidecar.pause_file`, or empty.
    admin
        `sidecar.admin`.
    """

    def __init__(self, directory: Path, file: str, admin: str) -> None:
        self._directory = directory
        self._socket = directory / _SOCKET
        self._names = {read_address(admin).host.lower()}
        self._file = Path(file) if file else None
        # A predecessor of this process may have been killed: its orders stay in force.
        self._orders = StateFile(directory / _ORDERS, Pause)
        self._orders.refresh()
        self._by_hand = self._orders.record or Pause()
        self._pauses = PauseFiles(directory)
        self._pauses.refresh()
        self._written = self._pauses.of(PauseSource.HERE)
        self._written_by_hand: Pause | None = None

    def routes(self) -> list[web.AbstractRouteDef]:
        """Return the admin port's routes: `GET /pause`, with the path of the socket, and refusals of what changes something."""
        return [
            web.get("/pause", self._show_page),
            web.post("/pause", self._refuse),
            web.post("/resume", self._refuse),
        ]

    def gauge(self) -> Iterable[tuple[float, Labels]]:
        """Return 1 for everything under the label `*` and for each paused model under its name."""
        paused = self._pauses.refresh()
        return [
            (float(paused.everything), {"model": "*"}),
            *((1.0, {"model": name}) for name in paused.models),
        ]

    async def run(self, stop: Stop) -> None:
        """Poll the file, and serve `GET /pause`, `POST /pause` and `POST /resume` at the socket, until `stop`."""

        async def poll_file() -> None:
            await stop.wait(_POLL_S)
            self._write()

        async def serve() -> None:
            await self._serve(stop)

        await asyncio.gather(
            supervise("polling the pause file", poll_file, stop),
            supervise("serving the socket of the pause switch", serve, stop),
        )

    async def _serve(self, stop: Stop) -> None:
        app = web.Application(client_max_size=MAX_BYTES)
        app.add_routes(
            [
                web.get("/pause", self._show),
                web.post("/pause", self._pause),
                web.post("/resume", self._resume),
            ]
        )
        self._socket.unlink(missing_ok=True)  # of an admin process that was killed
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.setblocking(False)
            listener.bind(str(self._socket))
            self._socket.chmod(0o600)
            listener.listen()
            port = HttpPort(app)
            await port.open(listener)
            try:
                await stop.wait()
            finally:
                await port.close()

    def _write(self) -> None:
        now = datetime.now(UTC)
        from_file = Pause() if self._file is None else read_pause_file(self._file, now)
        by_hand = self._by_hand.at(now)
        joined = Pause(
            everything=by_hand.everything or from_file.everything,
            models={**from_file.models, **by_hand.models},
        )
        if joined.everything is None and len(encode(joined)) > MAX_BYTES:
            joined = Pause(everything=Order(by="too many models are paused by name", at=now))
        if _paused_names(joined) != _paused_names(self._written) or by_hand != self._written_by_hand:
            write_pause(self._directory, PauseSource.HERE, joined)
            self._written, self._written_by_hand = joined, by_hand

    async def _show_page(self, request: web.Request) -> web.Response:
        # A page of another site must not read who paused, nor where the socket is.
        if "Origin" in request.headers or not is_own_host(request.headers.get("Host", ""), self._names):
            return web.json_response(
                {"error": "only for programs that ask this port by its address"}, status=403
            )
        return await self._show(request)

    async def _refuse(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "error": "not through this port: run `quantdrift pause --local` in the container of the sidecar"
            },
            status=403,
        )

    async def _show(self, _: web.Request) -> web.Response:
        self._pauses.refresh()
        body = {source.name.lower(): msgspec.to_builtins(self._pauses.of(source)) for source in PauseSource}
        return web.json_response({**body, "socket": str(self._socket)})

    async def _pause(self, request: web.Request) -> web.Response:
        try:
            asked = msgspec.json.decode(await request.read(), type=LocalPause)
            order = Order(by=_user(request), at=datetime.now(UTC), until=asked.until, reason=asked.reason)
            self._by_hand = self._by_hand.at(order.at).paused(order, asked.model or None)
        except (PauseError, msgspec.MsgspecError) as error:
            return web.json_response({"error": str(error)}, status=400)
        return await self._write_and_show(request)

    async def _resume(self, request: web.Request) -> web.Response:
        try:
            asked = msgspec.json.decode(await request.read(), type=LocalPause)
        except msgspec.MsgspecError as error:
            return web.json_response({"error": str(error)}, status=400)
        self._by_hand = self._by_hand.resumed(asked.model or None)
        return await self._write_and_show(request)

    async def _write_and_show(self, request: web.Request) -> web.Response:
        try:
            self._orders.write(self._by_hand)
            self._write()
        except OSError as error:
            return web.json_response(
                {
                    "error": f"the pause cannot be written for the sidecar's processes yet, it is tried again every second: {error}"
                },
                status=507,
            )
        return await self._show(request)


def _paused_names(pause: Pause) -> tuple[bool, frozenset[str]]:
    return pause.everything is not None, frozenset(pause.models)


def _user(request: web.Request) -> str:
    """Return the user at the other end of the socket, as the kernel says."""
    transport = request.transport
    peer = None if transport is None else transport.get_extra_info("socket")
    if peer is None or not hasattr(socket, "SO_PEERCRED"):  # the connection is closed, or this is not Linux
        return "a user at the sidecar"
    size = _CREDENTIALS.size
    _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    try:
        name = pwd.getpwuid(user).pw_name
    except KeyError:
        name = str(user)
    return f"user {name} at the sidecar"
