"""The publisher: it sends exchanges to the stream from a queue bounded in bytes.

Exchanges that do not reach the stream are counted. With `stream.payload_key_file` they are encrypted before they are queued;
one that cannot be encrypted is lost, and never sent as it is.
"""

import asyncio
import contextlib
import logging
from collections import deque
from typing import Final

import msgspec

from quantdrift.core.clock import Clock
from quantdrift.core.codec import encode
from quantdrift.core.config.schema import MIB, Config
from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.core.keys import KeyFile
from quantdrift.core.logs import of_model
from quantdrift.core.process.backoff import Backoff
from quantdrift.core.process.run import Stop, supervise
from quantdrift.core.records import Exchange, Loss
from quantdrift.core.sealing import SEALED_BYTES, seal
from quantdrift.core.stream.connection import PUBLISH_TIMEOUT_S, Queue, StreamFullError, TooLargeError
from quantdrift.core.stream.numbering import Numbered
from quantdrift.core.stream.rights import NatsRole
from quantdrift.sidecar.capture.rate_limits import RateLimits
from quantdrift.sidecar.state.counters import Count, Gauge, Slot

_LOG = logging.getLogger(__name__)

_N_IN_FLIGHT = 16
# All together; a longer exchange is sent alone. The NATS client takes what it cannot send for a stalled
# server.
_IN_FLIGHT_BYTES = 4 * MIB
_ITEM_BYTES = 256  # memory of a queued exchange in addition to its bytes
_N_TRIES = 2
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
_REFUSED_S = 10.0
UNSTORED_S: Final = 30
"""Time without a stored exchange, in seconds, after which a NATS that is connected is called out."""
_CAPS = frozenset({Loss.RATE_CAP, Loss.BYTE_CAP})
PERIOD_S: Final = 60.0
_MOST: Final = 256  # models and reasons; the model's name comes from a client
_ADVICE: Final = {
    Loss.DECODE: (
        "they cannot be read: with telemetry.log_level = debug a line for each says what is wrong; for TorchServe check"
        " models.adapter"
    ),
    Loss.PUBLISH: "NATS did not acknowledge them: check the server at stream.url",
    Loss.STREAM_FULL: "the stream is full: add shadow workers, lower the sampling rates or raise stream.max_bytes",
    Loss.TOO_LARGE: "they are above max_payload of the NATS server: raise it, or lower sidecar.max_exchange_bytes",
    Loss.QUEUE_FULL: "the queue to NATS is full because the server is slow or away: check the server at stream.url",
    Loss.NO_KEY: "they must be encrypted, and the key cannot be read: check the file stream.payload_key_file",
}


class _Item(msgspec.Struct, frozen=True, kw_only=True):
    """One encoded exchange in the queue."""

    model: str
    id: str
    stratum: int
    wire: bytes

    @property
    def n_bytes(self) -> int:
        """Its size in the queue."""
        return len(self.wire) + _ITEM_BYTES


