"""The port of KServe's logger, which is off unless it has an address of its own.

It acknowledges events at once and pairs them to exchanges afterwards: the logger's agent keeps events that are not
acknowledged, so it would run out of memory if the port were slow. The logger can only be given a URL, so its token may be in
the path.
"""

import asyncio
import logging
import socket
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from enum import Enum, auto
from types import TracebackType

import msgspec
from aiohttp import web

from quantdrift.core.config.schema import Config
from quantdrift.core.records import Loss, Way
from quantdrift.sidecar.handoff.frame import Origin
from quantdrift.sidecar.intake.gateway import Gateway, SampledRequest
from quantdrift.sidecar.intake.http import NO_TOKEN, IntakePort, error_response
from quantdrift.sidecar.intake.kserve_events import (
    EventError,
    Half,
    KserveEvent,
    read_event,
    target_of,
    with_json_length,
)
from quantdrift.sidecar.state.config import LiveConfig

_TYPE = "content-type"
_QUIET_S = 30.0  # a body of which nothing arrives for so long is given up
_LOG = logging.getLogger(__name__)


_ENTRY_BYTES = 500  # memory of an entry in addition to its content


class PendingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A sampled request that waits for its response.

    Parameters
    ----------
    sampled
        To hand the exchange over with.
    kind
        Its content type, or empty.
    body
        Its content.
    """

    sampled: SampledRequest
    kind: str
    body: bytes


class EventPair(msgspec.Struct, frozen=True, kw_only=True):
    """A request with the content of its response."""

    request: PendingRequest
    response: bytes


class _HalfState(Enum):
    WAITING = auto()  # one half has arrived
    UNWANTED = auto()  # the request was not sampled: its response is to be dropped
    AMBIGUOUS = auto()  # the key arrived twice: everything with it is to be dropped


class _Entry(msgspec.Struct):
    since_s: float
    n_bytes: int
    state: _HalfState = _HalfState.WAITING
    request: PendingRequest | None = None
    response: bytes | None = None


class EventPairs:
    """The halves that wait for their other half, by key.

    A key that arrives again before its pair is complete is ambiguous. Which response belongs to which request
    is never guessed: both are dropped, and so is everything with that key until the window has passed.

    Parameters
    ----------
    window_s
        How long a half waits for the other.
    limit_bytes
        Most bytes that may wait; the oldest entries are dropped first.

    Attributes
    ----------
    held_bytes : int
        Bytes in use, including the memory of the entries themselves.
    """

    def __init__(self, window_s: float, limit_bytes: int) -> None:
        self.window_s = window_s
        self.limit_bytes = limit_bytes
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self.held_bytes = 0

    def add_request(
        self, key: Hashable, request: PendingRequest | None, now_s: float
    ) -> tuple[EventPair | None, list[PendingRequest]]:
        """Add a request.

        Parameters
        ----------
        key
            The key of its response.
        request
            The request, or None if it was not sampled.
        now_s
            Seconds on a monotonic clock.

        Returns
        -------
        tuple
            The pair, if the response has arrived before; and the requests that are dropped.
        """
        entry = self._entries.get(key)
        if entry is None:
            state = _HalfState.UNWANTED if request is None else _HalfState.WAITING
            n_bytes = 0 if request is None else len(request.body) + len(request.sampled.head)
            self._put(key, _Entry(now_s, n_bytes, state, request))
            return None, []
        if entry.response is None:
            return None, [*self._mark_ambiguous(entry), *([] if request is None else [request])]
        self._drop(key)
        return None if request is None else EventPair(request=request, response=entry.response), []

    def add_response(
        self, key: Hashable, response: bytes, now_s: float
    ) -> tuple[EventPair | None, list[PendingRequest]]:
        """Add the content of a response; otherwise as for a request."""
        entry = self._entries.get(key)
        if entry is None:
            self._put(key, _Entry(now_s, len(response), response=response))
            return None, []
        if entry.response is not None:
            return None, self._mark_ambiguous(entry)
        if entry.state is not _HalfState.AMBIGUOUS:
            self._drop(key)
        return None if entry.request is None else EventPair(request=entry.request, response=response), []

    def expire(self, now_s: float, other_bytes: int = 0) -> Iterator[PendingRequest]:
        """Drop entries that have waited too long or exceed the limit; yield the requests among them.

        Parameters
        ----------
        now_s
            Seconds on a monotonic clock.
        other_bytes
            Bytes of others that count towards the same limit.
        """
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if now_s - entry.since_s < self.window_s and self.held_bytes + other_bytes <= self.limit_bytes:
                return
            self._drop(key)
            if entry.request is not None:
                yield entry.request

    def _put(self, key: Hashable, entry: _Entry) -> None:
        self._entries[key] = entry
        self.held_bytes += entry.n_bytes + _entry_bytes(key)

    def _drop(self, key: Hashable) -> None:
        self.held_bytes -= self._entries.pop(key).n_bytes + _entry_bytes(key)

    def _mark_ambiguous(self, entry: _Entry) -> list[PendingRequest]:
        dropped = [] if entry.request is None else [entry.request]
        self.held_bytes -= entry.n_bytes
        entry.state, entry.n_bytes, entry.request, entry.response = _HalfState.AMBIGUOUS, 0, None, None
        return dropped


def _entry_bytes(key: Hashable) -> int:
    return _ENTRY_BYTES + len(repr(key))  # a client chooses the id and so its length


class KserveLogger:
    """Pairs the events of any number of InferenceServices.

    Parameters
    ----------
    config
        Pairing window and limits.
    gateway
        Receives the exchanges.
    """

    def __init__(self, config: Config, gateway: Gateway) -> None:
        self._gateway = gateway
        self._pairs = EventPairs(config.intake.pair_window_s, config.intake.max_pending_bytes)
        self._max_bytes = config.sidecar.max_exchange_bytes
        self._counted_bytes = 0  # as counted by the gateway
        self._reading_bytes = 0  # of incomplete bodies

    def reconfigure(self, config: Config) -> None:
        """Apply another window and other limits."""
        self._pairs.window_s = config.intake.pair_window_s
        self._pairs.limit_bytes = config.intake.max_pending_bytes
        self._max_bytes = config.sidecar.max_exchange_bytes

    async def handle(self, request: web.Request, origin: Origin) -> web.Response:
        """Respond at once: 200, or 400 if the headers are insufficient or the body does not arrive."""
        try:
            body = await self._read(request)
        except TimeoutError:
            return web.json_response({"error": "the body did not arrive in time"}, status=400)
        try:
            event = read_event(request.headers)
        except EventError as error:
            self._gateway.count_ignored()
            return web.json_response({"error": str(error)}, status=400)
        if event is None:
            self._gateway.count_ignored()
        else:
            asyncio.get_running_loop().call_soon(self.take, event, body, origin)
        return web.Response()

    def take(self, event: KserveEvent, body: bytes | None, origin: Origin) -> None:
        """Pair an event with its other half if that has arrived.

        Parameters
        ----------
        event
            Its headers.
        body
            Its content, or None if it was too long.
        origin
            Who sent it. A response counts for the sender of its request, who alone can be paired with it.
        """
        now_s = asyncio.get_running_loop().time()
        key = (origin.caller, *event.key)
        if event.half is Half.REQUEST:
            request = self._sample(event, body, origin)
            pair, lost = self._pairs.add_request(key, request, now_s)
        else:
            # A response that is too long is ignored: its request expires in the end.
            pair, lost = self._pairs.add_response(key, body, now_s) if body is not None else (None, [])
        if pair is not None:
            self._complete(pair)
        for dropped in lost:
            self._gateway.lose(dropped.sampled, Loss.UNPAIRED, dropped.body)
        self.tick()

    def tick(self) -> None:
        """Drop halves that have waited too long. Called about once a second."""
        other_bytes = self._gateway.held_bytes - self._counted_bytes + self._reading_bytes
        for dropped in self._pairs.expire(asyncio.get_running_loop().time(), other_bytes):
            self._gateway.lose(dropped.sampled, Loss.UNPAIRED, dropped.body)
        held_bytes = self._pairs.held_bytes + self._reading_bytes
        self._gateway.add_held_bytes(held_bytes - self._counted_bytes)
        self._counted_bytes = held_bytes

    def close(self) -> None:
        """Drop everything."""
        for dropped in self._pairs.expire(float("inf")):
            self._gateway.lose(dropped.sampled, Loss.TRUNCATED, dropped.body)

    def _sample(self, event: KserveEvent, body: bytes | None, origin: Origin) -> PendingRequest | None:
        if body is None:
            self._gateway.count_ignored()
            return None
        try:
            target = target_of(event, body)
        except EventError as error:
            _LOG.debug("an event is ignored: %s", error)
            self._gateway.count_ignored()
            return None
        headers = _with_json_length(event.headers, body)
        sampled = self._gateway.sample(target, event.headers if headers is None else headers, origin=origin)
        if sampled is None:
            return None
        if headers is None:
            self._gateway.lose(sampled, Loss.DECODE)
            return None
        return PendingRequest(sampled=sampled, kind=headers.get(_TYPE, ""), body=body)

    def _complete(self, pair: EventPair) -> None:
        # The event has the content type of the request; only the body shows whether tensors follow the JSON
        # part.
        headers = _with_json_length({_TYPE: pair.request.kind}, pair.response)
        if headers is None:
            self._gateway.lose(pair.request.sampled, Loss.DECODE, pair.request.body)
        else:
            self._gateway.hand_over(pair.request.sampled, pair.request.body, pair.response, headers=headers)

    async def _read(self, request: web.Request) -> bytes | None:
        """Return the content, or None if it, or all that are being read, are too long.

        It is read to its end in any case.

        Raises
        ------
        TimeoutError
            No more bytes arrive.
        """
        loop = asyncio.get_running_loop()
        parts: list[bytes] | None = []
        n_bytes = 0
        try:
            async with asyncio.timeout(_QUIET_S) as quiet:
                async for chunk in request.content.iter_any():
                    quiet.reschedule(loop.time() + _QUIET_S)
                    if parts is None:
                        continue
                    n_bytes += len(chunk)
                    self._reading_bytes += len(chunk)
                    parts.append(chunk)
                    if n_bytes > self._max_bytes or self._reading_bytes > self._pairs.limit_bytes:
                        parts = None
                        self._reading_bytes -= n_bytes
                        n_bytes = 0
            return None if parts is None else b"".join(parts)
        finally:
            self._reading_bytes -= n_bytes


def _with_json_length(headers: Mapping[str, str], body: bytes) -> Mapping[str, str] | None:
    try:
        return with_json_length(headers, body)
    except EventError as error:
        _LOG.debug("an exchange is lost: %s", error)
        return None


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
