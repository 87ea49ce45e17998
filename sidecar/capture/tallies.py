"""Tallies: the exact counts of the whole sidecar, published as totals since its start.

Because they are totals, a lost message does no harm.
"""

import logging
from collections.abc import Callable, Sequence

from quantdrift.core.clock import Clock
from quantdrift.core.codec import encode
from quantdrift.core.errors import QuantdriftError
from quantdrift.core.process.run import Stop
from quantdrift.core.records import Tally
from quantdrift.core.stream.connection import Queue
from quantdrift.sidecar.state.counters import Counters, Gauge, Row

_LOG = logging.getLogger(__name__)


class Tallies:
    """Reads the shared counters and publishes them.

    The sequence number is one of the counters, so that a restarted capture process continues it.

    Parameters
    ----------
    counters
        Counters of all processes of this sidecar.
    rows
        Returns the stratum and model of each row.
    source, boot
        This sidecar and its start.
    queue
        Returns the connection to NATS, or None while there is none.
    clock
        Stamps the tallies.
    """

    def __init__(
        self,
        *,
        counters: Counters,
        rows: Callable[[], Sequence[Row]],
        source: str,
        boot: str,
        queue: Callable[[], Queue | None],
        clock: Clock,
    ) -> None:
        self._counters = counters
        self._slot = counters.slot(counters.n_slots - 1)
        self._rows = rows
        self._source = source
        self._boot = boot
        self._queue = queue
        self._clock = clock

    def take(self) -> Tally:
        """Return the present counts with the next sequence number."""
        self._slot.adjust(Gauge.SEQUENCE)
        return Tally(
            source=self._source,
            boot=self._boot,
            sequence=self._slot.gauge(Gauge.SEQUENCE),
            at=self._clock.now(),
            strata=self._counters.strata(self._rows()),
            blind_connections=self._counters.gauge(Gauge.BLIND),
        )

    async def publish(self) -> bool:
        """Publish the counts once; return whether the stream has acknowledged them."""
        queue = self._queue()
        if queue is None:
            return False
        tally = self.take()
        try:
            await queue.publish_tally(tally.source, tally.boot, tally.sequence, encode(tally))
        except QuantdriftError as error:
            _LOG.info(
                "tally %d was not published, the next one includes its counts: %s", tally.sequence, error
            )
            return False
        return True

    async def run(self, interval_s: float, stop: Stop) -> None:
        """Publish every `interval_s` until `stop`."""
        while not await stop.wait(interval_s):
            await self.publish()
