"""The queues of batches to replay: one waiting batch for each model, so that no model waits behind another's flood."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from quantdrift.core.clock import Clock
from quantdrift.core.process.run import Stop
from quantdrift.shadow.pipeline.fair_share import FairShare, ReadyBatch

Batch = TypeVar("Batch")
_LONGEST_S = 1.0  # how long a stop request may go unnoticed


class BatchQueues(Generic[Batch]):
    """The queues of all models, served in the order that `fair_share` decides. One event loop uses them.

    Parameters
    ----------
    stop
        Once it is set, budgets no longer delay a batch.
    max_in_flight
        Most batches that are taken and not done; further ones wait.
    """

    def __init__(self, fair_share: FairShare, clock: Clock, stop: Stop, *, max_in_flight: int) -> None:
        self._fair_share = fair_share
        self._clock = clock
        self._stop = stop
        self._max_in_flight = max_in_flight
        self._waiting: dict[str, Batch] = {}
        self._n_in_flight = 0
        self._only: str | None = None
        self._redelivery = asyncio.Lock()
        self._changes: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    async def put(self, model: str, batch: Batch) -> None:
        """Add a batch; waits while an earlier batch of the model is waiting."""
        await self._wait_until(lambda: model not in self._waiting)
        self._waiting[model] = batch
        self._fair_share.put(model)
        self._notify()

    async def take(self) -> tuple[ReadyBatch, Batch]:
        """Return the next batch; it is in flight until `done`."""
        while (ready := self._next()) is None:
            wait_s = self._fair_share.wait_s(self._clock.monotonic_s())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(wait_s, _LONGEST_S) if wait_s else None):
                    await self._wait_for_change(self._may_serve)
        self._n_in_flight += 1
        batch = self._waiting.pop(ready.model)
        self._notify()
        return ready, batch

    def charge(self, ready: ReadyBatch, spent_s: float, n_items: int, n_tokens: int = 0) -> None:
        """Charge the model for the time that the replay of its batch took, and for the tokens that were read."""
        self._fair_share.correct_charge(ready, spent_s, n_items, n_tokens)

    def items_within(self, model: str, seconds: float) -> int:
        """Return about how many items of `model` are replayed in so much time; 0 while nothing is known."""
        return self._fair_share.items_within(model, seconds)

    def done(self) -> None:
        """Note that a taken batch is finished."""
        self._n_in_flight -= 1
        if not self._n_in_flight and not self._waiting:
            self._fair_share.reset()
        self._notify()

    async def wait_drained(self) -> None:
        """Wait until no batch waits or is in flight; within `only`, batches of other models may wait."""
        await self._wait_until(lambda: not self._n_in_flight and not self._candidates())

    @asynccontextmanager
    async def redelivery(self) -> AsyncIterator[None]:
        """Lock for fetching messages that were delivered before, which may have crashed a worker.

        One reader at a time holds it: a message that another reader fetched meanwhile would be lost in the same crash.
        """
        async with self._redelivery:
            yield

    @asynccontextmanager
    async def only(self, model: str) -> AsyncIterator[None]:
        """Serve this model alone, regardless of budgets; others wait. Call it only within `redelivery`."""
        self._only = model
        try:
            yield
        finally:
            self._only = None
            self._notify()

    def _candidates(self) -> list[str]:
        return [model for model in self._waiting if self._only in {None, model}]

    def _next(self) -> ReadyBatch | None:
        if self._n_in_flight >= self._max_in_flight:
            return None
        keep_budgets = self._only is None and not self._stop.is_set()
        return self._fair_share.take(
            self._clock.monotonic_s(), among=self._candidates(), keep_budgets=keep_budgets
        )

    def _may_serve(self) -> bool:
        return self._n_in_flight < self._max_in_flight and bool(self._candidates())

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._wait_for_change(condition)

    async def _wait_for_change(self, condition: Callable[[], bool]) -> None:
        """Wait for the next change after which `condition` is true."""
        waiting = condition, asyncio.get_running_loop().create_future()
        self._changes.append(waiting)
        try:
            await waiting[1]
        finally:
            self._changes.remove(waiting)

    def _notify(self) -> None:
        # The readers of all other models wait as well: each change would wake them all.
        for condition, changed in self._changes:
            if not changed.done() and condition():
                changed.set_result(None)
