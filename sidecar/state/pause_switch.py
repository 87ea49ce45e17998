"""Joins what was asked at the admin port with the pause file, and writes what the sidecar's processes read."""

from collections.abc import Iterable
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path

import msgspec
from aiohttp import web

from quantdrift.core.process.run import Stop, supervise
from quantdrift.core.sampling.pause import MAX_BYTES, Order, Pause, PauseError, encode
from quantdrift.core.telemetry import Labels
from quantdrift.sidecar.state.pause import PauseFiles, PauseSource, by_file, post


class PauseSwitch:
    """Joins what was said at the admin port with what the file says, and tells the sidecar's processes.

    Parameters
    ----------
    directory
        Where they look.
    file
        `sidecar.pause_file`, or empty.
    """

    def __init__(self, directory: Path, file: str) -> None:
        self._directory = directory
        self._file = Path(file) if file else None
        self._by_hand = Pause()
        self._posted = Pause()
        self._pauses = PauseFiles(directory)

    def routes(self) -> list[web.AbstractRouteDef]:
        """Return what the admin port serves: `GET /pause`, `POST /pause` and `POST /resume`, each with `?model=`."""
        return [
            web.get("/pause", self._show),
            web.post("/pause", self._pause),
            web.post("/resume", self._resume),
        ]

    def gauge(self) -> Iterable[tuple[float, Labels]]:
        """Return 1 for what is paused: everything under the label `*`, and each model under its name."""
        paused = self._pauses.look()
        return [
            (float(paused.everything), {"model": "*"}),
            *((1.0, {"model": name}) for name in paused.models),
        ]

    async def run(self, stop: Stop) -> None:
        """Look at the file until `stop`."""

        async def look() -> None:
            await stop.wait(_LOOK_S)
            self._post()

        await supervise("looking at the pause file", look, stop)

    def _post(self) -> None:
        now = datetime.now(UTC)
        told = Pause() if self._file is None else by_file(self._file, now)
        hand = self._by_hand.at(now)
        joined = Pause(everything=hand.everything or told.everything, models={**told.models, **hand.models})
        if joined.everything is None and len(encode(joined)) > MAX_BYTES:
            joined = Pause(everything=Order(by="too much is paused by name", at=now))
        if _what(joined) != _what(self._posted):
            post(self._directory, PauseSource.HERE, joined)
            self._posted = joined

    async def _show(self, _: web.Request) -> web.Response:
        self._pauses.look()
        body = {source.name.lower(): msgspec.to_builtins(self._pauses.of(source)) for source in PauseSource}
        return web.json_response(body)

    async def _pause(self, request: web.Request) -> web.Response:
        if (refusal := _refusal(request)) is not None:
            return refusal
        order = Order(by="the admin port", at=datetime.now(UTC))
        try:
            self._by_hand = self._by_hand.paused(order, request.query.get("model"))
        except PauseError as error:
            return web.json_response({"error": str(error)}, status=400)
        return await self._tell(request)

    async def _resume(self, request: web.Request) -> web.Response:
        if (refusal := _refusal(request)) is not None:
            return refusal
        self._by_hand = self._by_hand.resumed(request.query.get("model"))
        return await self._tell(request)

    async def _tell(self, request: web.Request) -> web.Response:
        try:
            self._post()
        except OSError as error:
            return web.json_response(
                {"error": f"the sidecar's processes cannot be told yet, which is tried on: {error}"},
                status=507,
            )
        return await self._show(request)


_LOOK_S = 1.0


def _what(pause: Pause) -> tuple[bool, frozenset[str]]:
    return pause.everything is not None, frozenset(pause.models)


def _refusal(request: web.Request) -> web.Response | None:
    """Return why the caller may not: the port is open to whoever scrapes it, the switch to this pod alone."""
    try:
        is_here = ip_address(request.remote or "").is_loopback
    except ValueError:
        is_here = False
    if is_here:
        return None
    return web.json_response({"error": "only from within the pod: 127.0.0.1"}, status=403)
