"""The KServe logger's sink: events are answered before anything is made of them, and joined to exchanges afterwards.

The logger's agent holds what the sink has not answered, and runs out of memory where the sink is slow.
"""

import asyncio
import logging
from collections.abc import Mapping

from aiohttp import web

from quantdrift.core.config.schema import Config
from quantdrift.core.records import Loss
from quantdrift.sidecar.intake.gateway import Gateway
from quantdrift.sidecar.intake.kserve_events import (
    Event,
    EventError,
    Half,
    read_event,
    target_of,
    with_json_length,
)
from quantdrift.sidecar.intake.kserve_pairs import EventPair, EventPairs, PendingRequest

_TYPE = "content-type"
_QUIET_S = 30.0  # a body of which nothing comes for so long will not come
_LOG = logging.getLogger(__name__)


class KserveLogger:
    """Takes the events of any number of InferenceServices.

    Parameters
    ----------
    config
        Window and bounds.
    entrance
        Where exchanges go.
    """

    def __init__(self, config: Config, entrance: Gateway) -> None:
        self._entrance = entrance
        self._pairs = EventPairs(config.intake.pair_window_s, config.intake.max_pending_bytes)
        self._max_bytes = config.sidecar.max_exchange_bytes
        self._told_bytes = 0  # of what the entrance was told that is held
        self._reading_bytes = 0  # of bodies that are not complete

    def reconfigure(self, config: Config) -> None:
        """Go over to another window and other bounds."""
        self._pairs.window_s = config.intake.pair_window_s
        self._pairs.limit_bytes = config.intake.max_pending_bytes
        self._max_bytes = config.sidecar.max_exchange_bytes

    async def handle(self, request: web.Request) -> web.Response:
        """Answer an event at once: 200, or 400 where it says too little of itself to be joined, or does not come."""
        try:
            body = await self._read(request)
        except TimeoutError:
            return web.json_response({"error": "the body has not come"}, status=400)
        try:
            event = read_event(request.headers)
        except EventError as error:
            self._entrance.ignore()
            return web.json_response({"error": str(error)}, status=400)
        if event is None:
            self._entrance.ignore()
        else:
            asyncio.get_running_loop().call_soon(self.take, event, body)
        return web.Response()

    def take(self, event: Event, body: bytes | None) -> None:
        """Join an event with its other half, if that is there.

        Parameters
        ----------
        event
            What its headers told.
        body
            Its content, or None where it was too long to be kept.
        """
        now_s = asyncio.get_running_loop().time()
        if event.half is Half.REQUEST:
            asked = self._offer(event, body)
            pair, lost = self._pairs.ask(event.key, asked, now_s)
        else:
            # A response that is too long is none of any request: its request is let go of in the end.
            pair, lost = self._pairs.answer(event.key, body, now_s) if body is not None else (None, [])
        if pair is not None:
            self._complete(pair)
        for one in lost:
            self._entrance.lose(one.ticket, Loss.UNPAIRED)
        self.tick()

    def tick(self) -> None:
        """Let go of what waits in vain. Called about once a second."""
        beside = self._entrance.held_bytes - self._told_bytes + self._reading_bytes
        for one in self._pairs.expire(asyncio.get_running_loop().time(), beside):
            self._entrance.lose(one.ticket, Loss.UNPAIRED)
        held_bytes = self._pairs.held_bytes + self._reading_bytes
        self._entrance.hold(held_bytes - self._told_bytes)
        self._told_bytes = held_bytes

    def close(self) -> None:
        """Let go of everything."""
        for one in self._pairs.expire(float("inf")):
            self._entrance.lose(one.ticket, Loss.TRUNCATED)

    def _offer(self, event: Event, body: bytes | None) -> PendingRequest | None:
        if body is None:
            self._entrance.ignore()
            return None
        try:
            target = target_of(event, body)
        except EventError as error:
            _LOG.debug("an event is passed over: %s", error)
            self._entrance.ignore()
            return None
        headers = _told(event.headers, body)
        ticket = self._entrance.offer(target, event.headers if headers is None else headers)
        if ticket is None:
            return None
        if headers is None:
            self._entrance.lose(ticket, Loss.DECODE)
            return None
        return PendingRequest(ticket=ticket, kind=headers.get(_TYPE, ""), body=body)

    def _complete(self, pair: EventPair) -> None:
        # The event bears the request's content type: whether tensors follow the JSON is told by the body alone.
        headers = _told({_TYPE: pair.asked.kind}, pair.answer)
        if headers is None:
            self._entrance.lose(pair.asked.ticket, Loss.DECODE)
        else:
            self._entrance.hand_over(pair.asked.ticket, pair.asked.body, pair.answer, headers=headers)

    async def _read(self, request: web.Request) -> bytes | None:
        """Return the content, or None where it, or all that are being read, are too long: it is read to its end still.

        Raises
        ------
        TimeoutError
            It has stopped coming.
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


def _told(headers: Mapping[str, str], body: bytes) -> Mapping[str, str] | None:
    try:
        return with_json_length(headers, body)
    except EventError as error:
        _LOG.debug("an exchange is lost: %s", error)
        return None