class Publisher:
    """The queue to the stream and its senders. `put` never waits.

    Parameters
    ----------
    config
        Size of the queue, rate limits and the stream.
    slot
        Counters of the capture process.
    clock
        Times the rate limits.
    boot
        Identifier of this start, part of the numbers of exchanges; empty: exchanges have no numbers.
    publish_timeout_s
        Longest wait for the stream's acknowledgement of one try.

    Attributes
    ----------
    caps : RateLimits
        The limits on what leaves this pod.
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
        self._clock = clock
        self._warnings = LossWarnings(clock)
        self._unfinished: dict[int, float] = {}  # by identity of the item, in order: when it was queued
        self._keys = KeyFile.of(config.stream.payload_key_file, "stream.payload_key_file", clock)
        self.caps = RateLimits(config.sampling, slot, clock)
        self._items: deque[_Item] = deque()
        self._queued_bytes = 0  # of exchanges neither acknowledged nor lost
        self._available = asyncio.Semaphore(0)
        self._in_flight_bytes = 0
        self._sent = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._queue: Queue | None = None
        self._connected = asyncio.Event()
        self._refused_until_s = 0.0  # by the clock of the loop; 0: the server accepts the stream
        self._clock = clock
        self._is_unstored_logged = False
        self._unstored_since_s: float | None = (
            None  # the first exchange that NATS, though connected, did not store
        )
        slot.set(Gauge.QUEUE_BYTES, 0)
        slot.set(Gauge.QUEUED_SINCE_S, 0)
        slot.set(Gauge.UNSTORED_S, 0)

    def reconfigure(self, config: Config) -> None:
        """Apply the limits of another configuration; the stream stays."""
        self.caps.reconfigure(config.sampling)
        self._config = config

    @property
    def queue(self) -> Queue | None:
        """The connection to NATS, or None before the first one."""
        return self._queue

    def put(self, exchange: Exchange, stratum: int) -> None:
        """Queue one exchange, or count it as lost.

        Parameters
        ----------
        exchange
            The record to send.
        stratum
            Its row in the table of counts.
        """
        wire = encode(exchange)
        longer = 0 if self._keys is None else SEALED_BYTES + 2 * len(exchange.model)
        captured_s = exchange.captured_at.timestamp()
        if loss := self.refusal(captured_s, len(wire) + longer):
            self.refuse(stratum, loss)
            self._warnings.count(exchange.model, loss)
            return
        if self._keys is not None:
            key = self._keys.current
            assert key is not None  # `refusal` says so, and a key that was read stays
            wire = seal(wire, key, model=exchange.model, exchange_id=exchange.id)
        self.caps.count_passed(len(wire), captured_s)
        item = _Item(model=exchange.model, id=exchange.id, stratum=stratum, wire=wire)
        self._items.append(item)
        self._unfinished[id(item)] = self._clock.now().timestamp()
        self._add_queued_bytes(item.n_bytes)
        self._available.release()

    def refusal(self, captured_s: float, size: int = 0) -> Loss | None:
        """Return why an exchange of at least `size` bytes that was captured at this time cannot be queued now, or None."""
        if self._keys is not None and self._keys.ring is None:
            return Loss.NO_KEY
        if self._queue is not None and size > self._queue.max_payload_bytes:
            return Loss.TOO_LARGE
        if self._queued_bytes + size + _ITEM_BYTES > self._config.sidecar.queue_bytes:
            return Loss.QUEUE_FULL
        return self.caps.refusal(captured_s)

    def refuse(self, stratum: int, loss: Loss) -> None:
        """Count an exchange that cannot be queued."""
        if loss in _CAPS:
            self.caps.count_refusal()
        self._slot.lose(stratum, loss)

    def lose(self, stratum: int, model: str, loss: Loss) -> None:
        """Count an exchange of which no record could be made, with a warning where somebody can act."""
        self._slot.lose(stratum, loss)
        self._warnings.count(model, loss)

    async def run(self, stop: Stop) -> None:
        """Connect, and send until `stop`; what is still queued then is counted as lost.

        Parameters
        ----------
        stop
            To be set once `drained` has returned.
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

    def tick(self) -> None:
        """Log losses that no line has told of yet; call it now and then."""
        self._warnings.log_rest()

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
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        is_logged = False
        while self._queue is None:
            try:
                self._queue = await Queue.connect(
                    stream,
                    client_name="quantdrift-sidecar",
                    role=NatsRole.SIDECAR,
                    publish_timeout_s=self._publish_timeout_s,
                )
            except (RetryError, OperatorError) as error:
                if not is_logged:
                    _LOG.warning("%s; trying again, at least every %g s", error, _LONGEST_PAUSE_S)
                    is_logged = True
                await asyncio.sleep(backoff.next_s())
        _LOG.info("publishing to NATS at %s", self._queue.address)
        self._connected.set()
        await asyncio.Event().wait()  # from now on the NATS client reconnects by itself

    async def _send_next(self) -> None:
        await self._available.acquire()
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
        self._finish(item)

    async def _send(self, item: _Item) -> Loss | None:
        """Send an exchange; return why it was lost, or None when the stream has acknowledged it.

        An outage does not use up attempts: the queue fills meanwhile, and the stream stores a duplicate once.
        """
        await self._connected.wait()
        assert self._queue is not None
        await self._wait_for_capacity(len(item.wire))
        try:
            return await self._try(item, self._queue)
        finally:
            self._in_flight_bytes -= len(item.wire)
            self._sent.set()

    async def _wait_for_capacity(self, n_bytes: int) -> None:
        """Wait until `n_bytes` more may be in flight."""
        while self._in_flight_bytes and self._in_flight_bytes + n_bytes > _IN_FLIGHT_BYTES:
            self._sent.clear()
            await self._sent.wait()
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
                self._log_refusal(str(error), loop.time())
                self._note_unstored()
                return Loss.PUBLISH
            except RetryError as error:
                _LOG.debug("not acknowledged, %d attempts left: %s", n_left, error)
                if queue.connected:
                    self._note_unstored()
                if n_left:
                    await asyncio.sleep(again_at - loop.time())
            else:
                self._log_refusal("", loop.time())
                self._note_stored()
                return None
        return Loss.PUBLISH

    def _number(self, row: int) -> Numbered | None:
        """Return the next number of a row. The counters survive this process, so no number is used twice."""
        if not self._boot:
            return None
        self._slot.add(row, Count.NUMBERED)
        return Numbered(boot=self._boot, row=row, number=self._slot.count(row, Count.NUMBERED))

    def _log_refusal(self, reason: str, now_s: float) -> None:
        """Log once why the server refuses the stream.

        An empty reason logs once that it accepts the stream again.
        """
        if reason and not self._refused_until_s:
            _LOG.error(
                "%s. Captured exchanges are lost meanwhile; the next attempt is made in %g s",
                reason,
                _REFUSED_S,
            )
        elif not reason and self._refused_until_s:
            _LOG.info("NATS accepts exchanges again")
        self._refused_until_s = now_s + _REFUSED_S if reason else 0.0

    def _note_unstored(self) -> None:
        """Record that NATS is connected and did not store an exchange; log it once when that lasts."""
        now_s = self._clock.monotonic_s()
        if self._unstored_since_s is None:
            self._unstored_since_s = now_s
        lasted_s = int(now_s - self._unstored_since_s)
        self._slot.set(Gauge.UNSTORED_S, lasted_s)
        if lasted_s >= UNSTORED_S and not self._is_unstored_logged and not self._refused_until_s:
            self._is_unstored_logged = True
            _LOG.error(
                "NATS at %s is connected and has stored nothing for %d s; captured exchanges are lost meanwhile. Its"
                " disk is full, or was: a NATS server stores nothing after that until it is restarted (its log and"
                " /healthz say so)",
                self._config.stream.address,
                lasted_s,
            )

    def _note_stored(self) -> None:
        self._unstored_since_s = None
        self._slot.set(Gauge.UNSTORED_S, 0)
        if self._is_unstored_logged:
            self._is_unstored_logged = False
            _LOG.info("NATS stores exchanges again")

    def _lose(self, item: _Item, loss: Loss) -> None:
        self._slot.lose(item.stratum, loss)
        self._warnings.count(item.model, loss)
        self._finish(item)

    def _finish(self, item: _Item) -> None:
        self._unfinished.pop(id(item), None)
        self._add_queued_bytes(-item.n_bytes)

    def _add_queued_bytes(self, change: int) -> None:
        self._queued_bytes += change
        self._slot.set(Gauge.QUEUE_BYTES, self._queued_bytes)
        self._slot.set(Gauge.QUEUED_SINCE_S, int(next(iter(self._unfinished.values()), 0)))
        if self._queued_bytes:
            self._empty.clear()
        else:
            self._empty.set()


