"""What a sidecar does at its end of the stream: numbered exchanges, and tallies of them, without its serving path."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from quantdrift.core.clock import SystemClock
from quantdrift.core.config.schema import Config
from quantdrift.core.process.run import Stop
from quantdrift.core.records import Exchange
from quantdrift.sidecar.capture.process import Tallies
from quantdrift.sidecar.capture.publisher import Publisher
from quantdrift.sidecar.state.counters import Count, Counters, Gauge, Row

DEADLINE_S = 60.0


class Sending:
    """The publisher and the tallies of one sidecar. Use `sending`."""

    def __init__(self, config: Config, source: str) -> None:
        clock, boot = SystemClock(), uuid.uuid4().hex
        self.rows = [Row("default", model.name) for model in config.models]
        counters = Counters.create(1, len(self.rows))
        self._slot = counters.slot(0)
        self.publisher = Publisher(config, self._slot, clock, boot)
        self.tallies = Tallies(
            counters=counters,
            rows=lambda: self.rows,
            unknown={},
            source=source,
            boot=boot,
            queue=lambda: self.publisher.queue,
            clock=clock,
        )

    async def send(self, exchanges: Iterable[Exchange]) -> None:
        """Publish exchanges, and return once the stream has all of them."""
        for exchange in exchanges:
            row = self.rows.index(Row("default", exchange.model))
            self._slot.add(row, Count.OFFERED)
            self._slot.add(row, Count.TAKEN)
            self.publisher.put(exchange, row)
        assert await self.publisher.drained(DEADLINE_S)

    async def tally(self) -> int:
        """Publish the counts; return the number of the tally."""
        async with asyncio.timeout(DEADLINE_S):
            while not await self.tallies.publish():
                await asyncio.sleep(0.02)
        return self._slot.gauge(Gauge.SEQUENCE)


@asynccontextmanager
async def sending(config: Config, source: str = "pod") -> AsyncIterator[Sending]:
    """Run the sending end of a sidecar."""
    made, stop = Sending(config, source), Stop()
    running = asyncio.create_task(made.publisher.run(stop))
    try:
        yield made
    finally:
        stop.set()
        await running
        await made.publisher.close()
