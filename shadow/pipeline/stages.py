"""The stages after the reader: assemble, replay, compare and store. They work at the same time, on different batches.

While the reference computes one batch, the next one waits in the reference's thread and another is assembled; the batch
before is compared and assigned to slices in a second thread, and the one before that is stored. So the reference hardly
ever waits.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timedelta
from typing import TypeVar

import msgspec

from quantdrift.core.clock import Clock
from quantdrift.core.errors import OperatorError, QuarantineError, RetryError
from quantdrift.core.logs import of_model
from quantdrift.core.process.backoff import Backoff
from quantdrift.core.process.run import Stop
from quantdrift.core.stream.connection import Delivery
from quantdrift.models.language.scoring import tokens_read
from quantdrift.models.runtimes.protocol import BrokenRuntimeError
from quantdrift.models.tensors.arrays import Array
from quantdrift.shadow.pipeline.assess import Assessor, BatchInProgress
from quantdrift.shadow.pipeline.classify import Case
from quantdrift.shadow.pipeline.exemplars import ExemplarKeeper, Offer
from quantdrift.shadow.pipeline.fair_share import ReadyBatch
from quantdrift.shadow.pipeline.in_flight import InFlight, acknowledge, give_back
from quantdrift.shadow.pipeline.metrics import BatchStep, Health, ShadowMetrics
from quantdrift.shadow.pipeline.queues import BatchQueues
from quantdrift.shadow.pipeline.store import until_stored
from quantdrift.shadow.pipeline.tracing import Spans
from quantdrift.shadow.replay.exchange import Answer, PreparedExchange
from quantdrift.shadow.replay.noise import NoiseReplays
from quantdrift.shadow.replay.replay import Outcome
from quantdrift.storage.comparisons.rows import ComparedExchange, StoreBatch, VectorRow, Written
from quantdrift.storage.comparisons.writer import Writer

_LOG = logging.getLogger(__name__)
_FIRST_PAUSE_S = 0.2
# A sidecar publishes within a second, and the stream drops a second message of an exchange for two minutes.
_PUBLISHED_WITHIN = timedelta(seconds=10)
_LONGEST_PAUSE_S = 30.0
_SMALL_BYTES = 64 << 10
"""A batch of so many bytes, without features, is assembled in less time than it takes to hand it to a thread."""

Done = TypeVar("Done")


class TakenMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A fetched message with its classification; `at_s` is the monotonic time at which it was classified."""

    delivery: Delivery
    case: Case
    at_s: float = 0.0


class _ToReplay(msgspec.Struct, frozen=True, kw_only=True):
    """An assembled batch, before its replay."""

    deliveries: tuple[Delivery, ...]
    in_progress: BatchInProgress
    ready_batch: ReadyBatch


class _ToCompare(msgspec.Struct, frozen=True, kw_only=True):
    """A replayed batch, before its comparison."""

    ready: _ToReplay
    outputs: list[Answer]
    at: datetime
    took_s: float


class _Compared(msgspec.Struct, frozen=True, kw_only=True):
    """What the comparison of a batch has found.

    Parameters
    ----------
    overflow, over_cap
        Counts that only the thread that compares may read: it updates them for every pipeline.
    compare_s, slices_s
        Seconds that each step took.
    """

    outcomes: list[Outcome]
    batch: StoreBatch
    overflow: dict[str, int]
    over_cap: dict[str, int]
    compare_s: float
    slices_s: float


class _ToStore(msgspec.Struct, frozen=True, kw_only=True):
    """A compared batch, before it is stored."""

    deliveries: tuple[Delivery, ...]
    batch: StoreBatch
    outputs: dict[int, Mapping[str, Array]] | None = None  # of the reference, if exemplars may be kept


