"""The readers: they fetch messages from the stream and group them into batches, one reader for each model.

A redelivered message may be what crashed a worker. It is replayed alone, with nothing else in flight, in random order
among other redelivered messages. While such messages arrive, only one reader at a time fetches, one message each time;
the same at the start, until the messages of a crashed predecessor have been redelivered. So a message that kills the
process does not use up the last delivery of another one. The first fetch may still return several messages of another
worker that has crashed.

With one reader for each model, a model with a flood of traffic fills only its own part of the stream.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Hashable, Iterable
from typing import Generic, TypeVar

import msgspec

from quantdrift.core.clock import Clock
from quantdrift.core.config.schema import Shadow
from quantdrift.core.errors import QuarantineError, QuarantineReason, RetryError
from quantdrift.core.keys import KeyFile
from quantdrift.core.logs import of_model
from quantdrift.core.process.run import Stop, supervise
from quantdrift.core.sealing import is_sealed, unseal
from quantdrift.core.stream.connection import Consumer
from quantdrift.core.stream.consume import Delivery
from quantdrift.shadow.pipeline.classify import classify
from quantdrift.shadow.pipeline.in_flight import InFlight, give_back
from quantdrift.shadow.pipeline.metrics import BatchStep, Health, ShadowMetrics
from quantdrift.shadow.pipeline.one_reader import OneReader
from quantdrift.shadow.pipeline.queues import BatchQueues
from quantdrift.shadow.pipeline.stages import TakenMessage
from quantdrift.shadow.pipeline.validate import AttributeRules, PolicyCheck, StreamedMessage
from quantdrift.shadow.replay.exchange import PreparedExchange
from quantdrift.shadow.replay.references import References
from quantdrift.storage.comparisons.rows import Quarantined

_LOG = logging.getLogger(__name__)
_LONGEST_FETCH_S = 1.0  # how long a stop request may go unnoticed
_PAUSE_S = 0.5
_CAREFUL_PAUSE_S = 0.05
_WAITS_TO_COME_BACK = 1.5  # times `ack_wait_s`; a crashed worker's messages are redelivered within one
_NOT_REPLAYED = "not replayed"
_OF_DELAY = 0.5
"""A batch of a quick reference is replayed for at most this share of `shadow.batch_delay_s`."""
MOST_ITEMS = 512
"""Most items of a batch where the reference is quick, unless `shadow.batch_items` is more."""

FETCH_BYTES = 16_000_000
"""Most that a worker takes from the stream at once, all models together: NATS disconnects a client far above that."""
Entry = TypeVar("Entry")


class Reader:
    """Reads the exchanges of one model. One task calls it.

    Parameters
    ----------
    shadow
        Batch sizes and bounds.
    fetch_bytes
        Most bytes of one fetch from the stream.
    model
        Name of the model.
    rules
        Attributes that an exchange may have.
    consumer
        Consumer of the model's exchanges.
    queues
        Receives the batches.
    in_flight
        Keeps fetched messages alive.
    keys
        Open encrypted exchanges. While they cannot be read, exchanges wait in the stream. None: there are no keys.
    """

    def __init__(
        self,
        *,
        shadow: Shadow,
        fetch_bytes: int,
        model: str,
        rules: AttributeRules,
        consumer: Consumer,
        references: References,
        queues: BatchQueues[list[TakenMessage]],
        in_flight: InFlight,
        meters: ShadowMetrics,
        health: Health,
        clock: Clock,
        stop: Stop,
        keys: KeyFile | None = None,
    ) -> None:
        self._keys = keys
        self._shadow = shadow
        self._fetch_bytes = fetch_bytes
        self._model = model
        self._rules = rules
        self._consumer = consumer
        self._references = references
        self._queues = queues
        self._in_flight = in_flight
        self._meters = meters
        self._health = health
        self._clock = clock
        self._stop = stop
        self._check_policy = PolicyCheck()
        self._careful = False
        self._careful_until_s: float | None = None  # a redelivered message may have crashed the worker before
        self._one = OneReader(shadow, clock.monotonic_s())
        meters.reads(model, does=True)
        self._batcher: Batcher[TakenMessage] = Batcher(
            max_items=shadow.batch_items, max_bytes=fetch_bytes, delay_s=shadow.batch_delay_s
        )

    async def read_once(self) -> None:
        """Fetch once, and queue the batches that are full or have waited long enough; or wait, while another worker reads the model."""
        try:
            self._require_keys()
            if self._clock.monotonic_s() >= self._one.next_look_s:
                await self._look()
            if not self._one.reads:
                await self._stop.wait(max(self._one.next_look_s - self._clock.monotonic_s(), 0.0))
            elif await self._reads_one_at_a_time():
                await self._read_one()
            else:
                await self._read_many()
        except RetryError as error:
            _LOG.debug("%s", error)
            await self.flush()
            await self._stop.wait(_PAUSE_S)

    async def _look(self) -> None:
        """See who else reads the model, and decide whether this worker does."""
        seen = await self._consumer.readers()
        self._health.stream_answered()
        self._one.looked(seen, self._clock.monotonic_s())
        self._meters.reads(self._model, does=self._one.reads)
        if not self._one.reads:
            await self.flush()

    def _require_keys(self) -> None:
        """Raise while the keys cannot be read: what cannot be opened stays in the stream."""
        if self._keys is not None and self._keys.ring is None:
            raise RetryError("stream.payload_key_file cannot be read: exchanges wait in the stream")

    async def _reads_one_at_a_time(self) -> bool:
        now_s = self._clock.monotonic_s()
        if self._careful_until_s is None:
            n_out = await self._consumer.unacknowledged()
            self._careful_until_s = now_s + (_WAITS_TO_COME_BACK * self._shadow.ack_wait_s if n_out else 0.0)
        return self._careful or now_s < self._careful_until_s

    async def _read_one(self) -> None:
        async with self._queues.redelivery():
            fetched = await self._fetch(1, 0.0)
            new, again = _by_delivery(fetched)
            self._careful = bool(again)
            if again:
                await self._alone(again)
        await self._pass_on(new)
        if not fetched:
            await self._stop.wait(_CAREFUL_PAUSE_S)

    async def _read_many(self) -> None:
        wanted = self._batch_items()
        self._batcher.max_items = wanted
        wait_s = min(max(self._batcher.wait_s(self._clock.monotonic_s()), 0.01), _LONGEST_FETCH_S)
        fetched = await self._fetch(wanted, wait_s)
        self._one.fetched(len(fetched))
        new, again = _by_delivery(fetched)
        self._careful = bool(again)
        await self._pass_on(new)
        if again:
            async with self._queues.redelivery():
                await self._alone(again)
        elif len(fetched) < wanted and wait_s < _LONGEST_FETCH_S:  # the whole of `batch_delay_s` is over
            await self.flush()

    def _batch_items(self) -> int:
        """Return how many items make a batch: where the reference is quick, as many as it replays in half of `shadow.batch_delay_s`.

        Each batch costs worker, database and monitor some milliseconds, whatever it holds, and after each replay the rest of the worker
        finds the processor's caches full of the reference's data. The reference still gets `shadow.batch_items` at a time, so that its
        memory is as before.
        """
        quick_s = _OF_DELAY * self._shadow.batch_delay_s
        quick = min(self._queues.items_within(self._model, quick_s), MOST_ITEMS)
        return max(quick, self._shadow.batch_items)

    async def _fetch(self, wanted: int, wait_s: float) -> list[TakenMessage]:
        began_s = self._clock.monotonic_s()
        deliveries = await self._consumer.fetch(wanted, max_bytes=self._fetch_bytes, timeout_s=wait_s)
        self._health.stream_answered()
        fetched_s = self._clock.monotonic_s()
        with self._meters.processor_time.part(BatchStep.DECODE.value):
            messages = [
                self._classified(delivery) for delivery in deliveries
            ]  # if this fails, they are redelivered, alone
        if deliveries:
            self._meters.record_step(BatchStep.PULL, fetched_s - began_s)
            self._meters.record_step(BatchStep.DECODE, self._clock.monotonic_s() - fetched_s)
        for delivery in deliveries:
            self._in_flight.add(delivery)
        return messages

    async def _pass_on(self, new: list[TakenMessage]) -> None:
        for message in new:
            if complete := self._add(message):
                await self._put(complete)
        await self._put(self._batcher.due(self._clock.monotonic_s()))

    async def flush(self) -> None:
        """Queue all batches, full or not."""
        await self._put(self._batcher.flush())

    def _add(self, message: TakenMessage) -> list[list[TakenMessage]]:
        case = message.case
        return self._batcher.add(
            case.signature if isinstance(case, PreparedExchange) else _NOT_REPLAYED,
            message,
            n_items=case.n_items if isinstance(case, PreparedExchange) else 1,
            n_bytes=len(message.delivery.data),
            now_s=message.at_s,
        )

    async def _alone(self, again: list[TakenMessage]) -> None:
        """Queue messages one by one, each when nothing else is in flight. Call it only within `redelivery`."""
        await self.flush()
        random.SystemRandom().shuffle(again)
        async with self._queues.only(self._model):
            for message in again:
                await self._queues.wait_drained()
                if self._stop.is_set():
                    self._in_flight.release([message.delivery])
                    await give_back([message.delivery])
                    continue
                await self._queues.put(self._model, [message])
            await self._queues.wait_drained()

    async def _put(self, batches: list[list[TakenMessage]]) -> None:
        began_s = self._clock.monotonic_s()
        for batch in batches:
            await self._queues.put(self._model, batch)
        self._one.waited(self._clock.monotonic_s() - began_s)

    def _classified(self, delivery: Delivery) -> TakenMessage:
        case = classify(
            delivery.data,
            sequence=delivery.sequence,
            n_delivered=delivery.n_delivered,
            max_deliveries=self._shadow.max_deliveries,
            references=self._references,
            opened=self._opened,
            envelope=StreamedMessage(model=self._model, streamed_at=delivery.streamed_at),
            rules=self._rules,
            check_policy=self._check_policy,
            dropped=self._meters.attributes_dropped,
        )
        if isinstance(case, Quarantined):
            case = msgspec.structs.replace(case, numbered=delivery.numbered)
        return TakenMessage(delivery=delivery, case=case, at_s=self._clock.monotonic_s())

    def _opened(self, payload: bytes) -> bytes:
        """Return a message without its encryption; one that never was encrypted is returned as it is."""
        if not is_sealed(payload):
            return payload
        ring = None if self._keys is None else self._keys.ring
        if ring is None:
            raise QuarantineError(
                QuarantineReason.ENCRYPTED,
                "it is encrypted, and this shadow has no keys: set stream.payload_key_file",
            )
        return unseal(payload, ring, self._model)


def _by_delivery(fetched: list[TakenMessage]) -> tuple[list[TakenMessage], list[TakenMessage]]:
    """Return the messages that are delivered for the first time, and the redelivered ones."""
    new = [message for message in fetched if message.delivery.n_delivered == 1]
    return new, [message for message in fetched if message.delivery.n_delivered > 1]


_LIST_MODELS_S = 2.0
MOST_OTHER_MODELS = 64
"""Most models without configuration whose exchanges are read and counted. Each has a reader and a consumer at the server, and
whoever has a sidecar's key can publish to any number of subjects."""


