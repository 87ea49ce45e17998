"""Sends exchanges to the stream from a queue that is bounded in bytes. Whatever does not get there is counted."""

import asyncio
import contextlib
import logging
from collections import deque

import msgspec

from quantdrift.core.clock import Clock
from quantdrift.core.codec import encode
from quantdrift.core.config.schema import MIB, Config
from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.core.process.run import Stop, supervise
from quantdrift.core.records import Exchange, Loss
from quantdrift.core.stream.connection import PUBLISH_TIMEOUT_S, Queue, StreamFullError, TooLargeError
from quantdrift.core.stream.numbering import Numbered
from quantdrift.sidecar.capture.rate_limits import RateLimits
from quantdrift.sidecar.state.counters import Count, Gauge, Slot

_LOG = logging.getLogger(__name__)

_N_IN_FLIGHT = 16
# Together; a longer one flies alone. The client takes what it cannot send for a server that does not read.
_IN_FLIGHT_BYTES = 4 * MIB
_ITEM_BYTES = 256  # what waits costs beside its bytes
_N_TRIES = 2
_RECONNECT_S = 1.0
_REFUSED_S = 10.0
_CAPS = frozenset({Loss.RATE_CAP, Loss.BYTE_CAP})


class _Item(msgspec.Struct, frozen=True, kw_only=True):
    """One encoded exchange that waits."""

    model: str
    id: str
    stratum: int
    wire: bytes

    @property
    def n_bytes(self) -> int:
        """What it takes of the queue."""
        return len(self.wire) + _ITEM_BYTES


