"""The local switch: pauses sampling in this sidecar, at its admin port or by a file, without NATS.

What is paused in this sidecar: by the fleet's bucket, by hand at the admin port, or by a file. No NATS is needed.

Two files lie next to the hand-off socket, in a directory of this sidecar alone: one that the capture process writes for
the fleet, one that the supervisor writes for this sidecar. Every process of it looks at both once a second.
"""

import logging
from collections.abc import Iterable
from datetime import UTC, datetime
from enum import StrEnum
from ipaddress import ip_address
from pathlib import Path

import msgspec
from aiohttp import web

from quantdrift.core.process.run import Stop, supervise
from quantdrift.core.sampling.pause import MAX_BYTES, MOST_MODELS, Order, Pause, PauseError, decode, encode
from quantdrift.core.telemetry import Labels

_FILE_BYTES = MAX_BYTES // 2  # so that there is room for what is said at the admin port
_LOG = logging.getLogger(__name__)


class PauseSource(StrEnum):
    """Who says so; also the name of the file."""

    FLEET = "paused-fleet"
    HERE = "paused-here"


class Paused(msgspec.Struct, frozen=True):
    """What is in force: everything, or models by name."""

    everything: bool = False
    models: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        """Return whether anything is paused."""
        return self.everything or bool(self.models)


def post(directory: Path, source: PauseSource, pause: Pause) -> None:
    """Replace what a source says.

    Raises
    ------
    OSError
        It cannot be written; what was said before holds.
    """
    path = directory / source
    new = path.with_suffix(".new")
    new.write_bytes(encode(pause))
    new.replace(path)


class PauseFiles:
    """A process's view of both files.

    Parameters
    ----------
    directory
        Where they lie; they need not be there.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pauses: dict[PauseSource, Pause] = {}
        self._seen: dict[PauseSource, tuple[int, int, int]] = {}

    def look(self) -> Paused:
        """Return what is in force now. What cannot be read says what it said before."""
        for source in PauseSource:
            self._read(source)
        now = datetime.now(UTC)
        in_force = [pause.at(now) for pause in self._pauses.values()]
        return Paused(
            any(pause.everything is not None for pause in in_force),
            frozenset(name for pause in in_force for name in pause.models),
        )

    def of(self, source: PauseSource) -> Pause:
        """Return what a source says, as of the last look."""
        return self._pauses.get(source, Pause())

    def _read(self, source: PauseSource) -> None:
        path = self._directory / source
        try:
            status = path.stat()
            seen = (status.st_mtime_ns, status.st_ino, status.st_size)
            if seen == self._seen.get(source):
                return
            self._pauses[source] = decode(path.read_bytes())
            self._seen[source] = seen
        except FileNotFoundError:
            self._pauses.pop(source, None)
            self._seen.pop(source, None)
        except (OSError, PauseError) as error:
            _LOG.warning("%s cannot be read, what it said before holds: %s", path, error)


def by_file(path: Path, now: datetime) -> Pause:
    """Return what a file that an operator has put there pauses: the models that its lines name, or everything.

    Parameters
    ----------
    path
        `sidecar.pause_file`. Where it is missing nothing is paused; where it is empty or unreadable, or names more
        models than a pause holds, everything is.
    now
        Aware; stamps the orders.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        return Pause()
    except (OSError, UnicodeDecodeError):
        lines = []
    order = Order(by=str(path), at=now)
    names = [line for line in lines if line and not line.startswith("#")]
    found = Pause(models=dict.fromkeys(names[: MOST_MODELS + 1], order))
    if not names or len(found.models) > MOST_MODELS or len(encode(found)) > _FILE_BYTES:
        return Pause(everything=order)
    return found


_LOOK_S = 1.0


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