class Stages:
    """Replays and stores batches in the order they come.

    One task each calls `assemble_one`, `compare_one` and `store_one` in a loop, and two tasks call `replay_one`, so that the
    reference's thread has its next batch ready. If one of them raises, its batch is released: it is delivered again, and
    `wait_drained` does not wait for it.

    Parameters
    ----------
    queues
        The batches to replay.
    replay_thread
        An executor with one thread, for the reference.
    compare_thread
        Another executor with one thread, for the work before and after the replay.
    store_vectors
        Stores vectors for learned slices, after their batch. It is tried once; if it fails, the vectors are dropped.
    in_flight
        Keeps the messages of these batches alive.
    stop
        Once it is set, a batch that Postgres does not accept at once is returned to the stream.
    store_limit_s
        Longest transaction.
    replay_limit_s
        Longest work of a thread on a batch; a thread that hangs cannot be stopped on its own.
    exemplars
        Keeps some exchanges of each slice, after they are stored; None: none.
    on_broken
        Called with the reason when the reference no longer computes anything, or hangs; the process must end.
    """

    def __init__(
        self,
        *,
        queues: BatchQueues[list[TakenMessage]],
        assessor: Assessor,
        replay_thread: Executor,
        compare_thread: Executor,
        writer: Writer,
        store_vectors: Callable[[Sequence[VectorRow]], Awaitable[None]],
        in_flight: InFlight,
        meters: ShadowMetrics,
        spans: Spans,
        health: Health,
        clock: Clock,
        stop: Stop,
        store_limit_s: float,
        replay_limit_s: float,
        on_broken: Callable[[str], None],
        exemplars: ExemplarKeeper | None = None,
    ) -> None:
        self._queues = queues
        self._assessor = assessor
        self._replay_thread = replay_thread
        self._compare_thread = compare_thread
        self._writer = writer
        self._store_vectors = store_vectors
        self._in_flight = in_flight
        self._meters = meters
        self._spans = spans
        self._health = health
        self._clock = clock
        self._stop = stop
        self._store_limit_s = store_limit_s
        self._replay_limit_s = replay_limit_s
        self._on_broken = on_broken
        self._exemplars = exemplars
        self._to_replay: asyncio.Queue[_ToReplay] = asyncio.Queue(maxsize=1)
        self._to_compare: asyncio.Queue[_ToCompare] = asyncio.Queue(maxsize=1)
        self._to_store: asyncio.Queue[_ToStore] = asyncio.Queue(maxsize=1)

    async def assemble_one(self) -> None:
        """Assemble the next batch and pass it on to the replay."""
        ready_batch, messages = await self._queues.take()
        deliveries = tuple(message.delivery for message in messages)
        self._meters.entered(id(deliveries), BatchStep.ASSEMBLE)
        async with self._release_on_failure(deliveries):
            cases = [message.case for message in messages]
            if messages:
                self._meters.record_step(BatchStep.WAIT, self._clock.monotonic_s() - messages[0].at_s)
            is_small = sum(len(delivery.data) for delivery in deliveries) <= _SMALL_BYTES
            if is_small and not self._assessor.has_features(cases):
                began_s = self._clock.monotonic_s()
                in_progress = self._assessor.begin(cases)
                self._meters.record_step(BatchStep.ASSEMBLE, self._clock.monotonic_s() - began_s)
            else:
                in_progress, _ = await self._timed_in_thread(
                    self._compare_thread, lambda: self._assessor.begin(cases), BatchStep.ASSEMBLE
                )
            self._meters.entered(id(deliveries), BatchStep.REPLAY)
            await self._to_replay.put(
                _ToReplay(deliveries=deliveries, in_progress=in_progress, ready_batch=ready_batch)
            )

    async def replay_one(self) -> None:
        """Replay the next batch and pass it on to the comparison.

        While the reference is unreachable the batch stays in flight, kept alive on the stream; when the process stops it is
        returned to the stream.
        """
        ready = await self._to_replay.get()
        async with self._release_on_failure(ready.deliveries):
            at = self._clock.now()
            answered = await self._replay_until_answered(ready)
            if answered is None:
                await give_back(ready.deliveries)
                self._release(ready.deliveries)
                return
            self._meters.entered(id(ready.deliveries), BatchStep.COMPARE)
            outputs, took_s = answered
            await self._to_compare.put(_ToCompare(ready=ready, outputs=outputs, at=at, took_s=took_s))
        await self._replay_again(ready.in_progress)

    async def compare_one(self) -> None:
        """Compare the next batch, assign it to slices and pass it on to be stored."""
        replayed = await self._to_compare.get()
        in_progress, deliveries = replayed.ready.in_progress, replayed.ready.deliveries
        async with self._release_on_failure(deliveries):
            compared = await self._in_thread(
                self._compare_thread, lambda: self._compared(replayed), BatchStep.COMPARE
            )
            batch = compared.batch
            self._meters.record_step(BatchStep.COMPARE, compared.compare_s)
            self._meters.record_step(BatchStep.SLICES, compared.slices_s)
            self._meters.compared(in_progress.prepared, compared.outcomes)
            self._meters.assessed(compared.overflow, compared.over_cap)
            self._meters.config_warned(self._assessor.config_warnings.found)
            numbered = tuple(delivery.numbered for delivery in deliveries if delivery.numbered is not None)
            replay_s = replayed.took_s if in_progress.prepared else None
            by_sequence = {delivery.sequence: delivery for delivery in deliveries}
            batch = msgspec.structs.replace(
                batch,
                numbered=numbered,
                replay_s=replay_s,
                known_by_number=all(
                    _is_known_by_number(by_sequence[compared.stream_sequence], compared)
                    for compared in batch.compared
                ),
            )
            self._meters.entered(id(deliveries), BatchStep.STORE)
            outputs = self._kept_outputs(in_progress.prepared, replayed.outputs)
            await self._to_store.put(_ToStore(deliveries=deliveries, batch=batch, outputs=outputs))

    async def store_one(self) -> None:
        """Store the next batch, then acknowledge it."""
        assessed = await self._to_store.get()
        try:
            began_s = self._clock.monotonic_s()
            written = await until_stored(
                lambda: self._writer.store(assessed.batch),
                self._stop,
                limit_s=self._store_limit_s,
                failed=self._store_failed,
            )
            if written is None:
                await give_back(assessed.deliveries)
                return
            stored_s = self._clock.monotonic_s()
            self._meters.record_step(BatchStep.STORE, stored_s - began_s)
            self._health.stored()
            self._meters.stored(assessed.batch, written)
            self._spans.compared(assessed.batch.compared)
            if quarantined := assessed.batch.quarantined:
                _LOG.warning(
                    "quarantined %d messages (see the table `quarantine`), the first one with reason %s: %s",
                    len(quarantined),
                    quarantined[0].reason,
                    quarantined[0].detail,
                )
            await acknowledge(assessed.deliveries)
            self._meters.record_step(BatchStep.ACKNOWLEDGE, self._clock.monotonic_s() - stored_s)
            self._offer_exemplars(assessed, written)
            await self._store_vectors_once(assessed.batch.vectors)
        finally:
            self._release(assessed.deliveries)

    def _store_failed(self) -> None:
        self._meters.store_failed()
        self._health.store_failed()

    def _kept_outputs(
        self, prepared: Sequence[PreparedExchange], outputs: Sequence[Answer]
    ) -> dict[int, Mapping[str, Array]] | None:
        """Return the outputs of the reference by number of the exchange, if exemplars of the model are kept."""
        if self._exemplars is None or not prepared or not self._exemplars.wants(prepared[0].exchange.model):
            return None
        return {
            case.stream_sequence: answer
            for case, answer in zip(prepared, outputs, strict=True)
            if not isinstance(answer, QuarantineError)
        }

    def _offer_exemplars(self, assessed: _ToStore, written: Written) -> None:
        if self._exemplars is None or assessed.outputs is None:
            return
        batch = assessed.batch
        compared = [
            compared for index, compared in enumerate(batch.compared) if index not in written.unplaced
        ]
        if compared:
            self._exemplars.offer(
                Offer(
                    compared=compared,
                    outputs=assessed.outputs,
                    without_place=written.without_place,
                    at=batch.at,
                )
            )

    def _compared(self, replayed: _ToCompare) -> _Compared:
        """Compare a batch and assign it to slices."""
        in_progress, outputs = replayed.ready.in_progress, replayed.outputs
        began_s = self._clock.monotonic_s()
        with self._meters.processor_time.part(BatchStep.COMPARE.value):
            outcomes = self._assessor.compare(in_progress, outputs)
        compared_s = self._clock.monotonic_s()
        with self._meters.processor_time.part(BatchStep.SLICES.value):
            batch = self._assessor.record(in_progress, outputs, outcomes, replayed.at)
        return _Compared(
            outcomes=outcomes,
            batch=batch,
            overflow=self._assessor.overflow(),
            over_cap=dict(self._assessor.learned.n_over_cap),
            compare_s=compared_s - began_s,
            slices_s=self._clock.monotonic_s() - compared_s,
        )

    async def _store_vectors_once(self, vectors: Sequence[VectorRow]) -> None:
        if not vectors:
            return
        try:
            async with asyncio.timeout(self._store_limit_s):
                await self._store_vectors(vectors)
        except (RetryError, OperatorError, TimeoutError) as error:
            # The vectors are a sample: the next ones replace them.
            _LOG.warning(
                "dropped %d vectors for learned slices, which later samples replace: %s",
                len(vectors),
                str(error) or "Postgres did not answer in time",
            )
            self._meters.sampled(vectors, stored=False)
        else:
            self._meters.sampled(vectors, stored=True)

    async def _replay_until_answered(self, ready: _ToReplay) -> tuple[list[Answer], float] | None:
        """Replay a batch, waiting while its reference is unreachable; None if `stop` was set meanwhile.

        Returns the answers, and the seconds in which the reference computed them.
        """
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            try:
                return await self._replay(ready)
            except RetryError as error:
                if self._stop.is_set():
                    return None
                pause_s = backoff.next_s()
                _LOG.warning(
                    "model %s: could not replay, trying again in %.1f s: %s",
                    ready.ready_batch.model,
                    pause_s,
                    error,
                    extra=of_model(ready.ready_batch.model),
                )
            await self._stop.wait(pause_s)

    async def _replay(self, ready: _ToReplay) -> tuple[list[Answer], float]:
        in_progress = ready.in_progress
        outputs, took_s = await self._timed_in_thread(
            self._replay_thread, lambda: self._assessor.replay(in_progress), BatchStep.REPLAY
        )
        ended = self._clock.now()
        n_items = 0 if in_progress.assembled is None else in_progress.assembled.n_items
        n_tokens = sum(tokens_read(answer) for answer in outputs if not isinstance(answer, QuarantineError))
        self._queues.charge(ready.ready_batch, took_s if in_progress.prepared else 0.0, n_items, n_tokens)
        if in_progress.assembled is not None:
            self._meters.replayed(in_progress.assembled, took_s)
        self._spans.replayed(in_progress.prepared, _ns(ended - timedelta(seconds=took_s)), _ns(ended))
        return outputs, took_s

    async def _replay_again(self, in_progress: BatchInProgress) -> None:
        """Measure noise on items of earlier batches, if that is due."""
        noise = self._assessor.noise
        if in_progress.prepared and noise.is_due(in_progress.prepared[0]):
            try:
                await self._timed_in_thread(
                    self._replay_thread,
                    lambda: _measure_noise(noise, in_progress.prepared[0]),
                    BatchStep.NOISE,
                )
            except BrokenRuntimeError as error:
                self._on_broken(str(error))
                raise
        self._meters.measured(noise.counts)

    async def _timed_in_thread(
        self, thread: Executor, work: Callable[[], Done], step: BatchStep
    ) -> tuple[Done, float]:
        """Do `work` as `_in_thread`, note how long it took, and return that with its result."""

        def timed() -> tuple[Done, float]:
            began_s = self._clock.monotonic_s()
            with self._meters.processor_time.part(step.value):
                result = work()
            return result, self._clock.monotonic_s() - began_s

        result, took_s = await self._in_thread(thread, timed, step)
        self._meters.record_step(step, took_s)
        return result, took_s

    async def _in_thread(self, thread: Executor, work: Callable[[], Done], step: BatchStep) -> Done:
        """Do `work` in a thread, and return its result.

        The loop is woken once, at the end: a wake-up costs more than most of what is done for a small batch.

        Raises
        ------
        BrokenRuntimeError
            It did not end within `replay_limit_s`; the wait for the thread does not count.
        """
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        timer: asyncio.TimerHandle
        began_s: float | None = None

        def do() -> Done:
            nonlocal began_s
            began_s = self._clock.monotonic_s()
            return work()

        def done(_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(end)

        def end(error: Exception | None = None) -> None:
            if ended.done():
                return
            if error is None:
                ended.set_result(None)
            else:
                ended.set_exception(error)

        def check() -> None:
            nonlocal timer
            took_s = 0.0 if began_s is None else self._clock.monotonic_s() - began_s
            if took_s < self._replay_limit_s:
                timer = loop.call_later(self._replay_limit_s - took_s, check)
            else:
                limit = f"within {self._replay_limit_s:g} s"
                end(BrokenRuntimeError(f"the step `{step}` of a batch did not end {limit}"))

        queued = thread.submit(do)
        queued.add_done_callback(done)
        timer = loop.call_later(self._replay_limit_s, check)
        try:
            await ended
        finally:
            timer.cancel()
            queued.cancel()
        return queued.result()

    @asynccontextmanager
    async def _release_on_failure(self, deliveries: Sequence[Delivery]) -> AsyncIterator[None]:
        """Release the batch if its step fails; a broken reference ends the process."""
        try:
            yield
        except BaseException as error:
            self._release(deliveries)
            if isinstance(error, BrokenRuntimeError):
                self._on_broken(str(error))
            raise

    def _release(self, deliveries: Sequence[Delivery]) -> None:
        self._in_flight.release(deliveries)
        self._meters.left(id(deliveries))
        self._queues.done()


def _measure_noise(noise: NoiseReplays, entry: PreparedExchange) -> None:
    """Measure noise, if it is still due: another batch may have done it first."""
    if noise.is_due(entry):
        noise.replay_due(entry)


def _ns(moment: datetime) -> int:
    return int(moment.timestamp() * 1e6) * 1000


def _is_known_by_number(delivery: Delivery, compared: ComparedExchange) -> bool:
    """Return whether the number of an exchange tells that it was stored before.

    A sidecar that has lost an acknowledgement and its capture process may publish an exchange under a second number. Soon after its
    capture the stream drops that message, because it has the same id.
    """
    late = delivery.streamed_at - compared.exchange.captured_at > _PUBLISHED_WITHIN
    return delivery.numbered is not None and delivery.n_delivered == 1 and not late
