"""Where batches wait for their turn: one of each model, so that none waits behind another model's flood."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from quantdrift.core.clock import Clock
from quantdrift.core.process.run import Stop
from quantdrift.shadow.pipeline.fair_share import FairShare, ReadyBatch

Batch = TypeVar("Batch")
_LONGEST_S = 1.0  # how long the end may go unseen


class BatchQueues(Generic[Batch]):
    """Hands batches out by turns. All of it belongs to one event loop.

    Parameters
    ----------
    turns
        Decides whose batch is next.
    clock
        For budgets.
    stop
        Once the end is asked for, budgets hold nothing up any more.
    most_in_hand
        Batches that are handed out and not done with: above it nobody has a turn.
    """

    def __init__(self, turns: FairShare, clock: Clock, stop: Stop, *, most_in_hand: int) -> None:
        self._turns = turns
        self._clock = clock
        self._stop = stop
        self._most_in_hand = most_in_hand
        self._waiting: dict[str, Batch] = {}
        self._n_in_hand = 0
        self._only: str | None = None
        self._suspecting = asyncio.Lock()
        self._changed = asyncio.Event()

    async def put(self, lane: str, batch: Batch) -> None:
        """Hand in a batch; waits while the one before it in its lane is waiting too."""
        await self._until(lambda: lane not in self._waiting)
        self._waiting[lane] = batch
        self._turns.put(lane)
        self._note()

    async def take(self) -> tuple[ReadyBatch, Batch]:
        """Return the next batch; it is in hand until `settle`."""
        while (turn := self._next()) is None:
            wait_s = self._turns.wait_s(self._clock.monotonic_s())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(wait_s, _LONGEST_S) if wait_s else None):
                    await self._something()
        self._n_in_hand += 1
        batch = self._waiting.pop(turn.lane)
        self._note()
        return turn, batch

    def charge(self, turn: ReadyBatch, spent_s: float) -> None:
        """Tell how long a batch was replayed."""
        self._turns.settle(turn, spent_s)

    def done(self) -> None:
        """Let go of a batch that was in hand."""
        self._n_in_hand -= 1
        if not self._n_in_hand and not self._waiting:
            self._turns.rest()
        self._note()

    async def drained(self) -> None:
        """Wait until no batch is in hand or waits; under `alone` those of other lanes may wait."""
        await self._until(lambda: not self._n_in_hand and not self._candidates())

    @asynccontextmanager
    async def suspecting(self) -> AsyncIterator[None]:
        """Let one reader at a time fetch what may have ended a worker: what others held meanwhile would end with it."""
        async with self._suspecting:
            yield

    @asynccontextmanager
    async def alone(self, lane: str) -> AsyncIterator[None]:
        """Hand out no batch of any other lane meanwhile, whatever budgets say: others wait. Only while `suspecting`."""
        self._only = lane
        try:
            yield
        finally:
            self._only = None
            self._note()

    def _candidates(self) -> list[str]:
        return [lane for lane in self._waiting if self._only in {None, lane}]

    def _next(self) -> ReadyBatch | None:
        if self._n_in_hand >= self._most_in_hand:
            return None
        within = self._only is None and not self._stop.is_set()
        return self._turns.take(self._clock.monotonic_s(), among=self._candidates(), within=within)

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._something()

    async def _something(self) -> None:
        await self._changed.wait()

    def _note(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
