"""The stages behind the reader: assembling, replaying, comparing and storing. They work at the same time.

While the reference computes one batch, the next waits in its thread and another is laid out, the one before is compared
and put into slices in another thread, and the one before that is stored: what computes hardly ever waits for what does
not.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import TypeVar

import msgspec

from quantdrift.core.clock import Clock
from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.core.process.run import Stop
from quantdrift.core.stream.connection import Delivery
from quantdrift.shadow.pipeline.assess import Assessor, BatchInProgress
from quantdrift.shadow.pipeline.classify import Case
from quantdrift.shadow.pipeline.fair_share import ReadyBatch
from quantdrift.shadow.pipeline.in_flight import InFlight, acknowledge, give_back
from quantdrift.shadow.pipeline.metrics import Health, ShadowMetrics, Step
from quantdrift.shadow.pipeline.queues import BatchQueues
from quantdrift.shadow.pipeline.store import until_stored
from quantdrift.shadow.pipeline.tracing import Spans
from quantdrift.shadow.replay.exchange import Answer, PreparedExchange
from quantdrift.shadow.replay.noise import Noise
from quantdrift.shadow.replay.replay import Outcome
from quantdrift.shadow.runtimes.protocol import BrokenRuntimeError
from quantdrift.storage.shadow.rows import StoreBatch, VectorRow
from quantdrift.storage.shadow.writer import Writer

_LOG = logging.getLogger(__name__)
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 30.0

Done = TypeVar("Done")


class TakenMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message of the stream with what is to become of it, and when it was taken."""

    delivery: Delivery
    case: Case
    at_s: float = 0.0


