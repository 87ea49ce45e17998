"""The local pause switch: routes of the admin port and the polled pause file. It works without NATS.

It is apart from `pause` because relay workers must not import aiohttp and OpenTelemetry.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path

import msgspec
from aiohttp import web

from quantdrift.core.process.run import Stop, supervise
from quantdrift.core.sampling.pause import MAX_BYTES, Order, Pause, PauseError, encode
from quantdrift.core.telemetry import Labels
from quantdrift.sidecar.state.pause import PauseFiles, PauseSource, read_pause_file, write_pause
from quantdrift.sidecar.state.state_file import StateFile

_POLL_S = 1.0
_ORDERS = "paused-by-hand"


class PauseSwitch:
    """The local pause.

    It joins the orders of the admin port with the pause file, and writes them for all processes.

    Parameters
    ----------
    directory
        Where the pause files are.
    file
        `sidecar.pause_file`, or empty.
    """

    def __init__(self, directory: Path, file: str) -> None:
        self._directory = directory
        self._file = Path(file) if file else None
        # A predecessor of this process may have been killed: its orders stay in force.
        self._orders = StateFile(directory / _ORDERS, Pause)
        self._orders.refresh()
        self._by_hand = self._orders.record or Pause()
        self._pauses = PauseFiles(directory)
        self._pauses.refresh()
        self._written = self._pauses.of(PauseSource.HERE)

    def routes(self) -> list[web.AbstractRouteDef]:
        """Return the admin port's routes: `GET /pause`, `POST /pause`, `POST /resume`, each with `?model=`."""
        return [
            web.get("/pause", self._show),
            web.post("/pause", self._pause),
            web.post("/resume", self._resume),
        ]

    def gauge(self) -> Iterable[tuple[float, Labels]]:
        """Return 1 for everything under the label `*` and for each paused model under its name."""
        paused = self._pauses.refresh()
        return [
            (float(paused.everything), {"model": "*"}),
            *((1.0, {"model": name}) for name in paused.models),
        ]

    async def run(self, stop: Stop) -> None:
        """Poll the file until `stop`."""

        async def poll_file() -> None:
            await stop.wait(_POLL_S)
            self._write()

        await supervise("polling the pause file", poll_file, stop)

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
        if _paused_names(joined) != _paused_names(self._written):
            write_pause(self._directory, PauseSource.HERE, joined)
            self._written = joined

    async def _show(self, _: web.Request) -> web.Response:
        self._pauses.refresh()
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
        return await self._write_and_show(request)

    async def _resume(self, request: web.Request) -> web.Response:
        if (refusal := _refusal(request)) is not None:
            return refusal
        self._by_hand = self._by_hand.resumed(request.query.get("model"))
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


def _refusal(request: web.Request) -> web.Response | None:
    """Return the refusal of a caller outside this pod.

    The admin port is open for scraping, the switch only for this pod.
    """
    try:
        is_here = ip_address(request.remote or "").is_loopback
    except ValueError:
        is_here = False
    if is_here:
        return None
    return web.json_response({"error": "only from within the pod: 127.0.0.1"}, status=403)
