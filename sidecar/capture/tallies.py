"""Tallies: the exact counts of the whole sidecar, published as totals since its start.

Because they are totals, a lost message does no harm. The last totals of an earlier start, which was killed or ended while
NATS was away, are published as well.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from quantdrift.core.clock import Clock
from quantdrift.core.codec import encode
from quantdrift.core.errors import QuantdriftError
from quantdrift.core.process.run import Stop
from quantdrift.core.process_state import StateReports
from quantdrift.core.records import ModelCount, StratumCount, Tally
from quantdrift.core.stream.connection import Queue
from quantdrift.sidecar.state.counters import Counters, Gauge, Row
from quantdrift.sidecar.state.counts_file import EndedCounts

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
    unknown
        Exchanges of models that are not configured, by header stratum and name; it grows.
    source, boot
        This sidecar and its start.
    queue
        Returns the connection to NATS, or None while there is none.
    clock
        Stamps the tallies.
    ended
        Returns the counts of earlier starts that are to be published.
    states
        Configuration and pause of this sidecar, for the audit; None: they are not reported.
    """

    def __init__(
        self,
        *,
        counters: Counters,
        rows: Callable[[], Sequence[Row]],
        unknown: Mapping[tuple[str, str], int],
        source: str,
        boot: str,
        queue: Callable[[], Queue | None],
        clock: Clock,
        ended: Callable[[], Iterable[EndedCounts]] = tuple,
        states: StateReports | None = None,
    ) -> None:
        self._counters = counters
        self._slot = counters.slot(counters.n_slots - 1)
        self._rows = rows
        self._unknown = unknown
        self._source = source
        self._boot = boot
        self._queue = queue
        self._clock = clock
        self._ended = ended
        self._states = states

    def take(self, *, final: bool = False) -> Tally:
        """Return the present counts with the next sequence number.

        Parameters
        ----------
        final
            Whether no other process of this sidecar is left, and nothing more will be published.
        """
        self._slot.adjust(Gauge.SEQUENCE)
        return Tally(
            source=self._source,
            boot=self._boot,
            sequence=self._slot.gauge(Gauge.SEQUENCE),
            at=self._clock.now(),
            strata=tuple(
                self._with_unknown(stratum) for stratum in self._counters.strata(self._rows(), ended=final)
            ),
            blind_connections=self._counters.gauge(Gauge.BLIND),
            final=final,
            state=None if self._states is None else self._states.take(),
            relay_cpu_s=self._counters.gauge(Gauge.RELAY_CPU_US) / 1e6,
        )

    def _with_unknown(self, count: StratumCount) -> StratumCount:
        named = {
            name: msgspec.structs.replace(count.models.get(name) or ModelCount(taken=0), unknown=n)
            for (stratum, name), n in self._unknown.items()
            if stratum == count.stratum
        }
        return msgspec.structs.replace(count, models=count.models | named) if named else count

    async def publish(self, *, final: bool = False) -> bool:
        """Publish the counts once; return whether the stream has acknowledged them. Parameter as for `take`."""
        queue = self._queue()
        if queue is None:
            return False
        return await self._publish(queue, self.take(final=final))

    async def publish_ended(self) -> None:
        """Publish the last counts of earlier starts, and forget those that the stream has acknowledged."""
        queue = self._queue()
        if queue is None:
            return
        for counts in self._ended():
            try:
                tally = counts.tally(self._clock)
            except (OSError, ValueError) as error:
                _LOG.warning("removed the unreadable counts of an earlier start, %s: %s", counts.path, error)
                counts.remove()
                continue
            if not await self._publish(queue, tally):
                return
            counts.remove()
            _LOG.info(
                "published the last counts of this sidecar's start %s, which ended without doing so: %d requests sampled",
                tally.boot,
                sum(stratum.taken for stratum in tally.strata),
            )

    async def _publish(self, queue: Queue, tally: Tally) -> bool:
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
            if await self.publish():
                await self.publish_ended()