class _Line(msgspec.Struct):
    """What was lost since the last line, and when that was."""

    logged_s: float
    n: int = 0


class LossWarnings:
    """Logs lost exchanges. Losses by a configured limit are counted but not logged: somebody has asked for them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lines: dict[tuple[str, Loss], _Line] = {}

    def count(self, model: str, loss: Loss) -> None:
        """Note a lost exchange; log it, or with the next line of its model and reason."""
        advice = _ADVICE.get(loss)
        if advice is None:
            return
        now_s = self._clock.monotonic_s()
        key = (model, loss) if (model, loss) in self._lines or len(self._lines) < _MOST else ("", loss)
        line = self._lines.setdefault(key, _Line(logged_s=now_s - PERIOD_S))
        line.n += 1
        if now_s - line.logged_s >= PERIOD_S:
            _LOG.warning(
                "model %s: lost %d captured exchanges (%s): %s",
                key[0],
                line.n,
                loss.value,
                advice,
                extra=of_model(key[0]),
            )
            line.logged_s, line.n = now_s, 0

    def log_rest(self) -> None:
        """Log what was counted since the last lines, where a minute has passed since then."""
        now_s = self._clock.monotonic_s()
        for (model, loss), line in list(self._lines.items()):
            if now_s - line.logged_s < PERIOD_S:
                continue
            del self._lines[model, loss]
            if line.n:
                self._lines[model, loss] = _Line(logged_s=now_s - PERIOD_S, n=line.n - 1)
                self.count(model, loss)