class _Ready(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that waits to be replayed."""

    deliveries: tuple[Delivery, ...]
    begun: BatchInProgress
    turn: ReadyBatch


class _Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that waits to be compared."""

    ready: _Ready
    outputs: list[Answer]
    at: datetime


class _Assessed(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that waits to be stored."""

    deliveries: tuple[Delivery, ...]
    batch: StoreBatch


class Stages:
    """Replays and stores batches in the order they come.

    `assemble_one`, `replay_one`, `compare_one` and `store_one` are each called again and again by one task, `replay_one` by
    two: the reference's thread has the next batch before it has done one. Whatever they raise, the batch they had is let
    go, so that it comes again, and `drained` does not wait for it.

    Parameters
    ----------
    lanes
        Where batches come from.
    assessor
        Replays and compares.
    thread
        An executor with one thread, for the reference.
    beside
        Another one with one thread, for what is done before and after.
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
        lanes: BatchQueues[list[TakenMessage]],
        assessor: Assessor,
        thread: Executor,
        beside: Executor,
        writer: Writer,
        keep: Callable[[Sequence[VectorRow]], Awaitable[None]],
        holding: InFlight,
        meters: ShadowMetrics,
        spans: Spans,
        health: Health,
        clock: Clock,
        stop: Stop,
        store_limit_s: float,
        replay_limit_s: float,
        broken: Callable[[str], None],
    ) -> None:
        self._lanes = lanes
        self._assessor = assessor
        self._thread = thread
        self._beside = beside
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
        self._to_replay: asyncio.Queue[_Ready] = asyncio.Queue(maxsize=1)
        self._to_compare: asyncio.Queue[_Replayed] = asyncio.Queue(maxsize=1)
        self._to_store: asyncio.Queue[_Assessed] = asyncio.Queue(maxsize=1)

    async def assemble_one(self) -> None:
        """Lay the next batch out and hand it on to be replayed."""
        turn, taken = await self._lanes.take()
        deliveries = tuple(one.delivery for one in taken)
        async with self._in_hand(deliveries):
            cases = [one.case for one in taken]
            if taken:
                self._meters.took(Step.WAIT, self._clock.monotonic_s() - taken[0].at_s)
            begun = await self._in_thread(self._beside, lambda: self._assessor.begin(cases), Step.ASSEMBLE)
            await self._to_replay.put(_Ready(deliveries=deliveries, begun=begun, turn=turn))

    async def replay_one(self) -> None:
        """Replay the next batch and hand it on to be compared.

        While a reference is away the batch stays in hand, kept alive on the stream; at the end it is given back.
        """
        ready = await self._to_replay.get()
        async with self._in_hand(ready.deliveries):
            at = self._clock.now()
            outputs = await self._until_replayed(ready)
            if outputs is None:
                await give_back(ready.deliveries)
                self._let_go(ready.deliveries)
                return
            await self._to_compare.put(_Replayed(ready=ready, outputs=outputs, at=at))
        await self._replay_again(ready.begun)

    async def compare_one(self) -> None:
        """Compare the next batch, put it into slices and hand it on to be stored."""
        replayed = await self._to_compare.get()
        begun, deliveries = replayed.ready.begun, replayed.ready.deliveries
        async with self._in_hand(deliveries):
            outcomes = await self._in_thread(
                self._beside, lambda: self._assessor.compare(begun, replayed.outputs), Step.COMPARE
            )
            self._meters.compared(begun.prepared, outcomes)
            batch, overflow, over_cap = await self._in_thread(
                self._beside, lambda: self._recorded(begun, outcomes, replayed.at), Step.SLICES
            )
            self._meters.assessed(overflow, over_cap)
            self._meters.doubted(self._assessor.doubts.found)
            numbered = tuple(one.numbered for one in deliveries if one.numbered is not None)
            batch = msgspec.structs.replace(batch, numbered=numbered)
            await self._to_store.put(_Assessed(deliveries=deliveries, batch=batch))

    async def store_one(self) -> None:
        """Store the next batch, then acknowledge it."""
        assessed = await self._to_store.get()
        try:
            began_s = self._clock.monotonic_s()
            written = await until_stored(
                lambda: self._writer.store(assessed.batch),
                self._stop,
                limit_s=self._store_limit_s,
                failed=self._meters.store_failed,
            )
            if written is None:
                await give_back(assessed.deliveries)
                return
            stored_s = self._clock.monotonic_s()
            self._meters.took(Step.STORE, stored_s - began_s)
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
            self._meters.took(Step.ACKNOWLEDGE, self._clock.monotonic_s() - stored_s)
            await self._keep_vectors(assessed.batch.vectors)
        finally:
            self._let_go(assessed.deliveries)

    def _recorded(
        self, begun: BatchInProgress, outcomes: Sequence[Outcome], at: datetime
    ) -> tuple[StoreBatch, dict[str, int], dict[str, int]]:
        """Return what is to be stored, with counts that only this thread may look at: it adds to them for every track."""
        batch = self._assessor.record(begun, outcomes, at)
        return batch, self._assessor.overflow(), dict(self._assessor.learned.n_over_cap)

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

    async def _until_replayed(self, ready: _Ready) -> list[Answer] | None:
        """Replay a batch, waiting for a reference that is away; None where the end was asked for meanwhile."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return await self._replay(ready)
            except RetryError as error:
                if self._stop.is_set():
                    return None
                _LOG.warning("could not replay: %s; again in %.1f s", error, pause_s)
            await self._stop.wait(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    async def _replay(self, ready: _Ready) -> list[Answer]:
        begun = ready.begun
        outputs, took_s = await self._timed_in_thread(
            self._thread, lambda: self._assessor.replay(begun), Step.REPLAY
        )
        ended = self._clock.now()
        self._lanes.charge(ready.turn, took_s if begun.prepared else 0.0)
        if begun.assembled is not None:
            self._meters.replayed(begun.assembled, took_s)
        self._spans.replayed(begun.prepared, _ns(ended - timedelta(seconds=took_s)), _ns(ended))
        return outputs

    async def _replay_again(self, begun: BatchInProgress) -> None:
        """Replay some of what went before again, if it is its turn; the batch that was just replayed is on its way."""
        noise = self._assessor.noise
        if begun.prepared and noise.is_due(begun.prepared[0]):
            try:
                await self._in_thread(self._thread, lambda: _again(noise, begun.prepared[0]), Step.NOISE)
            except BrokenRuntimeError as error:
                self._broken(str(error))
                raise
        self._meters.measured(noise.counts)

    async def _in_thread(self, thread: Executor, work: Callable[[], Done], step: Step) -> Done:
        done, _ = await self._timed_in_thread(thread, work, step)
        return done

    async def _timed_in_thread(
        self, thread: Executor, work: Callable[[], Done], step: Step
    ) -> tuple[Done, float]:
        """Do `work` in a thread, note how long it took there, and return that too.

        Raises
        ------
        BrokenRuntimeError
            It did not end in time; what it waited for the thread is no part of that.
        """
        loop = asyncio.get_running_loop()
        begun = asyncio.Event()

        def timed() -> tuple[Done, float]:
            loop.call_soon_threadsafe(begun.set)
            began_s = self._clock.monotonic_s()
            done = work()
            return done, self._clock.monotonic_s() - began_s

        doing = loop.run_in_executor(thread, timed)
        try:
            await begun.wait()
            async with asyncio.timeout(self._replay_limit_s):
                done, took_s = await doing
        except TimeoutError as error:
            raise BrokenRuntimeError(
                f"the step `{step}` of a batch did not end within {self._replay_limit_s:g} s"
            ) from error
        finally:
            doing.cancel()
        self._meters.took(step, took_s)
        return done, took_s

    @asynccontextmanager
    async def _in_hand(self, deliveries: Sequence[Delivery]) -> AsyncIterator[None]:
        """Let go of a batch where its step fails; a reference that computes nothing any more ends the process."""
        try:
            yield
        except BaseException as error:
            self._let_go(deliveries)
            if isinstance(error, BrokenRuntimeError):
                self._broken(str(error))
            raise

    def _let_go(self, deliveries: Sequence[Delivery]) -> None:
        self._holding.release(deliveries)
        self._lanes.done()


def _again(noise: Noise, entry: PreparedExchange) -> None:
    """Replay some again, if it is still its turn: another batch may have come to it first."""
    if noise.is_due(entry):
        noise.again(entry)


def _ns(moment: datetime) -> int:
    return int(moment.timestamp() * 1e6) * 1000
