"""The sink of the KServe logger: it acknowledges events at once and pairs them to exchanges afterwards.

The logger's agent keeps events that are not acknowledged, so it would run out of memory if the sink were
slow.
"""

import asyncio
import logging
from collections.abc import Mapping

from aiohttp import web

from quantdrift.core.config.schema import Config
from quantdrift.core.records import Loss
from quantdrift.sidecar.handoff.frame import Origin
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
_QUIET_S = 30.0  # a body of which nothing arrives for so long is given up
_LOG = logging.getLogger(__name__)


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

    def take(self, event: Event, body: bytes | None, origin: Origin) -> None:
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

    def _sample(self, event: Event, body: bytes | None, origin: Origin) -> PendingRequest | None:
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
