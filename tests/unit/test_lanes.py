"""Where batches wait for their turn."""

import asyncio

import pytest

from quantdrift.core.clock import SystemClock
from quantdrift.core.process.run import Stop
from quantdrift.shadow.pipeline.fair_share import FairShare, ShareTerms
from quantdrift.shadow.pipeline.queues import BatchQueues

pytestmark = pytest.mark.unit

DEADLINE_S = 30.0


def _lanes(stop: Stop | None = None, **terms: ShareTerms) -> BatchQueues[str]:
    return BatchQueues(FairShare(terms), SystemClock(), stop or Stop(), most_in_hand=2)


async def _hands_out(lanes: BatchQueues[str], spent_s: float = 1.0) -> str:
    turn, batch = await asyncio.wait_for(lanes.take(), DEADLINE_S)
    lanes.charge(turn, spent_s)
    lanes.done()
    return batch


async def test_a_flood_delays_another_model_by_a_batch() -> None:
    """One batch of a lane waits here, and the rest of the flood behind it."""
    lanes = _lanes()

    async def flood() -> None:
        for number in range(10):
            await lanes.put("flood", f"flood {number}")

    flooding = asyncio.create_task(flood())
    first = await _hands_out(lanes)
    await lanes.put("small", "small")
    handed = [await _hands_out(lanes) for _ in range(2)]
    assert first == "flood 0"
    assert "small" in handed
    for _ in range(8):
        await _hands_out(lanes)
    await asyncio.wait_for(flooding, DEADLINE_S)
    await asyncio.wait_for(lanes.drained(), DEADLINE_S)


async def test_alone_means_that_no_other_lane_is_handed_out() -> None:
    """Whoever drains the lanes waits for what is in hand, and for nobody's next batch."""
    lanes = _lanes()
    await lanes.put("other", "before")
    _, before = await lanes.take()
    async with lanes.suspecting(), lanes.alone("mine"):
        draining = asyncio.create_task(lanes.drained())
        await lanes.put("other", "after")
        lanes.done()
        await asyncio.wait_for(draining, DEADLINE_S)
        await lanes.put("mine", "alone")
        alone = await _hands_out(lanes)
        await asyncio.wait_for(lanes.drained(), DEADLINE_S)
        taking = asyncio.create_task(_hands_out(lanes))
    assert (before, alone, await taking) == ("before", "alone", "after")


async def test_a_budget_holds_nothing_up_at_the_end() -> None:
    """What waits for its budget is replayed when the process is to end."""
    stop = Stop()
    lanes = _lanes(stop, capped=ShareTerms(max_ratio=0.001))
    await lanes.put("capped", "first")
    await _hands_out(lanes, spent_s=60.0)
    await lanes.put("capped", "second")
    await lanes.put("free", "third")
    assert await _hands_out(lanes) == "third"
    stop.set()
    assert await _hands_out(lanes) == "second"


async def test_no_more_is_handed_out_than_may_be_in_hand() -> None:
    """With Postgres away nothing is done with, and what waits stays where it is."""
    lanes = _lanes()
    for name in ("a", "b", "c"):
        await lanes.put(name, name)
    handed = [(await asyncio.wait_for(lanes.take(), DEADLINE_S))[1] for _ in range(2)]
    third = asyncio.create_task(lanes.take())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not third.done()
    lanes.done()
    handed.append((await asyncio.wait_for(third, DEADLINE_S))[1])
    assert sorted(handed) == ["a", "b", "c"]