class Publisher:
    """The way from this process to the stream. `put` never waits.

    Parameters
    ----------
    config
        Bounds, caps and the stream.
    slot
        Counts of the capture process.
    clock
        Times the caps.
    boot
        Start of this sidecar, which the numbers of its exchanges name; empty: they have none.
    publish_timeout_s
        Longest wait for the stream's acknowledgement of one try.

    Attributes
    ----------
    caps : RateLimits
        What may leave this pod.
    """

    def __init__(
        self,
        config: Config,
        slot: Slot,
        clock: Clock,
        boot: str = "",
        *,
        publish_timeout_s: float = PUBLISH_TIMEOUT_S,
    ) -> None:
        self._publish_timeout_s = publish_timeout_s
        self._slot = slot
        self._boot = boot
        self._config = config
        self.caps = RateLimits(config.sampling, slot, clock)
        self._items: deque[_Item] = deque()
        self._queued_bytes = 0  # until acknowledged or lost
        self._more = asyncio.Semaphore(0)
        self._in_flight_bytes = 0
        self._landing = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._queue: Queue | None = None
        self._connected = asyncio.Event()
        self._refused_until_s = 0.0  # of the loop; 0: the server takes the stream
        slot.set(Gauge.QUEUE_BYTES, 0)

    def reconfigure(self, config: Config) -> None:
        """Go over to another configuration's caps; the stream stays."""
        self.caps.reconfigure(config.sampling)
        self._config = config

    @property
    def queue(self) -> Queue | None:
        """The connection, or None before the first one."""
        return self._queue

    def put(self, exchange: Exchange, stratum: int) -> None:
        """Queue one exchange, or count why it cannot be.

        Parameters
        ----------
        exchange
            To be sent.
        stratum
            Index of its header stratum, under which it is counted.
        """
        wire = encode(exchange)
        if loss := self.refusal(len(wire)):
            self.refuse(stratum, loss)
            return
        self.caps.take(len(wire))
        item = _Item(model=exchange.model, id=exchange.id, stratum=stratum, wire=wire)
        self._items.append(item)
        self._note_bytes(item.n_bytes)
        self._more.release()

    def refusal(self, size: int = 0) -> Loss | None:
        """Return why an exchange of at least so many bytes cannot be queued now, or None."""
        if self._queue is not None and size > self._queue.max_payload_bytes:
            return Loss.TOO_LARGE
        if self._queued_bytes + size + _ITEM_BYTES > self._config.sidecar.queue_bytes:
            return Loss.QUEUE_FULL
        return self.caps.refusal()

    def refuse(self, stratum: int, loss: Loss) -> None:
        """Count an exchange that cannot be queued."""
        if loss in _CAPS:
            self.caps.refuse()
        self._slot.lose(stratum, loss)

    async def run(self, stop: Stop) -> None:
        """Connect, and send until `stop`; what is queued then is lost and counted.

        Parameters
        ----------
        stop
            Set it once `drained` has returned, or when there is no more time.
        """
        senders = [
            asyncio.create_task(supervise("publishing", self._send_next, stop)) for _ in range(_N_IN_FLIGHT)
        ]
        connecting = asyncio.create_task(supervise("connecting to NATS", self._connect, stop))
        await stop.wait()
        for task in (*senders, connecting):
            task.cancel()
        await asyncio.gather(*senders, connecting, return_exceptions=True)
        while self._items:
            self._lose(self._items.popleft(), Loss.PUBLISH)

    async def close(self) -> None:
        """Disconnect."""
        if self._queue is not None:
            await self._queue.close()

    async def drained(self, timeout_s: float) -> bool:
        """Wait until everything is sent or lost, at most `timeout_s`; return whether it is."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        return self._empty.is_set()

    async def _connect(self) -> None:
        stream = self._config.stream
        told = False
        while self._queue is None:
            try:
                self._queue = await Queue.connect(
                    stream, client_name="quantdrift-sidecar", publish_timeout_s=self._publish_timeout_s
                )
            except (RetryError, OperatorError) as error:
                if not told:
                    _LOG.warning("%s: it is tried again every %g s", error, _RECONNECT_S)
                    told = True
                await asyncio.sleep(_RECONNECT_S)
        _LOG.info("publishing to NATS at %s", stream.address)
        self._connected.set()
        await asyncio.Event().wait()  # from here on the client reconnects by itself

    async def _send_next(self) -> None:
        await self._more.acquire()
        item = self._items.popleft()
        try:
            loss = await self._send(item)
        except BaseException:
            self._lose(item, Loss.PUBLISH)
            raise
        if loss is not None:
            self._lose(item, loss)
            return
        self._slot.add(item.stratum, Count.PUBLISHED)
        self._note_bytes(-item.n_bytes)

    async def _send(self, item: _Item) -> Loss | None:
        """Return why it was lost, or None when the stream has acknowledged it.

        An outage costs no try: the queue fills meanwhile, and the stream stores what comes twice once.
        """
        await self._connected.wait()
        assert self._queue is not None
        await self._take_off(len(item.wire))
        try:
            return await self._try(item, self._queue)
        finally:
            self._in_flight_bytes -= len(item.wire)
            self._landing.set()

    async def _take_off(self, n_bytes: int) -> None:
        """Wait until there is room among what is under way."""
        while self._in_flight_bytes and self._in_flight_bytes + n_bytes > _IN_FLIGHT_BYTES:
            self._landing.clear()
            await self._landing.wait()
        self._in_flight_bytes += n_bytes

    async def _try(self, item: _Item, queue: Queue) -> Loss | None:
        loop = asyncio.get_running_loop()
        numbered = self._number(item.stratum)
        for n_left in reversed(range(_N_TRIES)):
            await queue.wait_connected()
            if loop.time() < self._refused_until_s:
                return Loss.PUBLISH
            again_at = loop.time() + self._publish_timeout_s
            try:
                await queue.publish_exchange(item.model, item.id, item.wire, numbered)
            except TooLargeError:
                return Loss.TOO_LARGE
            except StreamFullError:
                return Loss.STREAM_FULL
            except OperatorError as error:
                self._note_refusal(str(error), loop.time())
                return Loss.PUBLISH
            except RetryError as error:
                _LOG.debug("not acknowledged, %d more tries: %s", n_left, error)
                if n_left:
                    await asyncio.sleep(again_at - loop.time())
            else:
                self._note_refusal("", loop.time())
                return None
        return Loss.PUBLISH

    def _number(self, row: int) -> Numbered | None:
        """Return the next number of a row: the counts outlive this process, and so no number is given twice."""
        if not self._boot:
            return None
        self._slot.add(row, Count.NUMBERED)
        return Numbered(boot=self._boot, row=row, number=self._slot.count(row, Count.NUMBERED))

    def _note_refusal(self, why: str, now_s: float) -> None:
        """Note why the server refuses the stream, or by nothing that it takes it; both are told once."""
        if why and not self._refused_until_s:
            _LOG.error(
                "%s. What is captured is lost meanwhile; it is tried again every %g s", why, _REFUSED_S
            )
        elif not why and self._refused_until_s:
            _LOG.info("NATS takes the stream now")
        self._refused_until_s = now_s + _REFUSED_S if why else 0.0

    def _lose(self, item: _Item, loss: Loss) -> None:
        self._slot.lose(item.stratum, loss)
        self._note_bytes(-item.n_bytes)

    def _note_bytes(self, change: int) -> None:
        self._queued_bytes += change
        self._slot.set(Gauge.QUEUE_BYTES, self._queued_bytes)
        if self._queued_bytes:
            self._empty.clear()
        else:
            self._empty.set()
