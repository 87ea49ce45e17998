"""What the stages and the reader of a shadow worker do when something in them fails."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from quantdrift.core.clock import SystemClock
from quantdrift.core.codec import encode
from quantdrift.core.config.schema import Config, Shadow
from quantdrift.core.errors import OperatorError, QuarantineReason, RetryError
from quantdrift.core.process.run import Stop
from quantdrift.core.stream.connection import Delivery
from quantdrift.core.telemetry import Telemetry
from quantdrift.models.runtimes.protocol import BrokenRuntimeError
from quantdrift.shadow.pipeline.assess import Assessor, BatchInProgress
from quantdrift.shadow.pipeline.fair_share import FairShare
from quantdrift.shadow.pipeline.in_flight import InFlight
from quantdrift.shadow.pipeline.metrics import Health, ShadowMetrics
from quantdrift.shadow.pipeline.queues import BatchQueues
from quantdrift.shadow.pipeline.reader import FETCH_BYTES, Reader
from quantdrift.shadow.pipeline.stages import Stages, TakenMessage
from quantdrift.shadow.pipeline.store import until_stored
from quantdrift.shadow.pipeline.tracing import NoSpans
from quantdrift.shadow.pipeline.validate import AttributeRules
from quantdrift.shadow.replay.exchange import Answer
from quantdrift.shadow.replay.references import References
from quantdrift.shadow.worker import Pipeline
from quantdrift.storage.comparisons.rows import Quarantined, VectorRow, Written
from quantdrift.storage.comparisons.writer import Writer
from quantdrift.storage.database import Database
from tests.support.shadow.onnx_models import exchange_of, inputs_of

pytestmark = pytest.mark.unit

DEADLINE_S = 30.0
NOWHERE = "postgresql://nobody@127.0.0.1:1/nothing"


class _Delivery:
    """A message that notes how often it was kept alive."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.sequence = 1
        self.n_delivered = 1
        self.numbered = None
        self.streamed_at = datetime.now(UTC)
        self.n_beats = 0
        self.n_returned = 0

    async def nak(self, delay_s: float) -> None:
        """Note that it was given back at once."""
        assert delay_s == 0.0
        self.n_returned += 1

    async def in_progress(self) -> None:
        """Note a sign of life."""
        self.n_beats += 1


def _taken(delivery: _Delivery) -> TakenMessage:
    case = Quarantined(stream_sequence=1, payload=b"", reason=QuarantineReason.DECODE, detail="")
    return TakenMessage(delivery=cast("Delivery", delivery), case=case)


class _Consumer:
    """A stream with a few messages."""

    def __init__(self, deliveries: Sequence[_Delivery]) -> None:
        self._deliveries = list(deliveries)
        self.n_wanted: list[int] = []

    async def unacknowledged(self) -> int:
        """Return that nobody else has anything in hand."""
        return 0

    async def fetch(self, n: int, **_: Any) -> list[_Delivery]:
        """Note how many were wanted, and return all of them."""
        self.n_wanted.append(n)
        return self._deliveries