class ModelReaders:
    """The readers of all models: the configured ones, and others as they appear in the stream.

    A model that is not configured has no reference; its exchanges are only counted, and those of a bounded number of models.

    Parameters
    ----------
    models
        Names of the configured models.
    list_models
        Returns the models with exchanges in the stream.
    make_reader
        Makes the reader of a model. While it raises `RetryError`, the exchanges of that model wait in the stream and it is
        tried again; other models are read.
    health
        Notes that the stream answers; without any model no reader would.
    """

    def __init__(
        self,
        *,
        models: Iterable[str],
        list_models: Callable[[], Awaitable[Iterable[str]]],
        make_reader: Callable[[str], Awaitable[Reader]],
        health: Health,
        stop: Stop,
    ) -> None:
        self._models = frozenset(models)
        self._list_models = list_models
        self._make_reader = make_reader
        self._health = health
        self._stop = stop
        self._readers: dict[str, Reader] = {}
        self._others: frozenset[str] = frozenset()
        self._warned = False

    async def run(self) -> None:
        """Read until `stop` is set, then queue the batches that were still filling."""
        started: frozenset[str] = frozenset()
        async with asyncio.TaskGroup() as group:
            while not self._stop.is_set():
                for model in sorted(await self._wanted() - started):
                    group.create_task(self._read(model))
                    started |= {model}
                await self._stop.wait(_LIST_MODELS_S)
        for reader in self._readers.values():
            await reader.flush()

    async def _read(self, model: str) -> None:
        while not self._stop.is_set():
            try:
                reader = await self._make_reader(model)
            except RetryError as error:
                _LOG.warning(
                    "exchanges of model %s wait in the stream, trying again in %g s: %s",
                    model,
                    _LIST_MODELS_S,
                    error,
                    extra=of_model(model),
                )
                await self._stop.wait(_LIST_MODELS_S)
                continue
            self._readers[model] = reader
            await supervise(f"reading {model}", reader.read_once, self._stop)

    async def _wanted(self) -> frozenset[str]:
        try:
            on_record = await self._list_models()
        except RetryError as error:
            _LOG.debug("%s", error)
            return self._models
        self._health.stream_answered()
        others = sorted(frozenset(on_record) - self._models - self._others)
        free = MOST_OTHER_MODELS - len(self._others)
        self._others |= frozenset(others[:free])
        if len(others) > free and not self._warned:
            self._warned = True
            _LOG.warning(
                "exchanges of more than %d models that are not configured are in the stream: those of %d more are not read"
                " and not counted, and expire there. Configure the models, or find out which sidecar sends them",
                MOST_OTHER_MODELS,
                len(others) - free,
            )
        return self._models | self._others


