"""The two stages behind the reader: replaying in a thread, and storing. They work at the same time."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from datetime import datetime

import msgspec

from quantdrift.core.clock import Clock
from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.core.jetstream import Delivery
from quantdrift.core.process import Stop
from shadow.assessor import Assessor
from shadow.holding import Holding, acknowledge, give_back
from shadow.meters import Health, Meters
from shadow.replay import Prepared
from shadow.runtime import BrokenRuntimeError
from shadow.spans import Spans
from shadow.storing import until_stored
from shadow.triage import Case
from storage.rows import StoreBatch, VectorRow
from storage.writer import Writer

_LOG = logging.getLogger(__name__)
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 30.0


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """A message of the stream with what is to become of it."""

    delivery: Delivery
    case: Case


class _Assessed(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that waits to be stored."""

    deliveries: tuple[Delivery, ...]
    batch: StoreBatch


class Stages:
    """Replays and stores batches in the order they come.

    `replay_one` and `store_one` are each called again and again by one task. Whatever they raise, the batch they
    had is let go, so that it comes again, and `drained` does not wait for it.

    Parameters
    ----------
    assessor
        Replays and compares; called in `thread` only.
    thread
        An executor with one thread.
    writer
        Stores.
    keep
        Stores vectors for learned slices, after their batch; once, and if it fails they are gone.
    holding
        What is in hand.
    meters, spans, health, clock
        What is told to the outside.
    stop
        Whether the process is to end: then what Postgres does not take at once is given back to the stream.
    store_limit_s
        Longest transaction.
    replay_limit_s
        Longest replay of a batch: a thread that hangs cannot be ended by itself.
    broken
        Told once, with the reason, when the reference fails or hangs whatever it is given; the process must end.
    """

    def __init__(
        self,
        *,
        assessor: Assessor,
        thread: Executor,
        writer: Writer,
        keep: Callable[[Sequence[VectorRow]], Awaitable[None]],
        holding: Holding,
        meters: Meters,
        spans: Spans,
        health: Health,
        clock: Clock,
        stop: Stop,
        store_limit_s: float,
        replay_limit_s: float,
        broken: Callable[[str], None],
    ) -> None:
        self._assessor = assessor
        self._thread = thread
        self._writer = writer
        self._keep = keep
        self._holding = holding
        self._meters = meters
        self._spans = spans
        self._health = health
        self._clock = clock
        self._stop = stop
        self._store_limit_s = store_limit_s
        self._replay_limit_s = replay_limit_s
        self._broken = broken
        self._to_replay: asyncio.Queue[list[Taken]] = asyncio.Queue(maxsize=1)
        self._to_store: asyncio.Queue[_Assessed] = asyncio.Queue(maxsize=1)

    async def put(self, batch: list[Taken]) -> None:
        """Hand in a batch; waits while the one before it is waiting too."""
        await self._to_replay.put(batch)

    async def drained(self) -> None:
        """Wait until every batch that was handed in is stored or let go."""
        await self._to_replay.join()

    async def replay_one(self) -> None:
        """Replay the next batch and hand it on to be stored.

        While a reference is away the batch stays in hand, kept alive on the stream; at the end it is given back.
        """
        taken = await self._to_replay.get()
        deliveries = tuple(one.delivery for one in taken)
        try:
            batch = await self._until_assessed([one.case for one in taken])
            if batch is None:
                await give_back(deliveries)
                self._let_go(deliveries)
                return
            await self._to_store.put(_Assessed(deliveries=deliveries, batch=batch))
        except BaseException as error:
            self._let_go(deliveries)
            if isinstance(error, BrokenRuntimeError):
                self._broken(str(error))
            raise

    async def store_one(self) -> None:
        """Store the next batch, then acknowledge it."""
        assessed = await self._to_store.get()
        try:
            written = await until_stored(
                lambda: self._writer.store(assessed.batch),
                self._stop,
                limit_s=self._store_limit_s,
                failed=self._meters.store_failed,
            )
            if written is None:
                await give_back(assessed.deliveries)
                return
            self._health.record_answered()
            self._meters.stored(assessed.batch, written)
            if aside := assessed.batch.quarantined:
                _LOG.warning(
                    "set aside %d messages, the first one for %s: %s",
                    len(aside),
                    aside[0].reason,
                    aside[0].detail,
                )
            await acknowledge(assessed.deliveries)
            await self._keep_vectors(assessed.batch.vectors)
        finally:
            self._let_go(assessed.deliveries)

    async def _keep_vectors(self, vectors: Sequence[VectorRow]) -> None:
        if not vectors:
            return
        try:
            async with asyncio.timeout(self._store_limit_s):
                await self._keep(vectors)
        except (RetryError, OperatorError, TimeoutError) as error:
            # They are a sample: the next ones do as well.
            _LOG.warning("let go of %d vectors: %s", len(vectors), str(error) or "no answer")
            self._meters.sampled(vectors, stored=False)
        else:
            self._meters.sampled(vectors, stored=True)

    async def _until_assessed(self, cases: Sequence[Case]) -> StoreBatch | None:
        """Assess a batch, waiting for a reference that is away; None where the end was asked for meanwhile."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return await self._assess(cases)
            except RetryError as error:
                if self._stop.is_set():
                    return None
                _LOG.warning("could not replay: %s; again in %.1f s", error, pause_s)
            await self._stop.wait(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    async def _assess(self, cases: Sequence[Case]) -> StoreBatch:
        loop = asyncio.get_running_loop()
        began_s, began = self._clock.monotonic_s(), self._clock.now()
        work: Callable[[], StoreBatch] = lambda: self._assessor.assess(cases, self._clock.now())  # noqa: E731
        try:
            async with asyncio.timeout(self._replay_limit_s):
                batch = await loop.run_in_executor(self._thread, work)
        except TimeoutError as error:
            n_items = sum(case.n_items for case in cases if isinstance(case, Prepared))
            raise BrokenRuntimeError(
                f"the replay of {n_items} items did not end within {self._replay_limit_s:g} s"
            ) from error
        self._meters.replayed(batch, self._clock.monotonic_s() - began_s, self._assessor.overflow())
        prepared = [case for case in cases if isinstance(case, Prepared)]
        self._spans.replayed(prepared, _ns(began), _ns(self._clock.now()))
        self._meters.kept_back(self._assessor.learned.n_over_cap)
        return batch

    def _let_go(self, deliveries: Sequence[Delivery]) -> None:
        self._holding.release(deliveries)
        self._to_replay.task_done()


def _ns(moment: datetime) -> int:
    return int(moment.timestamp() * 1e6) * 1000
