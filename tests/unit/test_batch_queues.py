"""The queues in which batches of several models wait for a replay."""

import asyncio

import pytest

from quantdrift.core.clock import SystemClock
from quantdrift.core.process.run import Stop
from quantdrift.shadow.pipeline.fair_share import FairShare, ShareTerms
from quantdrift.shadow.pipeline.queues import BatchQueues

pytestmark = pytest.mark.unit

DEADLINE_S = 30.0


def _queues(stop: Stop | None = None, **terms: ShareTerms) -> BatchQueues[str]:
    return BatchQueues(FairShare(terms), SystemClock(), stop or Stop(), max_in_flight=2)


async def _hands_out(queues: BatchQueues[str], spent_s: float = 1.0) -> str:
    ready, batch = await asyncio.wait_for(queues.take(), DEADLINE_S)
    queues.charge(ready, spent_s, 1)
    queues.done()
    return batch


async def test_a_flood_delays_another_model_by_a_batch() -> None:
    """One batch of a lane waits here, and the rest of the flood behind it."""
    queues = _queues()

    async def flood() -> None:
        for number in range(10):
            await queues.put("flood", f"flood {number}")

    flooding = asyncio.create_task(flood())
    first = await _hands_out(queues)
    await queues.put("small", "small")
    handed = [await _hands_out(queues) for _ in range(2)]
    assert first == "flood 0"
    assert "small" in handed
    for _ in range(8):
        await _hands_out(queues)
    await asyncio.wait_for(flooding, DEADLINE_S)
    await asyncio.wait_for(queues.wait_drained(), DEADLINE_S)


async def test_alone_means_that_no_other_lane_is_handed_out() -> None:
    """Whoever drains the lanes waits for what is in hand, and for nobody's next batch."""
    queues = _queues()
    await queues.put("other", "before")
    _, before = await queues.take()
    async with queues.redelivery(), queues.only("mine"):
        draining = asyncio.create_task(queues.wait_drained())
        await queues.put("other", "after")
        queues.done()
        await asyncio.wait_for(draining, DEADLINE_S)
        await queues.put("mine", "alone")
        alone = await _hands_out(queues)
        await asyncio.wait_for(queues.wait_drained(), DEADLINE_S)
        taking = asyncio.create_task(_hands_out(queues))
    assert (before, alone, await taking) == ("before", "alone", "after")


async def test_a_budget_holds_nothing_up_at_the_end() -> None:
    """What waits for its budget is replayed when the process is to end."""
    stop = Stop()
    queues = _queues(stop, capped=ShareTerms(max_ratio=0.001))
    await queues.put("capped", "first")
    await _hands_out(queues, spent_s=60.0)
    await queues.put("capped", "second")
    await queues.put("free", "third")
    assert await _hands_out(queues) == "third"
    stop.set()
    assert await _hands_out(queues) == "second"


async def test_no_more_is_handed_out_than_may_be_in_hand() -> None:
    """With Postgres away nothing is done with, and what waits stays where it is."""
    queues = _queues()
    for name in ("a", "b", "c"):
        await queues.put(name, name)
    handed = [(await asyncio.wait_for(queues.take(), DEADLINE_S))[1] for _ in range(2)]
    third = asyncio.create_task(queues.take())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not third.done()
    queues.done()
    handed.append((await asyncio.wait_for(third, DEADLINE_S))[1])
    assert sorted(handed) == ["a", "b", "c"]


async def test_batches_grow_where_the_reference_is_quick() -> None:
    """How many items fit into a time is learned from what was replayed, and not known before."""
    queues = _queues()
    assert queues.items_within("digits", 0.05) == 0
    await queues.put("digits", "one")
    ready, _ = await queues.take()
    queues.charge(ready, 0.064, 64)
    assert queues.items_within("digits", 0.05) == 50
    queues.done()
