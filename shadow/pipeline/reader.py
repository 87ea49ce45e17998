"""The reader: takes messages from the stream and groups them into batches.

A message that was delivered before may be what ended a worker. It goes alone, with nothing else in flight, in
random order among its like. While such messages come, and at the start for as long as those of a worker that has ended
take to come back, one is fetched at a time, by one reader of all: whatever kills the process takes no other with it to
its last delivery. What one of several workers left may come to another in one fetch, the first time.

One reader for each model, so that a model with a flood fills its own part of the stream and nobody else's.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable

from quantdrift.core.clock import Clock
from quantdrift.core.config.schema import Shadow
from quantdrift.core.errors import RetryError
from quantdrift.core.process.run import Stop, supervise
from quantdrift.core.stream.connection import Consumer
from quantdrift.core.stream.consume import Delivery
from quantdrift.shadow.pipeline.batcher import Batcher
from quantdrift.shadow.pipeline.classify import triage
from quantdrift.shadow.pipeline.in_flight import InFlight, give_back
from quantdrift.shadow.pipeline.metrics import Health, ShadowMetrics, Step
from quantdrift.shadow.pipeline.queues import BatchQueues
from quantdrift.shadow.pipeline.stages import TakenMessage
from quantdrift.shadow.replay.exchange import PreparedExchange
from quantdrift.shadow.replay.references import References

_LOG = logging.getLogger(__name__)
_LONGEST_FETCH_S = 1.0  # how long a stop may go unseen
_PAUSE_S = 0.5
_CAREFUL_PAUSE_S = 0.05
_WAITS_TO_COME_BACK = 1.5  # what was kept alive last when its worker ended comes within one `ack_wait_s`
_NOT_REPLAYED = "not replayed"

FETCH_BYTES = 16_000_000
"""Most that a worker takes from the stream at once, all models together: NATS disconnects a client far above that."""


class Reader:
    """Reads the exchanges of one model. One task calls it.

    Parameters
    ----------
    shadow
        Batch sizes and delays.
    fetch_bytes
        Most that is taken from the stream at once.
    lane
        The model.
    consumer
        Of its exchanges.
    references
        Which reference answers for which version.
    lanes
        Where batches go.
    holding
        What is in hand.
    meters, health, clock
        What is told to the outside, and time.
    stop
        Whether the process is to end.
    """

    def __init__(
        self,
        *,
        shadow: Shadow,
        fetch_bytes: int,
        lane: str,
        consumer: Consumer,
        references: References,
        lanes: BatchQueues[list[TakenMessage]],
        holding: InFlight,
        meters: ShadowMetrics,
        health: Health,
        clock: Clock,
        stop: Stop,
    ) -> None:
        self._shadow = shadow
        self._fetch_bytes = fetch_bytes
        self._lane = lane
        self._consumer = consumer
        self._references = references
        self._lanes = lanes
        self._holding = holding
        self._meters = meters
        self._health = health
        self._clock = clock
        self._stop = stop
        self._careful = False
        self._careful_until_s: float | None = None  # the worker before may have ended over what comes back
        self._batcher: Batcher[TakenMessage] = Batcher(
            max_items=shadow.batch_items, max_bytes=fetch_bytes, delay_s=shadow.batch_delay_s
        )

    async def read_once(self) -> None:
        """Fetch once, and pass on the batches that are full or have waited long enough."""
        try:
            if await self._is_careful():
                await self._read_one()
            else:
                await self._read_many()
        except RetryError as error:
            _LOG.debug("%s", error)
            await self.flush()
            await self._stop.wait(_PAUSE_S)

    async def _is_careful(self) -> bool:
        now_s = self._clock.monotonic_s()
        if self._careful_until_s is None:
            n_out = await self._consumer.unacknowledged()
            self._careful_until_s = now_s + (_WAITS_TO_COME_BACK * self._shadow.ack_wait_s if n_out else 0.0)
        return self._careful or now_s < self._careful_until_s

    async def _read_one(self) -> None:
        async with self._lanes.suspecting():
            fetched = await self._fetch(1, 0.0)
            new, again = _by_delivery(fetched)
            self._careful = bool(again)
            if again:
                await self._alone(again)
        await self._pass_on(new)
        if not fetched:
            await self._stop.wait(_CAREFUL_PAUSE_S)

    async def _read_many(self) -> None:
        wanted = self._shadow.batch_items
        wait_s = min(max(self._batcher.wait_s(self._clock.monotonic_s()), 0.01), _LONGEST_FETCH_S)
        fetched = await self._fetch(wanted, wait_s)
        new, again = _by_delivery(fetched)
        self._careful = bool(again)
        await self._pass_on(new)
        if again:
            async with self._lanes.suspecting():
                await self._alone(again)
        elif len(fetched) < wanted:  # the stream is empty: nothing to wait for
            await self.flush()

    async def _fetch(self, wanted: int, wait_s: float) -> list[TakenMessage]:
        began_s = self._clock.monotonic_s()
        deliveries = await self._consumer.fetch(wanted, max_bytes=self._fetch_bytes, timeout_s=wait_s)
        self._health.stream_answered()
        fetched_s = self._clock.monotonic_s()
        taken = [self._taken(delivery) for delivery in deliveries]  # should this fail, they come again, alone
        if deliveries:
            self._meters.took(Step.PULL, fetched_s - began_s)
            self._meters.took(Step.DECODE, self._clock.monotonic_s() - fetched_s)
        for delivery in deliveries:
            self._holding.take(delivery)
        return taken

    async def _pass_on(self, new: list[TakenMessage]) -> None:
        for one in new:
            await self._add(one)
        await self._put(self._batcher.due(self._clock.monotonic_s()))

    async def flush(self) -> None:
        """Pass on everything that is waiting for its batch to fill."""
        await self._put(self._batcher.flush())

    async def _add(self, taken: TakenMessage) -> None:
        case = taken.case
        complete = self._batcher.add(
            case.signature if isinstance(case, PreparedExchange) else _NOT_REPLAYED,
            taken,
            n_items=case.n_items if isinstance(case, PreparedExchange) else 1,
            n_bytes=len(taken.delivery.data),
            now_s=self._clock.monotonic_s(),
        )
        await self._put(complete)

    async def _alone(self, again: list[TakenMessage]) -> None:
        """Pass messages on one by one, each when nothing else is in flight. Only while `suspecting`."""
        await self.flush()
        random.SystemRandom().shuffle(again)
        async with self._lanes.alone(self._lane):
            for one in again:
                await self._lanes.drained()
                if self._stop.is_set():
                    self._holding.release([one.delivery])
                    await give_back([one.delivery])
                    continue
                await self._lanes.put(self._lane, [one])
            await self._lanes.drained()

    async def _put(self, batches: list[list[TakenMessage]]) -> None:
        for batch in batches:
            await self._lanes.put(self._lane, batch)

    def _taken(self, delivery: Delivery) -> TakenMessage:
        case = triage(
            delivery.data,
            sequence=delivery.sequence,
            n_delivered=delivery.n_delivered,
            max_deliveries=self._shadow.max_deliveries,
            references=self._references,
        )
        return TakenMessage(delivery=delivery, case=case, at_s=self._clock.monotonic_s())


def _by_delivery(fetched: list[TakenMessage]) -> tuple[list[TakenMessage], list[TakenMessage]]:
    """Return what was delivered for the first time, and what comes again."""
    new = [one for one in fetched if one.delivery.n_delivered == 1]
    return new, [one for one in fetched if one.delivery.n_delivered > 1]


_LOOK_S = 2.0


class ModelReaders:
    """Reads the exchanges of every model: of those that are configured, and of others as they appear in the stream.

    What is not configured has no reference; it is read to be counted.

    Parameters
    ----------
    models
        Names of those that are configured.
    found
        Tells of which models exchanges wait.
    make
        Makes the reader of a model. While it raises `RetryError` exchanges of that model wait in the stream, and it is tried
        again; others are read.
    health
        Told that the stream answers: without any model nobody else asks it.
    stop
        Whether the process is to end.
    """

    def __init__(
        self,
        *,
        models: Iterable[str],
        found: Callable[[], Awaitable[Iterable[str]]],
        make: Callable[[str], Awaitable[Reader]],
        health: Health,
        stop: Stop,
    ) -> None:
        self._models = frozenset(models)
        self._found = found
        self._make = make
        self._health = health
        self._stop = stop
        self._readers: dict[str, Reader] = {}

    async def run(self) -> None:
        """Read until the end is asked for, and pass on what waited for its batch to fill."""
        begun: frozenset[str] = frozenset()
        async with asyncio.TaskGroup() as group:
            while not self._stop.is_set():
                for model in sorted(await self._wanted() - begun):
                    group.create_task(self._read(model))
                    begun |= {model}
                await self._stop.wait(_LOOK_S)
        for reader in self._readers.values():
            await reader.flush()

    async def _read(self, model: str) -> None:
        while not self._stop.is_set():
            try:
                reader = await self._make(model)
            except RetryError as error:
                _LOG.warning("exchanges of %s are not read yet: %s", model, error)
                await self._stop.wait(_LOOK_S)
                continue
            self._readers[model] = reader
            await supervise(f"reading {model}", reader.read_once, self._stop)

    async def _wanted(self) -> frozenset[str]:
        try:
            found = await self._found()
        except RetryError as error:
            _LOG.debug("%s", error)
            return self._models
        self._health.stream_answered()
        return self._models.union(found)