class _Failing(Assessor):
    """Assesses nothing: it does as it is told."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(Config(), "test")
        self._work = work
        self.counted_by: list[str] = []

    def overflow(self) -> dict[str, int]:
        """Note the thread that counts."""
        self.counted_by.append(threading.current_thread().name)
        return super().overflow()

    def replay(self, in_progress: BatchInProgress) -> list[Answer]:
        """Work, and return nothing."""
        del in_progress
        self._work()
        return []


class _Bench:
    """Stages around `work`, and what they said."""

    def __init__(
        self,
        work: Callable[[], None],
        thread: ThreadPoolExecutor,
        *,
        beside: ThreadPoolExecutor | None = None,
        replay_limit_s: float = DEADLINE_S,
    ) -> None:
        self.in_flight = InFlight()
        self.said: list[str] = []
        clock = SystemClock()
        self.health = Health(clock)
        self.meters = ShadowMetrics(Telemetry("test"), clock)
        self.stop = Stop()
        self.queues: BatchQueues[list[TakenMessage]] = BatchQueues(
            FairShare({}), clock, self.stop, max_in_flight=4
        )
        self.assessor = _Failing(work)
        self.stages = Stages(
            queues=self.queues,
            assessor=self.assessor,
            replay_thread=thread,
            compare_thread=beside or thread,
            writer=Writer(Database(NOWHERE), clock),
            store_vectors=self._keep,
            in_flight=self.in_flight,
            meters=self.meters,
            spans=NoSpans(),
            health=self.health,
            clock=clock,
            stop=self.stop,
            store_limit_s=DEADLINE_S,
            replay_limit_s=replay_limit_s,
            on_broken=self.said.append,
        )

    def reader(
        self, consumer: _Consumer, *, shadow: Shadow | None = None, references: References | None = None
    ) -> Reader:
        """Return a reader of what a consumer delivers."""
        return Reader(
            fetch_bytes=FETCH_BYTES,
            shadow=shadow or Shadow(),
            consumer=consumer,  # type: ignore[arg-type]
            references=references or References((), lambda *_: pytest.fail("loads nothing")),
            model="digits",
            rules=AttributeRules(recorded=frozenset(), hashed=frozenset()),
            queues=self.queues,
            in_flight=self.in_flight,
            meters=self.meters,
            health=self.health,
            clock=SystemClock(),
            stop=Stop(),
        )

    async def replay(self) -> None:
        """Take the batch that was put in as far as its replay."""
        await asyncio.wait_for(self.stages.assemble_one(), DEADLINE_S)
        await asyncio.wait_for(self.stages.replay_one(), DEADLINE_S)

    @staticmethod
    async def _keep(_: Sequence[VectorRow]) -> None:
        """Keep nothing."""


async def test_a_replay_that_hangs_ends_the_worker() -> None:
    """A thread cannot be ended by itself, so the process is told to; the batch is let go and comes again."""
    released = threading.Event()

    def hang() -> None:
        released.wait(DEADLINE_S)

    with ThreadPoolExecutor(1) as thread:
        bench = _Bench(hang, thread, replay_limit_s=0.05)
        await bench.queues.put("digits", [])
        try:
            with pytest.raises(BrokenRuntimeError):
                await bench.replay()
        finally:
            released.set()
        await asyncio.wait_for(bench.queues.wait_drained(), DEADLINE_S)
    assert len(bench.said) == 1
    assert "did not end within 0.05 s" in bench.said[0]


async def test_the_reference_goes_on_to_the_next_batch_by_itself() -> None:
    """Its thread has that one before it has done the first: it does not wait for the loop, which may be busy."""
    begun = [threading.Event(), threading.Event()]
    released = threading.Event()

    def work() -> None:
        first = not begun[0].is_set()
        begun[0 if first else 1].set()
        if first:
            released.wait(DEADLINE_S)

    with ThreadPoolExecutor(1) as thread, ThreadPoolExecutor(1) as beside:
        bench = _Bench(work, thread, beside=beside)
        steps = [step for _, step in Pipeline(queues=bench.queues, stages=bench.stages).steps]
        replaying = [asyncio.ensure_future(step()) for step in steps if step == bench.stages.replay_one]
        for _ in range(2):
            await bench.queues.put("digits", [])
            await asyncio.wait_for(bench.stages.assemble_one(), DEADLINE_S)
        try:
            assert await asyncio.to_thread(begun[0].wait, DEADLINE_S)
            assert not begun[1].is_set()
            released.set()
            assert begun[1].wait(DEADLINE_S)  # the loop stands still meanwhile
        finally:
            released.set()
        await asyncio.wait_for(bench.stages.compare_one(), DEADLINE_S)
        await asyncio.wait_for(asyncio.gather(*replaying), DEADLINE_S)


async def test_a_broken_reference_ends_the_worker() -> None:
    """Nothing of the batch is set aside or acknowledged."""

    def die() -> None:
        raise BrokenRuntimeError("CUDA is gone")

    with ThreadPoolExecutor(1) as thread:
        bench = _Bench(die, thread)
        await bench.queues.put("digits", [])
        with pytest.raises(BrokenRuntimeError):
            await bench.replay()
        await asyncio.wait_for(bench.queues.wait_drained(), DEADLINE_S)
    assert bench.said == ["CUDA is gone"]


async def test_what_is_counted_is_read_by_the_thread_that_counts() -> None:
    """Another track may be putting items of a new model into slices meanwhile."""
    with ThreadPoolExecutor(1, thread_name_prefix="beside") as thread:
        bench = _Bench(lambda: None, thread)
        await bench.queues.put("digits", [])
        await bench.replay()
        await asyncio.wait_for(bench.stages.compare_one(), DEADLINE_S)
    assert bench.assessor.counted_by == ["beside_0"]


async def test_a_reference_that_is_away_is_waited_for() -> None:
    """The batch stays in hand, alive on the stream, and is stored when the server is back."""
    tries: list[None] = []

    def away() -> None:
        tries.append(None)
        if len(tries) < 3:
            raise RetryError("the server is away")

    with ThreadPoolExecutor(1) as thread:
        bench = _Bench(away, thread)
        delivery = _Delivery(b"")
        bench.in_flight.add(cast("Delivery", delivery))
        await bench.queues.put("digits", [_taken(delivery)])
        await bench.replay()
        await bench.in_flight.keep_alive()
    assert len(tries) == 3
    assert delivery.n_beats == 1  # still in hand: it is to be stored
    assert not bench.said


async def test_a_batch_whose_reference_stays_away_is_given_back_at_the_end() -> None:
    """Another worker may have it at once."""

    def away() -> None:
        bench.stop.set()
        raise RetryError("the server is away")

    with ThreadPoolExecutor(1) as thread:
        bench = _Bench(away, thread)
        delivery = _Delivery(b"")
        bench.in_flight.add(cast("Delivery", delivery))
        await bench.queues.put("digits", [_taken(delivery)])
        await bench.replay()
        await asyncio.wait_for(bench.queues.wait_drained(), DEADLINE_S)
        await bench.in_flight.keep_alive()
    assert (delivery.n_beats, delivery.n_returned) == (0, 1)


async def test_a_message_that_the_reader_fails_on_is_released() -> None:
    """An error in our own reading keeps none of the messages alive for ever: they come again, one by one."""

    class Broken(References):
        def find(self, model: str, version: str) -> None:
            raise ArithmeticError(f"{model} {version}")

    deliveries = [_Delivery(b"no exchange"), _Delivery(encode(exchange_of(inputs_of(1))))]
    with ThreadPoolExecutor(1) as thread:
        bench = _Bench(lambda: None, thread)
        reader = bench.reader(
            _Consumer(deliveries), references=Broken((), lambda *_: pytest.fail("loads nothing"))
        )
        with pytest.raises(ArithmeticError):
            await reader.read_once()
    await bench.in_flight.keep_alive()
    assert [delivery.n_beats for delivery in deliveries] == [0, 0]


@pytest.mark.parametrize(("delay_s", "n_queued"), [(0.5, 1), (5.0, 0)])
async def test_a_batch_fills_for_longer_than_a_fetch_takes(delay_s: float, n_queued: int) -> None:
    """A fetch ends after a second at the latest; with a longer `batch_delay_s` the batch waits for more."""
    with ThreadPoolExecutor(1) as thread:
        bench = _Bench(lambda: None, thread)
        reader = bench.reader(
            _Consumer([_Delivery(encode(exchange_of(inputs_of(1))))]), shadow=Shadow(batch_delay_s=delay_s)
        )
        await reader.read_once()
        taking = asyncio.create_task(bench.queues.take())
        for _ in range(10):
            await asyncio.sleep(0)
        assert taking.done() == bool(n_queued)
        taking.cancel()


@pytest.mark.parametrize(("delay_s", "n_wanted"), [(0.1, 64), (0.5, 250), (5.0, 512)])
async def test_a_batch_of_a_quick_reference_is_what_it_replays_in_half_of_the_delay(
    delay_s: float, n_wanted: int
) -> None:
    """The reference takes a millisecond for an item: a batch has at least `batch_items` of them, and at most 512."""
    with ThreadPoolExecutor(1) as thread:
        bench = _Bench(lambda: None, thread)
        consumer = _Consumer([])
        reader = bench.reader(consumer, shadow=Shadow(batch_delay_s=delay_s))
        await bench.queues.put("digits", [])
        ready, _ = await bench.queues.take()
        bench.queues.charge(ready, 0.064, 64)
        bench.queues.done()
        await reader.read_once()
        assert consumer.n_wanted == [n_wanted]


@pytest.mark.parametrize("error", [RetryError("away"), OperatorError("the password was changed")])
async def test_storing_waits_for_whatever_can_be_mended(error: Exception) -> None:
    """Neither a server that is away nor a wrong password is a sample's fault: the same batch is tried again."""
    outcomes: list[Exception | Written] = [error, error, Written(n_rows=1)]

    async def write() -> Written:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    failures: list[None] = []
    stored: Awaitable[Written | None] = until_stored(
        write, Stop(), limit_s=DEADLINE_S, failed=lambda: failures.append(None)
    )
    assert await asyncio.wait_for(stored, DEADLINE_S) == Written(n_rows=1)
    assert len(failures) == 2