class Batcher(Generic[Entry]):
    """Collects entries by key until a batch is full or has waited long enough.

    It does no I/O: the caller passes the time and takes the batches.

    Parameters
    ----------
    max_items
        Most items in a batch, which may change from now on; an entry with more becomes a batch of its own.
    max_bytes
        Most bytes that wait here; above it all batches are returned.
    delay_s
        Longest wait of an entry.
    """

    def __init__(self, *, max_items: int, max_bytes: int, delay_s: float) -> None:
        self.max_items = max_items
        self._max_bytes = max_bytes
        self._delay_s = delay_s
        self._open: dict[Hashable, _OpenBatch[Entry]] = {}
        self._n_bytes = 0

    def add(
        self, key: Hashable, entry: Entry, *, n_items: int, n_bytes: int, now_s: float
    ) -> list[list[Entry]]:
        """Add an entry; return the batches that it completes, oldest first.

        Parameters
        ----------
        key
            Entries with equal keys can be replayed together.
        now_s
            Monotonic time.
        """
        complete: list[list[Entry]] = []
        batch = self._open.get(key)
        if batch is not None and batch.n_items + n_items > self.max_items:
            complete += self._take(key)
            batch = None
        if batch is None:
            batch = self._open[key] = _OpenBatch(due_s=now_s + self._delay_s)
        batch.entries.append(entry)
        batch.n_items += n_items
        batch.n_bytes += n_bytes
        self._n_bytes += n_bytes
        if batch.n_items >= self.max_items:
            complete += self._take(key)
        if self._n_bytes > self._max_bytes:
            complete += self.flush()
        return complete

    def due(self, now_s: float) -> list[list[Entry]]:
        """Return the batches that have waited long enough by `now_s`, oldest first."""
        due = sorted(
            (batch.due_s, i, key) for i, (key, batch) in enumerate(self._open.items()) if batch.due_s <= now_s
        )
        return [batch for _, _, key in due for batch in self._take(key)]

    def flush(self) -> list[list[Entry]]:
        """Return all waiting batches, oldest first."""
        return [batch for key in list(self._open) for batch in self._take(key)]

    def wait_s(self, now_s: float) -> float:
        """Return the time from `now_s` until a batch is due; the whole delay if none waits."""
        due_s = min((batch.due_s for batch in self._open.values()), default=now_s + self._delay_s)
        return max(due_s - now_s, 0.0)

    def _take(self, key: Hashable) -> list[list[Entry]]:
        batch = self._open.pop(key, None)
        if batch is None:
            return []
        self._n_bytes -= batch.n_bytes
        return [batch.entries]


class _OpenBatch(msgspec.Struct, Generic[Entry]):
    """A batch that fills."""

    due_s: float
    entries: list[Entry] = []
    n_items: int = 0
    n_bytes: int = 0
